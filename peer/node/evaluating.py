"""Measurements of the run's model at a peer: the held-out loss, and scores of others' updates
(protocol/ledger/run_state.py, scoring.py).

They run beside the rounds on a thread of low priority, on a copy of θ in fp32; a late result goes into a later commit.
The held-out loss is the mean over the same first sequences of the held-out part, in nats per token and in bits per byte
by the mean bytes per token of the held-out part. With it goes a sample, the model's likeliest continuation of that
text.

θ after a round holds all of the round's updates u. A score takes a little more of one out again, on assigned and on
other text:

    gain = loss(θ + STEP eta scale u) - loss(θ)        nats per token; `scale` is the commit's

One step for all makes gains comparable. Missing payloads, and text that takes longer than TEXT_SECONDS, are not scored.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from peer import events
from peer.corpus.text import Text
from peer.corpus.tokenizer import read_tokenizer
from peer.corpus.tokenizer_process import TokenizerProcess
from peer.net.base import cancel
from peer.node.background import BackgroundExecutor
from peer.state.storage import Shards
from protocol.codec import sparse
from protocol.codec.sparse import Sparse
from protocol.errors import PotluckError, UsageError
from protocol.identity import Identity
from protocol.ledger import claims, part_lists, run_state, scoring
from protocol.ledger.scoring import Scoring, Turn
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest
from protocol.wire import bounds
from protocol.wire.claims import LONGEST_SAMPLE, Evaluation, Mark, Score
from protocol.wire.commit import Commit, Contribution
from protocol.wire.encoding import Message

PROMPT_IDS, SAMPLE_IDS = 16, 48
"""Tokens of the held-out text in a sample, and tokens of the model behind them."""
STEP = 0.125
TEXT_SECONDS = 60.0
Windows = NDArray[np.int64]
Executor = Callable[..., Awaitable[Any]]
"""Runs (work, *arguments) in the background."""


class Model(Protocol):
    """A copy of the model. Methods raise UsageError where there is no memory."""

    def __call__(self, windows: Windows, /) -> float:
        """The sum of the loss, in nats, over all predictions of windows [n, L + 1]."""
        ...

    def goes_on(self, ids: Sequence[int], count: int, /) -> list[int]:
        """The `count` likeliest ids after these, one by one."""
        ...

    def moved(self, update: Iterable[tuple[str, Sequence[Sparse]]], step: float, /) -> AbstractContextManager[None]:
        """Adds `step` times the update to the parameters, and restores exactly what they were."""
        ...


@dataclass(eq=False)
class Scorer:
    """Scores others' updates in this peer's turns.

    tell: sends a message to the bootstrap nodes.
    read: a payload or a list of parts by its name; None where it is not here.
    bring: fetches what is not here of a contribution. Raises RemoteError.
    """

    manifest: Manifest
    identity: Identity
    text: Text
    tell: Callable[[Message], None]
    read: Callable[[str], bytes | None]
    bring: Callable[[Commit, Contribution], Awaitable[None]]

    def __post_init__(self) -> None:
        self._scores: dict[int, Score] = {}

    def follow(self, commit: Commit, now: Scoring) -> Turn | None:
        """Sends again the scores that the log lacks. Returns the turn of this peer after `commit`, the newest, if it
        has one.

        now: what is to be scored.
        """
        if not self.manifest.judging.score_share:
            return None
        self._scores = {n: x for n, x in self._scores.items() if now.why_not(x) is None}
        for score in self._scores.values():
            self.tell(score)
        turn = now.turn(commit.round)
        return turn if turn is not None and self.identity.peer_id in turn.by else None

    async def score(self, turn: Turn, log: Mapping[int, Commit], model: Model, run: Executor) -> None:
        """Measures the gains of a turn, and sends them. Raises PotluckError."""
        commit, marks = log[turn.round], list[Mark]()
        pool = await self.text.held_out(scoring.HELD_OUT_POOL)
        other = pool[scoring.held_out(self.manifest, commit, len(pool))]
        plain = await run(self._loss, model, other)
        for contribution in commit.contributions:
            if contribution.replica not in turn.by[self.identity.peer_id]:
                continue
            try:
                assigned = await asyncio.wait_for(self._assigned(commit, contribution, log), TEXT_SECONDS)
                await asyncio.wait_for(self.bring(commit, contribution), TEXT_SECONDS)
                gains = await run(self.gains, model, contribution, assigned, other, plain)
            except (PotluckError, TimeoutError, KeyError):
                continue
            gain, elsewhere = map(bounds.reportable_gain, gains)
            if gain is not None and elsewhere is not None:
                marks.append(Mark(replica=contribution.replica, assigned=gain, other=elsewhere))
        if marks:
            score = Score(peer=self.identity.peer_id, round=turn.round, marks=tuple(marks), signature=b"")
            self._scores[turn.round] = claims.signed(self.identity, turn.of, score)
            self.tell(self._scores[turn.round])

    async def _assigned(self, commit: Commit, of: Contribution, log: Mapping[int, Commit]) -> Windows:
        """Some of a contribution's training sequences [n, L + 1]. Raises KeyError where the plan does not say which."""
        plan = log[commit.round - 1].plan
        spec = plan.taken(of.replica, of.peers, self.manifest.model.n_layers) if plan is not None else None
        if spec is None:
            raise KeyError(of.replica)
        return await self.text.sequences(scoring.slots(self.manifest, commit, of, spec.work))

    def gains(
        self, model: Model, of: Contribution, assigned: Windows, other: Windows, plain: float
    ) -> tuple[float, float]:
        """The gains of a contribution on assigned and on other text. Raises PotluckError, KeyError.

        plain: the loss on other text without it.
        """
        parts = (part for share in of.shares for part in part_lists.unpack(self._bytes(share.root)))
        codec, spec = self.manifest.outer.codec, self.manifest.model
        update = [(x.shard, sparse.moves(codec, layout.shapes(spec, x.shard), self._bytes(x.digest))) for x in parts]
        before = self._loss(model, assigned)
        with model.moved(update, STEP * self.manifest.outer.eta * of.scale):
            return self._loss(model, assigned) - before, self._loss(model, other) - plain

    def _bytes(self, name: str) -> bytes:
        found = self.read(name)
        if found is None:
            raise KeyError(name)
        return found

    def _loss(self, model: Model, windows: Windows) -> float:
        rows = self.manifest.train.rows
        nats = sum(model(windows[first : first + rows]) for first in range(0, len(windows), rows))
        return nats / max(1, windows[:, 1:].size)


@dataclass(eq=False)
class Evaluator:
    """Measures the held-out loss in this peer's turns, and lets the scorer use the same copy of the model. There is one
    copy at a time: the held-out loss goes first.

    tell: sends a message to the bootstrap nodes.
    load: (spec, theta) -> a copy of the whole model (peer/training/inference.py).
    tokenizer: fetches the file of the run's.
    worker: makes the thread of the computation.
    scorer: shares the copy; None: this peer does not score.
    has_room: whether there is memory for a copy.
    always: measure out of turn too, as an operator's auditor does.
    """

    manifest: Manifest
    identity: Identity
    text: Text
    tell: Callable[[Message], None]
    emit: events.Emit
    _: KW_ONLY
    load: Callable[[ModelSpec, Shards], Model]
    tokenizer: Callable[[], Awaitable[bytes]]
    worker: Callable[[], ThreadPoolExecutor]
    scorer: Scorer | None = None
    has_room: bool
    always: bool = False

    def __post_init__(self) -> None:
        self._only_scores = False
        self._tokenizer_file: bytes | None = None
        self._has_sample = True
        self._task: asyncio.Task[None] | None = None
        self._evaluation: Evaluation | None = None
        self._warned = False
        self.reads = False
        """Whether the arrays of θ are being copied: nothing may write to them."""

    def follow(
        self,
        commit: Commit,
        theta: Shards,
        log: Mapping[int, Commit] = MappingProxyType({}),
        scores: Scoring | None = None,
    ) -> None:
        """Begins what is due after `commit`, the newest of `log`.

        theta: the shards held after it; they do not change while `reads`.
        scores: what is to be scored; None: nothing.
        """
        if any(x.peer == self.identity.peer_id for x in commit.evaluations):
            self._evaluation = None
        turn, measures = self.scorer.follow(commit, scores) if self.scorer and scores else None, False
        if run_state.evaluation_is_due(self.manifest, commit):
            self._evaluation = None
            measures = self.always or self.identity.peer_id in run_state.evaluators(self.manifest, commit)
        whole = self.has_room and theta.keys() == set(layout.shard_names(self.manifest.model))
        if whole and (measures or turn is not None):
            self._begin(commit, theta, measures, turn, log)
        if self._evaluation is not None:
            self.tell(self._evaluation)

    async def aclose(self) -> None:
        await cancel(self._task)

    def _begin(
        self, commit: Commit, theta: Shards, measures: bool, turn: Turn | None, log: Mapping[int, Commit]
    ) -> None:
        if self._task is not None and not self._task.done():
            if not (measures and self._only_scores):
                return  # this machine is too slow for every turn; the result of the one under way may still count
            self._task.cancel()
        self.reads, self._only_scores = True, not measures
        self._task = asyncio.create_task(self._work(commit, theta, measures, turn, log))

    async def _work(
        self, commit: Commit, theta: Shards, measures: bool, turn: Turn | None, log: Mapping[int, Commit]
    ) -> None:
        task, run = asyncio.current_task(), BackgroundExecutor(self.worker)
        try:
            model = await run(self.load, self.manifest.model, theta)
            self.reads = False
            if measures:
                await self._measure(commit, model, run)
            if turn is not None and self.scorer is not None:
                self._only_scores = True
                await self.scorer.score(turn, log, model, run)
        except PotluckError as error:
            if not self._warned:
                what = "held-out loss" if measures and not self._only_scores else "scores"
                self.emit(events.Warning(text=f"{what}: not measured here: {error}"))
                self._warned = True
        finally:
            run.end()
            if self._task is task:
                self.reads = False

    async def _measure(self, commit: Commit, model: Model, run: Executor) -> None:
        """Sends the signed evaluation, unless the model has diverged so far that its loss is no number."""
        windows = await self.text.held_out(self.manifest.evaluated_sequences)
        nats, rows = 0.0, self.manifest.train.rows
        for first in range(0, len(windows), rows):
            nats += await run(model, windows[first : first + rows])
        sample = await self._sample(model, run, windows[0, :PROMPT_IDS].tolist()) if len(windows) else ""
        loss = bounds.reportable_loss(nats / windows[:, 1:].size)
        if loss is None:
            return
        found = Evaluation(
            peer=self.identity.peer_id,
            round=commit.round,
            sequences=len(windows),
            loss=loss,
            bits_per_byte=min(loss / math.log(2) / self.text.index.bytes_per_token, bounds.MAX_BITS_PER_BYTE),
            signature=b"",
            sample=sample,
        )
        self._evaluation = claims.signed(self.identity, commit.digest, found)
        self.tell(self._evaluation)

    async def _sample(self, model: Model, run: Executor, prompt: list[int]) -> str:
        """The model's text; empty where the tokenizer cannot be had or used, or the model has diverged."""
        if not self._has_sample:
            return ""
        try:
            if self._tokenizer_file is None:
                self._tokenizer_file = read_tokenizer(await self.tokenizer(), self.manifest.tokenizer.digest)
            written = await run(model.goes_on, prompt, SAMPLE_IDS)
        except PotluckError:
            return ""
        try:
            before, after = await decoded(self._tokenizer_file, prompt, [*prompt, *written])
        except UsageError as error:
            self._has_sample = False  # it costs this machine once
            self.emit(events.Warning(text=f"held-out loss: measured without a sample of the model's text: {error}"))
            return ""
        return " ".join(f"{before} ⇒ {after[len(before) :]}".split())[:LONGEST_SAMPLE]


async def decoded(tokenizer: bytes, *texts: Sequence[int]) -> list[str]:
    """Decodes ids by a run's tokenizer, in a process with limits. Raises UsageError."""

    def work() -> list[str]:
        with TokenizerProcess(tokenizer) as process:
            return [process.decode(ids) for ids in texts]

    return await asyncio.to_thread(work)
