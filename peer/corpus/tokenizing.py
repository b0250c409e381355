"""Text to ids: on all cores for a build, in windows for an evaluation; and training a tokenizer.

*Build.* One process a core. A worker, `python -m peer.corpus.tokenizing TOKENIZER ID-BYTES`, answers messages from its
standard input on its standard output, both with their length in front, and ends with its input.

    -> [pieces of text, for each piece whether a document ends with it, whether the first begins one]
    <- [ids of all pieces (little-endian), how many there are of each piece (int64)]

*Evaluation.* All documents are concatenated as in a corpus, each followed by the end-of-text token. A window has L + 1
ids, and the next one begins with its last: each id is predicted once, from those before it in its window. These are the
disjoint windows of lm-evaluation-harness, except that they go on across documents, as in training.

    loss = nats / tokens        perplexity = e ^ loss        bits per byte = nats / (ln 2 x bytes)
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO

import msgpack
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from peer.corpus import sources
from peer.corpus.rows import Reading
from peer.corpus.sources import Source, Unit
from peer.corpus.tokenizer import END_OF_TEXT, TextEncoder, parse_tokenizer
from protocol.errors import LocalError

AHEAD = 2
"""Units that wait for each worker, so that none waits for the reader."""
_LENGTH = 8


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
        command = [sys.executable, "-m", "peer.corpus.tokenizing", str(tokenizer), str(id_bytes)]
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            for _ in range(workers)
        ]
        self._free: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for process in self._processes:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(workers, "tokenize")

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
            process.wait()
        self._threads.shutdown()
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

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
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _send(process.stdin, msgpack.packb([unit.pieces, unit.ends, unit.begins]))
            answer = _receive(process.stdout)
        except OSError:
            answer = b""
        finally:
            self._free.put(process)
        if not answer:
            raise LocalError(
                f"tokenizer: a process that tokenizes ended (exit code {process.wait()}); see the lines above,"
                " free memory or use fewer --threads, then start again: it goes on where it was"
            )
        ids, lengths = msgpack.unpackb(answer)
        return Tokenized(unit, np.frombuffer(ids, self._dtype), np.frombuffer(lengths, "<i8"))


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(_LENGTH, "little"))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes:
    head = pipe.read(_LENGTH)
    return pipe.read(int.from_bytes(head, "little")) if len(head) == _LENGTH else b""


def encode(encoder: TextEncoder, pieces: Sequence[bytes], ends: Sequence[bool], begins: bool) -> list[list[int]]:
    """Returns the ids of each piece of a unit, with the end-of-text token, if there is one, behind each document.

    An empty document has no ids. `begins`: whether the first piece begins a document.
    """
    tail = [] if encoder.end is None else [encoder.end]
    found = encoder.pieces([piece.decode() for piece in pieces], [begins, *ends][: len(pieces)])
    return [ids + tail if piece and last else ids for ids, piece, last in zip(found, pieces, ends, strict=True)]


def serve(tokenizer_file: Path, id_bytes: int) -> None:
    """What a worker does, until its input ends."""
    tokenizer = parse_tokenizer(tokenizer_file.read_bytes(), f"tokenizer {tokenizer_file}")
    encoder, dtype = TextEncoder(tokenizer), np.dtype(f"<u{id_bytes}")
    while request := _receive(sys.stdin.buffer):
        arrays = [np.array(ids, dtype) for ids in encode(encoder, *msgpack.unpackb(request))]
        lengths = np.array([len(array) for array in arrays], "<i8")
        _send(sys.stdout.buffer, msgpack.packb([b"".join(array.tobytes() for array in arrays), lengths.tobytes()]))


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


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which are for the process that feeds us
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends us silently when that process has died
    serve(Path(sys.argv[1]), int(sys.argv[2]))
