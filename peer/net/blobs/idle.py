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
        self._of: dict[str, dict[Stream, None]] = {}

    def take(self, peer: str) -> Stream | None:
        """The one to `peer` that was used last."""
        stream = next(reversed(self._of.get(peer, {})), None)
        if stream is None or not self._is_fresh(stream):  # the others have waited longer
            return None
        self._drop(stream)
        return stream

    async def keep(self, stream: Stream) -> None:
        """Until it is taken, or has waited too long."""
        self._since[stream] = asyncio.get_running_loop().time()
        self._of.setdefault(stream.remote, {})[stream] = None
        over: list[Stream] = []
        while self._since:  # before anything is awaited: meanwhile others take and keep
            oldest = next(iter(self._since))
            if len(self._since) <= self._kept and self._is_fresh(oldest):
                break
            self._drop(oldest)
            over.append(oldest)
        await asyncio.gather(*(old.close() for old in over))

    async def aclose(self) -> None:
        """Closes them all."""
        while self._since:
            stream = next(iter(self._since))
            self._drop(stream)
            await stream.close()

    def _drop(self, stream: Stream) -> None:
        del self._since[stream]
        of_peer = self._of[stream.remote]
        del of_peer[stream]
        if not of_peer:
            del self._of[stream.remote]

    def _is_fresh(self, stream: Stream) -> bool:
        return asyncio.get_running_loop().time() - self._since[stream] < KEPT_SECONDS
