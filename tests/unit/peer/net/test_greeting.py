"""Checks of an address before libp2p dials it: whether its name is known, and whether a host greets there."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from peer.net import greeting, p2p
from peer.net.address import parse
from peer.net.base import BadAddress, Clock, call, serve_calls
from peer.net.greeting import GREETING, why_unknown
from peer.net.reach import DIAL_BACK_LIMITS, DialBackServer, ReachContext, check_reachability, greets
from protocol.errors import RemoteError
from protocol.identity import Identity
from tests.support.net import sockets, start
from tests.support.potluck import free_port

sockets = sockets
PEER = Identity(bytes(32)).peer_id
DEADLINE = 60.0


def address(kind: str, name: str = "node.example") -> str:
    return f"/{kind}/{name}/tcp/31337"


@pytest.mark.parametrize(
    ("kind", "knows", "code", "told"),
    [
        ("dns4", (), socket.EAI_NONAME, "the name node.example is not known"),
        ("dns6", (), socket.EAI_NONAME, "the name node.example is not known"),
        ("dns", (), socket.EAI_NONAME, "the name node.example is not known"),
        ("dns6", (socket.AF_UNSPEC, socket.AF_INET), socket.EAI_NONAME, "the name node.example has no address of IPv6"),
        (
            "dns4",
            (socket.AF_UNSPEC, socket.AF_INET6),
            socket.EAI_NODATA,
            "the name node.example has no address of IPv4",
        ),
        ("dns4", (), socket.EAI_AGAIN, "the name node.example could not be looked up"),
        ("dns4", (socket.AF_UNSPEC, socket.AF_INET), 0, ""),
    ],
)
def test_what_the_resolver_says_is_told(kind: str, knows: tuple[int, ...], code: int, told: str) -> None:
    async def ask(host: str, family: int) -> None:
        assert host == "node.example"
        if family not in knows:
            raise socket.gaierror(code, "no")

    said = asyncio.run(why_unknown(["/ip4/10.0.0.1/tcp/1", address(kind)], ask))
    assert said.startswith(told)
    assert bool(said) == bool(told)


@pytest.mark.parametrize("kind", ["dns4", "dns6", "dns"])
async def test_a_name_that_does_not_resolve_is_one_line(kind: str, tmp_path: Path) -> None:
    transport = await p2p.start(tmp_path / "key", host="127.0.0.1", validate=lambda *_: None)
    try:
        with pytest.raises(RemoteError, match=r"the name no-such\.invalid (is not known|could not be looked up)"):
            await transport.connect([f"{address(kind, 'no-such.invalid')}/p2p/{PEER}"], timeout=20.0)
    finally:
        await transport.aclose()


def test_dnsaddr_is_told_what_to_write() -> None:
    with pytest.raises(BadAddress, match="write the name as /dns4/NAME"):
        parse(f"/dnsaddr/node.example/p2p/{PEER}")


@contextlib.asynccontextmanager
async def door(says: bytes, *, stays: bool = True) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A TCP port that says this to each caller, and what was said to it until it was hung up."""
    heard: list[bytes] = []
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        with contextlib.suppress(OSError):
            if stays:
                heard.append(await reader.read())
        writer.close()
        done.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], heard
        async with asyncio.timeout(DEADLINE):
            await done.wait()
    finally:
        server.close()


@pytest.mark.parametrize(
    ("says", "is_one"),
    [
        (GREETING, True),
        (GREETING + b"more" * 10_000, True),
        (b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n", False),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 1000, False),
    ],
)
async def test_only_the_greeting_counts_and_nothing_is_said(says: bytes, is_one: bool) -> None:
    async with door(says) as (port, heard):
        assert await greets("127.0.0.1", port) is is_one
    assert heard in ([b""], [])  # not a byte; the connection is reset where there was more to read


async def test_a_port_that_is_closed_or_hangs_up_does_not_greet() -> None:
    async with door(GREETING[:5], stays=False) as (port, _):
        assert not await greets("127.0.0.1", port)
    assert not await greets("127.0.0.1", port)


async def test_only_a_libp2p_that_greets_is_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # no listener
        closed = taken.getsockname()[1]
        async with (
            door(GREETING) as (good, _),
            door(b"SSH-2.0\r\n" + bytes(40)) as (other, _),
            door(b"") as (stopped, _),
        ):
            for ports, seconds, reason in (
                ([closed], 30.0, "connection refused"),
                ([other], 30.0, "no libp2p host"),
                ([stopped], 0.05, greeting.SILENT),
                ([closed, stopped, good], 30.0, ""),  # one is enough
            ):
                assert await greeting.why_silent([f"/ip4/127.0.0.1/tcp/{port}" for port in ports], seconds) == reason


@contextlib.asynccontextmanager
async def forwarder(port: int) -> AsyncIterator[tuple[int, list[int]]]:
    """A port that leads to another one of this machine, as a provider's, and how many have come through."""
    came: list[int] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(1)
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, back), pump(there, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], came
    finally:
        server.close()


@pytest.mark.usefixtures("sockets")
async def test_a_daemon_is_dialled_back_and_a_remapped_port_is_reached(tmp_path: Path) -> None:
    port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        outside, came = await stack.enter_async_context(forwarder(port))
        announce = (f"/ip4/127.0.0.1/tcp/{outside}",)
        node = await start(tmp_path / "node")
        stack.push_async_callback(node.aclose)
        await DialBackServer(node, Clock(), bounds=dataclasses.replace(DIAL_BACK_LIMITS, seconds=DEADLINE)).serve()
        peer = await start(tmp_path / "peer", port=port, announce=announce)
        stack.push_async_callback(peer.aclose)
        await peer.connect(node.addresses, timeout=DEADLINE)

        async def others() -> AsyncIterator[str]:
            yield node.peer_id

        async def reach(peer: str) -> None: ...

        around = ReachContext(
            transport=peer, others=others, reach=reach, addresses=lambda peer: node.addresses, announced=announce
        )
        async with asyncio.timeout(DEADLINE):
            while not (found := await check_reachability(around)).asked:
                await asyncio.sleep(0)  # on a busy machine the answer can come too late
        assert found.how == "direct"
        assert set(found.addresses) == {announce[0], f"/ip4/127.0.0.1/tcp/{port}"}

        async def echo(remote: str, request: bytes) -> bytes:
            return request

        await serve_calls(peer, "echo", echo)
        announced = [address for address in peer.addresses if f"/tcp/{outside}/" in address]
        assert announced == [f"{announce[0]}/p2p/{peer.peer_id}"]
        stranger = await start(tmp_path / "stranger")
        stack.push_async_callback(stranger.aclose)
        before = len(came)
        await stranger.connect(announced, timeout=DEADLINE)
        assert await call(stranger, peer.peer_id, "echo", b"hello", timeout=DEADLINE) == b"hello"
        assert len(came) == before + 2, "its greeting is heard first, then it is dialled"
        assert stranger.seen_at(peer.peer_id) == announce[0]
