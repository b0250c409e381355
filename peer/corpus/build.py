"""Builds a corpus: `potluck data build`.

    OUT/index                the index (protocol/run/corpus.py), written last: with it the corpus is whole
    OUT/chunks/<name>        the chunks
    OUT/tokenizer.json       the tokenizer
    OUT/report.json          what was read of each file, and what was left out
    OUT/building/            while it is being built: what was asked for, and the spills (peer/corpus/spills.py)

The source is read once. All cores tokenize it, its documents are cut into records, and the records sorted by their keys in an
external merge sort (Knuth, volume 3, section 5.4): at most `most_ids` ids are held in memory, whatever the source's size, and on
disk, until the build is done, all ids twice. A build that was killed goes on behind its last spill.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from peer.corpus import records, report, sources, spills
from peer.corpus.chunks import ChunkWriter, write_all
from peer.corpus.documents import Reading, Unit
from peer.corpus.records import Counts, Cutter, Records
from peer.corpus.sources import Source
from peer.corpus.spills import Position, Spill
from peer.corpus.tokenizer import end_of_text, parse_tokenizer, specials, vocabulary
from peer.corpus.tokenizing import Pool
from peer.net.disk import Disk, disk_error
from protocol.errors import LocalError, UsageError
from protocol.run import corpus
from protocol.run.corpus import CHUNKS, INDEX, TOKENIZER, CorpusIndex

BUILDING = "building"
_REQUEST = "request.json"
PROGRESS_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a corpus is to be made of. `tokenizer`: the bytes of its JSON file. The rest only says how: `workers` processes tokenize;
    a spill has between `spill_ids` ids, a sixteenth of all so far and `most_ids`; `merge_ids` are sorted at once at the end. None of
    these changes the corpus."""

    sources: tuple[Source, ...]
    tokenizer: bytes
    sequence: int
    out: Path
    reading: Reading = field(default_factory=Reading)
    seed: int = 0
    workers: int = 1
    spill_ids: int = 1 << 20
    most_ids: int = 1 << 25
    merge_ids: int = 1 << 24

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
                        f"{option} {given}: is for data sets of the hub; of a folder all files are read: name those that you want"
                    )
        if not 1 <= self.sequence <= corpus.MAX_SEQUENCE:
            raise UsageError(f"--sequence {self.sequence}: must be in 1..{corpus.MAX_SEQUENCE}")


@dataclass(slots=True)
class _Seen:
    """What the progress lines tell. `since`: when this start began to tokenize, and how many tokens there were by then."""

    say: Callable[[str], None]
    tokens: int = 0
    text_bytes: int = 0
    documents: int = 0
    since: tuple[float, int] = (0.0, 0)
    told: float = 0.0

    def tell(self) -> None:
        now = time.monotonic()
        if now - self.told >= PROGRESS_SECONDS:
            self.told = now
            rate = (self.tokens - self.since[1]) / max(now - self.since[0], 1e-3)
            self.say(
                f"tokenized {self.documents:,} documents, {self.text_bytes / 1e6:,.1f} MB, {self.tokens / 1e6:,.1f}M tokens;"
                f" {rate / 1e6:.2f}M tokens/s"
            )


def build(request: Request, disk: Disk, say: Callable[[str], None], stop: threading.Event) -> CorpusIndex:
    """The index of the corpus that is in `request.out` afterwards. Raises UsageError; LocalError after `stop` was set."""
    out, building = request.out, request.out / BUILDING
    tokenizer = parse_tokenizer(request.tokenizer, "tokenizer")
    vocab_size = vocabulary(tokenizer)
    dtype = np.dtype(f"<u{corpus.id_bytes(vocab_size)}")
    asked = _description(request)
    is_new = not out.exists()
    _check_folder(out, asked)
    sources.forbid_the_hub(request.sources)
    for line in (*report.planned(request.sources, request.reading), *_without_end(tokenizer)):
        say(line)
    lock = disk.lock(building, "`potluck data build`")
    try:
        disk.write(building / _REQUEST, asked)
        disk.write(out / TOKENIZER, request.tokenizer)
        disk.make_folder(out / CHUNKS)
        found = spills.find(disk, building)
        if not (found and found[-1].position is not None and found[-1].position.done):
            _read_all(request, disk, found, dtype, say, stop)
        index = _finish(request, disk, found, vocab_size, say, stop)
        for path in (*out.glob(".*"), *(out / CHUNKS).glob(".*")):  # what a kill left in the middle of a write
            disk.remove(path)
        total = _total(found)
        disk.write(out / report.REPORT, report.written(request.sources, total.files))
        disk.write(out / INDEX, index.to_bytes())
        disk.remove(building / _REQUEST)  # first, since what is left of a build after a kill cannot be gone on with
    except OSError as error:
        raise disk_error(out, error) from None
    except LocalError:
        if not any(building.glob("spill-*")):  # nothing was done yet that is worth keeping
            disk.remove(out if is_new else building)
            if not is_new:
                _remove_empty(disk, out)
        raise
    finally:
        lock.close()
    disk.remove(building)
    for line in report.counted(total.files):
        say(line)
    return index


def _without_end(tokenizer: Tokenizer) -> Iterator[str]:
    """What is said where documents would run together."""
    if end_of_text(tokenizer) is None:
        names = ", ".join(specials(tokenizer)) or "none"
        yield (
            "tokenizer: has no end of text that is known here, so documents run together; name one of its special tokens"
            f" with potluck data build --end TOKEN: {names}"
        )


def _total(found: list[Spill]) -> Counts:
    counts = Counts()
    for spill in found:
        counts.add(spill.counts)
    return counts


def _description(request: Request) -> bytes:
    """All that the corpus follows from. Raises UsageError."""
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
    """Raises UsageError where a corpus, another build or anything else is in the way."""
    begun = out / BUILDING / _REQUEST
    try:
        if begun.is_file():
            if begun.read_bytes() != asked:
                raise UsageError(
                    f"folder {out}: a build of something else was begun there, or its source has changed since; remove the folder, or"
                    " choose another with --out"
                )
        elif (out / INDEX).exists():
            raise UsageError(
                f"folder {out}: has a corpus; see it with `potluck data show`, or choose another with --out"
            )
        elif out.exists() and any(entry.name != BUILDING for entry in out.iterdir()):
            raise UsageError(f"folder {out}: is not empty; choose another with --out")
    except OSError as error:
        raise UsageError(f"folder {out}: {error.strerror}; choose another with --out") from None


def _remove_empty(disk: Disk, out: Path) -> None:
    disk.remove(out / TOKENIZER)
    with contextlib.suppress(OSError):
        (out / CHUNKS).rmdir()


# --- the first half: read, tokenize, spill


def _read_all(
    request: Request,
    disk: Disk,
    found: list[Spill],
    dtype: np.dtype[np.unsignedinteger],
    say: Callable[[str], None],
    stop: threading.Event,
) -> None:
    """Adds the spills that are missing to `found`."""
    position = (found[-1].position if found else None) or Position()
    cutter = Cutter(request.seed, request.sequence, dtype)
    cutter.document, cutter.part = position.document, position.part
    cutter.carry = np.frombuffer(position.carry, dtype)
    seen = _Seen(say)
    for spill in found:
        _see(seen, spill.counts)
    if found:
        say(f"goes on behind {seen.tokens / 1e6:,.1f}M tokens")
    seen.told = time.monotonic()
    seen.since = (seen.told, seen.tokens)
    gathered, places = _Gathered(disk, request.out / BUILDING, found, dtype), _Places()
    with Pool(request.out / TOKENIZER, dtype.itemsize, request.workers) as pool:
        for tokenized in pool.run(_units(request, position, places)):
            _unless_stopped(request, stop)
            some, counts = cutter.cut(tokenized)
            gathered.add(some, counts)
            _see(seen, counts)
            seen.tell()
            where = places.take(cutter)
            due = where is not None and gathered.ids >= max(request.spill_ids, seen.tokens // 16)
            if due or gathered.ids >= request.most_ids:
                gathered.spill(where)
    if not seen.tokens:
        how = request.reading.option("--column")
        raise UsageError(f"source: has no text; name a source that has, or its column with {how}")
    if _description(request) != disk.read(request.out / BUILDING / _REQUEST):
        raise UsageError(f"source: changed while it was read; remove the folder {request.out}, and start again")
    gathered.spill(Position(source=len(request.sources), document=cutter.document, done=True))


def _unless_stopped(request: Request, stop: threading.Event) -> None:
    if stop.is_set():
        raise LocalError(f"folder {request.out}: stopped; start the same command again: it goes on where it was")


class _Gathered:
    """What was read since the last spill. `ids`: how many ids that is."""

    def __init__(self, disk: Disk, folder: Path, found: list[Spill], dtype: np.dtype[np.unsignedinteger]) -> None:
        self._disk, self._folder, self._found = disk, folder, found
        empty = np.zeros(0, np.int64)
        self._none = Records(empty.astype(np.uint64), empty.astype(np.uint16), empty, empty, empty.astype(dtype))
        self._begin()

    def _begin(self) -> None:
        self._held, self._counts, self.ids = [self._none], Counts(), 0

    def add(self, some: Records, counts: Counts) -> None:
        """Takes the records of one unit."""
        self._held.append(some)
        self._counts.add(counts)
        self.ids += len(some.ids)

    def spill(self, where: Position | None) -> None:
        """Makes all of it durable. Raises UsageError."""
        made, counts = records.join(self._held), self._counts
        self._begin()
        self._found.append(spills.write(self._disk, self._folder, len(self._found), made, counts, where))


class _Places:
    """For each unit that is under way, in order, where to go on behind it: (sources that are done, state of the next)."""

    def __init__(self) -> None:
        self._behind: list[tuple[int, object] | None] = []

    def put(self, source: int, unit: Unit) -> None:
        """A unit of this source goes to the tokenizers."""
        self._behind.append(None if unit.state is None else (source, unit.state))

    def take(self, cutter: Cutter) -> Position | None:
        """The oldest unit that was put was cut."""
        behind = self._behind.pop(0)
        if behind is None:
            return None
        return Position(behind[0], behind[1], cutter.document, cutter.part, cutter.carry.tobytes())


def _units(request: Request, position: Position, places: _Places) -> Iterator[Unit]:
    state = position.state
    for number in range(position.source, len(request.sources)):
        for unit in sources.units(request.sources[number], request.reading, state):
            places.put(number, unit)
            yield unit
        state = None


def _see(seen: _Seen, counts: Counts) -> None:
    seen.documents += counts.documents
    seen.tokens += int(counts.tokens.sum())
    seen.text_bytes += int(counts.text_bytes.sum())


# --- the second half: sort, cut into chunks


def _finish(
    request: Request,
    disk: Disk,
    found: list[Spill],
    vocab_size: int,
    say: Callable[[str], None],
    stop: threading.Event,
) -> CorpusIndex:
    """Writes the chunks; the index that names them."""
    counts = _total(found)
    length, tokens = request.sequence, int(counts.tokens.sum())
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
    write_all(spills.merged(found, request.merge_ids, dtype), rank, length, dtype, (train, held_out))
    if not train.count or not held_out.count:
        for spill in found:  # there is nothing to go on with
            disk.remove(spill.path)
        raise UsageError(
            f"source: has only {tokens} tokens, two sequences of {length} are needed at least; add text or lower --sequence"
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
        text_bytes=int(counts.text_bytes.sum()),
        held_out_tokens=int(counts.tokens[held].sum()),
        held_out_bytes=int(counts.text_bytes[held].sum()),
    )
