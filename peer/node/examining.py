"""Audits: trains another replica's contribution again, in this peer's turns, and sends the result
(protocol/ledger/audits.py).

It runs beside the rounds, with a trainer of its own on a thread of low priority, and holds nothing up. It begins with a
copy of this peer's moments. An examiner keeps the state before the round, which is gone once the round is applied:
until it has trained, or, as a second examiner, until it is known that the first suffices.

The examiner learns d from the text that the contribution's maker was assigned, and d' from other text, both from the
same state and the same moments. For each contribution s of the round, at the places that it sends,

    x(s) = cos(s, d - d')

says how much better it fits the one text than the other. What all contributions have in common they share here too, so
the N others show x without the text. x is a sum over PARTS of each tensor, x_g(s). So

    agreement = (x(audited) - mean of x(others)) / sqrt((1 + 1 / N) sum over g of the variance of x_g(others))

is about 0, give or take 1, for a peer that trained on neither text, whatever the model and the round. Of the maker it
needs only what the log names: neither its moments nor its error feedback.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from peer import events
from peer.chain import pipeline, reading
from peer.chain.grad_norm import StageProgress
from peer.corpus.text import Text
from peer.node.background import BackgroundExecutor
from peer.node.training import Payloads
from peer.state.storage import Shards
from peer.training import device
from peer.training.optimizer import Pace
from peer.training.trainer import StageTrainer, make_worker
from protocol.codec import sparse
from protocol.codec.sparse import PayloadError, Sparse
from protocol.errors import LocalError, PotluckError
from protocol.identity import Identity
from protocol.ledger import claims, schedule
from protocol.ledger.audits import Audits, Turn
from protocol.planning import budget, memory
from protocol.planning.budget import Budget
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.bounds import MAX_AGREEMENT
from protocol.wire.claims import Audit
from protocol.wire.commit import Commit
from protocol.wire.encoding import Message
from protocol.wire.plan import Work

Array = NDArray[np.float32]
PARTS = 4
"""Of each tensor, one behind the other."""
STEP_SECONDS = 3600.0
OTHERS = 16
"""Contributions that the audited one is compared with, at most."""


class Comparison:
    """Compares contributions shard by shard; `count` of them, the first of which is audited."""

    def __init__(self, count: int) -> None:
        self._squares = np.zeros((count, 2))  # of s, and of m = d - d' at the places of s
        self._products: list[list[float]] = [[] for _ in range(count)]  # of s and m, of each part

    def add(self, updates: Sequence[Sequence[Sparse]], learned: Sequence[Array], plain: Sequence[Array]) -> None:
        """Adds one shard: the tensors that each contribution sends, d and d'."""
        more = [(a - b).reshape(-1) for a, b in zip(learned, plain, strict=True)]
        for squares, products, update in zip(self._squares, self._products, updates, strict=True):
            for x, m in zip(update, more, strict=True):
                s, there = x.values.astype(np.float64), m[x.index].astype(np.float64)
                squares += np.dot(s, s), np.dot(there, there)
                part = x.index * PARTS // m.size
                products += np.bincount(part, weights=s * there, minlength=PARTS).tolist()

    @property
    def agreement(self) -> float:
        """See the module's docstring; at most MAX_AGREEMENT in magnitude. Raises LocalError where a value is not
        finite."""
        lengths = np.sqrt(self._squares[:, :1] * self._squares[:, 1:])
        x = np.array(self._products) / np.where(lengths > 0, lengths, np.inf)
        return excess(x[0], x[1:])


def excess(own: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """The sum of x_g [g] above those of at least two others [n, g], in standard deviations. Raises LocalError where a
    value is not finite."""
    count = len(others)
    more = float(np.sum(own - np.mean(others, axis=0)))
    spread = math.sqrt((1 + 1 / count) * float(np.sum(np.var(others, axis=0, ddof=1))))
    if not (math.isfinite(more) and math.isfinite(spread)):
        raise LocalError("what was learned is not finite")
    found = more / spread if spread > 0 else math.copysign(MAX_AGREEMENT, more) if more else 0.0
    return max(-MAX_AGREEMENT, min(MAX_AGREEMENT, found))


def compared_payloads(
    payloads: Mapping[str, Sequence[tuple[float, bytes]]], place: int, most: int
) -> dict[str, list[bytes]]:
    """By shard, the payload of the contribution at `place` and those of the next `most` contributions, at most."""
    return {
        shard: [items[(place + step) % len(items)][1] for step in range(min(most + 1, len(items)))]
        for shard, items in payloads.items()
    }


@dataclass(frozen=True, slots=True)
class Case:
    """A contribution that may be trained again.

    before: inner steps of the learning rate's schedule before its round.
    theta: the state before its round.
    payloads: by shard, that of the contribution and those of others.
    """

    turn: Turn
    work: Work
    steps: int
    total_steps: int
    before: int
    theta: Shards
    payloads: Mapping[str, list[bytes]]

    @property
    def key(self) -> tuple[int, int]:
        """Round and replica."""
        return self.turn.round, self.turn.replica


@dataclass(frozen=True, slots=True)
class Means:
    """What the examiner's trainer is made with.

    moments: gives this peer's own, by parameter name; may take seconds.
    threads: cores for each operation.
    """

    moments: Callable[[], dict[str, NDArray[np.generic]]]
    device: str
    threads: int


class Examiner:
    """Audits in this peer's turns.

    tell: sends a message to the bootstrap nodes.
    has_room: whether there is memory for a second trainer.
    """

    def __init__(
        self,
        manifest: Manifest,
        identity: Identity,
        text: Text,
        tell: Callable[[Message], None],
        emit: events.Emit,
        means: Means,
        has_room: bool,
    ) -> None:
        self._manifest = manifest
        self._identity = identity
        self._text = text
        self._tell = tell
        self._emit = emit
        self._means = means
        self._has_room = has_room
        self._cases: list[Case] = []
        self._audits: dict[tuple[int, int], Audit] = {}
        self._task: asyncio.Task[None] | None = None
        self._stop = threading.Event()
        self._run = BackgroundExecutor(functools.partial(make_worker, means.threads))

    @property
    def keeps(self) -> bool:
        """Whether a state is kept, to whose arrays nothing may write."""
        return bool(self._cases) or self.is_examining

    @property
    def is_examining(self) -> bool:
        """Whether a contribution is being trained again."""
        return self._task is not None and not self._task.done()

    async def settled(self) -> None:
        """Waits for the audit under way. Raises what that raised."""
        if self._task is not None:
            await self._task

    def follow(self, before: Commit | None, commit: Commit, theta: Shards, payloads: Payloads, due: Audits) -> None:
        """`commit`, behind `before`, is about to be applied to `theta`; `due`: the audits by the newest commit."""
        for turn in due.turns:
            if turn.of == commit.digest and self._identity.peer_id in turn.examiners:
                self._keep(turn, before, commit, theta, payloads)
        known = {(turn.round, turn.replica): turn for turn in due.turns}
        self._cases = [
            dataclasses.replace(case, turn=known[case.key])
            for case in self._cases
            if case.key in known and case.key not in self._audits
        ]
        self._audits = {key: audit for key, audit in self._audits.items() if key in known}
        for key, audit in self._audits.items():
            if audit.peer in known[key].wanted:
                self._tell(audit)
        if not self.is_examining:
            wanted = [case for case in self._cases if self._identity.peer_id in case.turn.wanted]
            self._task = asyncio.create_task(self._examine(wanted[0])) if wanted else None

    async def aclose(self) -> None:
        self._stop.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._run.end()

    def _keep(self, turn: Turn, before: Commit | None, commit: Commit, theta: Shards, payloads: Payloads) -> None:
        plan = before.plan if before is not None else None
        spec = plan.taken(turn.replica, (turn.maker,), self._manifest.model.n_layers) if plan is not None else None
        whole = theta.keys() == payloads.keys() == set(layout.shard_names(self._manifest.model))
        if before is None or spec is None or not (whole and self._has_room and self._makes_room(turn)):
            return
        place = [c.replica for c in commit.contributions].index(turn.replica)
        self._cases.append(
            Case(
                turn=turn,
                work=spec.work,
                steps=commit.contributions[place].steps,
                total_steps=schedule.of(self._manifest, before).total_steps,
                before=schedule.steps_before(self._manifest, turn.round, before.idle),
                theta=dict(theta),
                payloads=compared_payloads(payloads, place, OTHERS),
            )
        )

    def _makes_room(self, turn: Turn) -> bool:
        """Whether one more state may be kept. The first examiner of a turn takes the place of a state that may not be
        needed."""
        if len(self._cases) < memory.AUDITED_STATES:
            return True
        me = self._identity.peer_id
        unsure = [case for case in self._cases if me not in case.turn.wanted]
        if turn.examiners[0] != me or not unsure:
            return False
        self._cases = [case for case in self._cases if case is not unsure[0]]
        return True

    async def _examine(self, case: Case) -> None:
        try:
            agreement = await self._agreement(case)
        except (PotluckError, PayloadError, RuntimeError, MemoryError, ExceptionGroup) as error:
            if isinstance(error, RuntimeError | MemoryError) and not device.is_shortage(error):
                raise
            self._emit(events.Warning(text=f"audit: round {case.turn.round} is not trained again here: {error}"))
            return
        finally:
            self._run.end()
            of, replica = case.turn.of, case.turn.replica
            self._cases = [kept for kept in self._cases if (kept.turn.of, kept.turn.replica) != (of, replica)]
        peer, (round, replica) = self._identity.peer_id, case.key
        audit = Audit(peer=peer, round=round, replica=replica, agreement=agreement, signature=b"")
        self._audits[case.key] = signed = claims.signed(self._identity, case.turn.of, audit)
        self._tell(signed)

    async def _agreement(self, case: Case) -> float:
        moments = await asyncio.to_thread(self._means.moments)
        far = case.work.slot + self._text.index.sequences // 2
        learned = await self.learn(case, moments, case.work)
        plain = await self.learn(case, moments, dataclasses.replace(case.work, slot=far))
        return await self._run(self._compare, case, learned, plain)

    def _compare(self, case: Case, learned: StageTrainer, plain: StageTrainer) -> float:
        compared = Comparison(len(next(iter(case.payloads.values()))))
        for shard, payloads in case.payloads.items():
            shapes = layout.shapes(self._manifest.model, shard)
            updates = [sparse.decode(self._manifest.outer.codec, shapes, payload) for payload in payloads]
            compared.add(updates, learned.delta(shard), plain.delta(shard))
        return compared.agreement

    async def learn(self, case: Case, moments: Mapping[str, NDArray[np.generic]], work: Work) -> StageTrainer:
        """A trainer after the case's inner steps on the text of `work`. Raises PotluckError."""
        manifest, train = self._manifest, self._manifest.train
        on, layers, before = self._means.device, manifest.model.n_layers, case.before
        pace = Pace(before, work.steps, work.micro_batches, case.total_steps)

        def build() -> StageTrainer:
            made = StageTrainer(manifest.model, train, layout.shard_names(manifest.model), device=on)
            made.load_optimizer(moments)
            made.begin_round(case.theta, pace)
            return made

        trainer, progress = await self._run(build), StageProgress()
        setup = pipeline.StageSetup(
            trainer=trainer,
            worker=self._run.worker,
            wires=(manifest.chains.forward, manifest.chains.backward),
            timeout=STEP_SECONDS,
            read=reading.reader(manifest, self._text, work, before + 1, lambda warning: None),
            depth=1,
            depths=budget.depths(manifest, 0, layers, Budget(memory.stage_memory(manifest, 0, layers, on), on)),
            stop=self._stop,
        )
        await pipeline.run_steps(setup, first_step=before + 1, steps=case.steps, progress=progress)
        if progress.total.steps != case.steps:
            raise LocalError("its text could not be read to the end")
        await self._run(trainer.load_optimizer, {})
        return trainer
