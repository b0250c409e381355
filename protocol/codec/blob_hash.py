"""Blob names, and range checks before the whole blob is there.

A blob is cut into ranges of RANGE_BYTES, the last one shorter. Its name (64 hexadecimal digits) is

    one range     sha256(bytes)
    more          BLAKE2b-256, personalized `potluck/ranges/1`, of the size (u64, little-endian) and every range's
                  sha256

Name and size suffice to check the list of range digests (*leaves*, 32 bytes each), and then every range by itself. A
shard's digest is the name of its tensors' bytes (fp32, little-endian, in canonical order).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

Bytes = bytes | bytearray | memoryview
RANGE_BYTES = 32 * 1024
"""Bytes. Small, so that what an interrupted or wrong transfer costs is small: a few ranges for each holder."""
WHOLE_BYTES = 4 * RANGE_BYTES
"""Bytes; up to here a blob comes in one piece."""
MAX_BLOB_BYTES = 8 << 30
"""Most bytes of a blob, and of a shard (protocol/run/layout.py); its leaves (8 MiB) fit in a frame."""
LEAF_BYTES = 32
_PERSON = b"potluck/ranges/1"


def is_name(text: object) -> bool:
    """Returns whether `text` has the form of a name."""
    return isinstance(text, str) and len(text) == 64 and all(c in "0123456789abcdef" for c in text)


def count(size: int) -> int:
    """Returns the number of ranges of a blob of `size` bytes, at least 1."""
    return max(1, -(-size // RANGE_BYTES))


def span(size: int, index: int) -> tuple[int, int]:
    """(start, end) of range `index` in a blob of `size` bytes."""
    return index * RANGE_BYTES, min(size, (index + 1) * RANGE_BYTES)


def is_leaf(leaves: bytes, index: int, data: Bytes) -> bool:
    """Returns whether `data` is range `index` of the blob with these leaves."""
    return hashlib.sha256(data).digest() == leaves[LEAF_BYTES * index : LEAF_BYTES * (index + 1)]


def root(size: int, leaves: bytes) -> str:
    """The name of a blob of `size` bytes whose ranges have these digests, one after the other."""
    if len(leaves) == LEAF_BYTES:
        return leaves.hex()
    state = hashlib.blake2b(digest_size=LEAF_BYTES, person=_PERSON)
    state.update(size.to_bytes(8, "little"))
    state.update(leaves)
    return state.hexdigest()


def leaves_of(pieces: Iterable[Bytes]) -> tuple[int, bytes]:
    """(size, leaves) of a blob that comes in pieces of any length."""
    size, digests, state, free = 0, [], hashlib.sha256(), RANGE_BYTES
    for piece in pieces:
        view = memoryview(piece).cast("B")
        size += len(view)
        while len(view):
            if not free:
                digests.append(state.digest())
                state, free = hashlib.sha256(), RANGE_BYTES
            state.update(view[:free])
            view, free = view[free:], free - min(free, len(view))
    return size, b"".join([*digests, state.digest()])


def name_of(*pieces: Bytes) -> str:
    return root(*leaves_of(pieces))
