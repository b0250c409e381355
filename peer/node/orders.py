"""What passes between the loop that owns a peer's state and the part of it that computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from peer.chain.stop_sign import StopSign
from peer.state.outer_optimizer import Accumulate
from peer.state.storage import Shards
from protocol.ledger.audits import Audits
from protocol.round.member_events import TrainOrder
from protocol.wire.commit import Commit


@dataclass(frozen=True, slots=True)
class Result:
    """What was done of a round. `error`: why not all steps were, None where they were. `seconds`: that it took; for `text_seconds` of
    them it waited for text."""

    steps: int
    tokens: int
    loss: float | None
    error: str | None
    seconds: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0
    boundary_tokens: int = 0
    text_seconds: float = 0.0


Payloads = Mapping[str, list[tuple[float, bytes]]]
"""Of a commit, by shard: (weight, payload) in commit order."""


class Examiner(Protocol):
    """Who trains others' contributions again; see peer/node/examining.py for the real one."""

    @property
    def keeps(self) -> bool:
        """Whether the arrays of some state, as it was given, must not be written to."""
        ...

    def follow(self, before: Commit | None, commit: Commit, theta: Shards, payloads: Payloads, due: Audits) -> None:
        """`commit` is about to be applied to `theta`, of which no array changes as long as `keeps`. `before`: the commit before it; `due`: what is
        to be trained again by the newest commit."""
        ...


@dataclass(frozen=True, slots=True)
class ChainOrders:
    """How a training tells (generation, peer, reason) that its chain lost a member, and is told how it goes on."""

    failed: Callable[[int, str, str], None]
    orders: asyncio.Queue[TrainOrder]


class InnerLoop(Protocol):
    """The part of a peer that computes; see peer/node/inner_loop.py for the real one."""

    async def train(
        self,
        order: TrainOrder,
        theta: Shards,
        stop: asyncio.Event,
        end: StopSign,
        progress: Callable[[int, float | None], None],
        chain_orders: ChainOrders,
    ) -> Result:
        """Inner steps of one round. Ends after the step under way when `end` is set, and early, with an error, when `stop` is."""
        ...

    def expect(self, slots: Sequence[range]) -> None:
        """The slots of text that will be read soon, in this order; replaces what was expected before."""
        ...

    def displacement(self, shard: str) -> list[tuple[NDArray[np.float32], NDArray[np.float32] | None]]:
        """(a, b) for each tensor of a shard that was just trained: θ(r-1) - θ local is a - b, or a where b is None."""
        ...

    def on_device(self, shard: str) -> Accumulate | None:
        """What works out the update of such a shard on the device that trains; None where that is the host's work, by `displacement`."""
        ...

    def release(self) -> None:
        """Forgets the θ that was trained from: `displacement` is not asked for any more."""
        ...

    def optimizer(self) -> dict[str, NDArray[np.generic]]:
        """The inner optimizer's state, for a checkpoint."""
        ...

    def lacks_moments(self, shard: str) -> bool:
        """Whether the inner optimizer would begin to train this shard without moments."""
        ...

    async def moments(self, shard: str) -> bytes | None:
        """The inner optimizer's moments of a shard, for a peer that begins to train it; None where there are none."""
        ...

    def inherit(self, shard: str, moments: bytes) -> None:
        """Begins to train the shard, should it do so, with another peer's moments. Raises PayloadError if they cannot be."""
        ...

    def close(self) -> None:
        """Ends what it runs."""
        ...
