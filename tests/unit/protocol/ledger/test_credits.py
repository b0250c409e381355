"""Credits: each contributor's tokens are those of the log, counted a second way."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from fractions import Fraction

import pytest

from peer.ui.contributors import contributors, own_lines, table_lines
from protocol.ledger.credits import Credits
from protocol.wire.commit import Commit, Contribution, LeftOut
from protocol.wire.plan import Plan, ReplicaSpec, Seat, StageSpec, Work
from tests.support import tiny

LAYERS = 7
ROOT = "0" * 64


def commit(round: int, plan: Plan | None, contributions: list[Contribution], left: list[LeftOut]) -> Commit:
    return tiny.commit(round=round, contributions=tuple(contributions), left_out=tuple(left), plan=plan)


def a_run(seed: int, rounds: int = 40) -> list[Commit]:
    """Peers come and go, replicas and chains are planned again each round, some fail, spares step in."""
    draw, log, number = random.Random(seed), list[Commit](), 0
    plan: Plan | None = None
    for round in range(rounds):
        made: list[Contribution] = []
        left: list[LeftOut] = []
        for spec in plan.replicas if plan else ():
            if draw.random() < 0.2:
                left.append(LeftOut(replica=spec.number, reason=f"reason {round}"))
                continue
            peers = [
                draw.choice(plan.spares) if i == 0 and plan.spares and draw.random() < 0.2 else p
                for i, p in enumerate(spec.peers)
            ]  # type: ignore[union-attr]
            tokens = draw.randrange(1, 10**6)
            made.append(tiny.contribution(spec.number, *peers, tokens=tokens))
        there = draw.sample([f"p{i}" for i in range(12)], draw.randrange(3, 12))
        replicas: list[ReplicaSpec] = []
        while len(there) > 2:
            size = draw.randrange(1, min(4, len(there)))
            edges = [0, *sorted(draw.sample(range(1, LAYERS), size - 1)), LAYERS]
            stages = [StageSpec(peer=there.pop(), first=a, last=b) for a, b in itertools.pairwise(edges)]
            replicas.append(ReplicaSpec(number=number, stages=tuple(stages)))
            number += 1
        plan = Plan(round=round + 1, replicas=tuple(replicas), spares=tuple(there), next_number=number)
        log.append(commit(round, plan, made, left))
    return log


def test_everybody_has_the_tokens_of_the_log() -> None:
    for seed in range(20):
        log, credits = a_run(seed), Credits(LAYERS)
        exact: Counter[str] = Counter()
        rounds: dict[str, set[int]] = {}
        failed: Counter[str] = Counter()
        for before, now in zip([None, *log], log, strict=False):
            credits.add(now)
            planned = {r.number: r for r in before.plan.replicas} if before is not None and before.plan else {}
            for made in now.contributions:
                for stage, got in zip(planned[made.replica].stages, made.shares, strict=True):
                    exact[got.peer] += Fraction(made.tokens * (stage.last - stage.first), LAYERS)
                    rounds.setdefault(got.peer, set()).add(now.round)
            for left in now.left_out:
                failed.update(planned[left.replica].peers)
        found = contributors(credits, {})
        total = sum(c.tokens for now in log for c in now.contributions)
        assert sum(c.tokens for c in found) == total == credits.tokens
        assert {c.peer: c.rounds for c in found if c.rounds} == {peer: len(which) for peer, which in rounds.items()}
        assert {c.peer: c.left_out for c in found if c.left_out} == dict(failed)
        for c in found:
            assert abs(c.tokens - exact[c.peer]) <= c.rounds, "a token a contribution, by rounding"
            mine, newest = rounds.get(c.peer, set()), log[-1].round
            assert c.streak == next(n for n in range(len(log) + 1) if newest - n not in mine)
        assert [c.tokens for c in found] == sorted((c.tokens for c in found), reverse=True)
        assert [c.rank for c in found if c.tokens] == [
            1 + sum(d.tokens > c.tokens for d in found) for c in found if c.tokens
        ]


def test_a_seat_is_its_peers() -> None:
    credits = Credits(LAYERS)
    whole = ReplicaSpec(number=0, stages=(StageSpec(peer="a", first=0, last=LAYERS),))
    credits.add(
        commit(
            0, Plan(round=1, replicas=(whole,), spares=(), next_number=2, seats=(Seat(number=1, work=Work()),)), [], []
        )
    )
    credits.add(commit(1, None, [tiny.contribution(n, p, tokens=10) for n, p in ((0, "a"), (1, "b"))], []))
    assert [(c.peer, c.tokens, c.rank) for c in contributors(credits, {})] == [("a", 10, 1), ("b", 10, 1)]


@pytest.mark.parametrize("edges", [[(0, 0), (0, 0)], [(0, 5), (5, 2)], [(0, 7)]])
def test_plans_that_no_honest_node_makes_give_equal_shares(edges: list[tuple[int, int]]) -> None:
    credits = Credits(LAYERS)
    stages = tuple(StageSpec(peer=p, first=a, last=b) for p, (a, b) in zip("ab", edges, strict=False))
    plan = Plan(round=1, replicas=(ReplicaSpec(number=0, stages=stages),), spares=(), next_number=1)
    credits.add(commit(0, plan, [], []))
    credits.add(commit(1, None, [tiny.contribution(0, "a", "b", tokens=9)], []))
    assert sorted(c.tokens for c in contributors(credits, {})) == [4, 5]


def test_what_a_log_says_is_harmless_on_a_screen() -> None:
    credits = Credits(LAYERS)
    spec = ReplicaSpec(number=0, stages=(StageSpec(peer="a\x1b[2J", first=0, last=LAYERS),))
    credits.add(commit(0, Plan(round=1, replicas=(spec,), spares=(), next_number=1), [], []))
    credits.add(commit(1, None, [], [LeftOut(replica=0, reason="\x1b[31m\u202eevil" + "x" * 3000)]))
    found = contributors(credits, {})
    for line in (*table_lines(found, 1), *own_lines(found, found[0].peer, 1, 9, {}), *own_lines(found, "b", 1, 9, {})):
        assert line.isprintable()
        assert len(line) < 250


def test_work_on_probation_is_no_work_that_was_left_out_and_its_maker_is_told() -> None:
    plan = Plan(round=1, replicas=(), seats=(Seat(number=0, work=Work()),), next_number=1)
    credits = Credits(LAYERS)
    credits.add(commit(0, plan, [], []))
    tried = LeftOut(replica=0, reason="on probation", judged=ROOT, peers=("new",), probation=True)
    credits.add(commit(1, plan, [], [tried]))
    credits.add(commit(2, None, [], [LeftOut(replica=0, reason="a copy", judged=ROOT, peers=("new",))]))
    (found,) = contributors(credits, {})
    assert (found.peer, found.probation, found.left_out, found.reason) == ("new", 1, 1, "a copy")
    said = list(own_lines([found], "new", 2, 9, {}))
    assert "as a newcomer you brought 1 round of good work, which is kept and counts later" in said
    assert "your work was left out once because: a copy" in said


@pytest.mark.parametrize(
    ("rounds", "told"),
    [(1, "your work is in 1 round, the newest is round 1"), (2, "your work is in 2 rounds, the last 2 without a gap")],
)
def test_one_round_is_no_rounds(rounds: int, told: str) -> None:
    credits, plan = Credits(LAYERS), Plan(round=1, replicas=(), spares=(), next_number=1)
    credits.add(commit(0, plan, [], []))
    for round in range(1, rounds + 1):
        credits.add(commit(round, plan, [tiny.contribution(0, "a", tokens=9)], []))
    assert told in list(own_lines(contributors(credits, {}), "a", rounds, 9, {}))
