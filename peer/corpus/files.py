"""The files of a source: what each is read as, and what is left out and why.

A folder is walked in the order of the names' bytes, folder by folder. Names decide only the format, by their endings in
any case:

    .jsonl .ndjson .json .csv .tsv .parquet .pq .arrow     rows: a document a row
    any other                                              UTF-8 text: the file is a document

A further ending may be .gz, .zst, .bz2 or .xz; gzip, zstandard and xz are also known by their first bytes. Of a folder,
hidden files and folders are left out, and empty files, irregular files, and files that are not text by their first
bytes, unless their endings say that they are. A file that is named by itself is read.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from protocol.errors import UsageError, first_line, os_errors

BLOCK_BYTES = 1 << 20
_HEAD_BYTES = 1 << 16
"""By so many first bytes a file of a folder is known as text."""
ROWS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
}
"""Ending -> format. Every other file is text."""
_TEXT = (".txt", ".text", ".md", ".markdown", ".rst", ".tex")
"""Endings of files that must be text: of other bytes in them something is said."""
_COMPRESSED = {".gz": "gzip", ".zst": "zstandard", ".bz2": "bzip2", ".xz": "xz"}
_MAGIC = {b"\x1f\x8b\x08": "gzip", b"\x28\xb5\x2f\xfd": "zstandard", b"\xfd7zXZ\0": "xz"}
_WIDE = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
"""Byte-order marks."""
_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class File:
    """One file that is read."""

    path: str
    format: str  # text, jsonl, json, csv, tsv, parquet or arrow.
    compression: str  # gzip, zstandard, bzip2, xz or nothing.
    size_bytes: int

    def __str__(self) -> str:
        return printable(self.path)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file or folder that is not read, and why."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{printable(self.path)}: {self.reason}"


def printable(path: str) -> str:
    """A path on one line, whatever bytes are in it."""
    return "".join(c if c.isprintable() else "\ufffd" for c in os.fsencode(path).decode("utf-8", "replace"))


def refused(file: File | str, reason: str) -> UsageError:
    """Returns an error of a file in one line: the reason and the remedy."""
    return UsageError(f"source {printable(file) if isinstance(file, str) else file}: {reason}")


def single(path: str) -> File:
    """A file that was named by itself. Raises UsageError."""
    found = _regular(path)
    if isinstance(found, LeftOut):
        raise refused(path, f"{found.reason}; name a file, or write the text into one")
    return found


def walked(folder: str) -> tuple[tuple[File, ...], tuple[LeftOut, ...]]:
    """All that is in a folder, and below it: what is read, in its order, and what is left out. Raises UsageError."""
    found = list(_walk(folder, ()))
    read = tuple(file for file in found if isinstance(file, File))
    left_out = tuple(left for left in found if isinstance(left, LeftOut))
    if not read:
        such = f", such as {left_out[0]}" if left_out else ""
        raise refused(folder, f"has no file to read: {len(left_out)} left out{such}; name a folder that has text")
    return read, left_out


def _walk(folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[File | LeftOut]:
    with os_errors(f"source {printable(folder)}", "make the folder readable, or move it elsewhere"):
        at = os.stat(folder)
        names = sorted(os.listdir(folder), key=os.fsencode)
    here = (*above, (at.st_dev, at.st_ino))
    for name in names:
        path = os.path.join(folder, name)
        if name.startswith("."):
            yield LeftOut(path, "hidden, since its name begins with a dot")
        elif os.path.isdir(path):
            to = os.stat(path)
            if (to.st_dev, to.st_ino) in here:
                yield LeftOut(path, "a link to a folder above it")
            else:
                yield from _walk(path, here)
        else:
            found = _regular(path)
            yield _of_a_folder(found) if isinstance(found, File) else found


def _regular(path: str) -> File | LeftOut:
    """The file as its name and its first bytes say. Raises UsageError."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            return LeftOut(path, "not a regular file")
        with open(path, "rb") as file:
            head = file.read(8)
    except FileNotFoundError:
        return LeftOut(path, "a link to nothing")
    except OSError as error:
        raise refused(path, f"{error.strerror}; make it readable, or move it elsewhere") from None
    stem, ending = os.path.splitext(os.path.basename(path).lower())
    compression = _COMPRESSED.get(ending, "")
    if compression:
        ending = os.path.splitext(stem)[1]
    else:
        compression = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")
    return File(path, ROWS.get(ending, "text"), compression, found.st_size)


def _of_a_folder(file: File) -> File | LeftOut:
    """Leaves out what is empty or, without a word in its name, no text."""
    if not file.size_bytes:
        return LeftOut(file.path, "empty")
    name = file.path.lower().removesuffix(next((e for e in _COMPRESSED if file.path.lower().endswith(e)), ""))
    if file.format != "text" or name.endswith(_TEXT):
        return file
    try:
        head = next(blocks(file), b"")[:_HEAD_BYTES]
    except UsageError:
        return LeftOut(file.path, "not text")
    if any(map(head.startswith, _WIDE)):
        return file  # what it is will be said
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
        is_text = b"\0" not in head
    except UnicodeDecodeError:
        is_text = False
    return file if is_text else LeftOut(file.path, "not text")


def opened(file: File) -> IO[bytes]:
    """The file's bytes, decompressed. Raises OSError."""
    if file.compression == "zstandard":
        import pyarrow as pa

        unpacked: IO[bytes] = pa.input_stream(open(file.path, "rb"), compression="zstd")  # noqa: SIM115
        return unpacked
    opener: Any = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}.get(file.compression, open)
    stream: IO[bytes] = opener(file.path, "rb")
    return stream


def blocks(file: File, offset: int = 0) -> Iterator[bytes]:
    """The file's bytes from `offset` on, decompressed. Raises UsageError."""
    place = 0
    try:
        with opened(file) as stream:
            if not file.compression:
                place = stream.seek(offset)
            while block := stream.read(BLOCK_BYTES):
                skipped = max(0, min(len(block), offset - place))
                place += len(block)
                if block[skipped:]:
                    yield block[skipped:]
    except UsageError:
        raise
    except Exception as error:  # each library has its own
        if not file.compression and isinstance(error, OSError):
            raise refused(file, f"{error.strerror or first_line(error)}; check the file") from None
        raise refused(
            file, f"not whole {file.compression} after byte {place} of its text: {first_line(error)}; get it again"
        ) from None


def utf8_blocks(file: File, offset: int = 0) -> Iterator[bytes]:
    """As `blocks`, without a byte-order mark. Raises UsageError if the first bytes are not UTF-8."""
    for number, block in enumerate(blocks(file, offset)):
        if number or offset:
            yield block
            continue
        wide = next((name for mark, name in _WIDE.items() if block.startswith(mark)), None) or _unmarked(block)
        if wide:
            raise refused(file, f"is {wide}, not UTF-8; convert it: iconv -f {wide} -t UTF-8")
        yield block.removeprefix(_MARK)


def mark_bytes(file: File) -> int:
    """Returns the length of the file's byte-order mark in bytes. Raises UsageError."""
    return len(_MARK) if next(blocks(file), b"").startswith(_MARK) else 0


def _unmarked(block: bytes) -> str:
    """UTF-16 without a mark is valid UTF-8 where it is of ASCII letters: every other byte is a NUL."""
    head = block[:4096]
    for start, name in ((1, "UTF-16LE"), (0, "UTF-16BE")):
        if len(head) >= 8 and head[start::2].count(0) > 0.4 * len(head) // 2 and head[1 - start :: 2].count(0) == 0:
            return name
    return ""
