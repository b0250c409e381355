"""Late or missing text: all stages end together and keep what was done; without a step the wait fails."""

from __future__ import annotations

import asyncio

import pytest

from peer.chain.frames import NeighbourLost
from peer.chain.reading import Ids, Read, Reading
from protocol.errors import LocalError, UsageError
from tests.support.chains import DEADLINE_S, Wired, ids_of, make_chain, read_of, steps_of, worker


class Late:
    """Reads the text of steps before `late`; later ones come when they are `released`."""

    def __init__(self, late: int, error: str = "") -> None:
        self.late, self.error = late, error
        self.released = asyncio.Event()
        self.asked: list[int] = []

    async def read(self, step: int) -> Ids:
        self.asked.append(step)
        if step >= self.late:
            await self.released.wait()
            if self.error:
                raise UsageError(self.error)
        return ids_of(step)


async def _chain_of_two(read: Read, stops: dict[int, asyncio.Event], steps: int = 4) -> list[object]:
    """How many steps each of two stages did, or why it failed; the second one reads with `read`."""
    chain = make_chain((3,), 0)
    async with asyncio.timeout(DEADLINE_S), Wired(2) as wired:
        ended = await asyncio.gather(
            *(
                steps_of(
                    trainer,
                    worker(i),
                    steps=steps,
                    previous=wired.previous[i],
                    following=wired.following[i],
                    read=read if i else read_of(),
                    stop=stops.get(i),
                )
                for i, trainer in enumerate(chain)
            ),
            return_exceptions=True,
        )
    return [end if isinstance(end, BaseException) else len(end) for end in ended]


async def test_the_text_of_the_next_step_is_asked_for_while_one_is_computed() -> None:
    late, stop = Late(late=99), asyncio.Event()
    assert await _chain_of_two(late.read, {1: stop}) == [4, 4]
    assert late.asked == [1, 2, 3, 4], "each once, and none beyond the last"


async def test_a_chain_waits_for_a_members_text_and_goes_on() -> None:
    late = Late(late=3)

    async def release() -> None:
        while 3 not in late.asked:
            await asyncio.sleep(0)
        late.released.set()

    releasing = asyncio.create_task(release())
    assert await _chain_of_two(late.read, {}) == [4, 4]
    await releasing


async def test_where_the_time_ends_before_the_text_has_come_all_stages_end_with_what_was_done() -> None:
    late, stop = Late(late=3), asyncio.Event()

    async def end() -> None:
        while 3 not in late.asked:
            await asyncio.sleep(0)
        stop.set()

    ending = asyncio.create_task(end())
    assert await _chain_of_two(late.read, {1: stop}) == [2, 2]
    await ending


async def test_text_that_cannot_be_had_ends_the_round_with_what_was_done() -> None:
    late = Late(late=3, error="text: nobody has it")
    late.released.set()
    assert await _chain_of_two(late.read, {}) == [2, 2]


async def test_without_a_first_step_the_replica_sits_out_and_its_neighbours_are_told() -> None:
    late = Late(late=1, error="text: nobody has it")
    late.released.set()
    lost, ours = await _chain_of_two(late.read, {})
    assert isinstance(ours, UsageError)
    assert str(ours) == "text: nobody has it"
    assert isinstance(lost, NeighbourLost)
    assert lost.peer == "P1"


async def test_a_round_that_is_over_ends_the_wait_for_the_first_text() -> None:
    late, stop = Late(late=1), asyncio.Event()
    stop.set()
    reading = Reading(late.read, 4, stop, None)
    with pytest.raises(LocalError, match="the round was over before its text was there"):
        await reading.take(1)
    assert reading.waited > 0
    await reading.aclose()


async def test_a_failure_that_is_a_bug_is_raised() -> None:
    async def read(step: int) -> Ids:
        raise ZeroDivisionError

    reading = Reading(read, 4, None, None)
    reading.ask(2)
    with pytest.raises(ZeroDivisionError):
        await reading.has_next()
    await reading.aclose()
