"""One end of a relayed stream: bytes in sealed records over a stream to the relay (protocol/wire/relaying.py).

It takes a socket's place: `FrameStream` reads from `reader` and writes to the channel itself. At most WINDOW bytes are
under way in one direction, as the receiver grants credit. Signs of life need no credit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from peer.net.base import Closed, Stream, cancel
from peer.net.stream import LINGER_SECONDS
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import relaying
from protocol.wire.framing import FrameError
from protocol.wire.noise import Cipher, NoiseError
from protocol.wire.relaying import CLOSE, CREDIT, DATA, PING, PONG, RECORD, WINDOW

CREDIT_STEP = WINDOW // 8
"""Bytes that were read before more are asked for."""
CHANGED, SILENT, GONE = (
    "changed, dropped or repeated what was sent",
    "passed nothing on",
    "is gone, or the peer behind it",
)
LATE = "takes seconds to pass something on"
"""What a relay is blamed for."""


class RelayFault(Closed):
    """A relayed stream is over because of its relay. `what`: CHANGED, GONE, LATE, or what begins with SILENT."""

    def __init__(self, peer: str, relay: str, name: str, what: str) -> None:
        text = f"stream {name} with {short_peer(peer)}: relay {short_peer(relay)} {what}; try again"
        super().__init__(peer, text)
        self.relay = relay
        self.what = what


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAlive:
    """Seconds."""

    ask: float = 5.0  # between two questions for a sign of life
    silent: float = 15.0  # a side that heard nothing for so long gives up
    late: float = 3.0  # a slower answer makes another relay preferred
    rest: float = 60.0  # a stream that carries nothing is asked about for so long


KEEP_ALIVE = KeepAlive()


class CreditedReader(asyncio.StreamReader):
    """Says how many bytes were read."""

    def __init__(self, taken: Callable[[int], None]) -> None:
        super().__init__(limit=WINDOW)
        self._taken = taken

    async def read(self, n: int = -1) -> bytes:
        data = await super().read(n)
        self._taken(len(data))
        return data


class Channel:
    """See the module's docstring.

    carrier: the stream to the relay, owned by the channel
    ciphers: for sending and for receiving
    peer, name: the other end, and the stream's protocol
    fault: called with what the relay did
    asks: whether this side asks for signs of life
    """

    def __init__(
        self,
        carrier: Stream,
        ciphers: tuple[Cipher, Cipher],
        peer: str,
        name: str,
        *,
        fault: Callable[[RelayFault], None],
        asks: bool,
        signs: KeepAlive = KEEP_ALIVE,
    ) -> None:
        self.reader = CreditedReader(self._was_read)
        self._carrier = carrier
        self._seal, self._open = ciphers
        self._peer, self._name = peer, name
        self._told = fault
        self._signs = signs
        self._pending = bytearray()
        self._may_send, self._may_come = WINDOW, WINDOW
        self._to_credit = 0
        self._owes_ping = self._owes_pong = False
        self._error: Closed | None = None
        self._sending = asyncio.Lock()
        self._woken = asyncio.Event()  # credit came, or the end
        self._to_say = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._used = self._loop.time()
        self._asked: float | None = None  # when a sign was asked for that has not come
        self._quiet = 0.0  # seconds of waking in which nothing came
        self._hearing = asyncio.create_task(self._hear())
        self._saying = asyncio.create_task(self._say())
        self._ending: asyncio.Task[None] | None = None
        self._watching = self._loop.call_later(self._signs.ask, self._watch) if asks else None

    @property
    def is_closed(self) -> bool:
        """Whether nothing of it is left."""
        return self._ending is not None and self._ending.done()

    # --- what FrameStream writes to

    def write(self, data: bytes, /) -> None:
        self._check()
        if self._ending is not None:
            raise ConnectionResetError
        self._pending += data

    async def drain(self) -> None:
        while self._pending:
            while not self._may_send:
                self._check()
                self._woken.clear()
                await self._woken.wait()
            size = min(len(self._pending), self._may_send, RECORD)
            self._may_send -= size
            piece = bytes(self._pending[:size])
            del self._pending[:size]
            await self._put(DATA, piece)

    def close(self) -> None:
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())

    async def wait_closed(self) -> None:
        if self._ending is not None:
            await asyncio.shield(self._ending)

    abort = close
    """Closing sends what is written, or drops it with the stream, and tells the other side."""

    # --- records

    async def _put(self, kind: int, body: bytes = b"") -> None:
        async with self._sending:  # sealed in the order in which they go out
            self._check()
            if kind == DATA:
                self._used = self._loop.time()
            try:
                await self._carrier.send(self._seal.seal(bytes([kind]) + body))
            except RemoteError:
                raise self._fail(GONE) from None

    async def _hear(self) -> None:
        try:
            while True:
                kind, body = relaying.record_of(self._open.open(await self._carrier.recv(relaying.MAX_RECORD)))
                self._quiet = 0.0
                if kind == DATA:
                    if len(body) > self._may_come:
                        raise FrameError("more than it may")
                    self._used = self._loop.time()
                    self._may_come -= len(body)
                    self.reader.feed_data(body)
                elif kind == CREDIT:
                    self._may_send += int.from_bytes(body, "big")
                    if self._may_send > WINDOW:
                        raise FrameError("more than it may")
                    self._woken.set()
                elif kind == PING:
                    self._owes_pong = True
                    self._to_say.set()
                elif kind == PONG:
                    self._answered()
                elif kind == CLOSE:
                    self._over(self._gone())
                    with contextlib.suppress(RemoteError):
                        await self._carrier.recv(0)  # its end
                    return
        except NoiseError:
            self._fail(CHANGED)
        except FrameError as error:
            text = f"stream {self._name} with {short_peer(self._peer)}: it sent {error}; try again"
            self._over(Closed(self._peer, text), lost=True)
            self.close()
        except RemoteError:  # the stream to the relay is over
            if self._ending is None:
                self._fail(GONE)

    async def _say(self) -> None:
        """Sends credit and signs of life, in a task of its own, as the receiving one must never wait for a send."""
        with contextlib.suppress(RemoteError):
            while True:
                await self._to_say.wait()
                self._to_say.clear()
                if self._owes_ping:
                    self._owes_ping, self._asked = False, self._loop.time()
                    await self._put(PING)
                if self._owes_pong:
                    self._owes_pong = False
                    await self._put(PONG)
                if self._to_credit >= CREDIT_STEP:
                    size, self._to_credit = self._to_credit, 0
                    self._may_come += size
                    await self._put(CREDIT, relaying.credit(size))

    def _watch(self) -> None:
        """Checks that the other side still sends, by counts of silent checks, as our process may have been stopped."""
        if self._error is not None or self._ending is not None:
            return
        every = self._signs.ask / 2
        if self._loop.time() - self._used > self._signs.rest:
            self._quiet = 0.0  # nothing is expected
        else:
            self._quiet += every
        if self._quiet >= self._signs.silent:
            self._fail(f"{SILENT} for {self._signs.silent:g} s")
        elif self._asked is None:
            self._owes_ping = True
            self._to_say.set()
        self._watching = self._loop.call_later(every, self._watch)

    def _answered(self) -> None:
        """Takes a sign of life. A late one ends nothing, but the next stream should take another relay."""
        if self._asked is not None and self._loop.time() - self._asked > self._signs.late:
            self._told(RelayFault(self._peer, self._carrier.remote, self._name, LATE))
        self._asked = None

    def _was_read(self, size: int) -> None:
        self._to_credit += size
        if self._to_credit >= CREDIT_STEP:
            self._to_say.set()

    # --- the end

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _gone(self) -> Closed:
        text = f"stream {self._name} with {short_peer(self._peer)}: the peer has closed it; try again"
        return Closed(self._peer, text)

    def _fail(self, what: str) -> Closed:
        """Ends the channel because of its relay. Returns what to raise."""
        if self._error is None:
            fault = RelayFault(self._peer, self._carrier.remote, self._name, what)
            self._over(fault, lost=True)
            self._told(fault)
            self.close()  # whoever waits to send waits no longer
        assert self._error is not None
        return self._error

    def _over(self, error: Closed, *, lost: bool = False) -> None:
        """Ends sending; a reader still gets what came, unless it is lost."""
        if self._error is not None:
            return
        self._error = error
        if lost:
            self.reader.set_exception(error)
        else:
            self.reader.feed_eof()
        self._woken.set()

    async def _end(self) -> None:
        """Tells the other side, waits until it has closed too, and closes the stream to the relay."""
        try:
            with contextlib.suppress(RemoteError, TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    if self._error is None:
                        await self._put(CLOSE)
                    if not isinstance(self._error, RelayFault):
                        await self._carrier.finish()
                        await asyncio.wait({self._hearing})
        finally:
            self._over(self._gone())
            if self._watching is not None:
                self._watching.cancel()
            await cancel(self._hearing, self._saying)
            await self._carrier.close()
