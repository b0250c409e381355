"""What a peer does that is told that it has other bits than most: it computes them again, and believes the log.

θ(r) follows from θ(r-1) and the log, so nobody has to be believed. The state is computed again beside ours, from the seed or a state on
which we and the log agreed once (`Recovery.again`). If that gives other bits than ours, ours were wrong, by an error of this
machine, and are replaced. If it gives ours again, we keep them, say so and go on: what the others have does not follow from the log,
however many they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from peer import events
from peer.state.outer_optimizer import Outer
from peer.state.recovery import Recovery
from protocol.ledger import retention
from protocol.run import layout
from protocol.run.manifest import Manifest

KEPT = 2 * retention.TURNS
"""Rounds in which somebody may have written a checkpoint, and of whose digests we remember what ours were."""
SURE = 8
"""Rounds for which a shard that was computed again is not doubted."""


class Doubts:
    """One per peer. `states`: {round: {shard: digest}} of the checkpoints on its disk."""

    def __init__(
        self,
        manifest: Manifest,
        outer: Outer,
        recovery: Recovery,
        states: Mapping[int, Mapping[str, str]],
        emit: events.Emit,
    ) -> None:
        self._manifest = manifest
        self._outer = outer
        self._recovery = recovery
        self._ours = dict(states)
        self._emit = emit
        self._sure: dict[str, int] = {}

    def saw(self, round: int, digests: Mapping[str, str]) -> None:
        """These were our own digests after `round`."""
        if round % retention.checkpoint_grain(self._manifest) == 0:
            self._ours[round] = digests
            for old in sorted(self._ours)[:-KEPT]:
                del self._ours[old]

    async def settle(self, shards: Sequence[str], round: int) -> None:
        """Of these shards, which are at `round`, others are said to have other bits."""
        rebuilt = []
        for shard in shards:
            if shard not in self._outer.theta or round - self._sure.get(shard, -SURE) < SURE:
                continue
            again = await self._recovery.again(shard, round, self._ours)
            ours = await asyncio.to_thread(layout.shard_digest, self._outer.theta[shard])
            if again is not None and await asyncio.to_thread(layout.shard_digest, again) != ours:
                self._outer.theta[shard] = again
                rebuilt.append(shard)
                continue
            self._sure[shard] = round
            why = (
                "following the log again gave ours"
                if again is not None
                else "following the log again would cost too much"
            )
            self._emit(
                events.Warning(
                    text=f"state of {shard} after round {round}: others say that it has other bits; {why}, they are kept. If this goes on,"
                    " tell the operators of the run"
                )
            )
        if rebuilt:
            self._emit(events.ShardRebuilt(round=round, shards=tuple(rebuilt)))
