"""The transport interface that all communication between peers uses.

It has one mechanism: streams of frames (protocol/wire/framing.py) between two peers, under a protocol name. A call is
one request and one reply over a fresh stream. `finish` says that nothing more comes; a stream that ends without it
raises Closed at the other side, so a dead peer is never mistaken for a finished one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, overload

from peer.net.guests import COUNTED_TURN_BYTES, SIGNATURE_TURNS, TURN_VALUES, Guests
from protocol.errors import LocalError, RemoteError, UsageError
from protocol.identity import short_peer
from protocol.wire.commit import Record
from protocol.wire.encoding import Message, MessageHead, RecordHead
from protocol.wire.framing import MAX_FRAME


@dataclass(frozen=True, slots=True)
class Clock:
    """The two clocks of a process, created by the composition root.

    wall: seconds since 1970; may jump, so nothing waits by it: it is written into commits, announcements and events
    """

    steady: Callable[[], float] = time.monotonic  # only goes forward, in seconds; measures leases, deadlines and pauses
    wall: Callable[[], float] = time.time


T = TypeVar("T")
log = logging.getLogger("potluck.net")

MAX_RECORD = 4096
"""Most bytes of one DHT value."""
MAX_TTL = 600.0
"""A DHT record may expire at most this many seconds ahead."""
REQUEST_SECONDS = 30.0
"""A called peer waits so long for the request."""
SILENT_SECONDS = 3.0
"""After so long without the answer that a peer owes us, the connection to it is checked."""
SILENT_HEARTBEATS = 3
"""The same for a session, in heartbeats."""
SEND_SECONDS = 60.0
"""A send waits so long for a peer that does not read, by default."""

_OK, _FAILED = b"\x00", b"\x01"


class Unreachable(RemoteError):
    """No stream or connection to that peer could be opened."""


class OtherPeer(Unreachable):
    """Another peer answers at that address.

    found: its id, as its key proves
    """

    def __init__(self, peer: str, text: str, found: str) -> None:
        super().__init__(peer, text)
        self.found = found


class NotServed(Unreachable):
    """The peer does not serve that protocol."""


class Closed(RemoteError):
    """The stream is over without `finish`: the peer, its link or our own side ended it."""


class Malformed(Closed):
    """The other side sent a frame that is longer than allowed; the stream is over."""


class Ended(Closed):
    """The sender has finished, and all of it was read."""


class Timeout(RemoteError):
    """The peer took longer than the deadline."""


class PortInUse(UsageError):
    """The port to listen on is in use."""


class StartFailed(UsageError):
    """The transport did not start."""


class BadAddress(UsageError, ValueError):
    """An address that Potluck cannot use."""


class TransportLost(LocalError):
    """Our own network has failed; the transport must be started again."""


class ClockWrong(LocalError):
    """Our clock differs from other peers' by more than the DHT tolerates."""


@dataclass(slots=True)
class Traffic:
    """Bytes of frames with their prefixes since the start, in total and by protocol name."""

    bytes_sent: int = 0
    bytes_received: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    waiting: Counter[str] = field(default_factory=Counter)  # sends that wait until a peer reads, by peer
    _heard: Callable[[str, int, int], None] | None = None

    def follow(self, heard: Callable[[str, int, int], None]) -> None:
        """Calls `heard(peer, sent, received)` for all bytes from now on."""
        self._heard = heard

    def count_sent(self, name: str, peer: str, size: int) -> None:
        self.bytes_sent += size
        self.sent[name] += size
        if self._heard is not None:
            self._heard(peer, size, 0)

    def count_received(self, name: str, peer: str, size: int) -> None:
        self.bytes_received += size
        self.received[name] += size
        if self._heard is not None:
            self._heard(peer, 0, size)

    @contextlib.contextmanager
    def waits(self, peer: str) -> Iterator[None]:
        self.waiting[peer] += 1
        try:
            yield
        finally:
            self.waiting[peer] -= 1
            if not self.waiting[peer]:
                del self.waiting[peer]


class Stream(Protocol):
    """Frames both ways between us and `remote`, its authenticated peer id, under the protocol `name`."""

    remote: str
    name: str

    @property
    def received(self) -> int:
        """Bytes that came so far, those of unfinished frames too."""
        ...

    @property
    def pending(self) -> int:
        """Bytes that came and that `recv` has not returned yet."""
        ...

    async def send(self, *parts: bytes | memoryview, timeout: float = SEND_SECONDS) -> None:
        """Sends a frame whose body is the parts, which may change once it returns.

        Waits up to `timeout` seconds while the other side does not read. A send that fails or is cancelled within a
        frame closes the stream. Raises Closed, Timeout, FrameError for a frame over MAX_FRAME.
        """

    async def recv(self, limit: int = MAX_FRAME, *, timeout: float | None = None) -> bytes:
        """Returns the next frame's body. Without `timeout` it waits as long as the stream lives.

        It may be cancelled, and called again after a Timeout, without losing anything. Raises Ended, Closed (also for a
        frame above `limit`), Timeout.
        """

    async def take_turns(self, amount: float) -> None:
        """Returns when the other side may take so many turns of this process's time (peer/net/guests.py)."""

    async def finish(self) -> None:
        """Says that we send nothing more. Raises like send; a second call does nothing."""

    async def close(self) -> None:
        """Ends both directions; never raises.

        Without `finish` before it, data under way may be lost and the other side sees Closed; after it, the other side
        gets a few seconds to read and to finish too.
        """


Handler = Callable[[Stream], Awaitable[None]]
"""Serves one stream. Returning finishes the stream, raising closes it."""
CallHandler = Callable[[str, bytes], Awaitable[bytes]]
"""(peer id, request) -> reply. Only the text of a RemoteError goes to the caller."""
Validate = Callable[[str, str, bytes], bool]
"""(key, subkey, value) of a DHT record -> whether it may be stored and believed."""


class Transport(Protocol):
    """A peer's access to the network. `lost` is set when it has failed for good, as its daemon died."""

    peer_id: str
    traffic: Traffic
    guests: Guests
    lost: asyncio.Event

    @property
    def addresses(self) -> tuple[str, ...]:
        """This transport's multiaddresses for other peers."""
        ...

    async def serve(self, name: str, handler: Handler) -> None:
        """Lets others open streams under `name`."""

    async def open(self, peer: str, name: str, *, timeout: float) -> Stream:
        """Opens a stream to `peer`. Raises Unreachable, Timeout, TransportLost.

        If `peer` does not serve `name`, this raises Unreachable or the first `recv` raises Closed.
        """

    async def connect(self, addresses: Sequence[str], *, timeout: float) -> None:
        """Dials all addresses at once, and returns when one peer has answered and we are in the DHT.

        A dead connection is replaced. Raises Unreachable, ClockWrong, TransportLost.
        """

    async def look(self) -> bool:
        """Updates `addresses`. Returns whether they have changed. Raises TransportLost.

        When an address is lost, connections on which no peer answers any more are ended.
        """

    def doubt(self, peer: str) -> None:
        """Pings `peer`. If it does not answer, or one of several connections may be dead, all of them end."""

    def seen_at(self, peer: str) -> str:
        """Returns the other end of our newest stream with `peer`, without its id; empty if it is not known."""

    async def disconnect(self, peer: str) -> None:
        """Ends all connections to `peer`, so that the next one is fresh for TCP. Raises Timeout, TransportLost."""

    async def store(self, key: str, subkey: str, value: bytes, *, ttl: float) -> bool:
        """Stores a signed value for `ttl` seconds. Returns whether it was accepted.

        Raises UsageError over MAX_RECORD or MAX_TTL, TransportLost.
        """

    def prefer(self, peers: Collection[str]) -> None:
        """Keeps the records with these subkeys before others when there is no space for all."""

    async def get(self, key: str) -> dict[str, bytes]:
        """Returns the valid values under `key` that are found, by subkey. Raises Timeout, TransportLost."""

    async def aclose(self) -> None:
        """Closes all streams and leaves; never raises."""


def now() -> float:
    """Steady seconds of the running loop."""
    return asyncio.get_running_loop().time()


async def cancel(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancels tasks, and returns when all have ended; ignores their results and errors."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)


async def all_of(works: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all of `works`, in their order; where one fails, the others are cancelled. Raises what it
    raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


async def until(over: Awaitable[object], work: Awaitable[T], timeout: float | None = None) -> asyncio.Future[T] | None:
    """Does `work`, and cancels it when `over` or the time ends first. Returns it, ended, or None if it was
    cancelled."""
    task, other = asyncio.ensure_future(work), asyncio.ensure_future(over)
    try:
        await asyncio.wait({task, other}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return task if task.done() else None
    finally:
        await cancel(task, other)


async def wait_for_event(event: asyncio.Event, seconds: float) -> None:
    """Returns when the event is set, after `seconds` at the latest."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def answer(
    stream: Stream,
    doubt: Callable[[str], None],
    limit: int = MAX_FRAME,
    *,
    timeout: float | None = None,
    silence: float = SILENT_SECONDS,
) -> bytes:
    """Receives the frame that a peer owes us.

    After each `silence`, in seconds, it calls `doubt(peer)`: the transport ends a dead connection, which raises Closed.
    """
    clock = asyncio.get_running_loop().time
    end = math.inf if timeout is None else clock() + timeout
    while True:
        received = stream.received
        try:
            return await stream.recv(limit, timeout=max(0.0, min(silence, end - clock())))
        except Timeout:
            if clock() >= end:
                raise nothing_came(stream, timeout) from None
            if stream.received == received:
                doubt(stream.remote)


@overload
async def decode_in_turn(stream: Stream, said: RecordHead) -> Record: ...
@overload
async def decode_in_turn(stream: Stream, said: MessageHead | RecordHead) -> Message | Record: ...
async def decode_in_turn(stream: Stream, said: MessageHead | RecordHead) -> Message | Record:
    """Decodes what an operator said once it may take the turns for that. Raises MessageError."""
    if isinstance(said, RecordHead):
        await stream.take_turns(len(said.votes) * SIGNATURE_TURNS)
        said.check()
    await stream.take_turns(said.size / COUNTED_TURN_BYTES)
    await stream.take_turns(said.count() / TURN_VALUES)
    return said.whole()


def nothing_came(stream: Stream, timeout: float | None) -> Timeout:
    text = f"stream {stream.name} from {short_peer(stream.remote)}: nothing came for {timeout:g} s; try again"
    return Timeout(stream.remote, text)


def check_record(value: bytes, ttl: float) -> None:
    """Raises UsageError for a DHT record over the limits."""
    if len(value) > MAX_RECORD:
        raise UsageError(f"DHT record: {len(value)} bytes; at most {MAX_RECORD} are allowed")
    if not 0 < ttl <= MAX_TTL:
        raise UsageError(f"DHT record: would live {ttl:g} seconds; between 0 and {MAX_TTL:g} are allowed")


async def call(
    transport: Transport, peer: str, name: str, request: bytes, *, timeout: float, limit: int = MAX_FRAME - 1
) -> bytes:
    """Sends one request. Returns the reply, of at most `limit` bytes, within `timeout` seconds.

    Raises Unreachable, Closed, Timeout, TransportLost, and RemoteError with the text of a refusal.
    """
    try:
        async with asyncio.timeout(timeout):
            stream = await transport.open(peer, name, timeout=timeout)
            try:
                await stream.send(request, timeout=timeout)
                await stream.finish()
                reply = await answer(stream, transport.doubt, limit + 1)
            finally:
                await stream.close()
    except TimeoutError:
        raise Timeout(peer, f"call {name} to {short_peer(peer)}: no reply within {timeout:g} s; try again") from None
    if reply[:1] == _OK:
        return reply[1:]
    text = reply[1:301].decode(errors="replace")
    shown = "".join(c if c.isprintable() else " " for c in text)
    raise RemoteError(peer, f"call {name} to {short_peer(peer)}: refused ({shown}); see that peer's log")


async def serve_calls(
    transport: Transport, name: str, handler: CallHandler, *, limit: int = MAX_FRAME, timeout: float = REQUEST_SECONDS
) -> None:
    """Answers calls of `name`, whose requests have `limit` bytes at most and come within `timeout` seconds."""

    async def serve(stream: Stream) -> None:
        request = await stream.recv(limit, timeout=timeout)
        try:
            parts = (_OK, await handler(stream.remote, request))
        except RemoteError as error:
            parts = (_FAILED, str(error).encode()[:300])
        except Exception:
            await stream.send(_FAILED, b"internal error")
            await stream.finish()
            raise
        await stream.send(*parts)

    await transport.serve(name, serve)
