"""One stage boundary: frames both ways over one pipe (peer/net/striped_stream.py), with a queue on either side.

Frames are written, read and decoded while the computation goes on. What was read waits in a queue of bounded length. When the
queue is full nothing more is read, and the stream holds the sender back. What is to be written is bounded by the micro-batches
under way.

Signs of life: a side that has nothing else to write sends a BEAT every `Liveness.beat_s` seconds. The event loop sends it, and
the event loop is free while the model computes. What counts as life is bytes, not frames, so a large frame on a slow link is no
silence. A neighbour is broken when no byte came for `silent_s` and TRIPS round trips, or for GAPS times the longest silence
of late (a link that jitters, a loaded machine), but at the latest after `longest_s`. No time counts while nothing is read because
the queue is full, and while this process itself was stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from peer.chain.timing import LinkClock
from peer.net.base import Stream
from protocol.errors import RemoteError
from protocol.wire.framing import MAX_FRAME

GOODBYE_S = 1.0
"""How long a broken link waits for the neighbour's goodbye, which may blame somebody else."""
HEAD_START_S = 0.25
"""Between saying that a neighbour lies and leaving the chain: the neighbour will say that we left, and of two reports the first counts."""
TRIPS = 4
GAPS = 3
RECENT = 64
"""Silences that are remembered: those of half a minute or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """When a neighbour counts as alive; see the module's docstring. All in seconds."""

    beat_s: float = 0.5
    silent_s: float = 2.5
    longest_s: float = 10.0


LIVENESS = Liveness()


class Link:
    """A neighbour, as a stage sees it. Its tasks live in `group`.

    `arrived` is set whenever something comes, and when the link breaks. `failed` then says why, once all frames that came before
    are taken. `decode` begins to decode a micro-batch's values. `queue`: how many frames wait here unread at most; `limit`: how
    many bytes one of them has at most; `timeout`: seconds that the neighbour has to read one.
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
        """Ends the tasks, after what is under way was written."""
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
        """Measures the way there and back, and tells the neighbour what the last ping found."""
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
                await asyncio.wait({self._reading}, timeout=GOODBYE_S)  # a goodbye may name somebody else
                self._fail(NeighbourLost(self.stream.remote, str(error)))
                return
            self._out.task_done()

    async def _send_whole(self, head: Head, body: bytes) -> None:
        """Is not cancelled in the middle: half a frame would leave no way to say goodbye."""
        sending = asyncio.ensure_future(self.stream.send(head.pack(), body, timeout=self.timeout))
        sending.add_done_callback(_heard)
        await asyncio.shield(sending)

    async def _beat(self) -> None:
        """Past the queue, because the frame at its head may still be encoded."""
        with contextlib.suppress(RemoteError):  # the writing or the reading side tells
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
        """The one frame that may come now. `body_bytes`: its length, None for any. Raises NeighbourLost."""
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
        """Takes a small frame that came at `now`; a PING is answered."""
        if head.kind != BEAT:
            self.clock.small(head.stamp, now)
        if head.kind == PING:
            self.clock.told(head.check / 1e6)
            if self._out.empty():
                self.send(Head(ECHO), b"", 0)
        elif head.kind == ECHO:
            self.clock.echoed(now)

    async def _watch(self) -> None:
        """Breaks the link when the neighbour gives no sign of life; see the module's docstring."""
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
        """Nothing came in time: raises NeighbourLost in this neighbour's name."""
        self.blame(f"nothing came for {self.timeout:g} s")

    def blame(self, reason: str) -> NoReturn:
        """Raises NeighbourLost in this neighbour's name."""
        raise NeighbourLost(self.stream.remote, reason)

    def refuse(self, reason: str) -> NoReturn:
        """Raises Refused in this neighbour's name."""
        raise Refused(self.stream.remote, reason)


def _heard(sending: asyncio.Future[None]) -> None:
    """Nobody waits for it any more: the run is over."""
    if not sending.cancelled():
        sending.exception()


async def keep_alive(stream: Stream, over: Callable[[], bool], beat_s: float) -> None:
    """Sends BEATs on a stream that no Link has yet, because its peer waits for us and is to know that we live. Until `over()`."""
    with contextlib.suppress(RemoteError):
        while not over():
            await stream.send(Head(BEAT).pack())
            await asyncio.sleep(beat_s)
