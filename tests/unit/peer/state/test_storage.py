"""What of a peer's offers and error feedback is found after a crash, and the files that other programs can read."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from peer.net.base import Clock
from peer.net.disk import Disk
from peer.state.storage import Checkpoint, FeedbackWriter, Storage
from protocol.ledger import retention
from protocol.run import layout
from protocol.wire.commit import Part
from protocol.wire.session import Offer


def offer(round: int) -> Offer:
    part = Part(shard="head", digest=f"{round:064x}", size=8, norm=1.0)
    return Offer(round=round, replica=0, parts=(part,), tokens=8, steps=1, loss=2.0)


def feedback(value: float) -> dict[str, list[np.ndarray]]:
    return {"head": [np.full(3, value, np.float32), np.full((2, 5), value, np.float32)]}


def copies(tmp_path: Path) -> list[Path]:
    """What is in memory."""
    return [path for path in (tmp_path / "memory").rglob("*") if path.is_file()]


def found(folder: Path, disk: Disk | None = None) -> tuple[int, float | None, Offer | None, tuple[int, ...]]:
    """As a process finds it that starts now; last, the rounds of the offers that the feedback does not know of."""
    storage = Storage(folder, None, disk)
    state = storage.load_feedback()
    storage.close()
    value = float(state.feedback["head"][1][1, 4]) if state.feedback else None
    return state.round, value, state.offer, tuple(o.round for o in state.since)


def test_an_offer_and_its_feedback_are_found_wherever_the_process_was_killed(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.close()
    assert found(tmp_path) == (0, None, None, ())
    storage.save_offer(offer(1))
    assert found(tmp_path) == (0, None, offer(1), (1,))
    storage.save_feedback(1, feedback(1.0))
    assert found(tmp_path) == (1, 1.0, offer(1), ())
    storage.save_feedback(1, feedback(1.5), given_back=1)
    assert found(tmp_path) == (1, 1.5, None, ())
    storage.save_offer(offer(2), given_back=1)
    assert found(tmp_path) == (1, 1.5, offer(2), (2,))
    storage.save_feedback(2, feedback(2.0), given_back=1)
    storage.save_feedback(3, feedback(3.0), given_back=1)  # a round that sent nothing
    assert found(tmp_path) == (3, 3.0, None, ())
    newest = tmp_path / "feedback-00000003.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert found(tmp_path) == (2, 2.0, offer(2), ())


def test_a_payload_that_a_later_offer_has_too_is_kept(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    name = storage.blobs.put(b"payload", 1, protect=True)
    same = [dataclasses.replace(offer(n), parts=(Part(shard="head", digest=name, size=7, norm=1.0),)) for n in (1, 2)]
    for each in same:
        storage.save_offer(each, given_back=each.round - 1)
    for round in (2, 3):
        storage.save_feedback(round, feedback(1.0), given_back=1)
    assert storage.offers == same[1:]
    storage.blobs.release(name)
    assert storage.own_payload(same[1], same[1].parts[0]) == b"payload"
    storage.close()


def test_a_killed_process_leaves_its_feedback_in_memory(tmp_path: Path) -> None:
    disk = Disk(memory=tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    storage = Storage(tmp_path / "peer", None, disk)
    storage.close()
    assert not storage.copy_feedback(1, feedback(0.5)), "nothing on disk tells where it is"
    storage.save_feedback(1, feedback(1.0))
    for round in (2, 3, 4):
        storage.save_offer(offer(round), given_back=0 if round < 4 else 3)
        assert storage.copy_feedback(round, feedback(round), given_back=0 if round < 4 else 3)
    (copy,) = copies(tmp_path)
    copy.with_name(f".{copy.name}.1.2").write_bytes(b"torn")
    assert found(tmp_path / "peer", disk) == (4, 4.0, offer(4), ())
    assert copies(tmp_path) == [copy], "what a kill has left half-written is removed"
    storage.save_offer(offer(5), given_back=4)
    assert found(tmp_path / "peer", disk) == (4, 4.0, offer(5), (4, 5)), "4 went back, which the copy does not know"
    storage.save_feedback(5, feedback(5.0))
    assert not copies(tmp_path), "what is on disk needs no copy"
    storage.copy_feedback(6, feedback(6.0))
    storage.save_feedback(6, feedback(6.5))
    assert found(tmp_path / "peer", disk) == (6, 6.5, None, ())


def test_a_copy_counts_only_for_the_feedback_that_it_was_made_after(tmp_path: Path) -> None:
    """A part of the feedback went elsewhere since: the copy still has it."""
    (tmp_path / "memory").mkdir()
    disk = Disk(memory=tmp_path / "memory")
    storage = Storage(tmp_path / "peer", None, disk)
    storage.save_feedback(1, feedback(1.0))
    storage.copy_feedback(2, feedback(2.0))
    (copy,) = copies(tmp_path)
    older = copy.read_bytes()
    storage.notes = {"handed_over": "1"}
    storage.save_feedback(2, feedback(1.5))
    copy.write_bytes(older)  # as if the process had died before it removed it
    storage.close()
    assert found(tmp_path / "peer", disk)[:2] == (2, 1.5)


def test_a_loss_of_power_leaves_the_feedback_on_disk_and_the_offers_since(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    disk = Disk(memory=tmp_path / "memory")
    storage = Storage(tmp_path / "peer", None, disk)
    storage.save_feedback(1, feedback(1.0))
    for round in (2, 3, 4):
        storage.save_offer(offer(round), given_back=2 if round > 2 else 0)
        storage.copy_feedback(round, feedback(round), given_back=2 if round > 2 else 0)
    shutil.rmtree(tmp_path / "memory")
    storage.close()
    storage = Storage(tmp_path / "peer", None, disk)
    state = storage.load_feedback()
    assert (state.round, [o.round for o in state.since], state.given_back) == (1, [2, 3, 4], {2})
    assert state.offer == offer(4)
    storage.save_feedback(4, feedback(4.0), given_back=2)
    storage.save_feedback(5, feedback(5.0), given_back=2)
    assert [o.round for o in storage.offers] == [4], "older ones are not needed once two files on disk know of them"
    assert sorted(p.name for p in (tmp_path / "peer").glob("offer-*")) == ["offer-00000004.json"]
    storage.close()


async def test_what_many_rounds_write_is_little(tmp_path: Path) -> None:
    """At most 0.02 bytes a parameter and round, on average, and it is counted."""
    (tmp_path / "memory").mkdir()
    disk = Disk(memory=tmp_path / "memory")
    storage = Storage(tmp_path / "peer", None, disk)
    arrays = {"head": [np.zeros(10_000, np.float32), np.zeros((2, 5), np.float32)]}
    rounds = 2 * retention.SAVED_ROUNDS

    writer = FeedbackWriter(storage, arrays, Clock(), 0)
    for round in range(1, rounds + 1):
        arrays["head"][0] += 1
        writer.changed(round)
        await writer.written()
    storage.close()
    assert storage.saved_round == rounds - retention.SAVED_ROUNDS + 1
    assert found(tmp_path / "peer", disk)[0] == rounds
    assert 0 < disk.written_bytes <= 0.02 * 10_000 * rounds


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
    assert checkpoint.round == 8
    storage.close()
