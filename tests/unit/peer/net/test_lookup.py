"""A name in an address that leads nowhere is told as what it is."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from peer.net import p2p
from peer.net.address import parse
from peer.net.base import BadAddress
from peer.net.greeting import why_unknown
from protocol.errors import RemoteError
from protocol.identity import Identity

PEER = Identity(bytes(32)).peer_id
DEADLINE = 120.0


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
def test_a_name_that_does_not_resolve_is_one_line(kind: str, tmp_path: Path) -> None:
    async def work() -> None:
        transport = await p2p.start(tmp_path / "key", host="127.0.0.1", validate=lambda *_: None)
        try:
            with pytest.raises(RemoteError, match=r"the name no-such\.invalid (is not known|could not be looked up)"):
                await transport.connect([f"{address(kind, 'no-such.invalid')}/p2p/{PEER}"], timeout=20.0)
        finally:
            await transport.aclose()

    asyncio.run(asyncio.wait_for(work(), DEADLINE))


def test_dnsaddr_is_told_what_to_write() -> None:
    with pytest.raises(BadAddress, match="write the name as /dns4/NAME"):
        parse(f"/dnsaddr/node.example/p2p/{PEER}")
