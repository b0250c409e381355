"""The worker's turns: it never waits for the event loop, and decides at the last moment."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from peer.chain.pipeline import AHEAD, AlternatingScheduler, Launched

BACK, FORTH = 2, 1
DEADLINE_S = 30.0


class Bench:
    """AlternatingScheduler whose jobs wait until they are let go."""

    def __init__(self, worker: ThreadPoolExecutor, waiter: ThreadPoolExecutor) -> None:
        self.worker = worker
        self.ended: list[tuple[int, str]] = []
        self.waits: list[int] = []
        self.began: queue.Queue[str] = queue.Queue()
        self.stirred = asyncio.Event()
        self.turns = AlternatingScheduler[str](
            worker,
            waiter,
            (BACK, FORTH),
            lambda kind, name: self.ended.append((kind, name)),
            self.stirred.set,
            lambda kind, start, end: self.waits.append(kind),
        )

    def put(self, kind: int, name: str, *, after: int = 0) -> Callable[[], None]:
        """Returns what lets the job end."""
        go = threading.Event()

        def job() -> Launched[str]:
            self.began.put(name)
            assert go.wait(DEADLINE_S)
            return Launched(lambda: name)

        self.turns.put(kind, job, after=after)
        return go.set

    def next(self) -> str:
        """The job that begins next, as the worker's thread says."""
        return self.began.get(timeout=DEADLINE_S)

    async def until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self.stirred.clear()
            await self.stirred.wait()


@pytest.fixture
@contextlib.asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    with ThreadPoolExecutor(1) as worker, ThreadPoolExecutor(1) as waiter:
        yield Bench(worker, waiter)


@pytest.mark.parametrize("first", [FORTH, BACK])
async def test_the_kinds_take_turns_whichever_was_prepared_first(bench: Bench, first: int) -> None:
    other = FORTH + BACK - first
    go = [bench.put(first, "a")]
    assert bench.next() == "a"
    go += [bench.put(first, "b"), bench.put(other, "c")]
    assert bench.turns.has(FORTH)
    assert bench.turns.has(BACK)
    for each in go:
        each()
    await bench.until(lambda: bench.turns.idle)
    assert bench.ended == [(first, "a"), (other, "c"), (first, "b")]


async def test_a_job_waits_for_so_many_of_the_other_kind_and_no_longer(bench: Bench) -> None:
    go = [bench.put(FORTH, "a")]
    assert bench.next() == "a"
    go += [bench.put(BACK, "b"), bench.put(FORTH, "c", after=2)]
    go[0]()
    assert bench.next() == "b"
    go.append(bench.put(BACK, "d"))
    go[1]()
    assert bench.next() == "d", "it is the other's turn, but that has to wait"
    go.append(bench.put(BACK, "e"))
    for each in go:
        each()
    await bench.until(lambda: bench.turns.idle)
    assert [name for _, name in bench.ended] == ["a", "b", "d", "c", "e"]


async def test_the_worker_does_not_need_the_loop_to_go_on(bench: Bench) -> None:
    first, second = bench.put(FORTH, "a"), bench.put(BACK, "b")
    first()
    assert [bench.next(), bench.next()] == ["a", "b"]  # the event loop stands still meanwhile
    assert bench.ended == []
    second()
    await bench.until(lambda: bench.turns.idle)
    assert bench.ended == [(FORTH, "a"), (BACK, "b")]
    assert bench.waits == [FORTH], "it waited once, for the first"


class TellingLoop(asyncio.SelectorEventLoop):
    """Notes whether there is a place when the worker tells that a job has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: AlternatingScheduler[str] | None = None
        self.free: list[bool] = []

    def call_soon_threadsafe(self, *what: Any, **options: Any) -> asyncio.Handle:
        if self.turns is not None:
            self.free.append(not self.turns.has(FORTH))
        return super().call_soon_threadsafe(*what, **options)


def test_who_hears_of_an_end_finds_the_next_place_free() -> None:
    loop = TellingLoop()

    async def work() -> None:
        with ThreadPoolExecutor(1) as worker, ThreadPoolExecutor(1) as waiter:
            bench = Bench(worker, waiter)
            first = bench.put(FORTH, "a")
            assert bench.next() == "a"
            second = bench.put(FORTH, "b")
            assert bench.turns.has(FORTH)
            loop.turns = bench.turns
            first()
            await bench.until(lambda: bench.ended != [])
            loop.turns = None
            second()
            await bench.until(lambda: bench.turns.idle)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(work())
    assert loop.free == [True]


async def test_a_rested_worker_begins_again(bench: Bench) -> None:
    for name in ("a", "b", "c"):
        bench.put(FORTH, name)()
        await bench.until(lambda: bench.turns.idle)
    assert [name for _, name in bench.ended] == ["a", "b", "c"]
    assert bench.waits == [FORTH] * 3


async def test_what_a_job_raises_is_raised_by_check(bench: Bench) -> None:
    def job() -> Launched[str]:
        raise ValueError("no memory")

    bench.turns.check()
    bench.turns.put(FORTH, job)
    await bench.stirred.wait()
    with pytest.raises(ValueError, match="no memory"):
        bench.turns.check()
    assert not bench.turns.idle


async def test_after_the_end_nothing_begins_and_nothing_is_heard(bench: Bench) -> None:
    first, _ = bench.put(FORTH, "a"), bench.put(BACK, "b")
    bench.next()
    bench.turns.end()
    first()
    await asyncio.wrap_future(bench.worker.submit(lambda: None))  # behind all that it had
    await asyncio.sleep(0)
    assert bench.began.empty()
    assert bench.ended == []


# --- on a device that works by itself


async def test_the_next_job_is_launched_before_one_has_ended_and_no_more_than_that(bench: Bench) -> None:
    jobs = 12

    begun = [threading.Event() for _ in range(jobs)]
    launched_when_it_ended: list[int] = []
    numbers = iter(range(jobs))
    loop = asyncio.get_running_loop()

    def put(kind: int) -> None:
        number = next(numbers, None)
        if number is None:
            return

        def job() -> Launched[str]:
            place = sum(event.is_set() for event in begun)
            begun[place].set()
            loop.call_soon_threadsafe(put, kind)

            def wait() -> str:
                if place + 1 < jobs:
                    assert begun[place + 1].wait(DEADLINE_S)
                launched_when_it_ended.append(sum(event.is_set() for event in begun))
                return str(place)

            return Launched(wait, there=False)

        bench.turns.put(kind, job)

    put(FORTH)
    put(BACK)
    await bench.until(lambda: len(bench.ended) == jobs)
    assert [int(name) for _, name in bench.ended] == list(range(jobs))
    assert launched_when_it_ended == [min(i + AHEAD, jobs) for i in range(jobs)]


async def test_a_device_that_is_at_work_is_not_waited_for(bench: Bench) -> None:
    go = threading.Event()

    def job() -> Launched[str]:
        bench.began.put("long")
        return Launched(lambda: str(go.wait(DEADLINE_S)), there=False)

    bench.turns.put(FORTH, job)
    assert bench.next() == "long"
    bench.put(BACK, "b")()
    assert bench.next() == "b"
    assert bench.waits == [FORTH], "it waited before the first, and then the device had work"
    go.set()
    await bench.until(lambda: bench.turns.idle)
    bench.put(BACK, "c")()
    await bench.until(lambda: bench.turns.idle)
    assert bench.waits == [FORTH, BACK]


async def test_what_a_device_could_not_do_is_raised_by_check(bench: Bench) -> None:
    def wait() -> str:
        raise ValueError("no memory")

    bench.turns.put(FORTH, lambda: Launched(wait, there=False))
    await bench.stirred.wait()
    with pytest.raises(ValueError, match="no memory"):
        bench.turns.check()
    assert bench.ended == []
