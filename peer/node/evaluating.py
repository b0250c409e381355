"""Measures how well the run's model foretells the held-out text, when it is this peer's turn, and tells the nodes (protocol/ledger/run_state.py).

It goes on beside the rounds, on a thread that lets whoever computes go first, and holds nothing up: a figure that comes late goes into a
later commit, and one that comes too late into none. The model is a copy of θ in fp32, on the device that has room for it. A mean over the same
first sequences of the held-out part, always, so that one figure can be compared with another.

    bits per byte = nats per token / ln 2 / bytes per token

where the bytes per token are those of all the held-out part, which the corpus's index has. (Gao et al., 2020, arXiv:2101.00027, section 3.1.)

Beside the figures stands how the model goes on with the beginning of that text, by the likeliest token each time. So machines that compute
alike write alike, and one that writes something else is seen (peer/ui/run_view.py).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from tokenizers import Tokenizer

from peer import events
from peer.corpus.text import Text
from peer.corpus.tokenizer import load_tokenizer
from peer.node.aside import Aside
from peer.node.scoring import Movable, Scorer
from peer.state.storage import Shards
from protocol.errors import PotluckError
from protocol.identity import Identity
from protocol.ledger import claims, run_state
from protocol.ledger.scoring import Scoring, Turn
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest
from protocol.wire import bounds
from protocol.wire.claims import LONGEST_SAMPLE, Evaluation
from protocol.wire.commit import Commit
from protocol.wire.encoding import Message

PROMPT_IDS, SAMPLE_IDS = 16, 48
"""Tokens of the held-out text that are given to the model, and so many it adds."""


class Measure(Movable, Protocol):
    """A copy of the model, for the scorer too. Raises UsageError where there is no memory for it."""

    def goes_on(self, ids: Sequence[int], count: int, /) -> list[int]:
        """So many ids that continue these, each the likeliest one."""
        ...


@dataclass(frozen=True, slots=True)
class Tools:
    """`load(spec, theta)` copies a whole model (peer/training/inference.py); `tokenizer` fetches the file of the run's; `worker` makes
    the thread that it computes on. The `scorer`, if there is one, has the same copy when it is its turn."""

    load: Callable[[ModelSpec, Shards], Measure]
    tokenizer: Callable[[], Awaitable[bytes]]
    worker: Callable[[], ThreadPoolExecutor]
    scorer: Scorer | None = None


class Evaluator:
    """One per peer. `has_room`: whether it may take memory for a copy of the model; `tell` sends to the bootstrap nodes; `always`: whether it
    measures whatever is due, as an operator's auditor does, else in its turn. Two copies at once would be too much: the held-out loss goes
    before the scorer."""

    def __init__(
        self,
        manifest: Manifest,
        identity: Identity,
        text: Text,
        tell: Callable[[Message], None],
        emit: events.Emit,
        *,
        tools: Tools,
        has_room: bool,
        always: bool = False,
    ) -> None:
        self._scorer = tools.scorer
        self._only_scores = False
        self._manifest = manifest
        self._identity = identity
        self._text = text
        self._tell = tell
        self._emit = emit
        self._has_room = has_room
        self._always = always
        self._tools = tools
        self._tokenizer: Tokenizer | None = None
        self._task: asyncio.Task[None] | None = None
        self._said: Evaluation | None = None
        self._warned = False
        self.reads = False
        """Whether θ, as it was given, is still being read: its arrays must not be written to."""

    def follow(
        self,
        commit: Commit,
        theta: Shards,
        log: Mapping[int, Commit] = MappingProxyType({}),
        scores: Scoring | None = None,
    ) -> None:
        """Measures what is due after `commit`, the newest of `log`. `theta`: the state after it, as far as it is held here, which does not
        change as long as `reads`. `scores`: what is to be scored; None: nothing."""
        if any(x.peer == self._identity.peer_id for x in commit.evaluations):
            self._said = None
        turn, measures = self._scorer.follow(commit, scores) if self._scorer and scores else None, False
        if run_state.evaluation_is_due(self._manifest, commit):
            self._said = None
            measures = self._always or self._identity.peer_id in run_state.evaluators(self._manifest, commit)
        whole = self._has_room and theta.keys() == set(layout.shard_names(self._manifest.model))
        if whole and (measures or turn is not None):
            self._begin(commit, theta, measures, turn, log)
        if self._said is not None:
            self._tell(self._said)

    async def aclose(self) -> None:
        """Ends what is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _begin(
        self, commit: Commit, theta: Shards, measures: bool, turn: Turn | None, log: Mapping[int, Commit]
    ) -> None:
        if self._task is not None and not self._task.done():
            if not (measures and self._only_scores):
                return  # this machine is too slow for every turn: what it has begun is told if it is still wanted
            self._task.cancel()
        self.reads, self._only_scores = True, not measures
        self._task = asyncio.create_task(self._work(commit, theta, measures, turn, log))

    async def _work(
        self, commit: Commit, theta: Shards, measures: bool, turn: Turn | None, log: Mapping[int, Commit]
    ) -> None:
        """Makes the copy, and measures what is due with it."""
        task, aside = asyncio.current_task(), Aside(self._tools.worker)
        try:
            measure = await aside(self._tools.load, self._manifest.model, theta)
            self.reads = False
            if measures:
                await self._measure(commit, measure, aside)
            if turn is not None and self._scorer is not None:
                self._only_scores = True
                await self._scorer.score(turn, log, measure, aside)
        except PotluckError as error:
            if not self._warned:
                what = "held-out loss" if measures and not self._only_scores else "scores"
                self._emit(events.Warning(text=f"{what}: not measured here: {error}"))
                self._warned = True
        finally:
            aside.end()
            if self._task is task:
                self.reads = False

    async def _measure(self, commit: Commit, measure: Measure, aside: Aside) -> None:
        windows = await self._text.held_out(self._manifest.evaluated_sequences)
        nats, rows = 0.0, self._manifest.train.rows
        for first in range(0, len(windows), rows):
            nats += await aside(measure, windows[first : first + rows])
        sample = await self._sample(measure, aside, windows[0, :PROMPT_IDS].tolist()) if len(windows) else ""
        self._found(commit, len(windows), nats / windows[:, 1:].size, sample)

    async def _sample(self, measure: Measure, aside: Aside, prompt: list[int]) -> str:
        """What is told of the model's text; nothing where the tokenizer cannot be had, or the model has diverged."""
        try:
            if self._tokenizer is None:
                raw = await self._tools.tokenizer()
                self._tokenizer = await asyncio.to_thread(load_tokenizer, raw, self._manifest.tokenizer.digest)
            written = await aside(measure.goes_on, prompt, SAMPLE_IDS)
        except PotluckError:
            return ""
        before = self._tokenizer.decode(prompt)
        after = self._tokenizer.decode([*prompt, *written])[len(before) :]
        return " ".join(f"{before} ⇒ {after}".split())[:LONGEST_SAMPLE]

    def _found(self, commit: Commit, sequences: int, loss: float, sample: str) -> None:
        """Signs and tells it; a model that has diverged so far that its loss is no number has none."""
        told = bounds.reportable_loss(loss)
        if told is None:
            return
        said = Evaluation(
            peer=self._identity.peer_id,
            round=commit.round,
            sequences=sequences,
            loss=told,
            bits_per_byte=min(told / math.log(2) / self._text.index.bytes_per_token, bounds.MAX_BITS_PER_BYTE),
            signature=b"",
            sample=sample,
        )
        self._said = claims.signed(self._identity, commit.digest, said)
        self._tell(self._said)
