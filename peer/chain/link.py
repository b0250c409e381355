"""One stage boundary: frames both ways over one pipe (peer/net/striped_stream.py), queues on both sides of it, and what they tell about the link.

Frames are written, read and decoded behind the computation's back. What is read waits in a queue of bounded length; when it
is full nothing more is read, and the sender is held back by its stream. What is to be written is bounded by the
micro-batches under way. Frame: header (big-endian, `Head`) and body.

Measuring: each header says when its frame was handed over, by the sender's clock. A stage pings the next one when an inner
step begins, which echoes: both frames are small and meet an idle link, so `arrival - stamp` of theirs is latency + offset
of the clocks. A frame occupies the link from the later of `stamp + that` and the arrival of the frame before, until it has
arrived. The offsets of both directions cancel.

Life: a side that has nothing else to write sends a BEAT every BEAT_S, from the event loop, which is free while the model computes. What
counts as life is bytes, not frames, so a large frame on a slow link is no silence. A neighbour of whom no byte came for SILENT_S and TRIPS round
trips, or for GAPS times the longest silence of late (jitter of the link, a loaded machine), is broken; while nothing is read, because the queue is full, and
while this process itself was stopped, no time counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, NoReturn

from peer.net.base import Stream
from protocol.errors import RemoteError
from protocol.wire.framing import MAX_FRAME

FORWARD, BACKWARD, NORM, TOTAL, PING, ECHO, ABORT, BEAT, RESUME, DONE = range(1, 11)
NAME_BYTES = 128
GOODBYE_S = 1.0
BEAT_S = 0.5
SILENT_S = 2.5
TRIPS = 4
LONGEST_SILENT_S = 10.0
GAPS = 3
_RECENT = 64
"""Silences that are remembered: those of half a minute or more."""
_HEAD = struct.Struct(">BBIIIIIIId")
_CLOCK_STEPS = 4
"""Steps whose smallest delay counts; clocks drift apart in the long run."""


class ChainBroken(RemoteError):
    """A member left, fell silent or sent what cannot be; `peer` is the member to blame, `reason` what it did."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(peer, f"chain member {peer}: {reason}; it needs a spare in its place")
        self.reason = reason


class Refused(ChainBroken):
    """A member sent a frame that is not the one which may come now, or has impossible content."""


class Head(NamedTuple):
    """`code`: number format; `depth`: micro-batches that may be under way; `check`: CRC-32 of the micro-batch's token ids, in a
    PING the last round trip in microseconds; `stamp`: seconds, the sender's clock. What is not needed is 0."""

    kind: int
    code: int = 0
    depth: int = 0
    step: int = 0
    micro: int = 0
    rows: int = 0
    length: int = 0
    width: int = 0
    check: int = 0
    stamp: float = 0.0

    def pack(self) -> bytes:
        return _HEAD.pack(*self)


HEAD_BYTES = _HEAD.size


def parse(remote: str, frame: memoryview) -> tuple[Head, memoryview]:
    """The parts of a frame of `remote`. Raises ChainBroken where there are none, or the frame is a goodbye."""
    if len(frame) < HEAD_BYTES:
        raise ChainBroken(remote, f"sent a frame of {len(frame)} bytes")
    head, body = Head(*_HEAD.unpack_from(frame)), frame[HEAD_BYTES:]
    if head.kind == ABORT:
        name = bytes(body[:NAME_BYTES]).decode("ascii", "replace")
        if name and name.isalnum():
            raise ChainBroken(name, f"left the chain, says {remote}")
        raise ChainBroken(remote, "left the chain")
    if not math.isfinite(head.stamp):
        raise ChainBroken(remote, "sent an impossible time")
    return head, body


def compare(remote: str, head: Head, body: memoryview, expected: Head, body_bytes: int | None) -> None:
    """Raises Refused if this is not the frame that may come now. Depth, check and stamp are free."""
    known = head._replace(depth=expected.depth, check=expected.check, stamp=expected.stamp)
    if known != expected or (body_bytes is not None and len(body) != body_bytes):
        raise Refused(remote, f"sent {head} with {len(body)} bytes, not {expected} with {body_bytes}")


def _heard(sending: asyncio.Future[None]) -> None:
    """Nobody waits for it any more: the run is over."""
    if not sending.cancelled():
        sending.exception()


class Frame(NamedTuple):
    """What came. `value`: what `decode` makes, or made, of the body of a FORWARD or BACKWARD frame."""

    head: Head
    body: memoryview
    value: Awaitable[Any] | None


class Link:
    """A neighbour. Its tasks live in `group`; `arrived` is set whenever something comes, or it is broken: `failed` is why, once
    all frames that came before are taken. `queue`: most frames that wait here unread; `limit`: most bytes of one; `timeout`:
    seconds for the neighbour to read one. `decode` begins to decode what came."""

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
    ) -> None:
        self.stream, self.sent_bytes, self.timeout = stream, 0, timeout
        self.most_waiting = 0
        self.failed: ChainBroken | None = None
        self._sending = False
        self._arrived, self._limit = arrived, min(MAX_FRAME, HEAD_BYTES + max(limit, NAME_BYTES))
        self._decode = decode
        self._out: asyncio.Queue[tuple[Head, bytes | Awaitable[bytes]]] = asyncio.Queue()
        self._in: asyncio.Queue[Frame] = asyncio.Queue(queue)
        self._times: list[tuple[float, float]] = []  # of the micro-batches' frames of this step: stamp, arrival
        self._delays: deque[float] = deque(maxlen=_CLOCK_STEPS)
        self._pinged = 0.0
        self._trip = 0.0  # seconds there and back, as the last ping found
        self._reading = group.create_task(self._read())
        self._writing = group.create_task(self._write())
        self._living = [group.create_task(self._beat()), group.create_task(self._watch())]

    async def stop(self) -> None:
        """Ends the tasks; what is under way is written first."""
        if self.failed is None:
            await self._out.join()
        for task in (self._reading, self._writing, *self._living):
            task.cancel()

    def _fail(self, error: ChainBroken) -> None:
        self.failed = self.failed or error
        self._arrived.set()

    # --- sending

    def send(self, head: Head, body: bytes | Awaitable[bytes], size: int) -> None:
        """Queues a frame whose body has, or will have, `size` bytes."""
        self.sent_bytes += HEAD_BYTES + size
        self._out.put_nowait((head, body))

    def ping(self) -> None:
        """Measures the way there and back, and tells the neighbour what the last ping found."""
        self._pinged = time.perf_counter()
        self.send(Head(PING, check=round(self._trip * 1e6)), b"", 0)

    async def _write(self) -> None:
        while True:
            head, body = await self._out.get()
            body = body if isinstance(body, bytes) else await body
            try:
                self._sending = True
                await self._send_whole(head._replace(stamp=time.perf_counter()), body)
                self._sending = False
            except RemoteError as error:
                await asyncio.wait({self._reading}, timeout=GOODBYE_S)  # a goodbye may name somebody else
                self._fail(ChainBroken(self.stream.remote, str(error)))
                return
            self._out.task_done()

    async def _send_whole(self, head: Head, body: bytes) -> None:
        """Is not cancelled in the middle: half a frame would leave no way to say goodbye."""
        sending = asyncio.ensure_future(self.stream.send(head.pack(), body, timeout=self.timeout))
        sending.add_done_callback(_heard)
        await asyncio.shield(sending)

    async def _beat(self) -> None:
        """Beside the queue: what is at its head may still be encoded."""
        with contextlib.suppress(RemoteError):  # the writing or the reading side tells
            while True:
                await asyncio.sleep(BEAT_S)
                if not self._sending:
                    await self._send_whole(Head(BEAT), b"")

    # --- receiving

    @property
    def ready(self) -> bool:
        """Whether `take` returns, or raises, at once."""
        return not self._in.empty() or self.failed is not None

    def take(self, expected: Head, body_bytes: int | None) -> Frame:
        """The one frame that may come now; None: of any length. Raises ChainBroken."""
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
                    if head.kind != BEAT:
                        self._delays.append(now - head.stamp)
                    if head.kind == PING:
                        self._trip = head.check / 1e6
                        if self._out.empty():
                            self.send(Head(ECHO), b"", 0)
                    elif head.kind == ECHO:
                        self._trip = min(now - self._pinged, LONGEST_SILENT_S)
                    continue
                value = None
                if head.kind in (FORWARD, BACKWARD):
                    self._times.append((head.stamp, now))
                    value = self._decode(head.kind, body)
                await self._in.put(Frame(head, body, value))
                self.most_waiting = max(self.most_waiting, self._in.qsize())
                self._arrived.set()
        except ChainBroken as error:
            self._fail(error)
        except RemoteError as error:
            self._fail(ChainBroken(self.stream.remote, str(error)))

    async def _watch(self) -> None:
        """Breaks the link when the neighbour gives no sign of life; see the module's docstring."""
        gaps: deque[float] = deque([0.0], maxlen=_RECENT)
        silence, received, tick = 0.0, -1, BEAT_S / 2
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
            if silence > min(max(SILENT_S + TRIPS * self._trip, GAPS * max(gaps)), LONGEST_SILENT_S):
                self._fail(ChainBroken(self.stream.remote, f"gave no sign of life for {silence:.1f} s"))
                return

    def silent(self) -> NoReturn:
        """Nothing came in time."""
        self.blame(f"nothing came for {self.timeout:g} s")

    def blame(self, reason: str) -> NoReturn:
        """Raises ChainBroken in this neighbour's name."""
        raise ChainBroken(self.stream.remote, reason)

    def refuse(self, reason: str) -> NoReturn:
        """Raises Refused in this neighbour's name."""
        raise Refused(self.stream.remote, reason)

    # --- what the step's frames tell about the way from the neighbour to us

    def measured(self) -> tuple[float, float]:
        """(delay, transfer) of this step, seconds: latency + clock offset, and the mean time that a frame occupies the link."""
        times, self._times = self._times, []
        if not times or not self._delays:
            return 0.0, 0.0
        delay, before, total = min(self._delays), -float("inf"), 0.0
        for stamp, arrival in times:
            total += max(0.0, arrival - max(stamp + delay, before))
            before = arrival
        return delay, total / len(times)


async def keep_alive(stream: Stream, over: Callable[[], bool]) -> None:
    """Beats on a stream that no Link has yet: its peer waits for us, and is to know that we live. Until `over()`."""
    with contextlib.suppress(RemoteError):
        while not over():
            await stream.send(Head(BEAT).pack())
            await asyncio.sleep(BEAT_S)
