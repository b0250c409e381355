"""Streams of frames over a pair of byte streams (a socket or memory), and what every transport does with them.

*Striped streams.* Several streams to one peer carry frames as one. A stream's window bounds the bytes under way;
sixteen streams have sixteen windows (docs/adr/0011). A frame is cut into slices of SLICE bytes or more, one for each
stripe in turn, and the next frame begins where it ended. The first slice begins with the frame's length, 4 bytes,
big-endian.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from peer.net.base import (
    SEND_SECONDS,
    Closed,
    Ended,
    Handler,
    Malformed,
    Stream,
    Timeout,
    Traffic,
    cancel,
    log,
    nothing_came,
)
from peer.net.guests import LIMITS, UNCOUNTED, Abortable, Guests, Held, Limits, StreamTurns
from peer.net.rate_limits import Rate, TokenBucket
from peer.net.uplink import Uplink
from protocol.errors import LocalError, RemoteError
from protocol.identity import short_peer
from protocol.wire import framing
from protocol.wire.encoding import MessageError
from protocol.wire.framing import MAX_FRAME, PREFIX, FrameError, FrameReader

SLOW_BYTES_PER_SECOND = 125_000.0
PING_SECONDS = 1.0
MAX_QUEUE_SECONDS = 30.0
"""Longest time allowed for sent bytes to drain; by then libp2p notices a dead connection itself."""
CHUNK = 256 * 1024
NONSENSE_OFFENCES = 4.0
"""Offences that a malformed message counts as."""
LOGGED_FAILURES = Rate(0.1, 20.0)
LINGER_SECONDS = 5.0
"""How long a closing side that has finished waits for the other to read everything and to finish."""


@dataclass(slots=True)
class Flow:
    """All streams with one peer, and how long it may take to answer.

    A question waits behind earlier bytes, which are modelled as a bucket that drains at the pace of a slow link.
    """

    streams: int = 0
    received: int = 0  # bytes that came so far
    _unsent: TokenBucket = field(default_factory=lambda: TokenBucket(SLOW_BYTES_PER_SECOND, 0.0))
    _pings: TokenBucket = field(default_factory=lambda: TokenBucket(1 / PING_SECONDS, 1.0))

    def ask_in(self, now: float) -> float:
        """Seconds until the peer may be pinged; 0: it is, `now`."""
        return 0.0 if self._pings.take(now) else self._pings.wait(now, 1.0)

    def sent(self, size: int, now: float) -> None:
        self._unsent.spend(now, size)

    def queue_seconds(self, now: float) -> float:
        """Longest time that what was sent may keep a slow link busy."""
        return min(MAX_QUEUE_SECONDS, self._unsent.wait(now))


class ByteWriter(Protocol):
    """The part of asyncio.StreamWriter that is used."""

    def write(self, data: bytes, /) -> None: ...
    async def drain(self) -> None: ...
    def close(self) -> None: ...
    async def wait_closed(self) -> None: ...


class FrameStream:
    """See peer.net.base.Stream. `abort` closes the writer at once and drops what is unsent; it may be called again."""

    def __init__(
        self,
        remote: str,
        name: str,
        reader: asyncio.StreamReader,
        writer: ByteWriter,
        abort: Callable[[], None],
        traffic: Traffic,
        flow: Flow,
    ) -> None:
        self.remote = remote
        self.name = name
        self.received = 0
        self._reader = reader
        self._writer = writer
        self._abort = abort
        self._traffic = traffic
        self._flow = flow
        self._frames = FrameReader()
        self._sending = asyncio.Lock()
        self._receiving = False
        self._finished = False
        self._ended = False
        self._closed = False
        self.turns: StreamTurns | None = None
        """Those of frames, where frames take turns (peer/net/guests.py)."""
        self.held: Held | None = None
        """What waits until a guest reads it (peer/net/guests.py)."""
        self._came: bytes | None = None  # a frame that waits for its turns
        self._is_paid = True  # whether the next frame has one turn: the first one has, by the stream's opening

    def __repr__(self) -> str:
        return f"FrameStream({self.name}, {short_peer(self.remote)})"

    async def send(self, *parts: bytes | memoryview, timeout: float = SEND_SECONDS) -> None:
        size = sum(memoryview(part).nbytes for part in parts)
        if self.held is None:
            return await self._write(framing.header(size), parts, timeout)
        clock = asyncio.get_running_loop().time
        self.held.add(size, clock())
        try:
            await self._write(framing.header(size), parts, timeout)
        finally:
            self.held.read(size, clock())
        if self.turns is not None:
            self.turns.answered(size)

    async def finish(self) -> None:
        if not self._finished:
            await self._write(framing.END, (), SEND_SECONDS, last=True)

    async def _write(
        self, head: bytes, parts: tuple[bytes | memoryview, ...], timeout: float, last: bool = False
    ) -> None:
        try:
            async with asyncio.timeout(timeout), self._sending:
                if self._closed or self._finished:
                    raise self._over("it was closed or finished on this side")
                done = False
                try:
                    await self._write_chunks(head, parts)
                    done, self._finished = True, last
                finally:
                    if not done:
                        self.abort()  # half a frame is out: nothing sensible can follow
        except TimeoutError:
            raise Timeout(
                self.remote,
                f"stream {self.name} to {short_peer(self.remote)}: it read nothing for {timeout:g} s; try again",
            ) from None
        except (OSError, EOFError):
            raise self._over("the peer or its link is gone") from None

    async def _write_chunks(self, head: bytes, parts: tuple[bytes | memoryview, ...]) -> None:
        pending = [head]
        waiting = len(head)
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), CHUNK):
                pending.append(bytes(view[start : start + CHUNK]))  # copied: the caller may reuse its buffer
                waiting += len(pending[-1])
                if waiting >= CHUNK:
                    await self._write_now(pending, waiting)
                    pending, waiting = [], 0
        if pending:
            await self._write_now(pending, waiting)

    async def _write_now(self, pending: list[bytes], size: int) -> None:
        whole = b"".join(pending)
        pending.clear()  # keeps one copy in memory: a node sends to a thousand at once
        self._writer.write(whole)
        del whole
        self._traffic.count_sent(self.name, self.remote, size)
        self._flow.sent(size, asyncio.get_running_loop().time())
        with self._traffic.waits(self.remote):
            await self._writer.drain()

    async def recv(self, limit: int = MAX_FRAME, *, timeout: float | None = None) -> bytes:
        self._receiving = True
        try:
            async with asyncio.timeout(timeout):
                return await self._next(limit) if self.turns is None else await self._in_turn(self.turns, limit)
        except TimeoutError:
            raise nothing_came(self, timeout) from None
        except FrameError as error:
            self.abort()
            raise self._over(f"it sent a {error}", Malformed) from None
        except (OSError, EOFError):
            self.abort()
            raise self._over("the peer or its link is gone") from None
        finally:
            self._receiving = False

    async def _in_turn(self, turns: StreamTurns, limit: int) -> bytes:
        """Returns the next frame once it has had its turns: one, and the others by its size."""
        if not self._is_paid:
            await turns.take()
            self._is_paid = True
        if self._came is None:
            self._came = await self._next(limit)
        await turns.take_for(len(self._came))
        frame, self._came, self._is_paid = self._came, None, False
        return frame

    async def take_turns(self, amount: float) -> None:
        if self.turns is not None and amount >= 1.0:
            await self.turns.take(amount)

    async def _next(self, limit: int) -> bytes:
        while True:
            if self._closed:
                raise self._over("it was closed on this side")
            try:
                frame = self._frames.next(limit)
            except framing.Ended:
                if not self._ended:
                    self._ended = True
                    self._traffic.count_received(self.name, self.remote, framing.PREFIX)
                what = f"stream {self.name} from {short_peer(self.remote)}"
                raise Ended(self.remote, f"{what}: has ended; ask another peer, or try again") from None
            if frame is not None:
                self._traffic.count_received(self.name, self.remote, framing.PREFIX + len(frame))
                return frame
            data = await self._reader.read(CHUNK)
            if not data:
                raise EOFError
            self.received += len(data)
            self._flow.received += len(data)
            self._frames.feed(data)

    def _over(self, reason: str, kind: type[Closed] = Closed) -> Closed:
        return kind(self.remote, f"stream {self.name} with {short_peer(self.remote)}: {reason}; try again")

    async def close(self) -> None:
        if self._closed:
            return
        try:
            if self._finished and not self._ended and not self._receiving:
                with contextlib.suppress(RemoteError):
                    async with asyncio.timeout(LINGER_SECONDS):
                        while True:
                            await self.recv(CHUNK)  # drops it
        except TimeoutError:
            pass
        finally:
            if self._finished and self._ended and not self._closed:
                self._closed = True
                self._writer.close()
                try:
                    async with asyncio.timeout(LINGER_SECONDS):
                        await self._writer.wait_closed()
                except (OSError, TimeoutError):
                    pass
                finally:
                    self._abort()
            else:
                self.abort()

    @property
    def pending(self) -> int:
        return self._frames.pending

    @property
    def is_closed(self) -> bool:
        return self._closed

    def abort(self) -> None:
        self._closed = True
        self._abort()


def ending(writer: asyncio.StreamWriter) -> Callable[[], None]:
    """Returns what aborts a connection, even a closed one, where asyncio's `abort` raises AttributeError."""

    def end() -> None:
        with contextlib.suppress(AttributeError):
            writer.transport.abort()

    return end


class Endpoint:
    """A transport's streams and the tasks that serve them, which end with it."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.traffic = Traffic()
        self.guests = Guests(limits)
        self._logged = TokenBucket(*LOGGED_FAILURES)
        self._streams: dict[FrameStream, None] = {}  # in the order in which they were opened
        self._flows: dict[str, Flow] = {}
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def stream(
        self, remote: str, name: str, reader: asyncio.StreamReader, writer: ByteWriter, abort: Callable[[], None]
    ) -> FrameStream:

        def gone() -> None:
            if stream in self._streams:
                del self._streams[stream]
                flow.streams -= 1
                if not flow.streams:
                    del self._flows[remote]
            abort()

        flow = self._flows.setdefault(remote, Flow())
        flow.streams += 1
        stream = FrameStream(remote, name, reader, writer, gone, self.traffic, flow)
        self._streams[stream] = None
        return stream

    def flow(self, peer: str) -> Flow:
        return self._flows.get(peer, Flow())

    async def run(self, handler: Handler, stream: FrameStream, where: str = "") -> None:
        """Serves a stream in the current task, if its peer, at the multiaddress `where`, may have one.

        What the handler raises ends this stream and nothing else.
        """
        clock = asyncio.get_running_loop().time
        if not self.guests.enter(stream.remote, where, stream.name, stream, clock()):
            stream.abort()
            return
        await self.attend(handler, stream, stream, self.guests.wait(stream.remote, stream.name, clock()))

    async def attend(self, handler: Handler, stream: FrameStream, guest: Abortable, wait: float = 0.0) -> None:
        """Serves a stream that entered as `guest` in the current task, after `wait` seconds."""
        clock = asyncio.get_running_loop().time
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        if not self.is_uncounted(stream.remote, stream.name):
            stream.held = Held(self.guests, stream.remote, stream.abort)
        try:
            until = clock() + wait
            while clock() < until and not stream.is_closed:
                await asyncio.sleep(min(1.0, until - clock()))
            await handler(stream)
            await stream.finish()
        except RemoteError as error:
            log.debug("serving %s: %s", stream.name, error)
            theirs = isinstance(error, MessageError | Malformed) and error.peer == stream.remote
            if theirs and not self.guests.carries(stream.remote, stream.name):
                self.guests.offend(
                    stream.remote, f"says what has no place in {stream.name}", clock(), NONSENSE_OFFENCES
                )
        except Exception as error:
            self._failed(stream, error)
        finally:
            try:
                await stream.close()
            finally:
                self.guests.leave(stream.remote, guest)
                self._tasks.discard(task)

    def is_uncounted(self, peer: str, name: str) -> bool:
        """Returns whether a stream of `peer` with this name has limits of its own."""
        return name in UNCOUNTED or self.guests.carries(peer, name)

    def _failed(self, stream: FrameStream, error: Exception) -> None:
        """Logs what a handler did not expect, at a limited rate, as a stranger can provoke it."""
        now = asyncio.get_running_loop().time()
        if self._logged.take(now):
            log.exception("serving %s to %s failed", stream.name, short_peer(stream.remote))
        if not self.guests.carries(stream.remote, stream.name) and not isinstance(error, LocalError | OSError):
            self.guests.offend(stream.remote, f"sends what {stream.name} cannot bear", now)

    def own(self, task: asyncio.Task[object]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def abort_all(self) -> None:
        for stream in list(self._streams):
            stream.abort()
        self.guests.abort_all()

    async def shut(self) -> None:
        self.abort_all()
        await cancel(*(task for task in self._tasks if task is not asyncio.current_task()))


# --- several streams as one

STRIPES = 16
SLICE = 32 * 1024
SMALL = 1024
"""Frames up to this size, signs of life among them, do not wait for their turn."""


def slices(first: int, frame: int, stripes: int) -> list[tuple[int, int]]:
    """Returns the stripe and bytes of each slice of a frame, whose first slice is on stripe `first`."""
    count = max(1, min(stripes, frame // SLICE))
    cuts = [frame * i // count for i in range(count + 1)]
    return [((first + i) % stripes, b - a) for i, (a, b) in enumerate(itertools.pairwise(cuts))]


class StripedStream:
    """See peer.net.base.Stream. Owns its streams."""

    def __init__(self, streams: Sequence[Stream], uplink: Uplink | None = None) -> None:
        self.remote, self.name = streams[0].remote, streams[0].name
        self._streams = streams
        self._sending = asyncio.Lock()
        self._uplink = uplink or Uplink()
        self._send_at = self._recv_at = 0  # the stripes where the next frames begin
        self._came: dict[int, bytearray] = {}  # slices of the frame that comes

    @property
    def received(self) -> int:
        return sum(stream.received for stream in self._streams)

    @property
    def pending(self) -> int:
        return sum(stream.pending for stream in self._streams)

    async def send(self, *parts: bytes | memoryview, timeout: float = SEND_SECONDS) -> None:
        frame = memoryview(framing.header(sum(len(part) for part in parts)) + b"".join(parts))

        async def put(stream: Stream, data: memoryview) -> None:
            for at in range(0, len(data), self._uplink.piece):
                piece = data[at : at + self._uplink.piece]
                if len(frame) > SMALL:
                    await self._uplink.turn(self.remote, len(piece))
                await stream.send(piece, timeout=timeout)

        async with self._sending:  # the slices of two frames are in the same order on all stripes
            puts, at = [], 0
            for stripe, size in self._slices(self._send_at, len(frame) - PREFIX):
                puts.append(put(self._streams[stripe], frame[at : at + size]))
                at += size
            self._send_at = (self._send_at + len(puts)) % len(self._streams)
            try:
                await asyncio.gather(*puts)
            except BaseException:
                await self.close()  # half a frame may be out
                raise

    def _slices(self, first: int, frame: int) -> list[tuple[int, int]]:
        """As `slices`, with the length that goes before the first."""
        (stripe, size), *others = slices(first, frame, len(self._streams))
        return [(stripe, PREFIX + size), *others]

    async def recv(self, limit: int = MAX_FRAME, *, timeout: float | None = None) -> bytes:
        try:
            async with asyncio.timeout(timeout):
                return await self._next(limit)
        except TimeoutError:
            raise nothing_came(self, timeout) from None
        except Ended:
            raise
        except RemoteError:
            await self.close()
            raise

    async def _next(self, limit: int) -> bytes:
        first = self._recv_at
        most = PREFIX + max(min(limit, 2 * SLICE), -(-limit // len(self._streams)))
        if first not in self._came:
            self._came[first] = bytearray(await self._streams[first].recv(most))
        beginning = self._came[first]
        size = int.from_bytes(beginning[:PREFIX], "big")
        if len(beginning) < PREFIX or size > limit:
            raise self._no_frame(f"{len(beginning)} bytes of a frame of {size}")
        expected = self._slices(first, size)
        if len(beginning) > expected[0][1]:
            raise self._no_frame(f"more than a slice of a frame of {size} bytes")

        async def take(stripe: int, size: int) -> None:
            came = self._came.setdefault(stripe, bytearray())
            while len(came) < size:
                piece = await self._streams[stripe].recv(size - len(came))
                if not piece:
                    raise self._no_frame("an empty piece")
                came += piece

        await asyncio.gather(*(take(stripe, size) for stripe, size in expected))
        others = (self._came[stripe] for stripe, _ in expected[1:])
        frame = b"".join((memoryview(beginning)[PREFIX:], *others))
        self._came, self._recv_at = {}, (first + len(expected)) % len(self._streams)
        return frame

    async def take_turns(self, amount: float) -> None:
        await self._streams[0].take_turns(amount)

    def _no_frame(self, what: str) -> Closed:
        return Closed(self.remote, f"stream {self.name} with {short_peer(self.remote)}: it sent {what}; try again")

    async def finish(self) -> None:
        await asyncio.gather(*(stream.finish() for stream in self._streams))

    async def close(self) -> None:
        await asyncio.gather(*(stream.close() for stream in self._streams))
