"""Trains another replica's contribution again, when it is this peer's turn, and tells the nodes what it found (protocol/ledger/audits.py).

It goes on beside the rounds, with a trainer of its own on a thread that lets whoever computes go first, and holds nothing up. It begins with a
copy of this peer's own moments, and changes nothing of this peer's training. What comes late has a place in a later commit.

The state before the round is needed, which nobody has any more when the round is applied. So whoever is named as an examiner keeps it, from
the moment that the commit comes: until it has trained, or, where it is named only for the case that the first one finds too little, until
that is known not to be so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from peer import events
from peer.chain import pipeline
from peer.chain.progress import StageProgress
from peer.corpus.text import Text
from peer.node import round_text
from peer.node.aside import Aside
from peer.node.orders import Payloads
from peer.state.storage import Shards
from peer.training import again, device
from peer.training.schedule import Pace
from peer.training.trainer import StageTrainer, make_worker
from protocol.codec import sparse
from protocol.codec.sparse import PayloadError
from protocol.errors import LocalError, PotluckError
from protocol.identity import Identity
from protocol.ledger import claims, schedule
from protocol.ledger.audits import Audits, Turn
from protocol.planning import budget, memory
from protocol.planning.budget import Budget
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.claims import Audit
from protocol.wire.commit import Commit, Contribution
from protocol.wire.encoding import Message
from protocol.wire.plan import Work

STEP_SECONDS = 3600.0
OTHERS = 16
"""Contributions that the audited one is compared with, at most."""


@dataclass(frozen=True, slots=True)
class Case:
    """A contribution that may have to be trained again: what was asked and sent of it, and the state before its round. `before`: inner steps of the
    learning rate's schedule before it."""

    turn: Turn
    work: Work
    steps: int
    total_steps: int
    before: int
    theta: Shards
    payloads: Mapping[str, list[bytes]]
    """By shard: that of the contribution, and those of others to the round."""


@dataclass(frozen=True, slots=True)
class Means:
    """With what is trained. `moments()` gives this peer's own, by parameter name, and may take a while; `device` and `threads` are its trainer's."""

    moments: Callable[[], dict[str, NDArray[np.generic]]]
    device: str
    threads: int


class Examiner:
    """One per peer. `has_room`: whether it may take memory for a second trainer; `tell` sends to the bootstrap nodes."""

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
        self._said: dict[tuple[int, int], Audit] = {}
        self._task: asyncio.Task[None] | None = None
        self._stop = threading.Event()
        self._aside = Aside(functools.partial(make_worker, means.threads))

    @property
    def keeps(self) -> bool:
        """Whether the arrays of some state, as it was given, must not be written to."""
        return bool(self._cases) or self.is_examining

    @property
    def is_examining(self) -> bool:
        """Whether something is being trained again."""
        return self._task is not None and not self._task.done()

    async def settled(self) -> None:
        """Returns when nothing is being trained again, or raises what that raised."""
        if self._task is not None:
            await self._task

    def follow(self, before: Commit | None, commit: Commit, theta: Shards, payloads: Payloads, due: Audits) -> None:
        """`commit` is about to be applied to `theta`, of which no array changes as long as `keeps`. `before`: the commit before it; `due`: what is
        to be trained again by the newest commit."""
        for turn in due.turns:
            if turn.of == commit.digest and self._identity.peer_id in turn.examiners:
                self._keep(turn, before, commit, theta, payloads)
        known = {(turn.round, turn.replica): turn for turn in due.turns}
        self._cases = [
            dataclasses.replace(case, turn=known[key])
            for case in self._cases
            if (key := _key(case.turn)) in known and key not in self._said
        ]
        self._said = {key: said for key, said in self._said.items() if key in known}
        for key, said in self._said.items():
            if said.peer in known[key].wanted:
                self._tell(said)
        self._begin()

    async def aclose(self) -> None:
        """Ends what is under way."""
        self._stop.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._aside.end()

    def _keep(self, turn: Turn, before: Commit | None, commit: Commit, theta: Shards, payloads: Payloads) -> None:
        plan = before.plan if before is not None else None
        spec = plan.taken(turn.replica, (turn.maker,), self._manifest.model.n_layers) if plan is not None else None
        whole = theta.keys() == payloads.keys() == set(layout.shard_names(self._manifest.model))
        if before is None or spec is None or not (whole and self._has_room and self._makes_room(turn)):
            return
        place = [c.replica for c in commit.contributions].index(turn.replica)
        contribution: Contribution = commit.contributions[place]
        self._cases.append(
            Case(
                turn=turn,
                work=spec.work,
                steps=contribution.steps,
                total_steps=schedule.of(self._manifest, before).total_steps,
                before=schedule.steps_before(self._manifest, turn.round, before.idle),
                theta=dict(theta),
                payloads=again.chosen(payloads, place, OTHERS),
            )
        )

    def _makes_room(self, turn: Turn) -> bool:
        """Whether one more state may be kept: whoever is named first is sure to need it, and others only may."""
        if len(self._cases) < memory.AUDITED_STATES:
            return True
        me = self._identity.peer_id
        unsure = [case for case in self._cases if me not in case.turn.wanted]
        if turn.examiners[0] != me or not unsure:
            return False
        self._cases = [case for case in self._cases if case is not unsure[0]]
        return True

    def _begin(self) -> None:
        """Trains what is wanted, one after the other."""
        if not self.is_examining:
            wanted = [case for case in self._cases if self._identity.peer_id in case.turn.wanted]
            self._task = asyncio.create_task(self._examine(wanted[0])) if wanted else None

    async def _examine(self, case: Case) -> None:
        try:
            agreement = await self._agreement(case)
        except (PotluckError, PayloadError, RuntimeError, MemoryError, ExceptionGroup) as error:
            if isinstance(error, RuntimeError | MemoryError) and not device.is_shortage(error):
                raise
            self._emit(events.Warning(text=f"audit: round {case.turn.round} is not trained again here: {error}"))
            return
        finally:
            self._aside.end()
            self._cases = [
                kept for kept in self._cases if kept.turn.of != case.turn.of or kept.turn.replica != case.turn.replica
            ]
        found = Audit(
            peer=self._identity.peer_id,
            round=case.turn.round,
            replica=case.turn.replica,
            agreement=agreement,
            signature=b"",
        )
        self._said[_key(case.turn)] = said = claims.signed(self._identity, case.turn.of, found)
        self._tell(said)

    async def _agreement(self, case: Case) -> float:
        moments = await asyncio.to_thread(self._means.moments)
        far = case.work.slot + self._text.index.sequences // 2
        learned = await self.learn(case, moments, case.work)
        plain = await self.learn(case, moments, dataclasses.replace(case.work, slot=far))
        return await self._aside(self._compare, case, learned, plain)

    def _compare(self, case: Case, learned: StageTrainer, plain: StageTrainer) -> float:
        compared = again.Comparison(len(next(iter(case.payloads.values()))))
        for shard, payloads in case.payloads.items():
            shapes = layout.shapes(self._manifest.model, shard)
            updates = [sparse.decode(self._manifest.outer.codec, shapes, payload) for payload in payloads]
            compared.add(updates, learned.delta(shard), plain.delta(shard))
        return compared.agreement

    async def learn(self, case: Case, moments: Mapping[str, NDArray[np.generic]], work: Work) -> StageTrainer:
        """A trainer that has learned from the text of `work`. Raises PotluckError."""
        manifest, train = self._manifest, self._manifest.train
        on, layers, before = self._means.device, manifest.model.n_layers, case.before
        pace = Pace(before, work.steps, work.micro_batches, case.total_steps)

        def build() -> StageTrainer:
            made = StageTrainer(manifest.model, train, layout.shard_names(manifest.model), device=self._means.device)
            made.load_optimizer(moments)
            made.begin_round(case.theta, pace)
            return made

        trainer, progress = await self._aside(build), StageProgress()
        setup = pipeline.StageSetup(
            trainer=trainer,
            worker=self._aside.worker,
            wires=(manifest.chains.forward, manifest.chains.backward),
            timeout=STEP_SECONDS,
            read=round_text.reader(manifest, self._text, work, before + 1, lambda warning: None),
            depth=1,
            depths=budget.depths(manifest, 0, layers, Budget(memory.stage_memory(manifest, 0, layers, on), on)),
            stop=self._stop,
        )
        await pipeline.run_steps(setup, first_step=before + 1, steps=case.steps, progress=progress)
        if progress.total.steps != case.steps:
            raise LocalError("its text could not be read to the end")
        await self._aside(trainer.load_optimizer, {})
        return trainer


def _key(turn: Turn) -> tuple[int, int]:
    return turn.round, turn.replica
