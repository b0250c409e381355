"""The swarm as a whole: over hivemind and in memory, and what a wrong bit does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from peer.cli.main import main
from peer.demo import recipe, swarm
from peer.net import directory
from peer.net.memory import MemoryTransport
from peer.node.rounds import Rounds
from protocol.codec import boundary_formats
from protocol.errors import LocalError
from protocol.wire import sealed
from protocol.wire.announcement import Announcement, ChainReport
from protocol.wire.commit import Commit
from tests.e2e import swarms

REQUIRED = [
    "rounds",
    "val_loss_first",
    "val_loss_last",
    "same_bits",
    "state_digest",
    "bytes_sent_per_peer_per_round",
    "dense_fp32_bytes",
    "boundary_bytes_per_token",
    "boundary_dense_bf16_bytes_per_token",
    "seconds",
    "tokens",
]


def test_processes_over_hivemind_and_tasks_in_memory_end_with_the_same_bits(tmp_path: Path) -> None:
    """P1 with a full replica and two chains of different k; and the oracle between transports."""
    mixed = {"full": 1, "chains": 2, "rank": (8, 4), "inner_steps": 2}
    near = swarms.run(swarms.options(tmp_path / "memory", **mixed))
    far = swarms.run(swarms.options(tmp_path / "hivemind", **mixed, in_memory=False))
    assert set(REQUIRED) <= set(far)
    assert far["same_bits"] is near["same_bits"] is True
    assert far["rounds"] == near["rounds"] == 3
    assert far["left_out"] == []
    assert far["state_digest"] == near["state_digest"]
    assert far["val_loss"] == near["val_loss"]
    assert set(far["bytes_sent_per_peer_per_round"]) == {"full-0", "chain-0-0", "chain-0-1", "chain-1-0", "chain-1-1"}


def test_a_chain_announces_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announced: dict[str, list[ChainReport]] = {}
    store = MemoryTransport.store

    async def spied(self: MemoryTransport, key: str, subkey: str, value: bytes, *, ttl: float) -> bool:
        message = sealed.unseal(value)[1]
        if isinstance(message, Announcement) and message.chain is not None:
            announced.setdefault(message.peer, []).append(message.chain)
        return await store(self, key, subkey, value, ttl=ttl)

    monkeypatch.setattr(directory, "PUBLISH_SECONDS", 0.01)
    monkeypatch.setattr(MemoryTransport, "store", spied)
    chosen = swarms.options(tmp_path / "run", full=0, chains=1, rank=(8,), inner_steps=3)
    swarms.run(chosen)
    (first, last) = (announced[p.identity.peer_id][-1] for p in recipe.make_peers(swarms.manifest(chosen), chosen))
    for report in (first, last):
        assert 0 < sum(report.times_ms[1:4]) <= report.times_ms[0] + 3
    manifest = swarms.manifest(chosen)
    tokens, chain = manifest.train.step_tokens, manifest.chains
    assert first.counts[0] > tokens * boundary_formats.bytes_per_token(chain.forward, 8)
    assert last.counts[1] > tokens * boundary_formats.bytes_per_token(chain.backward, 8)
    assert first.activations == last.gradients == ()
    for rms, largest, refused in (first.gradients, last.activations):
        assert 0 < rms < largest
        assert refused == 0


def test_one_wrong_bit_is_found_named_and_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = swarms.options(tmp_path / "run")
    victim = next(p for p in recipe.make_peers(swarms.manifest(chosen), chosen) if p.name == "full-1")
    honest = Rounds._apply

    async def apply(self: Rounds, commit: Commit, rebuild: tuple[str, ...]) -> None:
        await honest(self, commit, rebuild)
        if self.peer == victim.identity.peer_id and commit.round == 1:
            array = self.outer.theta["block.2"][0].copy()
            array.view(np.uint32)[5] ^= 1
            self.outer.theta["block.2"] = [array, *self.outer.theta["block.2"][1:]]

    monkeypatch.setattr(Rounds, "_apply", apply)
    with pytest.raises(LocalError, match=r"same_bits: full-1 had other bits in block\.2 after round 1"):
        asyncio.run(asyncio.wait_for(swarm.run(chosen, main, swarms.manifest(chosen)), swarms.DEADLINE))
    result = json.loads(swarms.result_file(chosen.out).read_text())
    assert result["same_bits"] is False
    assert result["diverged"] == [{"peer": "full-1", "round": 1, "shard": "block.2"}]
    assert [x["round"] for x in result["left_out"]] == [2], "its work on the wrong base is left out, later work is not"
