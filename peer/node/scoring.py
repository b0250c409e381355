"""Measures what others' updates are worth, when it is this peer's turn, and tells the nodes (protocol/ledger/scoring.py).

It has the copy of θ after a round that is made beside the rounds (peer/node/evaluating.py), which everybody has alike as soon as the round is
applied, and which holds all updates u of the round. So a little more of one is taken out again, and the gain is

    loss(θ + STEP eta scale u) - loss(θ)

in nats per token, on the same sequences with and without; `scale` is the commit's. A step that is the same for all makes gains comparable, however many
tokens a replica had and however many replicas there were. What cannot be read any more, and text that does not come within SECONDS, is
not scored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from peer.corpus.text import Text
from protocol.codec import sparse
from protocol.codec.sparse import Sparse
from protocol.errors import PotluckError
from protocol.identity import Identity
from protocol.ledger import claims, part_lists, scoring
from protocol.ledger.scoring import Scoring, Turn
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire import bounds
from protocol.wire.claims import Mark, Score
from protocol.wire.commit import Commit, Contribution
from protocol.wire.encoding import Message

STEP = 0.125
SECONDS = 60.0
Update = Mapping[str, Sequence[Sparse]]
Windows = NDArray[np.int64]
Aside = Callable[..., Awaitable[Any]]
"""(work, *arguments) -> what the work gives, done where nobody waits for it."""


class Movable(Protocol):
    """A copy of the model. The first raises UsageError where there is no memory for it."""

    def __call__(self, windows: Windows, /) -> float:
        """The sum of the loss, in nats, over all predictions of windows [n, L + 1]."""
        ...

    def moved(self, update: Update, step: float, /) -> AbstractContextManager[None]:
        """Within it the parameters are those with `step` times the update added, and afterwards exactly what they were."""
        ...


class Scorer:
    """One per peer. `read`: a payload or a list of parts by its name, None where it is not here; `tell` sends to the bootstrap nodes."""

    def __init__(
        self,
        manifest: Manifest,
        identity: Identity,
        text: Text,
        tell: Callable[[Message], None],
        read: Callable[[str], bytes | None],
    ) -> None:
        self._manifest = manifest
        self._identity = identity
        self._text = text
        self._tell = tell
        self._read = read
        self._said: dict[int, Score] = {}

    def follow(self, commit: Commit, now: Scoring) -> Turn | None:
        """Tells the scores that the log does not have yet. The turn of this peer to score `commit`, the newest, None where it has none.
        `now`: what is to be scored."""
        if not self._manifest.judging.score_share:
            return None
        self._said = {n: x for n, x in self._said.items() if now.why_not(x) is None}
        for said in self._said.values():
            self._tell(said)
        turn = now.turn(commit.round)
        return turn if turn is not None and self._identity.peer_id in turn.by else None

    async def score(self, turn: Turn, log: Mapping[int, Commit], measure: Movable, aside: Aside) -> None:
        """Measures what is due, and tells it. Raises PotluckError."""
        commit, marks = log[turn.round], list[Mark]()
        pool = await self._text.held_out(scoring.HELD_OUT_POOL)
        other = pool[scoring.held_out(self._manifest, commit, len(pool))]
        plain = await aside(self._loss, measure, other)
        for contribution in commit.contributions:
            if contribution.replica not in turn.by[self._identity.peer_id]:
                continue
            try:
                assigned = await asyncio.wait_for(self._assigned(commit, contribution, log), SECONDS)
                found = await aside(self.gains, measure, contribution, assigned, other, plain)
            except (PotluckError, TimeoutError, KeyError):
                continue
            gain, elsewhere = map(bounds.reportable_gain, found)
            if gain is not None and elsewhere is not None:
                marks.append(Mark(replica=contribution.replica, assigned=gain, other=elsewhere))
        if marks:
            said = Score(peer=self._identity.peer_id, round=turn.round, marks=tuple(marks), signature=b"")
            self._said[turn.round] = claims.signed(self._identity, turn.of, said)
            self._tell(self._said[turn.round])

    async def _assigned(self, commit: Commit, of: Contribution, log: Mapping[int, Commit]) -> Windows:
        """Some of the sequences [n, L + 1] that a contribution was trained on. Raises KeyError where the plan does not say which."""
        plan = log[commit.round - 1].plan
        spec = plan.taken(of.replica, of.peers, self._manifest.model.n_layers) if plan is not None else None
        if spec is None:
            raise KeyError(of.replica)
        return await self._text.sequences(scoring.slots(self._manifest, commit, of, spec.work))

    def gains(
        self, measure: Movable, of: Contribution, assigned: Windows, other: Windows, plain: float
    ) -> tuple[float, float]:
        """Of a contribution, on assigned and on other text, whose loss without it is `plain`. Raises PotluckError, KeyError."""
        parts = (part for share in of.shares for part in part_lists.unpack(self._bytes(share.root)))
        codec, model = self._manifest.outer.codec, self._manifest.model
        update = {x.shard: sparse.decode(codec, layout.shapes(model, x.shard), self._bytes(x.digest)) for x in parts}
        before = self._loss(measure, assigned)
        with measure.moved(update, STEP * self._manifest.outer.eta * of.scale):
            return self._loss(measure, assigned) - before, self._loss(measure, other) - plain

    def _bytes(self, name: str) -> bytes:
        found = self._read(name)
        if found is None:
            raise KeyError(name)
        return found

    def _loss(self, measure: Movable, windows: Windows) -> float:
        """Nats per token."""
        rows = self._manifest.train.rows
        nats = sum(measure(windows[first : first + rows]) for first in range(0, len(windows), rows))
        return nats / max(1, windows[:, 1:].size)
