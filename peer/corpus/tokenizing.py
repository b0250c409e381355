"""Text to ids: on all cores for a build, in windows for an evaluation; and training a tokenizer.

*Build.* One process a core (peer/corpus/tokenizer_process.py).

*Evaluation.* All documents are concatenated as in a corpus, each followed by the end-of-text token. A window has L + 1
ids, and the next one begins with its last: each id is predicted once, from those before it in its window. These are the
disjoint windows of lm-evaluation-harness, except that they go on across documents, as in training.

    loss = nats / tokens        perplexity = e ^ loss        bits per byte = nats / (ln 2 x bytes)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from peer.corpus import sources
from peer.corpus.rows import Reading
from peer.corpus.sources import Source, Unit
from peer.corpus.tokenizer import END_OF_TEXT, Encoder, encode
from peer.corpus.tokenizer_process import Ended, TokenizerProcess
from protocol.errors import LocalError

AHEAD = 2
"""Units that wait for each worker, so that none waits for the reader."""


@dataclass(slots=True)
class Tokenized:
    """A unit, its ids, and how many of them each piece has."""

    unit: Unit
    ids: NDArray[np.unsignedinteger]
    lengths: NDArray[np.int64]


class Pool:
    """The workers; a context manager. `tokenizer`: its JSON file. `id_bytes`: 2 or 4."""

    def __init__(self, tokenizer: Path, id_bytes: int, workers: int) -> None:
        self._dtype = np.dtype(f"<u{id_bytes}")
        raw = tokenizer.read_bytes()
        self._processes = [TokenizerProcess(raw, f"tokenizer {tokenizer}") for _ in range(workers)]
        self._free: SimpleQueue[TokenizerProcess] = SimpleQueue()
        for process in self._processes:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(workers, "tokenize")

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()
        self._threads.shutdown()

    def run(self, units: Iterable[Unit]) -> Iterator[Tokenized]:
        """Tokenizes units, in order. Raises LocalError if a worker dies, and what `units` raises."""
        waiting: deque[Future[Tokenized]] = deque()
        for unit in units:
            waiting.append(self._threads.submit(self._tokenize, unit))
            if len(waiting) > (1 + AHEAD) * len(self._processes):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _tokenize(self, unit: Unit) -> Tokenized:
        process = self._free.get()
        try:
            ids, lengths = process.unit(unit.pieces, unit.ends, unit.begins, self._dtype.itemsize)
        except Ended as error:
            raise LocalError(
                f"tokenizer: a process that tokenizes ended (exit code {error.code}); free memory or use fewer"
                " --threads, then start again: it goes on where it was"
            ) from None
        finally:
            self._free.put(process)
        return Tokenized(unit, np.frombuffer(ids, self._dtype), np.frombuffer(lengths, "<i8"))


ROWS = 8
"""Windows that are given at once."""


@dataclass(slots=True)
class Read:
    """The progress of reading: documents, bytes of their text, and the ids of these."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0


def windows(
    of: Sequence[Source], reading: Reading, encoder: Encoder, length: int, read: Read
) -> Iterator[NDArray[np.int64]]:
    """Windows [n, L + 1] of `length` L, the last one perhaps shorter; `read` counts. Raises UsageError."""
    held: list[int] = [] if encoder.end is None else [encoder.end]
    for source in of:
        for unit in sources.units(source, reading):
            read.documents += sum(map(bool, unit.ends))
            read.text_bytes += sum(map(len, unit.pieces))
            found = encode(encoder, unit.pieces, unit.ends, unit.begins)
            read.tokens += sum(map(len, found))
            for ids in found:
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
