"""What those who open streams to us may use: each peer, each address, and all together.

Who opens streams faster than its rate waits, which an honest peer hardly notices. Who has too many open gets no further one. Who goes on
all the same is *refused* for a while: its streams end, its connections too, and the operator is told who and why. When all that
there is is taken, whoever has the most gives one up for whoever has the least, so that one who is greedy keeps nobody out.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from peer import events
from peer.net.token_bucket import Cooldown, Rate, TokenBucket, TokenBuckets
from protocol.wire import endpoints

OPENED: Mapping[str, Rate] = {
    endpoints.SESSION: Rate(2, 16),
    endpoints.QUORUM: Rate(1, 16),
    endpoints.BLOB: Rate(200, 2000),
    endpoints.PIPE: Rate(16, 512),
    endpoints.RELAY: Rate(50, 500),
    endpoints.RELAYED: Rate(500, 5000),
    endpoints.BANDWIDTH: Rate(20, 200),
    endpoints.LOG: Rate(10, 100),
}
"""Streams of one peer, by name. A newcomer fetches thousands of payloads from a node, a pipe is 16 streams, and all that comes
through relays comes from one."""
OPENED_ELSE = Rate(10, 200)
CALLS = Rate(20, 400)
"""Requests of the DHT of one peer."""
RENAMED = Rate(1 / 30, 4)
"""Times that a peer is another node of the DHT than before."""
OFFENCES = Rate(1.0, 32.0)
"""What an honest peer does seldom, or never, by one peer."""
COUNTED_ELSEWHERE = frozenset({endpoints.RELAYED})
"""What comes through a relay is not the relay's doing: whoever sends it is known, and counted, once it has said who it is. From anybody else
it counts as any other stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`of_a_peer`, `of_an_address`, `together`: streams that are open at once; `silent`: of a peer, on which nothing has been said. `rates_of_an_address`: times those of a peer. An offence is a stream
    beyond its limit, one that would wait over `patience` seconds because of its sender's own rate, or what a handler calls one, which may count
    several times; after `offences` of them, at most so many a second on average, a peer is refused for
    `seconds`, and each further time for twice as long, up to `longest_seconds`; after each `forgiven_seconds` without an offence one time less
    counts. `remembered`: peers and addresses whose rates are known."""

    of_a_peer: int = 256
    of_an_address: int = 4096
    together: int = 8192
    silent: int = 64
    rates_of_an_address: float = 16.0
    patience: float = 5.0
    offences: Rate = OFFENCES
    seconds: float = 60.0
    longest_seconds: float = 3600.0
    forgiven_seconds: float = 3600.0
    remembered: int = 8192


LIMITS = Limits()


class Ends(Protocol):
    """A stream, as far as it can be ended."""

    def abort(self) -> None:
        """Ends it at once."""


@dataclass(slots=True)
class _Peer:
    """One that has streams open, at an address."""

    address: str
    streams: dict[Ends, None] = field(default_factory=dict)
    silent: set[Ends] = field(default_factory=set)


class Guests:
    """One per transport. `expel(peer)` ends its connections."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self._follower: Callable[[events.Refused], None] = lambda refused: None
        self.expel: Callable[[str], None] = lambda peer: None
        self.relays: Callable[[], Collection[str]] = lambda: ()
        """Whom we expect streams of others from."""
        self._open: dict[str, _Peer] = {}
        self._count = 0
        self._of_address: Counter[str] = Counter()
        self._rates = TokenBuckets(OPENED_ELSE, 4 * limits.remembered)
        self._offences = TokenBuckets(limits.offences, limits.remembered)
        self._calls = TokenBuckets(CALLS, limits.remembered)
        self._nodes: OrderedDict[str, bytes] = OrderedDict()
        self._renamed = TokenBuckets(RENAMED, limits.remembered)
        self._refused = Cooldown(limits.seconds, limits.longest_seconds, limits.remembered, limits.forgiven_seconds)

    @property
    def streams(self) -> int:
        """How many are open."""
        return self._count

    @property
    def remembered(self) -> int:
        """Rates, offences and refusals that are known."""
        return len(self._rates) + len(self._offences) + len(self._calls) + len(self._refused)

    def of(self, peer: str) -> int:
        """How many streams `peer` has open."""
        return len(self._open[peer].streams) if peer in self._open else 0

    def is_refused(self, peer: str, now: float) -> bool:
        """Whether nothing is taken from `peer` for now."""
        return self._refused.is_resting(peer, now)

    def carries(self, peer: str, name: str) -> bool:
        """Whether a stream of this name is somebody else's, which `peer` relays."""
        return name in COUNTED_ELSEWHERE and peer in self.relays()

    def follow(self, tell: Callable[[events.Refused], None]) -> None:
        """From now on `tell` hears of every peer that is refused."""
        self._follower = tell

    def tell(self, refused: events.Refused) -> None:
        """A peer was refused."""
        self._follower(refused)

    def enter(self, peer: str, where: str, name: str, stream: Ends, now: float) -> bool:
        """Whether a stream of `peer`, at the multiaddress `where`, may be served under this name; `leave` follows if it may."""
        if self.is_refused(peer, now):
            self.expel(peer)
            return False
        address = network_of(where)
        if self.of(peer) >= self.limits.of_a_peer and not self.carries(peer, name):
            self.offend(peer, f"has {self.limits.of_a_peer} streams open and opens more", now)
            return False
        if address and self._of_address[address] >= self.limits.of_an_address:
            return False
        if self._count >= self.limits.together and not self._make_room(peer):
            return False
        known = self._open.setdefault(peer, _Peer(address))
        known.streams[stream] = None
        self._count += 1
        self._of_address[known.address] += 1
        return True

    def may_be_silent(self, peer: str, name: str, stream: Ends, now: float) -> bool:
        """Whether a stream that entered, and on which nothing has been said yet, may be waited for; `leave` follows if not."""
        known = self._open[peer]
        if len(known.silent) >= self.limits.silent and not self.carries(peer, name):
            self.offend(peer, f"has {self.limits.silent} streams open and says nothing", now)
            return False
        known.silent.add(stream)
        return True

    def speaks(self, peer: str, stream: Ends) -> None:
        """Something was said on a stream."""
        if peer in self._open:
            self._open[peer].silent.discard(stream)

    def leave(self, peer: str, stream: Ends) -> None:
        """A stream that entered is over."""
        known = self._open[peer]
        del known.streams[stream]
        known.silent.discard(stream)
        self._count -= 1
        self._of_address[known.address] -= 1
        if not self._of_address[known.address]:
            del self._of_address[known.address]
        if not known.streams:
            del self._open[peer]

    def wait(self, peer: str, name: str, now: float) -> float:
        """For how many seconds a stream of this name that has entered is to wait before it is served."""
        pretends = name in COUNTED_ELSEWHERE and not self.carries(peer, name)
        rate, address = OPENED_ELSE if pretends else OPENED.get(name, OPENED_ELSE), self._open[peer].address
        seconds = self._rates.of((peer, name), rate).spend(now)
        if seconds > self.limits.patience and not self.carries(peer, name):
            self.offend(peer, f"opens {name} again and again", now)
        if address:
            times = self.limits.rates_of_an_address
            whole = Rate(times * rate.per_second, times * rate.burst)
            seconds = max(seconds, self._rates.of((address, name), whole).spend(now))
        return seconds

    def may_call(self, peer: str, now: float) -> bool:
        """Whether `peer` may ask the DHT of us now; one that is refused may not, and who asks too often is."""
        if self.is_refused(peer, now):
            self.expel(peer)
            return False
        if self._calls.of(peer).take(now):
            return True
        self.offend(peer, "asks the DHT too often", now)
        return False

    def may_be_node(self, peer: str, name: bytes, now: float) -> bool:
        """Whether `peer` may be the DHT's node of this name: after a restart it has another one, but not again and again."""
        known = self._nodes.pop(peer, None)
        if not name or known == name:
            self._nodes[peer] = name or known or b""
            return True
        if known and not self._renamed.of(peer).take(now):
            self._nodes[peer] = known
            self.offend(peer, "is another node of the DHT all the time", now)
            return False
        self._nodes[peer] = name
        if len(self._nodes) > self.limits.remembered:
            self._nodes.popitem(last=False)
        return True

    def offend(self, peer: str, reason: str, now: float, times: float = 1.0) -> None:
        """`peer` did what an honest peer does seldom, or never; too often, and it is refused. It counts so many times."""
        if not self._offences.of(peer).take(now, times):
            self.refuse(peer, reason, now)

    def refuse(self, peer: str, reason: str, now: float) -> None:
        """Takes nothing more from `peer` for a while, and ends what it has open."""
        if self.is_refused(peer, now):
            return
        seconds = self._refused.begin(peer, now)
        self.expel(peer)  # at once: what is under way ends in the daemon
        known = self._open.get(peer)
        address = known.address if known else ""
        self.tell(events.Refused(peer=peer, address=address, reason=reason, seconds=seconds))
        for stream in list(known.streams if known else ()):
            stream.abort()

    def abort_all(self) -> None:
        """Ends all that is open."""
        for known in list(self._open.values()):
            for stream in list(known.streams):
                stream.abort()

    def _make_room(self, peer: str) -> bool:
        """Ends the newest stream of whoever has the most, if that is more than `peer` will have."""
        most = max(self._open.values(), key=lambda known: len(known.streams))
        if len(most.streams) <= self.of(peer) + 1:
            return False
        next(reversed(most.streams)).abort()
        return True


_BITS = {4: 32, 6: 64}
"""Of an IP address that a home or a machine has for itself, by version."""


@functools.lru_cache(4096)
def network_of(where: str) -> str:
    """The network of a multiaddress that a home or a machine has for itself; empty where there is none."""
    try:
        host = ipaddress.ip_address(where.split("/")[2])
    except (ValueError, IndexError):
        return ""
    return str(ipaddress.ip_network((host, _BITS[host.version]), strict=False))


OF_AN_ADDRESS = Rate(500.0, 250.0)
TOGETHER = Rate(2000.0, 1000.0)
"""Turns, of about a third of a millisecond on a slow core each. A newcomer that fetches thousands of payloads takes one for each."""
OPENING = 2.0
"""Turns that a new stream takes."""
UNCOUNTED = frozenset({endpoints.PIPE, endpoints.RELAY, endpoints.BANDWIDTH})
"""Names of streams whose frames take no turns: a chain's, what passes a relay, and what measures a line. Each has bounds of its own."""
REMEMBERED = 4096
"""Addresses of which it is known how much they have left."""

SOME = 1e-6
"""Turns that have to be left: then one may take more, and the next one waits for it."""

Go = Callable[[], None]


class Turns:
    """One per transport. `lines`: who waits, by address, then by peer, the next first."""

    def __init__(self, of_an_address: Rate = OF_AN_ADDRESS, together: Rate = TOGETHER) -> None:
        self._whole = TokenBucket(*together)
        self._left = TokenBuckets(of_an_address, REMEMBERED)
        self._lines: OrderedDict[str, OrderedDict[str, deque[tuple[float, Go]]]] = OrderedDict()
        self._next: asyncio.Handle | None = None

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(len(line) for peers in self._lines.values() for line in peers.values())

    def at_once(self, peer: str, address: str, now: float, amount: float = 1.0) -> bool:
        """Takes a turn, if it need not be waited for."""
        address = address or peer
        if address in self._lines or self._whole.wait(now, SOME) > 0 or self._left.of(address).wait(now, SOME) > 0:
            return False
        self._left.of(address).spend(now, amount)
        self._whole.spend(now, amount)
        return True

    def in_line(self, peer: str, address: str, go: Go, amount: float = 1.0) -> None:
        """Calls `go` when it is this peer's turn."""
        line = self._lines.setdefault(address or peer, OrderedDict()).setdefault(peer, deque())
        line.append((amount, go))
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._hand_out)

    async def take(self, peer: str, address: str, amount: float = 1.0) -> None:
        """Returns when it is this peer's turn."""
        loop = asyncio.get_running_loop()
        if not self.at_once(peer, address, loop.time(), amount):
            came: asyncio.Future[None] = loop.create_future()

            def go() -> None:
                if not came.done():
                    came.set_result(None)

            self.in_line(peer, address, go, amount)
            await came

    def _hand_out(self) -> None:
        """One turn to each address that has something left, again and again while there is something left of all."""
        loop = asyncio.get_running_loop()
        now, soonest = loop.time(), 0.0
        self._next = None
        while self._lines:
            waits = self._whole.wait(now, SOME)
            if waits > 0:
                soonest = waits
                break
            dry = {address: self._left.of(address).wait(now, SOME) for address in self._lines}
            if all(dry.values()):
                soonest = min(dry.values())
                break
            for address in [a for a, seconds in dry.items() if seconds == 0]:
                if self._whole.wait(now, SOME) == 0:
                    self._give(address, now)
        if self._lines:
            self._next = loop.call_later(max(soonest, 0.001), self._hand_out)

    def _give(self, address: str, now: float) -> None:
        peers = self._lines.pop(address)
        peer, line = next(iter(peers.items()))
        amount, go = line.popleft()
        del peers[peer]
        if line:
            peers[peer] = line  # behind the others
        if peers:
            self._lines[address] = peers
        self._left.of(address).spend(now, amount)
        self._whole.spend(now, amount)
        go()
