"""Aggregates of a round's updates: which rounds have them, what they are, and whose word counts."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest

from peer.state.outer_optimizer import Outer
from protocol.codec import sparse
from protocol.ledger import aggregation, rules, run_state
from protocol.ledger.aggregation import Named
from protocol.run import layout
from protocol.run.manifest import AGGREGATE_WORTH, OuterSpec
from protocol.wire.commit import Aggregate, Commit
from protocol.wire.session import Aggregated
from tests.support import tiny

KEEP = 256
RUN = tiny.manifest(
    quorum=4,
    operators=tuple(o.peer_id for o in tiny.OPERATORS[:4]),
    outer=OuterSpec(topk=32, aggregate_topk=KEEP),
    model=dataclasses.replace(tiny.manifest().model, vocab_size=512, d_model=64),
)
SHAPES = layout.shapes(RUN.model, "embed")
"""One matrix of eight whole tiles."""
NODES = RUN.operators
Dense = list[npt.NDArray[np.float32]]


def updates(count: int) -> list[tuple[float, bytes]]:
    """Payloads of the embedding whose weights add up to 1."""
    rng = np.random.default_rng(1)
    made = [[rng.standard_normal(shape).astype(np.float32) for shape in SHAPES] for _ in range(count)]
    weights = rng.dirichlet(np.ones(count)).tolist()
    return list(zip(weights, (sparse.encode(RUN.outer.codec, each) for each in made), strict=True))


def total(contributions: list[tuple[float, bytes]]) -> Dense:
    """Their weighted sum, entry by entry: each product and each sum rounded to fp32, in this order."""
    found = [np.zeros(shape, dtype=np.float32) for shape in SHAPES]
    for weight, payload in contributions:
        for x, sent in zip(found, sparse.decode(RUN.outer.codec, SHAPES, payload), strict=True):
            for at, value in zip(sent.index.tolist(), sent.values, strict=True):
                x.reshape(-1)[at] += np.float32(weight) * value
    return found


def commit_of(size: int) -> Commit:
    """A commit whose updates have so many bytes."""
    made = tiny.contribution(0, "a")
    share = dataclasses.replace(made.shares[0], size=size)
    return tiny.commit(RUN, contributions=(dataclasses.replace(made, shares=(share,)),))


def aggregates(text: str = "") -> tuple[Aggregate, ...]:
    names = layout.shard_names(RUN.model)
    return tuple(Aggregate(shard=shard, digest=tiny.digest(shard + text), size=1) for shard in names)


def test_a_round_has_aggregates_where_they_are_worth_it_in_bytes() -> None:
    least = AGGREGATE_WORTH * aggregation.largest_aggregate(RUN)
    assert aggregation.is_aggregated(RUN, commit_of(least))
    assert not aggregation.is_aggregated(RUN, commit_of(least - 1))
    without = dataclasses.replace(RUN, outer=OuterSpec(topk=32))
    assert not aggregation.is_aggregated(without, commit_of(2**40)), "a run of which the manifest does not say so"


def test_an_aggregate_keeps_the_largest_entries_of_the_sum_in_each_tile() -> None:
    contributions = updates(40)
    payload = aggregation.aggregate(RUN, "embed", contributions)
    assert len(payload) <= aggregation.largest_part(RUN, "embed")
    (sent,), (summed,) = sparse.decode(RUN.outer.aggregate_codec, SHAPES, payload), total(contributions)
    kept = np.zeros(summed.shape, dtype=bool)
    kept.reshape(-1)[sent.index] = True
    levels = np.zeros(summed.shape, dtype=np.float32)
    levels.reshape(-1)[sent.index] = sent.values
    for tile in range(summed.shape[0] // 64):
        here = slice(64 * tile, 64 * tile + 64)
        sizes = np.abs(summed[here])
        assert kept[here].sum() == KEEP
        assert sizes[kept[here]].min() >= sizes[~kept[here]].max()
    assert (np.sign(levels[kept]) == np.sign(summed[kept])).all()
    assert len(np.unique(np.abs(levels[kept]))) == 2


def test_the_state_moves_by_the_aggregate_to_the_last_bit() -> None:
    contributions, codec = updates(3), RUN.outer.aggregate_codec
    found, items = aggregation.applied(RUN, commit_of(2**40), "embed", contributions)
    assert (found, items) == (codec, [(1.0, aggregation.aggregate(RUN, "embed", contributions))])
    outer = Outer(RUN.model, RUN.outer.codec, RUN.outer.beta, RUN.outer.eta, threads=2)
    outer.theta["embed"] = before = [np.ones(shape, dtype=np.float32) for shape in SHAPES]
    outer.apply("embed", items, codec=found)
    (after,), (sent,) = outer.theta["embed"], sparse.decode(codec, SHAPES, items[0][1])
    expected = before[0].copy()
    expected.reshape(-1)[sent.index] -= sent.values
    assert after.tobytes() == expected.tobytes()
    few = commit_of(1)
    assert aggregation.applied(RUN, few, "embed", contributions) == (RUN.outer.codec, contributions)


def test_a_sum_beyond_fp32_is_an_aggregate_too() -> None:
    """Updates of the largest values there are end no node; without aggregates the state would be infinite."""
    largest = float(np.finfo(np.float32).max)
    update = [np.full(shape, -largest, dtype=np.float32) for shape in SHAPES]
    payload = sparse.encode(RUN.outer.codec, update)
    made = aggregation.aggregate(RUN, "embed", [(1.0, payload)] * 3)
    (sent,) = sparse.decode(RUN.outer.aggregate_codec, SHAPES, made)
    assert sent.values.min() == -largest


@pytest.mark.parametrize("threads", [1, 3])
def test_an_aggregate_does_not_depend_on_who_makes_it(threads: int) -> None:
    outer = Outer(RUN.model, RUN.outer.codec, 1.0, 1.0, threads=threads)
    made = aggregation.aggregate(RUN, "embed", updates(5), outer.run)
    assert made == aggregation.aggregate(RUN, "embed", updates(5))


def test_the_next_commit_names_those_of_every_shard_and_no_others() -> None:
    def why(before: Commit, named: tuple[Aggregate, ...]) -> list[str]:
        state = run_state.fold(RUN, [before])
        commit = tiny.commit(RUN, before, aggregates=named)
        return [found.reason for found in rules.check(state, commit, [rules.names_aggregates])]

    assert why(commit_of(2**40), aggregates()) == []
    assert why(commit_of(1), ()) == []
    assert "which has none" in why(commit_of(1), aggregates())[0]
    assert "not of the model's shards" in why(commit_of(2**40), ())[0]
    assert "not of the model's shards" in why(commit_of(2**40), aggregates()[1:])[0]
    big = (dataclasses.replace(aggregates()[0], size=2**40), *aggregates()[1:])
    assert "no aggregate can have" in why(commit_of(2**40), big)[0]


def test_more_nodes_than_may_lie_have_to_name_the_same() -> None:
    named, commit = Named(RUN), dataclasses.replace(tiny.commit(RUN), round=3)
    truth, lie = (Aggregated(round=3, aggregates=aggregates(text)) for text in ("", "lie"))
    named.add(NODES[0], lie)
    named.add("stranger", lie)
    assert named.of(commit, {}) == ()
    named.add(NODES[1], truth)
    assert named.of(commit, {}) == ()
    named.add(NODES[2], truth)
    assert named.of(commit, {}) == truth.aggregates
    named.add(NODES[2], dataclasses.replace(truth, round=2))
    assert named.of(commit, {}) == (), "of another round"


def test_the_log_names_them_before_all_others() -> None:
    named, commit = Named(RUN), tiny.commit(RUN)
    for node in NODES:
        named.add(node, Aggregated(round=0, aggregates=aggregates("lie")))
    later = tiny.commit(RUN, commit, aggregates=aggregates())
    assert named.of(commit, {1: later}) == aggregates()


@pytest.mark.parametrize(
    "wrong",
    [
        (),
        aggregates()[1:],
        aggregates()[::-1],
        (*aggregates(), aggregates()[0]),
        (dataclasses.replace(aggregates()[0], size=0), *aggregates()[1:]),
        (dataclasses.replace(aggregates()[0], size=2**40), *aggregates()[1:]),
    ],
)
def test_what_no_aggregates_can_be_is_not_heard(wrong: tuple[Aggregate, ...]) -> None:
    assert aggregation.why_not(RUN, wrong) is not None
    named = Named(RUN)
    for node in NODES:
        named.add(node, Aggregated(round=0, aggregates=wrong))
    assert named.of(tiny.commit(RUN), {}) == ()
