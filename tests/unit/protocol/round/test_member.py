"""The volunteer: every row of its table, and every place at which it may restart."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from protocol.ledger import history
from protocol.ledger.history import ForkError, Tip
from protocol.round.member import COPIES, FORGIVEN, LEARN_SECONDS, RESEND_SECONDS, SETTLED_SECONDS, Ahead, is_same_work
from protocol.round.member_events import (
    Applied,
    Apply,
    Committed,
    Connected,
    Digested,
    Effect,
    EncodeUpdate,
    EndIn,
    Event,
    Failed,
    Finish,
    HoldShards,
    KeepInFeedback,
    LogCame,
    LogRead,
    Phase,
    ReadLog,
    RestoreFeedback,
    Send,
    ShardsHeld,
    Stop,
    Tick,
    Trained,
    TrainOrder,
    UpdateEncoded,
)
from protocol.run.manifest import Manifest, OuterSpec
from protocol.wire import encoding
from protocol.wire.commit import Commit, Diverged, Part
from protocol.wire.encoding import Message
from protocol.wire.plan import Plan, Work
from protocol.wire.session import Attest, Finished, LogRequest, TimeUp, Withdraw
from tests.support import tiny
from tests.support.member import DIGESTS, ME, TOKENS, Driver, M, contribution, log, offer, plan

SECONDS = M.timing.training_seconds


def told(effects: list[Effect]) -> list[Message]:
    return [e.message for e in effects if isinstance(e, Send)]


def training(round: int = 1) -> tuple[Driver, list[Commit]]:
    """A member in the middle of `round`, and the log that says so."""
    driver, commits = Driver(), log(round - 1)
    effects = driver.settle(driver.learn(*commits))
    assert TrainOrder(plan(round, ME), 0) in effects
    return driver, commits


def waiting_with_offer() -> Driver:
    driver, _ = training(1)
    driver.do(Trained(1, 4, TOKENS, 2.0), UpdateEncoded(1, offer(1)))
    assert driver.member.phase is Phase.WAITING
    return driver


# --- rows of the table


def test_the_first_commit_is_applied_held_and_trained_from_while_it_is_compared() -> None:
    driver, (first, *_) = Driver(), log(0)
    assert driver.learn(first) == [Apply(first, ())]
    assert driver.member.phase is Phase.APPLYING
    assert driver.do(Applied(0)) == [HoldShards(first)]
    assert driver.member.phase is Phase.HOLDING
    assert driver.do(ShardsHeld(0)) == [TrainOrder(plan(1, ME), 0), EndIn(1, SECONDS)]
    assert driver.member.phase is Phase.TRAINING
    assert driver.do(Digested(0, DIGESTS)) == [Send(Attest(round=0, digests=DIGESTS))]
    assert driver.member.phase is Phase.TRAINING


def test_commits_are_applied_one_by_one_and_only_shards_of_the_newest_plan_are_looked_for() -> None:
    driver, commits = Driver(), log(2)
    assert driver.learn(*commits) == [Apply(commits[0], ())]
    assert driver.do(Applied(0)) == [Apply(commits[1], ())]
    assert driver.do(Applied(1)) == [Apply(commits[2], ())]
    assert driver.do(Applied(2)) == [HoldShards(commits[2])]


def test_who_is_not_in_the_plan_waits() -> None:
    driver = Driver()
    effects = driver.settle(driver.learn(*log(0, planned=False)))
    assert [type(e) for e in effects] == [Apply, HoldShards, Send]
    assert driver.member.phase is Phase.WAITING


def test_a_newcomer_knows_it_once_no_more_commits_come() -> None:
    driver, commits = Driver(), log(1, planned=False)
    driver.settle(driver.learn(*commits[:1]))
    assert not driver.member.is_new(driver.now), "older commits may be coming"
    driver.now += SETTLED_SECONDS
    assert driver.member.is_new(driver.now)
    driver.learn(commits[1])
    driver.now += SETTLED_SECONDS
    assert not driver.member.is_new(driver.now), "it is being applied"

    driver = waiting_with_offer()
    driver.now += SETTLED_SECONDS
    assert not driver.member.is_new(driver.now), "it is in the plan"


def test_the_work_is_encoded_and_the_offer_told_only_when_it_is_durable() -> None:
    driver, _ = training(1)
    assert driver.do(Trained(1, 4, TOKENS, 2.0)) == [EncodeUpdate(plan(1, ME), 0, 4, TOKENS, 2.0)]
    assert driver.member.phase is Phase.ENCODING
    assert driver.do(UpdateEncoded(1, offer(1))) == [Send(offer(1))]
    assert driver.member.phase is Phase.WAITING


def test_failed_training_withdraws_and_keeps_its_work() -> None:
    driver, _ = training(1)
    withdraw = Withdraw(round=1, reason="the chain failed")
    assert driver.do(Failed(1, 2, "the chain failed")) == [Send(withdraw), KeepInFeedback(1)]
    assert driver.do(UpdateEncoded(1, None)) == []
    assert driver.member.phase is Phase.WAITING
    assert withdraw in told(driver.do(Connected()))


@pytest.mark.parametrize("end", [Trained(1, 2, 2, 2.0), Failed(1, 0, "stopped")])
def test_too_late_the_training_stops_and_its_work_is_kept_before_the_commit_is_applied(end: Event) -> None:
    driver, _ = training(1)
    commit = log(1)[1]
    assert driver.learn(commit) == [Stop(1)]
    assert driver.member.phase is Phase.STOPPING
    assert driver.do(Tick())[1:] == [Send(Attest(round=0, digests=DIGESTS))]
    assert driver.do(end) == [KeepInFeedback(1)]
    assert driver.do(UpdateEncoded(1, None)) == [Apply(commit, ())]


def test_a_commit_during_encoding_is_applied_after_it_and_the_offer_is_restored() -> None:
    driver, _ = training(1)
    driver.do(Trained(1, 4, TOKENS, 2.0))
    commit = log(1)[1]
    assert driver.learn(commit) == []
    assert driver.do(UpdateEncoded(1, offer(1))) == [Send(offer(1)), Apply(commit, ())]
    assert driver.do(Applied(1)) == [RestoreFeedback(offer(1)), HoldShards(commit)]


def test_a_committed_offer_is_not_restored() -> None:
    driver = waiting_with_offer()
    commit = log(1, mine=(1,))[1]
    effects = driver.settle(driver.learn(commit))
    assert [type(e) for e in effects] == [Apply, HoldShards, TrainOrder, EndIn, Send]


def test_an_offer_with_other_parts_is_not_the_committed_one() -> None:
    driver = waiting_with_offer()
    other = dataclasses.replace(offer(1), parts=(dataclasses.replace(offer(1).parts[0], digest="other"),))
    commit = dataclasses.replace(log(1)[1], contributions=(contribution(other),))
    assert RestoreFeedback(offer(1)) in driver.settle(driver.learn(commit))


def test_the_feedback_is_restored_before_anything_is_added() -> None:
    driver = waiting_with_offer()
    effects = driver.settle(driver.learn(log(1)[1]))
    assert [type(e) for e in effects] == [Apply, RestoreFeedback, HoldShards, TrainOrder, EndIn, Send]


def test_a_diverged_shard_is_rebuilt() -> None:
    driver = waiting_with_offer()
    wrong = (Diverged(peer=ME, shard="embed"), Diverged(peer="other", shard="head"))
    commit = dataclasses.replace(log(1)[1], diverged=wrong)
    assert driver.learn(commit) == [Apply(commit, ("embed",))]


def test_the_end() -> None:
    driver = Driver()
    effects = driver.settle(driver.learn(*log(3, planned=False)))
    assert told(effects) == [Attest(round=3, digests=DIGESTS)]
    assert driver.do(Finished(round=3)) == [Finish()]
    assert driver.member.phase is Phase.DONE
    assert driver.do(Finished(round=3), Tick())[0] == Send(LogRequest(after=3))
    assert not any(isinstance(e, Finish) for e in driver.do(Finished(round=3)))


def test_run_over_waits_for_the_last_round() -> None:
    driver = Driver()
    assert driver.do(Finished(round=3)) == []
    assert driver.settle(driver.learn(*log(3, planned=False)))[-1] == Finish()


# --- overlap: the next round is trained while this one is decided


AHEAD = dataclasses.replace(M, outer=OuterSpec(overlap=1))


def elsewhere(round: int) -> Plan:
    """Other text than `plan(round - 1, ME)` promised us."""
    (replica,) = plan(round, ME).replicas
    return plan(round, ME).replaced(dataclasses.replace(replica, work=dataclasses.replace(replica.work, slot=7)))


MINE = dataclasses.replace(plan(2, ME).replicas[0], number=1)
NEXT = dataclasses.replace(plan(2, ME), replicas=(tiny.replica(0, "a"), MINE))


@pytest.mark.parametrize(
    ("found", "same"),
    [
        (NEXT, True),
        (dataclasses.replace(NEXT, replicas=(MINE,)), True),
        (dataclasses.replace(NEXT, replicas=(tiny.replica(0, "a"),)), False),
        (NEXT.replaced(tiny.replica(1, "b", work=MINE.work)), False),
        (NEXT.replaced(tiny.replica(1, *MINE.peers, "b", work=MINE.work)), False),
        (NEXT.replaced(dataclasses.replace(MINE, work=Work())), False),
        (dataclasses.replace(NEXT, round=3), False),
        (None, False),
    ],
)
def test_the_same_work_is_the_same_replica_of_the_same_round_and_data(found: Plan | None, same: bool) -> None:
    order = TrainOrder(Plan(round=2, replicas=(MINE,)), 1)
    assert is_same_work(order, tiny.commit(M, plan=found)) is same
    assert not is_same_work(order, tiny.commit(M, plan=found, idle=1)), "at another place of the schedule"


def ahead() -> Driver:
    """A member whose offer of round 1 is out and that trains round 2 already."""
    driver = Driver(manifest=AHEAD)
    driver.settle(driver.learn(*log(0, run=AHEAD.run_id)))
    driver.do(Trained(1, 4, TOKENS, 2.0))
    expected = Plan(round=2, replicas=(dataclasses.replace(plan(2, ME).replicas[0], following=None),))
    assert driver.do(UpdateEncoded(1, offer(1))) == [Send(offer(1)), TrainOrder(expected, 0)]
    assert driver.member.phase is Phase.WAITING
    return driver


def decided(plan: Plan) -> Commit:
    """Round 1 with our offer; `plan` is the next."""
    return dataclasses.replace(log(1, mine=(1,), run=AHEAD.run_id)[1], plan=plan)


def test_ahead_of_the_commit_the_expected_plan_is_trained_and_goes_on_when_it_is_decided() -> None:
    driver = ahead()
    effects = driver.settle(driver.learn(decided(plan(2, ME))))
    assert [type(e) for e in effects] == [Apply, HoldShards, EndIn, Send]
    assert (driver.member.phase, driver.member.overlap.state) == (Phase.TRAINING, Ahead.NONE)
    assert driver.do(Trained(2, 4, TOKENS, 1.9)) == [EncodeUpdate(plan(2, ME), 0, 4, TOKENS, 1.9)]


def test_what_is_ready_ahead_is_encoded_only_upon_the_applied_commit() -> None:
    driver = ahead()
    assert driver.do(Trained(2, 4, TOKENS, 1.9)) == []
    effects = driver.settle(driver.learn(decided(plan(2, ME))))
    assert [type(e) for e in effects] == [Apply, HoldShards, EncodeUpdate, Send]


@pytest.mark.parametrize("end", [Failed(2, 1, "stopped"), Trained(2, 4, TOKENS, 1.9)])
@pytest.mark.parametrize("other", [elsewhere(2), plan(2, "other")])
def test_work_that_nobody_planned_is_stopped_and_forgotten(other: Plan, end: Event) -> None:
    driver = ahead()
    effects = driver.settle(driver.learn(decided(other)))
    assert [type(e) for e in effects] == [Apply, HoldShards, Stop, Send]
    planned = [TrainOrder(other, 0), EndIn(2, SECONDS)] if other.replica_of(ME) is not None else []
    assert driver.do(end) == planned


def test_ready_work_that_nobody_planned_is_forgotten() -> None:
    driver = ahead()
    driver.do(Trained(2, 4, TOKENS, 1.9))
    assert TrainOrder(elsewhere(2), 0) in driver.settle(driver.learn(decided(elsewhere(2))))


def test_who_failed_ahead_trains_when_the_plan_is_known() -> None:
    driver = ahead()
    assert driver.do(Failed(2, 1, "the chain failed")) == []
    assert TrainOrder(plan(2, ME), 0) in driver.settle(driver.learn(decided(plan(2, ME))))


def test_nothing_is_begun_ahead_of_a_commit_that_is_known_to_plan_otherwise() -> None:
    driver = Driver(manifest=AHEAD)
    driver.settle(driver.learn(*log(0, run=AHEAD.run_id)))
    driver.do(Trained(1, 4, TOKENS, 2.0))
    commit = decided(elsewhere(2))
    driver.learn(commit)
    assert driver.do(UpdateEncoded(1, offer(1))) == [Send(offer(1)), Apply(commit, ())]


def test_nothing_is_begun_after_the_last_round_or_after_a_restart() -> None:
    driver = Driver(applied=2, manifest=AHEAD)
    driver.settle(driver.learn(*log(2, run=AHEAD.run_id)))
    driver.do(Trained(3, 4, TOKENS, 2.0))
    assert driver.do(UpdateEncoded(3, offer(3))) == [Send(offer(3))]
    driver = Driver(applied=0, offer=offer(1), manifest=AHEAD)
    assert [type(e) for e in driver.settle(driver.learn(*log(0, run=AHEAD.run_id)))] == [HoldShards, Send]


# --- a round's time


def ends_of(effects: list[Effect]) -> list[EndIn]:
    return [e for e in effects if isinstance(e, EndIn)]


def next_end(*, encoding: float, apply: float = 0.0, size: int = 0, up_bps: int = 0, manifest: Manifest = M) -> EndIn:
    """When round 2 ends for a member whose offer of round 1, of `size` bytes, took `encoding` seconds to encode, and
    that applied the commit `apply` seconds after it was known."""
    driver = Driver(up_bps=up_bps, manifest=manifest)
    driver.settle(driver.learn(*log(0, run=manifest.run_id)))
    driver.now = 30.0
    driver.do(Trained(1, 4, TOKENS, 2.0))
    driver.now += encoding
    parts = (Part(shard="embed", digest=tiny.digest("payload 1"), size=size, norm=1.0),)
    driver.do(UpdateEncoded(1, dataclasses.replace(offer(1), parts=parts)))
    driver.now = 100.0
    commit = log(1, run=manifest.run_id)[1]
    (effect,) = driver.learn(commit)
    assert effect == Apply(commit, ())
    driver.now += apply
    driver.do(Applied(1))
    (end,) = ends_of(driver.do(ShardsHeld(1)))
    return end


def test_the_first_round_ends_when_its_time_is_over() -> None:
    driver = Driver()
    driver.now = 1000.0
    driver.learn(*log(0))
    driver.now += 5.0
    driver.do(Applied(0))
    assert ends_of(driver.do(ShardsHeld(0))) == [EndIn(1, SECONDS - 5.0)], (
        "it began with the commit, not with the shards"
    )


def test_the_next_one_ends_early_enough_to_encode_and_send_the_offer() -> None:
    assert next_end(encoding=0.0) == EndIn(2, SECONDS)
    assert next_end(encoding=3.0) == EndIn(2, SECONDS - 3.0)
    assert next_end(encoding=3.0, apply=7.0) == EndIn(2, SECONDS - 3.0 - 7.0)
    assert next_end(encoding=3.0, size=10**6, up_bps=8 * 10**6) == EndIn(2, SECONDS - 3.0 - COPIES * 1.0)
    assert next_end(encoding=3.0, size=10**6) == EndIn(2, SECONDS - 3.0), "an uplink that nobody knows"


def test_half_of_the_time_is_for_training_whatever_the_offer_costs() -> None:
    assert next_end(encoding=60.0) == EndIn(2, SECONDS / 2)
    assert next_end(encoding=0.0, size=10**6, up_bps=1) == EndIn(2, SECONDS / 2)


def test_a_round_that_was_applied_too_late_ends_at_once() -> None:
    assert next_end(encoding=3.0, apply=SECONDS) == EndIn(2, 0.0)


def test_a_run_may_say_how_long_its_rounds_are() -> None:
    quick = dataclasses.replace(M, timing=dataclasses.replace(M.timing, round_seconds=20.0))
    assert next_end(encoding=3.0, manifest=quick) == EndIn(2, 17.0)


def test_what_is_trained_ahead_has_no_end_before_its_round_begins() -> None:
    driver = ahead()
    driver.now = 10.0
    driver.learn(decided(plan(2, ME)))
    driver.now = 12.0
    effects = driver.do(Applied(1), ShardsHeld(1))
    assert ends_of(effects) == [EndIn(2, SECONDS - 2.0)]


def test_who_is_asked_for_its_work_ends_at_once() -> None:
    driver, _ = training(1)
    driver.now = SECONDS
    assert driver.do(TimeUp(round=1)) == [EndIn(1, 0.0)]
    assert driver.member.phase is Phase.TRAINING
    assert driver.do(TimeUp(round=1)) == [EndIn(1, 0.0)]
    assert driver.do(TimeUp(round=0), TimeUp(round=2)) == []


def test_who_had_to_be_asked_ends_its_next_rounds_earlier() -> None:
    """Its commits come late: by its own clock it would have ended 2 seconds after the others."""
    driver, _ = training(1)
    driver.now = SECONDS - 2.0
    driver.do(TimeUp(round=1), TimeUp(round=1), Trained(1, 4, TOKENS, 2.0), UpdateEncoded(1, offer(1)))
    ends = []
    for commit in log(3)[1:3]:
        round = commit.round
        ends += ends_of(driver.settle(driver.learn(commit)))
        driver.do(Trained(round + 1, 4, TOKENS, 2.0), UpdateEncoded(round + 1, offer(round + 1)))
    assert ends == [EndIn(2, SECONDS - FORGIVEN * 2.0), EndIn(3, SECONDS - FORGIVEN**2 * 2.0)]


def test_who_does_not_train_the_round_is_asked_in_vain() -> None:
    assert Driver().do(TimeUp(round=1)) == []
    assert waiting_with_offer().do(TimeUp(round=1)) == []
    driver, _ = training(1)
    driver.do(Trained(1, 4, TOKENS, 2.0))
    assert driver.do(TimeUp(round=1)) == []
    assert ahead().do(TimeUp(round=1), TimeUp(round=2)) == []


# --- what is lost is sent again


def test_every_connection_and_every_few_seconds_what_matters_is_sent_again() -> None:
    driver = waiting_with_offer()
    everything = [LogRequest(after=0), Attest(round=0, digests=DIGESTS), offer(1)]
    assert told(driver.do(Connected())) == everything[1:]
    assert driver.do(LogRead()) == [Send(everything[0])]
    driver.now = RESEND_SECONDS - 0.1
    assert driver.do(Tick()) == []
    driver.now = RESEND_SECONDS
    assert told(driver.do(Tick())) == everything


def test_an_old_offer_is_not_sent_again() -> None:
    driver = Driver(applied=0, offer=offer(2))
    assert told(driver.do(Connected())) == []


def test_a_gap_in_the_log_is_read() -> None:
    driver, commits = Driver(), log(2)
    assert driver.learn(commits[2]) == [ReadLog(Tip(-1, M.run_id, M.first_members))]
    assert (driver.member.head, driver.member.newest) == (-1, 2)


def came(*commits: Commit) -> LogCame:
    """A page of the log."""
    *before, last = commits
    raws = [encoding.encode_record(tiny.record(one)) for one in commits]
    parent = M.run_id if last.round == len(before) else log(commits[0].round - 1)[-1].digest
    return LogCame(tuple(history.read(M, Tip(commits[0].round - 1, parent, M.first_members), raws, "node")))


def test_while_the_log_is_read_no_state_is_fetched_and_live_commits_do_not_begin_it_again() -> None:
    driver, commits = Driver(), log(9)
    assert [type(e) for e in driver.do(Connected())] == [ReadLog]
    for live in (6, 7, 8):
        assert driver.learn(commits[live]) == [], "nothing is asked for again"
        driver.now += RESEND_SECONDS
        assert driver.do(Connected(), Tick()) == [], "nor for any other reason"
    assert driver.do(came(*commits[:4])) == []
    assert driver.do(came(*commits[4:9])) == []
    assert driver.learn(commits[9]) == [], "it is known at once"
    effects = driver.do(LogRead())
    assert effects[0] == Send(LogRequest(after=9))
    assert effects[1] == Apply(commits[0], ())
    assert driver.do(Applied(9)) == [HoldShards(commits[9])], "who holds nothing has nothing to apply"


def test_who_trains_goes_on_while_the_log_is_read_after_a_new_session() -> None:
    driver = Driver(applied=0)
    driver.settle(driver.learn(*log(0, planned=False)))
    driver.do(Connected())
    commit = log(1)[1]
    driver, _ = training(1)
    driver.do(Connected())
    assert driver.member.phase is Phase.TRAINING
    assert driver.learn(commit) == [Stop(1)]


def test_pages_that_follow_another_commit_are_asked_for_by_the_session() -> None:
    driver, commits = Driver(), log(5)
    driver.settle(driver.learn(*commits[:2]))
    driver.do(Connected())
    other = [dataclasses.replace(commits[2], parent="0" * 64)]
    for one in commits[3:]:
        other.append(dataclasses.replace(one, parent=other[-1].digest))
    raws = [encoding.encode_record(tiny.record(one)) for one in other]
    page = LogCame(tuple(history.read(M, Tip(1, "0" * 64, M.first_members), raws, "node")))
    assert driver.do(page) == [Send(LogRequest(after=1))]
    assert driver.member.head == 1


def test_a_commit_heard_twice_does_nothing() -> None:
    driver = waiting_with_offer()
    commits = log(1)
    driver.settle(driver.learn(commits[1]))
    assert driver.learn(*commits) == []


@pytest.mark.parametrize("change", [{"time": 9.0}, {"plan": None}])
def test_two_commits_for_one_round_are_a_fork(change: dict[str, Any]) -> None:
    driver, commits = training(1)
    with pytest.raises(ForkError, match="round 0 has two decided commits"):
        driver.learn(dataclasses.replace(commits[0], **change))


def test_a_commit_without_a_majority_does_not_count() -> None:
    driver, _ = training(1)
    assert driver.do(Committed(tiny.record(log(1)[1], tiny.OPERATORS[1], tiny.OPERATORS[2]))) == []
    assert driver.member.head == 0


@pytest.mark.parametrize("change", [{"parent": "somebody else"}, {"run": "another run"}])
def test_a_commit_that_does_not_follow_is_a_fork(change: dict[str, Any]) -> None:
    driver, _ = training(1)
    with pytest.raises(ForkError, match=r"does not follow|another run"):
        driver.learn(dataclasses.replace(log(1)[1], **change))


@pytest.mark.parametrize("event", [Trained(7, 4, TOKENS, None), Failed(7, 1, "old")])
def test_answers_of_another_round_are_ignored(event: Event) -> None:
    driver, _ = training(1)
    assert driver.do(event) == []
    assert Driver().do(event) == []


# --- restarts


def test_restarted_in_training_it_trains_the_round_again() -> None:
    driver = Driver(applied=0)
    effects = driver.settle(driver.learn(*log(0)))
    assert [type(e) for e in effects] == [HoldShards, TrainOrder, EndIn, Send]


def test_restarted_with_a_durable_offer_it_tells_it_again_and_does_not_train() -> None:
    driver = Driver(applied=0, offer=offer(1))
    assert told(driver.do(Connected(), LogRead())) == [offer(1), LogRequest(after=-1)]
    effects = driver.settle(driver.learn(*log(0)))
    assert [type(e) for e in effects] == [HoldShards, Send]


def test_a_round_whose_work_is_durable_is_not_trained_again_from_an_older_state() -> None:
    driver = Driver(feedback_round=2)
    assert not any(isinstance(e, TrainOrder) for e in driver.settle(driver.learn(*log(0))))
    commits = log(2)
    assert TrainOrder(plan(3, ME), 0) in driver.settle(driver.learn(*commits))


@pytest.mark.parametrize("applied", [-1, 0, 1, 2])
@pytest.mark.parametrize("committed", [False, True])
def test_wherever_it_restarts_an_offer_is_resolved_once_and_before_training(applied: int, committed: bool) -> None:
    """The state may be older or newer than the offer; the log is what decides."""
    driver = Driver(applied=applied, offer=offer(1))
    commits = log(2, mine=(1,) if committed else ())
    effects = driver.settle(driver.learn(*commits))
    kinds = [type(e) for e in effects]
    assert kinds.count(RestoreFeedback) == (0 if committed else 1)
    assert [e.commit.round for e in effects if isinstance(e, Apply)] == list(range(applied + 1, 3))
    assert [k for k in kinds if k is not Send][-2:] == [TrainOrder, EndIn]
    assert driver.member.applied == 2


def test_a_state_newer_than_the_known_log_waits_for_the_log() -> None:
    driver = Driver(applied=2, offer=offer(2))
    assert driver.settle(driver.learn(*log(1))) == []
    effects = driver.settle(driver.learn(log(2)[2]))
    assert [type(e) for e in effects] == [RestoreFeedback, HoldShards, TrainOrder, EndIn, Send]


def test_restarted_at_the_end_it_attests_again_and_finishes() -> None:
    driver = Driver(applied=3)
    effects = driver.settle(driver.learn(*log(3)))
    assert told(effects) == [Attest(round=3, digests=DIGESTS)]
    assert driver.do(Finished(round=3)) == [Finish()]


# --- what a plan may give


@pytest.mark.parametrize(
    "work",
    [
        Work(steps=M.train.inner_steps + 1, micro_batches=2),
        Work(steps=4, micro_batches=M.train.micro_batches + 1),
        Work(steps=2**63, micro_batches=2**63),
        Work(slot=2**63, steps=4, micro_batches=2),
    ],
)
@pytest.mark.parametrize("field", ["work", "following"])
def test_a_plan_that_gives_more_than_the_manifest_says_is_not_followed(field: str, work: Work) -> None:
    """The members decide rounds, not sizes: micro-batches are memory."""
    (first,) = log(0)
    (replica,) = plan(1, ME).replicas
    greedy = dataclasses.replace(first, plan=plan(1, ME).replaced(dataclasses.replace(replica, **{field: work})))
    with pytest.raises(ForkError, match="more work than the manifest allows"):
        Driver().learn(greedy)


# --- who comes when the run is over


def test_a_newcomer_to_a_run_that_is_over_reads_the_log_and_ends_at_once() -> None:
    driver = Driver()
    driver.do(Finished(round=3))
    effects = driver.learn(*log(2, planned=False))
    assert not any(isinstance(e, Apply | HoldShards) for e in effects), "it fetches nothing of rounds that are over"
    assert driver.learn(log(3, planned=False)[3])[-1] == Finish()
    assert driver.member.applied == -1


def test_one_node_that_says_that_the_run_is_over_keeps_nobody_from_it() -> None:
    driver = Driver()
    driver.do(Finished(round=3))
    assert driver.learn(*log(1)) == []
    driver.now += LEARN_SECONDS
    assert [type(e) for e in driver.settle(driver.do(Tick())) if isinstance(e, TrainOrder)] == [TrainOrder]


def test_a_member_of_a_run_that_is_over_does_not_wait_for_ever_for_a_node_that_says_so() -> None:
    driver = Driver()
    driver.settle(driver.learn(*log(3, planned=False)))
    driver.now += M.timing.round_deadline - 1.0
    assert Finish() not in driver.do(Tick())
    driver.now += 1.0
    assert Finish() in driver.do(Tick())
