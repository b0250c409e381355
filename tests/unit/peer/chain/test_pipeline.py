"""The pipeline's schedule and what it does with neighbours that die, fall silent or lie."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import struct
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from peer.chain import frames
from peer.chain.grad_norm import StepReport
from peer.chain.neighbours import Statistics
from peer.chain.pipeline import NeighbourLost
from peer.training.trainer import StageTrainer
from protocol.errors import LocalError, UsageError
from protocol.planning.pipeline_model import Depths, LinkCost, StageCost
from protocol.run import layout
from protocol.run.layout import ModelSpec
from tests.support.chains import (
    DEADLINE_S,
    SPEC,
    TRAIN,
    Wired,
    ids_of,
    make_chain,
    random_theta,
    run_chain,
    split_shards,
    steps_of,
    worker,
)

THREE = Depths(plain=3, held=3, most=3)


def test_bytes_per_token() -> None:
    spec = ModelSpec(vocab_size=97, d_model=32, n_layers=2, n_heads=2, d_ff=32, context=128, residual_width=16)
    train = dataclasses.replace(TRAIN, sequence=128, rows=2, micro_batches=2)
    theta = random_theta(spec)
    chain = [StageTrainer(spec, train, shards) for shards in split_shards((2,), spec)]
    for trainer in chain:
        trainer.begin_round(theta)
    first, last = asyncio.run(run_chain(chain, wires=("bf16", "bf16")))
    assert first[0].tokens == 2 * 2 * 128
    assert 1 < first[0].forward_bytes / first[0].tokens / (2 * 16) < 1.02
    assert 1 < last[0].backward_bytes / last[0].tokens / (2 * 16) < 1.02
    assert first[0].backward_bytes == last[0].forward_bytes == 0
    assert first[0].seconds >= first[0].busy_s > 0


@pytest.mark.parametrize(
    ("depth", "depths", "most"),
    [(3, THREE, 3), (6, Depths(plain=2, held=6, most=8), 2), (6, Depths(plain=2, held=5, most=8), 6)],
    ids=["as many as the first lets in", "the others wait", "no room to wait"],
)
def test_no_stage_has_more_between_forward_and_backward_than_it_has_room_for(
    depth: int, depths: Depths, most: int
) -> None:
    class Counting(StageTrainer):
        most = under_way = 0

        def forward(self, *args: Any, **options: Any) -> Any:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            return super().forward(*args, **options)

        def backward(self, *args: Any) -> Any:
            self.under_way -= 1
            return super().backward(*args)

    names = layout.shard_names(SPEC)
    train = dataclasses.replace(TRAIN, micro_batches=8)
    chain = [Counting(SPEC, train, shards) for shards in (names[:2], names[2:4], names[4:])]
    for trainer in chain:
        trainer.begin_round(random_theta())

    def has_no_room(stages: Sequence[StageCost], links: Sequence[LinkCost], micro_batches: int, depth: int) -> bool:
        return depth > stages[0].depths.held  # and not: who was quicker so by what was measured here

    setup: dict[str, Any] = {"pick_depth": lambda *measured: depth, "computes_twice": has_no_room}
    asyncio.run(run_chain(chain, depth=depth, depths=depths, steps=2, **setup))
    assert [trainer.most <= most for trainer in chain] == [True, True, True]
    assert chain[0].most > 1, "there is overlap"
    assert chain[2].most == 1


@pytest.mark.parametrize("who", [0, 1, 2])
def test_any_stage_can_stop_all_after_the_same_step(who: int) -> None:
    stop = asyncio.Event()
    stop.set()
    reports = asyncio.run(run_chain(make_chain((2, 4), 8), steps=9, stops={who: stop}))
    assert [[r.step for r in stage] for stage in reports] == [[1]] * 3
    (alone,) = asyncio.run(run_chain(make_chain((), 0), steps=9, stops={0: stop}))
    assert len(alone) == 1


def _outcomes(cuts: tuple[int, ...], disturb: Callable[[Wired, list[asyncio.Task[Any]]], Awaitable[None]]) -> list[Any]:
    """Starts an endless chain, disturbs it after the first step of P0, and returns what each stage ended with."""

    async def main() -> list[Any]:
        chain = make_chain(cuts, 8)
        begun = asyncio.Event()

        def on_step(report: StepReport) -> None:
            begun.set()

        async with asyncio.timeout(DEADLINE_S), Wired(len(chain)) as wired:
            tasks = [
                asyncio.create_task(
                    steps_of(
                        trainer,
                        worker(i),
                        first_step=1,
                        steps=10**9,
                        wires=("bf16", "bf16"),
                        previous=wired.previous[i],
                        following=wired.following[i],
                        on_step=None if i else on_step,
                    )
                )
                for i, trainer in enumerate(chain)
            ]
            await begun.wait()
            await disturb(wired, tasks)
            return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(main())


@pytest.mark.parametrize(("victim", "kill"), [(0, True), (1, False), (2, True), (3, False)])
def test_a_killed_or_cancelled_member_is_named_by_all_others(victim: int, kill: bool) -> None:
    async def end(wired: Wired, tasks: list[asyncio.Task[Any]]) -> None:
        await wired.peers[victim].aclose() if kill else tasks[victim].cancel()

    outcomes = _outcomes((2, 3, 4), end)
    assert isinstance(outcomes.pop(victim), NeighbourLost if kill else asyncio.CancelledError)
    assert [(type(error), error.peer) for error in outcomes] == [(NeighbourLost, f"P{victim}")] * 3


def test_a_failing_member_tells_its_neighbours_and_can_start_again() -> None:
    chain = make_chain((3,), 0)

    async def broken(step: int) -> np.ndarray:
        return ids_of(step) if step == 1 else np.zeros((2, 2), np.int64)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run_chain(chain, steps=3, read=broken))
    ours, theirs = sorted(caught.value.exceptions, key=lambda error: isinstance(error, NeighbourLost))
    assert isinstance(ours, LocalError)
    assert "token windows" in str(ours)
    if isinstance(theirs, NeighbourLost):
        assert theirs.peer == "P0"
    assert [trainer.steps for trainer in chain] == [1, 1]
    asyncio.run(run_chain(chain, steps=1, first_step=2))
    steady = make_chain((3,), 0)
    asyncio.run(run_chain(steady, steps=2))
    np.testing.assert_array_equal(chain[1].delta("head")[1], steady[1].delta("head")[1])


def _frame(kind: int = frames.FORWARD, **changes: Any) -> bytes:
    """Header of a frame that P0 may send, but for the changes."""
    ids = ids_of(1).reshape(TRAIN.micro_batches, -1)[changes.get("micro", 0)]
    head = frames.Head(kind, 1, 2, 1, 0, TRAIN.rows, TRAIN.sequence, 8, zlib.crc32(ids.astype("<i8").tobytes()))
    return head._replace(**changes).pack()


def _body(z: float = 0.5) -> bytes:
    return np.full((TRAIN.rows, TRAIN.sequence, 8), z, "<f4").tobytes()


def _hears(
    stage: int,
    sent: list[bytes],
    timeout: float = DEADLINE_S,
    after: int = 0,
    statistics: Statistics | None = None,
) -> NeighbourLost:
    """What the first or the last of two stages makes of the frames that the other sends after `after` of its own."""

    async def main() -> NeighbourLost:
        async with asyncio.timeout(DEADLINE_S), Wired(2) as wired, asyncio.TaskGroup() as group:
            other = wired.following[0] if stage else wired.previous[1]

            async def talk() -> None:
                heard = 0
                while heard < after:
                    heard += frames.parse("us", memoryview(await other.recv()))[0].kind != frames.BEAT
                for frame in sent:
                    await other.send(frame)

            group.create_task(talk())
            with pytest.raises(NeighbourLost) as caught:
                await steps_of(
                    make_chain((3,), 8)[stage],
                    worker(stage),
                    timeout=timeout,
                    previous=wired.previous[1] if stage else None,
                    following=None if stage else wired.following[0],
                    statistics=statistics or Statistics(),
                )
        return caught.value

    return asyncio.run(main())


GOOD = [_frame(micro=i) + _body() for i in range(TRAIN.micro_batches)]


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ([b""], "a frame of 0 bytes"),
        ([_frame()[:-1]], f"a frame of {frames.HEAD_BYTES - 1} bytes"),
        ([_frame(step=2) + _body()], "step=2"),
        ([_frame(micro=1) + _body()], "micro=1"),
        ([_frame(width=7) + _body()], "width=7"),
        ([_frame(code=0) + _body()], "code=0"),
        ([_frame(check=1) + _body()], "other text"),
        ([_frame(depth=0) + _body()], "0 micro-batches under way"),
        ([_frame(stamp=math.nan) + _body()], "impossible time"),
        ([_frame(kind=77) + _body()], "kind=77"),
        ([_frame() + _body()[:-1]], "not Head"),
        ([_frame() + _body() + bytes(1 << 16)], "at most"),
        ([_frame() + _body(z=math.nan)], "bad activations: values are not finite"),
        ([_frame() + _body(z=2.0**20 + 1)], "bad activations: a value has magnitude 1.05e+06, at most 1048576"),
        ([*GOOD, frames.Head(frames.TOTAL, step=1).pack() + struct.pack(">Bdd", 0, -1, 1)], "impossible total"),
        ([*GOOD, frames.Head(frames.TOTAL, step=1).pack() + struct.pack(">Bdd", 0, 1, math.inf)], "impossible total"),
        ([*GOOD, frames.Head(frames.TOTAL, step=2).pack() + struct.pack(">Bdd", 0, 1, 1)], "step=2"),
        ([frames.Head(frames.ABORT).pack()], "left the chain"),
        ([frames.Head(frames.ABORT).pack() + b"\x1b[2J\xff"], "left the chain"),
    ],
)
def test_malformed_data_blames_the_sender(sent: list[bytes], reason: str) -> None:
    error = _hears(1, sent)
    assert error.peer == "P0"
    assert reason in error.reason
    assert "\x1b" not in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("bad", "refused"),
    [
        (_frame(micro=1) + _body(z=1e7), 1),
        (_frame(micro=1, check=1) + _body(), 1),
        (_frame(micro=2), 1),
        (frames.Head(frames.ABORT).pack(), 0),
    ],
)
def test_a_refused_frame_is_counted_beside_those_before_it(bad: bytes, refused: int) -> None:
    statistics = Statistics()
    assert _hears(1, [GOOD[0], bad], statistics=statistics).peer == "P0"
    running = statistics.of("P0", frames.FORWARD, 8)
    assert (running.frames, running.refused, running.rms, running.largest) == (1, refused, 0.5, 0.5)


def _norms(*sums: float, wish: int = 0, loss: float = 1.0, measured: bytes = b"", width: int = 3) -> bytes:
    head = frames.Head(frames.NORM, step=1, width=width).pack()
    return head + struct.pack(f">Bd{len(sums)}d", wish, loss, *sums) + (measured or _measured())


def _measured(forward: float = 1.0, plain: int = 1) -> bytes:
    return struct.pack(">6d3I", forward, 1, 1, 1, 1, 1, plain, 2, 3)


BACK = [_frame(frames.BACKWARD, micro=i) + _body() for i in range(TRAIN.micro_batches)]


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ([_frame(frames.BACKWARD) + _body(math.inf)], "bad gradients: values are not finite"),
        ([_frame(frames.BACKWARD) + _body(-1e9)], "bad gradients: a value has magnitude 1e+09"),
        ([_frame() + _body()], "not Head(kind=2"),
        ([*BACK, _norms(1, -1, 1)], "impossible gradient norms"),
        ([*BACK, _norms(1, 1, 1, loss=math.nan)], "impossible gradient norms"),
        ([*BACK, _norms(1, 1, 1, wish=2)], "impossible gradient norms"),
        ([*BACK, _norms(1, 1, width=2)], "width=2"),
        ([*BACK, _norms(1, 1)], "sent norms of"),
        ([*BACK, _norms(1, 1, 1)[:-1]], "sent norms of"),
        ([*BACK, _norms(1, 1, 1, measured=_measured(math.nan))], "impossible measurements"),
        ([*BACK, _norms(1, 1, 1, measured=_measured() + _measured(plain=0))], "impossible measurements"),
        ([*BACK, _norms(1, 1, 1, measured=_measured() + _measured(plain=3))], "impossible measurements"),
    ],
)
def test_malformed_answers_blame_the_sender(sent: list[bytes], reason: str) -> None:
    error = _hears(0, sent, after=1 + TRAIN.micro_batches)  # a ping and all activations
    assert error.peer == "P1"
    assert reason in error.reason


def test_gradients_before_activations_blame_the_sender() -> None:
    error = _hears(0, BACK)
    assert error.peer == "P1"
    assert "before it got activations" in error.reason


def test_a_silent_neighbour_is_named_at_the_deadline() -> None:
    error = _hears(1, [], timeout=0.05)
    assert error.peer == "P0"
    assert "0.05 s" in error.reason


def test_wrong_use_is_refused() -> None:
    whole = make_chain((), 0)[0]

    async def run(trainer: StageTrainer, **changes: Any) -> None:
        await steps_of(trainer, worker(0), timeout=1.0, **changes)

    with pytest.raises(LocalError, match="at least one micro-batch"):
        asyncio.run(run(whole, depth=0))
    with pytest.raises(LocalError, match="neighbours"):
        asyncio.run(run(make_chain((3,), 0)[1]))

    async def too_large() -> None:
        train = dataclasses.replace(TRAIN, rows=20_000)
        async with Wired(2) as wired:
            await run(make_chain((3,), 0, train)[1], previous=wired.previous[1])

    with pytest.raises(UsageError, match="fewer rows"):
        asyncio.run(too_large())


def test_the_depth_follows_what_the_stages_measured() -> None:
    asked: list[Any] = []

    def pick_depth(*measured: Any) -> int:
        asked.append(measured)
        return 2

    chain = make_chain((1, 4), 8)
    reports = asyncio.run(run_chain(chain, steps=2, depth=3, depths=THREE, pick_depth=pick_depth))
    assert [report.depth for report in reports[0]] == [3, 2]
    assert [report.depth for report in reports[2]] == [3, 2]
    assert [[len(report.stage_seconds_per_microbatch) for report in stage] for stage in reports] == [
        [3, 3],
        [0, 0],
        [0, 0],
    ]
    assert all(
        seconds_per_microbatch > 0
        for report in reports[0]
        for seconds_per_microbatch in report.stage_seconds_per_microbatch
    )
    for stages, links, micro_batches in asked:
        assert (len(stages), len(links), micro_batches) == (3, 2, TRAIN.micro_batches)
        assert all(stage.forward > 0 for stage in stages)
        assert [stage.backward > 0 for stage in stages] == [True, True, False], "the last does both at once"
        assert [stage.depths for stage in stages] == [THREE] * 3
        assert all(0 <= between.latency < 1 and between.forward < 1 for between in links)
