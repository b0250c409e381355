"""What a round costs the leader's machine grows with the replicas, not with their square: calls are counted, not seconds."""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any

from protocol.identity import Identity
from protocol.planning import memory
from protocol.planning.partition import Candidate
from protocol.round.leader_events import Lead, Ready
from tests.benchmarks.leader import Driver, make_run
from tests.support import tiny


def calls_of_a_round(count: int) -> int:
    """Calls of functions and generators of ours while so many replicas attest, offer and are decided."""
    manifest = make_run(count, 2)
    driver = Driver(manifest)
    driver.do(Lead(True))
    peers = [Identity(index.to_bytes(32)).peer_id for index in range(count)]
    full = tiny.full_memory(manifest)
    for peer in peers:
        driver.decide(driver.do(Ready(Candidate(peer=peer, memory_bytes=full, up_bps=10**7))))
    shards = memory.stage_shards(manifest, 0, manifest.model.n_layers)
    calls = 0

    def count_call(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        commit = driver.round(peers, dict.fromkeys(shards, "d" * 64))
    finally:
        sys.setprofile(before)
    assert len(commit.contributions) == count
    return calls


def test_a_round_of_four_times_the_replicas_takes_about_four_times_the_calls() -> None:
    few, many = 30, 120
    linear = calls_of_a_round(many) / calls_of_a_round(few)
    assert linear < many / few * math.log(many) / math.log(few)
