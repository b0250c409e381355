"""The training of one round, beside the loop that owns the state.

*Overlap.* With `overlap = 1` the inner steps of round r + 1 begin as soon as the payloads of round r are packed, and
the commit of round r is applied meanwhile. A replica takes its own pseudo-gradient δ(r) for the mean of all, and begins
at

    b(r+1) = θ(r-1) - δ(r)            where its own inner steps of round r ended

so that δ(r+1) = b(r+1) - θ_local is again the displacement of its H inner steps. The next steps begin at b(r+2) =
θ(r) - δ(r+1): the commit of round r replaces the guess. b is never sent, added or compared. A commit that gives the
replica other work than expected drops the steps done ahead. (Eager updates: Kale, Douillard, Donchev 2025.)
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from peer import events
from peer.chain.reading import StopSign
from peer.net.base import Clock, cancel
from peer.state.outer_optimizer import Accumulate, Outer, difference
from peer.state.storage import Shards
from protocol.ledger import retention, schedule
from protocol.round import member_events, stragglers
from protocol.round.member_events import TrainOrder
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit
from protocol.wire.plan import Plan

log = logging.getLogger("potluck.node")
END_SECONDS = 8.0
"""For the inner step under way when this peer ends: in a chain it may wait for a neighbour that is silent."""
SHARDS_AT_ONCE = 4
"""Shards that a device updates at a time: it works for one while the host packs another. Each needs some MB."""
Payloads = Mapping[str, list[tuple[float, bytes]]]
"""The payloads of a commit by shard: (weight, payload) in commit order."""


@dataclass(frozen=True, slots=True)
class Result:
    """The work of a round.

    loss: of its first inner step, nats per token.
    error: why steps are missing; None: all are done.
    text_seconds: the part of `seconds` spent waiting for text.
    """

    steps: int
    tokens: int
    loss: float | None
    error: str | None
    seconds: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0
    boundary_tokens: int = 0
    text_seconds: float = 0.0


NOTHING = Result(0, 0, None, None)


@dataclass(frozen=True, slots=True)
class ChainOrders:
    """The repair of a chain under way.

    failed: reports (generation, peer, reason) of a lost member.
    orders: how training goes on.
    """

    failed: Callable[[int, str, str], None]
    orders: asyncio.Queue[TrainOrder]


class InnerLoop:
    """The computing part of a peer. This base class trains nothing, as an operator's auditor."""

    def __init__(self, *made_with: object) -> None: ...

    async def train(
        self,
        order: TrainOrder,
        theta: Shards,
        stop: asyncio.Event,
        end: StopSign,
        progress: Callable[[int, float | None], None],
        chain_orders: ChainOrders,
    ) -> Result:
        """The inner steps of one round. `end` ends them after the step under way, `stop` at once and with an error."""
        return Result(0, 0, None, "it is an auditor, and does not train")

    def expect(self, slots: Sequence[range]) -> None:
        """The slots of text that are needed next, in this order; replaces former ones."""

    def displacement(self, shard: str) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """(a, b) for each tensor of a shard that was just trained: θ(r-1) - θ local is a - b, or a where b is None."""
        raise AssertionError("a peer without training has no displacement; this is a bug")

    def on_device(self, shard: str) -> Accumulate | None:
        """Computes the update of such a shard on the device; None: the host does, by `displacement`."""
        return None

    def release(self) -> None:
        """Forgets the θ of the round: no `displacement` follows."""

    def optimizer(self) -> dict[str, NDArray[np.generic]]:
        """The inner optimizer's state, by parameter name."""
        return {}

    def lacks_moments(self, shard: str) -> bool:
        """Returns whether the optimizer would begin to train this shard without moments."""
        return False

    async def moments(self, shard: str) -> bytes | None:
        """The packed moments of a shard, for another peer; None where there are none."""
        return None

    def inherit(self, shard: str, moments: bytes) -> None:
        """Takes another peer's moments for a shard that is not trained yet. Raises PayloadError if they are damaged."""

    def close(self) -> None:
        """Ends threads and processes."""


def add_to_feedback(outer: Outer, inner_loop: InnerLoop, shards: Sequence[str]) -> None:
    """Adds the displacement of these shards to the error feedback, on the device that trains where it can. Raises
    LocalError for a value that is not finite."""
    for shard in shards:
        device = _device(outer, inner_loop, shard)
        if device is not None:
            outer.accumulate_on(device, shard)
        else:
            outer.accumulate(shard, inner_loop.displacement(shard))


def _device(outer: Outer, inner_loop: InnerLoop, shard: str) -> Accumulate | None:
    """What computes the update of a shard on a device; None: the host does, as always where it is transformed."""
    return None if outer.codec.is_transformed else inner_loop.on_device(shard)


def encode_update(
    outer: Outer, inner_loop: InnerLoop, shards: Sequence[str], seed: bytes = b""
) -> Iterator[tuple[bytes, float]]:
    """As `add_to_feedback`; yields each shard's payload to offer and the L2 norm of what it sends. The bytes are the
    same on every device. seed: as for `Outer.encode`. Raises LocalError, PayloadError."""
    devices = [_device(outer, inner_loop, shard) for shard in shards]
    if shards and all(device is not None for device in devices):
        with ThreadPoolExecutor(SHARDS_AT_ONCE, "shard") as pool:
            yield from pool.map(functools.partial(outer.update, seed=seed), devices, shards)
    else:
        for shard in shards:
            add_to_feedback(outer, inner_loop, [shard])
            yield outer.encode(shard, seed=seed)


class RoundEnd:
    """A stop sign for a round of `seconds`, which trainers read towards the end of each inner step."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._overrun = stragglers.OVERRUN * seconds
        self._at = math.inf
        self._step_began = clock.steady()

    def set_in(self, seconds: float) -> None:
        """The round ends in `seconds`, or at an earlier moment that was set before."""
        self._at = min(self._at, self._clock.steady() + seconds)

    def step_begins(self) -> None:
        """An inner step begins now."""
        self._step_began = self._clock.steady()

    def is_set(self) -> bool:
        """Returns whether the moment has come, or another step as long as this one would end too late."""
        now = self._clock.steady()
        return now >= self._at or now + (now - self._step_began) > self._at + self._overrun


@dataclass(eq=False)
class Training:
    """Trains one round at a time. `put` hands events to the member machine."""

    manifest: Manifest
    peer: str
    inner_loop: InnerLoop
    emit: events.Emit
    put: Callable[[member_events.Event], None]
    clock: Clock

    def __post_init__(self) -> None:
        self.plan: Plan | None = None
        """Of the newest training, with the present members of its chain."""
        self._orders: asyncio.Queue[TrainOrder] = asyncio.Queue()
        self._stop = asyncio.Event()
        self._end = RoundEnd(self.clock, self.manifest.timing.training_seconds)
        self._task: asyncio.Task[None] | None = None
        self._results: dict[int, Result] = {}

    def begin(self, order: TrainOrder, theta: Shards, ahead: bool, commits: Mapping[int, Commit]) -> None:
        """Begins a round at `theta`.

        ahead: `theta` is the state before an undecided round (see the module's docstring).
        commits: those that are known, by round.
        """
        order = dataclasses.replace(
            order, total_steps=schedule.of(self.manifest, commits.get(max(commits, default=-1))).total_steps
        )
        stage = order.plan.replica(order.replica).stage_of(self.peer)
        self.emit(events.role(order.plan, order.replica, stage))
        self.plan, self._orders, self._stop = order.plan, asyncio.Queue(), asyncio.Event()
        self._end = RoundEnd(self.clock, self.manifest.timing.training_seconds)
        self._task = asyncio.create_task(self._train(order, self._orders, theta, ahead, self._stop, self._end))

    def resume(self, order: TrainOrder) -> None:
        """Goes on with the members of `order`."""
        assert self.plan is not None
        self.emit(
            events.ChainReconfigured(
                round=order.plan.round,
                replica=order.replica,
                generation=order.generation,
                peers=order.plan.replica(order.replica).peers,
                steps=order.steps,
            )
        )
        self.plan = order.plan
        self._orders.put_nowait(order)

    def end_in(self, round: int, seconds: float) -> None:
        """Ends the training of `round` with the last step that ends before that moment."""
        if self.plan is not None and self.plan.round == round:
            self._end.set_in(seconds)

    def stop(self) -> None:
        """Ends the training at the next step; its work is dropped."""
        self._stop.set()
        self._end.set_in(0.0)

    async def end(self) -> None:
        """Stops, and waits END_SECONDS for the inner step under way, which is then given up."""
        self.stop()
        if self._task is not None:
            try:
                await asyncio.wait({self._task}, timeout=END_SECONDS)
            finally:
                await cancel(self._task)

    def result(self, round: int) -> Result:
        """The work of a round."""
        return self._results.get(round, NOTHING)

    def forget(self, round: int) -> Result:
        """The work of a round, once; drops it and those before."""
        found = self.result(round)
        self._results = {r: x for r, x in self._results.items() if r > round}
        return found

    async def _train(
        self,
        order: TrainOrder,
        orders: asyncio.Queue[TrainOrder],
        theta: Shards,
        ahead: bool,
        stop: asyncio.Event,
        end: RoundEnd,
    ) -> None:
        began = last = self.clock.steady()
        plan, done = order.plan, 0
        step_tokens = self.manifest.train.tokens(1, plan.replica(order.replica).work.micro_batches)

        def progress(step: int, loss: float | None) -> None:
            nonlocal last, done
            now, done = self.clock.steady(), step
            self.emit(events.Step(round=plan.round, step=step, loss=loss, tokens=step_tokens, seconds=now - last))
            last = now
            end.step_begins()

        def failed(generation: int, peer: str, reason: str) -> None:
            self.emit(events.ChainFailed(round=plan.round, generation=generation, peer=peer, reason=reason))
            self.put(member_events.ChainFailed(plan.round, generation, peer, reason))

        try:
            if ahead:
                theta = await asyncio.to_thread(self._ahead, plan, theta)
            result = await self.inner_loop.train(order, theta, stop, end, progress, ChainOrders(failed, orders))
        except asyncio.CancelledError:
            self._results[plan.round] = dataclasses.replace(NOTHING, steps=done, tokens=done * step_tokens)
            raise
        except Exception as error:  # else the round would wait for us without a reason
            log.exception("training of round %d failed", plan.round)
            reason = (str(error).splitlines() or [""])[0]
            result = dataclasses.replace(NOTHING, error=f"training: {type(error).__name__}: {reason}; this is a bug")
        self._results[plan.round] = dataclasses.replace(result, seconds=self.clock.steady() - began)
        if result.error is None:
            self.put(member_events.Trained(plan.round, result.steps, result.tokens, result.loss))
        else:
            self.emit(events.Withdrew(round=plan.round, reason=result.error))
            self.put(member_events.Failed(plan.round, result.steps, result.error))

    def _ahead(self, plan: Plan, theta: Shards) -> Shards:
        """b of a round whose predecessor is not decided; `theta`: the state before that one."""
        trained = retention.trained_shards(self.manifest, plan, self.peer)
        moved = {s: zip(theta[s], difference(self.inner_loop.displacement(s)), strict=False) for s in trained}
        return theta | {s: [t - d for t, d in pairs] for s, pairs in moved.items()}
