"""The limit on what this machine sends: `potluck join --up-limit`, or nine tenths of the measured uplink."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from peer.net.rate_limits import TokenBucket
from protocol.wire.framing import MAX_FRAME


class Uplink:
    """A token bucket over everything that is sent, shared by bytes: one piece for each waiting peer, in turn.

    bps: bits a second; None: no limit
    piece: bytes that are granted at once, and most that a sender sends at once, as routers' queues are short
    """

    BURST_SECONDS = 0.02

    def __init__(self, bps: int | None = None) -> None:
        self.limit(bps)
        self._waiting: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()
        self._pump: asyncio.Task[None] | None = None

    def limit(self, bps: int | None) -> None:
        """Changes the limit; waiting senders go on."""
        self.bps = bps
        self._bucket = None if bps is None else TokenBucket(bps / 8, bps / 8 * self.BURST_SECONDS)
        self.piece = MAX_FRAME if bps is None else max(4096, int(bps / 8 * self.BURST_SECONDS))

    @property
    def holds(self) -> bool:
        """Whether the limit holds a sender back."""
        return bool(self._waiting)

    async def turn(self, peer: str, size: int) -> None:
        """Returns when `size` bytes may be sent to `peer`."""
        if self.bps is None:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(peer, deque()).append((size, future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        await future

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            if self._bucket is not None and (wait := self._bucket.wait(loop.time())):
                await asyncio.sleep(wait)
            peer, queue = self._waiting.popitem(last=False)
            size, future = queue.popleft()
            if not future.cancelled():
                granted = min(size, self.piece)
                if self._bucket is not None:
                    self._bucket.spend(loop.time(), granted)
                if granted < size:
                    queue.appendleft((size - granted, future))
                else:
                    future.set_result(None)
            if queue:
                self._waiting[peer] = queue  # at the end

    def close(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
