"""From whom a peer gets text: the run's bootstrap nodes, peers that these name, mirrors; and who is not asked for a while."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol

from peer.corpus.cache import Chunk
from peer.net.blobs.ranges import RangeClient
from protocol.errors import RemoteError
from protocol.identity import short_peer

LIE_SECONDS = 600.0
"""How long whoever sent wrong bytes is not asked."""
REST_SECONDS = (2.0, 30.0)
"""The same of whoever failed: at first, and at most; twice as long each time."""
REMEMBERED = 1024
"""Peers whose failures are remembered."""

Take = Callable[[int, bytes], Awaitable[None]]
"""Gets the number of a range and its bytes, as they were sent. Raises Lie."""


Named = Mapping[int, Sequence[str]]
"""The number of a range and the peers that are to be asked for it instead."""


class Lie(RemoteError):
    """Whoever sent it sent something else than it was asked for."""


class Absent(RemoteError):
    """It does not have it."""


class Busy(RemoteError):
    """It asks to be left alone for so many `seconds`."""

    def __init__(self, peer: str, message: str, seconds: float) -> None:
        super().__init__(peer, message)
        self.seconds = seconds


class Origin(Protocol):
    """Somebody who may have text. `name`: as people read it."""

    name: str

    async def ask(self, chunk: Chunk, indices: Sequence[int], insist: bool, take: Take) -> Named:
        """Has `take` called with the ranges of a chunk that it gives. The peers that it names for others. Raises RemoteError."""
        ...


class PeerOrigin:
    """A peer or a bootstrap node."""

    def __init__(self, client: RangeClient, peer: str) -> None:
        self.name = f"peer {short_peer(peer)}"
        self._client = client
        self._peer = peer

    async def ask(self, chunk: Chunk, indices: Sequence[int], insist: bool, take: Take) -> Named:
        """See Origin."""
        return await self._client.ask(self._peer, chunk.name, chunk.size, indices, insist, take)


class Rests:
    """Who is not asked for a while, and why. `warn` hears once of each of the run's own places that fails, and of everybody who lies."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._until: OrderedDict[str, tuple[float, float]] = OrderedDict()  # when, and how long the next rest is

    def is_resting(self, origin: Origin) -> bool:
        """Whether it is not asked now."""
        return self._until.get(origin.name, (float("-inf"), 0.0))[0] > _now()

    def worked(self, origin: Origin) -> None:
        """It gave what it was asked for."""
        self._until.pop(origin.name, None)

    def failed(self, origin: Origin, error: RemoteError, is_known: bool) -> None:
        """It did not. `is_known`: it is a place of the run's own. What was asked of it at the same time fails, too: that counts once."""
        until, rest = self._until.pop(origin.name, (float("-inf"), 0.0))
        resting, following = until > _now(), min(max(2 * rest, REST_SECONDS[0]), REST_SECONDS[1])
        if resting:
            following = rest
        seconds = following
        if isinstance(error, Lie):
            seconds = LIE_SECONDS
            if until < _now() + LIE_SECONDS / 2:
                self._warn(f"text: {error}; it is not asked again for {LIE_SECONDS / 60:g} minutes")
        elif isinstance(error, Busy):
            seconds = max(error.seconds, following)
        if is_known and not rest and not isinstance(error, Absent | Lie):
            self._warn(f"text: {error}; others are asked")
        self._until[origin.name] = (max(until, _now() + seconds), following)
        if len(self._until) > REMEMBERED:
            self._until.popitem(last=False)


class Origins:
    """Everybody who is asked for text. `nodes()`, the run's nodes now, are asked for a chunk in an order that is the same for all peers, so
    that these hear of each other; then the mirrors."""

    def __init__(
        self,
        client: RangeClient,
        nodes: Callable[[], Iterable[str]],
        mirrors: Sequence[Origin],
        warn: Callable[[str], None],
    ) -> None:
        self._client = client
        self._operating = nodes
        self._nodes: dict[str, Origin] = {}
        self._mirrors = tuple(mirrors)
        self.rests = Rests(warn)

    def order(self, chunk: Chunk) -> list[Origin]:
        """Whom to ask for a chunk, one after the other."""
        self._nodes = {node: self.peer(node) for node in self._operating()}
        nodes = sorted(self._nodes, key=lambda node: hashlib.sha256(f"{chunk.name} {node}".encode()).digest())
        return [*(self._nodes[node] for node in nodes), *self._mirrors]

    def peer(self, peer: str) -> Origin:
        """A peer that was named."""
        return self._nodes.get(peer) or PeerOrigin(self._client, peer)

    def is_known(self, origin: Origin) -> bool:
        """Whether it is one of the run's own places."""
        return origin in self._nodes.values() or origin in self._mirrors


def _now() -> float:
    return asyncio.get_running_loop().time()
