"""Sources of text that lie, fail or are silent: the next one is asked, and nothing wrong is read."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer.corpus.fetched import FetchTimeouts
from peer.corpus.mirrors import Mirrors, only_public
from protocol.errors import RemoteError, UsageError
from tests.support import web_server
from tests.support.text_swarm import STEP, Noise, Reader, TextSwarm, given, write_noise
from tests.support.web_server import Request, Server, certificate, head, here, serving

DEADLINE = 120.0
BRIEF = 0.5
"""Seconds after which a silent source counts as gone, in tests of that; elsewhere machines may be slow."""
CHUNK = 8192
"""Sequences of a chunk."""


def patience(silent: bool) -> FetchTimeouts:
    return FetchTimeouts(retry=0.05, hopeless=DEADLINE, silence=BRIEF if silent else DEADLINE)


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Noise:
    """Three chunks."""
    return write_noise(tmp_path_factory.mktemp("noise"), 20_000)


async def read(swarm: TextSwarm, reader: Reader, steps: int = 20) -> None:
    """A round in each of the three chunks."""
    for first in range(0, 3 * CHUNK, CHUNK):
        reader.text.expect([range(first, first + given(steps))])
        for step in range(steps):
            at = range(first + step * STEP, first + (step + 1) * STEP)
            np.testing.assert_array_equal(await reader.text.sequences(at), swarm.slots(at))


# --- nodes and peers


async def test_text_comes_from_whoever_operates_the_run_now(noise: Noise, tmp_path: Path) -> None:
    """The node that a peer began with is gone for good; another one was appointed meanwhile."""
    async with TextSwarm(noise, tmp_path, nodes=2) as swarm:
        first, second = (node.transport for node in swarm.nodes)
        swarm.operating = [first.peer_id]
        reader = await swarm.start(patience=patience(False))
        at = range(STEP)
        reader.text.expect([at])
        np.testing.assert_array_equal(await reader.text.sequences(at), swarm.slots(at))
        assert swarm.nodes[1].sent == 0
        swarm.operating = [second.peer_id]
        await first.aclose()
        at = range(CHUNK, CHUNK + STEP)
        reader.text.expect([at])
        np.testing.assert_array_equal(await reader.text.sequences(at), swarm.slots(at))
        assert swarm.nodes[1].sent > 0


async def wrong_bytes(index: int, data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1]) if index >= 0 else data


async def wrong_digests(index: int, data: bytes) -> bytes:
    return bytes(len(data)) if index < 0 else data


async def half(index: int, data: bytes) -> bytes:
    return data[: len(data) // 2]


async def nothing(index: int, data: bytes) -> bytes:
    return b""


async def silence(index: int, data: bytes) -> bytes:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def too_much(index: int, data: bytes) -> bytes:
    return data + bytes(200_000)


async def no_bytes(index: int, data: bytes) -> Any:
    return ["nothing", {"data": 7}]


async def breaks_off(index: int, data: bytes) -> bytes:
    raise RemoteError("", "it has had enough")


SPOILS = [wrong_bytes, wrong_digests, half, nothing, silence, too_much, no_bytes, breaks_off]
LIES = (wrong_bytes, wrong_digests, half)


@pytest.mark.parametrize("spoil", SPOILS)
async def test_a_node_that_does_not_give_what_it_should_is_passed_over(
    noise: Noise, tmp_path: Path, spoil: Callable[[int, bytes], Awaitable[bytes]]
) -> None:
    async with TextSwarm(noise, tmp_path, nodes=3) as swarm:
        for node in swarm.nodes[:2]:
            node.spoil = spoil
        reader = await swarm.start(patience=patience(spoil is silence))
        await read(swarm, reader)
        told = "\n".join(reader.warnings)
        assert len(reader.warnings) <= 2, told
        if spoil in LIES:
            assert "sent wrong" in told
            assert "it is not asked again for 10 minutes" in told
        elif spoil is not nothing:
            assert "others are asked" in told


@pytest.mark.parametrize("spoil", SPOILS)
async def test_peers_that_have_it_may_lie(
    noise: Noise, tmp_path: Path, spoil: Callable[[int, bytes], Awaitable[bytes]]
) -> None:
    """The node sends a third peer to the two that it gave the text to; both do not give it."""
    async with TextSwarm(noise, tmp_path) as swarm:
        for _ in range(2):
            await read(swarm, liar := await swarm.start(), 5)
            liar.spoil = spoil
        reader = await swarm.start(patience=patience(spoil is silence))
        await read(swarm, reader, 5)
        assert len(reader.warnings) == (2 if spoil in LIES else 0), reader.warnings
        assert max(swarm.copies()) == 3, "the node is asked in the end"


async def test_who_waits_is_not_held_up_by_what_is_fetched_ahead(noise: Noise, tmp_path: Path) -> None:
    """All that is fetched ahead hangs; the held-out part comes all the same."""
    async with TextSwarm(noise, tmp_path) as swarm:
        held = noise.index.held_out_chunk().size // 32768
        hanging: set[int] = set()

        async def hang(index: int, data: bytes) -> bytes:
            if index > held:
                hanging.add(index)
                await asyncio.get_running_loop().create_future()
            return data

        swarm.nodes[0].spoil = hang
        reader = await swarm.start(patience=FetchTimeouts(silence=DEADLINE))
        reader.text.expect([range(16 * STEP, 900 * STEP)])
        while len(hanging) < 4:
            await asyncio.sleep(0.001)
        assert (await reader.text.held_out(8)).shape == (8, noise.index.sequence + 1)


async def test_nobody_has_it(noise: Noise, tmp_path: Path) -> None:
    async with TextSwarm(noise, tmp_path) as swarm:
        reader = await swarm.start(patience=FetchTimeouts(retry=0.05, hopeless=1.0))
        swarm.nodes[0].spoil = nothing
        with pytest.raises(RemoteError, match="does not have it"):
            await reader.text.sequences(range(STEP))
        assert len(reader.warnings) == 1
        assert "nobody gives what is to be read" in reader.warnings[0]
        swarm.nodes[0].spoil = honest
        np.testing.assert_array_equal(await reader.text.sequences(range(STEP)), swarm.slots(range(STEP)))


async def honest(index: int, data: bytes) -> bytes:
    return data


async def test_an_index_that_is_another_is_refused(noise: Noise, tmp_path: Path) -> None:
    async with TextSwarm(noise, tmp_path, nodes=0) as swarm:
        with pytest.raises(RemoteError, match="nobody gives the index of the run's corpus"):
            await swarm.start()


# --- mirrors


async def not_found(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(head("404 Not Found", 0))


async def busy(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(head("429 Too Many Requests", 0, "Retry-After: 300"))


async def busy_for_ever(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(head("503 Service Unavailable", 0, "Retry-After: 99999999999999999999"))


async def broken(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(head("500 Internal Server Error", 0))


async def breaks_off_in_the_middle(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
    start, end = request.span or (0, len(data))
    line = f"Content-Range: bytes {start}-{end - 1}/{len(data)}"
    writer.write(head("206 Partial Content", end - start, line) + data[start : (start + end) // 2])
    writer.close()


async def half_a_range(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
    start, end = request.span or (0, len(data))
    await web_server.honest(Request(request.path, (start, (start + end) // 2)), data, writer)


async def other_bytes(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
    await web_server.honest(request, bytes(len(data)), writer)


async def other_range(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
    start, end = request.span or (0, len(data))
    await web_server.honest(Request(request.path, (start + 1, end + 1)), data, writer)


async def whole_files(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
    await web_server.honest(Request(request.path, None), data, writer)


async def endless(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
        await writer.drain()


async def says_nothing(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
    await asyncio.get_running_loop().create_future()


async def no_http(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(bytes(range(256)))
    writer.close()


async def in_circles(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(head("302 Found", 0, f"Location: {request.path}"))


async def to_plain_http(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(head("302 Found", 0, "Location: http://127.0.0.1:1/x"))


async def to_a_file(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(head("302 Found", 0, "Location: file:///etc/passwd"))


async def to_a_local_address(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(head("302 Found", 0, "Location: https://169.254.169.254/latest/meta-data"))


MIRRORS = [
    not_found, busy, busy_for_ever, broken, breaks_off_in_the_middle, half_a_range, other_bytes, other_range,
    whole_files, endless, says_nothing, no_http, in_circles, to_plain_http, to_a_file,
    to_a_local_address,
]  # fmt: skip


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    return certificate(tmp_path_factory.mktemp("certificate"))


@pytest.mark.parametrize("behave", MIRRORS)
async def test_a_mirror_that_does_not_give_what_it_should_is_passed_over(
    noise: Noise, tmp_path: Path, contexts: tuple[ssl.SSLContext, ssl.SSLContext], behave: web_server.Behave
) -> None:
    """No node has the text; one of two mirrors does."""
    bad, good = Server(noise.folder, behave), Server(noise.folder, web_server.honest)
    async with serving(bad, contexts[0]), serving(good, contexts[0]):
        addresses = [bad.address, good.address]
        async with TextSwarm(noise, tmp_path, nodes=0, mirrors=addresses) as swarm:
            found = patience(behave is says_nothing)
            mirrors = Mirrors(contexts[1], silence=found.silence, resolve=here)
            reader = await swarm.start(mirrors=mirrors, patience=found)
            asked = len(bad.requests)
            await read(swarm, reader, 10)
            told = [line for line in reader.warnings if bad.address in line]
            assert told or behave in (whole_files, half_a_range), reader.warnings
            assert len(told) <= 2, "once for the index, once for the text"
            assert not any(good.address in line for line in reader.warnings), reader.warnings
            if behave in (busy, busy_for_ever):
                assert len(bad.requests) - asked == 1, "it is left alone as long as it asked for"
            assert len(bad.requests) - asked <= 12


async def test_a_mirror_alone_gives_everything(
    noise: Noise, tmp_path: Path, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    """Behind a redirect, as the hub does it."""

    async def moved(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
        if request.path.startswith("/datasets/"):
            writer.write(head("307 Temporary Redirect", 0, f"Location: /cdn{request.path}"))
        else:
            await web_server.honest(request, data, writer)

    hub = Server(noise.folder, moved, "/datasets/us/text/resolve/v1/corpus/")
    async with serving(hub, contexts[0]):
        mirror = "hf://datasets/us/text@v1/corpus"
        async with TextSwarm(noise, tmp_path, nodes=0, mirrors=[mirror]) as swarm:
            endpoint = f"https://{web_server.NAME}:{hub.port}"
            reader = await swarm.start(mirrors=Mirrors(contexts[1], endpoint, resolve=here), patience=patience(False))
            await read(swarm, reader, 30)
            assert not [line for line in reader.warnings if "mirror" in line]
            spans = [request.span for request in hub.requests if request.span is not None]
            assert max(end - start for start, end in spans) > 3 * 32768, "ranges come together"


LOCAL = [
    "127.0.0.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "169.254.169.254", "224.0.0.1",
    "[::1]", "[::ffff:127.0.0.1]", "[::ffff:10.0.0.1]", "[64:ff9b::a00:1]", "[2002:a00:1::]", "[fd00::1]", "[fe80::1]",
    "localhost", "2130706433", "127.1", "0x7f000001",
]  # fmt: skip
"""Hosts of a guest's own machine and network, in all spellings."""


async def connections_to(addresses: Sequence[str], contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> list[str]:
    """What each mirror answers to a request. Its addresses are checked by `public_addresses`."""
    mirrors, told = Mirrors(contexts[1]), list[str]()
    try:
        for mirror in mirrors.all(addresses):
            with pytest.raises(RemoteError) as error:
                await mirror.whole("index", 100)
            told.append(str(error.value))
    finally:
        await mirrors.aclose()
    return told


async def test_no_mirror_leads_into_the_network_of_a_guest(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    """Neither by its address, nor by a name that resolves to one: nothing is even connected to."""
    touched = 0

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal touched
        touched += 1
        writer.close()

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener:
        told = await connections_to([f"https://{host}:{port}/corpus" for host in LOCAL], contexts)
    assert not touched
    assert all("no host of the internet" in line or "known" in line for line in told), told


async def test_a_connection_goes_to_an_address_that_was_checked(
    noise: Noise, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    """A name that leads elsewhere the second time is looked up once for a connection; nobody else looks it up."""
    server, asked = Server(noise.folder, web_server.honest), list[str]()

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else only_public(host, ["10.0.0.1"])

    async with serving(server, contexts[0]):
        for expected in (noise.index.to_bytes(), None):
            mirrors = Mirrors(contexts[1], resolve=resolve)
            try:
                (mirror,) = mirrors.all([server.address])
                if expected is not None:
                    assert await mirror.whole("index", 1 << 20) == expected
                else:
                    with pytest.raises(RemoteError, match="no host of the internet"):
                        await mirror.whole("index", 1 << 20)
            finally:
                await mirrors.aclose()
    assert (asked, len(server.requests)) == ([web_server.NAME] * 2, 1)


def test_of_all_addresses_of_a_host_only_those_of_the_internet_are_asked() -> None:
    mixed = ["10.0.0.1", "1.1.1.1", "::1", "2606:4700::1111", "1.1.1.1", "169.254.169.254"]
    assert only_public("a.example", mixed) == ["1.1.1.1", "2606:4700::1111"]
    for none in ([], ["10.0.0.1"], ["fe80::1%eth0"], ["no address"]):
        with pytest.raises(OSError, match="no host of the internet"):
            only_public("a.example", none)


@pytest.mark.parametrize("address", ["hf://models/us/text", "hf://datasets/text"])
async def test_what_is_no_data_set_of_the_hub_is_refused(address: str) -> None:
    mirrors = Mirrors()
    try:
        with pytest.raises(UsageError, match="not hf://datasets/OWNER/NAME"):
            mirrors.all([address])
    finally:
        await mirrors.aclose()


async def test_requests_that_make_no_sense_end_the_stream(noise: Noise, tmp_path: Path) -> None:
    """What a stranger asks for decides neither sizes nor what is kept."""
    from peer.net.base import Closed, Ended
    from protocol.wire import endpoints, framing

    chunk = noise.index.chunk(0)
    good = {"blob": chunk.name, "in": [chunk.name, chunk.size, 0], "insist": False}
    bad: list[list[Any]] = [
        [], [chunk.name], [7, chunk.size, 0], ["x", chunk.size, 0], [chunk.name, -1, 0], [chunk.name, 1 << 60, 0],
        [chunk.name, "x", 0], [chunk.name, chunk.size, -2], [chunk.name, chunk.size, "0"],
        [chunk.name, chunk.size, 1 << 40],
    ]  # fmt: skip

    async with TextSwarm(noise, tmp_path) as swarm:
        reader = await swarm.start()
        await read(swarm, reader, 2)
        for number, (peer, change) in enumerate(itertools.product((swarm.nodes[0], reader), bad)):
            who = swarm.stranger(1 + number // 5)  # a peer that goes on with it is refused
            stream = await who.open(peer.transport.peer_id, endpoints.BLOB, timeout=5.0)
            await stream.send(framing.pack_message({**good, "in": change}))
            with pytest.raises((Closed, Ended)):
                await stream.recv(timeout=5.0)
            await stream.close()
        for place in ([chunk.name, chunk.size - 1, 0], ["0" * 64, chunk.size, 0]):
            stream = await swarm.stranger().open(reader.transport.peer_id, endpoints.BLOB, timeout=5.0)
            await stream.send(framing.pack_message({**good, "in": place}))
            assert framing.unpack_message(await stream.recv(timeout=5.0))["state"] == "absent"
            await stream.close()
        assert (await reader.text.sequences(range(STEP))).shape[0] == STEP
