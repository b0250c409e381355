"""Finds out how others can reach us: two of them try (peer/net/dial_back.py), a third one if they do not agree.

    direct     they get through to an address of this machine
    mapped     they get through to an address of the router before it: a port is forwarded, by hand, by UPnP or by NAT-PMP; or
               the user says so (`--announce`) and nobody can tell, since that address is not the one that we are seen at
    private    nobody gets through
    (empty)    nobody could tell

Who sees us at an address of its local network cannot tell how the internet sees us, unless all of the run is in that network.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from peer.net.address import host_of, is_circuit, is_public, port_of, tcp
from peer.net.base import Transport, call
from peer.net.directory import Directory
from peer.net.own_addresses import interface_hosts
from protocol.errors import RemoteError
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import MOST_PORTS, Dialled, DialMe

ANSWER_SECONDS = 10.0
MOST_ANSWERED = 1024
"""Bytes."""
MOST_ASKED = 3
AGAIN_SECONDS = 1800.0
"""Between two looks, when nothing changes."""
UNKNOWN_SECONDS = 60.0
"""The same while nobody could tell."""
MOST_FOUND = 2
"""Addresses that were found and are announced; each of those who could tell named it, or two of three did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`how`: see above; `addresses`: those, without our id, at which others got through; `asked`: who tried."""

    how: str = ""
    addresses: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()

    def whole(self, peer: str) -> tuple[str, ...]:
        """The addresses with our id, `peer`."""
        return tuple(f"{address}/p2p/{peer}" for address in self.addresses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What is needed to ask. `others()`: whom to ask, in this order; `reach(peer)` connects to one; `addresses(peer)`: where it says it
    is; `announced`: what the user says, without our id; `hosts()`: this machine's IP addresses."""

    transport: Transport
    others: Callable[[], AsyncIterator[str]]
    reach: Callable[[str], Awaitable[None]]
    addresses: Callable[[str], Sequence[str]]
    announced: tuple[str, ...] = ()
    hosts: Callable[[], frozenset[str]] = interface_hosts


async def find_out(around: Around) -> Finding:
    """Asks two at once, and one more while it is not clear. Raises TransportLost."""
    transport = around.transport
    listed = [address for address in transport.addresses if not is_circuit(address)]
    ports = list(dict.fromkeys(port for port in map(port_of, (*around.announced, *listed)) if port))[:MOST_PORTS]
    told: dict[str, Dialled] = {}
    asked, others = {transport.peer_id}, around.others()
    while ports and _majority(told) is None and len(told) < MOST_ASKED:
        wave = await _take(others, 1 if told else 2, asked)
        if not wave:
            break
        asked.update(wave)
        answers = await asyncio.gather(*(_ask(around, peer, DialMe(ports=tuple(ports))) for peer in wave))
        told |= {peer: answer for peer, answer in zip(wave, answers, strict=True) if answer is not None}
    return _judged(told, around)


async def _take(others: AsyncIterator[str], count: int, known: set[str]) -> list[str]:
    """The next ones that are not `known`, at most so many."""
    taken: dict[str, None] = {}
    async for peer in others:
        if peer not in known:
            taken[peer] = None
        if len(taken) == count:
            break
    return list(taken)


async def _ask(around: Around, peer: str, request: DialMe) -> Dialled | None:
    """What `peer` says, or None where it cannot tell."""
    with contextlib.suppress(RemoteError):
        await around.reach(peer)
        raw = await call(
            around.transport,
            peer,
            endpoints.DIAL_BACK,
            encoding.encode(request),
            timeout=ANSWER_SECONDS,
            limit=MOST_ANSWERED,
        )
        answer = encoding.expect(Dialled, encoding.decode(raw, peer), peer)
        return answer if _can_tell(answer, around.addresses(peer)) else None
    return None


def _can_tell(answer: Dialled, its_addresses: Sequence[str]) -> bool:
    """Whether who answered sees us as the others do."""
    its_hosts = [host_of(address) for address in its_addresses if not is_circuit(address)]
    return is_public(answer.host) or (answer.host != "" and not any(map(is_public, its_hosts)))


def _majority(told: dict[str, Dialled]) -> bool | None:
    """Whether two got through, or two did not; None where it is not clear yet."""
    got = [bool(answer.ports) for answer in told.values()]
    return next((way for way in (True, False) if got.count(way) >= 2), None)


def _judged(told: dict[str, Dialled], around: Around) -> Finding:
    through = _majority(told)
    if through is None and told:
        through = all(answer.ports for answer in told.values())
    seen = {answer.host for answer in told.values()}
    elsewhere = [address for address in around.announced if host_of(address) not in seen]
    asked = tuple(told)
    if through:
        reached = Counter(tcp(answer.host, port) for answer in told.values() for port in set(answer.ports))
        addresses = tuple(a for a, named in reached.items() if named >= min(2, len(told)))[:MOST_FOUND]
        own = any(host_of(address) in around.hosts() for address in addresses)
        return Finding(how="direct" if own else "mapped", addresses=addresses, asked=asked)
    if elsewhere:
        return Finding(how="mapped", asked=asked)
    return Finding(how="private" if told else "", asked=asked)


def around(directory: Directory, transport: Transport, announced: tuple[str, ...]) -> Around:
    """With the bootstrap nodes to be asked first, then peers that are reached from outside and to whom we have not connected."""

    async def others() -> AsyncIterator[str]:
        for node in directory.nodes():
            yield node
        for peer, said in list(directory.known.items()):
            if said.reachable in ("direct", "mapped") and peer not in directory.reached:
                yield peer

    return Around(
        transport=transport, others=others, reach=directory.reach, addresses=directory.addresses, announced=announced
    )


@dataclass(slots=True)
class Reach:
    """Looks again when our addresses change, and now and then. `found` is the newest finding; `tell(finding)` hears of one that differs."""

    around: Around
    found: Finding
    tell: Callable[[Finding], None]
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def changed(self) -> None:
        """Our addresses have: what was found of those before says nothing of these."""
        self.found = Finding()
        self._changed.set()

    async def run(self) -> None:
        """Never returns. Raises TransportLost."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_SECONDS if self.found.how else UNKNOWN_SECONDS):
                    await self._changed.wait()
            self._changed.clear()
            found = await find_out(self.around)
            if found.how and (found.how, found.addresses) != (self.found.how, self.found.addresses):
                self.found = found
                self.tell(found)
