"""The file of a run's log: for each round `length (4 bytes, big-endian) | CRC-32 of the record (4 bytes) | record`.

The file only grows. A crash may leave half a record at the end, which is no damage: the record was never sent. Half a
record anywhere else is damage, since a decided commit must not be forgotten.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from protocol.errors import UsageError

LOG = "log"
MANIFEST = "manifest.json"
"""The name of the run's manifest in that folder, so that the folder can be verified by itself."""

_HEAD = struct.Struct(">II")
_START, _END = 0, 2
"""Where a seek counts from."""
_KEY, _MAPS = b"\xa1c", (b"\x83", b"\x84")
"""How every record begins: a map of three or four whose first key is "c"."""


class Damaged(UsageError):
    """A record before the end of a log, at byte `at`, cannot be read."""

    def __init__(self, path: object, at: int) -> None:
        super().__init__(f"log {path}: the record at byte {at} is damaged; restore the file from a copy")
        self.at = at


def pack(record: bytes) -> bytes:
    """Returns the bytes of a record in the file."""
    return _HEAD.pack(len(record), zlib.crc32(record)) + record


def unpack(packed: bytes, path: object, at: int) -> bytes:
    """The record that `pack` made this of; it was read from byte `at` of the log `path`. Raises Damaged."""
    record = packed[_HEAD.size :]
    if len(packed) < _HEAD.size or _HEAD.unpack_from(packed) != (len(record), zlib.crc32(record)):
        raise Damaged(path, at)
    return record


def end_of(at: int, record: bytes) -> int:
    """Returns the end of a record that begins at byte `at` of the file."""
    return at + _HEAD.size + len(record)


def records(file: BinaryIO, path: object) -> Iterator[tuple[int, bytes]]:
    """(position, record) of every whole record; a half-written one at the end is skipped. Raises Damaged."""
    size = file.seek(0, _END)
    at = 0
    while at + _HEAD.size <= size:
        file.seek(at, _START)
        length, crc = _HEAD.unpack(file.read(_HEAD.size))
        end = at + _HEAD.size + length
        record = file.read(length) if end <= size else b""
        if end > size or zlib.crc32(record) != crc:
            file.seek(at + 1, _START)
            if end < size or _holds_record(file.read(size - at - 1)):
                raise Damaged(path, at)
            return
        yield at, record
        at = end


def _holds_record(data: bytes) -> bool:
    """Returns whether a whole record begins anywhere in `data`: then what is before it was whole once, too."""
    key = data.find(_KEY)
    while key >= 0:
        start = key - 1
        if start >= _HEAD.size and data[start:key] in _MAPS:
            length, crc = _HEAD.unpack_from(data, start - _HEAD.size)
            if start + length <= len(data) and zlib.crc32(data[start : start + length]) == crc:
                return True
        key = data.find(_KEY, key + 1)
    return False
