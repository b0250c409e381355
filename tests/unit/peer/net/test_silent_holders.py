"""A holder that does not answer, as after a change of address: in virtual time, which costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from peer.net import compression
from peer.net.base import Stream
from peer.net.blobs import BlobServer, BlobStore, Fetcher
from peer.net.blobs.fetching import OVERDUE_SECONDS, WAIT_SECONDS
from peer.net.blobs.holders import REST_SECONDS
from peer.net.blobs.serving import SERVING_TIMEOUTS
from peer.net.memory import MemoryNetwork
from protocol.codec.blob_hash import RANGE_BYTES
from protocol.wire import endpoints, framing

pytestmark = pytest.mark.virtual

Say = Callable[[Stream, dict[str, Any]], Coroutine[Any, Any, None]]
"""Answers one request."""


def now() -> float:
    return asyncio.get_running_loop().time()


class Network:
    """Holders by name, and the fetcher of "us", which gives no holder up by itself. `asked`: in this order."""

    def __init__(self, folder: Path) -> None:
        self.net = MemoryNetwork()
        self.folder = folder
        self.asked: list[tuple[str, bool]] = []
        """(name, whether we insisted)"""
        self.ours = BlobStore(folder / "us")
        self.fetcher = Fetcher(self.net.transport("us"), self.ours, timeout=1e6)

    async def join(self, name: str, say: Say) -> None:
        async def handle(stream: Stream) -> None:
            while True:
                request = framing.unpack_message(await stream.recv())
                assert isinstance(request, dict)
                if "blob" in request:
                    self.asked.append((name, request["insist"]))
                await say(stream, request)

        await self.net.transport(name).serve(endpoints.BLOB, handle)

    async def serve(self, name: str) -> BlobStore:
        """A holder that serves as it should."""
        store = BlobStore(self.folder / name)
        await BlobServer(store).serve(self.net.transport(name))
        return store

    async def aclose(self) -> None:
        await self.fetcher.aclose()
        for transport in list(self.net.peers.values()):
            await transport.aclose()


async def silent(stream: Stream, request: dict[str, Any]) -> None:
    await asyncio.Event().wait()


def says(**answer: Any) -> Say:
    async def say(stream: Stream, request: dict[str, Any]) -> None:
        await stream.send(framing.pack_message({"ask": [], "sure": False, **answer}))

    return say


def gives(data: bytes) -> Say:
    """A small blob."""

    async def say(stream: Stream, request: dict[str, Any]) -> None:
        await stream.send(framing.pack_message({"state": "here"}))
        await stream.send(compression.pack(data, compression.RAW))

    return say


def waits(seconds: float, data: bytes) -> Say:
    """Lets us wait, with a sign now and then."""

    async def say(stream: Stream, request: dict[str, Any]) -> None:
        end = now() + seconds
        while now() < end:
            await stream.send(framing.pack_message({"state": "wait"}))
            await asyncio.sleep(SERVING_TIMEOUTS.sign)
        await gives(data)(stream, request)

    return say


def unless_insisted(otherwise: Say, data: bytes) -> Say:
    async def say(stream: Stream, request: dict[str, Any]) -> None:
        await (gives(data) if request["insist"] else otherwise)(stream, request)

    return say


@pytest.mark.parametrize("size", [5, 5 * RANGE_BYTES])
async def test_who_has_nothing_does_not_hide_that_the_next_one_is_silent(tmp_path: Path, size: int) -> None:
    network = Network(tmp_path)
    await network.join("empty", says(state="absent"))
    await network.join("silent", silent)
    name = (await network.serve("holder")).put(bytes(size))
    began = now()
    await network.fetcher.fetch(name, size, ["empty", "silent", "holder"])
    assert network.asked == [("empty", False), ("silent", False)]
    assert now() - began < 1.5 * OVERDUE_SECONDS
    assert network.ours.get(name) == bytes(size)
    await network.aclose()


async def test_when_all_whom_a_busy_holder_names_are_silent_it_has_to_give(tmp_path: Path) -> None:
    network, data = Network(tmp_path), b"small"
    name = BlobStore(tmp_path / "sender").put(data)
    busy = says(state="busy", ask=["silent-1", "silent-2"], sure=True)
    await network.join("sender", unless_insisted(busy, data))
    for other in ("silent-1", "silent-2"):
        await network.join(other, silent)
    began = now()
    await network.fetcher.fetch(name, len(data), ["sender"])
    assert network.asked == [("sender", False), ("silent-1", False), ("silent-2", False), ("sender", True)]
    assert now() - began < 2.5 * OVERDUE_SECONDS
    await network.aclose()


@pytest.mark.parametrize(("seconds", "gives_up"), [(4 * SERVING_TIMEOUTS.sign, False), (1e5, True)])
async def test_who_lets_us_wait_is_not_silent_but_not_for_ever(tmp_path: Path, seconds: float, gives_up: bool) -> None:
    """A home's uplink sends its payload twice, however slow; no holder keeps a blob from us by promising it."""
    network, data = Network(tmp_path), b"small"
    name = BlobStore(tmp_path / "sender").put(data)
    busy = says(state="busy", ask=["waits"], sure=True)
    await network.join("sender", unless_insisted(busy, data))
    await network.join("waits", waits(seconds, data))
    began = now()
    await network.fetcher.fetch(name, len(data), ["sender"])
    assert (("sender", True) in network.asked) == gives_up
    assert now() - began < min(seconds, WAIT_SECONDS) + OVERDUE_SECONDS
    await network.aclose()


async def test_who_was_silent_is_asked_last_until_it_answers_or_some_time_is_over(tmp_path: Path) -> None:
    network = Network(tmp_path)
    away = True

    async def moves(stream: Stream, request: dict[str, Any]) -> None:
        await (silent if away else says(state="absent"))(stream, request)

    await network.join("mover", moves)
    store = await network.serve("holder")
    blobs = [bytes([number]) for number in range(6)]

    async def asked(number: int, *holders: str) -> list[str]:
        before = len(network.asked)
        await network.fetcher.fetch(store.put(blobs[number]), 1, holders)
        return [name for name, _ in network.asked[before:]]

    assert await asked(0, "mover", "holder") == ["mover"]
    began = now()
    assert await asked(1, "mover", "holder") == []
    assert now() - began < OVERDUE_SECONDS, "the second blob waits for nobody"
    await asyncio.sleep(REST_SECONDS)
    assert await asked(2, "mover", "holder") == ["mover"], "it may be back"
    assert await asked(3, "mover", "holder") == []
    away = False
    with pytest.raises(Exception, match="does not have it"):
        await asked(4, "mover")
    assert await asked(5, "mover", "holder") == ["mover"], "it is back"
    await network.aclose()


async def test_whose_answers_take_long_as_usual_is_not_late(tmp_path: Path) -> None:
    """Everybody's line is busy after a round: whoever asked others, too, would have all of it sent twice."""
    network, blobs = Network(tmp_path), [b"first", b"second"]
    names = [BlobStore(tmp_path / "sender").put(data) for data in blobs]

    async def slow(stream: Stream, request: dict[str, Any]) -> None:
        await asyncio.sleep(2 * OVERDUE_SECONDS)
        await gives(blobs[names.index(request["blob"])])(stream, request)

    await network.join("busy", slow)
    await network.join("other", gives(blobs[1]))
    await network.fetcher.fetch(names[0], len(blobs[0]), ["busy"])
    await asyncio.sleep(REST_SECONDS)
    await network.fetcher.fetch(names[1], len(blobs[1]), ["busy", "other"])
    assert network.asked == [("busy", False), ("busy", False)]
    await network.aclose()
