"""What of a peer's offers and error feedback is found after a crash, and the files that other programs can read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from peer.state.storage import Checkpoint, Storage
from protocol.run import layout
from protocol.wire.commit import Part
from protocol.wire.session import Offer


def offer(round: int) -> Offer:
    part = Part(shard="head", digest=f"{round:064x}", size=8, norm=1.0)
    return Offer(round=round, replica=0, parts=(part,), tokens=8, steps=1, loss=2.0)


def feedback(value: float) -> dict[str, list[np.ndarray]]:
    return {"head": [np.full(3, value, np.float32), np.full((2, 5), value, np.float32)]}


def found(folder: Path) -> tuple[int, float | None, Offer | None, bool]:
    """As a process finds it that starts now."""
    storage = Storage(folder)
    state = storage.load_feedback()
    storage.close()
    value = float(state.feedback["head"][1][1, 4]) if state.feedback else None
    return state.round, value, state.offer, state.behind


def test_an_offer_and_its_feedback_are_found_wherever_the_process_was_killed(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.close()
    assert found(tmp_path) == (0, None, None, False)
    storage.save_offer(offer(1))
    assert found(tmp_path) == (0, None, offer(1), True)
    storage.save_feedback(1, feedback(1.0))
    assert found(tmp_path) == (1, 1.0, offer(1), False)
    storage.save_feedback(1, feedback(1.5), restored_offer=True)
    assert found(tmp_path) == (1, 1.5, None, False)
    storage.save_offer(offer(2))
    assert found(tmp_path) == (1, 1.5, offer(2), True)
    storage.save_feedback(2, feedback(2.0))
    storage.save_feedback(3, feedback(3.0))  # a round that sent nothing
    assert found(tmp_path) == (3, 3.0, None, False)
    newest = tmp_path / "feedback-00000003.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert found(tmp_path) == (2, 2.0, offer(2), False)


def test_checkpoints_are_safetensors_files(tmp_path: Path) -> None:
    """With an empty state, a scalar, and arrays that are not in C order."""
    storage = Storage(tmp_path)
    theta = {"head": [np.arange(3, dtype=np.float32), np.asfortranarray(np.arange(10, dtype=np.float32).reshape(2, 5))]}
    moments = {"b/step": np.array(4.0, np.float32), "a/exp_avg": np.ones((2, 2), np.float32)}
    storage.save_checkpoint(Checkpoint(7, theta, moments), {"head": layout.shard_digest(theta["head"])})
    storage.save_checkpoint(Checkpoint(8, theta, {}), {"head": layout.shard_digest(theta["head"])})
    read = load_file(tmp_path / "checkpoint-00000007" / "head.safetensors")
    assert [read["00"].tolist(), read["01"].tolist()] == [x.tolist() for x in theta["head"]]
    optimizer = load_file(tmp_path / "checkpoint-00000007" / "optimizer.safetensors")
    assert (optimizer["b/step"].shape, float(optimizer["b/step"])) == ((), 4.0)
    assert optimizer["a/exp_avg"].tolist() == moments["a/exp_avg"].tolist()
    assert load_file(tmp_path / "checkpoint-00000008" / "optimizer.safetensors") == {}
    checkpoint = storage.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.round == 8
    storage.close()
