"""A model with tied embeddings is trained by full replicas only; a peer that is too small is told why."""

from __future__ import annotations

import dataclasses

from protocol.planning import budget, explain, memory
from protocol.planning.arrange import arrange
from protocol.planning.partition import Candidate, split
from protocol.planning.planner import still_fit
from protocol.wire.plan import ReplicaSpec, StageSpec
from tests.support import tiny

UNTIED = tiny.manifest()
TIED = tiny.manifest(model=dataclasses.replace(UNTIED.model, tie_word_embeddings=True))
WHOLE = tiny.full_memory(TIED)
LAYERS = TIED.model.n_layers


def peers(*memory_bytes: int) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(peer=f"P{i}", memory_bytes=size, up_bps=10**7, down_bps=10**8, speed_flops=10**9)
        for i, size in enumerate(memory_bytes)
    )


def test_no_announced_memory_is_enough_for_a_part_of_the_model() -> None:
    needs = dict(budget.needs_by_range(TIED))
    assert needs.pop((0, LAYERS)) == budget.smallest_stage(TIED) == (WHOLE, 0)
    assert min(needs.values()) > (2**50, 0), "the most that a peer may announce (protocol/wire/bounds.py)"
    assert split(TIED, tiny.rooms([2**50] * 2)) is None
    assert split(UNTIED, tiny.rooms([2**50] * 2)) is not None


def test_whoever_holds_the_whole_model_trains_and_the_others_are_told_why_not() -> None:
    small = memory.stage_memory(UNTIED, 0, LAYERS - 1)
    assert 2 * small > WHOLE, "two of them would make a chain of an untied model"
    there = peers(WHOLE, WHOLE - 1, WHOLE - 1, WHOLE)
    replicas, spares = arrange(TIED, there)
    assert sorted(replica.members for replica in replicas) == [("P0",), ("P3",)]
    assert len(spares) == 2
    assert explain.why_spare(TIED, there[1]).startswith(
        "a model with tied embeddings has no chains, and the whole needs"
    )
    assert any(len(replica.members) > 1 for replica in arrange(UNTIED, peers(small, small))[0])


def test_a_chain_that_somebody_plans_fits_nobody() -> None:
    there = {peer.peer: peer for peer in peers(2**50, 2**50)}
    stages = (StageSpec(peer="P0", first=0, last=2), StageSpec(peer="P1", first=2, last=LAYERS))
    chain = ReplicaSpec(stages=stages)
    assert still_fit(UNTIED, [chain], there) == [chain]
    assert still_fit(TIED, [chain], there) == []


def test_the_matrix_counts_once() -> None:
    spec = TIED.model
    saved = 16 * spec.vocab_size * spec.d_model
    untied, tied = (
        memory.resting_bytes(UNTIED, 0, LAYERS, in_files=True),
        memory.resting_bytes(TIED, 0, LAYERS, in_files=True),
    )
    assert untied - tied == saved
