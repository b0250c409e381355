"""An inner loop of a few numbers: what a peer learns in a round is drawn, in numbers that fp32 and the feedback hold
exactly.

All members of a chain train together or not at all. `Meetings` brings them together, and sometimes tears them apart: a
member says that it cannot go on, falls silent, or two neighbours hear each other no more. Where chains *quarrel*, a
member says now and then that its neighbour lies, for no reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peer.chain.reading import StopSign
from peer.node.training import ChainOrders, InnerLoop, Result
from protocol.ledger import retention
from protocol.round.accusations import LIES
from protocol.round.member_events import TrainOrder
from protocol.run import layout
from protocol.run.manifest import Manifest
from tests.sim.world import Process, World
from tests.support import displacement

QUARREL = 0.3
"""How likely it is, where chains quarrel, that one does so when it trains."""
SILENT = "it is silent"
PATIENCE = 20.0
"""Seconds that a member waits for the others of its chain."""
SPEEDS = (10**5, 2 * 10**5, 10**6)
"""Operations a second that a peer announces; so slow that moving blocks pays."""
Array = NDArray[np.float32]
Key = tuple[int, int, int, tuple[str, ...]]
"""A chain: round, replica, generation, members."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a training. `error`: a failure; `lost`: the member that is not heard any more, with the `reason`."""

    steps: int
    error: str | None = None
    lost: str | None = None
    reason: str = SILENT


class Meetings:
    """The chains of a run: who of their members is there. `quarrel`: whether they quarrel."""

    def __init__(self, world: World, quarrel: bool = False) -> None:
        self._world = world
        self._rng = random.Random(f"chains {world.seed}")
        self.quarrel = quarrel
        self._quarrels = random.Random(f"quarrels {world.seed}") if quarrel else None
        self._present: dict[Key, dict[str, asyncio.Future[Outcome]]] = {}
        self._torn: set[Key] = set()

    def join(self, key: Key, peer: str, seconds: float, most: int) -> asyncio.Future[Outcome]:
        """Once all members are ready they train, for the longest of their seconds, at most `most` inner steps."""
        loop, members = self._world.loop, key[3]
        future: asyncio.Future[Outcome] = loop.create_future()
        together = self._present.setdefault(key, {})
        together[peer] = future
        if key in self._torn:
            self._tell(key, peer, self._rng.uniform(0.1, 3.0), Outcome(0, lost=self._other(members, peer)))
        elif set(together) == set(members):
            self._train(key, seconds, most)
        elif len(members) > 1:
            self._tell(key, peer, PATIENCE, Outcome(0, lost=self._other(members, peer)))
        return future

    def left(self, peer: str) -> None:
        """A process died: the others of its replica notice, and its chain does not come together again."""
        for key, together in self._present.items():
            if peer in together and key not in self._torn:
                self._lose(key, peer, 0.0)

    def _other(self, members: tuple[str, ...], peer: str) -> str:
        return self._rng.choice([m for m in members if m != peer] or [peer])

    def _train(self, key: Key, seconds: float, most: int) -> None:
        rng, members = self._rng, key[3]
        if self._quarrels is not None and len(members) > 1 and self._quarrels.random() < QUARREL:
            self._quarrel(key, seconds, self._quarrels)
            return
        if self._world.chance(self._world.weather.chain_failure, rng):
            self._world.stats["chains that failed"] += len(members) > 1
            at, victim = seconds * rng.random(), rng.choice(members)
            kind = rng.randrange(4)
            if kind == 0:  # it cannot go on, and says so
                self._tell(key, victim, at, Outcome(rng.randint(0, 2), error="out of memory"))
                self._lose(key, victim, at)
            elif kind == 1:  # it falls silent, and does not know it
                self._lose(key, victim, at)
                self._tell(key, victim, at + PATIENCE, Outcome(0, lost=self._other(members, victim)))
            elif kind == 2:  # its machine dies after the last step, before it offers anything
                self._finish(key, seconds, most)
                self._world.loop.call_later(seconds, self._kill, victim)
            else:
                self._part(key, at, rng.randrange(max(1, len(members) - 1)), {}, rng)
            return
        self._finish(key, seconds, most)

    def _part(self, key: Key, at: float, place: int, reasons: Mapping[str, str], rng: random.Random) -> None:
        """Two neighbours hear each other no more, the others hear of it from either; what some of them say of it."""
        members = key[3]
        for i, member in enumerate(members):
            lost = members[min(place + 1, len(members) - 1)] if i <= place else members[place]
            said = Outcome(0, lost=lost, reason=reasons.get(member, SILENT))
            self._tell(key, member, at + rng.uniform(0.1, 3.0), said)
        self._torn.add(key)

    def _quarrel(self, key: Key, seconds: float, rng: random.Random) -> None:
        """One of two neighbours says that the other one lies."""
        self._world.stats["quarrels"] += 1
        place = rng.randrange(len(key[3]) - 1)
        accuser = key[3][place + rng.randrange(2)]
        self._part(key, seconds * rng.random(), place, {accuser: f"{LIES}gradients are zero"}, rng)

    def _finish(self, key: Key, seconds: float, most: int) -> None:
        steps = self._rng.randint(1, most)
        for member in key[3]:
            self._tell(key, member, seconds + self._rng.uniform(0.0, 1.0), Outcome(steps))

    def _kill(self, peer: str) -> None:
        process = self._world.processes[peer]
        if process.alive and not self._world.calm:
            process.die("the end of its training")

    def _lose(self, key: Key, victim: str, after: float) -> None:
        self._torn.add(key)
        for member in sorted(set(self._present[key]) - {victim}):
            self._tell(key, member, after + self._rng.uniform(0.1, 3.0), Outcome(0, lost=victim))

    def _tell(self, key: Key, peer: str, after: float, outcome: Outcome) -> None:
        future = self._present[key].get(peer)

        def tell() -> None:
            incomplete = outcome.lost is not None and key not in self._torn
            if future is not None and not future.done():
                if incomplete and set(self._present[key]) == set(key[3]):
                    return  # the others came in time
                future.set_result(outcome)

        self._world.loop.call_later(after, tell)


class DrawnTrainer(InnerLoop):
    """One life's inner loop (peer.node.training.InnerLoop). `deltas`: what was learned, by round and shard."""

    def __init__(self, process: Process, meetings: Meetings, manifest: Manifest, announce: Callable[..., None]) -> None:
        self.deltas: dict[int, dict[str, list[Array]]] = {}
        self.done: dict[int, tuple[str, ...]] = {}
        """The shards of the rounds of which steps were done."""
        self._process = process
        self._meetings = meetings
        self._manifest = manifest
        self._announce = announce
        self._round = 0
        self._micro_batches = 1
        self._shards: tuple[str, ...] = ()
        self._seconds = process.rng.uniform(0.5, 6.0)

    async def train(
        self,
        order: TrainOrder,
        theta: Any,
        stop: asyncio.Event,
        end: StopSign,
        progress: Any,
        chain_orders: ChainOrders,
    ) -> Result:
        """Inner steps of one round."""
        rng = self._process.rng
        self._round = order.plan.round
        self._micro_batches = order.plan.replica(order.replica).work.micro_batches
        stopped = asyncio.ensure_future(stop.wait())
        try:
            while not order.steps:
                self._shards = retention.trained_shards(self._manifest, order.plan, self._process.name)
                plan, spec = order.plan, order.plan.replica(order.replica)
                key = (plan.round, order.replica, order.generation, spec.peers)
                meeting = self._meetings.join(key, self._process.name, self._seconds, spec.work.steps)
                following = asyncio.ensure_future(chain_orders.orders.get())
                try:
                    await asyncio.wait({meeting, following, stopped}, return_when=asyncio.FIRST_COMPLETED)
                    if meeting.done() and (lost := meeting.result().lost) is not None and not stop.is_set():
                        chain_orders.failed(order.generation, lost, meeting.result().reason)
                        await asyncio.wait({following, stopped}, return_when=asyncio.FIRST_COMPLETED)
                    if stop.is_set():
                        return self._result(rng.choice((0, 1, 2)), "the round was decided before all steps were done")
                    if not following.done():
                        return self._result(meeting.result().steps, meeting.result().error)
                    order = following.result()
                finally:
                    following.cancel()
            self._shards = retention.trained_shards(self._manifest, order.plan, self._process.name)
            return self._result(order.steps, None)
        finally:
            stopped.cancel()
            if rng.random() < 0.1 or self._meetings.quarrel:  # chains are worth something only where machines are slow
                self._announce(speed_flops=rng.choice(SPEEDS))

    def _result(self, steps: int, error: str | None) -> Result:
        error = error if steps or error else "no step was done"
        if steps:
            self.done[self._round] = self._shards
        tokens = self._manifest.train.tokens(steps, self._micro_batches)
        return Result(steps, tokens, 1.0 if steps else None, error)

    def displacement(self, shard: str) -> list[tuple[Array, Array]]:
        """θ(r-1) - θ local of the round that was trained last: whole numbers."""
        known = self.deltas.setdefault(self._round, {})
        if shard not in known:
            known[shard] = self.learned(shard)
        return displacement.of(known[shard])

    def learned(self, shard: str) -> list[Array]:
        """What this replica learned, unlike any other: whole numbers."""
        return self.drawn(shard, self._process.rng.getrandbits(64))

    def drawn(self, shard: str, seed: int) -> list[Array]:
        """Whole numbers in the shapes of a shard."""
        draw = np.random.default_rng(seed)
        return [draw.integers(-8, 9, x).astype(np.float32) for x in layout.shapes(self._manifest.model, shard)]

    def close(self) -> None:
        """The process ends, one way or another."""
        with contextlib.suppress(KeyError):
            self._meetings.left(self._process.name)


COLLUSIONS = {"nothing": (0, 0), "against": (-1, 1), "worse": (-1, 4), "alike": (0, 1), "honest": (1, 1)}
"""How often colluders' work has in it what all honest replicas learn, and what all colluders have in common."""


class CommonTrainer(DrawnTrainer):
    """What is learned has a part in common with all others. Colluders, who are `bad`, agree by round on one of
    COLLUSIONS."""

    def __init__(self, bad: bool, *rest: Any) -> None:
        super().__init__(*rest)
        self._bad = bad

    def learned(self, shard: str) -> list[Array]:
        agreed = f"{self._manifest.seed} {self._round}"
        way = random.Random(agreed).choice(list(COLLUSIONS)) if self._bad else "honest"
        common, theirs = random.Random(f"{agreed} {shard}"), random.Random(f"{agreed} {shard} bad")
        a, b = COLLUSIONS[way]
        own = self._process.rng if way == "honest" else theirs
        both = zip(*(self.drawn(shard, rng.getrandbits(64)) for rng in (common, own)), strict=True)
        return [a * x + b * y for x, y in both]
