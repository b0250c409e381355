"""Reachability: other peers dial us back, and we dial others back (docs/adr/0023-dial-back.md).

Two others try, a third one if they disagree. The result:

    direct     they reach an address of this machine
    mapped     they reach an address of its router: a port is forwarded, by hand, by UPnP or by NAT-PMP; or the user
               says so (`--announce`) and nobody can tell, as we are seen at another address
    private    nobody reaches us
    (empty)    nobody could tell

A peer that sees us at a local address cannot tell how the internet sees us, unless all of the run is in that network. A
request names ports only, which are tried at the address that its connection comes from. Only a libp2p greeting counts,
and every failure takes the same time. Requests are limited in rate.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from peer.net import greeting
from peer.net.address import host_of, interface_hosts, is_circuit, is_public, port_of, tcp
from peer.net.base import Clock, Transport, call, serve_calls, wait_for_event
from peer.net.directory import Directory
from peer.net.guests import network_of
from peer.net.rate_limits import Rate, TokenBucket, TokenBuckets
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import MOST_PORTS, Dialled, DialMe

ANSWER_SECONDS = 10.0
MOST_ANSWERED = 1024
MOST_ASKED = 3
AGAIN_SECONDS = 1800.0
UNKNOWN_SECONDS = 60.0
"""AGAIN_SECONDS while the result is empty."""
MOST_FOUND = 2
"""Most announced addresses of a finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachability:
    """A result. `addresses`: those, without our id, at which others reached us; `asked`: the peers that tried."""

    how: str = ""
    addresses: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()

    def whole(self, peer: str) -> tuple[str, ...]:
        """The addresses with our id, `peer`."""
        return tuple(f"{address}/p2p/{peer}" for address in self.addresses)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachContext:
    """The inputs of a reachability test."""

    transport: Transport
    others: Callable[[], AsyncIterator[str]]  # yields the peers to ask, in order
    reach: Callable[[str], Awaitable[None]]  # connects to one
    addresses: Callable[[str], Sequence[str]]  # returns where one says it is
    announced: tuple[str, ...] = ()  # what the user says, without our id
    hosts: Callable[[], frozenset[str]] = interface_hosts  # returns this machine's IP addresses


async def check_reachability(around: ReachContext) -> Reachability:
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


async def _ask(around: ReachContext, peer: str, request: DialMe) -> Dialled | None:
    """Returns the answer of `peer`, or None where it cannot tell."""
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
        answer = encoding.decode(raw, peer, Dialled)
        return answer if _can_tell(answer, around.addresses(peer)) else None
    return None


def _can_tell(answer: Dialled, its_addresses: Sequence[str]) -> bool:
    """Returns whether the answering peer sees us as the others do."""
    its_hosts = [host_of(address) for address in its_addresses if not is_circuit(address)]
    return is_public(answer.host) or (answer.host != "" and not any(map(is_public, its_hosts)))


def _majority(told: dict[str, Dialled]) -> bool | None:
    """Returns whether two got through, or two did not; None where it is not clear yet."""
    got = [bool(answer.ports) for answer in told.values()]
    return next((way for way in (True, False) if got.count(way) >= 2), None)


def _judged(told: dict[str, Dialled], around: ReachContext) -> Reachability:
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
        return Reachability(how="direct" if own else "mapped", addresses=addresses, asked=asked)
    if elsewhere:
        return Reachability(how="mapped", asked=asked)
    return Reachability(how="private" if told else "", asked=asked)


def reach_context(directory: Directory, transport: Transport, announced: tuple[str, ...]) -> ReachContext:
    """Asks the bootstrap nodes first, then reachable peers that we are not connected to."""

    async def others() -> AsyncIterator[str]:
        for node in directory.nodes():
            yield node
        for peer, said in list(directory.known.items()):
            if said.reachable in ("direct", "mapped") and peer not in directory.reached:
                yield peer

    return ReachContext(
        transport=transport, others=others, reach=directory.reach, addresses=directory.addresses, announced=announced
    )


@dataclass(slots=True)
class ReachMonitor:
    """Checks our reachability when our addresses change, and now and then. `tell` is called with each new finding."""

    around: ReachContext
    found: Reachability
    tell: Callable[[Reachability], None]
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def changed(self) -> None:
        """Drops the finding, which was of our old addresses, and checks again."""
        self.found = Reachability()
        self._changed.set()

    async def run(self) -> None:
        """Never returns. Raises TransportLost."""
        while True:
            await wait_for_event(self._changed, AGAIN_SECONDS if self.found.how else UNKNOWN_SECONDS)
            self._changed.clear()
            found = await check_reachability(self.around)
            if found.how and (found.how, found.addresses) != (self.found.how, self.found.addresses):
                self.found = found
                self.tell(found)


MAX_REQUEST = 256
EACH = Rate(1 / 30, 6.0)
TOGETHER = Rate(4.0, 32.0)

Greets = Callable[[str, int], Coroutine[Any, Any, bool]]
"""(IP address, port) -> whether a libp2p host greets there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialBackLimits:
    """Limits of a DialBackServer."""

    seconds: float = 3.0  # that a port has to greet
    each: Rate = EACH  # requests of one address or peer
    together: Rate = TOGETHER  # all requests
    at_once: int = 16  # requests under way
    kept: int = 4096  # addresses and peers whose requests are counted


DIAL_BACK_LIMITS = DialBackLimits()


async def greets(host: str, port: int) -> bool:
    """Returns whether a libp2p host greets there. Takes as long as the other side likes."""
    try:
        return await greeting.is_given(host, port)
    except OSError:
        return False


class DialBackServer:
    """One per process that answers."""

    def __init__(
        self, transport: Transport, clock: Clock, greets: Greets = greets, bounds: DialBackLimits = DIAL_BACK_LIMITS
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._greets = greets
        self._bounds = bounds
        self._asked = TokenBuckets(bounds.each, bounds.kept)
        self._together = TokenBucket(*bounds.together)
        self._under_way = 0

    async def serve(self) -> None:
        await serve_calls(self._transport, endpoints.DIAL_BACK, self._answer, limit=MAX_REQUEST)

    async def _answer(self, peer: str, request: bytes) -> bytes:
        """The reply to a call. Raises RemoteError."""
        ask = encoding.decode(request, peer, DialMe)
        seen = self._transport.seen_at(peer)
        host = "" if is_circuit(seen) else host_of(seen)
        network = "" if is_circuit(seen) else network_of(seen)
        if not network:
            return encoding.encode(Dialled(host=""))
        now = self._clock.steady()
        may = all(self._asked.of(who).take(now) for who in (peer, network))
        if not may or self._under_way >= self._bounds.at_once or not self._together.take(now):
            raise RemoteError(peer, f"dial-back for {short_peer(peer)}: asked too often; ask somebody else")
        self._under_way += 1
        try:
            return encoding.encode(Dialled(host=host, ports=await self._try(host, {*ask.ports, port_of(seen)})))
        finally:
            self._under_way -= 1

    async def _try(self, host: str, ports: set[int]) -> tuple[int, ...]:
        """Returns the ports at which a libp2p host greets; unless all do, it takes all its time."""
        found: set[int] = set()

        async def dial(port: int) -> None:
            if await self._greets(host, port):
                found.add(port)
            else:
                await asyncio.sleep(self._bounds.seconds)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._bounds.seconds):
                await asyncio.gather(*(dial(port) for port in ports if port))
        return tuple(sorted(found))
