"""Measures what our internet link carries, each way, against a bootstrap node; and the node's side of it.

    -> at least HEAD bytes: how many bytes are wanted, big-endian; the rest is ignored
    <- so many bytes

Each way is measured on its own, over as many streams as a chain's pipe has, and at the receiver. TCP doubles its window
once in a round trip until the link is full, so only the later half of the bytes counts. It is cut into SLICES of
equally many bytes, and the rate is the median of theirs, at most the mean of the later half, or of one of its halves.

The node serves one probe of a peer at a time, and MAX_PROBES in all. A node without room ends the stream without an
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from peer.net.base import Clock, Ended, Stream, Transport, cancel
from peer.net.rate_limits import TokenBucket
from peer.net.stream import STRIPES
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import endpoints
from protocol.wire.encoding import MessageError

SLICES = 7
AGREE = 0.1
"""Largest deviation from the median of the rates of the later half, and of its own later half."""
LEAST_SECONDS = 0.3
LEAST_TRIPS = 3.0
"""Of the later half, before it is believed: while the window doubles, half of all bytes come in the last round trip."""
LEAST_ARRIVALS = 2 * SLICES
"""In the later half."""


class Arrivals:
    """The arrivals of one direction. `trip`: round trip of the idle link; all times in steady seconds."""

    def __init__(self, began: float, trip: float) -> None:
        self.total = 0
        self._trip = trip
        self._times = [began]
        self._totals = [0]

    def add(self, now: float, size: int) -> None:
        self.total += size
        self._times.append(now)
        self._totals.append(self.total)

    def recent(self, seconds: float) -> float:
        """Bytes a second in that time before the last arrival."""
        first = bisect_left(self._times, self._times[-1] - seconds)
        return (self.total - self._totals[first]) / seconds

    @property
    def mean(self) -> float:
        """Bytes a second since the beginning."""
        return self.total / max(self._times[-1] - self._times[0], 1e-9)

    @property
    def rate(self) -> float | None:
        """Bytes a second, or None where too little has come to say."""
        found = self._rates()
        if not found:
            return None
        first, middle, last = self._cuts()
        mean = max(self._between(a, b) for a, b in ((first, middle), (middle, last), (first, last)))
        return min(statistics.median(found), mean)

    @property
    def steady(self) -> bool:
        """Whether more would not change the rate."""
        found, (first, middle, last) = self._rates(), self._cuts()
        if not found or self._times[last] - self._times[first] < max(LEAST_SECONDS, LEAST_TRIPS * self._trip):
            return False
        middling, whole = statistics.median(found), self._between(first, last)
        return all(abs(rate - middling) <= AGREE * middling for rate in (whole, self._between(middle, last)))

    def _cuts(self) -> tuple[int, int, int]:
        """The arrivals with which the later half, and its own later half, begin, and the last one."""
        first = bisect_left(self._totals, self.total / 2)
        return first, bisect_left(self._totals, (self._totals[first] + self.total) / 2), len(self._totals) - 1

    def _between(self, begin: int, end: int) -> float:
        return (self._totals[end] - self._totals[begin]) / max(self._times[end] - self._times[begin], 1e-9)

    def _rates(self) -> list[float]:
        """Of the slices of the later half, in their order; none where there are too few arrivals."""
        first, _, last = self._cuts()
        if last - first < LEAST_ARRIVALS:
            return []
        begin, rates = first, list[float]()
        for number in range(1, SLICES + 1):
            upto = self._totals[first] + (self.total - self._totals[first]) * number / SLICES
            end = bisect_left(self._totals, upto)
            if end > begin:
                rates.append(self._between(begin, end))
            begin = end
        return rates


HEAD = 4
PIECE = 32 * 1024
"""Most bytes of one request: larger ones would distort the later half, as a piece counts when all of it came."""
WAY_BYTES = 15_000_000
"""Most bytes of one way: less than 16 MB with all headers."""
LEAST_WAY_BYTES, OF_STATE = 1_000_000, 16
"""Least limit of one way, and the part of the state that it is: a probe costs little of what a peer fetches anyway."""
TIMES_MEAN = 2.0
"""Most that is believed of a short probe that did not become steady, in multiples of its mean rate."""
PINGS = 8
UNDER_WAY = (32 * 1024, 16 * 1024 * 1024)
"""Least and most bytes under way."""
AHEAD = 2.0
"""Multiple of what came in the last round trip that is under way; more would only fill the router's queue."""
GRAIN_SECONDS = 0.02
"""Added to the round trip: what the machines at both ends take."""
GOODPUT = 0.95
"""Of a line's rate is left for us: the rest are headers."""
BOUNDS_BPS = (64_000, 10**10)
"""What we believe of a line, whatever was measured."""

_PADDING = bytes(PIECE)


class Busy(RemoteError):
    """The node is measuring with other peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTimeouts:
    """Seconds: a node that answers nothing for `answer` is left; what came of one way in `way` has to do."""

    answer: float = 5.0
    way: float = 5.0


PROBE_TIMEOUTS = ProbeTimeouts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The result for one way."""

    bps: int
    by: str  # the node that it was measured with
    trip: float  # round trip, in seconds
    bytes: int  # what the measurement took


def probe_bytes(state_bytes: int) -> int:
    """Most bytes of one way that a probe takes in a run whose state has so many."""
    return min(WAY_BYTES, max(LEAST_WAY_BYTES, state_bytes // OF_STATE))


def line_bps(goodput: float) -> int:
    """The rate of a line that carries so many bytes of ours a second."""
    least, most = BOUNDS_BPS
    return round(min(max(8 * goodput / GOODPUT, least), most))


async def measure(
    transport: Transport,
    node: str,
    clock: Clock,
    *,
    up: bool,
    most: int = WAY_BYTES,
    patience: ProbeTimeouts = PROBE_TIMEOUTS,
) -> Measurement:
    """Measures one way with at most `most` bytes: `up` to the node, else from it.

    Raises Busy, RemoteError, TransportLost.
    """
    first = await transport.open(node, endpoints.BANDWIDTH, timeout=patience.answer)
    streams = [first]
    try:
        trip = await _trip(first, clock, patience.answer)
        opening = [transport.open(node, endpoints.BANDWIDTH, timeout=patience.answer) for _ in range(STRIPES)]
        opened = await asyncio.gather(*opening, return_exceptions=True)
        streams += [stream for stream in opened if not isinstance(stream, BaseException)]
        for stream in opened:
            if isinstance(stream, BaseException):
                raise stream
        way = _Way(streams[1:], clock, trip, up, most, patience)
        await way.run()
        if way.is_over:
            with contextlib.suppress(RemoteError):  # all that we wanted is here
                await asyncio.gather(*(stream.finish() for stream in streams))
    finally:
        await asyncio.gather(*(stream.close() for stream in streams))
    rate, came = way.arrivals.rate, way.arrivals.total
    if rate is not None and most < WAY_BYTES and not way.arrivals.steady:
        rate = min(rate, TIMES_MEAN * way.arrivals.mean)
    if rate is None:
        raise RemoteError(node, f"bandwidth by {short_peer(node)}: only {came} bytes came in {patience.way:g} s")
    return Measurement(bps=line_bps(rate), by=node, trip=trip, bytes=came)


async def _trip(stream: Stream, clock: Clock, timeout: float) -> float:
    """Seconds there and back; the quickest counts, the others met a busy machine."""
    quickest = float("inf")
    for _ in range(PINGS):
        began = clock.steady()
        try:
            await stream.send(bytes(HEAD), timeout=timeout)
            await stream.recv(0, timeout=timeout)
        except Ended:
            raise Busy(stream.remote, f"bandwidth by {short_peer(stream.remote)}: it is busy with others") from None
        quickest = min(quickest, clock.steady() - began)
    return quickest


class _Lane:
    """A stream of a way: sizes to ask for, and sizes that were asked for."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.to_ask: asyncio.Queue[int] = asyncio.Queue()
        self.asked: asyncio.Queue[int] = asyncio.Queue()
        self.under_way = 0


class _Way:
    """One direction, over all streams at once."""

    def __init__(
        self, streams: Sequence[Stream], clock: Clock, trip: float, up: bool, most: int, patience: ProbeTimeouts
    ) -> None:
        self.arrivals = Arrivals(clock.steady(), trip)
        self._lanes = [_Lane(stream) for stream in streams]
        self._clock = clock
        self._span = trip + GRAIN_SECONDS
        self._up = up
        self._patience = patience
        self._left = most
        self._under_way = 0
        self._window = UNDER_WAY[0]
        self._came = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether nothing is under way, and no more is needed or allowed."""
        return not self._under_way and (self.arrivals.steady or self._left <= 0)

    async def run(self) -> None:
        """Until the rate is steady, all bytes are spent, or the time is over. Raises RemoteError, TransportLost."""
        tasks = [asyncio.create_task(self._pump())]
        for lane in self._lanes:
            tasks += [asyncio.create_task(self._ask(lane)), asyncio.create_task(self._take(lane))]
        try:
            done, _ = await asyncio.wait(tasks, timeout=self._patience.way, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await cancel(*tasks)

    async def _pump(self) -> None:
        """Keeps as much under way as the line is likely to hold."""
        while not self.is_over:
            least, most = UNDER_WAY
            self._window = max(self._window, min(most, round(AHEAD * self._span * self.arrivals.recent(self._span))))
            piece = max(least // len(self._lanes), min(PIECE, self._window // len(self._lanes)))
            while self._left > 0 and self._under_way + piece <= self._window and not self.arrivals.steady:
                lane = min(self._lanes, key=lambda lane: lane.under_way)
                size = min(piece, self._left)
                lane.to_ask.put_nowait(size)
                lane.under_way += size
                self._under_way += size
                self._left -= size
            self._came.clear()
            await self._came.wait()

    async def _ask(self, lane: _Lane) -> None:
        while True:
            size = await lane.to_ask.get()
            lane.asked.put_nowait(size)
            if self._up:
                await lane.stream.send(bytes(HEAD), memoryview(_PADDING)[:size], timeout=self._patience.answer)
            else:
                await lane.stream.send(size.to_bytes(HEAD, "big"), timeout=self._patience.answer)

    async def _take(self, lane: _Lane) -> None:
        while True:
            size = await lane.asked.get()
            wanted = 0 if self._up else size
            answer = await lane.stream.recv(wanted, timeout=self._patience.answer)
            if len(answer) != wanted:
                node = lane.stream.remote
                text = f"bandwidth by {short_peer(node)}: {len(answer)} bytes came where {wanted} were asked for"
                raise RemoteError(node, text)
            self.arrivals.add(self._clock.steady(), size)
            lane.under_way -= size
            self._under_way -= size
            self._came.set()


MAX_PROBES = 2
PROBE_BYTES = WAY_BYTES + 1_000_000
"""One way, with what requests and pings take."""
LEAST_BYTES = 2048
"""A request and its answer count as so many at least: they take our time, too."""
STREAMS = 2 * STRIPES + 1
"""Of one probe: those of the way before may not be closed yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLimits:
    """Limits of a node."""

    bytes_per_minute: int = 16 * PROBE_BYTES  # for all peers together
    probe_s: float = 30.0  # longest probe, in seconds
    idle_s: float = 10.0  # longest wait for a request, in seconds


PROBE_LIMITS = ProbeLimits()


@dataclass(slots=True)
class _Probe:
    """A running probe: bytes that it may still take, its deadline, and its open streams."""

    left: int
    until: float
    streams: int = 0


class BandwidthServer:
    """The node's side: serves probes."""

    def __init__(self, clock: Clock, bounds: ProbeLimits = PROBE_LIMITS) -> None:
        self._clock = clock
        self._bounds = bounds
        self._probes: dict[str, _Probe] = {}
        self._free = TokenBucket(bounds.bytes_per_minute / 60, bounds.bytes_per_minute)

    @property
    def probes(self) -> int:
        return len(self._probes)

    async def serve(self, transport: Transport) -> None:
        await transport.serve(endpoints.BANDWIDTH, self.answer)

    async def answer(self, stream: Stream) -> None:
        """One stream of a probe. Raises RemoteError."""
        probe = self._admit(stream.remote)
        if probe is None:
            return  # which tells the peer that we are busy
        probe.streams += 1
        try:
            async with asyncio.timeout(max(0.0, probe.until - self._clock.steady())):
                while True:
                    await self._next(stream, probe)
        except Ended:
            return
        except TimeoutError:
            raise self._bad(stream, f"longer than {self._bounds.probe_s:g} s") from None
        finally:
            probe.streams -= 1
            if not probe.streams:
                del self._probes[stream.remote]
                self._free.left += probe.left

    def _admit(self, peer: str) -> _Probe | None:
        """Returns the probe that a stream of `peer` belongs to, None if there is no room for it."""
        probe = self._probes.get(peer)
        if probe is not None:
            return probe if probe.streams < STREAMS else None
        now = self._clock.steady()
        if len(self._probes) >= MAX_PROBES or not self._free.take(now, PROBE_BYTES):
            return None
        self._probes[peer] = probe = _Probe(PROBE_BYTES, now + self._bounds.probe_s)
        return probe

    async def _next(self, stream: Stream, probe: _Probe) -> None:
        request = await stream.recv(HEAD + PIECE, timeout=self._bounds.idle_s)
        wanted = int.from_bytes(request[:HEAD], "big")
        if len(request) < HEAD or wanted > PIECE:
            raise self._bad(stream, f"{wanted} bytes at once")
        taken = max(LEAST_BYTES, len(request) + wanted)
        if taken > probe.left:
            raise self._bad(stream, f"more than {PROBE_BYTES} bytes")
        probe.left -= taken
        await stream.send(bytes(wanted), timeout=self._bounds.idle_s)

    def _bad(self, stream: Stream, what: str) -> MessageError:
        return MessageError(stream.remote, f"bandwidth of {short_peer(stream.remote)}: wants {what}; it was closed")
