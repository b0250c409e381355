"""Addresses of peers, as text: `/ip4/203.0.113.5/tcp/4001/p2p/12D3Koo…` (libp2p's multiaddr, TCP only); and our own.

Only two forms of address in the usual spelling are accepted, without QUIC: hivemind's daemon loses the last messages of
a stream over it. The daemon goes on to list a lost address of ours for half an hour; `OwnAddresses` leaves those out.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass

import psutil
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from peer.net.base import BadAddress
from protocol import identity

_EXAMPLE = "it looks like /ip4/203.0.113.5/tcp/4001/p2p/12D3Koo…"
_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*")
_MAX = 512
_HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6")
_CIRCUIT = "/p2p-circuit"
_LOCAL = [
    ipaddress.ip_network(network)
    for network in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.168.0.0/16", "::/8", "fc00::/7", "fe80::/10"),
    )
]
_DIRECT = ["tcp", "p2p"]
_RELAYED = ["tcp", "p2p", "p2p-circuit", "p2p"]


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
    try:
        parts = [(protocol.name, value or "") for protocol, value in Multiaddr(text).items()]
    except (MultiaddrError, ValueError) as error:
        reason = " ".join(getattr(error, "message", str(error)).split())
        raise bad(reason[:100] or "not an address") from None
    names = [name for name, _ in parts]
    if not names:
        raise bad("not an address")
    if "udp" in names:
        raise bad("QUIC and UDP are not used here, only TCP")
    if names[0] == "dnsaddr":
        raise bad("dnsaddr is not used here; write the name as /dns4/NAME/tcp/PORT/p2p/ID")
    if names[0] not in _HOSTS or names[1:] not in (_DIRECT, _RELAYED):
        raise bad("not a host, a TCP port and a peer id")
    kind, host, port = names[0], text.split("/")[2], parts[1][1]
    if not _is_host(kind, host):
        raise bad(f"{host or 'nothing'} is not a host of kind {kind}")
    if port == "0":
        raise bad("0 is not a port")
    ids = [value for name, value in parts if name == "p2p"]
    for peer in ids:
        try:
            identity.public_key(peer)
        except identity.IdentityError:
            raise bad(f"{peer or 'nothing'} is not a peer id") from None
    dial = f"/{kind}/{host}/tcp/{port}" + (f"/p2p/{ids[0]}/p2p-circuit" if len(ids) > 1 else "")
    if text != f"{dial}/p2p/{ids[-1]}":
        raise bad("not written in the usual way")
    return Address(dial, ids[-1])


def _is_host(kind: str, host: str) -> bool:
    """Returns whether `host` means the same machine everywhere: a scope (%) means something on one machine only."""
    if kind not in ("ip4", "ip6"):
        return _NAME.fullmatch(host) is not None
    address = _ip(host)
    return address is not None and f"ip{address.version}" == kind and "%" not in host


# --- parts of an address that is ours, or was parsed before


def peers_of(addresses: Iterable[str]) -> tuple[str, ...]:
    """The peers at these full addresses, each once, in their order."""
    return tuple(dict.fromkeys(address.rpartition("/p2p/")[2] for address in addresses))


def is_circuit(address: str) -> bool:
    """Returns whether it leads through a relay of libp2p's."""
    return _CIRCUIT in address


def host_of(address: str) -> str:
    return address.split("/")[2] if address.count("/") > 2 else ""


def port_of(address: str) -> int:
    """Its TCP port, 0 where it has none."""
    parts = address.split("/")
    return int(parts[4]) if len(parts) > 4 and parts[3] == "tcp" and parts[4].isdecimal() else 0


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_public(host: str) -> bool:
    """Returns whether `host` is an IP address that is not local to a machine or network."""
    address = _ip(host)
    return address is not None and not any(address in network for network in _LOCAL)


def is_loopback(host: str) -> bool:
    address = _ip(host)
    return address is not None and address.is_loopback


def is_link_local(host: str) -> bool:
    """Whether `host` is an IP address of one cable or Wi-Fi only; in IPv6, only together with an interface's name."""
    address = _ip(host)
    return address is not None and address.is_link_local


def may_be_dialled(host: str, own: Iterable[str], begun: Iterable[str]) -> bool:
    """Whether a peer's word is enough to connect to an IP `host`: on the internet or in our own network, and anywhere
    for a run that is not on the internet. own: our hosts; begun: those of addresses that we began with."""
    address = _ip(host)
    if address is None or is_public(host):
        return address is not None
    begun, own = list(begun), [known for known in own if _ip(known) is not None]
    if begun and all(_ip(known) is not None and not is_public(known) for known in begun):
        return True
    if address.is_loopback:
        return bool(own) and all(map(is_loopback, own))
    network = ipaddress.ip_network((address, 24 if address.version == 4 else 64), strict=False)
    return not address.is_link_local and any(_ip(known) in network for known in own)


def tcp(host: str, port: int) -> str:
    """The address of an IP host and a port, without a peer."""
    return f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}"


# --- our own


class OwnAddresses:
    """Our addresses.

    listed: in the daemon's order, as of the last time that there were any
    hosts: the interfaces' addresses then
    """

    def __init__(self) -> None:
        self.listed: tuple[str, ...] = ()
        self.hosts: frozenset[str] = frozenset()
        self._lost: frozenset[str] = frozenset()

    def update(self, listed: Iterable[str], hosts: frozenset[str]) -> bool:
        """Takes what the daemon lists and the interfaces have now. Returns whether an interface has lost an address."""
        lost = self.hosts - hosts
        self.hosts, self._lost = hosts, (self._lost | lost) - hosts
        found = {a: host for a in listed if (host := _host(a)) not in (None, *self._lost)}
        between_networks = set(map(_host, self.listed)) & self._lost and all(
            is_circuit(address) or is_loopback(host or "") for address, host in found.items()
        )
        if found and not between_networks:
            self.listed = tuple(found)
        return bool(lost)


def _host(address: str) -> str | None:
    try:
        return parse(address).dial.split("/")[2]
    except BadAddress:
        return None


def best_first(addresses: Iterable[str]) -> list[str]:
    """Sorts addresses: public ones first, those of this machine alone last, without link-local IPv6.

    Among several of a kind, the one of the interface that leads to the internet comes before virtual networks.
    """
    outward = tuple(filter(None, map(_source, ("192.0.2.1", "2001:db8::1"))))

    def rank(address: str) -> tuple[int, int]:
        host = host_of(address)
        if is_circuit(address):
            return 0, len(outward)
        is_local = _ip(host) is not None and not is_public(host)
        kind = 3 if is_loopback(host) else 2 if is_link_local(host) else 1 if is_local else 0
        return kind, outward.index(host) if host in outward else len(outward)

    return sorted((a for a in addresses if ":" not in host_of(a) or not is_link_local(host_of(a))), key=rank)


def on_interfaces(listed: Iterable[str], hosts: Iterable[str]) -> list[str]:
    """Our addresses at an interface's `hosts`, if we listen on all of them: the daemon lists new ones 5 s later."""
    inner = [a for a in listed if not is_circuit(a) and is_loopback(host_of(a))]
    ports = {":" in host_of(a): (port_of(a), parse(a).peer) for a in inner}
    return [
        f"{tcp(host, port)}/p2p/{peer}"
        for host in sorted(hosts)
        for port, peer in [ports.get(":" in host, (0, ""))]
        if port
    ]


def _source(towards: str) -> str:
    """Our address that packets to `towards`, a documentation address, would come from; empty if nothing leads there."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in towards else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interface_hosts() -> frozenset[str]:
    """The IP addresses of this machine's interfaces, as text."""
    families = (socket.AF_INET, socket.AF_INET6)
    every = [a for addresses in psutil.net_if_addrs().values() for a in addresses if a.family in families]
    return frozenset(a.address.partition("%")[0] for a in every)
