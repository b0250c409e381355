"""What a peer takes for the run's history: nothing before it is confirmed, and what the operators undo no more (protocol/ledger/history.py)."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from protocol.ledger import ousting, stretches
from protocol.ledger.history import MAX_RIVALS, ForkError, History
from protocol.ledger.stretches import Tip
from protocol.round.member import Member
from protocol.round.member_events import (
    Applied,
    Apply,
    Certified,
    Committed,
    Effect,
    GoBack,
    HoldShards,
    LogCame,
    ReadLog,
    Send,
    ShardsHeld,
    TrainOrder,
)
from protocol.wire import encoding
from protocol.wire.ballot import Confirmed
from protocol.wire.commit import DOMAIN, Commit, Record, confirmation_body, voted_twice
from protocol.wire.decree import OUST, Board, Decree, Enacted, Operator
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from protocol.wire.session import LogRequest
from tests import tiny

KEYS = tiny.OPERATORS[:3]
A, B, C = (key.peer_id for key in KEYS)
THREE = tiny.manifest(operators=(A, B, C), quorum=3)
FOUR = tiny.manifest(operators=tuple(key.peer_id for key in tiny.OPERATORS[:4]), quorum=4)


def commit(before: Commit | None, time: float = 0.0, **changes: object) -> Commit:
    """The next one."""
    round = 0 if before is None else before.round + 1
    values: dict[str, object] = {
        "run": THREE.run_id, "round": round, "parent": before.digest if before else THREE.run_id, "time": time,
        "contributions": (), "left_out": (), "diverged": (), "digests": {}, "plan": None, "leader": A,
        "members": before.members if before else (A, B, C), "decrees": before.decrees if before else 0,
        "out": before.out if before else (),
    }  # fmt: skip
    return Commit(**{**values, **changes})  # type: ignore[arg-type]


def by(one: Commit, *keys: int) -> Record:
    return tiny.record(one, *(KEYS[key] for key in keys or (0, 1)))


def certificate(one: Commit, *keys: int) -> Confirmed:
    body = confirmation_body(one.run, one.round, one.digest)
    return Confirmed(
        round=one.round, digest=one.digest, by={KEYS[k].peer_id: KEYS[k].sign(body) for k in keys or (0, 1)}
    )


def ousted(before: Commit | None, first: Commit, second: Commit, time: float = 9.0) -> Record:
    """The round of two commits for which A voted, decided anew by the others."""
    (proof,) = voted_twice(by(first, 0, 1), by(second, 0, 2))
    number, round = (0, 0) if before is None else (before.decrees, before.round + 1)
    decree = Decree(run=THREE.run_id, number=number, action=OUST, subject=A, proof=proof, after=round - 1)
    body = DOMAIN + encoding.encode(decree)
    enacted = Enacted(decree=decree, signatures={key.peer_id: key.sign(body) for key in KEYS[1:]})
    out = ousting.out_after(before, enacted)
    anew = commit(before, time, decree=enacted, decrees=number + 1, out=out, leader=B, members=(B, C))
    return by(anew, 1, 2)


def test_a_commit_counts_when_enough_have_confirmed_it_or_a_later_one() -> None:
    history = History(THREE)
    first = commit(None)
    second = commit(first)
    for one in (first, second):
        assert history.learn(by(one)) is None
    assert (history.head, history.known) == (-1, 1)
    history.confirm(certificate(second, 0))
    assert history.head == -1, "one is not enough"
    history.confirm(certificate(second))
    assert history.commits == {0: first, 1: second}


def test_a_certificate_may_come_before_its_commit() -> None:
    history = History(THREE)
    first = commit(None)
    assert history.confirm(certificate(first)) == -1, "the log is asked"
    history.learn(by(first))
    assert history.head == 0


def test_of_two_decided_commits_the_one_counts_that_is_confirmed() -> None:
    history = History(THREE)
    first, second = commit(None, 1.0), commit(None, 2.0)
    history.learn(by(first, 0, 1))
    assert history.learn(by(commit(second), 0, 2)) == -1, "it follows another one: that is asked for"
    history.learn(by(second, 0, 2))
    assert history.is_split
    assert history.head == -1
    history.confirm(certificate(second, 0, 2))
    assert history.commits == {0: second}
    history.learn(by(first, 0, 1))
    with pytest.raises(ForkError, match="two confirmed commits"):
        history.confirm(certificate(first, 0, 1))


def test_as_many_rivals_as_there_may_be_are_kept() -> None:
    history = History(THREE)
    history.learn(by(commit(None)))
    for time in range(1, 3 * MAX_RIVALS):
        history.learn(by(commit(None, float(time))))
    assert len(history.rivals) == MAX_RIVALS


def test_where_members_bear_liars_what_is_decided_counts() -> None:
    history = History(FOUR)
    names = FOUR.first_members
    first = commit(None, run=FOUR.run_id, parent=FOUR.run_id, members=names)
    history.learn(tiny.record(first, *tiny.OPERATORS[:3]))
    assert history.head == 0
    with pytest.raises(ForkError, match="two decided commits"):
        history.learn(tiny.record(dataclasses.replace(first, time=4.0), *tiny.OPERATORS[:3]))


def test_what_the_others_decide_anew_counts_instead_of_both() -> None:
    history = History(THREE)
    zero = commit(None)
    first, second = commit(zero, 1.0), commit(zero, 2.0)
    history.learn(by(zero))
    history.learn(by(first, 0, 1))
    history.learn(by(second, 0, 2))
    anew = ousted(zero, first, second)
    history.learn(anew)
    assert history.commits == {0: zero, 1: anew.commit}
    assert history.undone is None, "nothing that counted was undone"
    after = commit(anew.commit, leader=C)
    history.learn(by(after, 1, 2))
    assert history.commits[2] == after, "two of two need no certificate"
    history.learn(by(first, 0, 1))
    history.confirm(certificate(first))
    assert history.commits[1] == anew.commit, "what was undone comes back by nothing"


def test_a_peer_that_has_applied_one_of_them_goes_back() -> None:
    history = History(THREE)
    zero = commit(None)
    first, second = commit(zero, 1.0), commit(zero, 2.0)
    later = commit(first)
    for one in (zero, first, later):
        history.learn(by(one))
    history.confirm(certificate(later))
    assert history.head == 2
    anew = ousted(zero, first, second)
    history.learn(anew)
    assert history.commits == {0: zero, 1: anew.commit}
    assert history.undone == 0


def test_an_ousting_with_a_false_proof_changes_nothing() -> None:
    history = History(THREE)
    zero = commit(None)
    first, second = commit(zero, 1.0), commit(zero, 2.0)
    for one in (zero, first):
        history.learn(by(one))
    history.confirm(certificate(first))
    good = ousted(zero, first, second).commit
    assert good.decree is not None
    assert good.decree.decree.proof is not None
    false = dataclasses.replace(good.decree.decree.proof, signed=b"!" * 64)
    decree = dataclasses.replace(good.decree.decree, proof=false)
    body = DOMAIN + encoding.encode(decree)
    enacted = Enacted(decree=decree, signatures={key.peer_id: key.sign(body) for key in KEYS[1:]})
    history.learn(by(dataclasses.replace(good, decree=enacted), 1, 2))
    assert history.commits == {0: zero, 1: first}


class Driver:
    """A member of which the effects are answered at once."""

    def __init__(self) -> None:
        self.member = Member(THREE, "me")
        self.effects: list[Effect] = []

    def do(self, *events: object) -> list[Effect]:
        todo, seen = list(events), []
        while todo:
            for effect in self.member.handle(todo.pop(0), 0.0):  # type: ignore[arg-type]
                seen.append(effect)
                if isinstance(effect, Apply):
                    todo.append(Applied(effect.commit.round))
                if isinstance(effect, HoldShards):
                    todo.append(ShardsHeld(effect.commit.round))
        return seen


def planned(before: Commit | None, time: float, **changes: object) -> Commit:
    replica = ReplicaSpec(stages=(StageSpec(peer="me", first=0, last=tiny.LAYERS),))
    round = 0 if before is None else before.round + 1
    return commit(before, time, plan=Plan(round=round + 1, replicas=(replica,)), **changes)


def test_a_peer_applies_nothing_before_it_is_confirmed() -> None:
    driver = Driver()
    zero = planned(None, 0.0)
    assert driver.do(Committed(by(zero))) == []
    told = [type(e) for e in driver.do(Certified(certificate(zero)))]
    assert told[:2] == [Apply, HoldShards]
    assert TrainOrder in told
    first, second = planned(zero, 1.0), planned(zero, 2.0)
    effects = driver.do(Committed(by(first, 0, 1)), Committed(by(second, 0, 2)), Certified(certificate(first, 0)))
    assert not any(isinstance(e, Apply) for e in effects)
    assert driver.member.applied == 0


def gone_back() -> Driver:
    """It has applied a round that was undone, and hears of what is not known."""
    driver = Driver()
    zero = commit(None)
    first, second = commit(zero, 1.0), commit(zero, 2.0)
    driver.do(Committed(by(zero)), Committed(by(first)), Certified(certificate(first)))
    anew = ousted(zero, first, second)
    driver.do(Committed(anew), Certified(certificate(commit(commit(anew.commit)), 1, 2)))
    return driver


def test_a_peer_that_had_applied_a_round_that_was_undone_goes_back_and_applies_what_counts() -> None:
    driver = Driver()
    zero = commit(None)
    first, second = commit(zero, 1.0), commit(zero, 2.0)
    driver.do(Committed(by(zero)), Committed(by(first)), Certified(certificate(first)))
    assert driver.member.applied == 1
    anew = ousted(zero, first, second)
    effects = driver.do(Committed(anew))
    assert [type(e) for e in effects] == [GoBack, Apply, HoldShards]
    assert effects[0] == GoBack(0)
    assert isinstance(effects[1], Apply)
    assert effects[1].commit == anew.commit
    assert driver.member.applied == 1


def on_a_rival() -> Driver:
    """It knows a commit that does not count, and hears what follows the one that does: from a session, and from the log."""
    driver = Driver()
    zero, rival = commit(None, 1.0), commit(None, 2.0)
    first = commit(zero)
    driver.do(Committed(by(rival)))
    assert driver.do(Committed(by(first))) == [Send(LogRequest(after=-1))]
    raws = [encoding.encode_record(by(one)) for one in (first, commit(first))]
    tip = Tip(0, zero.digest, zero.members)
    assert driver.do(LogCame(tuple(stretches.read(THREE, tip, raws, A)))) == [Send(LogRequest(after=-1))]
    return driver


def test_what_follows_a_rival_makes_the_peer_ask_for_the_one_that_counts() -> None:
    driver = on_a_rival()
    zero = commit(None, 1.0)
    driver.do(Committed(by(zero)), Certified(certificate(zero)))
    assert driver.member.commits == {0: zero}


def long_log(rounds: int, **changes: object) -> list[Commit]:
    log = [commit(None)]
    while len(log) < rounds:
        log.append(commit(log[-1], float(len(log)), **changes))
    return log


def test_a_stretch_of_the_log_counts_when_its_last_commit_is_confirmed() -> None:
    history, log = History(THREE), long_log(6)
    raws = [encoding.encode_record(by(one)) for one in log]
    (stretch,) = stretches.read(THREE, history.tip, raws, A)
    assert [packed.round for packed in stretch.before] == [0, 1, 2, 3, 4]
    assert history.learn_stretch(stretch) is None
    assert (history.head, history.known) == (-1, 5)
    history.confirm(certificate(log[3]))
    assert history.commits == dict(enumerate(log[:4]))
    assert history.known == 5
    assert history.learn_stretch(stretch) is None, "what is known already changes nothing"
    history.confirm(certificate(log[5]))
    assert history.commits == dict(enumerate(log))


@pytest.mark.parametrize("liars", [(0,), ()])
def test_one_record_without_enough_votes_proves_nothing(liars: tuple[int, ...]) -> None:
    log = long_log(4)
    raws = [encoding.encode_record(by(one)) for one in log[:3]]
    raws.append(encoding.encode_record(tiny.record(log[3], *(KEYS[key] for key in liars or (0,)))))
    with pytest.raises(encoding.MessageError, match="round 3 lacks the votes of a majority"):
        list(stretches.read(THREE, History(THREE).tip, raws, A))


def test_a_forged_commit_that_names_other_members_is_proved_by_none_of_them() -> None:
    """A forger who signs as the members that his own commit names: those who decide it are the ones before."""
    log = long_log(2)
    forged = commit(log[1], members=(A,))
    after = commit(forged, members=(A,))
    raws = [encoding.encode_record(by(one)) for one in log]
    raws += [encoding.encode_record(tiny.record(one, KEYS[0])) for one in (forged, after)]
    history = History(THREE)
    read = []
    with contextlib.suppress(encoding.MessageError):
        for stretch in stretches.read(THREE, history.tip, raws, A):
            read.append(stretch)
    for stretch in read:
        with contextlib.suppress(ForkError):
            history.learn_stretch(stretch)
    assert history.known == 1


@pytest.mark.parametrize(
    "change", [{"parent": "0" * 64}, {"run": "0" * 64}, {"time": 99.0}, {"leader": B}, {"contributions": ()}]
)
def test_a_commit_that_was_changed_is_proved_by_no_successor(change: dict[str, object]) -> None:
    log = long_log(5)
    changed = dataclasses.replace(log[2], **change)  # type: ignore[arg-type]
    if changed == log[2]:
        changed = dataclasses.replace(log[2], time=98.0)
    raws = [encoding.encode_record(by(one)) for one in (*log[:2], changed, *log[3:])]
    history = History(THREE)
    with contextlib.suppress(encoding.MessageError, ForkError):
        for stretch in stretches.read(THREE, history.tip, raws, A):
            history.learn_stretch(stretch)
    assert history.known <= 2


@pytest.mark.parametrize("place", [0, 2])
def test_who_operates_the_run_changes_by_no_commit_that_brings_no_decree(place: int) -> None:
    """Not even where those who decide have voted for it: each commit of a stretch says what the one before it says."""
    log = long_log(2)
    while len(log) < 7:
        board = (
            Board(operators=tuple(Operator(peer=who) for who in (A, B, C)), quorum=3) if len(log) >= 2 + place else None
        )
        log.append(commit(log[-1], board=board))
    history = History(THREE)
    raws = [encoding.encode_record(by(one, 0, 1, 2)) for one in log]
    for page in (raws[:2], raws[2:]):
        with contextlib.suppress(ForkError, encoding.MessageError):
            for stretch in stretches.read(THREE, history.tip, page, A):
                history.learn_stretch(stretch)
    assert history.known <= 1 + place


def test_an_operator_who_is_taken_out_ends_a_stretch() -> None:
    zero = commit(None)
    first, second = commit(zero, 1.0), commit(zero, 2.0)
    anew = ousted(zero, first, second)
    log, records = [zero, anew.commit], [by(zero), anew]
    for _ in range(3):
        log.append(commit(log[-1], 3.0 + len(log), leader=B))
        records.append(by(log[-1], 1, 2))
    raws = [encoding.encode_record(record) for record in records]
    history = History(THREE)
    found = list(stretches.read(THREE, history.tip, raws, A))
    assert [(len(s.before), s.last.commit.round) for s in found] == [(0, 0), (0, 1), (2, 4)]
    for stretch in found:
        history.learn_stretch(stretch)
    assert history.commits == dict(enumerate(log)), "two of two confirm nothing"


def test_a_certificate_of_what_is_not_known_has_the_log_asked_for() -> None:
    driver = Driver()
    assert driver.do(Certified(certificate(commit(commit(None))))) == [ReadLog(driver.member.history.tip)]
