"""What the log says of each peer: probation, reputation and shares (protocol/ledger/standing.py)."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from protocol.ledger import standing
from protocol.ledger.standing import FLOOR, REMEMBERED_PEERS, REST_ROUNDS, RETURNING, Finding, Reputation, Standing
from protocol.run.manifest import AdmissionSpec, Manifest
from protocol.wire.bounds import LEAST_COMPARED
from protocol.wire.commit import Commit, Contribution, LeftOut, faults_of
from protocol.wire.decree import ADMIT, Decree, Enacted
from protocol.wire.plan import Plan, ReplicaSpec, Seat, StageSpec, Work
from tests.support import tiny
from tests.support.rules import of_standing
from tests.support.tiny import replica

LAYERS = tiny.LAYERS
NAME = "0" * 64
FOUNDERS = ("f0", "f1", "f2", "f3")


def manifest(**admission: Any) -> Manifest:
    return tiny.manifest(admission=AdmissionSpec(**{"probation": 3, **admission}))


M = manifest()


def plan(round: int, *replicas: tuple[str, ...], seats: int = 0, spares: tuple[str, ...] = ()) -> Plan:
    made = tuple(replica(i, *peers) for i, peers in enumerate(replicas))
    free = tuple(Seat(number=len(made) + i, work=Work()) for i in range(seats))
    return Plan(round=round, replicas=made, seats=free, spares=spares, next_number=len(made) + seats)


def made(number: int, *peers: str, tokens: int = 10, weight: float = 1.0) -> Contribution:
    return tiny.contribution(number, *peers, tokens=tokens, steps=1, standing=weight)


def tried(number: int, *peers: str, bad: bool = False, faults: tuple[str, ...] | None = None) -> LeftOut:
    """Work on probation, or such as was judged and is left out; by the fault of all who made it, unless said."""
    guilty = (peers if bad else ()) if faults is None else faults
    return LeftOut(
        replica=number, reason="?", judged=NAME, peers=peers, probation=not bad, faults=faults_of(peers, guilty)
    )


def commit(
    round: int,
    next: Plan | None,
    contributions: tuple[Contribution, ...] = (),
    left: tuple[LeftOut, ...] = (),
    **more: Any,
) -> Commit:
    return tiny.commit(M, round=round, contributions=contributions, left_out=left, plan=next, **more)


def of_founders(round: int, *more: tuple[str, ...], **rest: Any) -> Plan:
    return plan(round, *((p,) for p in FOUNDERS), *more, **rest)


def work_of_founders() -> tuple[Contribution, ...]:
    return tuple(made(i, p) for i, p in enumerate(FOUNDERS))


def begun(*more: tuple[str, ...], of: Manifest = M, **rest: Any) -> Standing:
    """Round 2 is open with a plan of the founders and of `more`."""
    return standing.of(of, [commit(0, of_founders(1)), commit(1, of_founders(2, *more, **rest), work_of_founders())])


# --- probation


def test_a_newcomer_serves_its_probation_and_then_counts() -> None:
    now = begun(("new",))
    for left in (3, 2, 1):
        assert now.left("new") == left
        assert now.is_on_probation(4, ("new",))
        said = commit(now.round + 1, of_founders(now.round + 2, ("new",)), work_of_founders(), (tried(4, "new"),))
        assert of_standing(now, said) == []
        wrong = dataclasses.replace(said, contributions=(*said.contributions, made(4, "new")), left_out=())
        assert "counts replica 4, which is on probation" in (of_standing(now, wrong))
        now = now.after(said)
    assert now.left("new") == 0
    assert not now.is_on_probation(4, ("new",))
    late = commit(now.round + 1, None, work_of_founders(), (tried(4, "new"),))
    assert of_standing(now, late) == ["leaves out replica 4 for a probation that is over"]


def test_whoever_takes_a_seat_is_on_probation_too() -> None:
    now = begun(seats=1)
    assert now.is_on_probation(4, ("new",))
    assert not now.is_on_probation(4, ("f0",)), "it has a replica, and no seat"
    assert now.after(commit(2, None, work_of_founders(), (tried(4, "new"),))).of("new").served == 1


def test_nobody_is_on_probation_for_whom_somebody_vouches() -> None:
    key = tiny.OPERATORS[3].peer_id
    now = begun((key,), ("admitted",), of=manifest(keys=(key,)))
    assert [now.is_on_probation(i, (p,)) for i, p in enumerate((*FOUNDERS, key, "admitted"))] == [*[False] * 5, True]
    wish = Decree(run=M.run_id, number=0, action=ADMIT, subject="admitted")
    now = now.after(
        commit(2, of_founders(3, (key,), ("admitted",)), work_of_founders(), decree=Enacted(decree=wish, signatures={}))
    )
    assert not now.is_on_probation(5, ("admitted",))


def test_without_probation_in_the_manifest_everybody_counts_at_once() -> None:
    now = begun(("new",), of=manifest(probation=0))
    assert not now.is_on_probation(4, ("new",))


@pytest.mark.parametrize(
    ("members", "expected"), [(("f0", "x", "y"), True), (("x", "f0"), False), (("f0", "f1", "x"), False)]
)
def test_a_chain_is_a_newcomers_where_most_of_its_blocks_are(members: tuple[str, ...], expected: bool) -> None:
    now = standing.of(M, [commit(0, of_founders(1)), commit(1, plan(2, ("f2",), members))])
    assert now.is_on_probation(1, members) == expected


def test_a_plan_without_anybody_established_has_nobody_on_probation() -> None:
    now = standing.of(M, [commit(0, of_founders(1)), commit(1, plan(2, ("x",), ("y",)))])
    assert not now.is_on_probation(0, ("x",))
    assert of_standing(now, commit(2, plan(3, ("x",)), (made(0, "x"), made(1, "y")))) == []
    assert now.after(commit(2, plan(3, ("x",)), (made(0, "x"), made(1, "y")))).of("x").served == 1


def test_what_is_found_wrong_begins_the_probation_anew() -> None:
    now = begun(("new",))
    for _ in range(2):
        now = now.after(
            commit(now.round + 1, of_founders(now.round + 2, ("new",)), work_of_founders(), (tried(4, "new"),))
        )
    assert now.left("new") == 1
    now = now.after(commit(now.round + 1, of_founders(now.round + 2), work_of_founders(), (tried(4, "new", bad=True),)))
    assert (now.left("new"), now.of("new").reputation) == (3, 0.5)


def test_a_round_that_could_not_compare_is_not_served_where_one_could_have_been() -> None:
    """Four established replicas are planned; where some of them bring nothing, noise cannot be told from work."""
    few = work_of_founders()[: LEAST_COMPARED - 2]
    assert begun(("new",)).after(commit(2, None, few, (tried(4, "new"),))).of("new").served == 0
    assert begun(("new",)).after(commit(2, None, work_of_founders(), (tried(4, "new"),))).of("new").served == 1
    small = standing.of(M, [commit(0, plan(1, ("f0",))), commit(1, plan(2, ("f0",), ("new",)))])
    assert small.after(commit(2, None, (made(0, "f0"),), (tried(1, "new"),))).of("new").served == 1


# --- reputation


def test_a_finding_takes_half_and_work_gives_back_slowly() -> None:
    now = begun().after(commit(2, of_founders(3), work_of_founders()[1:], (tried(0, "f0", bad=True),)))
    assert now.of("f0").reputation == 0.5
    assert now.weigh(work_of_founders())[0] == 0.5
    rounds = 0
    while now.of("f0").reputation < 1:
        contributions = tuple(
            made(i, p, weight=w) for i, (p, w) in enumerate(zip(FOUNDERS, now.weigh(work_of_founders()), strict=True))
        )
        said = commit(now.round + 1, of_founders(now.round + 2), contributions)
        assert of_standing(now, said) == []
        now, rounds = now.after(said), rounds + 1
    assert rounds == 8
    assert now.weigh(work_of_founders()) == (1.0,) * 4


def test_of_a_chain_those_are_found_bad_whose_fault_it_is() -> None:
    now = standing.of(M, [commit(0, plan(1, ("f0",), ("a", "b")))])
    left = tried(1, "a", "b", bad=True, faults=("a",))
    now = now.after(commit(1, plan(2, ("f0",), ("a", "b")), (made(0, "f0"),), (left,)))
    assert (now.of("a").reputation, now.of("b").reputation) == (0.5, 1.0)
    assert now.weigh((made(0, "f0"), made(1, "a", "b"))) == (1.0, 0.75)


def test_who_is_nobodys_fault_loses_the_round_only() -> None:
    now = begun().after(commit(2, None, work_of_founders()[1:], (tried(0, "f0", bad=True, faults=()),)))
    assert now.of("f0").reputation == 1.0


def test_whoever_falls_rests_and_begins_anew() -> None:
    now = begun()
    for _ in range(4):
        assert not now.rests("f0")
        now = now.after(
            commit(now.round + 1, of_founders(now.round + 2), work_of_founders()[1:], (tried(0, "f0", bad=True),))
        )
    assert now.of("f0") == Reputation(served=0, reputation=RETURNING, until=now.round + REST_ROUNDS, fell=True)
    assert now.left("f0") == 3, "a founder, too"
    with_it = commit(now.round + 1, of_founders(now.round + 2), work_of_founders()[1:])
    (why,) = of_standing(now, with_it)
    assert why.endswith("for whom the log says no place")
    alone = dataclasses.replace(with_it, plan=plan(now.round + 2, ("f0",)))
    assert of_standing(now, alone) == [], "there is nobody else"
    for _ in range(REST_ROUNDS):
        assert now.rests("f0")
        now = now.after(commit(now.round + 1, plan(now.round + 2, ("f1",))))
    assert not now.rests("f0")


def test_an_operator_may_forgive() -> None:
    now = begun()
    for _ in range(4):
        now = now.after(commit(now.round + 1, of_founders(now.round + 2), (), (tried(0, "f0", bad=True),)))
    wish = Decree(run=M.run_id, number=0, action=ADMIT, subject="f0")
    now = now.after(commit(now.round + 1, of_founders(now.round + 2), decree=Enacted(decree=wish, signatures={})))
    assert (now.rests("f0"), now.left("f0"), now.of("f0").reputation) == (False, 0, 1.0)


@pytest.mark.parametrize("start", [1.0, 0.5, FLOOR])
def test_a_reputation_stays_between_the_floor_and_one(start: float) -> None:
    draw, known = random.Random(1), Reputation(reputation=start)
    for round in range(2000):
        known = known.found(Finding("x", draw.random() < 0.6, draw.random()), round)
        assert FLOOR <= known.reputation <= 1


# --- shares


def test_nobody_has_more_than_a_share_and_everybody_may_have_an_equal_one() -> None:
    now = begun(of=manifest(share=0.4))
    large = (made(0, "f0", tokens=70), *(made(i, f"f{i}") for i in (1, 2, 3)))
    weights = now.weigh(large)
    assert 0.7 * weights[0] == pytest.approx(0.4)
    assert weights[1:] == (1.0, 1.0, 1.0)
    two = now.weigh((made(0, "f0"), made(1, "f1")))
    assert two == (1.0, 1.0), "half is an equal share of two"
    assert now.weigh((made(0, "f0"),)) == (1.0,)
    equal = begun(of=manifest(share=0.001))
    assert equal.weigh(tuple(made(i, p, tokens=7) for i, p in enumerate(FOUNDERS[:3]))) == (1.0, 1.0, 1.0)


def test_a_chains_weight_is_its_members() -> None:
    now = standing.of(manifest(share=0.3), [commit(0, plan(1, ("f0",), ("a", "b"), ("f1",)))])
    weights = now.weigh((made(0, "f0", tokens=10), made(1, "a", "b", tokens=80), made(2, "f1", tokens=10)))
    assert weights[0] == weights[2] == 1.0
    assert 0.8 / 2 * weights[1] == pytest.approx(1 / 3), "each of the two has half of it; a third is an equal share"


# --- who is named


def test_whatever_a_commit_says_is_borne() -> None:
    """Replicas without stages, without shares, with blocks that do not exist."""
    odd = Plan(round=1, replicas=(ReplicaSpec(number=0, stages=()), replica(1, "a"), replica(1, "b")), next_number=2)
    backwards = ReplicaSpec(
        number=2, stages=(StageSpec(peer="c", first=4, last=0), StageSpec(peer="d", first=0, last=4))
    )
    odd = dataclasses.replace(odd, replicas=(*odd.replicas, backwards))
    now = standing.of(M, [commit(0, of_founders(1)), commit(1, odd)])
    said = commit(
        2,
        odd,
        (made(0), made(7, "z"), made(2, "c", "d"), made(2, "c")),
        (tried(2, "c", "d", bad=True), tried(1, "b", bad=True), tried(0, bad=True)),
    )
    assert of_standing(now, said) != []
    assert now.after(said).round == 2


# --- the same for everybody


def a_run(seed: int, rounds: int = 60) -> list[Commit]:
    """Peers come and go; some work is found wrong, some on probation, some lost."""
    draw, log = random.Random(seed), [commit(0, of_founders(1))]
    now = standing.of(M, log)
    for round in range(1, rounds):
        counted: list[Contribution] = []
        left: list[LeftOut] = []
        for spec in now.plan.replicas if now.plan is not None else ():
            chance = draw.random()
            if chance < 0.1:
                left.append(LeftOut(replica=spec.number, reason="late"))
            elif chance < 0.25:
                left.append(tried(spec.number, *spec.peers, bad=True))
            elif now.is_on_probation(spec.number, spec.peers):
                left.append(tried(spec.number, *spec.peers))
            else:
                counted.append(made(spec.number, *spec.peers, tokens=draw.randrange(1, 100)))
        weights = now.weigh(counted)
        counted = [dataclasses.replace(c, standing=w) for c, w in zip(counted, weights, strict=True)]
        there = [p for p in draw.sample([f"p{i}" for i in range(12)], 6) if not now.rests(p)]
        more = [tuple(there[:2]), *((p,) for p in there[2:])] if len(there) > 2 else []
        able = [(p,) for p in FOUNDERS if not now.rests(p)] or [("f0",)]
        log.append(commit(round, plan(round + 1, *able, *more), tuple(counted), tuple(left)))
        assert of_standing(now, log[-1]) == []
        now = now.after(log[-1])
    return log


@pytest.mark.parametrize("seed", range(5))
def test_a_log_that_is_read_at_once_says_the_same_as_round_by_round(seed: int) -> None:
    log = a_run(seed)
    now = standing.of(M)
    for at, one in enumerate(log):
        now = now.after(one)
        if at % 20 == 0:
            assert now == standing.of(M, log[: at + 1])
    assert now == standing.of(M, log)
    assert list(now.known) == list(standing.of(M, log).known), "and forgets the same ones first"
    assert any(k.fell for k in now.known.values())


def test_what_is_known_does_not_change_when_more_is_known() -> None:
    now = begun(("new",))
    before = dict(now.known)
    now.after(commit(2, None, work_of_founders(), (tried(4, "new"),)))
    assert now.known == before


def test_only_so_many_peers_are_remembered_and_who_is_forgotten_is_new() -> None:
    now = begun(("new",)).after(commit(2, of_founders(3), work_of_founders(), (tried(4, "new"),)))
    assert now.of("new").served == 1
    crowd = tuple(f"x{i}" for i in range(REMEMBERED_PEERS))
    for start in range(0, REMEMBERED_PEERS, 4000):
        now = now.after(
            commit(now.round + 1, None, work_of_founders(), (tried(0, *crowd[start : start + 4000], bad=True),))
        )
    assert len(now.known) == REMEMBERED_PEERS
    assert now.of("new").served == 0
    assert now.of("f0").served == 7, "of whom there is news is remembered"
