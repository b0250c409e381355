"""Real processes find a lying member of a chain; a spare takes its place, and it stays out of chains."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.chain.screening import NEW_ROUNDS
from peer.events import Event
from tests.faults.repair import NODE, SPARE, STAGES, WEAK, Campaign, Fault, campaign

AFTER = 3
"""Rounds that are looked at afterwards."""


def changes(swarm: Campaign) -> list[Event]:
    """Of the chain, in order. The same members may be told twice, the second time with how many steps count."""
    return [e for e in swarm.tails[NODE].read() if e.kind == "chain_reconfigured"]


def quarrels(swarm: Campaign) -> list[dict[str, object]]:
    return [e.fields for e in swarm.tails[NODE].read() if e.kind == "quarrel"]


@pytest.mark.parametrize("fault", [Fault("noise", "forward", 1)], ids=str)
def test_a_stage_that_lies_is_replaced_within_the_round_and_in_no_chain_afterwards(
    tmp_path: Path, fault: Fault
) -> None:
    with campaign(tmp_path / "run", residual_width=16) as swarm:
        chain, first = list[str](), 0

        def is_known() -> bool:
            nonlocal chain, first
            if swarm.chain() != chain:  # a stage that has become slow may be exchanged, and then they begin again
                chain, first = swarm.chain(), swarm.round()
            return swarm.round() > first + NEW_ROUNDS

        swarm.until(is_known, "the rounds in which the stages learn what is usual")
        assert quarrels(swarm) == [], "honest stages are believed"
        before = len(changes(swarm))

        victim, _ = swarm.await_fate(fault, step=1, micro=0)
        swarm.until(lambda: quarrels(swarm), f"the report of {victim}")
        told, ids = quarrels(swarm)[0], swarm.ids()
        assert told["accused"] == ids[victim]
        assert str(told["reason"]).startswith("lies: activations ")

        swarm.until(lambda: changes(swarm)[before:], "the change of the chain")
        (spare,) = {*WEAK, SPARE}.difference(chain)
        expected = [ids[spare if name == victim else name] for name in chain]
        round = changes(swarm)[before].fields["round"]
        swarm.until(lambda: swarm.round() >= round + AFTER, "the rounds after it")
        (commit,) = [e for e in swarm.commits() if e.fields["round"] == round]
        (work,) = [c for c in commit.fields["contributions"] if len(c["shares"]) == STAGES]
        assert [share["peer"] for share in work["shares"]] == expected, "the work of the round counts"
        assert all((e.fields["round"], e.fields["peers"]) == (round, expected) for e in changes(swarm)[before:]), (
            "no other change"
        )
        for later in (e for e in swarm.commits() if e.fields["round"] >= round):
            for replica in later.fields["plan"]["replicas"]:
                assert ids[victim] not in [stage["peer"] for stage in replica["stages"]]
        assert all(told["accused"] == ids[victim] for told in quarrels(swarm)), "nobody else was accused"
    # when the block ends, all logs and attested bits are compared with the replay
