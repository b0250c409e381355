"""Addresses of peers, as text: `/ip4/203.0.113.5/tcp/4001/p2p/12D3Koo…` (libp2p's multiaddr, TCP only).

QUIC is refused: hivemind's daemon loses the last messages of a stream over it, and would dial whatever is announced.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from peer.net.base import BadAddress
from protocol import identity

_EXAMPLE = "it looks like /ip4/203.0.113.5/tcp/4001/p2p/12D3Koo…"
_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*")
_MAX = 512


@dataclass(frozen=True, slots=True)
class Address:
    """`dial`: the address without the peer's own `/p2p/…`; `peer`: its id."""

    dial: str
    peer: str


def parse(text: str) -> Address:
    """The address in `text`: host, TCP port and peer id, or `…/p2p/RELAY/p2p-circuit/p2p/ID`. Raises BadAddress."""
    shown = text if len(text) <= _MAX and text.isprintable() else "(too long or unprintable)"

    def bad(reason: str) -> BadAddress:
        return BadAddress(f"address {shown}: {reason}; {_EXAMPLE}")

    if shown is not text:
        raise bad("not an address")
    parts = text.split("/")
    if any(part in ("udp", "quic", "quic-v1", "webtransport") for part in parts):
        raise bad("QUIC and UDP are not used here, only TCP")
    if len(parts) not in (7, 10) or parts[0] or parts[3] != "tcp" or parts[5] not in ("p2p", "ipfs"):
        raise bad("not a host, a TCP port and a peer id")
    _, kind, host, _, port, _, peer, *circuit = parts
    try:
        if kind in ("ip4", "ip6"):
            wanted = ipaddress.IPv4Address if kind == "ip4" else ipaddress.IPv6Address
            wanted(host)
            if "%" in host:  # a scope, which means something on one machine only
                raise ValueError
        elif kind not in ("dns", "dns4", "dns6") or not _NAME.fullmatch(host):
            raise ValueError
    except ValueError:
        raise bad(f"{host or 'nothing'} is not a host of kind {kind}") from None
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise bad(f"{port or 'nothing'} is not a port")
    if circuit:
        if circuit[0] != "p2p-circuit" or circuit[1] not in ("p2p", "ipfs"):
            raise bad("not a relayed address")
        dial, peer = f"/{kind}/{host}/tcp/{port}/p2p/{peer}/p2p-circuit", circuit[2]
    else:
        dial = f"/{kind}/{host}/tcp/{port}"
    for name in {parts[6], peer}:
        try:
            identity.public_key(name)
        except identity.IdentityError:
            raise bad(f"{name or 'nothing'} is not a peer id") from None
    return Address(dial, peer)
