"""One stage boundary: frames both ways over one pipe (peer/net/stream.py), with a queue on either side.

Read frames wait in a bounded queue; when it is full nothing more is read, and the stream holds the sender back.

Signs of life: a side that writes nothing else sends a BEAT every `Liveness.beat_s` seconds. Life is bytes, not frames,
so a large frame on a slow link is no silence. A link is broken after a silence of `silent_s` and TRIPS round trips, or
of GAPS times the longest recent one, but at the latest of `longest_s`. Time does not count while the queue is full, and
while this process was stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from peer.chain.frames import (
    BACKWARD,
    BEAT,
    ECHO,
    FORWARD,
    HEAD_BYTES,
    NAME_BYTES,
    PING,
    Frame,
    Head,
    NeighbourLost,
    Refused,
    compare,
    parse,
)
from peer.net.base import Stream
from protocol.errors import RemoteError
from protocol.wire.framing import MAX_FRAME

GOODBYE_S = 1.0
"""For the goodbye of a neighbour whose link broke; it may blame another member."""
HEAD_START_S = 0.25
"""Between the report of a lying neighbour and leaving the chain: it will report that we left, and the first report
counts."""
TRIPS, GAPS = 4, 3
CLOCK_STEPS = 4
"""Steps whose smallest delay counts; clocks drift apart in the long run."""
RECENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """The timeouts of a neighbour's signs of life, in seconds; see the module's docstring."""

    beat_s: float = 0.5
    silent_s: float = 2.5
    longest_s: float = 10.0


LIVENESS = Liveness()


class LinkClock:
    """Measures the way from a neighbour to us, in seconds.

    Each header has the time of its sending. A stage pings the next one when an inner step begins, and gets an echo:
    `arrival - stamp` is the latency plus the offset of the two clocks, which cancels between the two directions. A
    frame occupies the link from the later of `stamp + that delay` and the arrival of the frame before.

    trip: round trip of the last ping, at most `most_trip` where we measured it.
    """

    def __init__(self, most_trip: float) -> None:
        self.trip = 0.0
        self._most_trip = most_trip
        self._pinged = 0.0
        self._delays: deque[float] = deque(maxlen=CLOCK_STEPS)
        self._frames: list[tuple[float, float]] = []  # of this step's micro-batches: stamp, arrival

    def pinged(self, now: float) -> None:
        """A ping leaves."""
        self._pinged = now

    def echoed(self, now: float) -> None:
        """Its echo has come."""
        self.trip = min(now - self._pinged, self._most_trip)

    def small(self, stamp: float, arrival: float) -> None:
        """A ping or an echo has come, over an idle link."""
        self._delays.append(arrival - stamp)

    def frame(self, stamp: float, arrival: float) -> None:
        """A micro-batch's frame has come."""
        self._frames.append((stamp, arrival))

    def measured(self) -> tuple[float, float]:
        """(delay, transfer) of this step: latency plus clock offset, and the mean time of a frame on the link. Begins
        the next step."""
        frames, self._frames = self._frames, []
        if not frames or not self._delays:
            return 0.0, 0.0
        delay = min(*self._delays, *(arrival - stamp for stamp, arrival in frames))
        before, total = -math.inf, 0.0
        for stamp, arrival in frames:
            total += max(0.0, arrival - max(stamp + delay, before))
            before = arrival
        return delay, total / len(frames)


class Link:
    """One neighbour. Its tasks live in `group`.

    arrived: is set whenever a frame comes, and when the link breaks.
    decode: begins to decode a micro-batch's values.
    queue: unread frames, at most.
    limit: bytes of a body, at most.
    timeout: seconds for the neighbour to read a frame.
    failed: why the link broke; counts once all frames before are taken.
    """

    def __init__(
        self,
        stream: Stream,
        group: asyncio.TaskGroup,
        arrived: asyncio.Event,
        decode: Callable[[int, memoryview], Awaitable[Any]],
        *,
        queue: int,
        limit: int,
        timeout: float,
        liveness: Liveness,
    ) -> None:
        self.stream, self.sent_bytes, self.timeout = stream, 0, timeout
        self.most_waiting = 0
        self.failed: NeighbourLost | None = None
        self.clock = LinkClock(most_trip=liveness.longest_s)
        self._liveness = liveness
        self._sending = False
        self._arrived, self._limit = arrived, min(MAX_FRAME, HEAD_BYTES + max(limit, NAME_BYTES))
        self._decode = decode
        self._out: asyncio.Queue[tuple[Head, bytes | Awaitable[bytes]]] = asyncio.Queue()
        self._in: asyncio.Queue[Frame] = asyncio.Queue(queue)
        self._reading = group.create_task(self._read())
        self._writing = group.create_task(self._write())
        self._living = [group.create_task(self._beat()), group.create_task(self._watch())]

    async def stop(self) -> None:
        """Writes the frames in the queue, and ends the tasks."""
        if self.failed is None:
            await self._out.join()
        for task in (self._reading, self._writing, *self._living):
            task.cancel()

    def _fail(self, error: NeighbourLost) -> None:
        self.failed = self.failed or error
        self._arrived.set()

    # --- sending

    def send(self, head: Head, body: bytes | Awaitable[bytes], size: int) -> None:
        """Queues a frame whose body has, or will have, `size` bytes."""
        self.sent_bytes += HEAD_BYTES + size
        self._out.put_nowait((head, body))

    def ping(self) -> None:
        """Measures the round trip, and sends the last result."""
        self.clock.pinged(time.perf_counter())
        self.send(Head(PING, check=round(self.clock.trip * 1e6)), b"", 0)

    async def _write(self) -> None:
        while True:
            head, body = await self._out.get()
            body = body if isinstance(body, bytes) else await body
            try:
                self._sending = True
                await self._send_whole(head._replace(stamp=time.perf_counter()), body)
                self._sending = False
            except RemoteError as error:
                await asyncio.wait({self._reading}, timeout=GOODBYE_S)  # a goodbye may name another member
                self._fail(NeighbourLost(self.stream.remote, str(error)))
                return
            self._out.task_done()

    async def _send_whole(self, head: Head, body: bytes) -> None:
        """Not cancelled in the middle: after half a frame no goodbye could follow."""
        sending = asyncio.ensure_future(self.stream.send(head.pack(), body, timeout=self.timeout))
        sending.add_done_callback(_retrieve)
        await asyncio.shield(sending)

    async def _beat(self) -> None:
        """Past the queue, because the frame at its head may still be encoded."""
        with contextlib.suppress(RemoteError):  # the writing or the reading task reports it
            while True:
                await asyncio.sleep(self._liveness.beat_s)
                if not self._sending:
                    await self._send_whole(Head(BEAT), b"")

    # --- receiving

    @property
    def ready(self) -> bool:
        """Whether `take` returns, or raises, at once."""
        return not self._in.empty() or self.failed is not None

    def take(self, expected: Head, body_bytes: int | None) -> Frame:
        """The expected frame, whose body has `body_bytes` bytes (None: any). Raises NeighbourLost."""
        if self._in.empty():
            assert self.failed is not None
            raise self.failed
        item = self._in.get_nowait()
        compare(self.stream.remote, item.head, item.body, expected, body_bytes)
        return item

    async def _read(self) -> None:
        try:
            while True:
                frame = memoryview(await self.stream.recv(self._limit))
                now = time.perf_counter()
                head, body = parse(self.stream.remote, frame)
                if head.kind in (PING, ECHO, BEAT):
                    self._measure(head, now)
                    continue
                value = None
                if head.kind in (FORWARD, BACKWARD):
                    self.clock.frame(head.stamp, now)
                    value = self._decode(head.kind, body)
                await self._in.put(Frame(head, body, value))
                self.most_waiting = max(self.most_waiting, self._in.qsize())
                self._arrived.set()
        except NeighbourLost as error:
            self._fail(error)
        except RemoteError as error:
            self._fail(NeighbourLost(self.stream.remote, str(error)))

    def _measure(self, head: Head, now: float) -> None:
        """Handles a small frame that came at `now`."""
        if head.kind != BEAT:
            self.clock.small(head.stamp, now)
        if head.kind == PING:
            self.clock.trip = head.check / 1e6  # as the neighbour measured it
            if self._out.empty():
                self.send(Head(ECHO), b"", 0)
        elif head.kind == ECHO:
            self.clock.echoed(now)

    async def _watch(self) -> None:
        """Breaks the link without a sign of life; see the module's docstring."""
        patience = self._liveness
        gaps: deque[float] = deque([0.0], maxlen=RECENT)
        silence, received, tick = 0.0, -1, patience.beat_s / 2
        before = time.monotonic()
        while True:
            await asyncio.sleep(tick)
            now = time.monotonic()
            if self.stream.received != received or self._in.full():
                gaps.append(silence)
                silence, received = 0.0, self.stream.received
            else:
                silence += min(now - before, 2 * tick)
            before = now
            usual = max(patience.silent_s + TRIPS * self.clock.trip, GAPS * max(gaps))
            if silence > min(usual, patience.longest_s):
                self._fail(NeighbourLost(self.stream.remote, f"gave no sign of life for {silence:.1f} s"))
                return

    def silent(self) -> NoReturn:
        """Raises NeighbourLost for a frame that did not come."""
        self.blame(f"nothing came for {self.timeout:g} s")

    def blame(self, reason: str) -> NoReturn:
        """Raises NeighbourLost in this neighbour's name."""
        raise NeighbourLost(self.stream.remote, reason)

    def refuse(self, reason: str) -> NoReturn:
        """Raises Refused in this neighbour's name."""
        raise Refused(self.stream.remote, reason)


def _retrieve(sending: asyncio.Future[None]) -> None:
    if not sending.cancelled():
        sending.exception()


async def keep_alive(stream: Stream, over: Callable[[], bool], beat_s: float) -> None:
    """Sends BEATs until `over()` on a stream without a Link, whose peer waits for us."""
    with contextlib.suppress(RemoteError):
        while not over():
            await stream.send(Head(BEAT).pack())
            await asyncio.sleep(beat_s)
