"""What members of the quorum vote for: every kind of lie and doubt, and that honest commits have neither."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from protocol.errors import LocalError
from protocol.planning.partition import Candidate
from protocol.quorum.paxos_events import Objection
from protocol.round import fairness, judging
from protocol.round.accusations import LIES as SAYS_LIES
from protocol.round.fairness import FORGIVEN_PER_ROUND, REMEMBERED_ROUNDS, DoubtRecord, NodeView
from protocol.round.leader_events import Decided, Ready, Received
from protocol.wire import encoding, framing
from protocol.wire.ballot import Accept
from protocol.wire.commit import Aggregate, Commit, Diverged, LeftOut, liars_borne
from protocol.wire.session import ChainFailure
from tests.support import tiny
from tests.support.leader import Driver, opened

FULL = tiny.full_memory(tiny.manifest())
THIRD = tiny.third_memory(tiny.manifest())
MOST = FULL - 1
"""Bytes for almost all of the model: two such peers make a chain."""
MEMORY = {"a": FULL, "b": FULL, "c": FULL}
WALL = 1.7e9
Change = Callable[[Commit], Commit]


class Round:
    """The same round as the leading node sees it, and as another one does; all three peers have offered."""

    def __init__(self, memory: dict[str, int] | None = None) -> None:
        self.leading, self.other = (opened(memory or MEMORY) for _ in range(2))
        self.seconds = 1.0
        self.peers = tuple(memory or MEMORY)

    def commit(self) -> Commit:
        """What the leading node proposes."""
        self.leading.now = self.seconds
        decided = self.leading.decide(self.leading.offered(*self.peers))
        return dataclasses.replace(decided, time=WALL, members=self.leading.manifest.first_members)

    def sight(self, *peers: str, settled: bool = True) -> NodeView:
        """What the other node knows when these have offered to it."""
        self.other.now = self.seconds
        self.other.offered(*peers)
        return fairness.view_of(self.other.leader, WALL, self.seconds, settled)


def found(sight: NodeView, commit: Commit) -> Objection | None:
    return fairness.lie_in(sight, commit) or fairness.doubt_in(sight, commit)


def work(**changes: object) -> Change:
    """The first contribution with these changes."""

    def change(commit: Commit) -> Commit:
        one = dataclasses.replace(commit.contributions[0], **changes)  # type: ignore[arg-type]
        return dataclasses.replace(commit, contributions=(one, *commit.contributions[1:]))

    return change


def without_first(commit: Commit, reason: str = "no offer after 1 s") -> Commit:
    left = LeftOut(replica=commit.contributions[0].replica, reason=reason)
    return dataclasses.replace(commit, contributions=commit.contributions[1:], left_out=(left,))


@pytest.mark.parametrize("seen", [(), ("a",), ("a", "b", "c")])
@pytest.mark.parametrize("settled", [True, False])
def test_an_honest_commit_is_fair_however_much_of_it_was_seen(seen: tuple[str, ...], settled: bool) -> None:
    round = Round()
    assert found(round.sight(*seen, settled=settled), round.commit()) is None


def test_the_first_plan_is_fair() -> None:
    driver = Driver(MEMORY, tiny.manifest(rounds=3, start_peers=3))
    other = Driver(MEMORY, driver.manifest)
    commit = dataclasses.replace(driver.decide(driver.ready(*MEMORY)), time=WALL)
    other.ready(*MEMORY)
    assert found(fairness.view_of(other.leader, WALL, 0.0, True), commit) is None


def test_a_commit_that_fits_in_a_message_and_not_in_a_record_gets_no_vote() -> None:
    """Made-up spares in a lying leader's commit make only its record, with the votes, too long. It would end nodes."""
    round = Round()
    honest = dataclasses.replace(round.commit(), digests={})
    assert honest.plan is not None
    names = [f"{i:064}" for i in range(65_000)]

    def filled(count: int, more: int) -> Commit:
        spares = (*names[:count], "x" * more)
        return dataclasses.replace(honest, plan=dataclasses.replace(honest.plan, spares=spares))  # type: ignore[type-var]

    def size(commit: Commit) -> int:
        return len(encoding.encode(Accept(round=commit.round, ballot=1, commit=commit)))

    room = framing.MAX_MESSAGE - size(filled(1000, 1))
    each = (size(filled(2000, 1)) - size(filled(1000, 1))) // 1000
    commit = filled(1000 + room // each, 1 + room % each - each // 2)
    raw = encoding.encode(Accept(round=commit.round, ballot=1, commit=commit))
    assert encoding.expect(Accept, encoding.decode(raw, "p"), "p").commit == commit, "it arrives"
    with pytest.raises(LocalError, match="nobody could read its record"):
        encoding.encode_record(tiny.record(commit, *tiny.OPERATORS[:3]))
    unfair = found(round.sight("a", "b", "c"), commit)
    assert unfair is not None
    assert unfair == Objection("is so long that nobody could read its record", True)
    assert found(round.sight("a", "b", "c"), honest) is None


DOUBTS: list[tuple[str, Change]] = [
    ("before the round was over", without_first),
    ("counts other work", work(loss=0.1)),
    ("a day from", lambda c: dataclasses.replace(c, time=WALL + 10 * fairness.CLOCK_TOLERANCE_SECONDS)),
    ("nobody attested", lambda c: dataclasses.replace(c, digests={**c.digests, "embed": tiny.digest("another")})),
]


@pytest.mark.parametrize(("reason", "change"), DOUBTS, ids=[name for name, _ in DOUBTS])
def test_who_has_seen_something_else_doubts_and_who_knows_too_little_does_not(reason: str, change: Change) -> None:
    round = Round()
    commit = change(round.commit())
    unfair = found(round.sight("a", "b", "c"), commit)
    assert reason in unfair.reason
    assert not unfair.lie
    assert found(dataclasses.replace(round.sight(), settled=False), commit) is None


def test_a_member_that_gives_signs_of_life_is_not_replaced() -> None:
    round = Round()
    commit = round.commit()
    sight = dataclasses.replace(round.sight("a"), living=frozenset({tiny.OPERATORS[6].peer_id}))
    unfair = found(sight, commit)
    assert "signs of life" in unfair.reason
    assert found(dataclasses.replace(sight, living=frozenset(commit.members)), commit) is None


def test_work_that_came_when_the_round_was_over_may_be_left_out_and_what_has_been_here_for_long_may_not() -> None:
    round = Round()
    timing = round.other.manifest.timing
    commit = without_first(round.commit())
    sight = round.sight("a", "b", "c")
    late = dataclasses.replace(
        sight, waited=timing.round_deadline, since=dict.fromkeys(sight.since, timing.round_deadline - 0.5)
    )
    assert found(late, commit) is None
    long = dataclasses.replace(late, since={**late.since, commit.left_out[0].replica: 1.0})
    unfair = found(long, commit)
    assert "for long" in unfair.reason


def test_whoever_is_judged_out_is_left_out_and_nobody_doubts_it() -> None:
    round = Round()
    commit = round.commit()
    name = judging.name_of(commit.contributions[0])
    judged = without_first(commit, "judged: it is a copy")
    peers = commit.contributions[0].peers
    named = tuple(dataclasses.replace(x, judged=name, peers=peers) for x in judged.left_out)
    fair = dataclasses.replace(judged, left_out=named)
    other = dataclasses.replace(fair, left_out=tuple(dataclasses.replace(x, judged="0" * 64) for x in fair.left_out))
    sight = round.sight("a", "b", "c")
    assert found(sight, fair) is None, "the verdict is another question"
    unfair = found(sight, other)
    assert "judges other work" in unfair.reason


def test_a_scale_is_no_other_work() -> None:
    round = Round()
    assert found(round.sight("a", "b", "c"), work(scale=0.5)(round.commit())) is None, "the verdict is another question"


def test_a_plan_that_gives_more_than_a_peer_can_hold_is_doubted() -> None:
    round = Round()
    commit = round.commit()
    round.other.memory = {**MEMORY, "b": THIRD}
    round.other.ready("b")
    unfair = found(round.sight("a", "b", "c"), commit)
    assert "memory" in unfair.reason


def test_a_plan_that_is_far_worse_than_ones_own_is_doubted_and_one_of_strangers_is_not() -> None:
    round = Round()
    commit = round.commit()
    only = dataclasses.replace(commit.plan, replicas=commit.plan.replicas[:1], spares=("b", "c"))
    sight = round.sight("a", "b", "c")
    unfair = found(sight, dataclasses.replace(commit, plan=only))
    assert "tokens a second" in unfair.reason
    stranger = dataclasses.replace(commit, plan=dataclasses.replace(only, spares=("b", "c", "stranger")))
    assert found(sight, stranger) is None


@pytest.mark.parametrize("heard", ["by both", "by the leading node alone", "by the other node alone"])
def test_a_plan_without_a_chain_that_quarrels_is_doubted_only_where_nobody_said_so(heard: str) -> None:
    """The two that hold only most of the model quarrel, so there is no chain any more."""
    round = Round({"a": FULL, "c": MOST, "d": MOST})
    plan = round.leading.leader.plan
    (chain,) = (r for r in plan.replicas if r.is_chain)
    accuser, accused = chain.peers
    failure = ChainFailure(round=1, replica=chain.number, generation=0, peer=accused, reason=f"{SAYS_LIES}noise")
    for driver, deaf in ((round.leading, "by the other node alone"), (round.other, "by the leading node alone")):
        slow = (Candidate(peer=p, memory_bytes=m, up_bps=10**7, speed_flops=10**6) for p, m in driver.memory.items())
        driver.do(*map(Ready, slow))
        if heard != deaf:
            driver.do(Received(accuser, failure))
    round.peers = ("a",) if heard != "by the other node alone" else round.peers
    ended = round.commit()
    round.other.do(Decided(ended))
    round.leading.attest("a", "c", "d")
    round.other.attest("a", "c", "d")
    commit = round.commit()
    assert any(r.is_chain for r in commit.plan.replicas) == (heard == "by the other node alone")
    unfair = found(round.sight("a"), commit)
    assert (unfair is not None) == (heard == "by the leading node alone"), unfair


def test_one_doubt_skips_a_leader_once_in_a_round_and_a_leader_that_is_doubted_again_is_accused() -> None:
    doubts, doubt = DoubtRecord(), Objection("leaves out replica 1", False)
    assert doubts.weigh("a", 5, doubt, 3) == doubt
    assert doubts.weigh("b", 5, Objection("has no plan", False), 3) is None, "bad weather must end"
    assert doubts.weigh("b", 6, None, 3) is None
    again = doubts.weigh("a", 6, doubt, 3)
    assert again.accuses
    assert not again.lie, "what it proposes is not proven to be one, and may have to be decided"
    lie = Objection("weighs it twice", True)
    assert doubts.weigh("b", 6, lie, 3) == lie
    for _ in range(int(fairness.ACCUSE_WEIGHT / FORGIVEN_PER_ROUND)):
        doubts.decided("a")
    forgiven = doubts.weigh("a", 7, doubt, 3)
    assert not forgiven.accuses


def test_a_peer_that_attests_other_digests_to_each_node_has_no_honest_leader_accused() -> None:
    doubts, doubt = DoubtRecord(), Objection("leaves out replica 1", False, about="liar")
    assert [doubts.weigh("a", round, doubt, 4) for round in range(5, 20)] == [doubt] * 15, (
        "it costs a turn, and no more"
    )
    later = doubts.weigh("a", 20, Objection("has no plan", False), 4)
    assert not later.accuses


def test_work_that_is_left_out_for_another_digest_is_a_doubt_about_its_maker() -> None:
    round = Round()
    honest = round.commit()
    number, peer = honest.contributions[1].replica, honest.contributions[1].peers[0]
    sight, rest = round.sight(*round.peers), (honest.contributions[0], *honest.contributions[2:])
    out = LeftOut(replica=number, reason=f"peer {peer}: its state differs from the majority's")
    diverged = (Diverged(peer=peer, shard="embed"),)
    left = dataclasses.replace(honest, contributions=rest, left_out=(out,))
    for commit, about in ((left, ""), (dataclasses.replace(left, diverged=diverged), peer)):
        doubt = fairness.doubt_in(sight, commit)
        assert doubt.reason.startswith(f"leaves out replica {number}")
        assert doubt.about == about


@pytest.mark.parametrize("members", [3, 4, 5, 7])
def test_a_doubt_about_more_leaders_than_may_lie_is_wrong_and_comes_back_no_more(members: int) -> None:
    doubts, liars = DoubtRecord(), max(1, liars_borne(members))
    for n in range(liars):
        assert doubts.weigh(f"leader {n}", 5 + n, Objection(f"plans {n}.5 tokens a second", False), members) is not None
    for n in range(20):
        leader = f"leader {(liars + n) % members}"
        assert doubts.weigh(leader, 5 + liars + n, Objection(f"plans {n} tokens a second", False), members) is None
    other = doubts.weigh("leader 0", 50, Objection("plans more for b than it has memory for", False), members)
    assert not other.accuses, "what was wrong is held against nobody"
    late = doubts.weigh("leader 1", 51 + 2 * REMEMBERED_ROUNDS, Objection("plans 3 tokens a second", False), members)
    assert late is not None


def test_what_was_seen_does_not_change_while_it_is_judged() -> None:
    round = Round()
    sight = round.sight("a")
    before = dict(sight.complete)
    round.other.offered("b")
    round.other.do(Received("b", round.other.offer("b")))
    round.other.leader.seen(round.seconds)
    assert sight.complete == before


def refuting(round: Round, digest: str = "true") -> Commit:
    """What a node proposes that computed what the log gives of a shard."""
    wrong = (Diverged(peer="a", shard="embed", refuted=True),)
    return dataclasses.replace(round.commit(), diverged=wrong, digests={"embed": digest})


def test_a_refuted_attestation_is_computed_again_by_those_who_vote() -> None:
    round = Round()
    sight = dataclasses.replace(round.sight(), known={"a": {"embed": "false"}})
    commit = refuting(round)
    assert fairness.wrong_refutation_in(sight, dataclasses.replace(commit, diverged=()), lambda *of: None) is None
    assert fairness.wrong_refutation_in(sight, commit, lambda shard, round: "true") is None
    lie = fairness.wrong_refutation_in(sight, commit, lambda shard, round: "false")
    assert lie is not None
    assert lie.lie
    for known, computed in (({"a": {"embed": "true"}}, "true"), ({}, None)):
        seen = dataclasses.replace(sight, known=known)
        doubt = fairness.wrong_refutation_in(seen, commit, lambda shard, round, computed=computed: computed)
        assert doubt is not None
        assert (doubt.lie, doubt.about) == (False, "a")
        new = dataclasses.replace(seen, settled=False)
        assert fairness.wrong_refutation_in(new, commit, lambda shard, round, computed=computed: computed) is None


def test_who_votes_makes_the_aggregates_again() -> None:
    round = Round()
    sight, named = round.sight(), (Aggregate(shard="embed", digest="0" * 64, size=9),)
    plain = round.commit()
    commit = dataclasses.replace(plain, aggregates=named)
    made: list[Commit] = []

    def make(of: Commit) -> tuple[Aggregate, ...]:
        made.append(of)
        return named

    assert fairness.wrong_aggregates_in(sight, commit, make) is None
    assert made == [sight.state.head]
    lie = fairness.wrong_aggregates_in(sight, commit, lambda of: ())
    assert lie is not None
    assert lie.lie
    assert fairness.wrong_aggregates_in(sight, plain, lambda of: named) is None, "the rules ask for them"


def test_the_log_s_own_digest_is_not_one_that_nobody_attested() -> None:
    round = Round()
    round.other.attest("a", "b", "c", digest="false")
    round.other.leader.attestations.prove(round.other.leader.round - 1, "embed", "true")
    honest = dataclasses.replace(round.commit(), digests={"embed": "true"})
    objection = found(round.sight(settled=True), honest)
    assert objection is None or "nobody attested" not in objection.reason
