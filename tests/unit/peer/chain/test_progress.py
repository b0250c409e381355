"""A chain is repaired within its round: for each fault the others' steps are kept and the bits are known."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from peer.chain.frames import BACKWARD, DONE, FORWARD, NORM, RESUME, TOTAL, Head, NeighbourLost
from peer.chain.grad_norm import StageProgress, Total
from peer.chain.link import Liveness
from peer.net.base import Traffic
from peer.net.stream import Flow, FrameStream
from peer.training.trainer import StageTrainer
from tests.support.chains import DEADLINE_S, TRAIN, Recording, Wired, make_chain, read_of, run_chain, steps_of, worker

pytestmark = pytest.mark.slow

CUTS, K, STEPS, HIT = (2, 3, 4), 8, 3, 2
"""A chain of four in a round of three steps, hit in the second."""
LAST = len(CUTS)
IMPATIENT = Liveness(beat_s=0.05, silent_s=0.5)


class Fate:
    """What befalls the victim: as soon as it sends (or gets) the frame, nothing goes out of it or into it any more."""

    def __init__(self, moment: str, position: int) -> None:
        step, micro = HIT, 1
        match moment, position:
            case "forward", _:
                self.kind, self.sends = FORWARD, position < LAST
            case "backward", _:
                self.kind, self.sends = BACKWARD, position == LAST
            case "norm", _:
                self.kind, self.sends, micro = NORM, position > 0, 0
            case "total", _:
                self.kind, self.sends, micro = TOTAL, position == 0, 0
            case _:
                self.kind, self.sends, step, micro = DONE, position == LAST, 0, 0
        self.at = (step, micro)
        self.struck = asyncio.Event()

    async def meets(self, frame: bytes | memoryview, sends: bool) -> None:
        head = Head.unpack(frame)
        if (head.kind, (head.step, head.micro), sends) == (self.kind, self.at, self.sends):
            self.struck.set()
        await self.blocks()

    async def blocks(self) -> None:
        if self.struck.is_set():
            await asyncio.Event().wait()


class Hit:
    """One end of a stream of a peer with a fate."""

    def __init__(self, stream: Any, fate: Fate) -> None:
        self.stream, self.fate = stream, fate

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    async def send(self, head: bytes, *body: Any, **options: Any) -> None:
        await self.fate.meets(head, True)
        await self.stream.send(head, *body, **options)

    async def recv(self, *arguments: Any, **options: Any) -> bytes:
        frame: bytes = await self.stream.recv(*arguments, **options)
        await self.fate.meets(frame, False)
        return frame


def _stage(trainer: StageTrainer, i: int, wired: Wired, progress: StageProgress, **changes: Any) -> asyncio.Task[Any]:
    options = {"previous": wired.previous[i], "following": wired.following[i], "read": read_of(), **changes}
    work = steps_of(trainer, worker(i), steps=STEPS, depth=2, progress=progress, liveness=IMPATIENT, **options)
    return asyncio.create_task(work)


async def _break(chain: list[Recording], victim: int, moment: str, kill: bool) -> tuple[list[StageProgress], list[Any]]:
    """The round until the fault: where each stage stands, and what the survivors say."""
    standings = [StageProgress() for _ in chain]
    fate = Fate(moment, victim)
    async with asyncio.timeout(DEADLINE_S), Wired(len(chain)) as wired:
        for ends in (wired.previous, wired.following):
            ends[victim] = Hit(ends[victim], fate) if ends[victim] is not None else None
        tasks = [_stage(t, i, wired, s) for i, (t, s) in enumerate(zip(chain, standings, strict=True))]
        await fate.struck.wait()
        if kill:
            await wired.peers[victim].aclose()
        survivors = [task for i, task in enumerate(tasks) if i != victim]
        said = await asyncio.gather(*survivors, return_exceptions=True)
        tasks[victim].cancel()
        await asyncio.gather(tasks[victim], return_exceptions=True)
    return standings, said


async def _repaired(chain: list[Recording], standings: list[StageProgress]) -> list[Any]:
    async with asyncio.timeout(DEADLINE_S), Wired(len(chain)) as wired:
        pairs = enumerate(zip(chain, standings, strict=True))
        return await asyncio.gather(*(_stage(t, i, wired, s, resume=True) for i, (t, s) in pairs))


def _fresh(position: int) -> Recording:
    return make_chain(CUTS, K)[position]


MOMENTS = ("forward", "backward", "norm", "total", "done")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", range(LAST + 1))
def test_the_chain_goes_on_from_its_last_complete_step(victim: int, moment: str) -> None:
    """Every other one is killed, the others fall silent: each at some moment, and at each moment some."""
    chain, kill = make_chain(CUTS, K), (victim + MOMENTS.index(moment)) % 2 == 0
    standings, said = asyncio.run(_break(chain, victim, moment, kill))
    stay = said[:victim] if moment == "done" else said  # those behind have said that they are done, and left
    assert [error.peer for error in stay if isinstance(error, NeighbourLost)] == [f"P{victim}"] * len(stay)
    assert not any(isinstance(error, Exception) for error in said[len(stay) :])
    chain[victim], standings[victim] = _fresh(victim), StageProgress()
    asyncio.run(_repaired(chain, standings))

    complete = {"total": HIT if victim else HIT - 1, "done": STEPS}.get(moment, HIT - 1)
    plain = make_chain(CUTS, K)
    asyncio.run(run_chain(plain, steps=complete))
    plain[victim] = _fresh(victim)
    if complete < STEPS:
        asyncio.run(run_chain(plain, first_step=complete + 1, steps=STEPS - complete))
    for ours, theirs, progress in zip(chain, plain, standings, strict=True):
        assert progress.total.steps == STEPS == progress.skipped + ours.steps
        for shard in ours.shards:
            for a, b in zip(ours.delta(shard), theirs.delta(shard), strict=True):
                np.testing.assert_array_equal(a, b)


async def test_two_faults_in_one_round() -> None:
    """The first stage dies before the repaired chain has agreed where to go on."""
    chain = make_chain(CUTS, K)
    standings, _ = await _break(chain, 2, "total", True)
    chain[2], standings[2] = _fresh(2), StageProgress()
    async with asyncio.timeout(DEADLINE_S), Wired(len(chain)) as wired:
        tasks = [_stage(t, i, wired, standings[i], resume=True) for i, t in enumerate(chain) if i]
        await wired.peers[0].aclose()
        said = await asyncio.gather(*tasks, return_exceptions=True)
        assert {error.peer for error in said} == {"P0"}
    chain[0], standings[0] = _fresh(0), StageProgress()
    await _repaired(chain, standings)
    assert [progress.total.steps for progress in standings] == [STEPS] * 4
    left = STEPS - HIT
    assert [trainer.steps for trainer in chain] in ([left, STEPS] * 2, [left + 1, STEPS] * 2)


def test_a_stage_that_was_only_away_finds_its_place_again() -> None:
    chain = make_chain(CUTS, K)
    standings, _ = asyncio.run(_break(chain, 1, "total", False))
    asyncio.run(_repaired(chain, standings))
    plain = make_chain(CUTS, K)
    asyncio.run(run_chain(plain, steps=STEPS))
    for ours, theirs in zip(chain, plain, strict=True):
        for shard in ours.shards:
            for a, b in zip(ours.delta(shard), theirs.delta(shard), strict=True):
                np.testing.assert_array_equal(a, b)


def test_nobody_goes_on_behind_what_is_done() -> None:
    chain = make_chain((3,), K)
    standings = [StageProgress(), StageProgress(total=Total(steps=2), skipped=2)]

    async def lie() -> Any:
        async with asyncio.timeout(DEADLINE_S), Wired(2) as wired:
            task = _stage(chain[1], 1, wired, standings[1], resume=True)
            await wired.following[0].recv()
            await wired.following[0].send(Head(RESUME).pack(), bytes(21))
            return (await asyncio.gather(task, return_exceptions=True))[0]

    error = asyncio.run(lie())
    assert isinstance(error, NeighbourLost)
    assert "goes on after 0 steps, 2 are done" in error.reason


# --- signs of life


def test_a_frame_that_takes_long_is_no_silence() -> None:
    """The bytes of an unfinished frame count: here one frame takes four times as long as a neighbour may be silent."""
    train = dataclasses.replace(TRAIN, rows=8)

    class Wire:
        """Feeds what is written to the other side; of a frame of over `large` bytes, a twentieth at a time."""

        def __init__(self, there: asyncio.StreamReader, large: float) -> None:
            self.there, self.large, self.held = there, large, b""

        def write(self, data: bytes) -> None:
            self.held += data

        async def drain(self) -> None:
            data, self.held = self.held, b""
            if len(data) > self.large:
                self.large, piece = math.inf, -(-len(data) // 20)
                for at in range(0, len(data), piece):
                    self.there.feed_data(data[at : at + piece])
                    await asyncio.sleep(4 * IMPATIENT.silent_s / 20)
            else:
                self.there.feed_data(data)

        def close(self) -> None:
            if not self.there.at_eof():
                self.there.feed_eof()

        async def wait_closed(self) -> None:
            return

    def end(remote: str, here: asyncio.StreamReader, wire: Wire) -> FrameStream:
        return FrameStream(remote, "pipe", here, wire, wire.close, Traffic(), Flow())

    async def main() -> list[Any]:
        chain = make_chain((3,), K, train)
        at_first, at_last = asyncio.StreamReader(), asyncio.StreamReader()
        wired = Wired(2)
        wired.previous = [None, end("P0", at_last, Wire(at_first, math.inf))]
        wired.following = [end("P1", at_first, Wire(at_last, 1000)), None]
        async with asyncio.timeout(DEADLINE_S):
            pairs = enumerate(chain)
            return await asyncio.gather(
                *(_stage(t, i, wired, StageProgress(), read=read_of(train=train)) for i, t in pairs)
            )

    first, _ = asyncio.run(main())
    assert len(first) == STEPS
    assert max(report.seconds for report in first) > 4 * IMPATIENT.silent_s
