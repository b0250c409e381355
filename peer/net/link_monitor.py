"""The rates of our internet link: as configured, as stored by an earlier start, as measured, and as transfers show.

The upload limit is nine tenths of the measured uplink, unless the user set either. Traffic behind the same router does
not count. Stored rates count for STORED_DAYS, and only while the machine's interfaces have the same addresses.

Transfers revise a rate. A link that carried more than we thought for FAST_SECONDS can carry more. Where sends to
several peers wait for SLOW_SECONDS, the uplink is slower. Where our own limit held everything back for HELD_SECONDS and
no peer was slow to read, a higher limit is tried. After a revision down the uplink is left alone for an hour. The
downlink never goes down: a receiver cannot tell whose link is slow.
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
from peer.net.bandwidth import Busy, Measurement, line_bps
from peer.net.base import Clock, Transport
from peer.net.disk import Disk
from peer.net.network import Network
from protocol.errors import RemoteError

STORED_FILE = "line.json"
STORED_DAYS = 7.0
_MAX_CLOCK_SKEW_SECONDS = 3600.0
START_SECONDS = 20.0
"""Longest time that a start waits for all measurements."""
RETRY_SECONDS = 2.0
LATER_SECONDS = 120.0
"""Between the later measurements of what could not be measured at the start."""
SAMPLE_SECONDS = 1.0
LIMIT_SHARE = 0.9
"""Of the uplink: a sender that uses no more does not fill its router's queue (docs/adr/0013)."""
USUAL_BPS = {True: 10_000_000, False: 50_000_000}
"""Up and down, where nothing was measured: less than most links have."""
EARLIER = "earlier"
"""In place of a node: measured by an earlier start."""
MAX_NODES_ASKED = 2
"""For a way slower than USUAL_BPS, as the first node's link may be the slow one."""
FAST_SECONDS = 30
SLOW_SECONDS = 60
HELD_SECONDS = 60
REMEMBERED_SECONDS = max(FAST_SECONDS, SLOW_SECONDS, HELD_SECONDS)
FASTER, SLOWER = 1.15, 0.97
"""Revision thresholds, as multiples of the known rate. SLOWER is close to 1: an uplink with waiting peers is full."""
MOST_SECONDS_SHARE = 0.9
MAX_STEP_DOWN, MAX_STEP_UP = 0.5, 2.0
"""Largest change of a rate by one revision."""
REST_SECONDS = 3600.0
RANGE = (0.25, 64.0)
"""All revisions together keep a rate within these multiples of the first one."""


@dataclass(frozen=True, slots=True)
class StoredRates:
    """Bits a second each way; None: not measured."""

    up_bps: int | None = None
    down_bps: int | None = None


UNKNOWN = StoredRates()


def read_rates(disk: Disk, folder: Path, hosts: Collection[str], wall: float) -> StoredRates:
    """Returns the rates in `folder`, if they count at time `wall` on a machine with the addresses `hosts`."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        said = json.loads(disk.read(folder / STORED_FILE))
        age = wall - float(said["time"])
        if -_MAX_CLOCK_SKEW_SECONDS <= age <= STORED_DAYS * 86_400 and said["hosts"] == sorted(hosts):
            rates = [said["up_bps"], said["down_bps"]]
            return StoredRates(*(rate if isinstance(rate, int) and rate > 0 else None for rate in rates))
    return UNKNOWN


def write_rates(disk: Disk, folder: Path, rates: StoredRates, hosts: Collection[str], wall: float) -> None:
    """Raises UsageError."""
    said = {**asdict(rates), "hosts": sorted(hosts), "time": wall}
    disk.write(folder / STORED_FILE, json.dumps(said).encode(), sync=False)


@dataclass(frozen=True, slots=True)
class SecondOfTraffic:
    """Bytes to and from peers elsewhere in one second."""

    sent: int
    received: int
    waiting: int  # peers to which a send waited at its end
    held: bool  # whether our own limit held a send back then


class RateEstimator:
    """Revises `up_bps` and `down_bps`, bits a second, by what transfers show; None: configured, and never revised."""

    def __init__(self, up_bps: int | None, down_bps: int | None) -> None:
        self.up_bps = up_bps
        self.down_bps = down_bps
        self._first = (up_bps, down_bps)
        self._seconds: deque[SecondOfTraffic] = deque(maxlen=REMEMBERED_SECONDS)
        self._rests_until = float("-inf")

    def add(self, now: float, second: SecondOfTraffic) -> bool:
        """Adds a second of traffic. Returns whether a rate has changed."""
        self._seconds.append(second)
        changed = False
        if self.up_bps is not None:
            wanted = self._revised_up(self.up_bps, now)
            if wanted is not None:
                changed, self.up_bps = True, _within(wanted, self.up_bps, self._first[0])
        if self.down_bps is not None:
            passed = self._passed(FAST_SECONDS, received=True)
            if passed > FASTER * self.down_bps:
                changed, self.down_bps = True, _within(passed, self.down_bps, self._first[1])
        if changed:
            self._seconds.clear()
        return changed

    def _revised_up(self, known: int, now: float) -> float | None:
        passed = self._passed(FAST_SECONDS)
        if passed > FASTER * known:
            return passed
        if now < self._rests_until:
            return None
        slow = self._passed(SLOW_SECONDS)
        crowded = [s.waiting > 1 and not s.held for s in self._seconds]
        if 0 < slow < SLOWER * known and self._mostly(SLOW_SECONDS, crowded):
            self._rests_until = now + REST_SECONDS
            return slow
        if self._mostly(HELD_SECONDS, [s.held and not s.waiting for s in self._seconds]):
            return FASTER * known
        return None

    def _passed(self, seconds: int, received: bool = False) -> float:
        """Bits a second over the last `seconds`, the lesser of mean and median; 0 before so many have passed."""
        if len(self._seconds) < seconds:
            return 0.0
        counts = [s.received if received else s.sent for s in list(self._seconds)[-seconds:]]
        found = min(statistics.mean(counts), statistics.median(counts))
        return line_bps(found) if found else 0.0

    def _mostly(self, seconds: int, marks: list[bool]) -> bool:
        return len(marks) >= seconds and sum(marks[-seconds:]) >= MOST_SECONDS_SHARE * seconds


def _within(wanted: float, known: int, first: int | None) -> int:
    assert first is not None
    least, most = max(MAX_STEP_DOWN * known, RANGE[0] * first), min(MAX_STEP_UP * known, RANGE[1] * first)
    return round(min(max(wanted, least), most))


@dataclass(frozen=True, slots=True)
class RateConfig:
    """The assumptions about a link before it is measured.

    up_bps, down_bps, limit_bps: as the user set them, bits a second; None: not set
    """

    up_bps: int | None
    down_bps: int | None
    limit_bps: int | None
    downlink: Measurement | None = None  # measured before the peer was started
    stored: StoredRates = UNKNOWN  # measured by an earlier start
    most: int = bandwidth.WAY_BYTES  # bytes that the measurement of one way may take


async def measured_downlink(
    transport: Transport, nodes: Sequence[str], clock: Clock, most: int = bandwidth.WAY_BYTES
) -> Measurement | None:
    """Measures the downlink with the first node that answers, over fresh connections; None: none answers."""
    for node in nodes:
        with contextlib.suppress(RemoteError):
            return await bandwidth.measure(transport, node, clock, up=False, most=most)
    return None


class LinkMonitor:
    """The rates of a peer's internet link.

    draw: chooses the node to measure with
    tell: called with an event for every change
    up_bps, down_bps: bits a second; 0 before `measure`
    """

    def __init__(
        self, config: RateConfig, network: Network, draw: random.Random, tell: Callable[[events.Body], None]
    ) -> None:
        self.up_bps = config.up_bps or 0
        self.down_bps = config.down_bps or 0
        self.uplink = network.uplink
        self._config = config
        self._network = network
        self._draw = draw
        self._tell = tell
        self._missing = [up for up, bps in ((False, config.down_bps), (True, config.up_bps)) if bps is None]
        self._measured: dict[bool, Measurement] = {}
        stored, downlink = config.stored, config.downlink
        if downlink is not None and False in self._missing:
            self._missing.remove(False)
            self._set(False, downlink.bps)
            self._measured[False] = downlink
        for up, bps in ((False, stored.down_bps), (True, stored.up_bps)):
            if up in self._missing and bps is not None:
                self._missing.remove(up)
                self._set(up, bps)
        self._used: set[str] = set()
        self._passed: dict[str, list[int]] = {}
        self._has_passed = asyncio.Event()

    @property
    def is_configured(self) -> bool:
        """Whether the user set both rates, so that there is nothing to measure."""
        return self._config.up_bps is not None and self._config.down_bps is not None

    @property
    def found(self) -> StoredRates:
        """The rates that were measured, not configured."""
        up = None if self._config.up_bps is not None or True in self._missing else self.up_bps
        down = None if self._config.down_bps is not None or False in self._missing else self.down_bps
        return StoredRates(up, down)

    # --- measuring

    async def measure(self) -> None:
        """Measures what is not configured, for START_SECONDS at most; the rest is USUAL_BPS. Raises TransportLost."""
        began, why = self._network.clock.steady(), "no node answered in time"
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
        if self._config.stored != UNKNOWN:
            self._tell(events.Measured(up_bps=self.up_bps, down_bps=self.down_bps, by=EARLIER))
        if self._missing:
            usual = " and ".join(f"{USUAL_BPS[up] / 1e6:g} Mb/s {'up' if up else 'down'}" for up in self._missing)
            text = f"bandwidth: not measured ({why}); {usual} are announced"
            self._tell(events.Warning(text=f"{text}; to announce your own figures, give --up and --down"))

    async def _measure(self, *, fresh: bool) -> None:
        """Measures every missing way. Raises Busy, RemoteError, TransportLost.

        fresh: over connections that have carried nothing, as a full queue one way makes TCP careful the other way for
            good; otherwise the link is in use and may have more than is found
        """
        for up in list(self._missing):
            self._measured[up] = found = await self._ask(up, fresh)
            self._set(up, found.bps if fresh else max(found.bps, self.up_bps if up else self.down_bps))
            self._missing.remove(up)
            self._follow()

    def _report(self, began: float) -> None:
        """Tells what was measured since `began`, if anything."""
        found = self._measured
        if found:
            self._tell(
                events.Measured(
                    up_bps=self.up_bps,
                    down_bps=self.down_bps,
                    by=" ".join(dict.fromkeys(m.by for m in found.values())),
                    round_trip_ms=round(1000 * min(m.trip for m in found.values()), 1),
                    bytes_sent=found[True].bytes if True in found else 0,
                    bytes_received=found[False].bytes if False in found else 0,
                    seconds=round(self._network.clock.steady() - began, 3),
                )
            )
        found.clear()

    async def _ask(self, up: bool, fresh: bool) -> Measurement:
        """Measures one way with up to MAX_NODES_ASKED nodes. Raises Busy, RemoteError, TransportLost."""
        nodes = [node for node in self._network.directory.operators if node != self._network.transport.peer_id]
        self._draw.shuffle(nodes)
        best: Measurement | None = None
        last: RemoteError | None = None
        left = self._config.most
        for asked, node in enumerate(nodes):
            try:
                if fresh and node in self._used:
                    await self._network.transport.disconnect(node)
                    self._network.directory.lost(node)
                self._used.add(node)
                await self._network.directory.reach(node)
                found = await bandwidth.measure(self._network.transport, node, self._network.clock, up=up, most=left)
            except RemoteError as error:
                last = last if isinstance(last, Busy) else error
                continue
            left -= found.bytes
            if best is None or found.bps > best.bps:
                best = found
            if found.bps >= USUAL_BPS[up] or asked + 1 >= MAX_NODES_ASKED:
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
        """Sets the upload limit by the measured uplink, unless the user set either."""
        if self._config.up_bps is None and True not in self._missing and self._config.limit_bps is None:
            self.uplink.limit(round(LIMIT_SHARE * self.up_bps))

    # --- later

    async def run(self) -> None:
        """Learns from transfers, and measures later what could not be measured. Never returns. Raises TransportLost."""
        self._network.transport.traffic.follow(self._count)
        estimator = self._new_estimator()
        tried = sampled = self._network.clock.steady()
        while True:
            with contextlib.suppress(TimeoutError):  # without traffic there is nothing to learn
                await asyncio.wait_for(self._has_passed.wait(), LATER_SECONDS if self._missing else None)
            await asyncio.sleep(SAMPLE_SECONDS)
            now = self._network.clock.steady()
            for _ in range(min(int((now - sampled) / SAMPLE_SECONDS) - 1, REMEMBERED_SECONDS)):
                estimator.add(now, SecondOfTraffic(0, 0, 0, False))
            sampled = now
            if self._missing and now - tried > LATER_SECONDS:
                tried = now
                with contextlib.suppress(RemoteError):
                    await self._measure(fresh=False)
                self._report(now)
                estimator = self._new_estimator()
            if estimator.add(now, self._sample()):
                self.up_bps = estimator.up_bps or self.up_bps
                self.down_bps = estimator.down_bps or self.down_bps
                self._follow()
                self._tell(events.Measured(up_bps=self.up_bps, down_bps=self.down_bps, by="transfers"))

    def _new_estimator(self) -> RateEstimator:
        up = None if self._config.up_bps is not None else self.up_bps
        down = None if self._config.down_bps is not None else self.down_bps
        return RateEstimator(up, down)

    def _count(self, peer: str, sent: int, received: int) -> None:
        self._has_passed.set()
        passed = self._passed.setdefault(peer, [0, 0])
        passed[0] += sent
        passed[1] += received

    def _sample(self) -> SecondOfTraffic:
        waiting = sum(1 for peer in self._network.transport.traffic.waiting if self._is_elsewhere(peer))
        counted = [passed for peer, passed in self._passed.items() if self._is_elsewhere(peer)]
        self._passed.clear()
        if not (waiting or self.uplink.holds):
            self._has_passed.clear()
        return SecondOfTraffic(sum(p[0] for p in counted), sum(p[1] for p in counted), waiting, self.uplink.holds)

    def _is_elsewhere(self, peer: str) -> bool:
        """Returns whether traffic with `peer` passes our link, by where it was last seen, or else by its addresses."""
        seen = self._network.transport.seen_at(peer)
        theirs = [seen] if seen else [a for a in self._network.directory.addresses(peer) if not is_circuit(a)]
        ours = {host_of(address) for address in self._network.transport.addresses if not is_circuit(address)}
        return any(is_public(host) and host not in ours for host in map(host_of, theirs))
