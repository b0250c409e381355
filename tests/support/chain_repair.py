"""Parts that unit tests of chain repair share with others."""

from __future__ import annotations

import dataclasses
from typing import Any

from protocol.planning import memory
from protocol.round import chain_repair
from protocol.round.leader_events import Received, Send
from protocol.run import layout
from protocol.wire.session import ChainFailure, ChainReconfig
from tests.support import leader as leading
from tests.support import tiny

M = tiny.manifest(rounds=3)
SPARES = {"f": leading.THIRD, "g": leading.THIRD}
SHARDS = layout.shard_names(M.model)


class Driver(leading.Driver):
    """A leader with a chain of c, d, e in round 1; f and g are spares who hold everything."""

    def __init__(self, *spares: str, silent: tuple[str, ...] = (), **changes: Any) -> None:
        memory = {**leading.CHAIN, **{s: SPARES[s] for s in spares}}
        super().__init__(memory, tiny.manifest(rounds=3, start_peers=len(memory), **changes))
        self.decide(self.ready(*memory))
        self.attest(*(p for p in memory if p not in silent), shards=SHARDS)

    def failure(self, peer: str, lost: str, generation: int = 0, **changes: Any) -> list[Any]:
        said = ChainFailure(
            round=self.leader.round, replica=0, generation=generation, peer=lost, reason="gave no sign of life"
        )
        return self.do(Received(peer, dataclasses.replace(said, **changes)))

    def follow(self, reconfig: ChainReconfig) -> None:
        self.do(*(Received(p, reconfig) for p in reconfig.peers))

    def offered_by(self, reconfig: ChainReconfig, *peers: str, steps: int = 4) -> list[Any]:
        effects = []
        plan = (
            chain_repair.reconfigured(self.leader.plan, reconfig)
            if self.leader.plan and reconfig.peers
            else self.leader.plan
        )
        assert plan is not None
        for peer in peers:
            stage = plan.replica(0).stage_of(peer)
            shards = memory.stage_shards(self.manifest, stage.first, stage.last)
            parts = tuple(leading.part(peer, s, 1.0) for s in shards)
            made = dataclasses.replace(
                leading.Driver.offer(self, "c"),
                parts=parts,
                steps=steps,
                tokens=steps * self.manifest.train.step_tokens,
            )
            for effect in self.do(Received(peer, made)):
                effects += self.come(effect)
        return effects


def reconfig(effects: list[Any]) -> ChainReconfig:
    (found,) = [e.message for e in effects if isinstance(e, Send)]
    assert isinstance(found, ChainReconfig)
    return found
