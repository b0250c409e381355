"""Packed pieces: every form gives the bytes again, and a bomb is refused before anything of it comes out."""

from __future__ import annotations

import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard

from peer.net.compression import FORMS, PLAIN, RAW, Malformed, form_of, pack, unpack

GIB = 1 << 30
VALUES = np.random.default_rng(0).normal(0, 0.02, 8192).astype("<f4").tobytes()
IDS = np.random.default_rng(0).zipf(1.3, 16384).clip(max=65535).astype("<u2").tobytes()
NOISE = random.Random(0).randbytes(32768)
TEXT = b"a page of the log " * 500


@pytest.mark.parametrize(
    "data", [VALUES, IDS, NOISE, TEXT, b"", b"odd"], ids=["fp32", "ids", "noise", "text", "none", "odd"]
)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_bytes_and_never_more_than_one_besides(data: bytes, form: int) -> None:
    packed = pack(data, form)
    assert unpack(packed, len(data)) == data
    assert len(packed) <= len(data) + 1
    if data:
        with pytest.raises(Malformed, match=f"at most {len(data) - 1}"):
            unpack(packed, len(data) - 1)


def test_the_best_form_is_found() -> None:
    assert [form_of(data) for data in (VALUES, NOISE, TEXT, b"short")] == [4, RAW, PLAIN, RAW]
    assert len(pack(VALUES, 4)) < 0.9 * len(VALUES)
    assert len(pack(IDS, 2)) < 0.5 * len(IDS) < len(pack(IDS, PLAIN))


def bombs() -> dict[str, bytes]:
    streamed = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(GIB // 64))
    many = zstandard.ZstdCompressor().compress(b"x") * 2
    return {
        "says its size": zstandard.ZstdCompressor().compress(bytes(GIB // 64)),
        "says nothing": streamed,
        "two frames": many,
        "an empty frame": b"",
        "cut off": zstandard.ZstdCompressor().compress(TEXT)[:-3],
        "wrong size": _with_size(zstandard.ZstdCompressor().compress(TEXT), len(TEXT) - 1),
        "another dictionary": b"\x28\xb5\x2f\xfd\x23\x01\x02\x03\x04\x05" + bytes(20),
        "a skippable frame": b"\x50\x2a\x4d\x18\xff\xff\xff\x7f",
    }


def _with_size(frame: bytes, size: int) -> bytes:
    """The frame, whose header has a size of two bytes, with another one (RFC 8878, 3.1.1.1.4)."""
    assert frame[4] >> 6 == 1
    assert frame[4] >> 5 & 1
    return frame[:5] + (size - 256).to_bytes(2, "little") + frame[7:]


@pytest.mark.parametrize("form", [form for form in FORMS if form != RAW])
@pytest.mark.parametrize("kind", bombs())
def test_a_bomb_is_refused_within_bounds(kind: str, form: int) -> None:
    packed = bytes((form,)) + bombs()[kind]
    tracemalloc.start()
    try:
        with pytest.raises(Malformed):
            unpack(packed, len(TEXT))
        assert tracemalloc.get_traced_memory()[1] < 4 * len(TEXT) + len(packed)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("packed", [b"", b"\x03", b"\x05abc", b"\xff"])
def test_other_forms_are_refused(packed: bytes) -> None:
    with pytest.raises(Malformed, match="no such form"):
        unpack(packed, 10)


def test_a_threads_compressor_is_its_own() -> None:
    """Many threads at once."""
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: unpack(pack(TEXT + bytes([i]), PLAIN), GIB), range(200)))
    assert made == [TEXT + bytes([i]) for i in range(200)]
