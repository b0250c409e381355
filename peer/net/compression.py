"""Compression of what travels: pieces of blobs and of text, and pages of the log (zstandard, RFC 8878).

A packed piece is a byte for its form, and

    0  the bytes as they are
    1  a zstandard frame of them
    2  a zstandard frame of the first of every two bytes, then of the second ones, each in blocks of its own (token ids)
    4  the same by four bytes (fp32)

A frame says how long its content is, so a reader knows before it decompresses that no more than it expects comes out.
"""

from __future__ import annotations

import threading

import zstandard

LEVEL = 1
WORTH = 0.97
"""A piece is compressed if at most this share of it is left."""
LEAST_BYTES = 512
"""Of a piece that is worth it."""
WINDOW_BYTES = 1 << 22
"""Of memory that a frame may ask for; a message is at most as long."""
RAW, PLAIN = 0, 1
FORMS = (RAW, PLAIN, 2, 4)
_own = threading.local()
"""A thread's compressor and decompressor: their buffers are used again."""


class Malformed(ValueError):
    """The bytes are no packed piece, or one that is too long."""


def form_of(data: bytes) -> int:
    """Returns the form in which `data` is shortest; RAW where none is worth it."""
    if len(data) < LEAST_BYTES:
        return RAW
    sizes = {form: len(_frame(data, form)) for form in FORMS if form != RAW and len(data) % form == 0}
    best = min(sizes, key=sizes.__getitem__)
    return best if sizes[best] <= WORTH * len(data) else RAW


def pack(data: bytes, form: int) -> bytes:
    """Packs a piece in this form, or as it is where the form does not fit or makes it longer."""
    if form != RAW and len(data) % form == 0:
        frame = _frame(data, form)
        if len(frame) < len(data):
            return bytes((form,)) + frame
    return bytes((RAW,)) + data


def unpack(packed: bytes, most: int) -> bytes:
    """Returns the piece, of at most `most` bytes. Raises Malformed."""
    if not packed or packed[0] not in FORMS:
        raise Malformed("no such form of compression")
    form, frame = packed[0], packed[1:]
    if form == RAW:
        if len(frame) > most:
            raise Malformed(f"{len(frame)} bytes; at most {most} are taken")
        return frame
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if size > most:  # also where the frame does not say its size
            raise Malformed(f"{size} bytes when decompressed; at most {most} are taken")
        if not hasattr(_own, "reader"):
            _own.reader = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
        data: bytes = _own.reader.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError:
        raise Malformed("damaged compression") from None
    if len(data) != size or size % form:
        raise Malformed("another number of bytes than it says")
    if form == PLAIN:
        return data
    whole, length = bytearray(size), size // form
    for i in range(form):
        whole[i::form] = data[i * length : (i + 1) * length]
    return bytes(whole)


def _frame(data: bytes, form: int) -> bytes:
    if not hasattr(_own, "writer"):
        _own.writer = zstandard.ZstdCompressor(level=LEVEL)
    frame, pieces = _own.writer.compressobj(size=len(data)), list[bytes]()
    for i in range(form):  # a code for all of them would fit none
        pieces += frame.compress(data[i::form]), frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    return b"".join((*pieces, frame.flush()))
