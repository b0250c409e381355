"""Lives of a swarm, each decided by its seed: a slice of what `make campaign` lives through. A seed that fails is
replayed with a trace by

    python -m tests.sim.run --seed N
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.sim import bugs
from tests.sim.run import COLLUDE, FEW, SEEDS, Life, lives, unseen

MORE = 16
"""Lives between two looks at what was seen."""


def lived(seen: Callable[[Counter[str]], bool], few: Sequence[int], most: int = SEEDS, **chosen: int) -> list[Life]:
    """The lives of a `few` seeds, in which all that is to happen was `seen` when they were chosen; where the code has
    changed so that it is not any more, those of others up to `most`, too, until it is. Every promise is kept in each
    of them."""
    found, others = list(lives(few, **chosen)), [seed for seed in range(most) if seed not in few]
    while others and not seen(stats_of(found)):
        found += lives(others[:MORE], **chosen)
        del others[:MORE]
    broken = [
        f"seed {s}: {text}; replay: python -m tests.sim.run --seed {s}, and {chosen}" for s, _, text in found if text
    ]
    assert broken == []
    assert seen(stats_of(found))
    return found


def stats_of(lives: Sequence[Life]) -> Counter[str]:
    """What happened in them."""
    return sum((found for _, found, _ in lives), Counter[str]())


def test_every_promise_is_kept_while_all_faults_happen_and_the_work_is_done_nevertheless() -> None:
    found = lived(lambda stats: unseen(stats) == [], FEW)
    stats = stats_of(found)
    assert stats["contributions"] > 0.9 * stats["commits"], "runs are short, and who is new begins a round later"
    assert stats["commits"] > 3 * len(found)


def test_other_methods_of_the_family_keep_every_promise() -> None:
    """An outer momentum and dense updates, transformed ones, and ones of a sample."""
    lived(lambda stats: stats["states compared"] > 100 and stats["recovered"] > 2, range(8), most=24, family=True)


def test_made_up_identities_that_say_what_they_like_break_no_promise() -> None:
    lived(lambda stats: stats["lies"] > 1000, (2, 3), liars=6)


def test_an_open_run_with_newcomers_on_probation_keeps_every_promise() -> None:
    """P3 above all: what has no weight yet goes back into the feedback, and comes later."""
    lived(lambda stats: min(stats["on probation"], stats["less than its weight"]) > 5, (27, 34, 39, 69), probation=1)


def test_dishonest_operators_of_a_quorum_that_bears_them_break_no_promise() -> None:
    lived(lambda stats: stats["lies"] > 500 and stats["accused"] > 2, (1, 7, 29), lying_nodes=True)


def test_dishonest_operators_hold_up_no_round_for_more_than_two_leases() -> None:
    lived(lambda stats: stats["lies"] > 100, (0, 2), lying_nodes=True, calm=True)


def test_strangers_hold_up_no_round_for_more_than_two_leases_once_somebody_has_brought_work() -> None:
    lived(lambda stats: stats["lies"] > 1000, (29,), liars=30, calm=True)


def test_colluders_break_no_promise_and_have_no_honest_work_left_out() -> None:
    lived(lambda stats: all(stats[x] for x in COLLUDE), (11,), colluders=True)


def test_who_offers_the_same_bytes_again_holds_up_no_round() -> None:
    """The nodes have removed them meanwhile, and do not wait for each other to have them."""
    lived(lambda stats: stats["colluders counted"] > 0, (64,), colluders=True, calm=True)


@pytest.mark.parametrize(("lying_nodes", "few"), [(False, (0, 1)), (True, (1,))])
def test_nodes_that_add_up_updates_break_no_promise(lying_nodes: bool, few: Sequence[int]) -> None:
    lived(lambda stats: stats["aggregated shards"] > 0, few, most=30, aggregates=True, lying_nodes=lying_nodes)


def test_in_long_runs_archives_remove_nothing_that_is_needed() -> None:
    """Nodes and peers die, and are away for long; a loss of power between any two steps of a removal loses nothing."""
    happens = ("payloads removed", "losses of power", "recovered")
    lived(lambda stats: all(stats[x] for x in happens), (1,), most=3, long=True)


@pytest.mark.parametrize(("calm", "few"), [(False, (1, 2, 3)), (True, (12, 13))])
def test_chains_that_quarrel_by_chance_break_no_promise_and_hold_up_no_round_for_more_than_two_leases(
    calm: bool, few: Sequence[int]
) -> None:
    lived(lambda stats: stats["quarrels"] > 5, few, quarrels=True, calm=calm)


def test_a_seed_decides_everything() -> None:
    assert list(lives((3,))) == list(lives((3,)))


@pytest.mark.parametrize("name", bugs.BUGS)
def test_a_planted_bug_is_found_by_the_promise_that_it_breaks(name: str, tmp_path: Path) -> None:
    bug = bugs.BUGS[name]
    bugs.copy_tree(tmp_path)
    bugs.plant(bug, tmp_path)
    text = bugs.find(bug, tmp_path)
    assert bugs.broken(text) in bug.promises, text
