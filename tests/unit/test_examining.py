"""A contribution is trained again: to the same bits from the same moments, beside training that goes on to its own bits."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer.node.examining import Case, Examiner, Means
from peer.node.inner_loop import StageInnerLoop
from peer.node.training import ChainOrders
from peer.state.outer_optimizer import Outer
from peer.state.storage import Shards
from protocol.identity import Identity
from protocol.ledger import audits, claims
from protocol.ledger.audits import Audits, Turn
from protocol.planning import budget
from protocol.planning.budget import Budget
from protocol.round.member_events import TrainOrder
from protocol.run import init, layout
from protocol.run.corpus import CorpusIndex
from protocol.run.manifest import JudgingSpec, Manifest, TrainSpec
from protocol.wire.bounds import MAX_AGREEMENT
from protocol.wire.claims import Audit
from protocol.wire.commit import Commit, Contribution, Share
from protocol.wire.encoding import Message
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec, Work
from tests import machines, tiny
from tests.texts import NoText

SEQUENCES, LENGTH, VOCABULARY = 40_000, 16, 2048
MODEL = dataclasses.replace(
    tiny.manifest().model, vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=2, d_ff=64, context=LENGTH
)
TRAIN = TrainSpec(
    inner_steps=6, micro_batches=2, rows=2, sequence=LENGTH, lr=2e-3, warmup_steps=0, total_steps=600
)  # fmt: skip
RUN = tiny.manifest(model=MODEL, train=TRAIN, rounds=100, judging=JudgingSpec(audit_share=1.0))
MUON = dataclasses.replace(RUN, train=dataclasses.replace(TRAIN, optimizer="muon"))
KEYS = tuple(Identity(bytes([9, i] * 16)) for i in range(5))
NAMES = tuple(key.peer_id for key in KEYS)
SHARDS = layout.shard_names(MODEL)


class Text(NoText):
    """Each sequence has few words, which follow from its slot."""

    @property
    def index(self) -> CorpusIndex:
        return CorpusIndex(
            tokenizer="0" * 64, vocab_size=VOCABULARY, seed=0, sequence=LENGTH, sequences=SEQUENCES, chunks=bytes(32),
            held_out="0" * 64, held_out_sequences=1, documents=1, tokens=1, text_bytes=1, held_out_tokens=1, held_out_bytes=1,
        )  # fmt: skip

    async def sequences(self, slots: range) -> np.ndarray:
        rows = []
        for slot in slots:
            draw = np.random.default_rng(slot % SEQUENCES)
            rows.append(draw.choice(draw.integers(0, VOCABULARY, 6), LENGTH + 1))
        return np.stack(rows).astype(np.int64)


class NoPipes:
    """A full replica has no neighbours."""

    async def neighbours(self, *_: object) -> tuple[None, None]:
        return None, None

    def forget(self, round: int) -> None: ...


def plan(round: int) -> Plan:
    """Five full replicas; each has its text."""
    replicas = tuple(
        ReplicaSpec(
            number=i,
            stages=(StageSpec(peer=name, first=0, last=MODEL.n_layers),),
            work=Work(slot=100 * round + 30 * i, steps=6, micro_batches=2),
        )
        for i, name in enumerate(NAMES)
    )
    return Plan(round=round, replicas=replicas)


def inner_loop(folder: Path, place: int, run: Manifest = RUN) -> StageInnerLoop:
    machine = machines.machine(folder, 10**9)
    pipes: Any = NoPipes()
    return StageInnerLoop(run, NAMES[place], machine, Text(), pipes, lambda **_: None, {}, lambda _: None)


async def trained(loop: StageInnerLoop, place: int, round: int, theta: Shards) -> int:
    """The round's inner steps; how many."""
    order = TrainOrder(plan=plan(round), replica=place, total_steps=TRAIN.total_steps)
    never = asyncio.Event()
    result = await loop.train(
        order, theta, never, never, lambda *_: None, ChainOrders(lambda *_: None, asyncio.Queue())
    )
    assert result.error is None
    return result.steps


def theta() -> Shards:
    return {shard: init.initial_shard(MODEL, RUN.seed_bytes, shard) for shard in SHARDS}


def examiner(place: int, moments: Any, told: list[Message], run: Manifest = RUN, **changes: Any) -> Examiner:
    values = {"has_room": True, **changes}
    return Examiner(run, KEYS[place], Text(), told.append, lambda _: None, Means(moments, "cpu", 1), **values)


@pytest.mark.parametrize("run", [RUN, MUON], ids=["adamw", "muon"])
def test_training_again_from_the_same_moments_gives_the_same_bits(tmp_path: Path, run: Manifest) -> None:
    async def work() -> None:
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

    asyncio.run(work())


def one_case(round: int, replica: int, start: Shards) -> Any:
    """What an examiner keeps of a contribution, whatever was sent."""
    spec = plan(round).replica(replica)
    turn = Turn(round, "c" * 64, replica, spec.peers[0], tuple(n for n in NAMES if n != spec.peers[0]))
    return Case(
        turn=turn,
        work=spec.work,
        steps=6,
        total_steps=TRAIN.total_steps,
        before=(round - 1) * TRAIN.inner_steps,
        theta=start,
        payloads={},
    )


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


def decided(
    round: int, start: Shards, by: str = NAMES[1]
) -> tuple[Turn, Commit, Commit, dict[str, list[tuple[float, bytes]]]]:
    """A turn of which `by` is the first examiner; the commit before, that of the round, and its payloads."""
    outer = Outer(MODEL, RUN.outer.codec, RUN.outer.beta, RUN.outer.eta)
    payloads: dict[str, list[tuple[float, bytes]]] = {shard: [] for shard in SHARDS}
    for number in range(len(NAMES)):
        rng = np.random.default_rng(number)
        for shard in SHARDS:
            outer.feedback.clear()
            outer.accumulate(shard, [(rng.standard_normal(a.shape, np.float32), None) for a in start[shard]])
            payloads[shard].append((1 / len(NAMES), outer.encode(shard)[0]))
    work = tuple(
        Contribution(
            replica=i, tokens=64, steps=6, loss=1.0,
            shares=(Share(peer=name, root="0" * 64, size=1, norm=1.0, listed=1),),
        )
        for i, name in enumerate(NAMES)
    )  # fmt: skip
    for time in range(1000):
        newest = made(round, work, float(time))
        turns = list(audits.turns(RUN, newest))
        if len(turns) == 1 and turns[0].examiners[0] == by:
            return turns[0], made(round - 1, (), 0.0), newest, payloads
    raise AssertionError


def made(round: int, work: tuple[Contribution, ...], time: float, *said: Audit) -> Commit:
    return Commit(
        run=RUN.run_id, round=round, parent="p", time=time, contributions=work, left_out=(), diverged=(), digests={},
        plan=plan(round + 1), audits=said,
    )  # fmt: skip


def test_it_is_told_again_until_it_is_in_the_log_and_then_nothing_is_kept() -> None:
    start, told = theta(), list[Message]()
    _, before, newest, payloads = decided(1, start)

    async def work() -> None:
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

    asyncio.run(work())


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


def test_without_room_nothing_is_kept() -> None:
    start = theta()
    _, before, newest, payloads = decided(1, start)

    async def work() -> None:
        for changes, held in (({"has_room": False}, start), ({}, {s: start[s] for s in SHARDS[:2]})):
            one = examiner(1, dict, [], **changes)
            one.follow(before, newest, held, payloads, Audits(RUN).after(newest))
            assert not one.keeps
            await one.aclose()

    asyncio.run(work())
    assert not budget.has_room_to_audit(RUN, Budget(tiny.full_memory(RUN)))
    assert budget.has_room_to_audit(RUN, Budget(10 * tiny.full_memory(RUN)))
