"""A peer that follows the log for an operator, and trains nothing (`potluck bootstrap --audit`).

It is a peer like any other, but for four things. It announces no memory, so no plan gives it work. It holds the whole state all
the same, in files where the machine's memory is small. It asks nobody for a state: it begins at the seed, or at a checkpoint of its own,
and applies what the log names. And it has nothing to train with (`NoTraining`), and reads
the held-out text only (`HeldOutText`): it measures every state that is due (peer/node/evaluating.py).

What it attests is what the log gives. Its operator's node believes that before what anybody else attests
(protocol/round/attestations.py), and peers may fetch its checkpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from peer.chain.stop_sign import StopSign
from peer.corpus.open_text import Access, open_text
from peer.corpus.text import Text
from peer.node.config import JoinConfig
from peer.node.orders import ChainOrders, Result
from peer.state.storage import Shards
from protocol.round.member_events import TrainOrder
from protocol.run.corpus import CorpusIndex
from protocol.run.manifest import Manifest


class NoText:
    """The text of who reads none."""

    @property
    def index(self) -> CorpusIndex:
        raise AssertionError("who trains nothing reads no text; this is a bug")

    async def sequences(self, slots: range) -> NDArray[np.int64]:
        """Is never called."""
        raise AssertionError("who trains nothing reads no text; this is a bug")

    def expect(self, slots: Sequence[range]) -> None:
        """Nothing is fetched."""

    async def held_out(self, limit: int) -> NDArray[np.int64]:
        """Is never called."""
        raise AssertionError("who trains nothing reads no text; this is a bug")

    async def aclose(self) -> None:
        """There is nothing to end."""


class HeldOutText(NoText):
    """The text of who trains nothing, and measures: the held-out part, which is fetched when it is wanted."""

    def __init__(self, manifest: Manifest, access: Access) -> None:
        self._manifest = manifest
        self._access = access
        self._index: CorpusIndex | None = None

    @property
    def index(self) -> CorpusIndex:
        """Known since the held-out part was read."""
        assert self._index is not None, "what was not read has no index; this is a bug"
        return self._index

    async def held_out(self, limit: int) -> NDArray[np.int64]:
        """At most `limit` held-out sequences [n, L + 1]. Raises RemoteError, UsageError."""
        text = await open_text(self._manifest, self._access)
        try:
            self._index = text.index
            return await text.held_out(limit)
        finally:
            await text.aclose()


async def held_out_text(manifest: Manifest, config: JoinConfig, access: Access) -> Text:
    """What Factories.text is for an auditor."""
    return HeldOutText(manifest, access)


class NoTraining:
    """The inner loop of who trains nothing."""

    def __init__(self, *made_with: object) -> None: ...

    async def train(
        self,
        order: TrainOrder,
        theta: Shards,
        stop: asyncio.Event,
        end: StopSign,
        progress: Callable[[int, float | None], None],
        chain_orders: ChainOrders,
    ) -> Result:
        """Sits out: no plan of an honest node names who announces no memory."""
        return Result(0, 0, None, "it is an auditor, and does not train")

    def expect(self, slots: Sequence[range]) -> None:
        """Nothing will be read."""

    def displacement(self, shard: str) -> list[tuple[NDArray[np.float32], NDArray[np.float32] | None]]:
        """Is never called."""
        raise AssertionError("who trains nothing has learned nothing; this is a bug")

    def on_device(self, shard: str) -> None:
        """There is no update."""

    def release(self) -> None:
        """Nothing was trained from."""

    def optimizer(self) -> dict[str, NDArray[np.generic]]:
        """There is none."""
        return {}

    def lacks_moments(self, shard: str) -> bool:
        """It needs none."""
        return False

    async def moments(self, shard: str) -> bytes | None:
        """There are none."""
        return None

    def inherit(self, shard: str, moments: bytes) -> None:
        """Nobody sends any."""

    def close(self) -> None:
        """There is nothing to end."""
