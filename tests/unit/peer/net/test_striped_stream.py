"""Several streams as one: what is sent comes whole and in order, whatever is interrupted; lies end all stripes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from peer.net.base import Closed, Ended, Stream, Timeout
from peer.net.memory import MemoryNetwork
from peer.net.stream import SLICE, SMALL, STRIPES, StripedStream, slices
from peer.net.uplink import Uplink
from protocol.errors import RemoteError
from protocol.wire.framing import MAX_FRAME, FrameError

WHOLE = STRIPES * SLICE
"""A frame with a slice on every stripe."""
FOUR = 4 * SLICE
"""One with four slices."""
SIZES = (0, 1, SLICE - 1, SLICE, 2 * SLICE, 3 * SLICE - 1, WHOLE, WHOLE + 7, 1_000_003)


Ends = tuple[list[Stream], list[Stream]]


@pytest.fixture
@contextlib.asynccontextmanager
async def ends() -> AsyncIterator[Ends]:
    """The ends of STRIPES streams."""
    network, there, over = MemoryNetwork(), dict[int, Stream](), asyncio.Event()
    a, b = network.transport("a"), network.transport("b")

    async def serve(stream: Stream) -> None:
        there[int(await stream.recv())] = stream
        await over.wait()

    await b.serve("stripes", serve)
    await a.connect(b.addresses, timeout=1.0)
    here: list[Stream] = []
    for stripe in range(STRIPES):
        here.append(await a.open("b", "stripes", timeout=1.0))
        await here[-1].send(str(stripe).encode())
    while len(there) < STRIPES:
        await asyncio.sleep(0)
    try:
        yield here, [there[i] for i in range(STRIPES)]
    finally:
        over.set()
        await a.aclose()
        await b.aclose()


def body(size: int) -> bytes:
    return bytes(i * 31 % 251 for i in range(size))


async def drain(stream: Stream) -> None:
    while True:
        await stream.recv()


async def put(here: list[Stream], first: bytes, others: Sequence[int]) -> None:
    """A frame's first slice, and zeros as the others."""
    await here[0].send(first)
    for stream, size in zip(here[1:], others, strict=False):
        await stream.send(bytes(size))


@pytest.mark.parametrize("first", [0, STRIPES - 1])
@pytest.mark.parametrize("size", SIZES)
def test_slices_are_the_frame_and_nearly_equal(size: int, first: int) -> None:
    cut = slices(first, size, STRIPES)
    assert [stripe for stripe, _ in cut] == [(first + i) % STRIPES for i in range(len(cut))]
    assert sum(part for _, part in cut) == size
    assert len(cut) == min(STRIPES, max(1, size // SLICE))
    assert max(part for _, part in cut) - min(part for _, part in cut) <= 1


async def test_all_lanes_carry_alike(ends: Ends) -> None:
    here, there = ends
    one, two, count = StripedStream(here), StripedStream(there), 2 * STRIPES
    before = [stream.received for stream in there]
    for _ in range(count):  # each has three slices
        _, frame = await asyncio.gather(one.send(body(3 * SLICE)), two.recv())
        assert frame == body(3 * SLICE)
    carried = [stream.received - was for stream, was in zip(there, before, strict=True)]
    assert max(carried) - min(carried) <= SLICE + 64
    assert min(carried) >= (3 * count // STRIPES - 1) * SLICE


async def test_frames_come_whole_and_in_order_both_ways(ends: Ends) -> None:
    here, there = ends
    one, two = StripedStream(here), StripedStream(there)
    assert (one.remote, one.name) == ("b", "stripes")

    async def send(stream: Stream) -> None:
        for size in SIZES:
            await stream.send(body(size)[: size // 3], memoryview(body(size))[size // 3 :])

    async def take(stream: Stream) -> list[bytes]:
        return [await stream.recv() for _ in SIZES]

    before = two.received
    _, _, *came = await asyncio.gather(send(one), send(two), take(one), take(two))
    assert came == [[body(size) for size in SIZES]] * 2
    count = sum(len(slices(0, size, STRIPES)) for size in SIZES)
    assert two.received - before == sum(SIZES) + 4 * len(SIZES) + 4 * count, "lengths and the slices' prefixes"


async def test_an_interrupted_recv_loses_nothing(ends: Ends) -> None:
    here, there = ends
    frame, taking, at = body(WHOLE), StripedStream(there), 0
    for stripe, size in slices(0, WHOLE, STRIPES):
        with pytest.raises(Timeout):
            await taking.recv(timeout=0.01)
        head = len(frame).to_bytes(4, "big") if stripe == 0 else b""
        await here[stripe].send(head + frame[at : at + size])
        at += size
    assert await taking.recv() == frame


async def test_a_limited_uplink_sends_in_pieces_and_keeps_its_rate(ends: Ends) -> None:
    here, there = ends
    uplink, loop = Uplink(16_000_000), asyncio.get_running_loop()
    assert uplink.piece < 2 * SLICE
    one, two = StripedStream(here, uplink), StripedStream(there)
    began = loop.time()

    async def send() -> None:
        for size in SIZES:
            await one.send(body(size))

    async def take() -> list[bytes]:
        return [await two.recv() for _ in SIZES]

    _, came = await asyncio.gather(send(), take())
    assert came == [body(size) for size in SIZES]
    assert loop.time() - began > 8 * sum(SIZES) / 16_000_000 - Uplink.BURST_SECONDS


async def test_signs_of_life_do_not_wait_for_their_turn(ends: Ends) -> None:
    here, there = ends
    uplink = Uplink(8)
    await uplink.turn("somebody else", uplink.piece)
    await StripedStream(here, uplink).send(body(SMALL - 4))
    assert await StripedStream(there).recv() == body(SMALL - 4)
    waiting = asyncio.create_task(StripedStream(here, uplink).send(body(SMALL)))
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    uplink.close()


@pytest.mark.parametrize(
    ("first", "others"),
    [
        (b"", ()),
        (b"\x00\x00\x00", ()),
        (b"\x00\x00\x00\x03four", ()),
        (b"\xff\xff\xff\xff" + bytes(SLICE), ()),
        (FOUR.to_bytes(4, "big") + bytes(2 * SLICE), ()),
        (FOUR.to_bytes(4, "big") + bytes(SLICE), (SLICE, 0, SLICE)),
        (FOUR.to_bytes(4, "big") + bytes(SLICE), (SLICE, SLICE + 1, SLICE)),
    ],
)
async def test_who_sends_what_is_no_frame_is_cut_off(ends: Ends, first: bytes, others: Sequence[int]) -> None:
    here, there = ends
    taking = StripedStream(there)
    await put(here, first, others)
    with pytest.raises(Closed):
        await taking.recv(limit=2 * FOUR)
    for stream in here:
        with pytest.raises(RemoteError):
            await stream.recv()


@pytest.mark.parametrize(
    ("first", "others"),
    [
        (b"\x00\x00\x00\x05four", ()),
        (FOUR.to_bytes(4, "big") + bytes(SLICE), (SLICE, SLICE - 1, SLICE)),
    ],
)
async def test_the_rest_of_a_frame_is_waited_for(ends: Ends, first: bytes, others: Sequence[int]) -> None:
    here, there = ends
    taking = StripedStream(there)
    await put(here, first, others)
    with pytest.raises(Timeout):
        await taking.recv(timeout=0.05)
    await here[2 if others else 0].send(b"\x00")
    assert len(await taking.recv()) == int.from_bytes(first[:4], "big")


async def test_a_frame_above_the_limit_is_refused_at_once(ends: Ends) -> None:
    here, there = ends
    sending = asyncio.create_task(StripedStream(here).send(body(10 * SLICE)))
    with pytest.raises(Closed):
        await StripedStream(there).recv(limit=SLICE)
    await asyncio.gather(sending, return_exceptions=True)


async def test_the_end_and_a_death_are_told_apart(ends: Ends) -> None:
    here, there = ends
    one, two = StripedStream(here), StripedStream(there)
    await one.send(body(WHOLE))
    await one.finish()
    assert await two.recv() == body(WHOLE)
    with pytest.raises(Ended):
        await two.recv()
    await two.close()
    with pytest.raises(Closed):
        await one.recv()


async def test_a_send_that_fails_on_one_lane_ends_all(ends: Ends) -> None:
    here, there = ends
    await here[-1].close()
    with pytest.raises(RemoteError):
        await StripedStream(here).send(body(WHOLE))
    for stream in there[:-1]:
        with pytest.raises(Closed):
            await drain(stream)


async def test_the_longest_frame_passes_and_a_longer_one_is_not_sent(ends: Ends) -> None:
    here, there = ends
    one, two = StripedStream(here), StripedStream(there)
    with pytest.raises(FrameError):
        await one.send(bytes(MAX_FRAME), b"x")
    _, came = await asyncio.gather(one.send(bytes(MAX_FRAME)), two.recv())
    assert len(came) == MAX_FRAME


async def test_a_cancelled_send_ends_all(ends: Ends) -> None:
    here, there = ends
    sending = asyncio.create_task(StripedStream(here).send(bytes(MAX_FRAME)))  # more than memory streams hold
    while not any(stream.received > SLICE for stream in there):
        with contextlib.suppress(Timeout):
            await there[1].recv(timeout=0.01)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    for stream in there:
        with pytest.raises(Closed):
            await drain(stream)
