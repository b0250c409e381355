"""Parts that unit tests of judging share with others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from protocol.codec import sparse
from protocol.codec.sparse import Sparse
from protocol.round import judging
from protocol.round.comparing import Update
from protocol.round.judging import Verdict
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import OuterSpec
from protocol.wire.commit import Commit, Contribution, LeftOut, Share
from tests.support import tiny

MODEL = ModelSpec(vocab_size=256, d_model=64, n_layers=2, n_heads=2, d_ff=128, context=8)
M = tiny.manifest(model=MODEL, outer=OuterSpec(topk=64))
SHARDS = layout.shard_names(MODEL)
PARENT = "ab" * 32
Sent = dict[str, list[Sparse]]


def drawn(seed: int, scale: float = 1.0) -> dict[str, list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return {s: [scale * rng.standard_normal(shape) for shape in layout.shapes(MODEL, s)] for s in SHARDS}


def encoded(arrays: dict[str, list[np.ndarray]]) -> Sent:
    codec = M.outer.codec
    return {
        s: sparse.decode(codec, layout.shapes(MODEL, s), sparse.encode(codec, [a.astype(np.float32) for a in tensors]))
        for s, tensors in arrays.items()
    }


COMMON = drawn(0)


def honest(seed: int, scale: float = 1.0) -> Sent:
    """What most learn, and as much again of its own."""
    own = drawn(seed + 1)
    return encoded({s: [scale * (a + 1.5 * b) for a, b in zip(COMMON[s], own[s], strict=True)] for s in SHARDS})


def times(sent: Sent, factor: float, shards: Sequence[str] = SHARDS) -> Sent:
    return {
        s: [Sparse(x.index, x.values * np.float32(factor if s in shards else 1)) for x in tensors]
        for s, tensors in sent.items()
    }


GOOD = [honest(i) for i in range(8)]


def update(sent: Sent) -> Update:
    return Update(lambda shard: [sent[shard]])


def names(count: int) -> list[str]:
    return [hashlib.sha256(bytes([i])).hexdigest() for i in range(count)]


def out(verdicts: Sequence[Verdict]) -> dict[int, str]:
    return {i: v.reason for i, v in enumerate(verdicts) if v.reason is not None}


ENEMIES = {
    "flipped": times(GOOD[7], -1.0),
    "flipped and as long as may be": times(GOOD[7], -9.9),
    "noise": encoded(drawn(99, 1.8)),
    "one shard flipped": times(GOOD[7], -1.0, ("block.1",)),
    "one shard flipped and long": times(GOOD[7], -2.0, ("head",)),
}


def commit(sent: Sequence[Sent], verdicts: Sequence[Verdict], **changes: object) -> Commit:
    shares = [Share(peer=f"p{i}", root=n, size=1, norm=1.0, listed=1) for i, n in enumerate(names(len(sent)))]
    made = [
        Contribution(replica=i, tokens=8, steps=1, loss=None, shares=(shares[i],), scale=v.scale, weight=v.weight)
        for i, v in enumerate(verdicts)
        if v.reason is None
    ]
    gone = [
        LeftOut(
            replica=i,
            reason=v.reason,
            judged=judging.name_of(Contribution(replica=i, tokens=8, steps=1, loss=None, shares=(shares[i],))),
            peers=tuple(v.faults),
            faults="1" * len(v.faults),
        )
        for i, v in enumerate(verdicts)
        if v.reason is not None
    ]
    said = {"plan": None, "diverged": (), "digests": {}, "time": 0.0, "round": 1, "run": "r", **changes}
    return Commit(parent=PARENT, contributions=tuple(made), left_out=tuple(gone), **said)  # type: ignore[arg-type]
