"""Streams that have nothing to do for the moment: to open one costs both peers more than a small blob does."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from peer.net.base import Stream

KEPT = 128
"""Streams to all peers together; the one that waited longest goes first."""
KEPT_SECONDS = 240.0
"""How long one is kept; its other end waits a little longer (peer/net/blobs/serving.py)."""


class IdleStreams:
    """Open streams that wait for their next use. Whoever takes one that was closed meanwhile sees Closed when it is used."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._since: OrderedDict[Stream, float] = OrderedDict()

    def take(self, peer: str) -> Stream | None:
        """The one to `peer` that was used last."""
        for stream in reversed(self._since):
            if stream.remote == peer and self._is_fresh(stream):
                del self._since[stream]
                return stream
        return None

    async def keep(self, stream: Stream) -> None:
        """Until it is taken, or has waited too long."""
        self._since[stream] = asyncio.get_running_loop().time()
        newest_first = list(reversed(self._since))
        over = [old for i, old in enumerate(newest_first) if i >= self._kept or not self._is_fresh(old)]
        for old in over:  # before anything is awaited: meanwhile others take and keep
            del self._since[old]
        await asyncio.gather(*(old.close() for old in over))

    async def aclose(self) -> None:
        """Closes them all."""
        while self._since:
            await self._since.popitem()[0].close()

    def _is_fresh(self, stream: Stream) -> bool:
        return asyncio.get_running_loop().time() - self._since[stream] < KEPT_SECONDS
