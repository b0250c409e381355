"""Mutations of what strangers may send: bytes, msgpack trees and text. All randomness comes from the caller's
generator.

A msgpack tree is read leniently, changed somewhere, and written by an encoder that also writes what no honest one does:
other widths, counts and lengths that lie, doubled and non-text keys, extension types, broken text, nesting.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

Mutator = Callable[[random.Random, bytes, Sequence[bytes]], bytes]
"""(randomness, an input, other inputs) -> a changed input."""

INTERESTING = (
    0,
    1,
    2,
    7,
    8,
    15,
    16,
    17,
    31,
    32,
    63,
    64,
    127,
    128,
    255,
    256,
    4095,
    4096,
    65535,
    65536,
    262_144,
    262_145,
)
NUMBERS = (*INTERESTING, -1, -128, -32769, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"))
LARGEST = 1 << 20
MANY = 64
"""Values of a list that may be written in an unusual way."""
"""Bytes that a bomb has at most; the decoders' own limits are reached with fewer."""


def cut(rng: random.Random, raw: bytes) -> tuple[int, int]:
    """A piece of `raw`, mostly short."""
    start = rng.randrange(len(raw) + 1)
    return start, min(len(raw), start + int(rng.expovariate(1 / 8)) + 1)


def change_bytes(rng: random.Random, raw: bytes, others: Sequence[bytes] = ()) -> bytes:
    """One to four small changes that know nothing of any format."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        start, end = cut(rng, data)
        match rng.randrange(9):
            case 0 if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xC1, 0xFF, rng.randrange(256)))
            case 2:
                del data[start:end]
            case 3:
                data[start:start] = data[start:end] * rng.choice((1, 2, 40))
            case 4:
                data[start:start] = rng.randbytes(rng.choice((1, 2, 4, 8, 33)))
            case 5:
                number = rng.choice(INTERESTING) + rng.choice((-1, 0, 1))
                form = rng.choice((">H", "<H", ">I", "<I", ">Q", "<Q", "<f", ">d"))
                whole = form[1] not in "fd"
                value: float = (
                    number % (1 << 16) if form[1] == "H" else abs(number) if whole else rng.choice(FLOATS[:5])
                )
                data[start : start + struct.calcsize(form)] = struct.pack(form, value)
            case 6:
                del data[rng.randrange(len(data) + 1) :]
            case 7 if others:
                other = rng.choice(others)
                a, b = cut(rng, other)
                data[start:end] = other[a : b if rng.random() < 0.7 else None]
            case _:
                data += data[start:end] or b"\0"
    return bytes(data)


# --- msgpack


class Map(list[tuple[Any, Any]]):
    """A map whose entries keep their order and may repeat."""


class Raw(bytes):
    """Bytes that go out as they are."""


def read(raw: bytes) -> Any:
    """The tree in `raw`; ValueError where there is none."""
    try:
        return msgpack.unpackb(
            raw, raw=False, strict_map_key=False, object_pairs_hook=Map, unicode_errors="surrogateescape"
        )
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException):
        raise ValueError("no tree") from None


def somewhere(rng: random.Random, tree: Any) -> tuple[int, ...]:
    """Where one of the values of a tree is; keys too."""
    path: tuple[int, ...] = ()
    while isinstance(tree, list) and tree and rng.random() < 0.8:
        i = rng.randrange(2 * len(tree) if isinstance(tree, Map) else len(tree))
        path = (*path, i)
        tree = get(tree, (i,))
    return path


def get(tree: Any, path: tuple[int, ...]) -> Any:
    for i in path:
        tree = tree[i // 2][i % 2] if isinstance(tree, Map) else tree[i]
    return tree


def put(tree: Any, path: tuple[int, ...], value: Any) -> Any:
    """The tree with `value` at `path`."""
    if not path:
        return value
    i, rest = path[0], path[1:]
    if isinstance(tree, Map):
        entries = list(tree)
        key, old = entries[i // 2]
        entries[i // 2] = (put(key, rest, value), old) if i % 2 == 0 else (key, put(old, rest, value))
        return Map(entries)
    return [put(old, rest, value) if j == i else old for j, old in enumerate(tree)]


def leaf(rng: random.Random) -> Any:
    """A value that may be unexpected."""
    return rng.choice((
        None, True, False, "", "x", "\n", "\x1b[2J", "é" * 40, "\ud800", "0" * 64, b"", b"\0" * 32, rng.randbytes(8),
        rng.choice(NUMBERS), rng.choice(NUMBERS), rng.choice(NUMBERS), rng.choice(FLOATS), rng.random(), [], Map(),
        Map([("", None)]), Map([(1, 2)]), [None] * rng.choice((1, 17, 300)), "x" * rng.choice((129, 513, 5000)),
        Raw(b"\xc1"), Raw(b"\xdd\xff\xff\xff\xff"), Raw(b"\xdf\x7f\xff\xff\xff"), Raw(b"\xc6\xff\xff\xff\xf0"),
        Raw(b"\xa4\xff\xfe\xfd\xfc"), Raw(b"\xc7\x04\x50data"), Raw(b"\xd4\x40\x90"), Raw(b"\xd6\xff\0\0\0\0"),
    ))  # fmt: skip


def change_tree(rng: random.Random, tree: Any, others: Sequence[bytes]) -> Any:
    """The tree with one thing changed."""
    path = somewhere(rng, tree)
    old = get(tree, path)
    match rng.randrange(8):
        case 0 | 1:
            return put(tree, path, leaf(rng))
        case 2 if isinstance(old, Map) and old:
            return put(tree, path, Map(entry for entry in old if entry is not rng.choice(old)))
        case 2 if isinstance(old, list) and old:
            return put(tree, path, [item for item in old if item is not rng.choice(old)])
        case 3 if isinstance(old, Map):
            return put(tree, path, Map([*old, (rng.choice((*[k for k, _ in old], "new", 7)), leaf(rng))]))
        case 3 if isinstance(old, list):
            return put(tree, path, old * rng.choice((0, 2, 30)) + [leaf(rng)])
        case 4:
            for _ in range(rng.choice((1, 2, 18))):
                old = rng.choice(([old], Map([("a", old)])))
            return put(tree, path, old)
        case 5 if isinstance(old, int):
            return put(tree, path, max(-(2**63), min(old + rng.choice((-1, 1, 2**32)), 2**64 - 1)))
        case 5 if isinstance(old, str | bytes):
            inner = old.encode("utf-8", "surrogatepass") if isinstance(old, str) else old
            try:
                changed = change_msgpack(rng, inner, others) if len(inner) > 40 else change_bytes(rng, inner)
            except ValueError:
                changed = change_bytes(rng, inner)
            return put(tree, path, changed.decode("utf-8", "replace") if isinstance(old, str) else changed)
        case 6 if others:
            try:
                other = read(rng.choice(others))
            except ValueError:
                return put(tree, path, leaf(rng))
            return put(tree, path, get(other, somewhere(rng, other)))
        case _:
            return put(tree, path, Raw(change_bytes(rng, write(rng, old))))


def write(rng: random.Random, tree: Any, honest: float = 0.97) -> bytes:
    """A tree as msgpack; with probability 1 - `honest` for each value, in an unusual or a wrong way. Of a long list,
    values outside a window of MANY are as the library writes them."""
    odd = rng.random() > honest
    if isinstance(tree, Raw):
        return bytes(tree)
    if isinstance(tree, str | bytes):
        text = isinstance(tree, str)
        data = tree.encode("utf-8", "surrogatepass") if isinstance(tree, str) else tree
        length = max(0, len(data) + (rng.choice((-1, 1, 2**31)) if odd and rng.random() < 0.5 else 0))
        if odd and rng.random() < 0.3:
            text = not text
        return struct.pack(">BI", 0xDB if text else 0xC6, length % 2**32) + data if odd else _short(text, data)
    if isinstance(tree, list):
        items = [value for entry in tree for value in entry] if isinstance(tree, Map) else tree
        short, long = (0x80, 0xDF) if isinstance(tree, Map) else (0x90, 0xDD)
        first = rng.randrange(max(1, len(items) - MANY))
        window = b"".join(write(rng, item, honest) for item in items[first : first + MANY])
        around = plain(rng, items[:first]), plain(rng, items[first + MANY :])
        return _count(rng, odd, len(tree), short, long) + window.join(around)
    if odd and isinstance(tree, int) and not isinstance(tree, bool):
        return struct.pack(">Bq", 0xD3, tree) if -(2**63) <= tree < 2**63 else struct.pack(">BQ", 0xCF, tree)
    if odd and isinstance(tree, float) and abs(tree) < 1e38:
        return struct.pack(">Bf", 0xCA, tree)
    return bytes(msgpack.packb(tree))


def plain(rng: random.Random, items: list[Any]) -> bytes:
    """Values one after the other, each as the library writes it, where it can."""
    try:
        raw = msgpack.packb(items, default=_plain, strict_types=True, unicode_errors="surrogatepass")
    except (TypeError, ValueError, OverflowError):
        if len(items) == 1:
            return write(rng, items[0], 1.0)
        half = len(items) // 2
        return plain(rng, items[:half]) + plain(rng, items[half:])
    return bytes(raw[1 if len(items) < 16 else 3 if len(items) < 1 << 16 else 5 :])


def _plain(value: Any) -> Any:
    if isinstance(value, Map):
        return dict(value)
    raise TypeError


def _short(text: bool, data: bytes) -> bytes:
    if text and len(data) < 32:
        return bytes([0xA0 | len(data)]) + data
    if len(data) < 256:
        return struct.pack(">BB", 0xD9 if text else 0xC4, len(data)) + data
    return struct.pack(">BI", 0xDB if text else 0xC6, len(data)) + data


def _count(rng: random.Random, odd: bool, count: int, short: int, long: int) -> bytes:
    if odd and rng.random() < 0.5:
        count = max(0, count + rng.choice((-1, 1, 2**16, 2**31)))
    return bytes([short | count]) if count < 16 and not odd else struct.pack(">BI", long, count % 2**32)


def change_msgpack(rng: random.Random, raw: bytes, others: Sequence[bytes] = ()) -> bytes:
    """A changed tree, or changed bytes where there is none, or both."""
    if rng.random() < 0.15:
        return change_bytes(rng, raw, others)
    try:
        tree = read(raw)
    except ValueError:
        return change_bytes(rng, raw, others)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        tree = change_tree(rng, tree, others)
    out = plain(rng, [tree]) if rng.random() < 0.7 else write(rng, tree)
    return change_bytes(rng, out, others) if rng.random() < 0.1 else out


def bomb(rng: random.Random) -> bytes:
    """Something that grows when it is decoded: many values, deep nesting, long or lying lengths."""
    size = rng.choice((300, 5_000, 70_000, LARGEST))
    many = struct.pack(">I", size)
    return rng.choice((
        b"\xdd" + many + b"\x90" * size,
        b"\xdd" + many + b"\xc0" * size,
        b"\xdd" + many + b"\xca\0\0\0\0" * (size // 5),
        b"\x91" * size,
        b"\x81\xa1a" * (size // 3) + b"\xc0",
        b"\xdf" + struct.pack(">I", size // 4)
        + b"".join(b"\xa2%c%c\xc0" % (i % 251, i // 251 % 251) for i in range(size // 4)),
        b"\xdb" + many + b"x" * size,
        b"\xc6" + many + b"\0" * size,
        b"\xc9" + many + b"\x50" + b"\xc9" * size,
        b"\xdd" + struct.pack(">I", size // 2) + b"\xa1x" * (size // 2),
        b"\xff" * size,
        b"[" * size,
        b"a=" + b"[" * (size - 2),
        b'{"a":' * (size // 5),
        b"/" * size,
    ))  # fmt: skip


# --- text

_WEIRD = (
    "", "\0", "\n", "\r\n", "\x1b[2J", "\u202e", "\ufeff", "é", "\U0001f372", "\u0130", "²", "٣", "1e999", "-0", "0x10",
    "9" * 400, "9" * 5000, "nan", "inf", "true", "null", "[", "]", "{", "}", '"', "'", "#", "=", ",", ".", "/", ":",
    "%", "\\", "\\ud800", '"""', "[[", "a.b.c", "_", "--", "xn--", "%1", "-", "1979-05-27T07:32:00Z", "[" * 60,
    "a." * 60,
)  # fmt: skip


def change_text(rng: random.Random, raw: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Text with words, numbers and signs changed, or changed bytes."""
    if rng.random() < 0.2:
        return change_bytes(rng, raw, others)
    text = raw.decode("utf-8", "replace")
    words = re.findall(r"\w+|\W" if rng.random() < 0.8 else r".", text, re.DOTALL)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(words) + 1)
        match rng.randrange(6):
            case 0:
                words[at : at + 1] = [rng.choice(_WEIRD)]
            case 1:
                words.insert(at, rng.choice(_WEIRD))
            case 2:
                del words[at : at + rng.choice((1, 1, 5))]
            case 3:
                words.insert(at, rng.choice(words or [""]))
            case 4:
                words[at : at + 1] = [str(rng.choice(NUMBERS))]
            case _:
                words[at:at] = words[at : at + 5] * rng.choice((1, 20))
    return "".join(words).encode("utf-8", "surrogatepass")
