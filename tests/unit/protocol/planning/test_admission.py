"""Which offers get into a commit, by what they say."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from protocol.ledger import part_lists
from protocol.planning import memory
from protocol.round import offers
from protocol.wire.commit import Part
from protocol.wire.plan import ReplicaSpec, StageSpec, Work
from protocol.wire.session import Offer
from tests.support import tiny

M = tiny.manifest()
TOKENS = M.train.step_tokens
WORK = Work(slot=0, steps=3, micro_batches=M.train.micro_batches)
CHAIN = ReplicaSpec(
    number=2, stages=(StageSpec(peer="a", first=0, last=1), StageSpec(peer="b", first=1, last=4)), work=WORK
)
SHARDS = memory.stage_shards(M, 1, 4)
PARTS = tuple(Part(shard=s, digest=tiny.digest(s), size=8, norm=1.0) for s in SHARDS)
OFFER = Offer(round=1, replica=2, parts=PARTS, tokens=2 * TOKENS, steps=2, loss=None)


def why(**changes: Any) -> str | None:
    return offers.why_refused(M, CHAIN, "b", dataclasses.replace(OFFER, **changes))


def parts(**changes: Any) -> tuple[Part, ...]:
    """The parts, the last one changed."""
    return (*PARTS[:-1], dataclasses.replace(PARTS[-1], **changes))


def test_an_offer_of_the_planned_shards_within_bounds_is_admitted() -> None:
    assert why() is None
    assert why(steps=WORK.steps, tokens=WORK.steps * TOKENS) is None
    assert why(parts=parts(norm=0.0, size=part_lists.largest_payload(M, SHARDS[-1]))) is None


@pytest.mark.parametrize("changes", [{"replica": 1}, {"parts": ()}, {"parts": PARTS[1:]}, {"parts": PARTS[::-1]}])
def test_it_is_of_the_planned_replica_and_shards(changes: dict[str, Any]) -> None:
    assert why(**changes) == "it does not cover the planned shards"


def test_a_neighbour_cannot_offer_our_stage() -> None:
    assert offers.why_refused(M, CHAIN, "a", OFFER) == "it does not cover the planned shards"
    with pytest.raises(ValueError, match="tuple"):
        offers.why_refused(M, CHAIN, "stranger", OFFER)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 0, "tokens": 0},
        {"steps": WORK.steps + 1, "tokens": (WORK.steps + 1) * TOKENS},
        {"tokens": 2 * TOKENS + 1},
        {"steps": 1},
    ],
)
def test_its_tokens_are_those_of_its_steps(changes: dict[str, Any]) -> None:
    assert why(**changes) == "steps and tokens do not agree with the plan"


def test_the_tokens_of_a_step_are_those_of_the_micro_batches_that_it_was_given() -> None:
    less = dataclasses.replace(CHAIN, work=dataclasses.replace(WORK, micro_batches=1))
    half = dataclasses.replace(OFFER, tokens=OFFER.tokens // 2)
    assert offers.why_refused(M, less, "b", half) is None
    assert offers.why_refused(M, less, "b", OFFER) == "steps and tokens do not agree with the plan"


@pytest.mark.parametrize(
    "changes", [{"norm": -1.0}, {"norm": math.inf}, {"norm": math.nan}, {"size": 0}, {"size": -8}, {"size": 1 << 20}]
)
def test_each_norm_and_size_is_possible(changes: dict[str, Any]) -> None:
    assert why(parts=parts(**changes)) == "a norm or size is not a number in range"


def test_the_norms_together_are_a_number() -> None:
    """Each is one, their sum of squares is not: no reader would take the commit."""
    assert (
        why(parts=tuple(dataclasses.replace(p, norm=1e200) for p in PARTS)) == "a norm or size is not a number in range"
    )


def test_the_largest_payload_grows_with_the_shard() -> None:
    assert 0 < part_lists.largest_payload(M, "block.0") < 1 << 20
    wider = tiny.manifest(model=dataclasses.replace(M.model, d_ff=64))
    assert part_lists.largest_payload(M, "block.0") < part_lists.largest_payload(wider, "block.0")
