"""Admission: decrees, their lawfulness, and leader, voters and auditors (protocol/ledger/access.py)."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from peer.ui import monitor
from peer.ui.lines import Lines
from protocol.ledger import access, capacity, run_state, schedule
from protocol.round import fairness
from protocol.round.leader import Leader
from protocol.round.leader_events import DecreeSigned, Gone, Phase, Propose
from protocol.run.manifest import AdmissionSpec, Manifest
from protocol.wire import framing
from protocol.wire.commit import DOMAIN, Commit, Record
from protocol.wire.decree import ADMIT, BAN, CLOSE, LONGEST_REASON, OPEN, SET, Decree, Enacted, Limits, Motion, Schedule
from protocol.wire.encoding import seal
from protocol.wire.schema import packed
from tests.support import leader as leading
from tests.support import tiny
from tests.support.access import ONE, Desk, decree, signed

KEYS = tiny.OPERATORS[:4]
STRANGER = tiny.OPERATORS[4]
FOUR = tiny.manifest(operators=tuple(key.peer_id for key in KEYS), quorum=4)


def after(*wishes: Decree, manifest: Manifest = ONE) -> access.Access:
    found = access.of(manifest)
    for wish in wishes:
        found = found.after(signed(wish))
    return found


def first(manifest: Manifest, enacted: Enacted | None, count: int = 1) -> Commit:
    return tiny.commit(manifest, decrees=count, decree=enacted)


# --- the rule


def test_an_open_run_takes_everybody_who_is_not_banned() -> None:
    assert after().why_not("a") is None
    banned = after(decree(BAN, "a", reason="noise"))
    assert banned.why_not("a") == "it is banned: noise"
    assert banned.why_not("b") is None
    assert after(decree(BAN, "a"), decree(ADMIT, "a")).why_not("a") is None


def test_a_closed_run_takes_those_who_are_listed_or_admitted() -> None:
    keys = (STRANGER.peer_id,)
    listed = tiny.manifest(admission=AdmissionSpec(mode="listed", keys=keys))
    assert after(manifest=listed).why_not(STRANGER.peer_id) is None
    assert after(manifest=listed).why_not("a") == "the run is closed, and it is not admitted"
    assert after(decree(ADMIT, "a"), manifest=listed).why_not("a") is None
    assert after(decree(OPEN), manifest=listed).why_not("a") is None
    closed = after(decree(ADMIT, "a"), decree(CLOSE))
    assert [closed.why_not(peer) is None for peer in ("a", "b")] == [True, False]
    assert after(decree(BAN, STRANGER.peer_id), manifest=listed).why_not(STRANGER.peer_id) == "it is banned"


def test_the_manifest_says_it_and_bad_words_are_refused() -> None:
    assert tiny.manifest(admission=AdmissionSpec(mode="listed")).run_id != ONE.run_id
    with pytest.raises(ValueError, match="open, listed"):
        AdmissionSpec(mode="invited")
    with pytest.raises(ValueError, match="not an Ed25519 peer id"):
        AdmissionSpec(keys=("me",))


# --- what is lawful


def unlawful(enacted: Enacted | None, manifest: Manifest = FOUR, **changes: Any) -> str | None:
    return access.why_unlawful(manifest, None, dataclasses.replace(first(manifest, enacted), **changes))


def test_enough_members_have_to_sign_and_only_they_count() -> None:
    wish = decree(BAN, "a", manifest=FOUR)
    assert unlawful(signed(wish, *KEYS[:3])) is None
    assert unlawful(signed(wish, *KEYS)) is None
    assert unlawful(signed(wish, *KEYS[:2])) == "has a decree that too few of its members signed"
    assert unlawful(signed(wish, *KEYS[:3], STRANGER)) == "has a decree that too few of its members signed"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"number": 1}, "has a decree of another time"),
        ({"run": "f" * 64}, "has a decree of another time"),
        ({"action": "crown"}, "has a decree that says nothing"),
        ({"subject": ""}, "has a decree that says nothing"),
        ({"action": OPEN}, "has a decree that says nothing"),
        ({"action": SET, "subject": ""}, "has a decree that says nothing"),
    ],
)
def test_a_decree_is_of_its_place_in_the_log_and_says_something(changes: dict[str, Any], said: str) -> None:
    wish = dataclasses.replace(decree(BAN, "a", manifest=FOUR), **changes)
    assert unlawful(signed(wish, *KEYS)) == said


def test_decrees_are_counted_so_that_none_is_used_twice() -> None:
    wish = decree(BAN, "a", manifest=FOUR)
    enacted = signed(wish, *KEYS)
    assert unlawful(enacted, decrees=2) == "counts 2 decrees after 0"
    assert unlawful(None, decrees=1) == "counts 1 decrees after 0"
    head = first(FOUR, enacted)
    again = dataclasses.replace(head, round=1, parent=head.digest, decrees=2)
    assert access.why_unlawful(FOUR, head, again) == "has a decree of another time"


def test_the_longest_decree_has_its_place_in_every_commit() -> None:
    limits = Limits(probation=2**53, share=1 / 3, range_sessions=2**53, range_share=1 / 3)
    schedule = Schedule(rounds=2**53, total_steps=2**53, limits=limits)
    longest = Decree(
        run="f" * 64,
        number=2**53,
        action=CLOSE,
        subject="p" * 64,
        reason="\U0010ffff" * LONGEST_REASON,
        schedule=schedule,
    )
    names = [f"{i:064}" for i in range(16)]
    enacted = Enacted(decree=longest, signatures=dict.fromkeys(names, bytes(64)))
    with_it, without = (len(framing.pack_message({"c": packed(first(ONE, e))})) for e in (enacted, None))
    reserved = capacity.cost(capacity.longest(Enacted))
    assert with_it - without <= reserved.size


def test_whoever_reads_the_log_is_told() -> None:
    enacted = signed(decree(BAN, "a", reason="noise\x1b[2J"), tiny.OPERATOR)
    record = Record(commit=first(ONE, enacted), ballot=0, votes={})
    (event,) = monitor.round_events(record)
    line = Lines().of(event)[-1]
    assert line.endswith("decree of the operators: ban a: noise [2J")


# --- what nodes gather


def test_the_members_have_to_wish_the_same_and_the_newest_wish_counts() -> None:
    petitions, wish = access.SignedDecrees(), decree(BAN, "a", manifest=FOUR)
    other = dataclasses.replace(wish, subject="b")

    def sign(key: Any, what: Decree) -> None:
        petitions.add(key.peer_id, what, signed(what, key).signatures[key.peer_id])

    for key in KEYS[:2]:
        sign(key, wish)
    sign(KEYS[2], other)
    assert petitions.enacted(FOUR, None) is None
    sign(KEYS[2], wish)
    found = petitions.enacted(FOUR, None)
    assert found == signed(wish, *KEYS[:3])
    assert petitions.signers(wish) == tuple(sorted(key.peer_id for key in KEYS[:3]))
    later = dataclasses.replace(first(FOUR, found), decrees=1)
    assert petitions.enacted(FOUR, later) is None, "it was that number"


def test_a_node_takes_only_what_a_commit_can_have() -> None:
    """A signature of other bytes of the same decree would make an honest leader propose what all others refuse."""
    key, wish = tiny.OPERATOR, decree(BAN, "a")
    desk = Desk(Leader(ONE, (), (), 0.0))
    body = framing.pack_message({"t": "decree", **packed(wish), "more": 1})
    longer = framing.pack_message({"p": key.peer_id, "b": body, "s": key.sign(DOMAIN + body)})
    assert desk.hear(longer) == "that decree is signed in a form that no commit has"
    assert desk.refuses(wish, STRANGER) == f"{STRANGER.peer_id[-8:]} is not among the operators who decide rounds now"
    assert desk.refuses(dataclasses.replace(wish, run="f" * 64)) == "that decree is of another run"
    assert desk.refuses(dataclasses.replace(wish, action="crown")) == "that decree says nothing"
    assert desk.taken == []
    assert desk.refuses(wish) is None
    assert desk.taken == [DecreeSigned(key.peer_id, wish, signed(wish, key).signatures[key.peer_id])]


# --- the leader, voters, auditors


class Driver(leading.Driver):
    """A leader of an open run with two full replicas."""

    def __init__(self) -> None:
        super().__init__(leading.FULLS, tiny.manifest(rounds=5))
        self.decide(self.ready("a", "b"))
        self.attest("a", "b")

    def sign(self, action: str, subject: str = "", *, number: int = 0) -> list[Any]:
        wish, key = decree(action, subject, number=number, manifest=self.manifest), tiny.OPERATOR
        return self.do(DecreeSigned(key.peer_id, wish, signed(wish, key).signatures[key.peer_id]))


def planned(commit: Commit) -> set[str]:
    return set() if commit.plan is None else set(commit.plan.peers)


def test_who_is_banned_is_in_no_plan_from_the_same_commit_on_until_it_is_admitted() -> None:
    driver = Driver()
    assert driver.sign(BAN, "b") == []
    commit = driver.decide(driver.offered("a", "b"))
    assert commit.decree is not None
    assert (planned(commit), len(commit.contributions)) == ({"a"}, 2), "what it has done counts"
    driver.attest("a", "b")
    commit = driver.decide(driver.offered("a"))
    assert (planned(commit), commit.decree, commit.decrees) == ({"a"}, None, 1)
    driver.attest("a", "b")
    driver.sign(ADMIT, "b", number=1)
    commit = driver.decide(driver.offered("a"))
    assert (planned(commit), commit.decrees) == ({"a", "b"}, 2)


def test_a_decree_is_decided_where_nobody_is_left_to_train() -> None:
    driver = Driver()
    driver.sign(CLOSE)
    commit = driver.decide(driver.offered("a", "b"))
    assert planned(commit) == set()
    assert [e for e in driver.at(leading.GONE) if isinstance(e, Propose)] == []
    commit = driver.decide(driver.sign(ADMIT, "a", number=1))
    assert (planned(commit), commit.decrees) == (set(), 2), "a has not said yet what it holds"
    driver.attest("a", "b")
    commit = driver.decide(driver.at(driver.now + leading.GONE))
    assert planned(commit) == {"a"}


def test_a_ban_of_the_last_one_is_decided_without_a_plan() -> None:
    driver = Driver()
    driver.do(Gone("a"))
    driver.sign(BAN, "b")
    commit = driver.decide(driver.at(leading.DEADLINE))
    assert (planned(commit), commit.decrees) == (set(), 1)


# --- how long the run is


def longer(rounds: int, *, number: int = 0, steps: int = 10**6, manifest: Manifest = ONE) -> Decree:
    return decree(SET, number=number, manifest=manifest, schedule=Schedule(rounds=rounds, total_steps=steps))


def set_by(wish: Decree, head: Commit | None = None, **changes: Any) -> str | None:
    """What is wrong with a commit that brings it."""
    commit = dataclasses.replace(first(ONE, signed(wish, tiny.OPERATOR)), schedule=wish.schedule)
    if head is not None:
        commit = dataclasses.replace(commit, round=head.round + 1, parent=head.digest, decrees=head.decrees + 1)
    return access.why_unlawful(ONE, head, dataclasses.replace(commit, **changes))


def test_a_commit_says_how_long_the_run_is_as_it_was_decreed() -> None:
    wish = longer(ONE.rounds + 5)
    assert wish.is_sound
    assert not dataclasses.replace(wish, action=OPEN).is_sound
    otherwise = "says otherwise how long the run is than was decreed"
    assert set_by(wish) is None
    assert set_by(wish, schedule=None) == otherwise
    assert set_by(wish, schedule=Schedule(rounds=ONE.rounds + 6, total_steps=10**6)) == otherwise
    head = dataclasses.replace(first(ONE, signed(wish, tiny.OPERATOR)), schedule=wish.schedule)
    quiet = dataclasses.replace(first(ONE, None), round=1, parent=head.digest, schedule=wish.schedule)
    assert access.why_unlawful(ONE, head, quiet) is None
    assert access.why_unlawful(ONE, head, dataclasses.replace(quiet, schedule=None)) == otherwise
    assert schedule.of(ONE, quiet) == wish.schedule
    assert schedule.of(ONE, None) == Schedule(rounds=ONE.rounds, total_steps=ONE.train.total_steps)


def test_a_run_goes_on_for_a_round_at_least_and_is_not_over_already() -> None:
    late = "has a decree that comes too late, or is none: "
    head = dataclasses.replace(first(ONE, None, 0), round=ONE.rounds - 3)
    now = ONE.rounds - 2
    assert set_by(longer(now + 1, number=0), head) is None
    assert set_by(longer(now, number=0), head) == f"{late}round {now} is open: the run needs at least {now + 1} rounds"
    last = dataclasses.replace(head, round=ONE.rounds - 1)
    said = f"the run ends with round {ONE.rounds}, which is the last"
    assert set_by(longer(ONE.rounds + 9, number=0), last) == late + said
    no_warm_up = longer(ONE.rounds, steps=ONE.train.warmup_steps)
    warm = f"total_steps must be more than the {ONE.train.warmup_steps} of the warm-up"
    assert set_by(no_warm_up) == late + warm


@pytest.mark.parametrize(
    ("part", "said"), [(0.5, "at its lowest after 50.00% of the run"), (1.0, None), (2.0, "has gone 50.00% of its way")]
)
def test_a_schedule_that_does_not_end_with_the_run_is_said(part: float, said: str | None) -> None:
    steps = int(part * ONE.rounds * ONE.train.inner_steps)
    found = schedule.misfit(dataclasses.replace(ONE, train=dataclasses.replace(ONE.train, total_steps=steps)))
    assert (found is None) == (said is None)
    assert found is None or said in found  # type: ignore[operator]


def test_a_node_tells_an_operator_who_comes_too_late() -> None:
    head = dataclasses.replace(first(ONE, None, 0), round=ONE.rounds - 1, members=ONE.first_members)
    desk = Desk(Leader(ONE, (head,), (), 0.0))
    said = desk.refuses(longer(ONE.rounds + 1))
    assert said.startswith(f"that decree cannot be: the run ends with round {ONE.rounds}")
    assert desk.taken == []


def test_who_asks_whether_its_decree_was_decided_is_not_told_that_it_comes_too_late() -> None:
    """The run has one round more by it, which is open now: another decree could not set that."""
    wish = longer(2)
    brought = first(ONE, signed(wish, tiny.OPERATOR))
    head = dataclasses.replace(brought, round=1, schedule=wish.schedule, members=ONE.first_members)
    desk = Desk(Leader(ONE, (head,), (), 0.0))
    assert asyncio.run(desk.handler.receive(Motion(sealed=seal(tiny.OPERATOR, wish)))) == wish
    assert desk.refuses(longer(2, number=1)).startswith("that decree cannot be")


@pytest.mark.parametrize("change", [3, -2])
def test_a_run_is_as_long_as_was_decreed_last(change: int) -> None:
    driver = Driver()
    rounds, key = driver.manifest.rounds + change, tiny.OPERATOR
    wish = longer(rounds, manifest=driver.manifest)
    driver.do(DecreeSigned(key.peer_id, wish, signed(wish, key).signatures[key.peer_id]))
    commits = [driver.decide(driver.offered("a", "b"))]
    while commits[-1].plan is not None:
        driver.attest("a", "b")
        commits.append(driver.decide(driver.offered("a", "b")))
    assert commits[-1].round == rounds
    assert {commit.schedule for commit in commits} == {wish.schedule}
    assert driver.leader.phase is Phase.CLOSING


def test_what_is_wished_too_late_is_in_no_commit() -> None:
    driver = Driver()
    commit = driver.decide(driver.offered("a", "b"))
    while commit.round < driver.manifest.rounds - 1:
        driver.attest("a", "b")
        commit = driver.decide(driver.offered("a", "b"))
    driver.attest("a", "b")
    wish, key = longer(driver.manifest.rounds + 3, manifest=driver.manifest), tiny.OPERATOR
    driver.do(DecreeSigned(key.peer_id, wish, signed(wish, key).signatures[key.peer_id]))
    commit = driver.decide(driver.offered("a", "b"))
    assert (commit.round, commit.plan, commit.decree) == (driver.manifest.rounds, None, None)


def test_nobody_plans_beyond_what_was_decreed() -> None:
    """A voter takes it for a lie."""
    driver = Driver()
    commit = driver.decide(driver.offered("a", "b"))
    for rounds, lie in (
        (commit.round, "plans a round after the last one"),
        (commit.round - 1, "the run has 0 rounds only"),
    ):
        decreed = Schedule(rounds=rounds, total_steps=10**6)
        head = dataclasses.replace(commit, round=commit.round - 1, schedule=decreed)
        plan = driver.commits[0].plan
        begun = run_state.begin(driver.manifest)
        state = dataclasses.replace(
            begun, head=head, latest=plan, standing=dataclasses.replace(begun.standing, plan=plan)
        )
        sight = fairness.NodeView(state=state, chains=plan, wall=0.0)
        told = dataclasses.replace(commit, schedule=decreed)
        found = fairness.lie_in(sight, told)
        assert found.reason == lie
