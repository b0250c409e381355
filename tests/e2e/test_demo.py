"""The swarm as a whole: over hivemind and in memory, and what a wrong bit does."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer import events
from peer.cli.main import main
from peer.corpus.text import CHUNKS, CorpusReader, LocalText, Text, open_corpus
from peer.demo import swarm
from peer.demo.recipe import demo_corpus
from peer.events import from_json
from peer.net.disk import Disk
from peer.node.inner_loop import StageInnerLoop
from peer.node.peer import Factories
from peer.node.training import Result
from peer.state.outer_optimizer import Accumulate
from peer.state.storage import Shards
from peer.training.trainer import StageTrainer
from protocol.codec import formats
from protocol.errors import LocalError
from protocol.round.member_events import TrainOrder
from protocol.run import layout
from protocol.run.manifest import Manifest
from tests.e2e import swarms
from tests.support.family import FAMILY

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


MIXED = {"full": 1, "chains": 2, "residual_width": 8, "inner_steps": 2}
"""A full replica and two chains, each of whose stages contributes its rows of tokens."""


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of such a swarm of tasks in memory."""
    return swarms.run(swarms.options(tmp_path_factory.mktemp("near") / "memory", **MIXED))


def test_processes_over_hivemind_and_tasks_in_memory_end_with_the_same_bits(
    near: dict[str, Any], tmp_path: Path
) -> None:
    """P1, and the oracle between transports."""
    far = swarms.run(swarms.options(tmp_path / "hivemind", **MIXED, in_memory=False))
    assert set(REQUIRED) <= set(far)
    assert far["same_bits"] is near["same_bits"] is True
    assert far["rounds"] == near["rounds"] == 3
    assert far["left_out"] == []
    assert far["state_digest"] == near["state_digest"]
    assert far["val_loss"] == near["val_loss"]
    assert set(far["bytes_sent_per_peer_per_round"]) == {"full-0", "chain-0-0", "chain-0-1", "chain-1-0", "chain-1-1"}
    manifest = swarms.manifest(swarms.options(tmp_path / "hivemind", **MIXED))
    for chain in range(2):
        first, last = (last_step(tmp_path / "hivemind", f"chain-{chain}-{stage}") for stage in range(2))
        measured(manifest, first, last)


@pytest.mark.parametrize("method", ["averaging", "diloco in int8", "dct", "cocktail"])
def test_every_outer_step_ends_with_the_same_bits_over_processes_and_in_memory(method: str, tmp_path: Path) -> None:
    found = []
    for in_memory in (True, False):
        chosen = swarms.options(tmp_path / str(in_memory), **MIXED, in_memory=in_memory)
        found.append(swarms.run(chosen, swarms.manifest(chosen, outer=FAMILY[method])))
        assert found[-1]["same_bits"] is True
        assert found[-1]["left_out"] == []
    assert found[0]["state_digest"] == found[1]["state_digest"]
    assert found[0]["val_loss"] == found[1]["val_loss"]


class OnDevice(StageTrainer):
    """Takes the CPU for an accelerator, which works out the round's update."""

    update_devices = frozenset({"cpu"})


def test_accelerators_give_the_bits_of_peers_without(near: dict[str, Any], tmp_path: Path) -> None:
    """A full replica and a chain whose every member works out its updates on its device."""
    worked: set[tuple[str, str]] = set()

    class WithDevice(StageInnerLoop):
        trainer_class = OnDevice

        def on_device(self, shard: str) -> Accumulate | None:
            if (found := super().on_device(shard)) is not None:
                worked.add((self.peer, shard))
            return found

    chosen = swarms.options(tmp_path / "device", **MIXED)
    manifest = swarms.manifest(chosen)
    factories = {name: Factories(inner_loop=WithDevice) for name in ("full-0", "chain-0-0", "chain-0-1")}
    asyncio.run(asyncio.wait_for(swarm.run(chosen, main, manifest, factories), swarms.DEADLINE))
    found = swarms.read_result(chosen.out)
    shards = len(layout.shard_names(manifest.model))
    assert len(worked) == 2 * shards + 1, (
        "all of the replica's, all of the chain's, and the rows of tokens of both stages"
    )
    assert found["left_out"] == []
    assert found["same_bits"] is True
    for same in ("state_digest", "val_loss", "rounds"):
        assert found[same] == near[same]


def last_step(out: Path, name: str) -> events.Chain:
    """What a member of a chain told of its last inner step."""
    told = (from_json(line) for line in (out / name / "events.jsonl").read_text().splitlines())
    return [event.body for event in told if event is not None and isinstance(event.body, events.Chain)][-1]


def measured(manifest: Manifest, first: events.Chain, last: events.Chain) -> None:
    """The two members of a chain measured times that fit into the step, the bytes of the residual width, and what came
    to them."""
    tokens, chain, width = manifest.train.step_tokens, manifest.chains, manifest.model.residual_width
    assert width == 8
    for step in (first, last):
        assert 0 < step.busy_s + step.wait_forward_s + step.wait_backward_s <= step.seconds + 0.003
    assert first.forward_bytes > tokens * formats.bytes_per_token(chain.forward, width)
    assert last.backward_bytes > tokens * formats.bytes_per_token(chain.backward, width)
    assert first.activations is last.gradients is None
    for means in (first.gradients, last.activations):
        assert 0 < means.rms < means.largest
        assert means.refused == 0


def test_a_peer_whose_corpus_misses_a_chunk_sits_out_and_the_others_go_on(tmp_path: Path) -> None:
    chosen = swarms.options(tmp_path / "run")
    broken = shutil.copytree(demo_corpus().folder, tmp_path / "corpus")
    index = CorpusReader(broken, Disk()).index
    chunk, digest = index.chunk(0).name, index.digest
    (broken / CHUNKS / chunk).unlink()

    async def read_broken(manifest: Manifest, *_: Any) -> Text:
        return LocalText(open_corpus(broken, Disk(), manifest), manifest.seed_bytes)

    without = {"full-1": Factories(text=read_broken)}
    asyncio.run(asyncio.wait_for(swarm.run(chosen, main, swarms.manifest(chosen), without), swarms.DEADLINE))
    result = swarms.read_result(chosen.out)
    assert result["same_bits"] is True
    assert result["rounds"] == 3
    reason = f"corpus {digest[:12]}…: chunk {chunk[:12]}… is missing; get it again, or build the corpus again"
    assert [(left["round"], left["reason"].endswith(reason)) for left in result["left_out"]] == [
        (r, True) for r in (1, 2)
    ], "who sat out twice is not planned for the third"


class WrongBit(StageInnerLoop):
    """Changes one bit of the state that round 1 is applied to, after it was attested."""

    round = 0

    async def train(self, order: TrainOrder, theta: Shards, *rest: Any) -> Result:
        self.round, self.theta = order.plan.round, theta
        return await super().train(order, theta, *rest)

    def release(self) -> None:
        super().release()
        if self.round == 1:
            self.theta["block.2"][0].view(np.uint32)[5] ^= 1


def test_one_wrong_bit_is_found_named_and_repaired(tmp_path: Path) -> None:
    chosen = swarms.options(tmp_path / "run")
    faulty = {"full-1": Factories(inner_loop=WrongBit)}
    work = swarm.run(chosen, main, swarms.manifest(chosen), faulty)
    with pytest.raises(LocalError, match=r"same_bits: full-1 had other bits in block\.2 after round 1"):
        asyncio.run(asyncio.wait_for(work, swarms.DEADLINE))
    result = json.loads(swarms.result_file(chosen.out).read_text())
    assert result["same_bits"] is False
    assert result["diverged"] == [{"peer": "full-1", "round": 1, "shard": "block.2"}]
    assert [x["round"] for x in result["left_out"]] == [2], "its work on the wrong base is left out, later work is not"
