"""The worker's turns: it never waits for the event loop, and decides at the last moment."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from peer.chain.scheduler import BackwardFirstScheduler

URGENT, USUAL = 2, 1
DEADLINE_S = 30.0


class Bench:
    """BackwardFirstScheduler whose jobs wait until they are let go."""

    def __init__(self, worker: ThreadPoolExecutor) -> None:
        self.worker = worker
        self.ended: list[tuple[int, str]] = []
        self.waits: list[int] = []
        self.began: queue.Queue[str] = queue.Queue()
        self.stirred = asyncio.Event()
        self.turns = BackwardFirstScheduler[str](
            worker,
            (URGENT, USUAL),
            lambda kind, name: self.ended.append((kind, name)),
            self.stirred.set,
            lambda kind, start, end: self.waits.append(kind),
        )

    def put(self, kind: int, name: str) -> Callable[[], None]:
        """Returns what lets the job end."""
        go = threading.Event()

        def job() -> str:
            self.began.put(name)
            assert go.wait(DEADLINE_S)
            return name

        self.turns.put(kind, job)
        return go.set

    def next(self) -> str:
        """The job that begins next, as the worker's thread says."""
        return self.began.get(timeout=DEADLINE_S)

    async def until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self.stirred.clear()
            await self.stirred.wait()


def _run(
    scene: Callable[[Bench], Coroutine[Any, Any, None]],
    loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.SelectorEventLoop,
) -> None:
    async def main() -> None:
        with ThreadPoolExecutor(1) as worker:
            async with asyncio.timeout(DEADLINE_S):
                await scene(Bench(worker))

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def test_the_urgent_goes_first_even_if_it_was_prepared_last() -> None:
    async def scene(bench: Bench) -> None:
        go = [bench.put(USUAL, "a")]
        assert bench.next() == "a"
        go += [bench.put(USUAL, "b"), bench.put(URGENT, "c")]
        assert bench.turns.has(USUAL)
        assert bench.turns.has(URGENT)
        for each in go:
            each()
        await bench.until(lambda: bench.turns.idle)
        assert bench.ended == [(USUAL, "a"), (URGENT, "c"), (USUAL, "b")]

    _run(scene)


def test_the_worker_does_not_need_the_loop_to_go_on() -> None:
    async def scene(bench: Bench) -> None:
        first, second = bench.put(USUAL, "a"), bench.put(URGENT, "b")
        first()
        assert [bench.next(), bench.next()] == ["a", "b"]  # the event loop stands still meanwhile
        assert bench.ended == []
        second()
        await bench.until(lambda: bench.turns.idle)
        assert bench.ended == [(USUAL, "a"), (URGENT, "b")]
        assert bench.waits == [USUAL], "it waited once, for the first"

    _run(scene)


def test_who_hears_of_an_end_finds_the_next_place_free() -> None:
    free = list[bool]()

    class TellingLoop(asyncio.SelectorEventLoop):
        """Looks whether there is a place when the worker tells that a job has ended."""

        turns: BackwardFirstScheduler[str] | None = None

        def call_soon_threadsafe(self, *what: Any, **options: Any) -> asyncio.Handle:
            if self.turns is not None:
                free.append(not self.turns.has(USUAL))
            return super().call_soon_threadsafe(*what, **options)

    async def scene(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, TellingLoop)
        first = bench.put(USUAL, "a")
        assert bench.next() == "a"
        second = bench.put(USUAL, "b")
        assert bench.turns.has(USUAL)
        loop.turns = bench.turns
        first()
        await bench.until(lambda: bench.ended != [])
        loop.turns = None
        assert free == [True]
        second()
        await bench.until(lambda: bench.turns.idle)

    _run(scene, TellingLoop)


def test_a_rested_worker_begins_again() -> None:
    async def scene(bench: Bench) -> None:
        for name in ("a", "b", "c"):
            bench.put(USUAL, name)()
            await bench.until(lambda: bench.turns.idle)
        assert [name for _, name in bench.ended] == ["a", "b", "c"]
        assert bench.waits == [USUAL] * 3

    _run(scene)


def test_what_a_job_raises_is_raised_by_check() -> None:
    async def scene(bench: Bench) -> None:
        def job() -> str:
            raise ValueError("no memory")

        bench.turns.check()
        bench.turns.put(USUAL, job)
        await bench.stirred.wait()
        with pytest.raises(ValueError, match="no memory"):
            bench.turns.check()
        assert not bench.turns.idle

    _run(scene)


def test_after_the_end_nothing_begins_and_nothing_is_heard() -> None:
    async def scene(bench: Bench) -> None:
        first, _ = bench.put(USUAL, "a"), bench.put(URGENT, "b")
        bench.next()
        bench.turns.end()
        first()
        await asyncio.wrap_future(bench.worker.submit(lambda: None))  # behind all that it had
        await asyncio.sleep(0)
        assert bench.began.empty()
        assert bench.ended == []

    _run(scene)
