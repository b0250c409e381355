"""Five real replicas, one of which trains on other text than it is given: the audits in the log find that one, and no other."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer.corpus.text import Text as AnyText
from peer.node.inner_loop import StageInnerLoop
from peer.node.training import InnerLoop
from protocol.ledger import standing
from protocol.ledger.audits import Audits
from protocol.planning import budget, memory
from protocol.planning.budget import Budget
from protocol.run.manifest import EvaluationSpec, JudgingSpec, OuterSpec, TimingSpec, TrainSpec
from protocol.wire.commit import Commit
from tests.support import volunteers
from tests.support.examining import LENGTH, MODEL, SEQUENCES, Text
from tests.support.volunteers import Swarm

RUN = volunteers.manifest(
    model=MODEL,
    train=TrainSpec(
        inner_steps=6, micro_batches=1, rows=16, sequence=LENGTH, lr=4e-3, warmup_steps=6, total_steps=6000
    ),
    outer=OuterSpec(topk=512),
    rounds=10_000,
    start_peers=5,
    judging=JudgingSpec(audit_share=0.5),
    evaluation=EvaluationSpec(every=0),
    timing=TimingSpec(round_deadline=300.0, heartbeat=1.0, gone_after=20.0),
)
HONEST, LIAR = ("a", "b", "c", "d"), "liar"


class Other(Text):
    """Text that nobody was given."""

    async def sequences(self, slots: range) -> np.ndarray:
        return await super().sequences(range(slots.start + SEQUENCES // 3, slots.stop + SEQUENCES // 3))


@pytest.mark.slow
def test_a_replica_that_trains_on_other_text_is_found_and_no_other(tmp_path: Path) -> None:
    async def text(*_: object) -> AnyText:
        return Text()

    async def work() -> tuple[list[Commit], str]:
        async with Swarm(tmp_path, RUN) as swarm:
            swarm.text = text
            liar = ""

            def inner_loop(manifest: Any, peer: str, machine: Any, given: Any, *rest: Any) -> InnerLoop:
                return StageInnerLoop(manifest, peer, machine, Other() if peer == liar else given, *rest)

            swarm.inner_loop = inner_loop
            room = memory.stage_memory(RUN, 0, MODEL.n_layers) * 10
            assert budget.has_room_to_audit(RUN, Budget(room))
            liar = volunteers.identity_of(LIAR).peer_id
            for name in (*HONEST, LIAR):
                swarm.start(name, memory=room)
            await swarm.until(lambda: verdicts(swarm.archive.commits)[liar][False] >= 1)
            honest = [swarm.peers[name].id for name in HONEST]
            await swarm.until(lambda: sum(verdicts(swarm.archive.commits)[peer][True] for peer in honest) >= 3)
            found = len(swarm.archive.commits)
            await swarm.until(lambda: len(swarm.archive.commits) > found)
            return list(swarm.archive.commits), liar

    commits, liar = asyncio.run(work())
    found = [x for commit, known in known_before(commits) for x in known.found(commit)]
    assert {x.peer for x in found if not x.examined} == {liar}
    (first, *_) = [x for x in found if not x.examined]
    decided = next(c.round for c, known in known_before(commits) if first in known.found(c))
    assert first.round < decided
    after = commits[decided + 1 : decided + standing.REST_ROUNDS]
    assert after
    for commit in after:
        assert commit.plan is not None
        assert not commit.plan.names(liar), "it has no place for a while"


def known_before(commits: list[Commit]) -> list[tuple[Commit, Audits]]:
    known, out = Audits(RUN), []
    for commit in commits:
        out.append((commit, known))
        known = known.after(commit)
    return out


def verdicts(commits: list[Commit]) -> dict[str, Counter[bool]]:
    """For each maker, how often the audits of a contribution said that it is what it claims to be, and that it is not."""
    found: dict[str, Counter[bool]] = {c.peers[0]: Counter() for commit in commits for c in commit.contributions}
    found |= {volunteers.identity_of(name).peer_id: Counter() for name in (*HONEST, LIAR)}
    for commit, known in known_before(commits):
        for said in commit.audits:
            turn = known.turn(said.round, said.replica)
            if turn is not None and turn.add(said).verdict is not None:
                found[turn.maker][turn.add(said).verdict is True] += 1
    return found
