"""One suite for every transport: the network in memory and real hivemind daemons on the loopback interface."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest

from peer import events
from peer.net import address, base, daemon, dht, directory, keyfile, p2p, processes
from peer.net.base import (
    Closed,
    Ended,
    StartFailed,
    Stream,
    Timeout,
    Transport,
    TransportLost,
    Unreachable,
    call,
    serve_calls,
)
from peer.net.memory import MemoryNetwork
from peer.net.sockets import FOLDER, LOCK, SocketFolder, sweep
from peer.net.stream import NONSENSE_OFFENCES, Endpoint, ending
from protocol.errors import RemoteError, UsageError
from protocol.identity import Identity
from protocol.wire import calls, encoding, endpoints, framing
from protocol.wire.announcement import Announcement
from protocol.wire.calls import PipeHello
from protocol.wire.framing import MAX_FRAME, FrameError, pack_message
from tests.support.net import DEADLINE, SOCKETS, SOON, sockets, start, swarm

sockets = sockets


@pytest.fixture(params=["memory", "p2p"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def echo(stream: Stream) -> None:
    with contextlib.suppress(Ended):
        while True:
            await stream.send(await stream.recv())


async def test_echo(kind: str, tmp_path: Path) -> None:
    async with swarm(kind, tmp_path, 2) as (a, b):
        await b.serve("echo", echo)
        stream = await a.open(b.peer_id, "echo", timeout=SOON)
        assert stream.remote == b.peer_id
        big = os.urandom(3_000_000)
        for body in (b"", b"x", big):
            await stream.send(body)
            assert await stream.recv() == body
        whole = bytearray(big)
        await stream.send(memoryview(whole)[:2_000_000], b"between", memoryview(whole)[2_000_000:])
        whole[:] = bytes(len(whole))  # the sender's buffer is free again
        assert await stream.recv() == big[:2_000_000] + b"between" + big[2_000_000:]
        with pytest.raises(FrameError):
            await stream.send(bytes(MAX_FRAME + 1))
        await stream.finish()
        await stream.finish()
        with pytest.raises(Ended):
            await stream.recv()
        await stream.close()
        await stream.close()
        with pytest.raises(Closed):
            await stream.send(b"late")


async def test_calls(kind: str, tmp_path: Path) -> None:
    never = "never/1"

    async def answer(remote: str, request: bytes) -> bytes:
        if request == b"blame":
            raise RemoteError(remote, "your request is\nwrong; correct it")
        if request == b"crash":
            raise OSError("/secret/path")
        return remote.encode() + request

    async def hang(remote: str, request: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    async with swarm(kind, tmp_path, 2) as (a, b):
        await serve_calls(b, "answer", answer, limit=2_000_000)
        await serve_calls(b, never, hang)
        for request in (b"", b"hello", os.urandom(1_000_000)):
            reply = await call(a, b.peer_id, "answer", request, timeout=SOON)
            assert reply == a.peer_id.encode() + request
        with pytest.raises(RemoteError, match="your request is wrong; correct it") as refused:
            await call(a, b.peer_id, "answer", b"blame", timeout=SOON)
        assert refused.value.peer == b.peer_id
        with pytest.raises(RemoteError, match="internal error") as crashed:
            await call(a, b.peer_id, "answer", b"crash", timeout=SOON)
        assert "secret" not in str(crashed.value)
        with pytest.raises(Closed):
            await call(a, b.peer_id, "answer", b"long reply", timeout=SOON, limit=20)
        with pytest.raises(Closed):
            await call(a, b.peer_id, "answer", bytes(2_000_001), timeout=SOON)
        with pytest.raises(Timeout, match=never):
            await call(a, b.peer_id, never, b"", timeout=0.5)
        replies = await asyncio.gather(*(call(a, b.peer_id, "answer", b"%d" % i, timeout=SOON) for i in range(40)))
        assert replies == [a.peer_id.encode() + b"%d" % i for i in range(40)]


@pytest.mark.parametrize("finishes", [True, False])
async def test_what_a_handler_sent_before_it_failed_arrives(finishes: bool) -> None:
    """A stream that was finished is open until the other side ends it too; one that was not is aborted."""
    waits, closed = asyncio.Event(), asyncio.Event()

    class Reader(asyncio.StreamReader):
        async def read(self, n: int = -1) -> bytes:
            waits.set()
            return await super().read(n)

    class Writer:
        def write(self, data: bytes) -> None: ...
        async def drain(self) -> None: ...
        def close(self) -> None: ...
        async def wait_closed(self) -> None: ...

    async def fail(stream: Stream) -> None:
        if finishes:
            await stream.send(b"internal error")
            await stream.finish()
        raise ValueError("a bug")

    endpoint, reader = Endpoint(), Reader()
    stream = endpoint.stream("peer", "answer", reader, Writer(), closed.set)
    async with asyncio.timeout(SOON):
        serving = asyncio.create_task(endpoint.run(fail, stream))
        if finishes:
            await waits.wait()
            assert not closed.is_set()
        reader.feed_data(framing.END)
        await serving
    assert closed.is_set()


async def test_an_end_is_told_from_a_death(kind: str, tmp_path: Path) -> None:
    async def finishes(stream: Stream) -> None:
        await stream.recv()
        await stream.send(b"all of it")

    async def closes(stream: Stream) -> None:
        await stream.recv()
        await stream.close()

    async def crashes(stream: Stream) -> None:
        await stream.recv()
        raise ValueError("a bug")

    async with swarm(kind, tmp_path, 2) as (a, b):
        for handler in (finishes, closes, crashes):
            await b.serve(handler.__name__, handler)
        stream = await a.open(b.peer_id, "finishes", timeout=SOON)
        await stream.send(b"go")
        assert await stream.recv() == b"all of it"
        with pytest.raises(Ended):
            await stream.recv()
        await stream.close()
        for name in ("closes", "crashes"):
            stream = await a.open(b.peer_id, name, timeout=SOON)
            await stream.send(b"go")
            with pytest.raises(Closed) as closed:
                await stream.recv(timeout=SOON)
            assert not isinstance(closed.value, Ended)
            assert closed.value.peer == b.peer_id
            await stream.close()
        assert b.peer_id[-8:] in str(closed.value)


async def test_our_close_wakes_both_sides(kind: str, tmp_path: Path) -> None:
    seen: asyncio.Future[type] = asyncio.get_running_loop().create_future()

    async def wait(stream: Stream) -> None:
        try:
            await stream.recv()
            await stream.recv()
        except Exception as error:
            seen.set_result(type(error))

    async with swarm(kind, tmp_path, 2) as (a, b):
        await b.serve("wait", wait)
        stream = await a.open(b.peer_id, "wait", timeout=SOON)
        await stream.send(b"there")
        reading = asyncio.create_task(stream.recv())
        await asyncio.sleep(0)
        await stream.close()
        with pytest.raises(Closed):
            await reading
        assert await seen is Closed


async def test_traffic_is_counted_exactly(kind: str, tmp_path: Path) -> None:
    async with swarm(kind, tmp_path, 2) as (a, b):
        await b.serve("echo", echo)
        stream = await a.open(b.peer_id, "echo", timeout=SOON)
        for size in (0, 10, 300_000):
            await stream.send(bytes(size))
            await stream.recv()
        await stream.finish()
        with pytest.raises(Ended):
            await stream.recv()
        await stream.close()
        expected = 300_010 + 3 * 4 + 4
        for peer in (a, b):
            assert peer.traffic.bytes_sent == peer.traffic.bytes_received == expected
            assert dict(peer.traffic.sent) == dict(peer.traffic.received) == {"echo": expected}


async def test_a_sender_waits_for_a_reader(kind: str, tmp_path: Path) -> None:
    async with swarm(kind, tmp_path, 2) as (a, b):
        served: list[Stream] = []
        stop = asyncio.Event()

        async def idle(stream: Stream) -> None:
            served.append(stream)
            await stop.wait()

        await b.serve("idle", idle)
        stream = await a.open(b.peer_id, "idle", timeout=SOON)
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while sent < 50:
                await stream.send(bytes(1_000_000), timeout=3.0)
                sent += 1

        with pytest.raises(Timeout):
            await flood()
        with pytest.raises(Closed):
            await stream.send(b"more")
        stop.set()


@pytest.mark.parametrize("said", [bytes(257), b"nonsense"], ids=["too long", "no message"])
async def test_whoever_says_what_has_no_place_again_and_again_is_refused(said: bytes) -> None:
    network, told = MemoryNetwork(), list[events.Refused]()
    a, b = (network.transport(Identity(bytes([i]) * 32).peer_id) for i in range(2))
    assert isinstance(b, Endpoint)
    b.guests.follow(told.append)

    async def listen(stream: Stream) -> None:
        calls.read(PipeHello, await stream.recv(256), stream.remote, "pipe")

    await b.serve("pipe", listen)
    tries = 0
    while not told:
        tries += 1
        with contextlib.suppress(RemoteError):
            stream = await a.open(b.peer_id, "pipe", timeout=SOON)
            await stream.send(said)
            await stream.recv()
    assert (told[0].peer, told[0].reason) == (a.peer_id, "says what has no place in pipe")
    assert tries > b.guests.limits.offences.burst / NONSENSE_OFFENCES > 1, "an honest peer may err"
    await asyncio.gather(a.aclose(), b.aclose())


async def test_frames_over_the_readers_limit_close_the_stream(kind: str, tmp_path: Path) -> None:
    async with swarm(kind, tmp_path, 2) as (a, b):
        await b.serve("echo", echo)
        stream = await a.open(b.peer_id, "echo", timeout=SOON)
        await stream.send(bytes(1001))
        with pytest.raises(Closed, match="1001 bytes; at most 1000"):
            await stream.recv(1000)
        with pytest.raises(Closed):
            await stream.send(b"")


async def test_an_interrupted_recv_loses_nothing(kind: str, tmp_path: Path) -> None:
    async with swarm(kind, tmp_path, 2) as (a, b):
        await b.serve("echo", echo)
        stream = await a.open(b.peer_id, "echo", timeout=SOON)
        with pytest.raises(Timeout):
            await stream.recv(timeout=0.01)
        reading = asyncio.create_task(stream.recv())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await stream.send(b"first")
        await stream.send(b"second")
        frames = [await stream.recv(), await stream.recv()]
        assert frames == [b"first", b"second"]
        bodies = [bytes([i]) * 300_000 for i in range(8)]
        sending = [asyncio.create_task(stream.send(body)) for body in bodies]
        assert sorted([await stream.recv() for _ in bodies]) == bodies
        await asyncio.gather(*sending)
        await stream.close()


async def test_records(kind: str, tmp_path: Path) -> None:
    def strict(key: str, subkey: str, value: bytes) -> bool:
        assert key in ("peers", "others")
        return value.startswith(b"signed")

    async with swarm(kind, tmp_path, 3, strict, strict) as (a, b, lax):
        assert await a.get("peers") == {}
        for peer in (a, b):
            assert await peer.store("peers", peer.peer_id, b"signed 1", ttl=60)
        assert await b.store("peers", b.peer_id, b"signed 2", ttl=120)
        assert await a.store("others", a.peer_id, b"signed", ttl=60)
        for peer in (a, b):  # a busy machine may miss one reply
            while await peer.get("peers") != {a.peer_id: b"signed 1", b.peer_id: b"signed 2"}:
                await asyncio.sleep(0.1)
        assert not await a.store("peers", a.peer_id, b"unsigned", ttl=300)
        await lax.store("others", lax.peer_id, b"unsigned", ttl=60)
        assert lax.peer_id not in await a.get("others")
        with pytest.raises(UsageError, match="4097 bytes"):
            await a.store("peers", a.peer_id, b"signed" + bytes(4091), ttl=60)
        assert await a.store("peers", a.peer_id, b"signed" + bytes(4090), ttl=600)
        for ttl in (0, 601):
            with pytest.raises(UsageError):
                await a.store("peers", a.peer_id, b"signed", ttl=ttl)


async def test_who_cannot_be_reached(kind: str, tmp_path: Path) -> None:
    nobody = Identity(b"nobody" + bytes(26)).peer_id

    async with swarm(kind, tmp_path, 2) as (a, b):
        with pytest.raises(Unreachable) as error:
            await a.open(nobody, "echo", timeout=SOON)
        assert error.value.peer == nobody
        with pytest.raises((Unreachable, Closed), match=b.peer_id[-8:]):
            await call(a, b.peer_id, "not/served", b"", timeout=SOON)
        with pytest.raises(Unreachable, match=nobody):
            await a.connect([b.addresses[0].replace(b.peer_id, nobody)], timeout=SOON)
        await a.connect([b.addresses[0].replace(b.peer_id, nobody), *b.addresses], timeout=SOON)
        await b.aclose()
        with pytest.raises(RemoteError):
            await call(a, b.peer_id, "echo", b"", timeout=SOON)
        with pytest.raises(TransportLost):
            await b.open(a.peer_id, "echo", timeout=SOON)
        with pytest.raises(TransportLost):
            await b.get("peers")
        await b.aclose()


async def test_an_address_that_the_daemon_cannot_take_is_passed_over(tmp_path: Path) -> None:
    nobody = Identity(b"nobody" + bytes(26)).peer_id

    async with swarm("p2p", tmp_path, 2) as (a, b):
        for host in ("under_score.example", "ab--cd.example", "xn--a.example", "ends-.example"):
            bad = f"/dns4/{host}/tcp/1/p2p/{nobody}"
            with pytest.raises((Unreachable, Timeout)):
                await a.connect([bad], timeout=1.0)
            await a.connect([bad, *b.addresses], timeout=SOON)


async def test_leaving_ends_every_stream(kind: str, tmp_path: Path) -> None:
    async with swarm(kind, tmp_path, 3) as (_, a, b):
        await a.serve("echo", echo)
        await b.serve("echo", echo)
        out, into = (await a.open(b.peer_id, "echo", timeout=SOON), await b.open(a.peer_id, "echo", timeout=SOON))
        for stream in (out, into):
            await stream.send(b"hello")
            assert await stream.recv() == b"hello"
        await b.aclose()
        for stream in (out, into):
            with pytest.raises(Closed):
                await stream.recv(timeout=SOON)


async def test_who_leaves_while_a_served_stream_ends_reports_no_error(kind: str, tmp_path: Path) -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    async with swarm(kind, tmp_path, 3) as (_, a, b):
        served = asyncio.Event()

        async def serve(stream: Stream) -> None:
            served.set()

        await b.serve("short", serve)
        stream = await a.open(b.peer_id, "short", timeout=SOON)
        await stream.send(b"hello")
        await served.wait()
        with pytest.raises(Ended):
            await stream.recv(timeout=SOON)
        await b.aclose()  # waits for our end of the stream, which does not come
    assert errors == []


# --- only with daemons


def _process(folder: Path, bootstrap: str, up: Any, free: Any) -> None:
    """Another process: a peer that echoes until it is killed; its loop is held from "hold" until it is freed."""

    async def live() -> None:
        async def hold(stream: Stream) -> None:
            await stream.send(b"held")
            assert free.wait(DEADLINE)

        peer = await start(folder / "other", bootstrap=[bootstrap])
        await peer.serve("echo", echo)
        await peer.serve("hold", hold)
        up.send((peer.peer_id, peer.daemon.pid, peer.daemon.folder.path))
        await asyncio.Event().wait()

    asyncio.run(live())


@contextlib.asynccontextmanager
async def other_process(folder: Path, bootstrap: Transport) -> AsyncIterator[tuple[str, Path, Any]]:
    """A peer in a process that is killed with its daemon: its id, its folder of sockets, and the loop's release."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    free = context.Event()
    args: Any = (folder, bootstrap.addresses[0], there, free)
    process = context.Process(target=_process, args=args, daemon=True)
    process.start()
    there.close()
    try:
        peer, daemon, sockets = await asyncio.to_thread(here.recv)
        yield peer, sockets, free
    finally:
        process.kill()
        process.join()
        here.close()
    with contextlib.suppress(psutil.NoSuchProcess):
        await asyncio.to_thread(psutil.Process(daemon).wait, SOON)


async def test_a_killed_peer(tmp_path: Path) -> None:
    async with swarm("p2p", tmp_path, 1) as (a,):
        async with other_process(tmp_path, a) as (peer, folder, _):
            stream = await a.open(peer, "echo", timeout=SOON)
            await stream.send(b"hello")
            assert await stream.recv() == b"hello"
        with pytest.raises(Closed) as closed:
            await stream.recv(timeout=SOON)
        assert not isinstance(closed.value, Ended)
        with pytest.raises(RemoteError):
            await a.open(peer, "echo", timeout=5.0)
    assert folder.is_dir()  # what a killed process cannot remove, a later start does
    sweep(SOCKETS)
    assert not folder.exists()


def test_without_a_place_for_sockets_one_line_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        StartFailed, match=r"nowhere: No such file or directory, so that .* set TMPDIR to another folder"
    ):
        SocketFolder(tmp_path / "nowhere")


def test_what_others_put_among_the_sockets_is_neither_opened_nor_followed(tmp_path: Path) -> None:
    """In a folder open to all: an unfilled pipe, links to a file and a folder of ours, a folder without a lock."""
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / LOCK).write_text("kept")
    for name in ("pipe", "link", "empty"):
        (tmp_path / f"{FOLDER}{name}").mkdir()
    os.mkfifo(tmp_path / f"{FOLDER}pipe" / LOCK)
    (tmp_path / f"{FOLDER}link" / LOCK).symlink_to(ours / LOCK)
    (tmp_path / f"{FOLDER}folder").symlink_to(ours)
    if os.getuid() == 0:
        (tmp_path / f"{FOLDER}foreign").mkdir()
        (tmp_path / f"{FOLDER}foreign" / LOCK).touch()
        os.chown(tmp_path / f"{FOLDER}foreign", 65534, 65534)
    held = SocketFolder(tmp_path)
    sweep(tmp_path)
    assert (ours / LOCK).read_text() == "kept"
    left = {path.name.removeprefix(FOLDER) for path in tmp_path.glob(f"{FOLDER}*")}
    assert {"link", "empty"} <= left
    assert os.getuid() != 0 or "foreign" in left
    assert held.path.is_dir()
    held.close()
    assert not held.path.exists()


@pytest.mark.slow
async def test_six_clients_open_64_streams_each_to_a_busy_peer(tmp_path: Path) -> None:
    """None fails: they wait in the queue between the peer's daemon and its process."""
    async with swarm("p2p", tmp_path, 6) as clients, other_process(tmp_path, clients[0]) as (peer, _, free):
        holding = await clients[0].open(peer, "hold", timeout=SOON)
        assert await holding.recv(timeout=SOON) == b"held"
        opening = (client.open(peer, "echo", timeout=SOON) for client in clients for _ in range(64))
        streams = await asyncio.gather(*opening)
        for number, stream in enumerate(streams):
            await stream.send(b"%d" % number)
        free.set()
        replies = await asyncio.gather(*(stream.recv(timeout=SOON) for stream in streams))
        assert replies == [b"%d" % number for number in range(6 * 64)]
    sweep(SOCKETS)  # what a killed process cannot remove


def _limits(up: Any, soft: int, hard: int) -> None:
    """Another process, begun with these limits: what it says of them, and what they are then."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    up.send((processes.raise_file_limit(enough=400), *resource.getrlimit(resource.RLIMIT_NOFILE)))


@pytest.mark.parametrize(("soft", "hard", "enough"), [(128, 512, True), (128, 256, False), (300, 300, False)])
def test_the_limit_of_open_files_is_raised_and_told_where_it_is_low(soft: int, hard: int, enough: bool) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_limits, args=(there, soft, hard))
    process.start()
    there.close()
    with here:
        text, *limits = here.recv()
    process.join()
    assert limits == [hard, hard]
    if enough:
        assert text is None
    else:
        assert f"{hard} at once" in text
        assert ";" in text


@pytest.mark.slow
async def test_a_connection_on_which_nobody_answers_ends_when_it_is_doubted(tmp_path: Path) -> None:
    """The other daemon is stopped, as silent as one whose address is gone; libp2p itself would notice after 40 s."""
    async with swarm("p2p", tmp_path, 2) as (a, b):
        assert isinstance(b, p2p.P2PTransport)
        await b.serve("echo", echo)
        stream = await a.open(b.peer_id, "echo", timeout=SOON)
        a.doubt(b.peer_id)
        await a.connect(b.addresses, timeout=SOON)  # it waits for the same answer
        await stream.send(b"alive")
        assert await stream.recv(timeout=SOON) == b"alive"
        os.kill(b.daemon.pid, signal.SIGSTOP)
        try:
            a.doubt(b.peer_id)
            with pytest.raises(Closed):
                await stream.recv(timeout=30.0)
        finally:
            os.kill(b.daemon.pid, signal.SIGCONT)
        await a.connect(b.addresses, timeout=SOON)
        stream = await a.open(b.peer_id, "echo", timeout=SOON)
        await stream.send(b"again")
        assert await stream.recv(timeout=SOON) == b"again"
        assert await a.look() is False, "its addresses are as they were"


async def test_our_daemon_dies(tmp_path: Path) -> None:
    async with swarm("p2p", tmp_path, 2) as (a, b):
        await b.serve("echo", echo)
        stream = await a.open(b.peer_id, "echo", timeout=SOON)
        assert isinstance(a, p2p.P2PTransport)
        os.kill(a.daemon.pid, signal.SIGKILL)
        with pytest.raises(Closed):
            await stream.recv(timeout=SOON)
        await a.lost.wait()
        for attempt in (
            a.open(b.peer_id, "echo", timeout=SOON),
            a.connect(b.addresses, timeout=SOON),
            a.store("k", a.peer_id, b"", ttl=60),
            a.get("k"),
            a.serve("x", echo),
        ):
            with pytest.raises(TransportLost, match="network daemon"):
                await attempt


async def test_our_daemon_dies_while_an_address_that_nobody_needs_any_more_is_dialled(tmp_path: Path) -> None:
    """Everything else tells that; an exception without an awaiter would be a traceback on the user's screen."""

    def is_dialling(task: asyncio.Task[Any]) -> bool:
        return "P2PTransport._connect" in repr(task.get_coro())

    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        stranger = Identity(b"s" * 32).peer_id
        nobody = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{stranger}"
        async with swarm("p2p", tmp_path, 2) as (a, b):
            assert isinstance(a, p2p.P2PTransport)
            await a.connect([*b.addresses, nobody], timeout=SOON)
            before = asyncio.all_tasks()
            assert any(is_dialling(task) for task in before), "one address is still dialled"
            os.kill(a.daemon.pid, signal.SIGKILL)
            await a.lost.wait()
            async with asyncio.timeout(SOON):
                while any(is_dialling(task) for task in asyncio.all_tasks()):
                    await asyncio.sleep(0.01)
            del before
            gc.collect()
    assert errors == []


async def test_a_port_in_use(tmp_path: Path) -> None:
    async def on(port: int, host: str = "127.0.0.1") -> None:
        await start(tmp_path / "key", host=host, port=port)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(base.PortInUse, match=rf"port {port}: .*--port") as error:
            await on(port)
        assert error.value.exit_code == 2
    async with swarm("p2p", tmp_path, 1) as (a,):  # libp2p alone would share the port without a word
        with pytest.raises(base.PortInUse):
            await on(int(a.addresses[0].split("/")[4]))
    with pytest.raises(base.StartFailed, match="--host"):
        await on(0, "192.0.2.1")
    for host, port in (("localhost", 0), ("127.0.0.1", 70_000), ("127.0.0.1", -1)):
        with pytest.raises(UsageError):
            await on(port, host)


async def test_the_daemons_own_refusal_of_a_port(tmp_path: Path) -> None:
    """It may be taken between our check and the daemon's start."""
    keyfile.load_or_create(tmp_path / "key")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(base.PortInUse, match="--port"):
            await daemon.Daemon.start(tmp_path / "key", "127.0.0.1", port, SOCKETS, SOON)


# --- what arrives from the DHT


def test_the_decoder_never_recurses() -> None:
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils import MSGPackSerializer

    assert MSGPackSerializer.loads is dht.safe_loads
    good = DictionaryDHTValue()
    with good.freeze():
        good.store("peer", b"value", 4e9)
    raw = MSGPackSerializer.dumps(good)
    back = MSGPackSerializer.loads(raw)
    assert isinstance(back, DictionaryDHTValue)
    assert {k: tuple(v) for k, v in back.data.items()} == {"peer": (b"value", 4e9)}
    assert MSGPackSerializer.loads(msgpack.packb(["key", b"value"])) == ["key", b"value"]
    inner = msgpack.packb([None, 0.0, [["peer", b"value", float("nan")]]])
    for bad in (
        msgpack.packb((1, 2), default=None) + b"\xc0",
        b"\x91" + raw,
        msgpack.packb(msgpack.ExtType(0x50, raw)),
        msgpack.packb(msgpack.ExtType(0x40, b"\x90")),
        msgpack.packb(msgpack.ExtType(0x50, b"\x90")),
        msgpack.packb(msgpack.ExtType(0x50, inner)),
        raw[:-1],
        raw + b"\xc0",
    ):
        with pytest.raises(FrameError):
            MSGPackSerializer.loads(bad)


def test_the_record_validator() -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord

    hashed = DHTID.generate("key").to_bytes()
    subkey, value = pack_message("peer"), pack_message(["key", b"value"])
    seen: list[tuple[str, str, bytes]] = []

    def validate(key: str, subkey: str, value: bytes) -> bool:
        seen.append((key, subkey, value))
        if value == b"boom":
            raise ValueError
        return value != b"wrong"

    validator = dht.Validator(validate, now=lambda: 1000.0)
    assert validator.validate(DHTRecord(hashed, subkey, value, 1600.0))
    assert seen == [("key", "peer", b"value")]
    for record in (
        DHTRecord(hashed, subkey, pack_message(["key", b"wrong"]), 1600.0),
        DHTRecord(hashed, subkey, pack_message(["key", b"boom"]), 1600.0),
        DHTRecord(hashed, subkey, pack_message(["other", b"value"]), 1600.0),
        DHTRecord(hashed, subkey, pack_message(["key", bytes(4097)]), 1600.0),
        DHTRecord(hashed, subkey, pack_message(["key", "text"]), 1600.0),
        DHTRecord(hashed, subkey, pack_message(b"value"), 1600.0),
        DHTRecord(hashed, subkey, b"\xc1", 1600.0),
        DHTRecord(hashed, subkey, value, 1661.0),
        DHTRecord(hashed, subkey, value, float("nan")),
        DHTRecord(hashed, pack_message(None), value, 1600.0),
        DHTRecord(hashed, pack_message("x" * 200), value, 1600.0),
    ):
        assert not validator.validate(record)


def test_a_node_keeps_announcements_of_its_own_run_only() -> None:
    run, other = "1" * 64, "2" * 64
    who = Identity(b"w" * 32)
    valid = directory.valid_record(run)
    good = encoding.seal(who, Announcement(run=run, peer=who.peer_id))
    assert valid(endpoints.announcements_key(run), who.peer_id, good)
    assert not valid(endpoints.announcements_key(run), Identity(b"x" * 32).peer_id, good)
    assert not valid("something else", who.peer_id, good)
    foreign = encoding.seal(who, Announcement(run=other, peer=who.peer_id))
    assert not valid(endpoints.announcements_key(other), who.peer_id, foreign)
    assert not valid(endpoints.announcements_key(run), who.peer_id, foreign)


# --- addresses

PEER = Identity(bytes(32)).peer_id


@pytest.mark.parametrize(
    ("text", "dial"),
    [
        (f"/ip4/203.0.113.5/tcp/4001/p2p/{PEER}", "/ip4/203.0.113.5/tcp/4001"),
        (f"/ip6/2001:db8::1/tcp/1/p2p/{PEER}", "/ip6/2001:db8::1/tcp/1"),
        (f"/dns4/node.example.org/tcp/65535/p2p/{PEER}", "/dns4/node.example.org/tcp/65535"),
        (
            f"/ip4/203.0.113.5/tcp/4001/p2p/{Identity(b'r' * 32).peer_id}/p2p-circuit/p2p/{PEER}",
            f"/ip4/203.0.113.5/tcp/4001/p2p/{Identity(b'r' * 32).peer_id}/p2p-circuit",
        ),
    ],
)
def test_addresses(text: str, dial: str) -> None:
    assert address.parse(text) == address.Address(dial, PEER)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "203.0.113.5:4001",
        f"/ip4/203.0.113.5/udp/4001/quic-v1/p2p/{PEER}",
        f"/ip4/203.0.113.5/tcp/0/p2p/{PEER}",
        f"/ip4/203.0.113.5/tcp/70000/p2p/{PEER}",
        f"/ip4/203.0.113.500/tcp/4001/p2p/{PEER}",
        f"/ip6/203.0.113.5/tcp/4001/p2p/{PEER}",
        f"/ip6/fe80::1%eth0/tcp/4001/p2p/{PEER}",
        f"/ip6/2001:db8::%1/tcp/4001/p2p/{PEER}",
        f"/ip6zone/eth0/ip6/fe80::1/tcp/4001/p2p/{PEER}",
        f"/dns4/-bad-/tcp/4001/p2p/{PEER}",
        f"/dns4/münchen.example/tcp/4001/p2p/{PEER}",
        f"/dns4/{'a.' * 130}b/tcp/4001/p2p/{PEER}",
        f"/ip4/203.0.113.5/tcp/+4001/p2p/{PEER}",
        f"/ip4/203.0.113.5/tcp/04001/p2p/{PEER}",
        f"/ip4/203.0.113.5/tcp/4001/p2p/{PEER}/",
        f"//ip4/203.0.113.5/tcp/4001/p2p/{PEER}",
        f"/ip4/203.0.113.5/tcp/4001/ws/p2p/{PEER}",
        f"/unix/tmp/socket/p2p/{PEER}",
        f"/p2p/{PEER}",
        "/ip4/203.0.113.5/tcp/4001",
        "/ip4/203.0.113.5/tcp/4001/p2p/nobody",
        f"/ip4/203.0.113.5/tcp/4001/p2p/nobody/p2p-circuit/p2p/{PEER}",
        f"/ip4/203.0.113.5/tcp/4001/p2p/{PEER}/p2p-circuit",
        f"/ip4/203.0.113.5/tcp/4001/p2p/{PEER}\n",
        "/" + "x" * 5000,
    ],
)
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(base.BadAddress, match=r"^address [^\n]*$") as error:
        address.parse(text)
    assert error.value.exit_code == 2
    if "quic" in text:
        assert "QUIC" in str(error.value)


async def test_a_connection_that_was_closed_with_something_left_to_write_can_be_ended() -> None:
    """A slow reader does not decide what is raised here."""
    read, over = asyncio.Event(), asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read.wait()
        await reader.read()
        writer.close()
        over.set()

    async with await asyncio.start_server(slow, "127.0.0.1", 0) as server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(bytes(64 << 20))
        writer.close()
        assert writer.transport.get_write_buffer_size() > 0, "else asyncio would know that it is closed"
        read.set()
        await writer.wait_closed()
        ending(writer)()
        await over.wait()
