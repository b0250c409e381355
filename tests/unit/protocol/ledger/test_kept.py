"""A log of many rounds: older commits are the same as when they came, and take little memory."""

from __future__ import annotations

import dataclasses
import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from bootstrap.archive import Archive
from protocol.ledger.history import NEWEST, Commits, Kept
from protocol.wire import encoding
from protocol.wire.commit import Commit
from tests.support import tiny
from tests.support.messages import COMMIT

FEW, ROUNDS = 32, 50
"""Commits that are kept as they are, and all."""


def other(round: int) -> Commit:
    """A commit in which everything is an object of its own, as one that came over the network."""
    changed = dataclasses.replace(COMMIT, round=round, time=float(round))
    return encoding.commit_in(encoding.encode_record(tiny.record(changed)))


def test_older_commits_are_the_same_as_when_they_came() -> None:
    log = Commits(FEW)
    for round in range(ROUNDS):
        log[round] = other(round)
    assert list(log) == list(range(ROUNDS)) == list(reversed(log))[::-1]
    for round in (0, 1, ROUNDS - FEW - 1, ROUNDS - FEW, ROUNDS - 1):
        assert log[round] == other(round)
        assert log[round].digest == other(round).digest
    assert (ROUNDS in log, -1 in log, log.get(ROUNDS), log.get(-1)) == (False, False, None, None)
    each = sum(share.size for share in COMMIT.shares)
    assert each > 0
    assert [log.bytes_of(a, b) for a, b in ((-1, 0), (-1, ROUNDS - 1), (3, 7), (5, 5))] == [
        each,
        ROUNDS * each,
        4 * each,
        0,
    ]


def test_a_log_has_no_gap() -> None:
    log = Commits(FEW)
    for round in range(ROUNDS):
        log[round] = other(round)
    for round in (0, ROUNDS + 1):
        with pytest.raises(KeyError):
            log[round] = other(round)
    assert len(log) == ROUNDS


def test_the_same_of_any_items() -> None:
    asked: list[int] = []

    def older(index: int) -> str:
        asked.append(index)
        return str(index)

    items = Kept(older, FEW)
    for index in range(ROUNDS):
        items.append(str(index))
    everything = [str(index) for index in range(ROUNDS)]
    assert (items[-1], items[-FEW]) == (everything[-1], everything[-FEW])
    assert not asked
    assert items[:3] + items[-2:] == everything[:3] + everything[-2:]
    assert asked == [0, 1, 2]
    assert list(items) == everything
    for index in (ROUNDS, -ROUNDS - 1):
        with pytest.raises(IndexError):
            items[index]


def growth(add: Callable[[int], None]) -> float:
    """Bytes of memory for each of the rounds from FEW on."""
    tracemalloc.start()
    try:
        sizes = []
        for first in (0, FEW):
            for round in range(first, first + FEW):
                add(round)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    return (sizes[1] - sizes[0]) / FEW


def test_what_a_round_of_long_ago_takes() -> None:
    """A peer keeps little more than its bytes."""
    log, plain = Commits(FEW), dict[int, Commit]()
    raw = len(encoding.encode_record(tiny.record(COMMIT)))
    took = growth(lambda round: log.__setitem__(round, other(round)))
    assert took < raw + 200
    assert growth(lambda round: plain.__setitem__(round, other(round))) > 3 * took, "what it was before"


def test_a_node_has_its_log_on_disk(tmp_path: Path) -> None:
    manifest = tiny.manifest()
    archive, head = Archive(tmp_path, manifest), None
    for round in range(NEWEST + 20):
        parent = manifest.run_id if head is None else head.digest
        new = dataclasses.replace(other(round), run=manifest.run_id, parent=parent, members=manifest.operators)
        head = dataclasses.replace(new, board=None, joined=(), plan=None, leader=manifest.operators[0])
        archive.append(tiny.record(head))

    assert (archive.records.old, archive.commits.old) == (20, 20)
    written = list(archive.commits)
    archive.close()
    again = Archive(tmp_path, manifest)
    assert list(again.commits) == written
    assert [encoding.commit_in(raw) for raw in again.since(-1)] == written
    again.close()
