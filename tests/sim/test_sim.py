"""Lives of a swarm, each decided by its seed. A seed that fails is replayed with a trace by

python -m tests.sim.run --seed N
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.sim import bugs
from tests.sim.run import SEEDS, Life, lives, unseen

BUG_SEEDS, RARE_SEEDS = 120, 900


@pytest.fixture(scope="module")
def lived() -> list[Life]:
    return list(lives(range(SEEDS)))


def test_every_promise_is_kept(lived: list[Life]) -> None:
    broken = [f"seed {s}: {text}; replay: python -m tests.sim.run --seed {s}" for s, _, text in lived if text]
    assert broken == []


def test_the_faults_do_happen_and_the_work_is_done_nevertheless(lived: list[Life]) -> None:
    stats = sum((found for _, found, _ in lived), Counter[str]())
    assert unseen(stats) == []
    assert stats["contributions"] > 0.9 * stats["commits"], "runs are short, and who is new begins a round later"
    assert stats["commits"] > 3 * len(lived)


def test_made_up_identities_that_say_what_they_like_break_no_promise() -> None:
    lived = list(lives(range(12), liars=6))
    assert [text for _, _, text in lived if text] == []
    assert sum((found for _, found, _ in lived), Counter[str]())["lies"] > 1000


def test_an_open_run_with_newcomers_on_probation_keeps_every_promise() -> None:
    """P3 above all: what has no weight yet goes back into the feedback, and comes later."""
    lived = list(lives(range(36), probation=1))
    assert [text for _, _, text in lived if text] == []
    stats = sum((found for _, found, _ in lived), Counter[str]())
    assert stats["on probation"] > 5
    assert stats["less than its weight"] > 5


def test_dishonest_operators_of_a_quorum_that_bears_them_break_no_promise() -> None:
    lived = list(lives(range(40, 64), lying_nodes=True))
    assert [text for _, _, text in lived if text] == []
    stats = sum((found for _, found, _ in lived), Counter[str]())
    assert stats["lies"] > 1000
    assert stats["accused"] > 2


def test_dishonest_operators_hold_up_no_round_for_more_than_two_leases() -> None:
    lived = list(lives(range(12), lying_nodes=True, calm=True))
    assert [text for _, _, text in lived if text] == []
    assert sum((found for _, found, _ in lived), Counter[str]())["lies"] > 500


def test_chains_that_quarrel_by_chance_break_no_promise_and_hold_up_no_round_for_more_than_two_leases() -> None:
    lived = [*lives(range(12), quarrels=True), *lives(range(12, 24), quarrels=True, calm=True)]
    assert [text for _, _, text in lived if text] == []
    assert sum((found for _, found, _ in lived), Counter[str]())["quarrels"] > 10


def test_a_seed_decides_everything() -> None:
    assert list(lives((3, 5))) == list(lives((3, 5)))


@pytest.mark.parametrize("name", bugs.BUGS)
def test_a_planted_bug_is_found_by_the_promise_that_it_breaks(name: str, tmp_path: Path) -> None:
    bug = bugs.BUGS[name]
    bugs.copy_tree(tmp_path)
    bugs.plant(bug, tmp_path)
    text = bugs.find(bug, tmp_path, RARE_SEEDS if bug.only else BUG_SEEDS)
    assert bugs.broken(text) in bug.promises, text
