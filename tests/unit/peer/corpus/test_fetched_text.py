"""Text fetched ahead of reading: amounts, sources, repeated sends of an operator, and the cache."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer import events
from peer.corpus.fetched import Lookahead, TextStore
from peer.net.blobs import Place
from peer.net.disk import Disk, Piece
from protocol.codec import blob_hash
from protocol.errors import UsageError
from tests.support.text_swarm import STEP, Noise, Reader, TextSwarm, given, write_noise


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Noise:
    """Three chunks."""
    return write_noise(tmp_path_factory.mktemp("noise"), 20_000)


async def train(swarm: TextSwarm, reader: Reader, first: int, slots: int, steps: int) -> None:
    """One round of `slots` slots and `steps` steps; between two of them all that is expected comes."""
    reader.text.expect([range(first, first + slots)])
    await reader.settle()
    for step in range(steps):
        at = range(first + step * STEP, first + (step + 1) * STEP)
        np.testing.assert_array_equal(await reader.text.sequences(at), swarm.slots(at))
        await reader.settle()


# --- how much, and how far ahead


async def test_little_more_is_fetched_than_is_read_and_nobody_waits(noise: Noise, tmp_path: Path) -> None:
    """Two replicas; in every round each reads what it was expected to, more or less."""
    draw = random.Random(3)
    async with TextSwarm(noise, tmp_path) as swarm:
        readers = [await swarm.start() for _ in range(2)]
        slot, after_first = 0, [0, 0]
        for round in range(10):
            for i, reader in enumerate(readers):
                expected = (60, 40)[i]
                await train(swarm, reader, slot, given(expected), round_steps(draw, expected))
                slot += given(expected)
                if not round:
                    after_first[i] = reader.text.waits
        for i, reader in enumerate(readers):
            assert reader.text.fetched_bytes <= 1.2 * reader.text.read_bytes
            assert reader.text.waits == after_first[i]
            assert [type(body) for body in reader.told] == [events.TextFetched]


async def test_who_comes_back_tells_how_long_the_first_new_text_took(noise: Noise, tmp_path: Path) -> None:
    """And not how long it trained with what was on its disk."""
    async with TextSwarm(noise, tmp_path) as swarm:
        reader, size = await swarm.start(), 20 * STEP
        await train(swarm, reader, 0, size, 20)
        await swarm.stop(reader)
        again = await swarm.start(folder=reader.folder)
        await train(swarm, again, 0, size, 20)
        assert not again.told
        assert again.text.fetched_bytes == 0
        began = time.monotonic()
        again.text.expect([range(10 * size, 11 * size)])
        await again.settle()
        (told,) = again.told
        assert isinstance(told, events.TextFetched)
        assert told.seconds <= time.monotonic() - began + 0.001, "it is rounded"


def round_steps(draw: random.Random, expected: int) -> int:
    """Steps that are done in a round: within a tenth of what was expected."""
    return round(expected * draw.uniform(0.92, 1.08))


def test_what_is_fetched_ahead_follows_what_was_read() -> None:
    ahead = Lookahead(least=16)
    assert ahead.target(1000, 0) == 250, "nothing is known: a quarter"
    assert ahead.target(1000, 300) == 324
    ahead.end(800)
    assert ahead.target(1000, 0) == 800
    assert ahead.target(1000, 790) == 854
    assert ahead.target(1000, 960) == 1000
    for _ in range(3):
        ahead.end(400)
    assert ahead.target(1000, 0) == 550, "a tenth above the mean"
    ahead.end(0)
    assert ahead.target(500, 0) == 500, "a round that was not trained says nothing"


async def test_with_overlap_the_next_round_is_fetched_while_this_one_is_read(noise: Noise, tmp_path: Path) -> None:
    async with TextSwarm(noise, tmp_path) as swarm:
        reader, size = await swarm.start(), 50 * STEP
        for round in range(3):
            now, after = (range(n * size, (n + 1) * size) for n in (round, round + 1))
            reader.text.expect([now, after])
            await reader.settle()
            before = reader.text.waits
            for step in range(40):
                at = range(now.start + step * STEP, now.start + (step + 1) * STEP)
                np.testing.assert_array_equal(await reader.text.sequences(at), swarm.slots(at))
                await reader.settle()
            assert reader.text.waits == before or not round
        reader.text.expect([range(3 * size, 4 * size)])
        assert not reader.text.is_fetching, "it was known a round ago"


async def test_an_epoch_begins_in_the_middle_of_a_round(noise: Noise, tmp_path: Path) -> None:
    async with TextSwarm(noise, tmp_path) as swarm:
        reader, end = await swarm.start(), noise.index.sequences
        await train(swarm, reader, end - 10 * STEP, 40 * STEP, 25)
        np.testing.assert_array_equal(await reader.text.held_out(5), await reader.text.held_out(5))
        assert (await reader.text.held_out(100)).shape == (8, noise.index.sequence + 1)
        assert (await reader.text.sequences(range(5, 5))).shape == (0, noise.index.sequence + 1)


# --- how often an operator sends it


@pytest.mark.parametrize("nodes", [1, 3])
async def test_a_node_sends_a_range_about_twice_however_many_peers_read_it(
    noise: Noise, tmp_path: Path, nodes: int
) -> None:
    """A chain of four and one of three, each of whose members reads the same, round after round."""
    async with TextSwarm(noise, tmp_path, nodes=nodes) as swarm:
        chains = [[await swarm.start() for _ in range(size)] for size in (4, 3)]
        slot = 0
        for _ in range(2):
            for chain in chains:
                await asyncio.gather(*(train(swarm, member, slot, given(40), 40) for member in chain))
                slot += given(40)
        copies = swarm.copies()
        assert sum(copies) / len(copies) <= 2.2
        for member in (member for chain in chains for member in chain):
            assert member.text.fetched_bytes <= 1.2 * member.text.read_bytes
            assert not member.warnings


async def test_peers_that_are_gone_or_have_it_no_more_are_passed_over(noise: Noise, tmp_path: Path) -> None:
    async with TextSwarm(noise, tmp_path) as swarm:
        first, second = await swarm.start(), await swarm.start()
        for reader in (first, second):
            await train(swarm, reader, 0, 200 * STEP, 30)
        await swarm.stop(first)
        shutil.rmtree(second.folder)
        third = await swarm.start()
        await train(swarm, third, 0, 200 * STEP, 30)
        assert not third.warnings


# --- the cache


@pytest.mark.parametrize(("limit", "rounds"), [(3 << 20, 6), (40_000, 1)], ids=["some rounds", "less than a step"])
async def test_the_cache_keeps_its_bound(noise: Noise, tmp_path: Path, limit: int, rounds: int) -> None:
    async with TextSwarm(noise, tmp_path) as swarm:
        reader = await swarm.start(limit)
        for round in range(rounds):
            await train(swarm, reader, round * given(60), given(60), 60)
            assert on_disk(reader.folder) <= limit
        assert reader.text.fetched_bytes <= 1.3 * reader.text.read_bytes
        assert on_disk(reader.folder) > limit // 2 or limit < 2 * blob_hash.RANGE_BYTES, "it is used, too"


def on_disk(folder: Path) -> int:
    """Bytes of ranges, and of their digests."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "index")


@pytest.mark.parametrize("harm", ["a range", "the digests", "every file", "the folder", "a folder in place of a range"])
@pytest.mark.parametrize("restarts", [False, True])
async def test_a_cache_that_is_harmed_is_fetched_anew(noise: Noise, tmp_path: Path, harm: str, restarts: bool) -> None:
    async with TextSwarm(noise, tmp_path) as swarm:
        reader = await swarm.start()
        await train(swarm, reader, 0, given(40), 20)
        files = [p for p in reader.folder.iterdir() if p.is_file() and p.name != "index"]
        match harm:
            case "a range":
                flip(next(p for p in files if blob_hash.is_name(p.name)))
            case "the digests":
                flip(next(p for p in files if p.name.endswith(".leaves")))
            case "every file":
                for path in files:
                    path.write_bytes(b"")
            case "the folder":
                shutil.rmtree(reader.folder)
            case _:
                path = next(p for p in files if blob_hash.is_name(p.name))
                path.unlink()
                path.mkdir()
        if restarts:
            reader = await swarm.start(folder=reader.folder)
        for step in range(40):
            at = range(step * STEP, (step + 1) * STEP)
            np.testing.assert_array_equal(await reader.text.sequences(at), swarm.slots(at))


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


class FullDisk(Disk):
    """May be full."""

    full = False

    def write(self, path: Path, *pieces: Piece, **options: Any) -> None:
        if self.full:
            raise UsageError(f"directory {path.parent}: No space left on device; free space or choose another folder")
        super().write(path, *pieces, **options)


async def test_a_full_disk_is_told_once_and_survived(noise: Noise, tmp_path: Path) -> None:
    disk = FullDisk()
    async with TextSwarm(noise, tmp_path) as swarm:
        reader = await swarm.start(disk=disk)
        await train(swarm, reader, 0, given(40), 10)
        disk.full = True
        await train(swarm, reader, given(40), given(40), 40)
        assert len(reader.warnings) == 1
        assert "No space left on device; text is kept in memory" in reader.warnings[0]


def test_the_chunk_that_was_read_longest_ago_goes_first(tmp_path: Path) -> None:
    data = {i: random.Random(i).randbytes(3 * blob_hash.RANGE_BYTES) for i in range(3)}
    leaves = {i: blob_hash.leaves_of([data[i]])[1] for i in data}
    names = {i: blob_hash.name_of(data[i]) for i in data}
    store = TextStore(tmp_path, 7 * blob_hash.RANGE_BYTES, Disk(), pytest.fail)

    def place(number: int, index: int = -1) -> Place:
        return Place(names[number], len(data[number]), index)

    def put(number: int) -> None:
        store.put(leaves[number], name=f"{names[number]}.leaves")
        for index in range(3):
            begin, end = blob_hash.span(len(data[number]), index)
            store.put(data[number][begin:end])

    put(0)
    put(1)
    store.touch(place(0))
    assert store.read(place(0, 2)) == data[0][2 * blob_hash.RANGE_BYTES :]
    store.need([place(1, 1)])
    put(2)
    assert [store.holds(place(1, i)) for i in range(3)] == [False, True, False], "what is needed stays"
    assert sum(store.holds(place(0, i)) for i in range(3)) == 2
    assert all(store.holds(place(2, i)) for i in range(3))
    assert store.used <= 7 * blob_hash.RANGE_BYTES
    again = TextStore(tmp_path, 3 * blob_hash.RANGE_BYTES, Disk(), pytest.fail)
    assert again.used <= 3 * blob_hash.RANGE_BYTES, "a smaller limit holds at once"
    stranger = Place(names[2], 3 * blob_hash.RANGE_BYTES - 1, -1)
    assert again.read(stranger) == b"", "somebody's wrong size is no reason to forget"
    assert again.holds(place(2)) == store.holds(place(2))
