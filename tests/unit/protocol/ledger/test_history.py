"""A peer's copy of the run's history: what is decided counts, in its order (protocol/ledger/history.py)."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from protocol.ledger.history import ForkError, History, read
from protocol.wire import encoding
from protocol.wire.decree import Board, Operator
from tests.support import tiny
from tests.support.history import FOUR, KEYS, NAMES, A, B, by, commit, gap_in_the_log, long_log


def test_what_is_decided_counts_in_its_order() -> None:
    history = History(FOUR)
    first = commit(None)
    second = commit(first)
    assert history.learn(by(second)), "the one before is missing"
    assert not history.learn(by(first, 0, 1)), "two votes of four decide nothing"
    assert history.head == -1
    assert not history.learn(by(first))
    assert not history.learn(by(second, 1, 2, 3))
    assert history.commits == {0: first, 1: second}


def test_two_decided_commits_of_one_round_are_a_fork() -> None:
    history = History(FOUR)
    history.learn(by(commit(None)))
    history.learn(by(commit(None, 4.0), 0, 3))
    with pytest.raises(ForkError, match="two decided commits"):
        history.learn(by(commit(None, 4.0), 0, 1, 3))


def test_a_later_part_of_the_log_makes_a_peer_ask_for_what_is_missing() -> None:
    assert gap_in_the_log().commits == {}


def test_a_stretch_of_the_log_counts_by_its_last_record() -> None:
    history, log = History(FOUR), long_log(6)
    raws = [encoding.encode_record(by(one)) for one in log]
    (stretch,) = read(FOUR, history.tip, raws, A)
    assert [packed.round for packed in stretch.before] == [0, 1, 2, 3, 4]
    assert not history.learn_stretch(stretch)
    assert history.commits == dict(enumerate(log))
    assert not history.learn_stretch(stretch), "what is known already changes nothing"


@pytest.mark.parametrize("liars", [(0,), (0, 1)])
def test_one_record_without_enough_votes_proves_nothing(liars: tuple[int, ...]) -> None:
    log = long_log(4)
    raws = [encoding.encode_record(by(one)) for one in log[:3]]
    raws.append(encoding.encode_record(tiny.record(log[3], *(KEYS[key] for key in liars))))
    with pytest.raises(encoding.MessageError, match="round 3 has too few votes"):
        list(read(FOUR, History(FOUR).tip, raws, A))


def test_a_forged_commit_that_names_other_members_is_proved_by_none_of_them() -> None:
    """A forger who signs as the members that his own commit names: those who decide it are the ones before."""
    log = long_log(2)
    forged = commit(log[1], members=(A,))
    after = commit(forged, members=(A,))
    raws = [encoding.encode_record(by(one)) for one in log]
    raws += [encoding.encode_record(tiny.record(one, KEYS[0])) for one in (forged, after)]
    history = History(FOUR)
    found = []
    with contextlib.suppress(encoding.MessageError):
        for stretch in read(FOUR, history.tip, raws, A):
            found.append(stretch)
    for stretch in found:
        with contextlib.suppress(ForkError):
            history.learn_stretch(stretch)
    assert history.head == 1


@pytest.mark.parametrize(
    "change", [{"parent": "0" * 64}, {"run": "0" * 64}, {"time": 99.0}, {"leader": B}, {"contributions": ()}]
)
def test_a_commit_that_was_changed_is_proved_by_no_successor(change: dict[str, object]) -> None:
    log = long_log(5)
    changed = dataclasses.replace(log[2], **change)  # type: ignore[arg-type]
    if changed == log[2]:
        changed = dataclasses.replace(log[2], time=98.0)
    raws = [encoding.encode_record(by(one)) for one in (*log[:2], changed, *log[3:])]
    history = History(FOUR)
    with contextlib.suppress(encoding.MessageError, ForkError):
        for stretch in read(FOUR, history.tip, raws, A):
            history.learn_stretch(stretch)
    assert history.head <= 2


@pytest.mark.parametrize("place", [0, 2])
def test_who_operates_the_run_changes_by_no_commit_that_brings_no_decree(place: int) -> None:
    """Not even where those who decide have voted for it: each commit of a stretch says what the one before it says."""
    log = long_log(2)
    while len(log) < 7:
        board = Board(operators=tuple(Operator(peer=who) for who in NAMES), quorum=4) if len(log) >= 2 + place else None
        log.append(commit(log[-1], board=board))
    history = History(FOUR)
    raws = [encoding.encode_record(by(one, 0, 1, 2, 3)) for one in log]
    for page in (raws[:2], raws[2:]):
        with contextlib.suppress(ForkError, encoding.MessageError):
            for stretch in read(FOUR, history.tip, page, A):
                history.learn_stretch(stretch)
    assert history.head <= 1 + place
