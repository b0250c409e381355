"""Contributions that are left out of a round, and the scales of the others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from protocol.codec import blob_hash, sparse
from protocol.codec.sparse import Sparse
from protocol.ledger import part_lists, run_state
from protocol.round import comparing, judging
from protocol.round.comparing import Update
from protocol.round.fairness import NodeView, wrong_verdict_in
from protocol.round.judging import PreviousRound, Verdict
from protocol.run import layout
from protocol.run.manifest import JudgingSpec, Manifest
from protocol.wire.commit import Commit, Contribution, LeftOut, Part, Share, faults_of
from tests.support import tiny
from tests.support.judging import (
    COMMON,
    ENEMIES,
    GOOD,
    MODEL,
    PARENT,
    SHARDS,
    M,
    Sent,
    commit,
    drawn,
    encoded,
    honest,
    names,
    out,
    times,
    update,
)
from tests.support.plain_codec import norm_of


def judge(sent: Sequence[Sent], before: PreviousRound | None = None, of: Manifest = M) -> list[Verdict]:
    return judging.judge(of, PARENT, names(len(sent)), [update(x) for x in sent], before or PreviousRound())


def test_honest_updates_count_and_only_the_longer_ones_are_clipped() -> None:
    verdicts = judge(GOOD)
    assert out(verdicts) == {}
    norms = [
        math.sqrt(sum(float((x.values.astype(float) ** 2).sum()) for t in sent.values() for x in t)) for sent in GOOD
    ]
    middle = float(np.median(norms))
    assert [v.scale for v in verdicts] == pytest.approx([min(1.0, middle / norm) for norm in norms])


def test_the_norm_is_the_same_however_the_values_lie_in_memory() -> None:
    values = np.random.default_rng(3).standard_normal(1_000_003).astype(np.float32)
    apart = np.zeros(2 * values.size, np.float32)
    apart[::2] = values
    assert comparing.squares(values) == comparing.squares(apart[::2])
    assert comparing.squares(values) == pytest.approx(math.fsum(float(x) ** 2 for x in values), rel=1e-14)
    assert comparing.squares(values[:0]) == 0.0
    assert comparing.squares(np.full(5, 3e38, np.float32)) == pytest.approx(5 * 9e76)


@pytest.mark.parametrize("name", ENEMIES)
@pytest.mark.parametrize("place", [0, 3, 7])
def test_whoever_works_against_the_others_is_left_out(name: str, place: int) -> None:
    sent = list(GOOD[:7])
    sent.insert(place, ENEMIES[name])
    found = out(judge(sent))
    assert list(found) == [place]
    assert "disagrees with the others (cosine " in found[place]


@pytest.mark.parametrize("name", ENEMIES)
def test_two_of_eight_do_not_hide_each_other(name: str) -> None:
    other = {"noise": encoded(drawn(98, 1.8))}.get(name, times(ENEMIES[name], 0.9))
    assert set(out(judge([ENEMIES[name], *GOOD[:6], other]))) == {0, 7}


def test_what_is_far_too_long_is_left_out_and_names_its_norm() -> None:
    found = out(judge([*GOOD[:4], times(GOOD[7], 1e36)]))
    assert list(found) == [4]
    assert found[4].endswith("is over 10 times the median")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_where_all_are_far_longer_than_before_they_are_clipped_and_not_left_out(count: int) -> None:
    """Else a run whose machines have become faster would stand still for ever."""
    medians = (1e-2,) * run_state.MEDIANS_KEPT
    verdicts = judge(GOOD[:count], PreviousRound(medians))
    assert out(verdicts) == {}
    norms = [math.sqrt(sum(comparing.squares(x.values) for t in sent.values() for x in t)) for sent in GOOD[:count]]
    assert [v.scale * n for v, n in zip(verdicts, norms, strict=True)] == pytest.approx([2e-2] * count)


@pytest.mark.parametrize("count", [1, 2])
def test_what_no_clip_makes_harmless_is_left_out_however_few_there_are(count: int) -> None:
    medians = (1.0,) * run_state.MEDIANS_KEPT
    assert list(out(judge([*GOOD[: count - 1], times(GOOD[7], 1e30)], PreviousRound(medians)))) == [count - 1]


def test_what_is_alike_counts_as_one_whoever_came_first() -> None:
    changed = times(GOOD[2], 1.1)
    for sent, both in (([*GOOD[:6], changed], (2, 6)), ([changed, *GOOD[:6]], (0, 3))):
        found = judge(sent)
        assert out(found) == {}
        assert {i: v.weight for i, v in enumerate(found) if v.weight < 1} == dict.fromkeys(both, 0.5)
    assert sum(v.weight == 1 / 3 for v in judge([changed, *GOOD[:6], GOOD[2]])) == 3


def test_who_works_against_the_others_with_somebodys_update_in_it_is_left_out_alone() -> None:
    """Half of it is another's update, so they are alike; the rest is the opposite of what most learned."""
    against = {
        s: [
            _dense(GOOD[2], s, i) - 0.28 * sum(_dense(u, s, i) for u in GOOD[:2] + GOOD[3:7])
            for i in range(len(COMMON[s]))
        ]
        for s in SHARDS
    }
    found = judge([*GOOD[:7], encoded(against)], of=dataclasses.replace(M, judging=JudgingSpec(copies=0.2)))
    assert list(out(found)) == [7]
    assert found[2].scale == 1.0


def test_what_repeats_the_round_before_is_left_out() -> None:
    before = PreviousRound(updates=(update(honest(40)), update(honest(41))))
    assert out(judge([*GOOD[:6], honest(41)], before)) == {6: "it repeats the round before"}


def test_what_is_made_of_the_others_updates_is_left_out() -> None:
    mean = {
        s: [
            sum(_dense(u, s, i) for u in GOOD[:7]) / 7 - 0.2 * np.std([_dense(u, s, i) for u in GOOD[:7]], axis=0)
            for i in range(len(COMMON[s]))
        ]
        for s in SHARDS
    }
    found = out(judge([*GOOD[:7], encoded(mean)], of=dataclasses.replace(M, judging=JudgingSpec(copies=1.0))))
    assert list(found) == [7]
    assert "it is made of the others' updates" in found[7]


def _dense(sent: Sent, shard: str, i: int) -> np.ndarray:
    array = np.zeros(layout.shapes(MODEL, shard)[i])
    array.reshape(-1)[sent[shard][i].index] = sent[shard][i].values
    return array


def test_whoever_sends_nothing_is_left_out() -> None:
    assert out(judge([*GOOD[:5], times(GOOD[7], 0.0)])) == {5: "it changes nothing"}
    assert out(judge([times(x, 0.0) for x in GOOD])) == {}


def test_a_norm_that_is_not_what_is_said_is_found_among_any_number() -> None:
    false = Update(lambda shard: [GOOD[1][shard]], {"head": [0.05]})
    verdicts = judging.judge(M, PARENT, names(2), [update(GOOD[0]), false], PreviousRound())
    assert list(out(verdicts)) == [1]
    assert verdicts[1].reason.startswith("the norm of head is ")
    assert verdicts[1].reason.endswith(", not 0.05")


def test_a_payload_of_another_shard_is_found_among_any_number() -> None:
    """Its name is known and held, so no peer fetches and checks it again."""
    payloads = {
        s: sparse.encode(M.outer.codec, [np.ones(x, np.float32) for x in layout.shapes(MODEL, s)]) for s in SHARDS
    }
    parts = {
        s: Part(shard=s, digest=tiny.digest(s), size=len(p), norm=norm_of(decoded(s, p))) for s, p in payloads.items()
    }
    by_name = {parts[s].digest: payloads[s] for s in SHARDS}

    def verdicts(*changed: Part) -> dict[int, str]:
        said = {**parts, **{part.shard: part for part in changed}}
        made = comparing.update_of(M, list(said.values()), lambda part: by_name[part.digest])
        return out(judging.judge(M, PARENT, names(2), [update(GOOD[0]), made], PreviousRound()))

    assert verdicts() == {}
    wrong = verdicts(dataclasses.replace(parts["embed"], digest=parts["block.0"].digest))
    assert wrong[1].startswith("it cannot be read: embed: payload: has ")
    wrong = verdicts(dataclasses.replace(parts["embed"], digest=parts["head"].digest, size=parts["head"].size))
    assert wrong[1].startswith("it cannot be read: embed: payload: ")


def decoded(shard: str, payload: bytes) -> list[Sparse]:
    return sparse.decode(M.outer.codec, layout.shapes(MODEL, shard), payload)


def test_among_four_only_norms_count() -> None:
    verdicts = judge([*GOOD[:2], times(GOOD[3], -3.0), GOOD[1]])
    assert out(verdicts) == {}
    assert verdicts[2].scale == pytest.approx(1 / 3, rel=0.1)


def test_where_nobody_agrees_nobody_is_left_out() -> None:
    """Whatever a swarm trains on, updates that have nothing in common are no sign of anything."""
    assert out(judge([encoded(drawn(100 + i)) for i in range(12)])) == {}


def test_what_tiny_updates_of_many_say_of_the_median_is_bounded_by_the_log() -> None:
    tiny_ones = [encoded(drawn(100 + i, 1e-4)) for i in range(5)]
    medians = (1.0,) * run_state.MEDIANS_KEPT
    long = [times(x, 1 / math.sqrt(sum(float((y.values**2).sum()) for t in x.values() for y in t))) for x in GOOD[:3]]
    verdicts = judging.judge(M, PARENT, names(8), [update(x) for x in (*tiny_ones, *long)], PreviousRound(medians))
    assert not {5, 6, 7} & set(out(verdicts))
    assert [verdicts[i].scale for i in (5, 6, 7)] == pytest.approx([1 / judging.MEDIAN_SWING] * 3, rel=1e-5)
    assert {5, 6, 7} <= set(
        out(judging.judge(M, PARENT, names(8), [update(x) for x in (*tiny_ones, *long)], PreviousRound()))
    )


def test_the_median_grows_at_most_twofold() -> None:
    assert judging.typical([5.0, 9.0, 10.0], ()) == 9.0
    assert judging.typical([5.0, 9.0, 10.0], (1.0,) * run_state.MEDIANS_KEPT) == 2.0
    assert judging.typical([0.1, 0.2, 0.3], (1.0,) * run_state.MEDIANS_KEPT) == 0.5
    assert judging.typical([0.9, 1.2, 1.3], (1.0,) * run_state.MEDIANS_KEPT) == 1.2
    assert judging.typical([7.0], (1.0,) * run_state.MEDIANS_KEPT) == 2.0
    assert judging.typical([7.0], ()) == 0.0


def test_the_verdict_on_the_rest_is_the_same_without_those_that_are_left_out() -> None:
    sent = [ENEMIES["noise"], *GOOD[:5], ENEMIES["flipped"], times(GOOD[1], 1.1)]
    verdicts = judge(sent)
    rest = [i for i in range(8) if i not in out(verdicts)]
    every = names(8)
    again = judging.judge(
        M,
        PARENT,
        [every[i] for i in rest],
        [update(sent[i]) for i in rest],
        PreviousRound(),
        [every[i] for i in out(verdicts)],
    )
    assert again == [verdicts[i] for i in rest]


def test_many_are_compared_in_panels() -> None:
    sent = [honest(i) for i in range(60)] + [times(honest(70 + i), -1.0) for i in range(8)]
    assert set(out(judge(sent))) == set(range(60, 68))


def test_of_a_large_model_some_tiles_are_compared_and_which_follows_from_the_seed() -> None:
    whole = [update(x) for x in GOOD[:5]]
    a, b = (comparing.measure(MODEL, seed, whole, [range(5)], tiles=8) for seed in (b"a", b"b"))
    assert a.norms == b.norms
    assert a.elements == b.elements
    assert sum(a.elements) < layout.total_parameters(MODEL) * 0.7
    assert not all(np.array_equal(x, y) for x, y in zip(a.panels[0][1], b.panels[0][1], strict=True))


# --- colluders that know all other updates


def combined(parts: Sequence[tuple[float, Sent]], seed: int) -> Sent:
    """A sum of updates, and noise of its own of the same length, so that those of one kind are not alike."""
    own, found = drawn(seed), dict[str, list[np.ndarray]]()
    for shard in SHARDS:
        sums = [sum(f * _dense(x, shard, i) for f, x in parts) for i in range(len(COMMON[shard]))]
        lengths = [float(np.linalg.norm(a)) / float(np.linalg.norm(b)) for a, b in zip(sums, own[shard], strict=True)]
        found[shard] = [a + n * b for a, n, b in zip(sums, lengths, own[shard], strict=True)]
    made = encoded(found)
    return times(made, LENGTH / _length(made))


def _length(sent: Sent) -> float:
    return math.sqrt(sum(comparing.squares(x.values) for tensors in sent.values() for x in tensors))


LENGTH = _length(GOOD[0])


@pytest.mark.parametrize(("bad", "of"), [(1, 5), (2, 7), (2, 8), (3, 8), (5, 16)])
def test_colluders_that_send_minus_the_sum_of_the_others_are_left_out_alone(bad: int, of: int) -> None:
    good = [honest(i) for i in range(of - bad)]
    made = [combined([(-1.0, x) for x in good], 50 + i) for i in range(bad)]
    assert set(out(judge([*good, *made]))) == set(range(of - bad, of))
    assert set(out(judge([*made, *good]))) == set(range(bad)), "in any order"


@pytest.mark.parametrize(("bad", "of"), [(2, 7), (2, 8), (3, 8), (5, 16)])
def test_colluders_do_not_have_an_honest_one_left_out(bad: int, of: int) -> None:
    """They oppose one, and agree with the others."""
    good = [honest(i) for i in range(of - bad)]
    made = [combined([(-1.0, good[0]), *((0.3, x) for x in good[1:])], 50 + i) for i in range(bad)]
    found = judge([*good, *made])
    assert out(found) == {}
    assert [v.weight for v in found[1 : of - bad]] == [1.0] * (of - bad - 1)
    assert found[0].weight == judging.OPPOSED**bad
    assert all(v.weight <= 0.25 for v in found[of - bad :])


@pytest.mark.parametrize("targets", [1, 2, 3, 4])
@pytest.mark.parametrize("agreeing", [0.5, 1.5, 3.0, 6.0])
def test_three_of_eight_that_oppose_some_leave_most_of_a_round_whatever_they_add_for_the_rest(
    targets: int, agreeing: float
) -> None:
    good = GOOD[:5]
    parts = [(-1.0, x) for x in good[:targets]] + [(agreeing, x) for x in good[targets:]]
    made = [combined(parts, 50 + i) for i in range(3)]
    found = judge([*good, *made])
    assert not [i for i in out(found) if i < 5]
    weights = np.array([v.weight * v.scale if v.reason is None else 0.0 for v in found])
    rows = np.stack(
        [
            np.concatenate([_dense(x, s, i).ravel() for s in SHARDS for i in range(len(COMMON[s]))])
            for x in (*good, *made)
        ]
    )
    mean = rows[:5].mean(axis=0)
    assert weights @ rows @ mean / (mean @ mean) > 0.7 * weights.sum()


def test_what_agrees_little_has_little_weight() -> None:
    mixed = encoded({s: [0.35 * a + 1.7 * b for a, b in zip(COMMON[s], drawn(77)[s], strict=True)] for s in SHARDS})
    found = judge([*GOOD[:7], mixed])
    assert out(found) == {}
    assert 0.3 < found[7].weight < 0.9
    assert [v.weight for v in found[:7]] == [1.0] * 7


# --- honest updates of first rounds, which have little in common


def first(seed: int, common: float, *groups: int) -> Sent:
    """An update with a part of the common one, and what those of its groups learned."""
    own, shared = drawn(seed + 1), [drawn(200 + group) for group in groups]
    return encoded(
        {
            s: [common * a + 1.5 * own[s][i] + sum(x[s][i] for x in shared) for i, a in enumerate(COMMON[s])]
            for s in SHARDS
        }
    )


def test_who_learned_the_same_as_many_others_is_not_made_of_their_updates() -> None:
    sent = [first(0, 0.5, 0, 1), *(first(i, 0.5, 0) for i in (1, 2, 3)), *(first(i, 0.5, 1) for i in (4, 5, 6))]
    assert out(judge([*sent, *(first(i, 0.5) for i in (7, 8, 9, 10))])) == {}


def test_who_learned_nothing_in_a_shard_is_not_left_out_because_one_of_five_opposes_it() -> None:
    idle = {**GOOD[0], "block.1": encoded(drawn(60, 1.8))["block.1"]}
    assert out(judge([idle, *GOOD[1:4], combined([(-1.0, idle), *((0.5, x) for x in GOOD[1:4])], 50)])) == {}


def test_who_agrees_ten_times_less_than_most_but_beyond_chance_counts_little() -> None:
    found = judge([*(first(i, 3.0) for i in range(5)), first(5, 0.4)])
    assert out(found) == {}
    assert found[5].weight < 0.2


# --- a commit


def test_a_commit_of_the_rules_verdict_is_just_and_any_other_is_not() -> None:
    sent = [*GOOD[:6], ENEMIES["flipped"]]
    updates = {i: update(x) for i, x in enumerate(sent)}
    made = commit(sent, judge(sent))
    assert [x.replica for x in made.left_out] == [6]

    def why(of: Commit, known: dict[int, Update] = updates) -> str | None:
        return judging.why_unjust(M, of, known, PreviousRound())

    assert why(made) is None
    assert why(made, {i: updates[i] for i in range(6)}) is None, "whoever lacks what was left out checks the rest"
    first, *others = made.contributions
    more = dataclasses.replace(made, contributions=(dataclasses.replace(first, scale=0.5), *others))
    assert "counts with 0.5 of its update" in str(why(more))
    heavy = dataclasses.replace(made, contributions=(dataclasses.replace(first, weight=0.5), *others))
    assert "counts with 0.5 of its weight" in str(why(heavy))
    let_in = commit(sent, [dataclasses.replace(v, reason=None) for v in judge(sent)])
    assert "replica 6 counts, although it disagrees with the others" in str(why(let_in))
    framed = commit(GOOD[:6], [*judge(GOOD[:6])[:5], Verdict(1.0, "I do not like it")])
    assert "there is nothing wrong with it" in str(why(framed))


def test_the_log_says_the_medians_of_the_last_rounds() -> None:
    def of(*contributions: tuple[float, float]) -> Commit:
        made = [
            Contribution(
                replica=i,
                tokens=8,
                steps=1,
                loss=None,
                scale=scale,
                shares=(Share(peer="p", root="0" * 64, size=1, norm=norm, listed=1),),
            )
            for i, (norm, scale) in enumerate(contributions)
        ]
        return dataclasses.replace(commit([], []), contributions=tuple(made))

    log = [
        of((9.0, 1.0)),
        *[of((1.0, 1.0), (4.0, 0.5), (3.0, 1.0))] * (run_state.MEDIANS_KEPT - 1),
        of(),
        of((5.0, 1.0)),
    ]
    assert run_state.medians(log) == (*[2.0] * (run_state.MEDIANS_KEPT - 1), 5.0)
    assert run_state.medians(log[:1]) == (9.0,)


# --- voters


def test_a_member_checks_the_verdict_from_the_payloads_that_it_holds() -> None:
    """The commit's own lists and payloads, as they lie in an archive."""
    store: dict[str, bytes] = {}

    def offered(number: int, sent: Sent) -> Contribution:
        parts = []
        for shard in SHARDS:
            codec, shapes = M.outer.codec, layout.shapes(MODEL, shard)
            raw = sparse.encode(codec, [_dense(sent, shard, i).reshape(shape) for i, shape in enumerate(shapes)])
            name = blob_hash.name_of(raw)
            store[name] = raw
            norm = norm_of(sparse.decode(codec, shapes, raw))
            parts.append(Part(shard=shard, digest=name, size=len(raw), norm=norm))
        root = part_lists.root_of(tuple(parts))
        store[root] = part_lists.pack(tuple(parts))
        norm = part_lists.total(part.norm for part in parts)
        share = Share(peer=f"p{number}", root=root, size=1, norm=norm, listed=1)
        return Contribution(replica=number, tokens=8, steps=1, loss=None, shares=(share,))

    sent = [*GOOD[:5], ENEMIES["flipped"]]
    here = [offered(i, x) for i, x in enumerate(sent)]
    names = [judging.name_of(c) for c in here]
    case = judging.JudgingJob(manifest=M, round=1, parent=PARENT, contributions=tuple(here), last=(), medians=())
    verdicts = case.answer(store.__getitem__)
    assert list(out(verdicts)) == [5]

    def proposed(scales: Sequence[float | None]) -> Commit:
        kept = [dataclasses.replace(c, scale=s) for c, s in zip(here, scales, strict=True) if s is not None]
        gone = [
            LeftOut(
                replica=i,
                reason="?",
                judged=names[i],
                peers=here[i].peers,
                faults=faults_of(here[i].peers, verdicts[i].faults),
            )
            for i, s in enumerate(scales)
            if s is None
        ]
        said = commit([], [])
        return dataclasses.replace(said, contributions=tuple(kept), left_out=tuple(gone))

    sight = NodeView(state=run_state.begin(M), chains=None, wall=0.0, complete=dict(enumerate(here)))
    just = [v.scale if v.reason is None else None for v in verdicts]
    assert wrong_verdict_in(sight, proposed(just), store.__getitem__) is None
    for wrong in (
        [0.001, *just[1:]],
        [None, *just[1:]],
        [*just[:5], 1.0],
    ):
        found = wrong_verdict_in(sight, proposed(wrong), store.__getitem__)
        assert found.lie


# --- chains, each of whose stages sends its own update of the rows of tokens

NARROW = tiny.manifest(model=dataclasses.replace(MODEL, residual_width=24), outer=M.outer)
NARROW_SHARDS = layout.shard_names(NARROW.model)
ROWS = NARROW_SHARDS[-1]
Payloads = dict[str, list[list[Sparse]]]
"""By shard, a payload of each of its trainers."""


def payloads(seed: int, stages: int, rows: Sequence[float] = (1.0,) * 9) -> Payloads:
    """An honest update; that of the rows of tokens by `stages`, times these factors."""
    found: Payloads = {}
    for shard in NARROW_SHARDS:
        shapes, theirs = layout.shapes(NARROW.model, shard), []
        common = np.random.default_rng([7, NARROW_SHARDS.index(shard)])
        base = [common.standard_normal(shape) for shape in shapes]
        for stage in range(stages if shard == ROWS else 1):
            own = np.random.default_rng([seed, stage, NARROW_SHARDS.index(shard)])
            factor = rows[stage] if shard == ROWS else 1.0
            arrays = [(factor * (a + 1.5 * own.standard_normal(a.shape))).astype(np.float32) for a in base]
            raw = sparse.encode(NARROW.outer.codec, arrays)
            theirs.append(sparse.decode(NARROW.outer.codec, shapes, raw))
        found[shard] = theirs
    return found


def judged(sent: Sequence[Payloads]) -> dict[int, str]:
    updates = [Update(x.__getitem__) for x in sent]
    return out(judging.judge(NARROW, PARENT, names(len(sent)), updates, PreviousRound()))


REPLICAS = [payloads(seed, 1) for seed in range(5)]


def test_an_honest_chain_counts_among_full_replicas() -> None:
    assert judged([*REPLICAS, payloads(10, 2), payloads(11, 5)]) == {}


def test_a_chain_one_of_whose_stages_works_against_the_others_in_the_rows_of_tokens_is_left_out() -> None:
    found = judged([*REPLICAS, payloads(10, 2), payloads(11, 2, (1.0, -3.0))])
    assert list(found) == [6]
    assert f"in {ROWS} it disagrees with the others (cosine -" in found[6]


def test_two_chains_with_the_same_payloads_in_another_order_count_as_one() -> None:
    first = payloads(10, 3)
    assert halved([*REPLICAS, first, {**first, ROWS: first[ROWS][::-1]}]) == [5, 6]


def halved(sent: Sequence[Payloads]) -> list[int]:
    """Which count with half of their update."""
    updates = [Update(x.__getitem__) for x in sent]
    found = judging.judge(NARROW, PARENT, names(len(sent)), updates, PreviousRound())
    return [i for i, v in enumerate(found) if v.weight < 0.6]


def test_an_update_in_one_payload_and_in_several_is_the_same() -> None:
    """Where two stages have changed other entries: cut a payload in two, of which each is zero where the other one is
    not."""
    whole = payloads(10, 1)
    (tensors,) = whole[ROWS]
    halves = [
        [Sparse(x.index, np.where(np.arange(x.index.size) % 2 == odd, x.values, np.float32(0))) for x in tensors]
        for odd in (0, 1)
    ]
    assert halved([*REPLICAS, whole, {**whole, ROWS: halves}]) == [5, 6]
    updates = [Update({**whole, ROWS: rows}.__getitem__) for rows in ([tensors], halves)]
    found = comparing.measure(NARROW.model, b"seed", updates, [range(2)])
    assert found.norms[0] == pytest.approx(found.norms[1], rel=1e-12)
    ((_, cosines),) = found.panels
    np.testing.assert_allclose(cosines[-1], 1.0, atol=1e-7)


# --- whose fault it is

BLOCKS = [s for s in NARROW_SHARDS if s != ROWS]
MAKERS = {**{s: ["a"] for s in BLOCKS[:2]}, **{s: ["b"] for s in BLOCKS[2:]}, ROWS: ["a", "b"]}
"""The first stage has the embedding and a block, the second the rest."""


def negative(sent: list[list[Sparse]], factor: float = -1.0) -> list[list[Sparse]]:
    return [[Sparse(x.index, x.values * np.float32(factor)) for x in tensors] for tensors in sent]


def noise(seed: int, shard: str) -> list[list[Sparse]]:
    """As long as an honest payload."""
    rng, shapes = np.random.default_rng(seed), layout.shapes(NARROW.model, shard)
    raw = sparse.encode(NARROW.outer.codec, [(1.8 * rng.standard_normal(s)).astype(np.float32) for s in shapes])
    return [sparse.decode(NARROW.outer.codec, shapes, raw)]


def blamed(chain: Payloads, before: PreviousRound | None = None, **changes: Any) -> tuple[str, ...]:
    """Those at fault for what a chain of two sends among five full replicas."""
    update = Update(chain.__getitem__, makers=MAKERS, **changes)
    others = [Update(x.__getitem__, makers=dict.fromkeys(NARROW_SHARDS, (f"f{i}",))) for i, x in enumerate(REPLICAS)]
    found = judging.judge(NARROW, PARENT, names(6), [*others, update], before or PreviousRound())
    assert list(out(found)) == [5]
    return found[5].faults


@pytest.mark.parametrize("liar", ["a", "b"])
@pytest.mark.parametrize("how", ["flipped", "long", "noise"])
def test_a_finding_in_the_shards_of_one_member_is_a_finding_against_it_alone(liar: str, how: str) -> None:
    chain = payloads(10, 2)
    for shard in BLOCKS:
        if MAKERS[shard] == [liar]:
            made = {"flipped": negative(chain[shard], -3.0), "long": negative(chain[shard], 1e3)}
            chain[shard] = made[how] if how in made else negative(noise(len(shard), shard), 9.0)
    assert blamed(chain) == (liar,)


@pytest.mark.parametrize("liar", [0, 1])
def test_a_finding_in_the_rows_of_tokens_is_one_against_whose_payload_shows_it(liar: int) -> None:
    factors = [1.0, 1.0]
    factors[liar] = -3.0
    assert blamed(payloads(11, 2, tuple(factors))) == ("ab"[liar],)


def test_a_norm_that_is_wrong_or_a_payload_that_cannot_be_read_is_its_makers() -> None:
    chain = payloads(10, 2)
    true = {s: [comparing.squares(np.concatenate([x.values for x in t])) ** 0.5 for t in chain[s]] for s in chain}
    wrong = {**true, ROWS: [true[ROWS][0], 2 * true[ROWS][1]]}
    assert blamed(chain, norms=wrong) == ("b",)
    assert blamed(chain, norms={**true, BLOCKS[0]: [9.0]}) == ("a",)


def test_who_repeats_its_part_of_the_round_before_is_at_fault_for_it() -> None:
    old, chain = payloads(12, 2), payloads(10, 2)
    chain |= {s: old[s] for s in BLOCKS[2:]}
    chain[ROWS] = [chain[ROWS][0], old[ROWS][1]]
    assert blamed(chain, PreviousRound(updates=(Update(old.__getitem__),))) == ("b",)


def test_whoever_sends_nothing_is_at_fault_with_its_whole_chain() -> None:
    chain = payloads(10, 2)
    assert blamed({s: negative(chain[s], 0.0) for s in chain}) == ("a", "b")
