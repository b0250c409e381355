"""The rows of a file, by its format: the text is a string, or missing (null).

Other values make a bad row, which is named by its number and, in a file of lines, its line; both count from 1. An error
behind which a format cannot be read raises UsageError.
"""

from __future__ import annotations

import codecs
import csv
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any

from peer.corpus.files import File, mark_bytes, opened, refused, utf8_blocks
from protocol.errors import UsageError, first_line

MOST_ROW_BYTES = 1 << 28
"""A row has to fit into memory; a longer document is a file of its own."""
OPTIONS = ("--column", "--split", "--skip-bad-rows")
"""Options of `potluck data build` that errors name as remedies."""
_BATCH_ROWS = 64
_NAMES: dict[type, str] = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The options of reading rows: the text's column; for a data set of the hub also its split and subset.

    options: those of OPTIONS that the command has, so that its errors name no others
    instead: how an option `{}` that it lacks is given elsewhere; empty if it cannot be
    """

    column: str = "text"
    split: str = "train"
    subset: str = ""
    skip_bad_rows: bool = False  # rows that cannot be read are left out and counted, instead of an error
    options: tuple[str, ...] = OPTIONS
    instead: str = ""

    def option(self, name: str) -> str:
        """Returns how an error names an option, or several; empty if the command cannot have it."""
        return name if name.split(",")[0] in self.options else self.instead.format(name)


@dataclass(frozen=True, slots=True)
class Row:
    """A row's text, None where it has none; or what is wrong with it."""

    place: str  # `row 3`, or `row 3, line 4`.
    text: str | None = None
    bad: str = ""


class _Object(dict[str, Any]):
    """A JSON object; `twice`: the keys that it has more than once."""

    __slots__ = ("twice",)

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.twice = {n for n in names if names.count(n) > 1} if len(self) < len(pairs) else set[str]()


_DECODER = json.JSONDecoder(object_pairs_hook=_Object, parse_int=float)
"""Numbers are never text; as floats they have no limit of digits."""


def rows(file: File, reading: Reading, first: int = 0) -> Iterator[Row]:
    """The rows of a file from number `first` on, from 0. Raises UsageError."""
    if file.format in ("parquet", "arrow"):
        return _table(file, reading, first)
    if file.format in ("csv", "tsv"):
        return _skipped(_csv(file, reading), first)
    if _is_lines(file):
        return _json_lines(file, reading, first)
    return _skipped(_json_values(file, reading), first)


def _skipped(found: Iterator[Row], first: int) -> Iterator[Row]:
    for number, row in enumerate(found):
        if number >= first:
            yield row


# --- JSON


def _is_lines(file: File) -> bool:
    """Returns whether each line is a value. A .json file may also be one list, or objects over several lines."""
    for line in _lines(file):
        if start := line.strip():
            if start.startswith(b"["):
                return False
            if file.format == "jsonl":
                return True
            try:
                _DECODER.decode(line.decode())
            except (ValueError, RecursionError):
                return False
            return True
    return True


def _lines(file: File) -> Iterator[bytes]:
    """Each line with its end. Raises UsageError."""
    held: list[bytes] = []
    size = 0
    for block in utf8_blocks(file):
        start = 0
        while end := block.find(b"\n", start) + 1:
            yield b"".join((*held, block[start:end]))
            held, size, start = [], 0, end
        held.append(block[start:])
        size += len(held[-1])
        if size > MOST_ROW_BYTES:
            raise refused(file, f"a line has over {MOST_ROW_BYTES:,} bytes; write that text into a file of its own")
    if last := b"".join(held):
        yield last


def _json_lines(file: File, reading: Reading, first: int) -> Iterator[Row]:
    number = 0
    for line_number, line in enumerate(_lines(file), 1):
        if not line.strip():
            continue
        number += 1
        if number > first:
            place = f"row {number}, line {line_number}"
            try:
                yield _of_object(_DECODER.decode(line.decode()), reading, place)
            except UnicodeDecodeError as error:
                yield Row(place, bad=f"not UTF-8 at byte {error.start} of the line")
            except (ValueError, RecursionError) as error:
                yield Row(place, bad=f"not JSON: {_why(error)}")


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "too many brackets in one another"
    return f"{error.msg} at character {error.colno}" if isinstance(error, json.JSONDecodeError) else first_line(error)


def _of_object(value: Any, reading: Reading, place: str) -> Row:
    if not isinstance(value, _Object):
        return Row(place, bad=f"not an object with columns but {_named(value)}")
    column = reading.column
    if column not in value:
        there = ", ".join(list(value)[:12])
        how = reading.option("--column")
        return Row(place, bad=f"has no column {column}; it has {there or 'none'}: name one with {how}")
    if column in value.twice:
        return Row(place, bad=f"has the column {column} twice")
    return of_value(value[column], column, place)


def of_value(text: object, column: str, place: str) -> Row:
    if text is None:
        return Row(place)
    if not isinstance(text, str):
        return Row(place, bad=f"column {column} has no text but {_named(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Row(
            place, bad=f"column {column} has half a surrogate pair at character {error.start + 1}, which is no UTF-8"
        )
    return Row(place, text)


def _named(value: object) -> str:
    return next((name for kind, name in _NAMES.items() if isinstance(value, kind)), "text")


def _json_values(file: File, reading: Reading) -> Iterator[Row]:
    """The objects of one list, or one after the other."""
    text = _Text(file)
    in_list = text.peek() == "["
    if in_list:
        text.at += 1
    number = 0
    while (char := text.peek()) and not (in_list and char == "]"):
        number += 1
        place = f"row {number}, line {text.line}"
        yield _of_object(text.value(place), reading, place)
        if in_list and (char := text.peek()) != "]":
            if char != ",":
                raise refused(file, f"{place}: not JSON: no comma or ] behind it; mend the file")
            text.at += 1
            if text.peek() == "]":
                raise refused(file, f"{place}: not JSON: a comma with nothing behind it; mend the file")
    if in_list:
        text.at += 1
        if text.peek():
            raise refused(file, f"line {text.line}: not JSON: there is more behind its list; mend the file")


class _Text:
    """The text of a JSON file, as much as is needed; `at` is where its next value begins, on `line`."""

    def __init__(self, file: File) -> None:
        self._file, self._blocks = file, decoded(file)
        self._held, self.at = "", 0
        self.line, self._counted = 1, 0

    def _count(self) -> None:
        """Moves `line` on to `at`."""
        self.line += self._held.count("\n", self._counted, self.at)
        self._counted = self.at

    def _more(self) -> bool:
        """Reads on: as much again as is held, so that the whole is read in linear time."""
        self._count()
        parts, size = [self._held[self.at :]], 0
        while size <= len(parts[0]) and (block := next(self._blocks, "")):
            parts.append(block)
            size += len(block)
        self._held, self.at, self._counted = "".join(parts), 0, 0
        return size > 0

    def peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            start = self._held[self.at : self.at + 64]
            if rest := start.lstrip(" \t\r\n"):
                self.at += len(start) - len(rest)
                self._count()
                if self.at > 1 << 20:
                    self._held, self.at, self._counted = self._held[self.at :], 0, 0
                return rest[0]
            self.at += len(start)
            if self.at >= len(self._held) and not self._more():
                return ""

    def value(self, place: str) -> Any:
        """The value that begins here. Raises UsageError."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._held, self.at)
                break
            except (ValueError, RecursionError) as error:
                if isinstance(error, RecursionError) or len(self._held) - self.at > MOST_ROW_BYTES or not self._more():
                    raise refused(self._file, f"{place}: not JSON: {_why(error)}; mend the file") from None
        self.at = end
        return value


def decoded(file: File, offset: int = 0) -> Iterator[str]:
    """The file's text from byte `offset` on, in blocks. Raises UsageError."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    place = offset or mark_bytes(file)
    for block in _with_end(utf8_blocks(file, offset)):
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise refused(
                file, f"not UTF-8 at byte {place - pending + error.start}; convert it to UTF-8, or leave the file out"
            ) from None
        place += len(block)
        if text:
            yield text


def _with_end(blocks: Iterator[bytes]) -> Iterator[bytes]:
    yield from blocks
    yield b""


# --- CSV


def _csv(file: File, reading: Reading) -> Iterator[Row]:
    """Each field is text, whatever it looks like. The first row names the columns."""
    column = reading.column
    csv.field_size_limit(MOST_ROW_BYTES)
    reader = csv.reader(_csv_lines(file), delimiter="\t" if file.format == "tsv" else ",", strict=True)
    names: list[str] | None = None
    number, line = 0, 1
    while True:
        place = f"row {number + 1}, line {line}"
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise refused(file, f"{place}: not {file.format.upper()}: {first_line(error)}; mend the file") from None
        line = reader.line_num + 1
        if not fields:
            continue
        if names is None:
            names = fields
            continue
        if number == 0 and names.count(column) != 1:
            what = f"has no column {column}" if column not in names else f"has the column {column} more than once"
            there = ", ".join(name[:40] for name in names[:12])
            how = reading.option("--column")
            raise refused(file, f"{what}; its first line names {there}: name one with {how}, or mend that line")
        number += 1
        if len(fields) != len(names):
            yield Row(place, bad=f"has {len(fields)} fields, the first line names {len(names)} columns")
        else:
            yield Row(place, fields[names.index(column)])


def _csv_lines(file: File) -> Iterator[str]:
    held = ""
    for block in decoded(file):
        *lines, held = (held + block).split("\n")
        yield from (line + "\n" for line in lines)
        if len(held) > MOST_ROW_BYTES:
            raise refused(file, f"a line has over {MOST_ROW_BYTES:,} bytes; write that text into a file of its own")
    if held:
        yield held


# --- Parquet and Arrow


def _table(file: File, reading: Reading, first: int) -> Iterator[Row]:
    number = first
    with ExitStack() as stack:
        try:
            for values in _binary(stack.enter_context(_seekable(file)), file, reading, first):
                for value in values:
                    number += 1
                    yield _of_bytes(value, reading.column, f"row {number}")
        except UsageError:
            raise
        except Exception as error:  # whatever pyarrow raises
            reason = error.strerror if isinstance(error, OSError) else None
            text = f"behind row {number}: {reason or first_line(error)}; it must be whole {file.format}: get it again"
            raise refused(file, text) from None


def _of_bytes(value: bytes | None, column: str, place: str) -> Row:
    if value is None:
        return Row(place)
    try:
        return Row(place, value.decode())
    except UnicodeDecodeError as error:
        return Row(place, bad=f"column {column} is not UTF-8 at its byte {error.start}")


def _seekable(file: File) -> IO[bytes]:
    """The file; one that is compressed is unpacked into a temporary file, since it is read from its end."""
    if not file.compression:
        return opened(file)
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115
    with opened(file) as stream:
        shutil.copyfileobj(stream, unpacked)
    unpacked.seek(0)
    return unpacked


def _binary(stream: IO[bytes], file: File, reading: Reading, first: int) -> Iterator[list[bytes | None]]:
    """The column's values as bytes, so that what is not UTF-8 can be told by its row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    column, how = reading.column, reading.option("--column")
    if file.format == "parquet":
        table = pq.ParquetFile(stream)
        schema, count = table.schema_arrow, table.metadata.num_rows
    else:
        table = _arrow(stream)
        schema, count = table.schema, -1
    if count == 0:
        return
    if schema.names.count(column) != 1:
        there = ", ".join(schema.names[:12])
        raise refused(file, f"has no column {column}; it has {there}: name one with {how}")
    kind = schema.field(column).type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_view = getattr(pa.types, "is_string_view", lambda _: False)
    if not (pa.types.is_string(plain) or pa.types.is_large_string(plain) or is_view(plain) or pa.types.is_null(plain)):
        raise refused(file, f"row 1: column {column} has no text but {kind}; name the column with the text with {how}")
    for batch in _batches(table, column, first) if count > 0 else _record_batches(table, column, first):
        values = batch.dictionary_decode() if pa.types.is_dictionary(batch.type) else batch
        if is_view(values.type):
            values = values.cast(pa.large_string())
        yield values.cast(pa.large_binary()).to_pylist()


def _batches(table: Any, column: str, first: int) -> Iterator[Any]:
    """Of a parquet file, from row `first` on."""
    group, skip = 0, first
    sizes = [table.metadata.row_group(i).num_rows for i in range(table.metadata.num_row_groups)]
    while group < len(sizes) and skip >= sizes[group]:
        skip -= sizes[group]
        group += 1
    for batch in table.iter_batches(_BATCH_ROWS, row_groups=range(group, len(sizes)), columns=[column]):
        skipped = min(skip, len(batch))
        skip -= skipped
        if skipped < len(batch):
            yield batch.column(0)[skipped:]


def _arrow(stream: IO[bytes]) -> Any:
    """The reader of an Arrow file, in either of its two forms."""
    import pyarrow as pa

    try:
        return pa.ipc.open_file(stream)
    except pa.ArrowInvalid:
        stream.seek(0)
        return pa.ipc.open_stream(stream)


def _record_batches(table: Any, column: str, first: int) -> Iterator[Any]:
    """Of an Arrow file, from row `first` on."""
    count = getattr(table, "num_record_batches", None)
    for batch in table if count is None else map(table.get_batch, range(count)):
        skipped = min(first, len(batch))
        first -= skipped
        whole = batch.column(batch.schema.names.index(column))
        for start in range(skipped, len(batch), _BATCH_ROWS):
            yield whole[start : start + _BATCH_ROWS]
