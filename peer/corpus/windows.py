"""Given text as the windows that a model is trained on, to find its loss there.

All documents stand behind one another as in a corpus, each with the end-of-text token behind it, if the tokenizer has one. A window
has L + 1 ids, and the next one begins with its last: so each id is predicted once, from those before it in its window. The
end-of-text token stands before the first id. Without one, nothing foretells the first id, and it is not counted.

These are the disjoint windows of lm-evaluation-harness (`get_rolling_token_windows` with a context of one), except that they go on across
documents, as in training, and that the last one may be short. Of all predictions' loss, in nats, and the text's UTF-8 bytes:

    loss = nats / tokens        perplexity = e ^ loss        bits per byte = nats / (ln 2 x bytes)

The last is that of the Pile (Gao et al., 2020, arXiv:2101.00027, section 3.1): (tokens / bytes) x loss / ln 2. It does not depend on the
tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from peer.corpus import sources
from peer.corpus.sources import Reading, Source
from peer.corpus.tokenizer import TextEncoder
from peer.corpus.tokenizing import encode

ROWS = 8
"""Windows that are given at once."""


@dataclass(slots=True)
class Read:
    """What was read so far: documents, and bytes of their text."""

    documents: int = 0
    text_bytes: int = 0


def windows(
    of: Sequence[Source], reading: Reading, tokenizer: Tokenizer, length: int, read: Read
) -> Iterator[NDArray[np.int64]]:
    """Windows [n, L + 1] of `length` L, the last one perhaps shorter; `read` counts. Raises UsageError."""
    encoder = TextEncoder(tokenizer)
    held: list[int] = [] if encoder.end is None else [encoder.end]
    for source in of:
        for unit in sources.units(source, reading):
            read.documents += sum(map(bool, unit.ends))
            read.text_bytes += sum(map(len, unit.pieces))
            for ids in encode(encoder, unit.pieces, unit.ends, unit.begins):
                held += ids
                while len(held) > ROWS * length:
                    yield _rows(held, ROWS, length)
                    held = held[ROWS * length :]
    if count := (len(held) - 1) // length:
        yield _rows(held, count, length)
        held = held[count * length :]
    if len(held) > 1:
        yield np.array([held], np.int64)


def _rows(ids: Sequence[int], count: int, length: int) -> NDArray[np.int64]:
    return np.array([ids[row * length : (row + 1) * length + 1] for row in range(count)], np.int64)
