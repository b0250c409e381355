"""A small model, its text, and a full replica that trains it, for unit tests."""

from __future__ import annotations

import dataclasses

import numpy as np

from peer.state.storage import Shards
from protocol.identity import Identity
from protocol.run import init, layout
from protocol.run.corpus import CorpusIndex
from protocol.run.manifest import TrainSpec
from tests.support import tiny
from tests.support.texts import NoText

SEQUENCES, LENGTH, VOCABULARY = 40_000, 16, 2048
MODEL = dataclasses.replace(
    tiny.manifest().model, vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=2, d_ff=64, context=LENGTH
)


TRAIN = TrainSpec(
    inner_steps=6, micro_batches=2, rows=2, sequence=LENGTH, lr=2e-3, warmup_steps=0, total_steps=600
)  # fmt: skip


RUN = tiny.manifest(model=MODEL, train=TRAIN, rounds=100)
KEYS = tuple(Identity(bytes([9, i] * 16)) for i in range(5))
NAMES = tuple(key.peer_id for key in KEYS)
SHARDS = layout.shard_names(MODEL)


class Text(NoText):
    """Each sequence has few words, which follow from its slot."""

    @property
    def index(self) -> CorpusIndex:
        return CorpusIndex(
            tokenizer="0" * 64, vocab_size=VOCABULARY, seed=0, sequence=LENGTH, sequences=SEQUENCES, chunks=bytes(32),
            held_out="0" * 64, held_out_sequences=1, documents=1, tokens=1, text_bytes=1, held_out_tokens=1,
            held_out_bytes=1,
        )  # fmt: skip

    async def sequences(self, slots: range) -> np.ndarray:
        rows = []
        for slot in slots:
            draw = np.random.default_rng(slot % SEQUENCES)
            rows.append(draw.choice(draw.integers(0, VOCABULARY, 6), LENGTH + 1))
        return np.stack(rows).astype(np.int64)


class NoPipes:
    """A full replica has no neighbours."""

    async def neighbours(self, *_: object) -> tuple[None, None]:
        return None, None

    def forget(self, round: int) -> None: ...


def theta() -> Shards:
    return {shard: init.initial_shard(MODEL, RUN.seed_bytes, shard) for shard in SHARDS}
