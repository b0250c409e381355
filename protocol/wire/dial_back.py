"""How a peer learns whether others can reach it: it asks one to try (docs/adr/0023-dial-back.md)."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated

from protocol.wire.bounds import Port, Word
from protocol.wire.schema import AtMost

MOST_PORTS = 4
"""That one request names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialMe:
    """Please try at which of these TCP ports of the host that I come from a libp2p host answers."""

    ports: Annotated[tuple[Port, ...], AtMost(MOST_PORTS)]

    def __post_init__(self) -> None:
        if not 0 < len(self.ports) <= MOST_PORTS:
            raise ValueError(f"ports must have 1 to {MOST_PORTS} entries")
        _check(self.ports)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialled:
    """The answer. `host`: the IP address that you come from, empty where that is not known; `ports`: those at which one answered, which
    may be another than you named: that of your connection to us."""

    host: Word
    ports: Annotated[tuple[Port, ...], AtMost(MOST_PORTS + 1)] = ()

    def __post_init__(self) -> None:
        if self.host:
            ipaddress.ip_address(self.host[:64])
        if len(self.ports) > MOST_PORTS + 1:
            raise ValueError(f"ports must have at most {MOST_PORTS + 1} entries")
        _check(self.ports)


def _check(ports: tuple[int, ...]) -> None:
    if not all(0 < port < 65536 for port in ports):
        raise ValueError("ports must be in 1..65535")
