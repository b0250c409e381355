"""The leader: every row of its table, and what keeps it from waiting for ever."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from protocol.ledger import part_lists
from protocol.ledger.part_lists import root_of, share_of
from protocol.planning.partition import Candidate
from protocol.round.judging import JudgingJob, Verdict, name_of
from protocol.round.leader import MOST_RECOMPUTED, Leader
from protocol.round.leader_events import (
    AnnounceShare,
    Decided,
    Done,
    Effect,
    Event,
    Fetch,
    Gone,
    Held,
    Judge,
    JudgingDone,
    Lead,
    MakePlan,
    Moved,
    Planned,
    Propose,
    Ready,
    Received,
    Recompute,
    Recomputed,
    Report,
    Send,
    StoreList,
    Tick,
)
from protocol.run import layout
from protocol.wire.commit import Commit, Diverged
from protocol.wire.session import Attest, Offer, Offered, TimeUp, Withdraw
from tests.support import tiny
from tests.support.leader import CHAIN, DEADLINE, FULL, FULLS, GONE, QUICK, SHARDS, Driver, M, left_out, opened


def names_of(offer: Offer) -> list[str]:
    """What has to be durable of it: its list of parts, and its payloads."""
    return [root_of(offer.parts), *(part.digest for part in offer.parts)]


def replicas(commit: Commit) -> list[int]:
    return [c.replica for c in commit.contributions]


# --- gathering


def test_the_first_plan_is_proposed_when_enough_peers_are_ready() -> None:
    driver = Driver(FULLS)
    assert driver.ready("a") == []
    (effect,) = driver.ready("b")
    assert isinstance(effect, Propose)
    commit = effect.commit
    assert (commit.round, commit.parent, commit.contributions) == (0, M.run_id, ())
    assert [(r.number, r.work.slot) for r in commit.plan.replicas] == [
        (0, 0),
        (1, M.train.inner_steps * M.train.step_rows),
    ]
    assert commit.plan.round == 1
    assert [r.peers for r in commit.plan.replicas] == [("a",), ("b",)]


def test_peers_that_make_no_replica_are_waited_upon() -> None:
    driver = Driver({**CHAIN, "small": 1})
    assert driver.ready("c", "d", "small") == []
    assert driver.at(10 * DEADLINE) == []
    assert len(driver.ready("e")) == 1


def test_nothing_is_proposed_twice() -> None:
    driver = Driver(FULLS)
    driver.ready("a", "b")
    assert driver.ready("a", "b") == []
    assert driver.at(10 * DEADLINE) == []


# --- open: offers


def test_an_offer_makes_the_leader_fetch_what_it_does_not_hold() -> None:
    driver = opened(FULLS)
    offer = driver.offer("a")
    assert driver.do(Received("a", offer)) == [StoreList(offer.parts), *(Fetch("a", part) for part in offer.parts)]
    driver.do(Held(offer.parts[0].digest))
    assert driver.do(Received("a", offer)) == [StoreList(offer.parts), *(Fetch("a", part) for part in offer.parts[1:])]
    driver.do(Held(root_of(offer.parts)))
    assert driver.do(Received("a", offer)) == [Fetch("a", part) for part in offer.parts[1:]]


def test_who_has_offered_counts_once_its_list_is_durable_and_is_told_then() -> None:
    driver = opened(FULLS)
    driver.offered("b")
    offer = driver.offer("a")
    driver.news.clear()
    driver.do(Received("a", offer), *(Held(p.digest) for p in offer.parts))
    assert driver.at(driver.now + 1.0) == driver.news == []
    (proposal,) = driver.do(Held(root_of(offer.parts)))
    shares = {peer: share_of(peer, driver.offer(peer).parts) for peer in "ab"}
    assert driver.news[0] == Send(("a",), Offered(round=1, shares=(shares["a"],)), False)
    assert driver.news[1:] == [AnnounceShare(1, shares["a"]), AnnounceShare(1, shares["b"])]
    assert isinstance(proposal, Propose)
    assert [s for s in proposal.commit.shares if s.peer == "a"] == [share_of("a", offer.parts)]


def test_what_others_offered_is_named_to_nobody_as_long_as_an_offer_is_admitted() -> None:
    """Two that are late, or change their minds, after the payloads of the others were named."""
    memory = dict.fromkeys("abc", FULL)
    driver = opened(memory)
    driver.offered("a", "b")
    assert [e for e in driver.news if isinstance(e, AnnounceShare)] == []
    changed = driver.offer("b", norm=2.0)
    assert driver.do(Received("b", changed)), "nothing was named yet"
    driver.offered("b")
    driver.at(DEADLINE)
    named = {e.share.peer for e in driver.news if isinstance(e, AnnounceShare)}
    assert named == {"a", "b"}
    assert driver.do(Received("c", driver.offer("c"))) == []
    assert driver.do(Received("a", driver.offer("a", norm=2.0))) == []
    assert driver.leader.offers.of(2, "c") is None


def test_the_commit_comes_when_all_are_complete_in_the_order_of_the_plan() -> None:
    driver = opened({**FULLS, **CHAIN})
    assert driver.offered("e", "d", "b", "a") == []
    effects = driver.offered("c")
    commit = driver.decide(effects)
    assert replicas(commit) == [0, 1, 2]
    assert [s.peer for s in commit.contributions[2].shares] == ["c", "d", "e"]
    assert commit.contributions[2].tokens == 4 * M.train.step_tokens
    assert commit.digests == {"embed": "same"}
    assert commit.parent == driver.commits[0].digest
    before = driver.commits[0].plan
    assert [r.work.slot for r in commit.plan.replicas] == [
        before.next_slot + i * M.train.inner_steps * M.train.step_rows for i in range(3)
    ]
    assert left_out(commit) == []


def test_a_chain_counts_the_steps_of_its_slowest_stage() -> None:
    driver = opened(CHAIN)
    driver.offered("c", "d")
    short = driver.offer("e", steps=2)
    driver.do(Received("e", short), *(Held(n) for n in names_of(short)[:-1]))
    contribution = driver.decide(driver.do(Held(names_of(short)[-1]))).contributions[0]
    assert (contribution.steps, contribution.tokens) == (2, 2 * M.train.step_tokens)


def test_a_replica_is_not_complete_before_its_base_is_attested() -> None:
    driver = Driver(FULLS)
    driver.decide(driver.ready("a", "b"))
    assert driver.offered("a", "b") == []
    assert driver.attest("a") == []
    assert replicas(driver.decide(driver.attest("b"))) == [0, 1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"replica": 1}, "it does not cover the planned shards"),
        ({"parts": ()}, "it does not cover the planned shards"),
        ({"steps": 0, "tokens": 0}, "steps and tokens do not agree with the plan"),
        ({"steps": 5, "tokens": 5 * M.train.step_tokens}, "steps and tokens do not agree with the plan"),
        ({"tokens": 10**9}, "steps and tokens do not agree with the plan"),
        ({"norm": -1.0}, "a norm or size is not a number in range"),
        ({"norm": float("inf")}, "a norm or size is not a number in range"),
        ({"norm": float("nan")}, "a norm or size is not a number in range"),
        ({"size": 0}, "a norm or size is not a number in range"),
        ({"size": 1 << 20}, "a norm or size is not a number in range"),
    ],
)
def test_a_bad_offer_is_left_out_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    driver = opened(FULLS)
    assert driver.do(Received("a", driver.offer("a", **changes))) == []
    commit = driver.decide(driver.offered("b"))
    assert replicas(commit) == [1]
    assert left_out(commit) == [(0, f"peer a: offer refused: {reason}")]


def test_offers_of_strangers_and_of_other_rounds_are_ignored() -> None:
    driver = opened(FULLS)
    offer = driver.offer("a")
    assert driver.do(Received("x", offer)) == []
    assert driver.do(Received("a", dataclasses.replace(offer, round=0))) == []
    assert driver.do(Received("a", dataclasses.replace(offer, round=2))) == []
    assert replicas(driver.decide(driver.offered("a", "b"))) == [0, 1]


class Judges(Driver):
    """What the judges of a run say is up to the test."""

    def do(self, *events: Event) -> list[Effect]:
        return [effect for event in events for effect in self.leader.handle(event, self.now)]

    def asked(self, effects: list[Effect]) -> JudgingJob:
        (case,) = [e.case for e in effects if isinstance(e, Judge)]
        return case

    def say(self, case: JudgingJob, *verdicts: Verdict) -> list[Effect]:
        effects = self.do(JudgingDone(case, verdicts))
        return [
            found
            for e in effects
            for found in (self.do(Planned(e.question, e.question.answer())) if isinstance(e, MakePlan) else [e])
        ]


def judged_swarm(*peers: str) -> Judges:
    driver = Judges(dict.fromkeys(peers, FULL), tiny.manifest(rounds=3, start_peers=len(peers)))
    (question,) = [e.question for e in driver.ready(*peers) if isinstance(e, MakePlan)]
    driver.decide(driver.do(Planned(question, question.answer())))
    assert driver.attest(*peers) == []
    return driver


def test_what_was_offered_is_judged_in_the_order_in_which_it_came_and_the_commit_says_the_verdict() -> None:
    driver = judged_swarm("a", "b", "c")
    driver.offered("c")
    driver.now = 1.0
    driver.offered("b")
    driver.now = 2.0
    case = driver.asked(driver.offered("a"))
    assert [c.shares[0].peer for c in case.contributions] == ["c", "b", "a"]
    commit = driver.decide(driver.say(case, Verdict(0.25), Verdict(1.0, "it changes nothing", ("b",)), Verdict(1.0)))
    assert [(c.shares[0].peer, c.scale) for c in commit.contributions] == [("a", 1.0), ("c", 0.25)]
    (out,) = commit.left_out
    assert out.reason == "peer b: judged: it changes nothing"
    assert out.guilty == ("b",)
    assert out.judged == name_of(case.contributions[1])


def test_whoever_is_judged_out_again_and_again_is_planned_no_more() -> None:
    driver = judged_swarm("a", "b", "c")
    for _ in range(2):
        case = driver.asked([*driver.offered("a", "b"), *driver.offered("c")])
        out = Verdict(1.0, "it changes nothing", ("b",))
        verdicts = [out if c.shares[0].peer == "b" else Verdict(1.0) for c in case.contributions]
        commit = driver.decide(driver.say(case, *verdicts))
        driver.attest("a", "b", "c")
    assert commit.plan.replica_of("b") is None
    assert driver.leader.promises.rests("b", 3)


def test_a_verdict_that_nobody_waits_for_any_more_is_nothing() -> None:
    driver = judged_swarm("a", "b")
    case = driver.asked(driver.offered("a", "b"))
    driver.do(Lead(False))
    assert driver.say(case, Verdict(1.0), Verdict(1.0)) == []
    again = driver.asked(driver.do(Lead(True)))
    assert again == case
    assert driver.say(dataclasses.replace(case, parent="another"), Verdict(1.0), Verdict(1.0)) == []
    assert replicas(driver.decide(driver.say(again, Verdict(1.0), Verdict(1.0)))) == [0, 1]
    assert driver.say(again, Verdict(1.0), Verdict(1.0)) == []


def test_where_nothing_counts_the_round_goes_on_until_it_may_end_without_work() -> None:
    driver = judged_swarm("a", "b")
    case = driver.asked(driver.offered("a", "b"))
    out = Verdict(1.0, "its norm 9 is over 10 times the median")
    assert driver.say(case, out, out) == []
    assert driver.at(1.0) == [], "it is not judged again"
    (question,) = [e.question for e in driver.at(GONE) if isinstance(e, MakePlan)]
    commit = driver.decide(driver.do(Planned(question, question.answer())))
    assert replicas(commit) == []
    assert [x.replica for x in commit.left_out] == [0, 1]


def test_a_case_has_what_the_log_says_of_the_rounds_before() -> None:
    driver = judged_swarm("a", "b")
    first = driver.asked(driver.offered("a", "b", norm=2.0))
    assert (first.last, first.medians) == ((), ())
    commit = driver.decide(driver.say(first, Verdict(1.0), Verdict(0.5)))
    driver.attest("a", "b")
    second = driver.asked(driver.offered("a", "b"))
    norms = [part_lists.total(share.norm for share in c.shares) * c.scale for c in commit.contributions]
    assert (second.last, second.medians) == (commit.contributions, (sum(norms) / 2,))
    assert second.parent == commit.digest


# --- open: failures and the deadline


def test_at_the_deadline_the_complete_ones_are_committed() -> None:
    driver = opened(FULLS)
    driver.offered("a")
    assert driver.at(DEADLINE - 0.1) == [Send(("b",), TimeUp(round=1), False)]
    commit = driver.decide(driver.at(DEADLINE))
    assert replicas(commit) == [0]
    assert left_out(commit) == [(1, "no offer after 60 s")]


# --- open: the time to train is over


MORE_STEPS = dataclasses.replace(M.train, inner_steps=100)


def asked(*peers: str) -> list[Effect]:
    """They are told that the time of round 1 is over."""
    return [Send(peers, TimeUp(round=1), False)]


def test_those_who_are_late_are_told_so_as_long_as_they_are_waited_upon() -> None:
    driver = opened({**FULLS, "c": FULL}, timing=QUICK)
    driver.offered("a")
    assert driver.at(19.9) == []
    assert driver.at(20.0) == asked("b", "c")
    assert driver.at(21.0) == asked("b", "c")
    assert driver.offered("b") == []
    assert driver.at(22.0) == asked("c")
    assert replicas(driver.decide(driver.offered("c"))) == [0, 1, 2]


def test_of_a_chain_those_are_told_who_have_not_offered() -> None:
    driver = opened({**FULLS, **CHAIN}, timing=QUICK)
    driver.offered("a", "b", "d")
    assert driver.at(20.0) == asked("c", "e")


def test_nobody_is_told_before_somebodys_work_is_complete() -> None:
    driver = opened(FULLS, timing=QUICK)
    assert driver.at(20.0) == []
    offer = driver.offer("a")
    driver.do(Received("a", offer), *(Held(n) for n in names_of(offer)[:-1]))
    assert driver.at(21.0) == []
    driver.do(Held(names_of(offer)[-1]))
    assert driver.at(22.0) == asked("b")


def test_a_node_that_does_not_lead_tells_nobody() -> None:
    driver = opened(FULLS, timing=QUICK)
    driver.do(Lead(False))
    driver.offered("a")
    assert driver.at(30.0) == []


@pytest.mark.parametrize(("complete", "seconds"), [("a", 36), ("ab", 28), ("abcd", 24)])
def test_the_round_is_decided_when_the_late_one_is_not_worth_more_waiting(complete: str, seconds: int) -> None:
    """It was given four steps, so three and a fifth are expected of it; the others have done four in 20 s."""
    driver = opened({**dict.fromkeys(complete, FULL), "late": FULL}, timing=QUICK)
    driver.offered(*complete)
    assert driver.at(seconds - 0.1) == asked("late")
    commit = driver.decide(driver.at(seconds + 0.1))
    assert left_out(commit) == [(len(complete), f"no offer after {seconds} s")]
    assert replicas(commit) == list(range(len(complete)))


def test_the_next_plan_gives_what_the_committed_steps_let_expect() -> None:
    driver = opened({**FULLS, "c": FULL}, train=MORE_STEPS)
    driver.offered("a", steps=40)
    driver.offered("b", steps=100)
    commit = driver.decide(driver.do(Received("c", Withdraw(round=1, reason="?"))))
    assert [(r.number, r.work.steps) for r in commit.plan.replicas] == [(0, 51), (1, 100), (2, 100)]
    driver.attest("a", "b", "c")
    driver.offered("a", steps=51)
    driver.offered("b", steps=20)
    commit = driver.decide(driver.do(Received("c", Withdraw(round=2, reason="?"))))
    assert [(r.number, r.work.steps) for r in commit.plan.replicas] == [(0, 100), (1, 26)], "who gave up twice rests"


def test_a_withdrawal_is_not_waited_upon() -> None:
    driver = opened({**FULLS, **CHAIN})
    driver.offered("a", "b", "c", "d")
    commit = driver.decide(driver.do(Received("e", Withdraw(round=1, reason="out of memory"))))
    assert replicas(commit) == [0, 1]
    assert left_out(commit) == [(2, "peer e: out of memory; no spare is ready")]


def test_withdrawals_of_strangers_and_of_other_rounds_are_ignored() -> None:
    driver = opened(FULLS)
    driver.do(Received("x", Withdraw(round=1, reason="?")), Received("a", Withdraw(round=2, reason="?")))
    assert replicas(driver.decide(driver.offered("a", "b"))) == [0, 1]


def test_who_is_gone_without_an_offer_is_not_waited_upon() -> None:
    driver = opened(FULLS)
    driver.offered("a")
    driver.now = GONE + 1
    commit = driver.decide(driver.do(Gone("b")))
    assert left_out(commit) == [(1, "peer b: gone")]
    assert [r.peers for r in commit.plan.replicas] == [("a",)]


def test_who_is_gone_after_its_offer_is_committed() -> None:
    driver = opened(FULLS)
    driver.offered("a")
    driver.now = GONE + 1
    assert driver.do(Gone("a")) == []
    commit = driver.decide(driver.offered("b"))
    assert replicas(commit) == [0, 1]
    assert [r.peers for r in commit.plan.replicas] == [("b",)]


def test_who_comes_back_within_the_round_is_waited_upon_again() -> None:
    driver = opened(FULLS)
    driver.now = GONE / 2
    driver.do(Gone("b"))
    driver.ready("b")
    driver.offered("a")
    assert driver.at(GONE + 1) == []
    assert replicas(driver.decide(driver.offered("b"))) == [0, 1]


def test_a_round_in_which_all_failed_commits_a_new_plan_after_a_while() -> None:
    driver = opened(FULLS)
    for peer in FULLS:
        assert driver.do(Received(peer, Withdraw(round=1, reason="no"))) == []
    assert driver.at(GONE - 0.1) == []
    commit = driver.decide(driver.at(GONE))
    assert (replicas(commit), [i for i, _ in left_out(commit)]) == ([], [0, 1])
    assert len(commit.plan.replicas) == 2


def test_with_nobody_left_the_leader_waits_and_goes_on_when_somebody_is_back() -> None:
    driver = opened(FULLS)
    driver.do(Gone("a"), Gone("b"))
    assert driver.at(5 * DEADLINE) == []
    assert [type(e) for e in driver.ready("a")] == [Propose]


def test_when_all_left_after_offering_the_work_is_committed_and_a_plan_follows_later() -> None:
    driver = opened(FULLS)
    driver.offered("a")
    driver.do(Gone("a"), Gone("b"))
    first = driver.decide(driver.at(GONE))
    assert (replicas(first), first.plan) == ([0], None)
    driver.ready("a")
    assert driver.attest("a") == []
    second = driver.decide(driver.at(driver.now + GONE))
    before = driver.commits[0].plan
    (replica,) = second.plan.replicas
    assert replica.work.slot == before.next_slot


def test_only_peers_that_attested_the_newest_state_are_planned() -> None:
    driver = opened({**FULLS, "c": FULL})
    driver.decide(driver.offered("a", "b", "c"))
    driver.attest("a", "b")
    driver.offered("a", "b")
    commit = driver.decide(driver.at(DEADLINE))
    assert left_out(commit) == [(2, "no offer after 60 s")]
    assert [r.peers for r in commit.plan.replicas] == [("a",), ("b",)]


def with_newcomer() -> Driver:
    """Round 1 of two full replicas is open, and c comes, which holds nothing yet."""
    driver = opened({**FULLS})
    driver.memory["c"] = FULL
    driver.ready("c")
    driver.attest("c", shards=())
    return driver


def test_a_newcomer_joins_the_plan_when_it_has_attested_all_that_it_will_train() -> None:
    driver = with_newcomer()
    plan = driver.decide(driver.offered("a", "b")).plan
    assert ([r.peers for r in plan.replicas], [r.peers for r in plan.forming]) == ([("a",), ("b",)], [("c",)])
    driver.attest("a", "b")
    driver.attest("c", shards=SHARDS[:-1])
    plan = driver.decide(driver.offered("a", "b")).plan
    assert ([r.peers for r in plan.replicas], [r.peers for r in plan.forming]) == ([("a",), ("b",)], [("c",)])


def test_nobody_waits_for_a_newcomer_that_fetches_its_shards() -> None:
    driver = with_newcomer()
    driver.decide(driver.offered("a", "b"))
    driver.attest("a", "b")
    driver.attest("c", shards=SHARDS)
    plan = driver.decide(driver.offered("a", "b")).plan
    assert [(r.number, r.peers) for r in plan.replicas] == [(0, ("a",)), (1, ("b",)), (2, ("c",))]
    assert plan.forming == ()


def test_a_newcomer_that_is_gone_forms_nothing() -> None:
    driver = with_newcomer()
    driver.decide(driver.offered("a", "b"))
    driver.do(Gone("c"))
    driver.attest("a", "b")
    plan = driver.decide(driver.offered("a", "b")).plan
    assert plan.forming == ()


def test_where_nobody_holds_what_a_plan_needs_it_is_begun_nevertheless() -> None:
    driver = with_newcomer()
    driver.do(Gone("a"), Gone("b"))
    plan = driver.decide(driver.at(GONE)).plan
    assert ([r.peers for r in plan.replicas], plan.forming) == ([("c",)], ())


# --- a leader that restarts


def test_a_restarted_leader_waits_for_everybody_before_it_takes_them_for_gone() -> None:
    before = opened(FULLS)
    driver = Driver(FULLS, before.manifest, tuple(before.commits))
    assert driver.ready("a") == []
    assert driver.attest("a") == []
    assert driver.offered("a") == []
    driver.ready("b")
    driver.attest("b")
    assert replicas(driver.decide(driver.offered("b"))) == [0, 1]


def test_a_restarted_leader_gives_up_on_who_does_not_come_back() -> None:
    before = opened(FULLS)
    driver = Driver(FULLS, before.manifest, tuple(before.commits))
    driver.ready("a")
    driver.attest("a")
    driver.offered("a")
    assert driver.at(GONE - 0.1) == []
    assert left_out(driver.decide(driver.at(GONE))) == [(1, "peer b: gone")]


# --- comparing states


def test_who_differs_from_the_majority_is_reported_once_and_left_out() -> None:
    driver = Driver({**FULLS, "c": FULL}, tiny.manifest(rounds=3, start_peers=3))
    driver.decide(driver.ready("a", "b", "c"))
    driver.attest("a", "b")
    assert driver.attest("c", digest="other") == [Report(0, "c", "embed"), Recompute(0, ("embed",))]
    assert driver.attest("c", digest="other") == []
    driver.offered("a", "c")
    commit = driver.decide(driver.offered("b"))
    assert replicas(commit) == [0, 1]
    assert left_out(commit) == [(2, "peer c: its state differs from the majority's")]
    assert [(d.peer, d.shard) for d in commit.diverged] == [("c", "embed")]
    assert commit.digests == {"embed": "same"}


def test_in_a_tie_nobody_is_right() -> None:
    driver = Driver(FULLS)
    driver.decide(driver.ready("a", "b"))
    driver.attest("a")
    assert driver.attest("b", digest="other") == [Recompute(0, ("embed",))]
    assert driver.do(Recomputed(0)) == [], "that is not cheap"
    driver.offered("a", "b")
    commit = driver.decide(driver.at(GONE))
    assert replicas(commit) == []
    assert [(d.peer, d.shard, d.refuted) for d in commit.diverged] == [("a", "embed", False), ("b", "embed", False)]
    assert commit.digests == {}


def test_in_a_tie_the_log_is_right_and_who_attests_otherwise_is_found_out() -> None:
    driver = Driver(FULLS)
    driver.decide(driver.ready("a", "b"))
    driver.attest("a")
    (asked,) = driver.attest("b", digest="other")
    assert isinstance(asked, Recompute)
    assert driver.do(asked.answer(lambda shard, round: "same")) == [Report(0, "b", "embed", refuted=True)]
    driver.offered("b")
    commit = driver.decide(driver.offered("a"))
    assert replicas(commit) == [0]
    assert commit.diverged == (Diverged(peer="b", shard="embed", refuted=True),)
    assert commit.digests == {"embed": "same"}
    assert driver.leader.standing.of("b").reputation == 0.5
    assert driver.leader.standing.of("a").reputation == 1.0


def test_the_log_is_right_however_many_attest_otherwise() -> None:
    driver = Driver({**FULLS, "c": FULL}, tiny.manifest(rounds=3, start_peers=3))
    driver.decide(driver.ready("a", "b", "c"))
    driver.attest("a", "b", digest="other")
    (reported, asked) = driver.attest("c")
    assert reported == Report(0, "c", "embed")
    found = driver.do(asked.answer(lambda shard, round: "same"))
    assert found == [Report(0, who, "embed", refuted=True) for who in "ab"]
    assert driver.attest("a", digest="another") == [], "it was told already"


def test_a_stranger_has_nothing_computed() -> None:
    driver = Driver(FULLS)
    driver.decide(driver.ready("a", "b"))
    driver.attest("a", "b")
    assert driver.attest("stranger", digest="other") == [Report(0, "stranger", "embed")]


def test_until_somebody_has_contributed_those_who_were_planned_first_are_not_believed() -> None:
    driver = Driver({**FULLS, "c": FULL})
    driver.decide(driver.ready("a", "b"))
    driver.attest("a", "b", digest="lie")
    driver.ready("c")
    (reported, asked) = driver.attest("c")
    assert (reported, asked) == (Report(0, "c", "embed"), Recompute(0, ("embed",)))
    assert driver.do(Recomputed(0, "embed", "same")) == [Report(0, who, "embed", refuted=True) for who in "ab"]
    commit = driver.decide(driver.at(GONE))
    assert commit.plan is not None
    assert "c" in commit.plan.peers
    assert [(d.peer, d.refuted) for d in commit.diverged] == [("a", True), ("b", True)]


def test_a_peer_has_so_much_computed_in_a_round() -> None:
    driver, asked = Driver(FULLS), 0
    driver.decide(driver.ready("a", "b"))
    names = layout.shard_names(driver.manifest.model)
    driver.do(Received("a", Attest(round=0, digests=dict.fromkeys(names, "same"))))
    for shard in names:
        lie = {**dict.fromkeys(names, "same"), shard: "other"}
        asked += sum(isinstance(effect, Recompute) for effect in driver.do(Received("b", Attest(round=0, digests=lie))))
    assert asked == 1 < MOST_RECOMPUTED, "whoever says otherwise than before has no weight"


def test_disputed_shards_are_computed_one_after_the_other_those_with_most_weight_against_most_first() -> None:
    memory = dict.fromkeys("abcdef", FULL)
    driver = Driver(memory, tiny.manifest(rounds=3, start_peers=len(memory)))
    driver.decide(driver.ready(*memory))
    driver.attest("a", "b", "c", shards=SHARDS)
    said = dict.fromkeys(SHARDS, "same")
    (_, first) = driver.do(Received("d", Attest(round=0, digests={**said, "head": "other"})))
    assert first == Recompute(0, ("head",))
    for peer in "ef":
        found = driver.do(Received(peer, Attest(round=0, digests={**said, "embed": "other"})))
        assert not [effect for effect in found if isinstance(effect, Recompute)], "one is computed"
    assert driver.do(Recomputed(0)) == [Recompute(0, ("embed",))], "the other could not be"
    assert driver.do(Recomputed(0, "embed", "same")) == [Report(0, peer, "embed", refuted=True) for peer in "ef"]


def test_a_shard_that_no_witness_attests_is_in_no_doubt_and_one_is_once_whoever_comes_first() -> None:
    for order in ("ab", "ba"):
        driver = opened({"a": FULL})
        driver.memory["b"] = FULL
        driver.ready("b")
        driver.attest("b", shards=())
        driver.decide(driver.offered("a"))
        asked = [
            effect
            for peer in order
            for effect in driver.attest(peer, digest=f"of {peer}", shards=("embed",) if peer == "a" else SHARDS)
        ]
        assert [effect for effect in asked if isinstance(effect, Recompute)] == [Recompute(1, ("embed",))]


def test_attestations_of_other_rounds_are_ignored() -> None:
    driver = opened(FULLS)
    driver.attest("a", round=1, digest="future")
    driver.attest("a", round=-1, digest="past")
    assert driver.leader.attestations.rounds == (0,)


# --- the end


def _last_round(driver: Driver) -> None:
    for _ in range(driver.manifest.rounds):
        commit = driver.decide(driver.offered("a", "b"))
        if commit.round < driver.manifest.rounds:
            driver.attest("a", "b")
    assert commit.plan is None


def test_the_run_is_over_when_every_member_attested_the_final_state() -> None:
    driver = opened(FULLS)
    _last_round(driver)
    assert driver.attest("a") == []
    assert driver.attest("b") == [Done(3)]
    assert driver.at(driver.now + DEADLINE) == []


def test_at_the_end_who_is_gone_gets_gone_after_and_who_is_slow_the_deadline() -> None:
    driver = opened(FULLS)
    _last_round(driver)
    driver.attest("a")
    assert driver.at(driver.now + GONE) == []
    assert driver.do(Gone("b")) == [Done(3)]

    driver = opened(FULLS)
    _last_round(driver)
    driver.attest("a")
    assert driver.at(driver.now + DEADLINE - 1) == []
    assert driver.at(driver.now + 1) == [Done(3)]


def test_a_leader_that_restarts_at_the_end_does_not_end_the_run_before_its_members_are_back() -> None:
    before = opened(FULLS)
    _last_round(before)
    driver = Driver(FULLS, before.manifest, tuple(before.commits))
    assert driver.do(Tick()) == []
    driver.ready("a", "b")
    driver.attest("a")
    assert driver.attest("b") == [Done(3)]


def test_a_difference_after_the_last_round_is_reported() -> None:
    driver = opened({**FULLS, "c": FULL})
    for _ in range(3):
        driver.decide(driver.offered("a", "b", "c"))
        if driver.leader.round <= 3:
            driver.attest("a", "b", "c")
    driver.attest("a", "b")
    assert driver.attest("c", digest="other") == [Report(3, "c", "embed"), Recompute(3, ("embed",)), Done(3)]


# --- uneven stages


def _measured(driver: Driver, **speeds: int) -> None:
    """Peers announce what they reached, over quick links."""
    for peer, reached in speeds.items():
        known = Candidate(peer=peer, memory_bytes=driver.memory[peer], up_bps=10**12, down_bps=10**12)
        assert driver.do(Ready(dataclasses.replace(known, speed_flops=reached))) == []


def test_a_stage_at_half_speed_loses_blocks_in_the_next_plan_and_is_named() -> None:
    driver = opened({"c": FULL - 1, "d": FULL - 1})
    _measured(driver, c=10**6, d=10**6)
    commit = driver.decide(driver.offered("c", "d"))
    (chain,) = commit.plan.replicas
    assert chain.blocks == (2, 2)
    driver.attest("c", "d", shards=SHARDS)
    _measured(driver, d=5 * 10**5)
    (proposal,) = driver.offered("c", "d")
    assert isinstance(proposal, Propose)
    assert proposal.commit.plan.replicas[0].blocks == (3, 1)
    follower = Leader(driver.manifest, driver.commits, (), 0.0)
    for leader, reason in (
        (driver.leader, "d is the slowest stage"),
        (follower, "its blocks were shared out anew"),
    ):
        (moved,) = leader.handle(Decided(proposal.commit), 0.0)
        assert isinstance(moved, Moved)
        assert (moved.round, moved.replica, moved.before.blocks, moved.after.blocks) == (3, 0, (2, 2), (3, 1))
        assert moved.reason.startswith(reason)


@pytest.mark.parametrize("digests", [{"block.99": "d"}, {"embed": "d" * 65}, {f"{i}": "" for i in range(999)}])
def test_what_is_attested_of_something_else_than_shards_gets_into_no_commit(digests: dict[str, str]) -> None:
    driver = opened(FULLS)
    driver.do(Received("enemy", Attest(round=0, digests=digests)))
    assert driver.leader.attestations.majority(0) == {"embed": "same"}
    assert "enemy" not in driver.leader.attestations.of(0)
