"""A round's cost for the leader grows with the replicas, not with their square: calls are counted."""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any

from tests.support.leader import FULL, opened


def calls_of_a_round(count: int) -> int:
    """Calls of functions and generators of ours while the replicas offer, are decided and attest."""
    driver = opened({f"p{i:03}": FULL for i in range(count)})
    calls = 0

    def count_call(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        commit = driver.decide(driver.offered(*driver.memory))
        driver.attest(*driver.memory)
    finally:
        sys.setprofile(before)
    assert len(commit.contributions) == count
    return calls


def test_a_round_of_four_times_the_replicas_takes_about_four_times_the_calls() -> None:
    few, many = 30, 120
    linear = calls_of_a_round(many) / calls_of_a_round(few)
    assert linear < many / few * math.log(many) / math.log(few)
