"""Frames and messages as bytes, without I/O.

    frame    length: 4 bytes, big-endian | body: `length` bytes        length <= MAX_FRAME
    end      ff ff ff ff                                               nothing follows on this side of the stream

The end is explicit because a dead peer's stream ends just as quietly as a finished one. A message is one msgpack value
made of nil, bool, int, float, text, bytes, lists and maps with text keys. What arrives is measured *before* it is
decoded or kept: bytes, nesting, number of values, no extension types.

A decoder's time grows with the values of a message, of which one byte may be one. `entries` cuts a map at its keys and
looks at none of its values, so that a reader checks a message's kind and size first, and decodes only known fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from protocol.errors import PotluckError

PREFIX = 4
MAX_FRAME = 16 * 1024 * 1024
END = b"\xff\xff\xff\xff"
MAX_MESSAGE = 4 * 1024 * 1024
MAX_DEPTH = 16
MAX_VALUES = 320_000
MAX_FIELDS = 64
"""Entries of the map that a message is, unknown ones too."""


class FrameError(PotluckError):
    """Bytes that are no frame or no message."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a message: bytes, and values (every number, text, list, map and key)."""

    size: int
    values: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.size + other.size, self.values + other.values)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.size - other.size, self.values - other.values)

    def times(self, count: int) -> Cost:
        return Cost(self.size * count, self.values * count)

    def capped(self, most: Cost) -> Cost:
        return Cost(min(self.size, most.size), min(self.values, most.values))

    def is_within(self, budget: Cost) -> bool:
        return self.size <= budget.size and self.values <= budget.values


LARGEST = Cost(MAX_MESSAGE, MAX_VALUES)
"""Of any message."""


def header(size: int) -> bytes:
    """The prefix of a frame with a body of `size` bytes. Raises FrameError above MAX_FRAME."""
    if size > MAX_FRAME:
        raise FrameError(f"frame: {size} bytes; at most {MAX_FRAME} are allowed")
    return size.to_bytes(PREFIX, "big")


def pack(*parts: bytes | memoryview) -> bytes:
    """One whole frame whose body is `parts`, one after the other."""
    return header(sum(memoryview(part).nbytes for part in parts)) + b"".join(parts)


class Ended(Exception):
    """The sender's explicit end of the stream."""


class FrameReader:
    """Cuts a byte stream into frames; holds one fed piece above a frame if fed only after `next` is None."""

    __slots__ = ("_buffer", "_ended")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._ended = False

    @property
    def pending(self) -> int:
        """Bytes fed that no frame was made of."""
        return len(self._buffer)

    def feed(self, data: bytes | memoryview) -> None:
        self._buffer += data

    def next(self, limit: int = MAX_FRAME) -> bytes | None:
        """The next frame's body, None if incomplete. Raises FrameError above `limit` bytes, Ended at the end."""
        if self._ended:
            raise Ended
        if len(self._buffer) < PREFIX:
            return None
        if self._buffer[:PREFIX] == END:
            self._ended = True
            self._buffer.clear()
            raise Ended
        size = int.from_bytes(self._buffer[:PREFIX], "big")
        if size > limit:
            raise FrameError(f"frame: {size} bytes; at most {limit} are allowed")
        if len(self._buffer) < PREFIX + size:
            return None
        with memoryview(self._buffer) as view:
            body = bytes(view[PREFIX : PREFIX + size])
        del self._buffer[: PREFIX + size]
        return body


def pack_message(value: Any) -> bytes:
    """`value` as msgpack, maps in the order of their keys: equal values give equal bytes. Raises FrameError."""
    try:
        raw: bytes = msgpack.packb(_canonical(value, 1), use_bin_type=True)
    except (ValueError, OverflowError, UnicodeEncodeError) as error:
        raise FrameError(f"message: cannot be encoded ({error})") from None
    if len(raw) > MAX_MESSAGE:
        raise FrameError(f"message: {len(raw)} bytes; at most {MAX_MESSAGE} are allowed")
    return raw


def repack(value: dict[str, Any]) -> bytes:
    """As `pack_message`, for a map of values that `unpack_message` gave: their maps are in order already."""
    raw: bytes = msgpack.packb({key: value[key] for key in sorted(value)}, use_bin_type=True)
    return raw


_SINGLE = frozenset((type(None), bool, int, float, str, bytes))
"""Types of values that have no others in them; most values are of these."""


def _canonical(value: Any, depth: int) -> Any:
    if type(value) in _SINGLE:
        return value
    if isinstance(value, dict | list | tuple) and depth > MAX_DEPTH:
        raise FrameError(f"message: nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise FrameError("message: a map's key is not text")
        return {key: _canonical(value[key], depth + 1) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_canonical(item, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise FrameError(f"message: cannot carry a {type(value).__name__}")


def unpack_message(
    raw: bytes | memoryview, *, limit: int = MAX_MESSAGE, depth: int = MAX_DEPTH, values: int = MAX_VALUES
) -> Any:
    """The value in `raw`. Raises FrameError for anything that `pack_message` could not have meant."""
    data = bytes(raw)
    if len(data) > limit:
        raise FrameError(f"message: {len(data)} bytes; at most {limit} are allowed")
    _measure(data, depth, values)
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True, use_list=True)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise FrameError(f"message: not valid msgpack ({type(error).__name__})") from None


def entries(raw: bytes | memoryview) -> dict[str, bytes]:
    """The values of a map by key, still encoded; they may be no valid values. Raises FrameError."""
    data = bytes(raw)
    if len(data) > MAX_MESSAGE:
        raise FrameError(f"message: {len(data)} bytes; at most {MAX_MESSAGE} are allowed")
    reader, out = msgpack.Unpacker(max_buffer_size=max(len(data), 1)), dict[str, bytes]()
    try:
        reader.feed(data)
        count = reader.read_map_header()
        if count > MAX_FIELDS:
            raise FrameError(f"message: {count} fields; at most {MAX_FIELDS} are allowed")
        for _ in range(count):
            begin = reader.tell()
            if not (0xA0 <= data[begin] <= 0xBF or data[begin] == 0xD9):
                raise FrameError("message: a map's key is not text")
            key = reader.unpack()
            begin = reader.tell()
            reader.skip()
            out[key] = data[begin : reader.tell()]
    except (ValueError, IndexError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise FrameError(f"message: not a map ({type(error).__name__})") from None
    if reader.tell() != len(data):
        raise FrameError("message: bytes follow after its end")
    return out


def count(raw: bytes) -> int:
    """The values in `raw`, none of which is decoded. Raises FrameError as `unpack_message` does."""
    return _measure(raw, MAX_DEPTH, MAX_VALUES)


def joined(found: Mapping[str, bytes]) -> bytes:
    """The map that has these `entries`, in the order of their keys."""
    head: bytes = msgpack.Packer().pack_map_header(len(found))
    return head + b"".join(msgpack.packb(key) + found[key] for key in sorted(found))


_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8}
_FIXED |= {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
"""First byte -> how many bytes of value follow."""
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""First byte of bytes and text -> how many bytes of length follow."""
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""First byte of long lists and maps -> how many bytes of count follow, values per entry."""


def _follow(first: int) -> int:
    """Returns the number of value bytes after a first byte that implies it; -1 where more bytes decide."""
    if first <= 0x7F or first >= 0xE0:  # small integers
        return 0
    return first & 0x1F if 0xA0 <= first <= 0xBF else _FIXED.get(first, -1)


_FOLLOW = tuple(map(_follow, range(256)))


def _measure(data: bytes, max_depth: int, max_values: int) -> int:
    """Checks depth, number of values, types, keys and length of msgpack without decoding or recursion. Returns the
    number of values."""
    position, values, size = 0, 1, len(data)
    left, in_map = 1, False  # how many values the innermost open container still lacks, and whether it is a map: then
    # every other value is a key; at first it is the message itself
    around: list[tuple[int, bool]] = []  # the same of those in which it is
    while True:
        while left:
            left -= 1
            if position >= size:
                raise FrameError("message: cut short")
            first = data[position]
            position += 1
            if in_map and left & 1 and not (0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB):
                raise FrameError("message: a map's key is not text")
            follow = _FOLLOW[first]
            if follow >= 0:
                position += follow
                continue
            if first in _SIZED:
                width = _SIZED[first]
                position += width + int.from_bytes(data[position : position + width], "big")
                continue
            if first <= 0x8F:
                inside = 2 * (first & 0x0F)
            elif first <= 0x9F:
                inside = first & 0x0F
            elif first in _CONTAINERS:
                width, each = _CONTAINERS[first]
                inside = each * int.from_bytes(data[position : position + width], "big")
                position += width
            else:
                raise FrameError("message: holds an extension type")
            if position + inside > size:  # every value takes at least a byte
                raise FrameError("message: cut short")
            if len(around) >= max_depth:
                raise FrameError(f"message: nested deeper than {max_depth}")
            values += inside
            if values > max_values:
                raise FrameError(f"message: more than {max_values} values")
            around.append((left, in_map))
            left, in_map = inside, first <= 0x8F or first >= 0xDE
        if not around:
            break
        left, in_map = around.pop()
    if position > size:
        raise FrameError("message: cut short")
    if position != size:
        raise FrameError("message: bytes follow after its end")
    return values
