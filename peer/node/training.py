"""The training of one round, which runs beside the loop that owns the state and tells the machine how it ended.

*Overlap.* With `overlap = 1` the inner steps of round r + 1 begin as soon as the payloads of round r are packed, and the commit
of round r is applied while they go on. What the commit will bring is not known yet; a replica takes its own pseudo-gradient
δ(r) for the mean of all, and begins at

    b(r+1) = θ(r-1) - δ(r)            where its own inner steps of round r ended

so that δ(r+1) = b(r+1) - θ_local is again just the displacement of its H inner steps. One round late comes the correction: the
next steps begin at b(r+2) = θ(r) - δ(r+1), that is, at θ_local + (θ(r) - b(r+1)): the commit of round r has taken the place of
the guess. θ and the error feedback know nothing of this (P1 to P3 hold as without it): b is where gradients are taken, never
what is sent, added or compared. A commit that gives the replica other work than expected (protocol/round/member.py) drops what was
done ahead. (Eager updates: Kale, Douillard, Donchev 2025.)
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping

from peer import events
from peer.net.clock import Clock
from peer.node.orders import ChainOrders, InnerLoop, Result
from peer.state.outer_optimizer import difference
from peer.state.storage import Shards
from protocol.ledger import retention, schedule
from protocol.round import member_events, stragglers
from protocol.round.member_events import TrainOrder
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit
from protocol.wire.plan import Plan

log = logging.getLogger("potluck.node")
NOTHING = Result(0, 0, None, None)
END_SECONDS = 8.0
"""That an inner step may still take when this peer is asked to end: in a chain it may be waiting for somebody who does not answer."""


class RoundEnd:
    """When a round of so many `seconds` ends: a sign that a trainer looks at towards the end of each inner step."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._overrun = stragglers.OVERRUN * seconds
        self._at = math.inf
        self._step_began = clock.steady()

    def set_in(self, seconds: float) -> None:
        """It is over in so many seconds, unless that was said of an earlier moment."""
        self._at = min(self._at, self._clock.steady() + seconds)

    def step_begins(self) -> None:
        """An inner step begins now."""
        self._step_began = self._clock.steady()

    def is_set(self) -> bool:
        """Whether the moment has come, or one more step like this one would end too late."""
        now = self._clock.steady()
        return now >= self._at or now + (now - self._step_began) > self._at + self._overrun


class Training:
    """One per peer; it trains one round at a time. `put` hands events to the member machine."""

    def __init__(
        self,
        manifest: Manifest,
        peer: str,
        inner_loop: InnerLoop,
        emit: events.Emit,
        put: Callable[[member_events.Event], None],
        clock: Clock,
    ) -> None:
        self.manifest = manifest
        self.peer = peer
        self.plan: Plan | None = None
        """What is trained, or was trained last, with the members that its chain has now."""
        self._inner_loop = inner_loop
        self._emit = emit
        self._put = put
        self._clock = clock
        self._orders: asyncio.Queue[TrainOrder] = asyncio.Queue()
        self._stop = asyncio.Event()
        self._end = RoundEnd(clock, manifest.timing.training_seconds)
        self._task: asyncio.Task[None] | None = None
        self._results: dict[int, Result] = {}

    def begin(self, order: TrainOrder, theta: Shards, ahead: bool, commits: Mapping[int, Commit]) -> None:
        """Trains from `theta`. `ahead`: it is the state before the round whose commit is waited for (see the module's docstring); `commits`: those
        that are known, by round."""
        order = dataclasses.replace(
            order, total_steps=schedule.of(self.manifest, commits.get(max(commits, default=-1))).total_steps
        )
        stage = order.plan.replica(order.replica).stage_of(self.peer)
        self._emit(events.role(order.plan, order.replica, stage))
        self.plan, self._orders, self._stop, self._end = (
            order.plan,
            asyncio.Queue(),
            asyncio.Event(),
            RoundEnd(self._clock, self.manifest.timing.training_seconds),
        )
        self._task = asyncio.create_task(self._train(order, self._orders, theta, ahead, self._stop, self._end))

    def resume(self, order: TrainOrder) -> None:
        """The training goes on with the members that `order` names."""
        assert self.plan is not None
        self._emit(
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
        """Ends the training of `round` with the last step that ends before that moment; what is done then is its work."""
        if self.plan is not None and self.plan.round == round:
            self._end.set_in(seconds)

    def stop(self) -> None:
        """Ends the training at the next step: it is of no use any more."""
        self._stop.set()
        self._end.set_in(0.0)

    async def end(self) -> None:
        """Stops, and waits for the end of the inner step under way, END_SECONDS at most: then that step is given up, and those before it
        stay done."""
        self.stop()
        if self._task is not None:
            try:
                await asyncio.wait({self._task}, timeout=END_SECONDS)
            finally:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)

    def result(self, round: int) -> Result:
        """What was done of a round that is not forgotten."""
        return self._results.get(round, NOTHING)

    def forget(self, round: int) -> Result:
        """The same; it and those before it are not asked for any more."""
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
        began = last = self._clock.steady()
        plan, done = order.plan, 0
        step_tokens = self.manifest.train.tokens(1, plan.replica(order.replica).work.micro_batches)

        def progress(step: int, loss: float | None) -> None:
            nonlocal last, done
            now, done = self._clock.steady(), step
            self._emit(events.Step(round=plan.round, step=step, loss=loss, tokens=step_tokens, seconds=now - last))
            last = now
            end.step_begins()

        def failed(generation: int, peer: str, reason: str) -> None:
            self._emit(events.ChainFailed(round=plan.round, generation=generation, peer=peer, reason=reason))
            self._put(member_events.ChainFailed(plan.round, generation, peer, reason))

        try:
            if ahead:
                theta = await asyncio.to_thread(self._ahead, plan, theta)
            result = await self._inner_loop.train(order, theta, stop, end, progress, ChainOrders(failed, orders))
        except asyncio.CancelledError:
            self._results[plan.round] = dataclasses.replace(NOTHING, steps=done, tokens=done * step_tokens)
            raise
        except Exception as error:  # else the round would wait for us, and nobody would know why
            log.exception("training of round %d failed", plan.round)
            reason = (str(error).splitlines() or [""])[0]
            result = dataclasses.replace(NOTHING, error=f"training: {type(error).__name__}: {reason}; this is a bug")
        self._results[plan.round] = dataclasses.replace(result, seconds=self._clock.steady() - began)
        if result.error is None:
            self._put(member_events.Trained(plan.round, result.steps, result.tokens, result.loss))
        else:
            self._emit(events.Withdrew(round=plan.round, reason=result.error))
            self._put(member_events.Failed(plan.round, result.steps, result.error))

    def _ahead(self, plan: Plan, theta: Shards) -> Shards:
        """b of a round whose predecessor is not decided; `theta`: before that one."""
        trained = retention.trained_shards(self.manifest, plan, self.peer)
        moved = {s: zip(theta[s], difference(self._inner_loop.displacement(s)), strict=True) for s in trained}
        return theta | {s: [t - d for t, d in pairs] for s, pairs in moved.items()}
