"""A contribution is trained again: to the same bits from the same moments, beside training that goes on to its own bits."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer.node.inner_loop import StageInnerLoop
from protocol.ledger import audits, claims
from protocol.ledger.audits import Audits
from protocol.planning import budget
from protocol.planning.budget import Budget
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.bounds import MAX_AGREEMENT
from protocol.wire.claims import Audit
from protocol.wire.encoding import Message
from tests.support import machines, tiny
from tests.support.examining import (
    KEYS,
    NAMES,
    RUN,
    SHARDS,
    TRAIN,
    NoPipes,
    Text,
    decided,
    examiner,
    made,
    one_case,
    theta,
    trained,
)

MUON = dataclasses.replace(RUN, train=dataclasses.replace(TRAIN, optimizer="muon"))


def inner_loop(folder: Path, place: int, run: Manifest = RUN) -> StageInnerLoop:
    machine = machines.machine(folder, 10**9)
    pipes: Any = NoPipes()
    return StageInnerLoop(run, NAMES[place], machine, Text(), pipes, lambda **_: None, {}, lambda _: None)


@pytest.mark.parametrize("run", [RUN, MUON], ids=["adamw", "muon"])
async def test_training_again_from_the_same_moments_gives_the_same_bits(tmp_path: Path, run: Manifest) -> None:
    loop, start = inner_loop(tmp_path, 0, run), theta()
    await trained(loop, 0, 1, start)
    moments = {name: array.copy() for name, array in loop.optimizer().items()}
    await trained(loop, 0, 2, start)
    one = examiner(1, lambda: moments, [], run)
    case = one_case(2, 0, start)
    found = await one.learn(case, moments, case.work)
    for shard in SHARDS:
        for a, (kept, local) in zip(found.delta(shard), loop.displacement(shard), strict=True):
            assert np.any(a)
            np.testing.assert_array_equal(a, kept if local is None else kept - local)
    await one.aclose()
    loop.close()


def test_training_goes_on_to_its_own_bits_while_another_contribution_is_trained_again(tmp_path: Path) -> None:
    async def work(examined: bool) -> dict[str, str]:
        loop, start, told = inner_loop(tmp_path, 1), theta(), list[Message]()
        await trained(loop, 1, 1, start)
        one = examiner(1, loop.optimizer, told)
        turn, before, newest, payloads = decided(2, start)
        beside = asyncio.create_task(trained(loop, 1, 3, start))
        if examined:
            await asyncio.sleep(0)
            one.follow(before, newest, start, payloads, Audits(RUN).after(newest))
            assert one.keeps
            await one.settled()
            assert [x.peer for x in told if isinstance(x, Audit)] == [NAMES[1]]
            assert (told[0].round, told[0].replica) == (turn.round, turn.replica)  # type: ignore[union-attr]
        await beside
        digests = {
            shard: layout.shard_digest([a if b is None else a - b for a, b in loop.displacement(shard)])
            for shard in SHARDS
        }
        digests |= {name: layout.shard_digest([np.asarray(a)]) for name, a in loop.optimizer().items()}
        await one.aclose()
        loop.close()
        return digests

    assert asyncio.run(work(True)) == asyncio.run(work(False))


async def test_it_is_told_again_until_it_is_in_the_log_and_then_nothing_is_kept() -> None:
    start, told = theta(), list[Message]()
    _, before, newest, payloads = decided(1, start)

    there = set(threading.enumerate())
    one = examiner(1, dict, told)
    one.follow(before, newest, start, payloads, Audits(RUN).after(newest))
    assert one.keeps
    await one.settled()
    assert not one.keeps
    for thread in set(threading.enumerate()) - there:
        if thread.name.startswith("tensor"):  # its helpers would hold up training as long as it lives
            thread.join(30)
            assert not thread.is_alive()
    due = Audits(RUN).after(newest)
    one.follow(newest, made(2, (), 0.0), start, payloads, due)
    (said, again_) = told
    assert said == again_
    assert isinstance(said, Audit)
    assert -MAX_AGREEMENT <= said.agreement <= MAX_AGREEMENT
    assert Audits(RUN).after(newest).why_not(said) is None
    due = due.after(made(3, (), 0.0, said))
    one.follow(newest, made(3, (), 0.0, said), start, payloads, due)
    one.follow(newest, made(4, (), 0.0), start, payloads, due)
    assert len(told) == 2
    await one.aclose()


def test_whoever_comes_second_keeps_the_state_until_it_is_wanted_or_not() -> None:
    start = theta()
    turn, before, newest, payloads = decided(1, start, by=NAMES[1])
    second = next(i for i, name in enumerate(NAMES) if name == turn.examiners[1])

    async def work(agreement: float) -> list[Message]:
        told: list[Message] = []
        one = examiner(second, dict, told)
        one.follow(before, newest, start, payloads, Audits(RUN).after(newest))
        assert one.keeps
        assert not one.is_examining, "it is not its turn"
        first = Audit(peer="", round=1, replica=turn.replica, agreement=agreement, signature=b"")
        then = made(2, (), 0.0, claims.signed(KEYS[1], turn.of, first))
        one.follow(newest, then, start, payloads, Audits(RUN).after(newest).after(then))
        assert one.keeps == one.is_examining
        await one.settled()
        await one.aclose()
        return told

    assert asyncio.run(work(audits.LEAST_AGREEMENT)) == []
    (said,) = asyncio.run(work(0.0))
    assert isinstance(said, Audit)


async def test_without_room_nothing_is_kept() -> None:
    start = theta()
    _, before, newest, payloads = decided(1, start)

    for changes, held in (({"has_room": False}, start), ({}, {s: start[s] for s in SHARDS[:2]})):
        one = examiner(1, dict, [], **changes)
        one.follow(before, newest, held, payloads, Audits(RUN).after(newest))
        assert not one.keeps
        await one.aclose()
    assert not budget.has_room_to_audit(RUN, Budget(tiny.full_memory(RUN)))
    assert budget.has_room_to_audit(RUN, Budget(10 * tiny.full_memory(RUN)))
