"""What our internet line carries: as the user said, as found in an earlier life (known_line.py), as measured at the start
(bandwidth.py), and as real transfers show (transfers.py).

The most that we send follows: nine tenths of what the uplink was measured to carry, unless the user said what either is. What
passes between us and peers behind the same router says nothing of the line, and does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from peer import events
from peer.net import bandwidth
from peer.net.address import host_of, is_circuit, is_public
from peer.net.bandwidth import Busy, Measured, line_bps
from peer.net.base import Clock, Transport
from peer.net.disk import Disk
from peer.net.network import Network
from protocol.errors import RemoteError

FILE = "line.json"
DAYS = 7.0
_FUTURE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class KnownLine:
    """Bits a second each way; None: it was not measured."""

    up_bps: int | None = None
    down_bps: int | None = None


UNKNOWN = KnownLine()


def read(disk: Disk, folder: Path, hosts: Collection[str], wall: float) -> KnownLine:
    """What the file says at `wall`, where the interfaces have these addresses; nothing where it does not hold any more."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        said = json.loads(disk.read(folder / FILE))
        age = wall - float(said["time"])
        if -_FUTURE_SECONDS <= age <= DAYS * 86_400 and said["hosts"] == sorted(hosts):
            rates = [
                said[name] if isinstance(said[name], int) and said[name] > 0 else None
                for name in ("up_bps", "down_bps")
            ]
            return KnownLine(*rates)
    return UNKNOWN


def write(disk: Disk, folder: Path, known: KnownLine, hosts: Collection[str], wall: float) -> None:
    """Raises UsageError."""
    said = {**asdict(known), "hosts": sorted(hosts), "time": wall}
    disk.write(folder / FILE, json.dumps(said).encode(), sync=False)


FAST_SECONDS = 30
SLOW_SECONDS = 60
HELD_SECONDS = 60
REMEMBERED = max(FAST_SECONDS, SLOW_SECONDS, HELD_SECONDS)
"""Seconds, at most."""
FASTER, SLOWER = 1.15, 0.97
"""Times what we thought. Less is close: an uplink that peers wait for is full, and nine tenths of too much is too much."""
MOSTLY = 0.9
"""Of the seconds."""
MOST_DOWN, MOST_UP = 0.5, 2.0
"""By which one revision changes a rate at most."""
REST_SECONDS = 3600.0
RANGE = (0.25, 64.0)
"""Of the rate with which we began is what we end with, whatever others do."""


@dataclass(frozen=True, slots=True)
class Second:
    """What passed in one second between us and peers elsewhere: bytes, how many peers a send waited for at its end, and whether our own
    limit held something back then."""

    sent: int
    received: int
    waiting: int
    held: bool


class Transfers:
    """Of one line. `up_bps`, `down_bps`: bits a second, to begin with; None: somebody said so, and it stays."""

    def __init__(self, up_bps: int | None, down_bps: int | None) -> None:
        self.up_bps = up_bps
        self.down_bps = down_bps
        self._first = (up_bps, down_bps)
        self._seconds: deque[Second] = deque(maxlen=REMEMBERED)
        self._rests_until = float("-inf")

    def take(self, now: float, second: Second) -> bool:
        """Whether a rate is another one now."""
        self._seconds.append(second)
        changed = False
        if self.up_bps is not None:
            wanted = self._up(self.up_bps, now)
            if wanted is not None:
                changed, self.up_bps = True, _within(wanted, self.up_bps, self._first[0])
        if self.down_bps is not None:
            passed = self._passed(FAST_SECONDS, received=True)
            if passed > FASTER * self.down_bps:
                changed, self.down_bps = True, _within(passed, self.down_bps, self._first[1])
        if changed:
            self._seconds.clear()
        return changed

    def _up(self, known: int, now: float) -> float | None:
        """What the uplink has instead, if that follows."""
        passed = self._passed(FAST_SECONDS)
        if passed > FASTER * known:
            return passed
        if now < self._rests_until:
            return None
        slow = self._passed(SLOW_SECONDS)
        if 0 < slow < SLOWER * known and self._mostly(
            SLOW_SECONDS, [s.waiting > 1 and not s.held for s in self._seconds]
        ):
            self._rests_until = now + REST_SECONDS
            return slow
        if self._mostly(HELD_SECONDS, [s.held and not s.waiting for s in self._seconds]):
            return FASTER * known
        return None

    def _passed(self, seconds: int, received: bool = False) -> float:
        """Bits a second of the line, of the last so many seconds: the mean or the median, whichever is less, since what is sent waits in
        our own buffers at first. 0 before so many have passed."""
        if len(self._seconds) < seconds:
            return 0.0
        counts = [s.received if received else s.sent for s in list(self._seconds)[-seconds:]]
        found = min(statistics.mean(counts), statistics.median(counts))
        return line_bps(found) if found else 0.0

    def _mostly(self, seconds: int, marks: list[bool]) -> bool:
        return len(marks) >= seconds and sum(marks[-seconds:]) >= MOSTLY * seconds


def _within(wanted: float, known: int, first: int | None) -> int:
    """`wanted`, as far as one revision, and all of them, may go."""
    assert first is not None
    least, most = max(MOST_DOWN * known, RANGE[0] * first), min(MOST_UP * known, RANGE[1] * first)
    return round(min(max(wanted, least), most))


START_SECONDS = 20.0
"""A start does not wait longer for all probes together."""
RETRY_SECONDS = 2.0
LATER_SECONDS = 120.0
"""Between the probes of a line that could not be measured at the start."""
SAMPLE_SECONDS = 1.0
USED = 0.9
"""Of the uplink: a sender that uses no more does not overrun its router's queue (docs/adr/0013)."""
USUAL_BPS = {True: 10_000_000, False: 50_000_000}
"""Up and down, where nothing was measured: less than most lines have."""
EARLIER = "earlier"
"""By whom it was measured: by ourselves, when we were started before."""
NODES = 2
"""Are asked about a way that is slower than that: it may be the first one's line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Downlink:
    """What a measurement before the start of the peer found (peer/net/bandwidth.py)."""

    bps: int
    by: str
    """The node that measured it."""
    trip: float
    """Seconds there and back."""
    bytes: int
    """What the measurement took."""


@dataclass(frozen=True, slots=True)
class Given:
    """What the user said of the line, in bits a second; None: nothing. `downlink`: what was measured before; `known`: in an earlier life.
    `most`: bytes of one way that a probe may take."""

    up_bps: int | None
    down_bps: int | None
    limit_bps: int | None
    downlink: Downlink | None = None
    known: KnownLine = UNKNOWN
    most: int = bandwidth.WAY_BYTES


async def measured_downlink(
    transport: Transport, nodes: Sequence[str], clock: Clock, most: int = bandwidth.WAY_BYTES
) -> Downlink | None:
    """What the first of the nodes that answers finds of our downlink, over connections that carry nothing else; None: none answers."""
    for node in nodes:
        with contextlib.suppress(RemoteError):
            found = await bandwidth.measure(transport, node, clock, up=False, most=most)
            return Downlink(bps=found.bps, by=node, trip=found.trip, bytes=found.bytes)
    return None


class Line:
    """One per peer. `draw` shares peers out among the nodes; `tell(event)` hears of every change. `up_bps`, `down_bps`: bits a second,
    0 before `measure`."""

    def __init__(
        self, given: Given, network: Network, draw: random.Random, tell: Callable[[events.Body], None]
    ) -> None:
        self.up_bps = given.up_bps or 0
        self.down_bps = given.down_bps or 0
        self.uplink = network.uplink
        self._given = given
        self._transport = network.transport
        self._directory = network.directory
        self._clock = network.clock
        self._draw = draw
        self._tell = tell
        self._missing = [up for up, bps in ((False, given.down_bps), (True, given.up_bps)) if bps is None]
        self._transfers: Transfers | None = None
        self._found: dict[bool, tuple[str, Measured]] = {}
        known = given.downlink
        if known is not None and False in self._missing:
            self._missing.remove(False)
            self._set(False, known.bps)
            self._found[False] = known.by, Measured(bps=known.bps, trip=known.trip, bytes=known.bytes)
        for up, bps in ((False, given.known.down_bps), (True, given.known.up_bps)):
            if up in self._missing and bps is not None:
                self._missing.remove(up)
                self._set(up, bps)
        self._used: set[str] = set()
        self._passed: dict[str, list[int]] = {}
        self._passes = asyncio.Event()

    @property
    def is_given(self) -> bool:
        """Whether the user said all of it, so that there is nothing to measure."""
        return self._given.up_bps is not None and self._given.down_bps is not None

    @property
    def known(self) -> KnownLine:
        """What was found, and not given."""
        up = None if self._given.up_bps is not None or True in self._missing else self.up_bps
        down = None if self._given.down_bps is not None or False in self._missing else self.down_bps
        return KnownLine(up, down)

    # --- measuring

    async def measure(self) -> None:
        """Measures what was not given; takes START_SECONDS at most. What cannot be measured is taken to be USUAL_BPS. Raises TransportLost."""
        began, why = self._clock.steady(), "no node answered in time"
        self._follow()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                while self._missing:
                    try:
                        await self._measure(fresh=True)
                    except Busy as error:
                        why = str(error)
                        await asyncio.sleep(RETRY_SECONDS * self._draw.uniform(0.5, 1.5))
                    except RemoteError as error:
                        why = str(error)
                        break
        for up in self._missing:
            self._set(up, USUAL_BPS[up])
        self._report(began)
        if self._given.known != UNKNOWN:
            self._tell(events.Measured(up_bps=self.up_bps, down_bps=self.down_bps, by=EARLIER))
        if self._missing:
            usual = " and ".join(f"{USUAL_BPS[up] / 1e6:g} Mb/s {'up' if up else 'down'}" for up in self._missing)
            text = f"bandwidth: not measured ({why}); {usual} are announced; to say what the line has, give --up and --down"
            self._tell(events.Warning(text=text))

    async def _measure(self, *, fresh: bool) -> None:
        """Measures every way that is missing. `fresh`: over connections that have carried nothing, since what fills one way's queue makes
        TCP careful in the other, for good; else the line is in use, and may have more than was found. Raises Busy, RemoteError, TransportLost."""
        for up in list(self._missing):
            node, found = await self._ask(up, fresh)
            self._found[up] = node, found
            self._set(up, found.bps if fresh else max(found.bps, self.up_bps if up else self.down_bps))
            self._missing.remove(up)
            self._follow()

    def _report(self, began: float) -> None:
        """Tells what was measured since then, if anything."""
        if self._found:
            sent, received = ([m.bytes for way, (_, m) in self._found.items() if way is up] for up in (True, False))
            self._tell(
                events.Measured(
                    up_bps=self.up_bps,
                    down_bps=self.down_bps,
                    by=" ".join(dict.fromkeys(node for node, _ in self._found.values())),
                    round_trip_ms=round(1000 * min(m.trip for _, m in self._found.values()), 1),
                    bytes_sent=sum(sent),
                    bytes_received=sum(received),
                    seconds=round(self._clock.steady() - began, 3),
                )
            )
        self._found.clear()

    async def _ask(self, up: bool, fresh: bool) -> tuple[str, Measured]:
        """The best that one of the nodes finds of one way, and who. Raises Busy, RemoteError, TransportLost."""
        nodes = [node for node in self._directory.operators if node != self._transport.peer_id]
        self._draw.shuffle(nodes)
        best: tuple[str, Measured] | None = None
        last: RemoteError | None = None
        left = self._given.most
        for asked, node in enumerate(nodes):
            try:
                if fresh and node in self._used:
                    await self._transport.disconnect(node)
                    self._directory.lost(node)
                self._used.add(node)
                await self._directory.reach(node)
                found = await bandwidth.measure(self._transport, node, self._clock, up=up, most=left)
            except RemoteError as error:
                last = last if isinstance(last, Busy) else error
                continue
            left -= found.bytes
            if best is None or found.bps > best[1].bps:
                best = node, found
            if found.bps >= USUAL_BPS[up] or asked + 1 >= NODES:
                break
        if best is None:
            raise last or RemoteError("nobody", "there is no node to measure it with")
        return best

    def _set(self, up: bool, bps: int) -> None:
        if up:
            self.up_bps = bps
        else:
            self.down_bps = bps

    def _follow(self) -> None:
        """The limit follows the uplink that was measured."""
        measured = self._given.up_bps is None and True not in self._missing
        if measured and self._given.limit_bps is None:
            self.uplink.limit(round(USED * self.up_bps))

    # --- later

    async def run(self) -> None:
        """Learns from what passes, and measures later what could not be measured. Never returns. Raises TransportLost."""
        self._transport.traffic.follow(self._hear)
        self._begin()
        tried = sampled = self._clock.steady()
        while True:
            with contextlib.suppress(TimeoutError):  # where nothing passes, nothing is to be learned
                await asyncio.wait_for(self._passes.wait(), LATER_SECONDS if self._missing else None)
            await asyncio.sleep(SAMPLE_SECONDS)
            now = self._clock.steady()
            self._rested(now, int((now - sampled) / SAMPLE_SECONDS) - 1)
            sampled = now
            if self._missing and now - tried > LATER_SECONDS:
                tried = now
                with contextlib.suppress(RemoteError):
                    await self._measure(fresh=False)
                self._report(now)
                self._begin()
            self._sample(now)

    def _begin(self) -> None:
        up = None if self._given.up_bps is not None else self.up_bps
        down = None if self._given.down_bps is not None else self.down_bps
        self._transfers = Transfers(up, down)

    def _rested(self, now: float, seconds: int) -> None:
        """In so many seconds before the last one nothing passed."""
        assert self._transfers is not None
        for _ in range(min(seconds, REMEMBERED)):
            self._transfers.take(now, Second(0, 0, 0, False))

    def _hear(self, peer: str, sent: int, received: int) -> None:
        self._passes.set()
        passed = self._passed.setdefault(peer, [0, 0])
        passed[0] += sent
        passed[1] += received

    def _sample(self, now: float) -> None:
        assert self._transfers is not None
        waiting = sum(1 for peer in self._transport.traffic.waiting if self._is_elsewhere(peer))
        counted = [passed for peer, passed in self._passed.items() if self._is_elsewhere(peer)]
        second = Second(sum(p[0] for p in counted), sum(p[1] for p in counted), waiting, self.uplink.holds)
        self._passed.clear()
        if not (waiting or self.uplink.holds):
            self._passes.clear()
        if self._transfers.take(now, second):
            self.up_bps = self._transfers.up_bps or self.up_bps
            self.down_bps = self._transfers.down_bps or self.down_bps
            self._follow()
            self._tell(events.Measured(up_bps=self.up_bps, down_bps=self.down_bps, by="transfers"))

    def _is_elsewhere(self, peer: str) -> bool:
        """Whether what passes between us and `peer` passes our line, for all we know: by where it was last seen, or else by what it says."""
        seen = self._transport.seen_at(peer)
        theirs = [seen] if seen else [a for a in self._directory.addresses(peer) if not is_circuit(a)]
        ours = {host_of(address) for address in self._transport.addresses if not is_circuit(address)}
        return any(is_public(host) and host not in ours for host in map(host_of, theirs))
