"""Streams of frames over a pair of byte streams, and what every transport does with them.

The bytes may come from a socket or from memory; both are read through asyncio's StreamReader, so that framing, deadlines,
back-pressure, counting and ending are one and the same code.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from peer.net.base import SEND_SECONDS, Closed, Ended, Handler, Malformed, Timeout, Traffic, log, nothing_came
from peer.net.guests import LIMITS, Ends, Guests, Limits
from peer.net.token_bucket import TokenBucket
from protocol.errors import LocalError, RemoteError
from protocol.identity import short_peer
from protocol.wire import framing
from protocol.wire.encoding import MessageError
from protocol.wire.framing import MAX_FRAME, FrameError, FrameReader

SLOW_BYTES_PER_SECOND = 125_000.0
ASK_SECONDS = 1.0
"""How often a peer is asked whether it is there, at most: what it does, or does not, must not cost us much."""
LONGEST_SECONDS = 30.0
"""Of waiting for what is under way; by then libp2p finds out by itself."""


@dataclass(slots=True)
class Flow:
    """All streams with one peer. `received`: bytes that came so far."""

    streams: int = 0
    received: int = 0
    _under_way: TokenBucket = field(default_factory=lambda: TokenBucket(SLOW_BYTES_PER_SECOND, 0.0))
    _asks: TokenBucket = field(default_factory=lambda: TokenBucket(1 / ASK_SECONDS, 1.0))

    def ask_in(self, now: float) -> float:
        """In how many seconds the peer may be asked again; 0: it is, at `now`."""
        return 0.0 if self._asks.take(now) else self._asks.wait(now, 1.0)

    def sent(self, size: int, now: float) -> None:
        """So many bytes were handed to the daemon at `now`, in steady seconds."""
        self._under_way.spend(now, size)

    def queue_seconds(self, now: float) -> float:
        """For how long what was sent may keep a slow link busy."""
        return min(LONGEST_SECONDS, self._under_way.wait(now))


CHUNK = 256 * 1024
"""Bytes written or read at once."""
NONSENSE = 4.0
"""Offences that a message counts as which makes no sense: of our own version nobody sends one."""
TOLD = (0.1, 20.0)
"""Of a second, and at once: failures of handlers of which the log says everything."""
LINGER_SECONDS = 5.0
"""How long a closing side that has finished waits for the other to read everything and to finish."""


class ByteWriter(Protocol):
    """The part of asyncio.StreamWriter that is used."""

    def write(self, data: bytes, /) -> None: ...
    async def drain(self) -> None: ...
    def close(self) -> None: ...
    async def wait_closed(self) -> None: ...


class FrameStream:
    """See peer.net.base.Stream. `abort` closes the writer at once, dropping what is unsent; it may be called again."""

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
        self.turn: Callable[[float], Awaitable[None]] | None = None
        """Is awaited before another frame is read, where frames are read in turns (peer/net/guests.py)."""
        self._owes = 0.0

    def __repr__(self) -> str:
        return f"FrameStream({self.name}, {short_peer(self.remote)})"

    async def send(self, *parts: bytes | memoryview, timeout: float = SEND_SECONDS) -> None:
        size = sum(memoryview(part).nbytes for part in parts)
        await self._write(framing.header(size), parts, timeout)

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
                pending.append(
                    bytes(view[start : start + CHUNK])
                )  # a copy: the caller may change its buffer after send
                waiting += len(pending[-1])
                if waiting >= CHUNK:
                    await self._write_now(pending, waiting)
                    pending, waiting = [], 0
        if pending:
            await self._write_now(pending, waiting)

    async def _write_now(self, pending: list[bytes], size: int) -> None:
        whole = b"".join(pending)
        pending.clear()  # what waits to be sent is in memory once: a node sends to a thousand at once
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
                if self._owes and self.turn is not None:
                    await self.turn(self._owes)
                self._owes = 0.0
                frame = await self._next(limit)
                self._owes = 1.0
                return frame
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
        return kind(self.remote, f"stream {self.name} with {short_peer(self.remote)}: {reason}; open it again")

    async def close(self) -> None:
        if self._closed:
            return
        try:
            if self._finished and not self._ended and not self._receiving:
                with contextlib.suppress(RemoteError):
                    async with asyncio.timeout(LINGER_SECONDS):
                        while True:
                            await self.recv(CHUNK)  # nobody wants it: it is not to take much memory
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

    def costs(self, turns: float) -> None:
        """The newest frame asked for so much that it takes this many more turns."""
        self._owes += turns

    @property
    def pending(self) -> int:
        """Bytes that were taken from the network and that `recv` has not given yet."""
        return self._frames.pending

    @property
    def is_closed(self) -> bool:
        """Whether it is over on this side."""
        return self._closed

    def abort(self) -> None:
        """Ends both directions at once."""
        self._closed = True
        self._abort()


def ending(writer: asyncio.StreamWriter) -> Callable[[], None]:
    """What ends a connection at once, also one that has ended: asyncio forgets that it has closed one by itself, once all that still had to be
    written was, and its `abort` raises AttributeError then."""

    def end() -> None:
        with contextlib.suppress(AttributeError):
            writer.transport.abort()

    return end


class Endpoint:
    """A transport's streams and the handlers that serve them; all of them end with it."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.traffic = Traffic()
        self.guests = Guests(limits)
        self._told = TokenBucket(*TOLD)
        self._streams: dict[FrameStream, None] = {}  # in the order in which they were opened
        self._flows: dict[str, Flow] = {}
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def open_streams(self) -> int:
        """How many streams are open."""
        return len(self._streams)

    def stream(
        self, remote: str, name: str, reader: asyncio.StreamReader, writer: ByteWriter, abort: Callable[[], None]
    ) -> FrameStream:
        """A stream that `abort_all` ends too."""

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
        """What passes between us and `peer`."""
        return self._flows.get(peer, Flow())

    async def run(self, handler: Handler, stream: FrameStream, where: str = "") -> None:
        """Serves one stream in the current task, as far as its peer, at the multiaddress `where`, may have one. Whatever the handler raises
        ends this stream and nothing else."""
        clock = asyncio.get_running_loop().time
        if not self.guests.enter(stream.remote, where, stream.name, stream, clock()):
            stream.abort()
            return
        await self.attend(handler, stream, stream, self.guests.wait(stream.remote, stream.name, clock()))

    async def attend(self, handler: Handler, stream: FrameStream, guest: Ends, wait: float = 0.0) -> None:
        """Serves in the current task a stream that entered as `guest`, after so many seconds."""
        clock = asyncio.get_running_loop().time
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            until = clock() + wait
            while clock() < until and not stream.is_closed:  # it may be refused meanwhile
                await asyncio.sleep(min(1.0, until - clock()))
            await handler(stream)
            await stream.finish()
        except RemoteError as error:
            log.debug("serving %s: %s", stream.name, error)
            theirs = isinstance(error, MessageError | Malformed) and error.peer == stream.remote
            if theirs and not self.guests.carries(stream.remote, stream.name):
                self.guests.offend(stream.remote, f"says what has no place in {stream.name}", clock(), NONSENSE)
        except Exception as error:
            self._failed(stream, error)
        finally:
            try:
                await stream.close()
            finally:
                self.guests.leave(stream.remote, guest)
                self._tasks.discard(task)

    def _failed(self, stream: FrameStream, error: Exception) -> None:
        """A handler did not expect what came, or our own disk or network fails. The log says so, but a stranger does not decide how
        long it gets."""
        stream.abort()
        now = asyncio.get_running_loop().time()
        if self._told.take(now):
            log.exception("serving %s to %s failed", stream.name, short_peer(stream.remote))
        if not self.guests.carries(stream.remote, stream.name) and not isinstance(error, LocalError | OSError):
            self.guests.offend(stream.remote, f"sends what {stream.name} cannot bear", now)

    def own(self, task: asyncio.Task[object]) -> None:
        """Makes `task` end with this endpoint."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def abort_all(self) -> None:
        """Ends every stream at once, those that wait to be served too."""
        for stream in list(self._streams):
            stream.abort()
        self.guests.abort_all()

    async def shut(self) -> None:
        """Ends every stream and task."""
        self.abort_all()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
