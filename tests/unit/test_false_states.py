"""No peer takes over a state that the log does not give, however many call it the right one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from protocol.round.attestations import WITNESS_ROUNDS
from tests.support.false_states import LARGE, believes_the_log, digests_of, never_doubted
from tests.support.recovery import SHARDS, Rounds, is_right, to
from tests.support.volunteers import Swarm, Volunteer, manifest

pytestmark = pytest.mark.slow


def dear(folder: Path) -> Swarm:
    """A run in which a node cannot compute a state from the log."""
    swarm = Swarm(folder, manifest(start_peers=3, rounds=100, checkpoint_rounds=10, outer=LARGE))
    swarm.computes = False
    return swarm


def spoil(peer: Volunteer, shard: str) -> None:
    """Another bit in the peer's state."""
    first, *others = peer.rounds.outer.theta[shard]
    wrong = first.copy()
    wrong.view(np.uint32)[5] ^= 1
    peer.rounds.outer.theta[shard] = [wrong, *others]


async def test_who_is_told_by_most_that_it_differs_follows_the_log_and_keeps_its_bits(tmp_path: Path) -> None:
    """Two of three agree on a state that the log does not give, and have most of the weight."""

    async with dear(tmp_path) as swarm:
        rounds = Rounds(swarm)
        false, honest = [swarm.start("a"), swarm.start("b")], swarm.start("honest")
        await to(swarm, rounds, 12)
        for peer in false:
            spoil(peer, "block.2")
        await to(swarm, rounds, 15)
        assert honest.id in {d.peer for commit in swarm.archive.commits for d in commit.diverged}
        kept = [t for t in honest.texts() if "block.2" in t and "other bits" in t]
        assert len(kept) == 1, honest.texts()
        assert "following the log again gave ours" in kept[0]
        assert honest.bases == {"block.2": 10}
        assert not [e for e in honest.events if e.kind == "shard_rebuilt"]
        await is_right(swarm, honest)


async def test_a_node_with_an_auditor_believes_the_log_whatever_most_of_the_weight_says(tmp_path: Path) -> None:
    async with Swarm(tmp_path, manifest(start_peers=3, rounds=100, checkpoint_rounds=10, outer=LARGE)) as swarm:
        rounds = Rounds(swarm)
        false, honest = [swarm.start("a"), swarm.start("b")], swarm.start("honest")
        await to(swarm, rounds, 11)
        auditor = swarm.start("auditor", memory=1, audit=True)
        swarm.machine.leader.witnesses.auditors = frozenset({auditor.id})
        await swarm.until(lambda: auditor.rounds is not None and set(auditor.rounds.outer.theta) == set(SHARDS))
        assert set(auditor.bases.values()) == {0}, "it believes nobody's state"
        assert auditor.received > 0, "and follows the log from the seed"
        await to(swarm, rounds, swarm.head + 1)
        for peer in false:
            spoil(peer, "block.2")
        await to(swarm, rounds, swarm.head + 4)
        assert {d.peer for commit in swarm.archive.commits for d in commit.diverged} == {peer.id for peer in false}
        never_doubted(honest)
        for peer in (*false, honest, auditor):
            await is_right(swarm, peer)
        believes_the_log(swarm.archive.commits, digests_of(swarm))
        plans = [commit.plan for commit in swarm.archive.commits if commit.plan is not None]
        assert not any(auditor.id in replica.peers for plan in plans for replica in (*plan.replicas, *plan.forming))


async def test_a_newcomer_takes_no_state_from_which_the_log_leads_elsewhere(tmp_path: Path) -> None:
    """Most weight has a false state since before the newest checkpoint; the newcomer follows the log from the seed."""

    async with dear(tmp_path) as swarm:
        rounds = Rounds(swarm)
        false = [swarm.start("a"), swarm.start("b")]
        swarm.start("honest")
        await to(swarm, rounds, 12)
        for peer in false:
            spoil(peer, "block.2")
        await to(swarm, rounds, 14)
        newcomer = swarm.start("newcomer")
        await swarm.until(lambda: set(newcomer.rounds.outer.theta if newcomer.rounds else ()) == set(SHARDS))
        right = digests_of(swarm)[newcomer.rounds.member.applied]
        assert newcomer.rounds.outer.digest("block.2") == right["block.2"]
        assert [t for t in newcomer.texts() if "block.2" in t and "leads from it to other bits" in t]
        assert newcomer.bases["block.2"] == 0
        assert {newcomer.bases[shard] for shard in SHARDS if shard != "block.2"} == {10}


async def test_a_bit_that_flipped_is_mended_though_the_machine_was_told_before_that_others_differ(
    tmp_path: Path,
) -> None:
    """To be sure lasts for some rounds only: memory may fail later."""

    async with Swarm(tmp_path, manifest(start_peers=3, rounds=100, checkpoint_rounds=2)) as swarm:
        rounds = Rounds(swarm)
        swarm.start("a"), swarm.start("b")
        wrong = swarm.start("wrong")
        await to(swarm, rounds, 5)
        spoil(wrong, "head")
        await to(swarm, rounds, 8)
        await is_right(swarm, wrong)
        await to(swarm, rounds, 8 + WITNESS_ROUNDS)
        spoil(wrong, "head")
        await to(swarm, rounds, 11 + WITNESS_ROUNDS)
        await is_right(swarm, wrong)
        assert [e.fields["shards"] for e in wrong.events if e.kind == "shard_rebuilt"] == [["head"], ["head"]]
