"""Our own addresses: those that the daemon lists, without those that this machine has lost.

The daemon also lists addresses at which four other peers have seen us. That is how it knows the one that a router gives us, but
for half an hour it goes on to list one that an interface has lost.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

import psutil

from peer.net.address import is_circuit, parse
from peer.net.base import BadAddress


class OwnAddresses:
    """`listed`: in the daemon's order, the newest that were any; `hosts`: the interfaces' addresses then."""

    def __init__(self) -> None:
        self.listed: tuple[str, ...] = ()
        self.hosts: frozenset[str] = frozenset()
        self._lost: frozenset[str] = frozenset()

    def update(self, listed: Iterable[str], hosts: frozenset[str]) -> bool:
        """The daemon lists these now, and the interfaces have these `hosts`. Whether an interface has lost one."""
        lost = self.hosts - hosts
        self.hosts, self._lost = hosts, (self._lost | lost) - hosts
        found = {a: host for a in listed if (host := _host(a)) not in (None, *self._lost)}
        between_networks = set(map(_host, self.listed)) & self._lost and not any(
            _is_elsewhere(host) for address, host in found.items() if not is_circuit(address)
        )
        if found and not between_networks:
            self.listed = tuple(found)
        return bool(lost)


def _host(address: str) -> str | None:
    try:
        return parse(address).dial.split("/")[2]
    except BadAddress:
        return None


def _is_elsewhere(host: str | None) -> bool:
    """Whether others may know this machine by it."""
    try:
        return not ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return True


def interface_hosts() -> frozenset[str]:
    """The IP addresses of this machine's interfaces, as text."""
    families = (socket.AF_INET, socket.AF_INET6)
    every = [a for addresses in psutil.net_if_addrs().values() for a in addresses if a.family in families]
    return frozenset(a.address.partition("%")[0] for a in every)
