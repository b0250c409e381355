"""Makes a tokenizer from the text of a run: byte-level BPE, by the package `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from peer.corpus import sources
from peer.corpus.sources import Reading, Source
from peer.corpus.tokenizer import END_OF_TEXT

ENOUGH_BYTES = 100_000_000
"""Of the text, from its beginning: merges hardly change with more, and memory grows with it."""


def train_tokenizer(found: Sequence[Source], vocab_size: int, reading: Reading) -> bytes:
    """The JSON file of a tokenizer with at most `vocab_size` ids, the first of which ends a text. Raises UsageError."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(found, reading), trainer)
    return tokenizer.to_str().encode()


def _pieces(found: Sequence[Source], reading: Reading) -> Iterator[str]:
    left = ENOUGH_BYTES // max(1, len(found))
    for source in found:
        taken = 0
        for unit in sources.units(source, reading):
            for piece in unit.pieces:
                taken += len(piece)
                yield piece.decode()
            if taken >= left:
                break
