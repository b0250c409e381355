"""The optimizer's moments for a peer that begins to train a shard, from one that trains it already
(peer/training/moments.py).

Nobody waits for them. They are asked for as soon as a plan names the shard, which is a round or more before it is
trained (docs/protocol.md, forming), or as soon as a newcomer holds it whom no plan names yet; what has not come by then
is not used. Each trainer makes its moments ready once a round at most, whoever asks, and those of few shards for whom
no plan names.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from peer.node.training import InnerLoop
from peer.state.payloads import Exchange
from peer.training import moments
from protocol.codec.sparse import PayloadError
from protocol.errors import PotluckError
from protocol.round import handover
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire import calls, endpoints
from protocol.wire.calls import MomentsAnswer, MomentsRequest
from protocol.wire.plan import Plan

ASKED = 3
"""Trainers of a shard that are asked, one after the other."""
STRANGERS_SHARDS = 8
"""Whose moments are made ready in a round for peers that the plan does not name: that takes the time of the thread that
trains."""
REQUEST_BYTES = 256
ANSWER_BYTES = 256


class MomentsExchange:
    """One per peer: asks others, and answers them."""

    def __init__(self, manifest: Manifest, peer: str, exchange: Exchange, inner_loop: InnerLoop) -> None:
        self.manifest = manifest
        self.peer = peer
        self._exchange = exchange
        self._inner_loop = inner_loop
        self._plan: Plan | None = None
        self._made: dict[str, tuple[str, int]] = {}  # in this round, by shard: the blob and its bytes
        self._for_strangers = 0  # of those in this round
        self._making = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        await self._exchange.answer(endpoints.MOMENTS, self._answer, REQUEST_BYTES)

    def follow(self, plan: Plan | None) -> None:
        """A new plan may name shards that we do not train yet."""
        if plan is None or (self._plan is not None and plan.round == self._plan.round):
            return
        for blob, _ in self._made.values():
            self._exchange.drop(blob)
        self._plan, self._made, self._for_strangers = plan, {}, 0
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(plan, handover.kept_shards(self.manifest, plan, self.peer)))

    def prepare(self, plan: Plan | None, shards: Sequence[str]) -> None:
        """The plan after this one may have us train these shards."""
        if plan is not None and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look(plan, shards))

    async def aclose(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self, plan: Plan, shards: Sequence[str]) -> None:
        for shard in shards:
            if self._inner_loop.lacks_moments(shard):
                others = [p for p in handover.trainers(self.manifest, plan.replicas, shard) if p != self.peer]
                for trainer in others[:ASKED]:
                    with contextlib.suppress(PotluckError):
                        if await self._get(shard, trainer):
                            break

    async def _get(self, shard: str, trainer: str) -> bool:
        request = calls.write(MomentsRequest(shard=shard))
        raw = await self._exchange.ask(trainer, endpoints.MOMENTS, request, ANSWER_BYTES)
        found = calls.read(MomentsAnswer, raw, trainer, "moments")
        if not 0 < found.size <= moments.largest(self.manifest.model, self.manifest.train, shard):
            return False
        data = await self._exchange.take(found.blob, found.size, trainer)
        with contextlib.suppress(PayloadError):
            await asyncio.to_thread(self._inner_loop.inherit, shard, data)
            return True
        return False

    async def _answer(self, remote: str, request: bytes) -> bytes:
        shard, plan = calls.read(MomentsRequest, request, remote, "moments").shard, self._plan
        if plan is None or shard not in layout.shard_names(self.manifest.model):
            return calls.write(MomentsAnswer())
        async with self._making:
            if shard not in self._made:
                if not plan.names(remote):
                    if self._for_strangers >= STRANGERS_SHARDS:
                        return calls.write(MomentsAnswer())
                    self._for_strangers += 1
                data = await self._inner_loop.moments(shard)
                if data is None:
                    return calls.write(MomentsAnswer())
                self._made[shard] = (await asyncio.to_thread(self._exchange.keep, data), len(data))
            blob, size = self._made[shard]
        return calls.write(MomentsAnswer(blob=blob, size=size))
