"""What waits for a peer that does not read is bounded in bytes, in its session and for all together."""

from __future__ import annotations

import asyncio

from bootstrap.sessions import LOG_BYTES, OUTBOX_BYTES, RECORDS_BYTES, Outbox, Session
from peer.net.guests import Guests, Held, Limits
from peer.net.memory import MemoryNetwork
from peer.net.rate_limits import TokenBucket

RECORD = b"r" * 11_000
"""Of 50 replicas."""


async def test_a_log_that_nobody_reads_takes_little_memory_however_often_it_is_asked_for() -> None:
    session = Session(log_bytes=TokenBucket(*LOG_BYTES))
    read = list[int]()

    def log(count: int = 512):  # type: ignore[no-untyped-def]
        for number in range(count):
            read.append(number)
            yield RECORD

    for _ in range(100):
        session.post_records(log(), 0.0)
    assert session.outbox.size <= RECORDS_BYTES + len(RECORD)
    assert len(read) == session.outbox.qsize(), "nothing is read from disk that does not fit"
    sent = session.outbox.size
    for _ in range(100):
        session.outbox.clear()
        session.post_records(log(), 0.0)
        sent += session.outbox.size
    assert sent <= LOG_BYTES.burst + len(RECORD)


async def test_a_session_with_too_many_bytes_ends() -> None:
    ended = list[str]()
    session = Session(outbox=Outbox())
    session.outbox.held = Held(Guests(), "a", lambda: ended.append("a"))
    while not ended:
        session.post(RECORD)
    assert session.outbox.size <= OUTBOX_BYTES
    session.outbox.clear()
    session.post(bytes(OUTBOX_BYTES))
    assert session.outbox.qsize() == 1, "a message that is as long as one may be always fits"


def guests(**limits: object) -> Guests:
    return Guests(Limits(**{"held_of_a_peer": 100, "held_together": 250, "unread_seconds": 5.0, **limits}))  # type: ignore[arg-type]


def test_a_peer_has_so_many_bytes_in_all_its_streams() -> None:
    house, ended = guests(), list[int]()
    streams = [Held(house, "a", lambda number=number: ended.append(number)) for number in range(3)]  # type: ignore[misc]
    for held in streams:
        held.add(40, 0.0)
    assert ended == [2]
    assert house.held == 120
    for held in streams:
        held.read(40, 0.0)
    assert house.held == 0
    streams[0].add(90, 0.0)
    assert ended == [2]


def test_of_all_those_end_that_do_not_read_and_whoever_reads_stays() -> None:
    house, ended = guests(), list[str]()
    held = {name: Held(house, name, lambda name=name: ended.append(name)) for name in "abcd"}  # type: ignore[misc]
    for name, size in (("a", 60), ("b", 90), ("c", 95)):
        held[name].add(size, 0.0)
    held["c"].read(1, 9.0)
    held["c"].add(1, 9.0)
    held["d"].add(50, 10.0)
    assert ended == ["b"]
    assert house.held == 205
    held["b"].read(90, 10.0)
    assert house.held == 205, "it is counted once"


async def test_answers_that_are_not_read_end_the_streams_of_their_peer() -> None:
    network = MemoryNetwork()
    node, greedy = network.transport("node"), network.transport("greedy")
    node.guests.limits = Limits(held_of_a_peer=8 << 20)
    answering, most = list[int](), 0

    async def answer(stream) -> None:  # type: ignore[no-untyped-def]
        await stream.recv(16)
        answering.append(1)
        await stream.send(bytes(3 << 20), timeout=60.0)

    await node.serve("log", answer)
    streams = [await greedy.open("node", "log", timeout=5.0) for _ in range(16)]
    for stream in streams:
        await stream.send(b"please")
    async with asyncio.timeout(20.0):
        while len(answering) < 16 or node.open_streams > 2:
            most = max(most, node.guests.held)
            await asyncio.sleep(0)
    assert most <= (8 << 20) + (3 << 20)
