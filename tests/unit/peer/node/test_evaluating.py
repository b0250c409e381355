"""The gain of a chain's contribution: every payload of the rows of tokens counts, and the model is exactly what it was
afterwards."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from peer.node.evaluating import STEP, Scorer
from peer.training.inference import Measured
from protocol.codec import blob_hash, sparse
from protocol.codec.sparse import Sparse
from protocol.ledger import part_lists
from protocol.planning import memory
from protocol.run import layout
from protocol.run.manifest import OuterSpec
from protocol.wire.commit import Part
from tests.support import tiny

MODEL = dataclasses.replace(tiny.manifest().model, residual_width=2)
M = tiny.manifest(model=MODEL, outer=OuterSpec(topk=4096))
SHARDS = layout.shard_names(MODEL)
WINDOWS = np.arange(27).reshape(3, 9) % MODEL.vocab_size


def theta(seed: int = 0) -> dict[str, list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return {s: [rng.normal(0, 0.3, shape).astype(np.float32) for shape in layout.shapes(MODEL, s)] for s in SHARDS}


def test_two_payloads_of_a_shard_are_taken_back_exactly_where_they_touch_the_same_entries() -> None:
    """By the loss of windows that read every row: it would differ by what the first payload leaves where the second one
    was taken back first."""
    model, index = Measured(MODEL, theta(), "cpu"), np.arange(60)
    payloads = [Sparse(index + shift, np.full(60, size, np.float32)) for shift, size in ((0, 0.1), (36, -1e6))]
    plain = model(WINDOWS)
    with model.moved([("anchor", [payload]) for payload in payloads], 1 / 3):
        both = model(WINDOWS)
    assert model(WINDOWS) == plain
    with model.moved([("anchor", [payloads[1]])], 1 / 3):
        assert len({plain, both, model(WINDOWS)}) == 3
    summed = theta()
    for payload in payloads:
        summed["anchor"][0].reshape(-1)[payload.index] += np.float32(1 / 3) * payload.values
    assert Measured(MODEL, summed, "cpu")(WINDOWS) == pytest.approx(both, rel=1e-6)


def test_a_chain_gains_what_the_sum_of_its_payloads_gains() -> None:
    chain, blobs, lists = tiny.replica(0, "a", "b"), dict[str, bytes](), []
    together = {s: [a.astype(np.float64) for a in arrays] for s, arrays in theta().items()}
    step = STEP * M.outer.eta
    for number, stage in enumerate(chain.stages):
        parts = []
        for shard in memory.stage_shards(M, stage.first, stage.last):
            payload = sparse.encode(M.outer.codec, theta(1 + number)[shard])
            blobs[blob_hash.name_of(payload)] = payload
            parts.append(Part(shard=shard, digest=blob_hash.name_of(payload), size=len(payload), norm=1.0))
            shapes = layout.shapes(MODEL, shard)
            for array, sent in zip(together[shard], sparse.decode(M.outer.codec, shapes, payload), strict=True):
                array.reshape(-1)[sent.index] += step * sent.values
        lists.append(part_lists.share_of(stage.peer, tuple(parts)))
        blobs[lists[-1].root] = part_lists.pack(tuple(parts))
    of = tiny.contribution(0, shares=tuple(lists))
    scorer = Scorer(M, tiny.OPERATOR, None, lambda message: None, blobs.get, None)  # type: ignore[arg-type]
    model = Measured(MODEL, theta(), "cpu")
    plain, there = model(WINDOWS), WINDOWS[:, 1:].size
    assigned, other = scorer.gains(model, of, WINDOWS, WINDOWS, plain / there)
    moved = Measured(MODEL, {s: [a.astype(np.float32) for a in x] for s, x in together.items()}, "cpu")
    expected = (moved(WINDOWS) - plain) / there
    assert [assigned, other] == pytest.approx([expected] * 2, rel=1e-3)
    assert abs(expected) > 1e-3
    assert model(WINDOWS) == plain
