"""Blobs: kept within a limit, fetched in ranges from several holders, spread, and served no faster than allowed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from peer.net import p2p
from peer.net.base import Closed, Handler, Stream, Transport, Unreachable
from peer.net.blobs import Blob, BlobServer, BlobStore, Coming, Fetcher, fetch_named, fetching
from peer.net.blobs.holders import SLACK_RANGES, Holders, Speed
from peer.net.blobs.serving import SERVING_TIMEOUTS, SPREAD_SECONDS, SpreadTracker
from peer.net.disk import Disk, Piece
from peer.net.memory import MemoryNetwork
from peer.net.uplink import Uplink
from protocol.codec import blob_hash
from protocol.codec.blob_hash import RANGE_BYTES
from protocol.errors import RemoteError, UsageError
from protocol.identity import Identity
from protocol.wire import endpoints, framing
from protocol.wire.framing import MAX_FRAME

DEADLINE = 200.0


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


# --- the store


def test_a_store_keeps_blobs_by_name(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    data = noise(3 * RANGE_BYTES)
    name = store.put(data, 4)
    assert (store.has(name), store.get(name), list(store), store.used) == (True, data, [name], len(data))
    assert store.put(data, 9) == name
    assert store.find(name) == Blob(store.disk, tmp_path / name, 0, len(data))
    (tmp_path / ".half-written").write_bytes(b"x")
    again = BlobStore(tmp_path)
    assert (again.get(name), again.used) == (data, len(data))
    assert not (tmp_path / ".half-written").exists()
    assert again.get("0" * 64) is None


def test_what_is_put_is_durable_though_a_blob_of_the_name_was_there(tmp_path: Path) -> None:
    data = noise(RANGE_BYTES)
    name = BlobStore(tmp_path).put(data, 4, sync=False)
    (tmp_path / name).write_bytes(data[:100])  # the power was lost
    store = BlobStore(tmp_path)
    assert store.put(data, 5) == name
    assert (store.get(name), store.used) == (data, len(data))


@pytest.mark.parametrize("size", [RANGE_BYTES, 5 * RANGE_BYTES])
def test_a_flipped_bit_on_disk_is_not_believed(tmp_path: Path, size: int) -> None:
    store = BlobStore(tmp_path)
    name = store.put(noise(size))
    raw = bytearray((tmp_path / name).read_bytes())
    raw[size // 2] ^= 4
    (tmp_path / name).write_bytes(raw)
    assert store.get(name) is None
    assert not store.has(name)
    assert not (tmp_path / name).exists()


def test_over_its_limit_a_store_forgets_the_oldest_rounds_first(tmp_path: Path) -> None:
    names = {round: BlobStore(tmp_path).put(noise(1000, round), round) for round in (3, 1, 2)}
    store = BlobStore(tmp_path, limit=3500)  # the rounds are known after a restart
    store.put(noise(1000, 4), 4)
    assert set(store) == {names[2], names[3], blob_hash.name_of(noise(1000, 4))}
    store.protected = {names[2]}
    store.put(noise(1000, 5), 5)
    assert names[2] in set(store)
    assert names[3] not in set(store)
    assert store.used == 3000


def test_what_is_protected_stays_above_the_limit(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, limit=2500)
    names = [store.put(noise(1000, i), i) for i in range(2)]
    store.protected = set(names)
    assert not store.make_space(1000)
    names.append(store.put(noise(1000, 2), 2))
    assert set(store) == set(names)
    store.protected = set(names[1:])
    assert store.make_space(0)
    assert set(store) == set(names[1:])


def test_what_a_round_did_not_commit_goes(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    committed, dropped, ours, other = (store.put(noise(9, i), 7 - (i == 3)) for i in range(4))
    store.protected = {ours}
    store.settle(7, {committed})
    assert set(store) == {committed, ours, other}
    assert not store.has(dropped)


def test_a_blob_that_comes_again_counts_once_and_as_of_its_last_round(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    name = store.put(noise(1000), 3)
    store.add(name, 5, 1000)
    assert (store.used, store.newer(2), store.newer(3), store.newer(5)) == (1000, {name}, {name}, set())
    store.remove(name)
    assert (store.used, store.newer(0)) == (0, set())


def test_a_part_goes_on_where_it_was(tmp_path: Path) -> None:
    data = noise(10 * RANGE_BYTES + 5)
    size, leaves = blob_hash.leaves_of([data])
    name = blob_hash.root(size, leaves)
    part = BlobStore(tmp_path).part(name, size)
    assert not part.learn(bytes(len(leaves)))
    assert not part.learn(leaves[:-32])
    assert part.learn(leaves)
    for index in (7, 2, 10):
        assert part.write(index, data[slice(*blob_hash.span(size, index))])
    assert not part.write(3, data[:RANGE_BYTES])
    path = tmp_path / "parts" / name
    with open(path, "r+b") as file:  # one range is damaged meanwhile
        os.pwrite(file.fileno(), b"?", 2 * RANGE_BYTES + 9)
    store = BlobStore(tmp_path)
    again = store.part(name, size)
    assert again.missing == set(range(11)) - {7, 10}
    for index in sorted(again.missing):
        assert again.write(index, data[slice(*blob_hash.span(size, index))])
    assert not store.has(name)
    again.finish(3)
    assert store.get(name) == data
    assert list((tmp_path / "parts").iterdir()) == []


def test_what_is_refused_in_the_end_is_not_kept(tmp_path: Path) -> None:
    data = noise(2 * RANGE_BYTES)
    store = BlobStore(tmp_path)
    part = store.part(blob_hash.name_of(data), len(data))
    assert part.learn(blob_hash.leaves_of([data])[1])
    for index in range(2):
        part.write(index, data[slice(*blob_hash.span(len(data), index))])

    def refuse(found: bytes) -> None:
        assert found == data
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        part.finish(1, refuse)
    assert list(store) == []
    assert list((tmp_path / "parts").iterdir()) == []


# --- the uplink, on a virtual clock


@pytest.mark.virtual
async def test_an_uplink_keeps_its_rate() -> None:
    uplink, loop = Uplink(8_000_000), asyncio.get_running_loop()
    for _ in range(100):
        await uplink.turn("a", 100_000)
    assert 9.7 < loop.time() <= 10.0  # 10 MB at 1 MB/s, less the first burst
    await asyncio.sleep(5)
    began = loop.time()
    for _ in range(10):
        await uplink.turn("a", 100_000)
    assert 0.7 < loop.time() - began <= 1.0, "idle time is not saved up"


@pytest.mark.virtual
async def test_an_uplink_serves_peers_in_turn() -> None:
    uplink = Uplink(8_000_000)
    order: list[str] = []

    async def ask(peer: str) -> None:
        await uplink.turn(peer, 100_000)
        order.append(peer)

    asked = [asyncio.create_task(ask("greedy")) for _ in range(20)]
    await asyncio.sleep(0.35)
    asked += [asyncio.create_task(ask(peer)) for peer in ("b", "c", "b", "c")]
    gone = asyncio.create_task(ask("gone"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(*asked)
    after = order[order.index("b") - 1 :]
    assert after[:6] in (["greedy", "b", "c"] * 2, ["greedy", "c", "b"] * 2)
    assert order.count("greedy") == 20
    assert "gone" not in order


@pytest.mark.virtual
async def test_an_uplink_is_shared_by_bytes() -> None:
    """A peer that takes small pieces has as much of it as one that takes large ones."""
    uplink, taken = Uplink(8_000_000), dict[str, int]()

    async def take(peer: str, size: int) -> None:
        while True:
            await uplink.turn(peer, size)
            taken[peer] = taken.get(peer, 0) + size

    tasks = [asyncio.create_task(take("large", 1 << 18)) for _ in range(4)]
    tasks += [asyncio.create_task(take("small", uplink.piece)) for _ in range(4)]
    await asyncio.sleep(10)
    for task in tasks:
        task.cancel()
    assert taken["large"] == pytest.approx(taken["small"], rel=0.15), "but for unfinished pieces"
    assert sum(taken.values()) == pytest.approx(10_000_000, rel=0.05)


@pytest.mark.virtual
async def test_without_a_limit_nobody_waits() -> None:
    await Uplink().turn("a", 1 << 40)
    assert asyncio.get_running_loop().time() == 0.0


# --- between peers


class FillingDisk(Disk):
    """The machine's, which may be `full`."""

    full = False

    def write_at(self, path: Path, start: int, data: Piece) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        super().write_at(path, start, data)


class Watched:
    """A stream that a peer serves. Counts the ranges that are read and the bytes that it sends; spoils some."""

    def __init__(self, stream: Stream, peer: Peer) -> None:
        self.stream, self.peer = stream, peer
        self.remote, self.name = stream.remote, stream.name
        self.blob, self.whole, self.leaves, self.asked = "", False, False, deque[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    async def recv(self, limit: int = MAX_FRAME, *, timeout: float | None = None) -> bytes:
        frame = await self.stream.recv(limit, timeout=timeout)
        with contextlib.suppress(framing.FrameError):
            match framing.unpack_message(frame):
                case {"blob": str(name), "size": int(size), "whole": bool(whole), "leaves": bool(leaves)}:
                    self.blob, self.whole, self.leaves = name, whole, leaves and size > RANGE_BYTES
                case {"range": int(index)}:
                    self.asked.append(index)
        return frame

    async def send(self, *parts: bytes | memoryview, timeout: float = 60.0) -> None:
        data = b"".join(map(bytes, parts))
        if self.is_answer(data) or not self.blob:
            pass
        elif self.whole:
            self.peer.read(blob_hash.count(len(data)))
            self.peer.gave[self.blob] += len(data)
        elif self.leaves:
            self.leaves = False
        else:
            self.peer.read(1)
            if self.peer.corrupt(self.asked.popleft()):
                data = data[:-1] + bytes([data[-1] ^ 1])
            self.peer.gave[self.blob] += len(data)
        await self.stream.send(data, timeout=timeout)

    def is_answer(self, data: bytes) -> bool:
        with contextlib.suppress(framing.FrameError):
            answer = framing.unpack_message(data)
            return isinstance(answer, dict) and "state" in answer
        return False


class Peer:
    """A served store. `corrupt`: ranges that it spoils; `asked`: ranges served; `gave`: bytes of each blob."""

    def __init__(self, transport: Transport, folder: Path, uplink: Uplink | None = None) -> None:
        self.transport = transport
        self.warnings: list[str] = []
        self.disk = FillingDisk()
        self.store = BlobStore(folder, disk=self.disk)
        self.fetcher = Fetcher(transport, self.store, holders=Holders(self.warnings.append), timeout=10.0)
        self.server = BlobServer(
            self.store,
            coming=self.fetcher.coming,
            uplink=uplink or Uplink(),
            named={"hello": b"world"},
            warn=self.warnings.append,
        )
        self.asked = 0
        self.gave: Counter[str] = Counter()
        self.corrupt: Callable[[int], bool] = lambda index: False

    def read(self, ranges: int) -> None:
        self.asked += ranges

    async def serve(self) -> None:
        """Serves over streams that are watched."""

        class Watching:
            async def serve(self, name: str, handler: Handler) -> None:
                await peer.transport.serve(name, lambda stream: handler(Watched(stream, peer)))

        peer = self
        await self.server.serve(Watching())  # type: ignore[arg-type]

    @property
    def id(self) -> str:
        return self.transport.peer_id

    @property
    def sent(self) -> int:
        return self.transport.traffic.sent[endpoints.BLOB]

    @property
    def received(self) -> int:
        return self.transport.traffic.received[endpoints.BLOB]


@contextlib.asynccontextmanager
async def swarm(kind: str, folder: Path, count: int) -> AsyncIterator[list[Peer]]:
    """`count` peers that serve; each reaches all others."""
    peers: list[Peer] = []
    network = MemoryNetwork()
    try:
        for index in range(count):
            transport: Transport
            if kind == "memory":
                transport = network.transport(Identity(bytes([index]) * 32).peer_id)
            else:
                transport = await p2p.start(
                    folder / f"key-{index}",
                    host="127.0.0.1",
                    bootstrap=peers[0].transport.addresses if peers else (),
                    validate=lambda key, subkey, value: True,
                )
            peers.append(Peer(transport, folder / f"store-{index}"))
            await peers[-1].serve()
        if kind == "p2p":
            for a, b in itertools.combinations(peers, 2):
                await b.transport.connect(a.transport.addresses, timeout=DEADLINE)
        yield peers
    finally:
        for peer in reversed(peers):
            await peer.fetcher.aclose()
            peer.server.uplink.close()
            await peer.transport.aclose()


@pytest.mark.parametrize("size", [0, 1, RANGE_BYTES, RANGE_BYTES + 1, 40 * RANGE_BYTES + 17])
async def test_a_blob_from_one_holder(tmp_path: Path, size: int) -> None:
    data = noise(size)

    async with swarm("memory", tmp_path, 2) as (a, b):
        name = a.store.put(data)
        await b.fetcher.fetch(name, size, [a.id], round=6)
        assert b.store.get(name) == data
        assert int((b.store.folder / name).stat().st_mtime) == 6
        if size <= RANGE_BYTES:  # the answer, the bytes, the end: nothing for the check
            assert a.sent <= size + 60
        await b.fetcher.fetch(name, size, [])
        with pytest.raises(RemoteError, match="does not have it"):
            await b.fetcher.fetch("0" * 64, 5, [a.id])
        with pytest.raises(RemoteError, match="does not have it"):
            await b.fetcher.fetch(blob_hash.name_of(b"x"), 5, [a.id])


class Opening:
    """A transport that remembers the streams it `opened`."""

    def __init__(self, transport: Transport) -> None:
        self.transport, self.opened = transport, list[Stream]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    async def open(self, peer: str, name: str, *, timeout: float) -> Stream:
        self.opened.append(await self.transport.open(peer, name, timeout=timeout))
        return self.opened[-1]


async def test_small_blobs_share_a_stream(tmp_path: Path) -> None:
    async with swarm("memory", tmp_path, 2) as (a, b):
        through = Opening(b.transport)
        fetcher, opened = Fetcher(through, b.store), through.opened  # type: ignore[arg-type]
        for seed in range(6):
            data = noise(blob_hash.WHOLE_BYTES - seed, seed)
            name = a.store.put(data)
            if seed == 4:  # the other end is gone meanwhile
                await opened[-1].close()
            with pytest.raises(RemoteError, match="does not have it"):
                await fetcher.fetch(blob_hash.name_of(data[1:]), 5, [a.id])
            await fetcher.fetch(name, len(data), [a.id])
            assert b.store.get(name) == data
        assert len(opened) == 2
        assert a.server.open_streams == 1
        await fetcher.aclose()


async def test_a_stream_may_be_taken_while_an_older_one_is_closed() -> None:
    streams = fetching.IdleStreams(most=1)
    taken: list[Any] = []

    class Kept:
        remote = "peer"

        async def close(self) -> None:
            taken.append(streams.take("peer"))

    older, newer = Kept(), Kept()
    await streams.keep(older)  # type: ignore[arg-type]
    await streams.keep(newer)  # type: ignore[arg-type]
    assert taken == [newer]


async def test_what_has_a_name(tmp_path: Path) -> None:
    async with swarm("memory", tmp_path, 2) as (a, b):
        assert await fetch_named(b.transport, a.id, "hello", limit=5) == b"world"
        with pytest.raises(RemoteError, match="5 bytes; at most 4"):
            await fetch_named(b.transport, a.id, "hello", limit=4)
        with pytest.raises(RemoteError, match="does not have it"):
            await fetch_named(b.transport, a.id, "else", limit=4)


@pytest.mark.parametrize("streams", [1, 2])
async def test_a_lone_holder_of_a_large_blob_is_asked_over_more_streams_if_that_is_wanted(
    tmp_path: Path, streams: int
) -> None:
    data = noise(200 * RANGE_BYTES)

    async with swarm("memory", tmp_path, 2) as (a, b):
        through = Opening(b.transport)
        fetcher = Fetcher(through, b.store)  # type: ignore[arg-type]
        name, asked = a.store.put(data), asyncio.Event()
        await fetcher.fetch(name, len(data), [a.id], all_asked=asked, streams=streams)
        assert asked.is_set()
        assert b.store.get(name) == data
        assert len(through.opened) == streams
        assert a.asked == 200, "no range was sent twice"
        await fetcher.aclose()


async def test_the_next_blob_can_be_asked_for_before_the_last_one_is_here(tmp_path: Path) -> None:
    data = noise(40 * RANGE_BYTES)

    async with swarm("memory", tmp_path, 2) as (a, b):
        a.server.uplink = Uplink(8 * 20 * RANGE_BYTES)  # twenty ranges a second
        name, asked = a.store.put(data), asyncio.Event()
        fetching = asyncio.create_task(b.fetcher.fetch(name, len(data), [a.id], all_asked=asked))
        await asked.wait()
        assert not fetching.done()
        assert 0 < b.fetcher.came < len(data)
        await fetching
        assert b.fetcher.came == 0


def test_a_holder_that_answers_later_than_at_first_still_has_ranges_under_way() -> None:
    speed = Speed()
    speed.answered(0.05)
    speed.arrived(1.0, RANGE_BYTES)
    assert speed.depth >= SLACK_RANGES


@pytest.mark.parametrize("kind", ["memory", "p2p"])
async def test_a_blob_from_several_holders_at_once(kind: str, tmp_path: Path) -> None:
    data = noise(300 * RANGE_BYTES)

    async with swarm(kind, tmp_path, 4) as (*holders, d):
        for holder in holders:
            name = holder.store.put(data)
        await d.fetcher.fetch(name, len(data), [h.id for h in holders])
        assert d.store.get(name) == data
        assert sum(h.asked for h in holders) == 300, "no range was sent twice"
        assert all(h.asked > 10 for h in holders)


async def test_a_fast_holder_carries_more(tmp_path: Path) -> None:
    data = noise(100 * RANGE_BYTES)

    async with swarm("memory", tmp_path, 3) as (slow, fast, c):
        slow.server.uplink = Uplink(8 * 5 * RANGE_BYTES)  # five ranges a second
        fast.server.uplink = Uplink(8 * 100 * RANGE_BYTES)
        for holder in (slow, fast):
            name = holder.store.put(data)
        await c.fetcher.fetch(name, len(data), [slow.id, fast.id])
        assert slow.asked < fast.asked / 5
        other = fast.store.put(noise(RANGE_BYTES, 1))
        slow.store.put(noise(RANGE_BYTES, 1))
        asked = slow.asked
        await c.fetcher.fetch(other, RANGE_BYTES, [slow.id, fast.id])
        assert slow.asked == asked, "the faster one is asked first"


async def test_a_corrupt_holder_is_named_at_once_and_avoided(tmp_path: Path) -> None:
    data = noise(120 * RANGE_BYTES)

    async with swarm("memory", tmp_path, 4) as (a, bad, c, d):
        bad.corrupt = lambda index: True
        for holder in (a, bad, c):
            name = holder.store.put(data)
            small = holder.store.put(b"small")
        await d.fetcher.fetch(name, len(data), [a.id, bad.id, c.id])
        assert d.store.get(name) == data
        assert [w for w in d.warnings if bad.id[-8:] in w and "wrong bytes for range" in w]
        assert len(d.warnings) == 1
        assert bad.asked <= 40, "the first wrong range is the last"
        assert a.asked + c.asked == 120, "nothing that was right is fetched again"
        asked = bad.asked
        with pytest.raises(RemoteError, match="no holder that can be trusted"):
            await d.fetcher.fetch(small, 5, [bad.id])
        await d.fetcher.fetch(small, 5, [bad.id, a.id])
        assert bad.asked == asked


async def test_wrong_digests_of_the_ranges_are_noticed(tmp_path: Path) -> None:
    data = noise(9 * RANGE_BYTES)

    async with swarm("memory", tmp_path, 3) as (a, liar, c):
        name = a.store.put(data)

        async def lies(stream: Stream) -> None:
            await stream.recv()
            await stream.send(framing.pack_message({"state": "here"}))
            await stream.send(bytes(9 * 32))

        await liar.transport.serve(endpoints.BLOB, lies)
        await c.fetcher.fetch(name, len(data), [liar.id, a.id])
        assert c.store.get(name) == data
        assert ["digests" in w and liar.id[-8:] in w for w in c.warnings] == [True]


@pytest.mark.parametrize(
    "answer",
    [b"\xc1", b"\x01", {"state": 5}, {"state": "busy", "ask": 7}, {"state": "busy", "ask": ["x", 4]}, {}],
)
async def test_nonsense_from_a_holder_is_survived(tmp_path: Path, answer: Any) -> None:
    async with swarm("memory", tmp_path, 3) as (a, liar, c):
        name = a.store.put(b"data")

        async def lies(stream: Stream) -> None:
            await stream.recv()
            await stream.send(answer if isinstance(answer, bytes) else framing.pack_message(answer))

        await liar.transport.serve(endpoints.BLOB, lies)
        await c.fetcher.fetch(name, 4, [liar.id, a.id])
        with pytest.raises(RemoteError):
            await c.fetcher.fetch("0" * 64, 4, [liar.id])


async def test_nonsense_from_a_fetcher_is_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with swarm("memory", tmp_path, 2) as (a, b):
        name = a.store.put(noise(2 * RANGE_BYTES))
        for first, then in (
            (b"", None),
            (b"\xc1", None),
            (bytes(1025), None),
            (framing.pack_message([1]), None),
            (framing.pack_message({"blob": "../../etc/passwd"}), None),
            (framing.pack_message({"blob": name, "size": -1}), None),
            (framing.pack_message({"blob": name, "size": 1 << 60}), None),
            (framing.pack_message({"blob": name, "size": 2 * RANGE_BYTES}), framing.pack_message({"range": 2})),
            (framing.pack_message({"blob": name, "size": 2 * RANGE_BYTES}), framing.pack_message({"range": -1})),
        ):
            stream = await b.transport.open(a.id, endpoints.BLOB, timeout=DEADLINE)
            await stream.send(first)
            if then is not None:
                assert framing.unpack_message(await stream.recv())["state"] == "here"
                await stream.send(then)
            answers = []
            with contextlib.suppress(Closed):
                while True:
                    answers.append(framing.unpack_message(await stream.recv(timeout=DEADLINE))["state"])
            assert answers in ([], ["absent"])
            await stream.close()
        assert not a.server.open_streams
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []
        with pytest.raises(RemoteError, match="at most"):
            await b.fetcher.fetch(name, blob_hash.MAX_BLOB_BYTES + 1, [a.id])


async def test_a_holder_that_is_gone_is_replaced(tmp_path: Path) -> None:
    data = noise(100 * RANGE_BYTES)

    async with swarm("memory", tmp_path, 3) as (a, dying, c):
        nobody = Identity(b"nobody" + bytes(26)).peer_id
        for holder in (a, dying):
            name = holder.store.put(data)
            holder.server.uplink = Uplink(8 * 200 * RANGE_BYTES)
        fetching = asyncio.create_task(c.fetcher.fetch(name, len(data), [nobody, dying.id, a.id]))
        while dying.asked < 5:
            await asyncio.sleep(0)
        await dying.transport.aclose()
        await fetching
        assert c.store.get(name) == data
        assert a.asked + dying.asked <= 100 + 40
        with pytest.raises(Unreachable):
            await c.fetcher.fetch("0" * 64, 4, [nobody])


async def test_an_interrupted_fetch_goes_on_in_another_process(tmp_path: Path) -> None:
    """Here: another store and fetcher on the same folder; tests/faults kills real processes."""
    data = noise(200 * RANGE_BYTES)

    async with swarm("memory", tmp_path, 2) as (a, b):
        name = a.store.put(data)
        for stop in range(20, 200, 20):
            fetcher = Fetcher(b.transport, BlobStore(b.store.folder), timeout=10.0)
            fetching = asyncio.create_task(fetcher.fetch(name, len(data), [a.id]))
            while a.asked < stop:
                await asyncio.sleep(0)
            await fetcher.aclose()
            await asyncio.gather(fetching, return_exceptions=True)
        store = BlobStore(b.store.folder)
        await Fetcher(b.transport, store, timeout=10.0).fetch(name, len(data), [a.id])
        assert store.get(name) == data
        assert a.asked <= 200 + 9 * (SLACK_RANGES + 1), "what was under way is asked for again"


async def test_a_full_disk_ends_a_fetch_in_one_line(tmp_path: Path) -> None:
    data = noise(20 * RANGE_BYTES)

    async with swarm("memory", tmp_path, 2) as (a, b):
        name = a.store.put(data)
        b.disk.full = True
        with pytest.raises(UsageError, match=r"^directory .*: No space left on device; free space.*$"):
            await b.fetcher.fetch(name, len(data), [a.id])
        assert list((b.store.folder / "parts").iterdir()) == []
        b.disk.full = False
        await b.fetcher.fetch(name, len(data), [a.id])
        assert b.store.get(name) == data


async def test_our_own_damaged_file_is_not_served(tmp_path: Path) -> None:
    data = noise(40 * RANGE_BYTES)

    async with swarm("memory", tmp_path, 3) as (damaged, good, c):
        for holder in (damaged, good):
            name = holder.store.put(data)
        path = damaged.store.folder / name
        raw = bytearray(data)
        raw[5 * RANGE_BYTES] ^= 1
        path.write_bytes(raw)
        await c.fetcher.fetch(name, len(data), [damaged.id, good.id])
        assert c.warnings == [], "an honest peer is not blamed"
        assert [str(path) in w for w in damaged.warnings] == [True]
        assert not damaged.store.has(name)


# --- spreading


async def spread(peers: list[Peer], size: int) -> list[int]:
    """Every peer but the archive (the first) offers a payload, as in a round; bytes that each sent of its own."""
    archive, *others = peers
    payloads = [noise(size, 100 + i) for i in range(len(others))]

    for sender, payload in zip(others, payloads, strict=True):
        sender.store.put(payload)
    names = [blob_hash.name_of(p) for p in payloads]

    async def offer(index: int) -> None:
        sender, name = others[index], names[index]
        await archive.fetcher.fetch(name, size, [sender.id])
        for number, peer in enumerate(others):  # the leader tells everybody at once
            holders = [sender.id, archive.id] if (number + index) % 2 else [archive.id, sender.id]
            waiting.append(asyncio.create_task(peer.fetcher.fetch(name, size, holders)))

    waiting: list[asyncio.Task[None]] = []
    await asyncio.gather(*(offer(index) for index in range(len(others))))
    await asyncio.gather(*waiting)
    for peer in peers:
        assert all(peer.store.get(name) == payload for name, payload in zip(names, payloads, strict=True))
        assert not peer.warnings
    for peer in peers:
        await peer.fetcher.aclose()
    for peer in peers:  # the last servers close their streams
        while peer.server.open_streams:
            await asyncio.sleep(0.01)
    return [sender.gave[name] for sender, name in zip(others, names, strict=True)]


@pytest.mark.virtual
@pytest.mark.parametrize(
    ("count", "size"), [(9, RANGE_BYTES), (9, 5 * RANGE_BYTES), (17, 3 * RANGE_BYTES), (9, 40 * RANGE_BYTES)]
)
async def test_a_home_uplink_sends_its_payload_about_twice(tmp_path: Path, count: int, size: int) -> None:
    async with swarm("memory", tmp_path, count) as peers:
        own = await spread(peers, size)
        assert max(own) <= 2.2 * size, own
        sent = [peer.sent / size for peer in peers]
        assert sum(sent) <= 1.1 * (count - 1) ** 2, "everybody gets everything once"
        assert sent[0] <= 2.2 * (count - 1), "the archive, too, sends each payload about twice"


def test_who_got_a_blob_long_ago_is_not_named() -> None:
    spreading = SpreadTracker(copies=2)
    for peer in "bc":
        assert spreading.admit("blob", 100, peer, False, now=1.0) is None
        spreading.done("blob", 100, peer, 100)
    assert set(spreading.admit("blob", 100, "d", False, now=1.0) or ()) == {"b", "c"}
    assert spreading.admit("blob", 100, "d", False, now=1.0 + 0.9 * SPREAD_SECONDS) is not None
    assert spreading.admit("blob", 100, "d", False, now=1.0 + 2 * SPREAD_SECONDS) is None


def test_who_asks_again_is_not_named_as_a_holder_any_more() -> None:
    spreading = SpreadTracker(copies=2)
    for peer in "bc":
        assert spreading.admit("blob", 100, peer, False, now=1.0) is None
    assert spreading.admit("blob", 100, "b", False, now=1.0) == ["c"], "its first stream is open"
    for peer in "bc":
        spreading.done("blob", 100, peer, 100)
    assert spreading.admit("blob", 100, "b", False, now=2.0) is None
    assert spreading.admit("blob", 100, "d", False, now=2.0) is not None
    spreading.done("blob", 100, "b", 0)
    assert spreading.admit("blob", 100, "d", False, now=2.0) is None, "one copy was sent that may still be there"
    assert set(spreading.admit("blob", 100, "e", False, now=2.0) or ()) == {"c", "d"}


async def test_who_finds_nobody_else_is_served(tmp_path: Path) -> None:
    """Those who got it are gone, or do not have it any more: the holder serves again."""
    async with swarm("memory", tmp_path, 4) as (a, b, c, d):
        name = a.store.put(noise(100))
        for peer in (b, c):
            await peer.fetcher.fetch(name, 100, [a.id])
        await b.transport.aclose()
        c.store.remove(name)
        await d.fetcher.fetch(name, 100, [a.id])
        assert d.store.has(name)
        assert a.asked == 3


@pytest.mark.parametrize("size", [100, 5 * RANGE_BYTES])
async def test_who_asks_in_a_circle_does_not_wait_in_vain(tmp_path: Path, size: int) -> None:
    """Everybody finds everybody else nearer than the sender, and asks there first."""
    async with swarm("memory", tmp_path, 6) as (sender, *others):
        for seed in range(5):
            name = sender.store.put(noise(size, seed))
            before = sender.sent
            async with asyncio.timeout(0.5 * SERVING_TIMEOUTS.wait), asyncio.TaskGroup() as group:
                for number, peer in enumerate(others):
                    nearer = [p.id for p in others[number + 1 :] + others[:number]]
                    group.create_task(peer.fetcher.fetch(name, size, [*nearer, sender.id]))
            assert sender.sent - before <= 3.2 * size + 2000, "one copy more than without the circle"


@pytest.mark.virtual
@pytest.mark.parametrize("is_silent", [False, True])
async def test_who_is_sent_in_a_circle_by_a_liar_does_not_wait_in_vain(tmp_path: Path, is_silent: bool) -> None:
    """It sends one to another that is asking it, too, and then that one back; or it says nothing more."""
    async with swarm("memory", tmp_path, 3) as (liar, first, second):
        for seed in range(8):  # either one comes first in the order of some
            name, waits = blob_hash.name_of(noise(100, seed)), asyncio.Event()
            asked = {first.id: asyncio.Event(), second.id: asyncio.Event()}

            async def lie(stream: Stream, waits=waits, asked=asked) -> None:  # type: ignore[no-untyped-def]
                other = second if stream.remote == first.id else first
                await stream.recv()
                asked[stream.remote].set()
                await (asked[other.id] if other is second else waits).wait()
                if is_silent and other is first:
                    await asyncio.Event().wait()
                await stream.send(framing.pack_message({"state": "busy", "ask": [other.id], "sure": True}))

            def coming(name: str, peer: str, named_by: str, waits=waits) -> Coming | None:  # type: ignore[no-untyped-def]
                waits.set()
                return second.fetcher.coming(name, peer, named_by)

            second.server.coming = coming
            await liar.transport.serve(endpoints.BLOB, lie)
            async with asyncio.timeout(0.9 * SERVING_TIMEOUTS.wait), asyncio.TaskGroup() as group:
                for peer in (first, second):
                    group.create_task(failing(peer.fetcher.fetch(name, 100, [liar.id])))


async def failing(fetching: Awaitable[None]) -> None:
    with pytest.raises(RemoteError):
        await fetching


@pytest.mark.parametrize("name", ["../../outside", "/outside", "", "a" * 63, "A" * 64, "a" * 61 + "/.."])
async def test_what_is_not_a_name_is_not_fetched_and_makes_no_file(tmp_path: Path, name: str) -> None:
    """A stranger names what it wants to give."""
    transport = MemoryNetwork().transport("peer")
    fetcher = Fetcher(transport, BlobStore(tmp_path / "peer" / "blobs"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RemoteError, match="not 64 hexadecimal digits"):
        await fetcher.fetch(name, 10, ["stranger"])
    assert sorted(tmp_path.rglob("*")) == before
    await fetcher.aclose()
    await transport.aclose()


async def test_a_holder_that_says_nothing_does_not_keep_a_small_blob_from_us(tmp_path: Path) -> None:
    """It may have moved, and nothing tells us; another is asked long before the first is given up."""
    network = MemoryNetwork()
    silent, store = network.transport("silent"), BlobStore(tmp_path / "ours")
    holder = Peer(network.transport("holder"), tmp_path / "theirs")
    name = holder.store.put(b"small")
    asked = asyncio.Event()

    async def say_nothing(stream: Stream) -> None:
        await stream.recv()
        asked.set()
        await asyncio.Event().wait()

    await silent.serve(endpoints.BLOB, say_nothing)
    await holder.serve()
    fetcher = Fetcher(network.transport("us"), store, timeout=1e6)
    await fetcher.fetch(name, 5, ["silent", "holder"])
    assert asked.is_set()
    assert store.get(name) == b"small"
    await fetcher.aclose()
    for transport in list(network.peers.values()):
        await transport.aclose()
