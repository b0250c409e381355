"""Parts that unit tests of examining share with others."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np

from peer.node.examining import Case, Examiner, Means
from peer.node.inner_loop import StageInnerLoop
from peer.node.training import ChainOrders
from peer.state.outer_optimizer import Outer
from peer.state.storage import Shards
from protocol.identity import Identity
from protocol.ledger import audits
from protocol.ledger.audits import Turn
from protocol.round.member_events import TrainOrder
from protocol.run import init, layout
from protocol.run.corpus import CorpusIndex
from protocol.run.manifest import JudgingSpec, Manifest, TrainSpec
from protocol.wire.claims import Audit
from protocol.wire.commit import Commit, Contribution, Share
from protocol.wire.encoding import Message
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec, Work
from tests.support import tiny
from tests.support.texts import NoText

SEQUENCES, LENGTH, VOCABULARY = 40_000, 16, 2048
MODEL = dataclasses.replace(
    tiny.manifest().model, vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=2, d_ff=64, context=LENGTH
)


TRAIN = TrainSpec(
    inner_steps=6, micro_batches=2, rows=2, sequence=LENGTH, lr=2e-3, warmup_steps=0, total_steps=600
)  # fmt: skip


RUN = tiny.manifest(model=MODEL, train=TRAIN, rounds=100, judging=JudgingSpec(audit_share=1.0))
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
    return tiny.commit(RUN, round=round, time=time, contributions=work, plan=plan(round + 1), audits=said)
