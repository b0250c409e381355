"""Exchanges the optimizer's moments with peers that begin to train a shard (peer/training/moments.py).

A peer asks as soon as a plan names the shard (docs/protocol.md, forming), or as soon as a newcomer without a plan holds
it. A trainer packs the moments of a shard at most once a round.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from peer.net.base import cancel
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

ASKED_TRAINERS = 3
STRANGERS_SHARDS = 8
"""A round, for peers that the plan does not name: packing takes the time of the thread that trains."""
REQUEST_BYTES, ANSWER_BYTES = 256, 256


class MomentsExchange:
    def __init__(self, manifest: Manifest, peer: str, exchange: Exchange, inner_loop: InnerLoop) -> None:
        self.manifest = manifest
        self.peer = peer
        self._exchange = exchange
        self._inner_loop = inner_loop
        self._plan: Plan | None = None
        self._packed: dict[str, tuple[str, int]] = {}  # by shard in this round: blob, bytes
        self._for_strangers = 0  # shards in this round
        self._packing = asyncio.Lock()
        self._asking: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        await self._exchange.answer(endpoints.MOMENTS, self._answer, REQUEST_BYTES)

    def follow(self, plan: Plan | None) -> None:
        """Asks for the shards that a new plan gives us."""
        if plan is None or (self._plan is not None and plan.round == self._plan.round):
            return
        for blob, _ in self._packed.values():
            self._exchange.drop(blob)
        self._plan, self._packed, self._for_strangers = plan, {}, 0
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(plan, handover.kept_shards(self.manifest, plan, self.peer)))

    def prepare(self, plan: Plan | None, shards: Sequence[str]) -> None:
        """Asks for shards that the next plan may give us."""
        if plan is not None and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask(plan, shards))

    async def aclose(self) -> None:
        await cancel(self._asking)

    async def _ask(self, plan: Plan, shards: Sequence[str]) -> None:
        for shard in shards:
            if self._inner_loop.lacks_moments(shard):
                others = [p for p in handover.trainers(self.manifest, plan.replicas, shard) if p != self.peer]
                for trainer in others[:ASKED_TRAINERS]:
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
        async with self._packing:
            if shard not in self._packed:
                if not plan.names(remote):
                    if self._for_strangers >= STRANGERS_SHARDS:
                        return calls.write(MomentsAnswer())
                    self._for_strangers += 1
                data = await self._inner_loop.moments(shard)
                if data is None:
                    return calls.write(MomentsAnswer())
                self._packed[shard] = (await asyncio.to_thread(self._exchange.keep, data), len(data))
            blob, size = self._packed[shard]
        return calls.write(MomentsAnswer(blob=blob, size=size))
