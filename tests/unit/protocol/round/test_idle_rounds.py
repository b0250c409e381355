"""Rounds without work: decrees, newcomers and failures cost neither a round nor learning rate (schedule.py)."""

from __future__ import annotations

import dataclasses

import pytest

from protocol.ledger import schedule
from protocol.round.leader_events import DecreeSigned, JoinRequest, Phase, Received
from protocol.run.manifest import AdmissionSpec, Manifest
from protocol.wire.commit import Commit
from protocol.wire.decree import ADMIT, CLOSE, SET, Decree, Schedule
from protocol.wire.session import Withdraw
from tests.support import tiny
from tests.support.access import decree, signed
from tests.support.invitations import FRIENDS, ticket
from tests.support.leader import FULL, GONE, Driver

NAMES = ("a", "b")


class Run(Driver):
    """A run of `rounds` rounds with an operator; commits name who decides, as the quorum writes them."""

    def __init__(self, rounds: int = 3, mode: str = "open") -> None:
        manifest = tiny.manifest(rounds=rounds, start_peers=2, admission=AdmissionSpec(mode=mode))
        super().__init__(dict.fromkeys(NAMES, FULL), manifest)

    def wish(self, action: str, subject: str = "", number: int = 0, lasts: Schedule | None = None) -> DecreeSigned:
        made: Decree = decree(action, subject, number=number, manifest=self.manifest, schedule=lasts)
        (signature,) = signed(made, tiny.OPERATOR).signatures.values()
        return DecreeSigned(tiny.OPERATOR.peer_id, made, signature)

    def train(self) -> Commit:
        """A round in which everybody brings work."""
        self.attest(*NAMES)
        return self.decide(self.offered(*NAMES))

    def fail(self) -> Commit:
        """A round of which all replicas withdraw."""
        self.attest(*NAMES)
        self.do(*(Received(peer, Withdraw(round=self.leader.round, reason="?")) for peer in NAMES))
        return self.decide(self.at(self.now + GONE))


def place(manifest: Manifest, commits: list[Commit], round: int) -> int:
    """Where a peer takes the learning rate of `round` from."""
    return schedule.steps_before(manifest, round, commits[round - 1].idle)


def test_decrees_before_the_first_plan_come_at_once_one_after_the_other_and_take_no_round() -> None:
    run = Run(rounds=3)
    first = run.decide(run.do(run.wish(CLOSE)))
    assert (first.round, first.idle) == (0, 0)
    for number, peer in enumerate(NAMES, 1):  # no peer waits: no plan was made yet
        commit = run.decide(run.do(run.wish(ADMIT, peer, number)))
        assert (commit.round, commit.plan, commit.idle) == (number, None, number)
    run.ready(*NAMES)
    planned = run.decide(run.attest(*NAMES))
    assert planned.plan is not None
    assert (planned.round, planned.idle) == (3, 3)
    trained = [run.train() for _ in range(3)]
    assert [commit.idle for commit in trained] == [3, 3, 3]
    assert [place(run.manifest, run.commits, commit.round) for commit in trained] == [
        k * run.manifest.train.inner_steps for k in range(3)
    ]
    assert trained[-1].plan is None
    assert run.leader.phase is Phase.CLOSING
    assert schedule.last_round(run.manifest, trained[-1]) == trained[-1].round == 6


def test_whoever_is_let_in_before_the_first_plan_does_not_wait_for_a_lease() -> None:
    run = Run(mode="listed")
    made = ticket(run=run.manifest.run_id, operator=tiny.OPERATOR, count=2)
    run.decide(run.do(run.wish(CLOSE)))
    commit = run.decide(run.do(JoinRequest(made.joined(FRIENDS[0]))))
    assert [joined.peer for joined in commit.joined] == [FRIENDS[0]]
    assert (commit.round, commit.idle, run.now) == (1, 1, 0.0)


def test_a_decree_while_a_round_is_trained_travels_in_its_commit() -> None:
    run = Run()
    run.decide(run.ready(*NAMES))
    run.attest(*NAMES)
    assert run.do(run.wish(CLOSE), run.wish(ADMIT, "a", 0)) == []
    commit = run.decide(run.offered(*NAMES))
    assert (commit.round, commit.idle, len(commit.contributions)) == (1, 0, 2)
    assert commit.decree is not None


@pytest.mark.parametrize("decreed", [False, True])
def test_a_round_in_which_all_fail_is_idle_and_the_run_trains_as_many_rounds_as_it_has(decreed: bool) -> None:
    run = Run(rounds=2)
    run.decide(run.ready(*NAMES))
    if decreed:
        run.do(run.wish(SET, lasts=Schedule(rounds=3, total_steps=10**6)))
    commits = [run.fail(), run.train()]
    while commits[-1].plan is not None:
        commits.append(run.fail() if len(commits) % 2 == 0 else run.train())
    trained = [commit for commit in commits if commit.contributions]
    assert len(trained) == (3 if decreed else 2)
    assert commits[-1] is trained[-1]
    assert commits[-1].idle == len(commits) - len(trained) > 0
    assert [place(run.manifest, run.commits, commit.round) for commit in trained] == [
        k * run.manifest.train.inner_steps for k in range(len(trained))
    ]


def test_an_operator_may_set_the_length_in_rounds_with_work() -> None:
    run = Run(rounds=3)
    run.decide(run.ready(*NAMES))
    head = run.fail()
    assert (head.round, head.idle) == (1, 1)
    assert schedule.why_not(run.manifest, head, Schedule(rounds=2, total_steps=10**6)) is None
    too_few = schedule.why_not(run.manifest, head, Schedule(rounds=1, total_steps=10**6))
    assert too_few == "round 2 is open: the run needs at least 2 rounds"
    last = [run.train(), run.train()][-1]
    late = schedule.why_not(run.manifest, last, Schedule(rounds=9, total_steps=10**6))
    assert late == "the run ends with round 4, which is the last"


def test_a_log_of_before_has_the_digests_that_it_had() -> None:
    """A commit without idle rounds is written as it was before they were counted."""
    from protocol.wire.schema import build, packed

    run = Run()
    commit = run.decide(run.ready(*NAMES))
    assert "idle" not in packed(commit)
    counted = dataclasses.replace(commit, idle=2)
    assert build(Commit, packed(counted), ignore_unknown=True) == counted
    assert counted.digest != commit.digest
