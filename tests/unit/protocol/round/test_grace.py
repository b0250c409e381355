"""How long a round waits for those who are late: as long as they are worth it."""

from __future__ import annotations

import dataclasses

import pytest

from protocol.planning.allotment import HEADROOM
from protocol.round.stragglers import GRACE_SHARE, timed_out
from protocol.run.manifest import Manifest, OuterSpec, TimingSpec
from protocol.wire.plan import ReplicaSpec, StageSpec, Work
from tests.support import tiny

SECONDS = 40.0
M = tiny.manifest(timing=TimingSpec(round_deadline=60.0, round_seconds=SECONDS, heartbeat=3.0, gone_after=12.0))
AHEAD = dataclasses.replace(M, outer=OuterSpec(overlap=1))
EXPECTED = 4
"""Inner steps that everybody has time for."""
TOKENS = M.train.tokens(EXPECTED, 2)


def late(steps: int = EXPECTED, micro_batches: int = 2) -> ReplicaSpec:
    """A replica that is expected to do this number of steps."""
    work = Work(steps=int(HEADROOM * steps), micro_batches=micro_batches)
    return ReplicaSpec(stages=(StageSpec(peer="late", first=0, last=4),), work=work)


def waits(offered: list[tuple[float, int]], *missing: ReplicaSpec, manifest: Manifest = M) -> float:
    """Seconds after which the round waits no more; it is not interrupted before, and does not begin to wait again."""
    seconds = [i / 8 for i in range(8 * 200)]
    over = [timed_out(manifest, offered, missing, waited) for waited in seconds]
    assert over == sorted(over)
    return seconds[over.index(True)]


@pytest.mark.parametrize("complete", [1, 3, 100])
def test_nobody_is_late_before_the_time_is_over(complete: int) -> None:
    offered = [(1.0, 1000 * TOKENS)] * complete
    assert not timed_out(M, offered, [late()], SECONDS)
    assert waits(offered, late()) >= (1 + GRACE_SHARE) * SECONDS


@pytest.mark.parametrize("complete", [1, 2, 4, 10])
def test_waiting_costs_what_the_complete_ones_could_train(complete: int) -> None:
    """One slow replica of two is waited for a whole round longer, one of eleven for a tenth of it."""
    assert waits([(30.0, TOKENS)] * complete, late()) == pytest.approx(SECONDS + SECONDS / complete, abs=0.2)


def test_it_is_worth_what_the_late_ones_are_expected_to_bring() -> None:
    one = waits([(30.0, TOKENS)] * 4, late())
    assert waits([(30.0, TOKENS)] * 4, late(), late()) - SECONDS == 2 * (one - SECONDS)
    assert waits([(30.0, TOKENS)] * 4, late(2 * EXPECTED)) - SECONDS == 2 * (one - SECONDS)
    assert waits([(30.0, TOKENS)] * 4, late(micro_batches=1)) - SECONDS == (one - SECONDS) / 2
    assert waits([(30.0, 2 * TOKENS)] * 4, late()) - SECONDS == (one - SECONDS) / 2


def test_who_offers_while_the_round_waits_is_idle_from_then_on() -> None:
    assert waits([(30.0, TOKENS), (60.0, TOKENS)], late()) == 70.0
    assert waits([(30.0, TOKENS), (100.0, TOKENS)], late()) == 80.0


def test_with_overlap_nobody_is_idle_before_it_did_all_that_it_was_given() -> None:
    assert waits([(30.0, TOKENS)], late(), manifest=AHEAD) == HEADROOM * SECONDS + SECONDS
    assert not timed_out(AHEAD, [(30.0, 1000 * TOKENS)], [late()], HEADROOM * SECONDS)
    assert timed_out(AHEAD, [(30.0, 1000 * TOKENS)], [late()], HEADROOM * SECONDS + 0.1)


def test_while_nobody_is_complete_the_round_waits() -> None:
    assert not timed_out(M, [], [late()], 1e9)
