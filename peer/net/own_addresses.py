"""Our own addresses: those that the daemon lists, without those that this machine has lost.

The daemon also lists addresses at which four other peers have seen us. That is how it knows the one that a router gives us, but
for half an hour it goes on to list one that an interface has lost.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

import psutil

from peer.net.address import host_of, is_circuit, is_link_local, is_loopback, is_public, parse, port_of, tcp
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


def best_first(addresses: Iterable[str]) -> list[str]:
    """Those that strangers can use come first, those of this machine alone last; among several of a kind, that of the interface which leads to the
    internet, and not one of a virtual network. IPv6 addresses that need the name of an interface are left out."""
    outward = tuple(filter(None, map(_source, ("192.0.2.1", "2001:db8::1"))))

    def rank(address: str) -> tuple[int, int]:
        host = host_of(address)
        if is_circuit(address):
            return 0, len(outward)  # the addresses of others say nothing of ours
        kind = (
            3 if is_loopback(host) else 2 if is_link_local(host) else 1 if _is_ip(host) and not is_public(host) else 0
        )
        return kind, outward.index(host) if host in outward else len(outward)

    return sorted((a for a in addresses if ":" not in host_of(a) or not is_link_local(host_of(a))), key=rank)


def on_interfaces(listed: Iterable[str], hosts: Iterable[str]) -> list[str]:
    """The addresses of a peer that listens on all interfaces, which have these `hosts`. Its daemon lists new ones up to five seconds later, and nobody
    finds it meanwhile; the port is in the address for this machine alone, which is always `listed`."""
    inner = [a for a in listed if not is_circuit(a) and is_loopback(host_of(a))]
    ports = {":" in host_of(a): (port_of(a), parse(a).peer) for a in inner}
    return [
        f"{tcp(host, port)}/p2p/{peer}"
        for host in sorted(hosts)
        for port, peer in [ports.get(":" in host, (0, ""))]
        if port
    ]


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _source(towards: str) -> str:
    """Our address that packets to `towards`, an address for documents, would come from; nothing is sent. Empty where nothing leads there."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in towards else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interface_hosts() -> frozenset[str]:
    """The IP addresses of this machine's interfaces, as text."""
    families = (socket.AF_INET, socket.AF_INET6)
    every = [a for addresses in psutil.net_if_addrs().values() for a in addresses if a.family in families]
    return frozenset(a.address.partition("%")[0] for a in every)
