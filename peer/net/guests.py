"""Limits on what other peers use of this process: streams, requests, and its time.

*Guests* bounds streams of a peer, of an address, and of all together. A peer that opens streams faster than its rate
waits; one that goes on all the same is *refused* for a while. When all streams are taken, the peer with the most gives
one up for the peer with the least. What waits in memory until a peer reads it is bounded in bytes (`Held`).

*Turns* is fair queueing of requests, first among addresses, then among the peers of an address. A turn stands for
processor time: what decoding and answering a small request takes. A long message takes as many turns as it has
TURN_BYTES, before it is decoded, and a long answer takes turns of its caller's next request.
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
from peer.net.lru import LruDict
from peer.net.rate_limits import Cooldown, Rate, TokenBucket, TokenBuckets
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
"""Streams that one peer opens, by name. A newcomer fetches thousands of payloads from a node, a pipe has 16 streams."""
OPENED_ELSE = Rate(10, 200)
CALLS = Rate(20, 400)
CALL_BYTES = 4096
"""Bytes of a DHT request that counts as one."""
RENAMED = Rate(1 / 30, 4)
OFFENCES = Rate(1.0, 32.0)
COUNTED_ELSEWHERE = frozenset({endpoints.RELAYED})
"""Streams that our relays carry for peers that are identified, and counted, later."""
OF_AN_ADDRESS = Rate(500.0, 250.0)
TOGETHER = Rate(2000.0, 1000.0)
"""Turns, each about a third of a millisecond on a slow core. A newcomer takes one for each payload that it fetches."""
TURNS_TO_OPEN = 2.0
TURN_BYTES = 1024
"""Bytes of a message that take a turn to decode, if each is a value (tests/fuzz/test_costs.py)."""
TURN_VALUES = 100
"""Values of a message that take a turn to decode, and to encode again where its digest is wanted."""
SIGNATURE_TURNS = 0.5
COUNTED_TURN_BYTES = 4096
"""Bytes that take a turn to count their values, if each is one."""
PASSED_TURN_BYTES = 64 * 1024
"""Bytes that take a turn to receive, or to read, pack and send, without decoding them."""
FROM_OPERATORS = frozenset({endpoints.QUORUM, endpoints.SESSION})
"""Streams that are opened to operators' nodes. What those say takes turns as what guests say: by its bytes when it
comes, and by its values before it is decoded (protocol/wire/encoding.py)."""
UNCOUNTED = frozenset({endpoints.PIPE, endpoints.RELAY, endpoints.BANDWIDTH})
"""Streams whose frames take no turns, as they have limits of their own."""
MAX_ADDRESSES = 4096
_ANY = 1e-6
"""Turns that must be left for the next one to begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of Guests.

    of_a_peer, of_an_address, together: open streams
    patience: an offence is a stream that would wait for longer, in seconds, because of its sender's own rate
    seconds, longest_seconds: of a refusal; each is twice as long as the one before
    """

    of_a_peer: int = 256
    of_an_address: int = 4096
    together: int = 8192
    silent: int = 64  # open streams of a peer on which nothing has been said
    held_of_a_peer: int = 8 << 20  # bytes that wait until it reads them
    held_together: int = 256 << 20  # the same of all; beyond it, streams end of those that do not read
    unread_seconds: float = 5.0  # without reading, after which a peer counts as one that does not read
    rates_of_an_address: float = 16.0  # multiple of a peer's rates
    patience: float = 5.0
    offences: Rate = OFFENCES  # rate above which a peer is refused
    seconds: float = 60.0
    longest_seconds: float = 3600.0
    forgiven_seconds: float = 3600.0  # without an offence, after which one refusal is forgotten
    remembered: int = 8192  # peers and addresses whose rates are known


LIMITS = Limits()


class Abortable(Protocol):
    """A stream, as far as it can be ended."""

    def abort(self) -> None: ...


@dataclass(eq=False, slots=True)
class Held:
    """Bytes that wait in memory until `peer` reads them; `end` ends the stream, and is called if they are too many."""

    guests: Guests
    peer: str
    end: Callable[[], None]
    size: int = 0
    since: float = 0.0  # when the peer last read, or the first of them came

    def add(self, size: int, now: float) -> None:
        """Notes that `size` more bytes wait."""
        if not self.size:
            self.since = now
        self.size += size
        self.guests.hold(self, size, now)

    def read(self, size: int, now: float) -> None:
        """Notes that `size` bytes were read, or do not wait any more."""
        self.size -= size
        self.since = now
        self.guests.let_go(self, size)


@dataclass(slots=True)
class _Peer:
    address: str
    streams: dict[Abortable, None] = field(default_factory=dict)
    silent: set[Abortable] = field(default_factory=set)


class Guests:
    """A transport's limits on streams.

    expel(peer): ends a peer's connections
    relays(): the relays that we use
    operators(): the other operators' nodes, whose turns are their own wherever they are
    """

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self._follower: Callable[[events.Refused], None] = lambda refused: None
        self.expel: Callable[[str], None] = lambda peer: None
        self.relays: Callable[[], Collection[str]] = lambda: ()
        self.operators: Callable[[], Collection[str]] = lambda: ()
        self._open: dict[str, _Peer] = {}
        self.streams = 0
        self._of_address: Counter[str] = Counter()
        self._held: dict[str, dict[Held, None]] = {}
        self.held = 0
        self._rates = TokenBuckets(OPENED_ELSE, 4 * limits.remembered)
        self._offences = TokenBuckets(limits.offences, limits.remembered)
        self._calls = TokenBuckets(CALLS, limits.remembered)
        self._nodes = LruDict[str, bytes](limits.remembered)
        self._renamed = TokenBuckets(RENAMED, limits.remembered)
        self._refused = Cooldown(limits.seconds, limits.longest_seconds, limits.remembered, limits.forgiven_seconds)

    @property
    def remembered(self) -> int:
        """Known rates, offences and refusals."""
        return len(self._rates) + len(self._offences) + len(self._calls) + len(self._refused)

    def of(self, peer: str) -> int:
        """Open streams of `peer`."""
        return len(self._open[peer].streams) if peer in self._open else 0

    def is_refused(self, peer: str, now: float) -> bool:
        return self._refused.is_resting(peer, now)

    def carries(self, peer: str, name: str) -> bool:
        """Returns whether `peer` relays a stream of this name for another peer."""
        return name in COUNTED_ELSEWHERE and peer in self.relays()

    def account(self, peer: str, where: str) -> str:
        """The address by which `peer`, at the multiaddress `where`, takes turns; empty: it takes them by its name."""
        return "" if peer in self.operators() else network_of(where)

    def follow(self, tell: Callable[[events.Refused], None]) -> None:
        """Calls `tell` for every peer that is refused from now on."""
        self._follower = tell

    def tell(self, refused: events.Refused) -> None:
        self._follower(refused)

    def enter(self, peer: str, where: str, name: str, stream: Abortable, now: float) -> bool:
        """Whether a stream of `peer`, at the multiaddress `where`, may be served. Each one that may must `leave`."""
        if self.is_refused(peer, now):
            self.expel(peer)
            return False
        address = network_of(where)
        if self.of(peer) >= self.limits.of_a_peer and not self.carries(peer, name):
            self.offend(peer, f"has {self.limits.of_a_peer} streams open and opens more", now)
            return False
        if address and self._of_address[address] >= self.limits.of_an_address:
            return False
        if self.streams >= self.limits.together and not self._make_room(peer):
            return False
        known = self._open.setdefault(peer, _Peer(address))
        known.streams[stream] = None
        self.streams += 1
        self._of_address[known.address] += 1
        return True

    def may_be_silent(self, peer: str, name: str, stream: Abortable, now: float) -> bool:
        """Returns whether an entered stream on which nothing has been said yet may wait."""
        known = self._open[peer]
        if len(known.silent) >= self.limits.silent and not self.carries(peer, name):
            self.offend(peer, f"has {self.limits.silent} streams open and says nothing", now)
            return False
        known.silent.add(stream)
        return True

    def speaks(self, peer: str, stream: Abortable) -> None:
        """Notes that something was said on a stream."""
        if peer in self._open:
            self._open[peer].silent.discard(stream)

    def leave(self, peer: str, stream: Abortable) -> None:
        """Notes that an entered stream is over."""
        known = self._open[peer]
        del known.streams[stream]
        known.silent.discard(stream)
        self.streams -= 1
        self._of_address[known.address] -= 1
        if not self._of_address[known.address]:
            del self._of_address[known.address]
        if not known.streams:
            del self._open[peer]

    def wait(self, peer: str, name: str, now: float) -> float:
        """Returns for how many seconds an entered stream waits before it is served."""
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

    def may_call(self, peer: str, now: float, size: int = 0) -> bool:
        """Returns whether `peer` may send a DHT request of `size` bytes now."""
        if self.is_refused(peer, now):
            self.expel(peer)
            return False
        if self._calls.of(peer).take(now, max(1.0, size / CALL_BYTES)):
            return True
        self.offend(peer, "asks the DHT too often", now)
        return False

    def may_be_node(self, peer: str, name: bytes, now: float) -> bool:
        """Returns whether `peer` may be the DHT node of this id: a restart changes it, but not again and again."""
        known = self._nodes.pop(peer, None)
        if not name or known == name:
            self._nodes[peer] = name or known or b""
            return True
        if known and not self._renamed.of(peer).take(now):
            self._nodes[peer] = known
            self.offend(peer, "is another node of the DHT all the time", now)
            return False
        self._nodes[peer] = name
        return True

    def offend(self, peer: str, reason: str, now: float, times: float = 1.0) -> None:
        """Counts an offence of `peer` so many times, and refuses it after too many."""
        if not self._offences.of(peer).take(now, times):
            self.refuse(peer, reason, now)

    def refuse(self, peer: str, reason: str, now: float) -> None:
        """Ends all streams of `peer`, and takes no more for a while."""
        if self.is_refused(peer, now):
            return
        seconds = self._refused.begin(peer, now)
        self.expel(peer)  # first: what is under way ends in the daemon
        known = self._open.get(peer)
        address = known.address if known else ""
        self.tell(events.Refused(peer=peer, address=address, reason=reason, seconds=seconds))
        for stream in list(known.streams if known else ()):
            stream.abort()

    def hold(self, held: Held, size: int, now: float) -> None:
        """Counts bytes that wait until a peer reads them, and ends streams if those are too many."""
        of_peer = self._held.setdefault(held.peer, {})
        of_peer[held] = None
        self.held += size
        if sum(each.size for each in of_peer) > self.limits.held_of_a_peer:
            held.end()
        while self.held > self.limits.held_together and (unread := self._most_unread(now)):
            self._forget(unread)
            unread.end()

    def let_go(self, held: Held, size: int) -> None:
        """Counts bytes that do not wait any more."""
        if held not in self._held.get(held.peer, {}):
            return
        self.held -= size
        if held.size <= 0:
            self._forget(held)

    def _forget(self, held: Held) -> None:
        of_peer = self._held[held.peer]
        del of_peer[held]
        self.held -= max(0, held.size)
        if not of_peer:
            del self._held[held.peer]

    def _most_unread(self, now: float) -> Held | None:
        """Returns the largest unread message queue of the address with the most unread bytes."""
        unread = [
            held for of_peer in self._held.values() for held in of_peer if now - held.since > self.limits.unread_seconds
        ]
        sizes = Counter[str]()
        for held in unread:
            sizes[self._address_of(held.peer)] += held.size
        return max(unread, key=lambda held: (sizes[self._address_of(held.peer)], held.size), default=None)

    def _address_of(self, peer: str) -> str:
        return (self._open[peer].address if peer in self._open else "") or peer

    def abort_all(self) -> None:
        for known in list(self._open.values()):
            for stream in list(known.streams):
                stream.abort()

    def _make_room(self, peer: str) -> bool:
        """Ends the newest stream of the peer with the most, if these are more than `peer` will have."""
        most = max(self._open.values(), key=lambda known: len(known.streams))
        if len(most.streams) <= self.of(peer) + 1:
            return False
        next(reversed(most.streams)).abort()
        return True


_HOME_BITS = {4: 32, 6: 64}
"""Prefix of an IP address that one home or machine has, by version."""


@functools.lru_cache(4096)
def network_of(where: str) -> str:
    """The network of one home or machine that a multiaddress is in; empty if it has none."""
    try:
        host = ipaddress.ip_address(where.split("/")[2])
    except (ValueError, IndexError):
        return ""
    return str(ipaddress.ip_network((host, _HOME_BITS[host.version]), strict=False))


Go = Callable[[], object]
"""Called when it is a peer's turn; returns False if the peer does not wait for it any more."""


@dataclass(frozen=True, slots=True)
class StreamTurns:
    """The turns of one peer, at one address, for what it says on a stream and what it is answered.

    passes: whether messages are decoded only after `take`; else their bytes take the turns for that, too
    """

    turns: Turns
    peer: str
    address: str
    passes: bool = False

    async def take(self, amount: float = 1.0) -> None:
        """Returns when it is this peer's turn."""
        await self.turns.take(self.peer, self.address, amount)

    async def take_for(self, size: int) -> None:
        """Takes the turns of a message of `size` bytes besides its first."""
        amount = size / (PASSED_TURN_BYTES if self.passes else TURN_BYTES)
        if amount >= 1.0:
            await self.take(amount)

    def answered(self, size: int) -> None:
        """Takes turns for an answer of `size` bytes; the peer's next request waits for them."""
        if amount := size // PASSED_TURN_BYTES:
            self.turns.spend(self.peer, self.address, amount, asyncio.get_running_loop().time())


class Turns:
    """A transport's fair queue. The queues are kept by address, then by peer, the next one first."""

    def __init__(self, of_an_address: Rate = OF_AN_ADDRESS, together: Rate = TOGETHER) -> None:
        self._together = TokenBucket(*together)
        self._left = TokenBuckets(of_an_address, MAX_ADDRESSES)
        self._queues: OrderedDict[str, OrderedDict[str, deque[tuple[float, Go]]]] = OrderedDict()
        self._next: asyncio.Handle | None = None

    @property
    def waiting(self) -> int:
        return sum(len(queue) for peers in self._queues.values() for queue in peers.values())

    def at_once(self, peer: str, address: str, now: float, amount: float = 1.0) -> bool:
        """Takes a turn if it is free now. Returns whether it was."""
        address = address or peer
        if address in self._queues or self._together.wait(now, _ANY) > 0 or self._left.of(address).wait(now, _ANY) > 0:
            return False
        self.spend(peer, address, amount, now)
        return True

    def spend(self, peer: str, address: str, amount: float, now: float) -> None:
        """Takes turns, also more than are left: the next one waits."""
        self._left.of(address or peer).spend(now, amount)
        self._together.spend(now, amount)

    def in_line(self, peer: str, address: str, go: Go, amount: float = 1.0) -> None:
        """Calls `go` when it is this peer's turn."""
        self._queues.setdefault(address or peer, OrderedDict()).setdefault(peer, deque()).append((amount, go))
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._hand_out)

    async def take(self, peer: str, address: str, amount: float = 1.0) -> None:
        """Returns when it is this peer's turn."""
        loop = asyncio.get_running_loop()
        if not self.at_once(peer, address, loop.time(), amount):
            came: asyncio.Future[None] = loop.create_future()

            def go() -> bool:
                is_waiting = not came.done()
                if is_waiting:
                    came.set_result(None)
                return is_waiting

            self.in_line(peer, address, go, amount)
            await came

    def _hand_out(self) -> None:
        """Gives one turn to each address that has some left, as long as there are some left of all."""
        loop = asyncio.get_running_loop()
        now, soonest = loop.time(), 0.0
        self._next = None
        while self._queues:
            soonest = self._together.wait(now, _ANY)
            if soonest > 0:
                break
            waits = {address: self._left.of(address).wait(now, _ANY) for address in self._queues}
            soonest = min(waits.values())
            if soonest > 0:
                break
            for address in [a for a, seconds in waits.items() if seconds == 0]:
                if self._together.wait(now, _ANY) == 0:
                    self._give(address, now)
        if self._queues:
            self._next = loop.call_later(max(soonest, 0.001), self._hand_out)

    def _give(self, address: str, now: float) -> None:
        peers = self._queues.pop(address)
        peer, queue = peers.popitem(last=False)
        amount, go = queue.popleft()
        if queue:
            peers[peer] = queue  # at the end
        if peers:
            self._queues[address] = peers
        if go() is not False:
            self.spend(peer, address, amount, now)
