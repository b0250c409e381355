"""Texts for tests: small corpora of noise."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peer.corpus.sources import Unit
from peer.corpus.text import CHUNKS, INDEX
from peer.node.audit import HeldOutText
from protocol.codec import blob_hash
from protocol.run import corpus
from protocol.run.corpus import CorpusIndex


class NoText(HeldOutText):
    """A text of which nothing is read."""

    def __init__(self) -> None: ...


def write_corpus(
    folder: Path, count: int, sequence: int, vocab_size: int = 16, tokenizer: str = "0" * 64, tokens: int = 0
) -> tuple[CorpusIndex, NDArray[np.int64]]:
    """A corpus of `count` sequences of noise, and as many held out as fit into a chunk, at most four; and its sequences
    [count, L + 1].
    `tokens`: how many its source is said to have had, where a preset wants more than there are."""
    draw = np.random.default_rng(count)
    ids = draw.integers(0, vocab_size, (count + 4, sequence + 1))
    stored = ids.astype(f"<u{corpus.id_bytes(vocab_size)}")
    each = corpus.sequences_per_chunk(sequence, vocab_size)
    held = stored[count : count + min(4, each)]
    (folder / CHUNKS).mkdir(parents=True)

    def put(rows: NDArray[Any]) -> str:
        raw = rows.tobytes()
        name = blob_hash.name_of(raw)
        (folder / CHUNKS / name).write_bytes(raw)
        return name

    names = [put(stored[first : min(count, first + each)]) for first in range(0, count, each)]
    index = CorpusIndex(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        seed=0,
        sequence=sequence,
        sequences=count,
        chunks=b"".join(map(bytes.fromhex, names)),
        held_out=put(held),
        held_out_sequences=len(held),
        documents=1,
        tokens=tokens or ids.size,
        text_bytes=ids.size,
        held_out_tokens=held.size,
        held_out_bytes=4 * held.size,
    )
    (folder / INDEX).write_bytes(index.to_bytes())
    return index, ids[:count]


def documents(units: Iterable[Unit]) -> list[str]:
    """The text of all documents that end in these units."""
    found, text = [], b""
    for unit in units:
        for piece, ends in zip(unit.pieces, unit.ends, strict=True):
            text += piece
            if ends:
                found.append(text.decode())
                text = b""
    assert not text
    return found
