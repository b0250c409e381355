"""Builds a corpus: `potluck data build`.

    OUT/index                the index (protocol/run/corpus.py), written last: with it the corpus is whole
    OUT/chunks/<name>        the chunks
    OUT/tokenizer.json       the tokenizer
    OUT/report.json          what was read of each file, and what was left out
    OUT/building/            during the build: what was asked for, and the spills (records.py)

The source is read once. All cores tokenize it, its documents are cut into records, and the records are sorted by their
keys in an external merge sort. `most_ids` ids at most are held in memory. A killed build resumes behind its last spill.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from peer.corpus import records, sources
from peer.corpus.records import (
    ChunkWriter,
    Counts,
    Cutter,
    FileCounts,
    Position,
    Spill,
    find_spills,
    merge_spills,
    write_all,
    write_spill,
)
from peer.corpus.rows import Reading
from peer.corpus.sources import Source, Unit
from peer.corpus.tokenizer import end_of_text, parse_tokenizer, specials, vocabulary
from peer.corpus.tokenizing import Pool
from peer.net.disk import Disk, disk_error
from protocol.errors import LocalError, UsageError, os_errors
from protocol.run import corpus
from protocol.run.corpus import CHUNKS, INDEX, TOKENIZER, CorpusIndex

REPORT = "report.json"
"""In a corpus's folder; the digest does not depend on it."""
MAX_SHOWN = 20
_KINDS = {
    "text": "text, one document",
    "jsonl": "JSON lines",
    "json": "JSON",
    "csv": "CSV",
    "tsv": "TSV",
    "parquet": "Parquet",
    "arrow": "Arrow",
}


def _planned(sources: Sequence[Source], reading: Reading) -> Iterator[str]:
    """Says what will be read, and what is left out."""
    files = [file for source in sources for file in source.files]
    for file in files[:MAX_SHOWN]:
        packed = f" in {file.compression}" if file.compression else ""
        rows = "" if file.format == "text" else f", a document a row, column {reading.column} (string)"
        yield f"reads {file}: {_KINDS[file.format]}{packed}{rows}; {file.size_bytes:,} bytes"
    if len(files) > MAX_SHOWN:
        yield f"reads {len(files) - MAX_SHOWN:,} more files: all are in {REPORT}"
    out = [left for source in sources for left in source.left_out]
    yield from (f"leaves out {left}" for left in out[:MAX_SHOWN])
    if len(out) > MAX_SHOWN:
        yield f"leaves out {len(out) - MAX_SHOWN:,} more: all are in {REPORT}"


def _counted(counts: dict[str, FileCounts]) -> Iterator[str]:
    """Says what was read of each file, those with bad rows first."""
    order = sorted(counts.items(), key=lambda item: item[1].left_out == 0)
    for name, found in order[:MAX_SHOWN]:
        empty = f", {found.without_text:,} without text" if found.without_text else ""
        yield f"{name}: {found.documents:,} documents{empty}, {found.text_bytes:,} bytes, {found.tokens:,} tokens"
        if found.left_out:
            yield f"{name}: {found.left_out:,} bad rows are left out, such as {found.first_left_out}"
    if len(order) > MAX_SHOWN:
        yield f"{len(order) - MAX_SHOWN:,} more files: all are in {REPORT}"


def _report(sources: Sequence[Source], counts: dict[str, FileCounts]) -> bytes:
    formats = {str(file): file.format for source in sources for file in source.files}
    found = {
        "files": [
            {"file": name, "format": formats.get(name, ""), **dataclasses.asdict(counts.get(name, FileCounts()))}
            for name in {**formats, **counts}
        ],
        "left_out": [
            {"file": str(left).rsplit(": ", 1)[0], "reason": left.reason} for s in sources for left in s.left_out
        ],
    }
    return json.dumps(found, indent=1, ensure_ascii=False).encode() + b"\n"


BUILDING = "building"
_REQUEST = "request.json"
PROGRESS_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The sources and settings of a corpus; `workers` and later fields do not change the corpus.

    spill_ids, most_ids: bounds of a spill's ids, besides a sixteenth of all ids so far
    """

    sources: tuple[Source, ...]
    tokenizer: bytes  # the bytes of its JSON file
    sequence: int
    out: Path
    reading: Reading = field(default_factory=Reading)
    seed: int = 0
    workers: int = 1  # processes that tokenize
    spill_ids: int = 1 << 20
    most_ids: int = 1 << 25
    merge_ids: int = 1 << 24  # ids that are sorted at once at the end

    def __post_init__(self) -> None:
        if not self.sources:
            raise UsageError("potluck data build: no source; name a file, a folder or a data set")
        if not any(source.kind == "hub" for source in self.sources):
            for option, given, usual in (
                ("--split", self.reading.split, "train"),
                ("--subset", self.reading.subset, ""),
            ):
                if given != usual:
                    raise UsageError(
                        f"{option} {given}: is for data sets of the hub; of a folder all files are read:"
                        " name those that you want"
                    )
        if not 1 <= self.sequence <= corpus.MAX_SEQUENCE:
            raise UsageError(f"--sequence {self.sequence}: must be in 1..{corpus.MAX_SEQUENCE}")


def build(request: Request, disk: Disk, say: Callable[[str], None], stop: threading.Event) -> CorpusIndex:
    """Builds a corpus in `request.out`. Returns its index. Raises UsageError; LocalError after `stop` was set."""
    out, building = request.out, request.out / BUILDING
    tokenizer = parse_tokenizer(request.tokenizer, "tokenizer")
    vocab_size = vocabulary(tokenizer)
    dtype = np.dtype(f"<u{corpus.id_bytes(vocab_size)}")
    asked = _description(request)
    is_new = not out.exists()
    _check_folder(out, asked)
    sources.forbid_the_hub(request.sources)
    for line in (*_planned(request.sources, request.reading), *_without_end(tokenizer)):
        say(line)
    lock = disk.lock(building, "`potluck data build`")
    try:
        disk.write(building / _REQUEST, asked)
        disk.write(out / TOKENIZER, request.tokenizer)
        disk.make_folder(out / CHUNKS)
        found = find_spills(disk, building)
        if not (found and found[-1].position is not None and found[-1].position.done):
            _read_all(request, disk, found, dtype, say, stop)
        index = _finish(request, disk, found, vocab_size, say, stop)
        for path in (*out.glob(".*"), *(out / CHUNKS).glob(".*")):  # left by a kill in the middle of a write
            disk.remove(path)
        total = _total(found)
        disk.write(out / REPORT, _report(request.sources, total.files))
        disk.write(out / INDEX, index.to_bytes())
        disk.remove(building / _REQUEST)  # first: a kill from here on leaves nothing to resume
    except OSError as error:
        raise disk_error(out, error) from None
    except LocalError:
        if not any(building.glob("spill-*")):  # there is nothing to resume
            disk.remove(out if is_new else building)
            if not is_new:
                disk.remove(out / TOKENIZER)
                with contextlib.suppress(OSError):
                    (out / CHUNKS).rmdir()
        raise
    finally:
        lock.close()
    disk.remove(building)
    for line in _counted(total.files):
        say(line)
    return index


def _without_end(tokenizer: Tokenizer) -> Iterator[str]:
    if end_of_text(tokenizer) is None:
        names = ", ".join(specials(tokenizer)) or "none"
        yield (
            "tokenizer: has no end of text that is known here, so documents run together; name one of its"
            f" special tokens with potluck data build --end TOKEN: {names}"
        )


def _total(found: list[Spill]) -> Counts:
    counts = Counts()
    for spill in found:
        counts.add(spill.counts)
    return counts


def _description(request: Request) -> bytes:
    """Returns all that the corpus depends on, as JSON. Raises UsageError."""
    return json.dumps(
        {
            "format": corpus.FORMAT,
            "sources": [sources.fingerprint(source) for source in request.sources],
            "column": request.reading.column,
            "split": request.reading.split,
            "subset": request.reading.subset,
            "skip_bad_rows": request.reading.skip_bad_rows,
            "tokenizer": hashlib.sha256(request.tokenizer).hexdigest(),
            "sequence": request.sequence,
            "seed": request.seed,
        }
    ).encode()


def _check_folder(out: Path, asked: bytes) -> None:
    """Raises UsageError if a corpus, another build or anything else is in the way."""
    begun = out / BUILDING / _REQUEST
    with os_errors(f"folder {out}", "choose another with --out"):
        if begun.is_file():
            if begun.read_bytes() != asked:
                raise UsageError(
                    f"folder {out}: a build of something else was begun there, or its source has changed since;"
                    " remove the folder, or choose another with --out"
                )
        elif (out / INDEX).exists():
            raise UsageError(
                f"folder {out}: has a corpus; see it with `potluck data show`, or choose another with --out"
            )
        elif out.exists() and any(entry.name != BUILDING for entry in out.iterdir()):
            raise UsageError(f"folder {out}: is not empty; choose another with --out")


# --- the first half: read, tokenize, spill


def _read_all(
    request: Request,
    disk: Disk,
    found: list[Spill],
    dtype: np.dtype[np.unsignedinteger],
    say: Callable[[str], None],
    stop: threading.Event,
) -> None:
    """Adds the missing spills to `found`."""
    position = (found[-1].position if found else None) or Position()
    cutter = Cutter(request.seed, request.sequence, dtype)
    cutter.document, cutter.part = position.document, position.part
    cutter.carry = np.frombuffer(position.carry, dtype)
    total, building = _total(found), request.out / BUILDING
    if found:
        say(f"goes on behind {total.n_tokens / 1e6:,.1f}M tokens")
    began = told = time.monotonic()
    first, held, counts = total.n_tokens, [records.none(dtype)], Counts()
    # for each unit under way, in order: (sources that are done, state of the next one), None in the middle of rows
    behind: deque[tuple[int, object] | None] = deque()

    def units() -> Iterator[Unit]:
        for number in range(position.source, len(request.sources)):
            state = position.state if number == position.source else None
            for unit in sources.units(request.sources[number], request.reading, state):
                behind.append(None if unit.state is None else (number, unit.state))
                yield unit

    def spill(where: Position | None) -> None:
        nonlocal held, counts
        (made, held), (counted, counts) = (records.join(held), [held[0]]), (counts, Counts())
        found.append(write_spill(disk, building, len(found), made, counted, where))

    with Pool(request.out / TOKENIZER, dtype.itemsize, request.workers) as pool:
        for tokenized in pool.run(units()):
            _unless_stopped(request, stop)
            some, new = cutter.cut(tokenized)
            held.append(some)
            counts.add(new)
            total.add(new)
            now, place, gathered = time.monotonic(), behind.popleft(), sum(len(part.ids) for part in held)
            if now - told >= PROGRESS_SECONDS:
                told = now
                rate = (total.n_tokens - first) / max(now - began, 1e-3)
                say(
                    f"tokenized {total.documents:,} documents, {total.n_bytes / 1e6:,.1f} MB,"
                    f" {total.n_tokens / 1e6:,.1f}M tokens; {rate / 1e6:.2f}M tokens/s"
                )
            due = place is not None and gathered >= max(request.spill_ids, total.n_tokens // 16)
            if due or gathered >= request.most_ids:
                part, carry = cutter.part, cutter.carry.tobytes()
                spill(None if place is None else Position(*place, cutter.document, part, carry))
    if not total.n_tokens:
        how = request.reading.option("--column")
        raise UsageError(f"source: has no text; name a source that has, or its column with {how}")
    if _description(request) != disk.read(building / _REQUEST):
        raise UsageError(f"source: changed while it was read; remove the folder {request.out}, and start again")
    spill(Position(source=len(request.sources), document=cutter.document, done=True))


def _unless_stopped(request: Request, stop: threading.Event) -> None:
    if stop.is_set():
        raise LocalError(f"folder {request.out}: stopped; start the same command again: it goes on where it was")


# --- the second half: sort, cut into chunks


def _finish(
    request: Request,
    disk: Disk,
    found: list[Spill],
    vocab_size: int,
    say: Callable[[str], None],
    stop: threading.Event,
) -> CorpusIndex:
    counts = _total(found)
    length, tokens = request.sequence, counts.n_tokens
    dtype = np.dtype(f"<u{corpus.id_bytes(vocab_size)}")
    rank = records.held_out_rank(counts)
    by_document = int(counts.tokens[:rank].sum()) > length and int(counts.tokens[rank:].sum()) > length
    if not by_document:
        rank = 0
    each = corpus.sequences_per_chunk(length, vocab_size)
    chunks = -(-tokens // (each * length))

    def wrote(number: int) -> None:
        _unless_stopped(request, stop)
        say(f"wrote chunk {number} of about {chunks}")

    folder = request.out / CHUNKS
    train = ChunkWriter(disk, folder, each, wrote)
    held_out = ChunkWriter(disk, folder, each, lambda number: None)
    if not by_document:
        train.diverted = (
            held_out,
            max(1, min(tokens // (records.HELD_OUT * length), records.HELD_OUT_TOKENS // length)),
        )
    write_all(merge_spills(found, request.merge_ids, dtype), rank, length, dtype, (train, held_out))
    if not train.count or not held_out.count:
        for spill in found:  # there is nothing to resume
            disk.remove(spill.path)
        raise UsageError(
            f"source: has only {tokens} tokens, two sequences of {length} are needed at least;"
            " add text or lower --sequence"
        )
    held = slice(rank) if by_document else slice(None)
    return CorpusIndex(
        tokenizer=hashlib.sha256(request.tokenizer).hexdigest(),
        vocab_size=vocab_size,
        seed=request.seed,
        sequence=length,
        sequences=train.count,
        chunks=b"".join(map(bytes.fromhex, train.names)),
        held_out=held_out.names[0],
        held_out_sequences=held_out.count,
        documents=counts.documents,
        tokens=tokens,
        text_bytes=counts.n_bytes,
        held_out_tokens=int(counts.tokens[held].sum()),
        held_out_bytes=int(counts.text_bytes[held].sum()),
    )
