"""Frames and messages: what goes in comes out, and nothing else is believed."""

from __future__ import annotations

import time

import msgpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from protocol.wire import framing
from protocol.wire.framing import END, Ended, FrameError, FrameReader, pack, pack_message, unpack_message

_leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=40)
    | st.just("x" * 300)
    | st.just(b"x" * 70_000)
)
_values = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20),
    max_leaves=20,
)


patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(st.lists(st.binary(max_size=200), max_size=8), st.lists(st.integers(1, 50), min_size=1, max_size=20))
@patient
def test_frames_survive_any_cutting(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(pack(body) for body in bodies) + END
    reader, frames, index = FrameReader(), [], 0
    while reader.pending or stream:
        try:
            frame = reader.next()
        except Ended:
            break
        if frame is None:
            size = cuts[index % len(cuts)]
            reader.feed(stream[:size])
            stream, index = stream[size:], index + 1
        else:
            frames.append(frame)
    assert frames == bodies
    with pytest.raises(Ended):
        reader.next()


@given(st.lists(st.binary(max_size=50), max_size=5))
@patient
def test_parts_become_one_body(parts: list[bytes]) -> None:
    reader = FrameReader()
    reader.feed(pack(*(memoryview(part) for part in parts)))
    assert reader.next() == b"".join(parts)
    assert reader.pending == 0


def test_a_prefix_over_the_limit_is_refused_before_its_body_arrives() -> None:
    reader = FrameReader()
    reader.feed((1001).to_bytes(4, "big"))
    with pytest.raises(FrameError, match="1001 bytes; at most 1000"):
        reader.next(1000)
    assert reader.next(1001) is None
    huge = FrameReader()
    huge.feed((framing.MAX_FRAME + 1).to_bytes(4, "big"))
    with pytest.raises(FrameError):
        huge.next()
    with pytest.raises(FrameError):
        framing.header(framing.MAX_FRAME + 1)


def test_nothing_is_read_after_the_end() -> None:
    reader = FrameReader()
    reader.feed(pack(b"last") + END + pack(b"too late"))
    assert reader.next() == b"last"
    for _ in range(2):
        with pytest.raises(Ended):
            reader.next()


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


@given(_values)
@patient
def test_messages_come_back(value: object) -> None:
    raw = pack_message(value)
    assert unpack_message(raw) == _plain(value)
    assert unpack_message(memoryview(raw)) == _plain(value)
    assert pack_message(unpack_message(raw)) == raw


def test_equal_maps_give_equal_bytes() -> None:
    assert pack_message({"a": 1, "b": {"c": 2, "d": 3}}) == pack_message({"b": {"d": 3, "c": 2}, "a": 1})


@given(st.binary(max_size=300))
@example(b"")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
@example(b"\xa1\xff")
@example(b"\x81\x01\x01")
@example(b"\xc1")
@settings(patient, max_examples=300)
def test_arbitrary_bytes_give_a_value_or_a_frame_error(raw: bytes) -> None:
    try:
        value = unpack_message(raw)
    except FrameError:
        return  # anything else fails the test
    assert repr(msgpack.unpackb(raw, strict_map_key=True)) == repr(value)


@given(_values, st.data())
@patient
def test_cut_or_prolonged_messages_are_refused(value: object, data: st.DataObject) -> None:
    raw = pack_message(value)
    with pytest.raises(FrameError):
        unpack_message(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(FrameError, match="follow"):
        unpack_message(raw + b"\xc0")


def _nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


def test_nesting_is_limited_both_ways() -> None:
    assert unpack_message(_nested(16)) is not None
    for depth in (17, 1000, 1_000_000):
        with pytest.raises(FrameError, match="nested"):
            unpack_message(_nested(depth))
    with pytest.raises(FrameError, match="nested"):
        unpack_message(b"\x81\xa1a\x91\x90", depth=2)
    value: object = None
    for _ in range(17):
        value = [value]
    with pytest.raises(FrameError, match="nested"):
        pack_message(value)


@pytest.mark.parametrize("code", [0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8])
def test_extension_types_are_refused(code: int) -> None:
    with pytest.raises(FrameError, match="extension"):
        unpack_message(bytes([0x91, code, 0, 0, 0, 0, 0, 0]))


def test_size_and_number_of_values_are_limited_fast() -> None:
    with pytest.raises(FrameError, match="11 bytes; at most 10"):
        unpack_message(pack_message(b"123456789"), limit=10)
    begin = time.monotonic()
    with pytest.raises(FrameError, match="values"):
        unpack_message(b"\xdd\x00\x3f\xff\x00" + b"\x90" * 0x3FFF00)
    assert time.monotonic() - begin < 20
    with pytest.raises(FrameError, match="at most"):
        pack_message(b"x" * framing.MAX_MESSAGE)


@pytest.mark.parametrize("value", [object(), {1: 2}, {b"a": 1}, 2**64, -(2**63) - 1, {"a": {1, 2}}, "\ud800"])
def test_what_cannot_be_sent(value: object) -> None:
    with pytest.raises(FrameError):
        pack_message(value)


def test_maps_need_text_keys() -> None:
    for key in (b"\x01", b"\xc4\x01a", b"\xc0", b"\x90", b"\xca\0\0\0\0"):
        for raw in (b"\x81" + key + b"\x01", b"\x82\xa1a\x80" + key + b"\x01", b"\x91\xde\0\x01" + key + b"\x01"):
            with pytest.raises(FrameError, match="key is not text"):
                unpack_message(raw)
    assert unpack_message(b"\x82\xa1a\x92\x01\x02\xd9\x01b\x81\xdb\0\0\0\x01c\x03") == {"a": [1, 2], "b": {"c": 3}}
