"""Scores: scorers, places in the log, and consequences (protocol/ledger/scoring.py, marks.py)."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable, Sequence

import pytest

from protocol.identity import Identity, short_peer
from protocol.ledger import claims, scoring, standing
from protocol.ledger.claims import Claims
from protocol.ledger.scoring import (
    COMPARED_POOL,
    ENOUGH_EVIDENCE,
    LATE_ROUNDS,
    LEAST_SEQUENCES,
    MISSES,
    MOST_SEQUENCES,
    SCORERS,
    ScoreBook,
    Scored,
    Scoring,
)
from protocol.round import fairness
from protocol.round.leader_events import Received
from protocol.run.manifest import EvaluationSpec, JudgingSpec, Manifest, TrainSpec
from protocol.wire.claims import MAX_MARKS, Mark, Score
from protocol.wire.commit import MAX_SCORES, Commit, Contribution
from protocol.wire.plan import Plan, ReplicaSpec, Work
from protocol.wire.schema import SchemaError, build
from tests.support import tiny
from tests.support.leader import Driver
from tests.support.rules import due as open_for
from tests.support.rules import of_claims, of_standing

KEYS = tuple(Identity(bytes([9, i] * 16)) for i in range(12))
NAMES = tuple(key.peer_id for key in KEYS)
TRAIN = TrainSpec(inner_steps=25, micro_batches=2, rows=4, sequence=8, lr=1e-3, warmup_steps=1, total_steps=10**6)
RUN = tiny.manifest(
    rounds=10**6, train=TRAIN, judging=JudgingSpec(score_share=0.08), evaluation=EvaluationSpec(every=0)
)
"""A round trains on 200 sequences, and a scorer marks three contributions in each."""
STEPS = TRAIN.inner_steps


def contribution(number: int, *peers: str, steps: int = STEPS) -> Contribution:
    return tiny.contribution(number, *peers, tokens=TRAIN.tokens(steps, 2), steps=steps)


def replica(number: int, *peers: str) -> ReplicaSpec:
    return tiny.replica(number, *peers, work=Work(slot=1000 * number, steps=STEPS, micro_batches=2))


def commit(round: int, *made: Contribution, scores: Sequence[Score] = ()) -> Commit:
    plan = Plan(round=round + 1, replicas=tuple(replica(c.replica, *c.peers) for c in made), next_number=20)
    return tiny.commit(RUN, round=round, time=float(round), contributions=made, plan=plan, scores=tuple(scores))


def full(count: int = 8) -> list[Contribution]:
    return [contribution(i, NAMES[i]) for i in range(count)]


# --- scorers


def test_three_score_each_contribution_and_nobody_its_own() -> None:
    by = scoring.assigned(RUN, commit(1, *full()), ScoreBook())
    assert set(by) == set(NAMES[:8])
    for number in range(8):
        assert sum(number in given for given in by.values()) == SCORERS
        assert number not in by[NAMES[number]]
    assert all(len(given) == 3 for given in by.values())


def test_nobody_knows_beforehand_who_scores_whom() -> None:
    one, other = (
        scoring.assigned(RUN, dataclasses.replace(commit(1, *full()), time=t), ScoreBook()) for t in (1.0, 2.0)
    )
    assert one != other
    assert one == scoring.assigned(RUN, commit(1, *full()), ScoreBook())


def test_scoring_takes_no_more_than_its_share() -> None:
    for share in (0.0, 0.005, 0.02, 0.08, 0.5):
        run = dataclasses.replace(RUN, judging=JudgingSpec(score_share=share))
        each = scoring.sequences(run)
        assert LEAST_SEQUENCES <= each <= MOST_SEQUENCES
        given = [scoring.assigned(run, commit(r, *full()), ScoreBook()) for r in range(400)]
        passes = 4 * each * sum(len(numbers) for by in given for numbers in by.values()) / len(given) / 8
        assert passes <= share * 3 * 200 + 1e-9, "of the time that 200 trained sequences take, three passes each"
        assert (passes > 0) == (share > 0)
        assert all(len(numbers) <= MAX_MARKS for by in given for numbers in by.values())
    with pytest.raises(SchemaError, match="score_share: must be in"):
        build(JudgingSpec, {"score_share": 1.5})


def test_who_is_slow_sets_the_pace_or_does_not_score() -> None:
    slow = [*full(7), contribution(7, NAMES[7], steps=STEPS // 3)]
    assert NAMES[7] not in scoring.assigned(RUN, commit(1, *slow), ScoreBook())
    half = [*full(7), contribution(7, NAMES[7], steps=STEPS // 2 + 1)]
    marks_given = [sum(map(len, scoring.assigned(RUN, commit(r, *half), ScoreBook()).values())) for r in range(50)]
    assert statistics.mean(marks_given) < 0.6 * 24


def test_members_of_chains_are_scored_and_do_not_score() -> None:
    made = [*full(3), contribution(3, *NAMES[3:5])]
    by = scoring.assigned(RUN, commit(1, *made), ScoreBook())
    assert set(by) == set(NAMES[:3])
    assert all(3 in given for given in by.values())
    assert scoring.assigned(RUN, commit(1, contribution(0, *NAMES[:2])), ScoreBook()) == {}
    assert scoring.assigned(RUN, commit(1, contribution(0, NAMES[0])), ScoreBook()) == {}, "nobody scores himself"


def test_whoever_was_scored_longest_ago_comes_first() -> None:
    run = dataclasses.replace(RUN, judging=JudgingSpec(score_share=0.02))
    begun = [now.turn(round) for round, now in enumerate(played(40, honest, run=run), 1)]
    seen = [number for turn in begun if turn is not None for number in turn.members]
    assert len(seen) > 40
    assert max(seen.count(n) for n in range(8)) - min(seen.count(n) for n in range(8)) <= 2


def test_what_is_scored_is_text_that_was_trained_on() -> None:
    made = contribution(2, NAMES[2], steps=3)
    for round in range(20):
        slots = scoring.slots(RUN, commit(round, made), made, replica(2, NAMES[2]).work)
        assert len(slots) == scoring.sequences(RUN)
        assert slots.start >= 2000
        assert slots.stop <= 2000 + 3 * 2 * 4
    rows = scoring.held_out(RUN, commit(1, made), 100)
    assert len(set(rows)) == scoring.sequences(RUN)
    assert set(rows) <= set(range(100))
    assert rows != scoring.held_out(RUN, commit(2, made), 100)
    assert scoring.held_out(RUN, commit(1, made), 0) == []
    assert scoring.held_out(RUN, commit(1, made), 2) == [0, 1]


# --- what has a place


def says(now: Scoring, key: Identity, round: int, value: float = 1.0, **changes: object) -> Score:
    turn = now.turn(round)
    given = tuple(Mark(replica=n, assigned=value, other=value / 2) for n in turn.by.get(key.peer_id, (0,)))
    said = dataclasses.replace(Score(peer="", round=round, marks=given, signature=b""), **changes)
    return claims.signed(key, turn.of, said)


NOW = Scoring(RUN).after(commit(1, *full()))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (says(NOW, KEYS[9], 1), f"is of {short_peer(NAMES[9])}, whose turn it is not"),
        (dataclasses.replace(says(NOW, KEYS[0], 1), round=2), "scores round 2, which is not due"),
        (
            dataclasses.replace(says(NOW, KEYS[0], 1), marks=()),
            f"marks the replicas [], {short_peer(NAMES[0])} was to mark",
        ),
        (says(NOW, KEYS[0], 1, marks=(Mark(replica=0, assigned=1.0, other=0.0),)), "marks the replicas [0]"),
        (
            dataclasses.replace(says(NOW, KEYS[9], 1), peer=NAMES[0], marks=says(NOW, KEYS[0], 1).marks),
            "is not signed by",
        ),
        (dataclasses.replace(says(NOW, KEYS[0], 1), marks=says(NOW, KEYS[0], 1, 9.0).marks), "is not signed by"),
    ],
)
def test_what_has_no_place(said: Score, why: str) -> None:
    assert why in str(NOW.why_not(said))
    found = of_claims(NOW, commit(2, *full(), scores=[said]))
    assert len(found) == 1
    assert f"has a score that {NOW.why_not(said)}" in found
    heard = Claims()
    heard.add(open_for(NOW), said)
    assert heard.next(open_for(NOW), Score) == ()


def test_scores_come_once_and_not_too_late() -> None:
    said = says(NOW, KEYS[0], 1)
    assert NOW.why_not(said) is None
    assert (of_claims(NOW, commit(2, *full(), scores=[said, said]))) == [
        f"has a score that is told by {short_peer(NAMES[0])} for the second time"
    ]
    then = NOW.after(commit(2, *full(), scores=[said]))
    assert then.why_not(said) == f"is told by {short_peer(NAMES[0])} for the second time"
    late = says(NOW, KEYS[1], 1)
    for round in range(3, 1 + LATE_ROUNDS):
        then = then.after(commit(round, *full()))
    assert then.why_not(late) is None
    assert then.after(commit(1 + LATE_ROUNDS, *full())).why_not(late) == "scores round 1, which is not due"


def test_a_commit_has_so_many_and_the_rest_follow() -> None:
    heard = Claims()
    for key in KEYS[:8]:
        heard.add(open_for(NOW), says(NOW, key, 1))
        heard.add(open_for(NOW), says(NOW, key, 1, 2.0))
    first = heard.next(open_for(NOW), Score)
    assert len(first) == 8 <= MAX_SCORES
    assert {m.assigned for said in first for m in said.marks} == {1.0}, "who has said something does not take it back"
    assert heard.next(open_for(NOW.after(commit(2, *full(), scores=first[:5]))), Score) == first[5:]


def test_the_next_commit_has_the_scores_and_voters_look() -> None:
    made = Driver(dict.fromkeys(NAMES[:2], tiny.full_memory(RUN)), RUN)
    made.decide(made.ready(*NAMES[:2]))
    made.attest(*NAMES[:2])
    made.decide(made.offered(*NAMES[:2], steps=STEPS))
    made.attest(*NAMES[:2])
    now = made.leader.standing.scoring
    turn = now.turns[-1]
    key = next(key for key in KEYS if key.peer_id in turn.by)
    said = says(now, key, turn.round)
    made.do(Received(NAMES[5], said))  # in another peer's session
    made.do(Received(key.peer_id, said))
    sight = fairness.view_of(made.leader, 0.0, 0.0, True)
    found = made.decide(made.offered(*NAMES[:2], steps=STEPS))
    assert found.scores == (said,)
    forged = dataclasses.replace(
        found, scores=(dataclasses.replace(said, marks=says(now, key, turn.round, 9.0).marks),)
    )
    lie = fairness.lie_in(sight, forged)
    assert lie.reason == f"has a score that is not signed by {short_peer(key.peer_id)}"


# --- what follows


Values = Callable[[int, int, random.Random], tuple[float, float]]
"""(replica, round) -> its gain on assigned and on other text."""


def honest(number: int, round: int, rng: random.Random) -> tuple[float, float]:
    own = rng.gauss(1.0, 0.2)
    return own, own - rng.gauss(0.4, 0.15)


def played(
    rounds: int,
    values: Values,
    liars: Sequence[int] = (),
    lie: Values = honest,
    seed: int = 0,
    run: Manifest = RUN,
) -> list[Scoring]:
    """The scoring of a run in which all tell what they find but the liars, after each round."""
    rng, now, found, before = random.Random(seed), Scoring(run), list[Scoring](), tuple[Score, ...]()
    for round in range(1, rounds):
        now = now.after(commit(round, *full(), scores=before))
        found.append(now)
        turn, true = now.turn(round), [values(n, round, rng) for n in range(8)]
        scores = []
        for i, key in enumerate(KEYS[:8] if turn is not None else ()):
            told = [lie(n, round, rng) if i in liars else true[n] for n in turn.by.get(key.peer_id, ())]
            if told:
                given = tuple(
                    Mark(replica=n, assigned=a, other=o) for n, (a, o) in zip(turn.by[key.peer_id], told, strict=True)
                )
                scores.append(claims.signed(key, turn.of, Score(peer="", round=round, marks=given, signature=b"")))
        before = tuple(scores)
    return found


def bad(found: Sequence[Scoring]) -> list[tuple[int, str]]:
    return [(n, peer) for n, now in enumerate(found, 1) for peer in now.found]


def test_honest_work_is_not_found_bad() -> None:
    for seed in range(3):
        assert bad(played(200, honest, seed=seed)) == []


@pytest.mark.parametrize(
    ("name", "worth"),
    [
        ("flip", (-1.0, -0.6)),
        ("nothing", (0.0, 0.0)),
        ("noise", (0.02, -0.02)),
        ("other text", (0.3, 0.35)),
        ("copy", (0.6, 0.6)),
    ],
)
def test_work_without_a_gain_or_without_an_edge_is_found_bad_within_a_dozen_rounds(
    name: str, worth: tuple[float, float]
) -> None:
    found = bad(played(30, lambda n, r, rng: worth if n == 2 else honest(n, r, rng)))
    assert {peer for _, peer in found} == {NAMES[2]}, name
    assert found[0][0] <= 12


def test_three_of_eight_are_found() -> None:
    found = bad(played(40, lambda n, r, rng: (0.2, 0.2) if n >= 5 else honest(n, r, rng)))
    assert {peer for _, peer in found} == set(NAMES[5:8])


def test_three_of_eight_are_found_although_gains_grow_from_round_to_round() -> None:
    def growing(number: int, round: int, rng: random.Random) -> tuple[float, float]:
        gain, other = honest(number, round, rng)
        factor = 0.0 if number >= 5 and round % 2 else 1.5**round
        return factor * gain, factor * other

    found = bad(played(24, growing))
    assert {peer for _, peer in found} == set(NAMES[5:8])


def test_a_liar_among_three_scorers_changes_nothing_and_is_not_asked_any_more() -> None:
    slander: Values = lambda n, r, rng: (-5.0, 5.0)  # noqa: E731
    found = played(60, honest, liars=[3], lie=slander)
    assert bad(found) == []
    asked = [now.turns[-1].by for now in found]
    assert NAMES[3] in asked[0]
    assert NAMES[3] not in asked[20]
    assert all(NAMES[n] in asked[20] for n in range(8) if n != 3)


def test_a_liar_does_not_save_an_accomplice() -> None:
    flatter: Values = lambda n, r, rng: (2.0, 0.0)  # noqa: E731
    found = bad(played(30, lambda n, r, rng: (-1.0, -1.0) if n == 2 else honest(n, r, rng), liars=[3], lie=flatter))
    assert {peer for _, peer in found} == {NAMES[2]}


def test_whoever_is_silent_is_not_asked_for_a_while() -> None:
    book, told = ScoreBook(), {NAMES[0]: Mark(replica=0, assigned=1.0, other=0.5)}
    one = Scored(peers=(NAMES[5],), part=1.0, due=NAMES[:3], told=told)
    for round in range(int(MISSES)):
        assert book.is_heard(NAMES[1], round)
        book, _ = book.after(round, [one], round)
    assert not book.is_heard(NAMES[1], int(MISSES))
    assert book.is_heard(NAMES[0], int(MISSES))
    assert book.is_heard(NAMES[1], scoring.MUTE_ROUNDS + int(MISSES))


def test_one_mark_says_nothing_and_of_two_the_better_one_counts() -> None:
    def scored(*values: float) -> Scored:
        told = {NAMES[i]: Mark(replica=0, assigned=v, other=0.0) for i, v in enumerate(values)}
        return Scored(peers=("x",), part=1.0, due=NAMES[: len(values)], told=told)

    assert scoring.valued(scored(-9.0)) is None
    assert scoring.valued(scored(-9.0, 1.0)) == (1.0, 1.0)
    assert scoring.valued(scored(-9.0, 1.0, 2.0)) == (1.0, 1.0)


def test_what_differs_as_much_as_it_is_worth_counts_for_little() -> None:
    clear, dim = [1.0] * COMPARED_POOL, [3.0, -1.0] * COMPARED_POOL
    assert scoring.against(0.0, 1.0, clear) == 2.0
    assert scoring.against(1.0, 1.0, clear) == -scoring.LEAST_EVIDENCE_STEP
    assert 0 < scoring.against(0.0, 1.0, dim) < 0.2
    assert scoring.against(0.0, 1.0, clear[1:]) == 0.0, "too few to compare with"
    assert scoring.against(-5.0, 1.0, [-1.0] * COMPARED_POOL) == 0.0, (
        "nobody's work makes the loss less: that is not one peer's fault"
    )
    assert scoring.against(0.25, 0.25, clear) < 0, "a quarter of the work, a quarter of the gain"


# --- standing


def test_whose_work_is_found_bad_loses_its_standing_and_is_not_planned() -> None:
    bare = dataclasses.replace(RUN, judging=JudgingSpec(agreement=0.0, score_share=0.08))
    now, rng, before = standing.of(bare), random.Random(1), tuple[Score, ...]()
    for round in range(20):
        now = now.after(commit(round, *(full() if round else ()), scores=before))
        before = ()
        turn = now.scoring.turn(round)
        if now.found_bad:
            break
        if turn is None:
            continue
        true = [(-1.0, -0.5) if n == 2 else honest(n, round, rng) for n in range(8)]
        before = tuple(
            claims.signed(
                key,
                turn.of,
                Score(
                    peer="",
                    round=round,
                    marks=tuple(Mark(replica=n, assigned=true[n][0], other=true[n][1]) for n in turn.by[key.peer_id]),
                    signature=b"",
                ),
            )
            for key in KEYS[:8]
            if key.peer_id in turn.by
        )
    assert now.found_bad == (NAMES[2],)
    assert now.rests(NAMES[2])
    assert not any(now.rests(NAMES[n]) for n in range(8) if n != 2)
    assert f"plans {short_peer(NAMES[2])}, for whom the log says no place" in list(
        of_standing(now, commit(now.round + 1, *full()))
    )
    assert now.left(NAMES[2]) > 0 or not bare.admission.probation, "when it comes back it begins anew"


def test_enough_is_more_than_one_round_can_say() -> None:
    assert ENOUGH_EVIDENCE >= 4 * scoring.MOST_EVIDENCE_STEP
