"""Lives of paced swarms in which a peer's role changes, each decided by its seed: the others' rounds must not be a
second longer.

    python -m tests.sim.roles --seeds 0:1000

Full replicas and a chain train for some rounds. Then, by the seed, a newcomer joins over a slow line; or a member of
the chain becomes slower, so that blocks move over its slow line; or a peer that was away for some rounds comes back.
The run lasts until the new role is trained and committed, and two rounds more. Held up is a round that lasts a second
longer than the longest one before the event. What a slow line's own offers take, once it trains, is for the grace
(protocol/round/stragglers.py).
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from protocol.codec import sparse
from protocol.planning import partition
from protocol.round.stragglers import GRACE_SHARE
from protocol.run import layout
from protocol.run.layout import ModelSpec
from tests.sim import paces
from tests.sim.paces import Committed, Machine, PacedSwarm

SECONDS = 30.0
"""Of a round."""
LONGER = 1.0
"""Seconds that a round may last longer."""
WARM = 3
"""Rounds until everybody's pace is known, and one more."""
BUSY = 0.8
"""Of what a replica trains in a round, at least, whichever peer moves."""
PATIENCE = 24
"""Rounds in which the new role must begin."""
KINDS = ("newcomer", "mover", "returning")
MODEL = ModelSpec(vocab_size=128, d_model=64, n_layers=4, n_heads=2, d_ff=256, context=8, residual_width=16)
PACES = (0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Life:
    """A seed's result: `took`: rounds until the new role was committed; `broken`: the promises not kept."""

    seed: int
    kind: str
    took: int
    broken: str


class Event:
    """One seed's swarm and what happens to it."""

    def __init__(self, seed: int) -> None:
        self.kind = KINDS[seed % len(KINDS)]
        draw = self.draw = random.Random(seed)
        self.full = draw.randint(1, 3)
        machines = [Machine(draw.choice(PACES)) for _ in range(self.full)]
        pace = draw.choice(PACES)
        chain = [Machine(pace, whole=False, half=True) for _ in range(2)]
        machines += chain
        self.manifest = paces.manifest(
            SECONDS, len(machines), model=MODEL, checkpoint_rounds=draw.choice((1, 3)), overlap=draw.choice((0, 1))
        )
        slow = 8 * paces.state_bytes(self.manifest) / (draw.uniform(0.2, 6.0) * SECONDS)
        self.begin = len(machines)
        if self.kind == "mover":
            for machine in chain:
                machine.down = 8 * layout.shard_bytes(MODEL, "block.1") / (draw.uniform(0.3, 1.5) * SECONDS)
        self.line = 0.0
        """Seconds that a newcomer's line takes for the others' updates of a round, and for its own."""
        if self.kind == "newcomer":
            machines.append(Machine(draw.choice(PACES), up=max(slow, 1e6), down=slow))
            codec, names = self.manifest.outer.codec, layout.shard_names(MODEL)
            update = 8 * sum(sparse.max_payload_size(codec, layout.shapes(MODEL, name)) for name in names)
            self.line = (self.full + 1) * update / slow + update / max(slow, 1e6)
        self.swarm = PacedSwarm(machines, self.manifest, seed)
        self.began = self.done = 0

    @property
    def newest(self) -> Committed:
        return self.swarm.commits[-1]

    async def until(self, reached: Callable[[], bool]) -> None:
        """Round by round."""
        while not reached() and self.newest.round < self.began + PATIENCE:
            await self.swarm.round(self.newest.round + 1)

    async def script(self, swarm: PacedSwarm) -> None:
        await swarm.round(WARM)
        happens = {"newcomer": self.newcomer, "mover": self.mover, "returning": self.returning}[self.kind]
        reached = await happens()
        self.began = self.newest.round
        await self.until(reached)
        self.done = self.newest.round if reached() else 0
        await swarm.round(self.newest.round + 2)

    async def newcomer(self) -> Callable[[], bool]:
        peer = self.swarm.peers[-1]
        peer.start()
        return lambda: self.trains(peer.identity.peer_id)

    async def mover(self) -> Callable[[], bool]:
        """A member of the chain is slower from the middle of a round on; blocks of others move too."""
        member = self.draw.randrange(self.full, self.begin)
        moved = len(self.moves())
        self.swarm.machines[member].pace *= self.draw.uniform(2.5, 4.0)
        return lambda: len(self.moves()) > moved

    async def returning(self) -> Callable[[], bool]:
        peer = self.swarm.peers[self.draw.randrange(self.full)]
        peer.die("killed")
        away = self.newest.round + self.draw.randint(2, 4)
        while self.newest.round < away:
            await self.swarm.round(self.newest.round + 1)
        peer.start()
        return lambda: self.trains(peer.identity.peer_id)

    def trains(self, peer: str) -> bool:
        """Whether the newest commit counts this peer's work, in a replica of the plan or in a seat."""
        before = self.swarm.plans[-2]
        seated = any(seat.number in self.newest.tokens for seat in before.seats)
        return seated or any(peer in r.peers for r in before.replicas if r.number in self.newest.tokens)

    def moves(self) -> list[Any]:
        """All moves of blocks within the chain so far."""
        plans = self.swarm.plans
        return [move for a, b in itertools.pairwise(plans) for move in partition.moves(a, b)]

    def live(self) -> tuple[int, str]:
        """Rounds that it took, and what was not kept."""
        self.swarm.run(self.script, begin=self.begin)
        durations = self.swarm.durations()
        usual = max(durations[r] for r in range(2, WARM + 1))
        if not self.done:
            return 0, f"the {self.kind} had no new role after {PATIENCE} rounds"
        quiet = {r: durations[r] for r in range(self.began + 1, self.done)}
        later = {r: s for r, s in durations.items() if r >= self.done}
        long = {r: round(s, 2) for r, s in quiet.items() if s > usual + LONGER}
        slow = {r: round(s, 2) for r, s in later.items() if s > (1 + GRACE_SHARE) * SECONDS + LONGER + self.line}
        left = [c.left_out for c in self.swarm.commits if c.round > self.began and c.left_out]
        idle = self.idle()
        if long or slow or left or idle:
            return 0, f"rounds of {usual:.2f} s: {long or slow} held up, left out {left}, {idle} idle"
        return self.done - self.began, ""

    def idle(self) -> dict[int, list[int]]:
        """The tokens of each replica, round by round, that lost work in any: the first of them is as it was, or as slow
        as its member has become. The round after the event is not among them: it may have begun before."""
        since = [c.tokens for c in self.swarm.commits if c.round > WARM + 1]
        by_number = {number: [t[number] for t in since if number in t] for t in since for number in t}
        return {n: tokens for n, tokens in by_number.items() if min(tokens) < BUSY * tokens[0]}


def live(seed: int) -> Life:
    """One seed."""
    event = Event(seed)
    took, broken = event.live()
    return Life(seed, event.kind, took, broken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", required=True, help="FIRST:LAST, LAST not included")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    chosen = parser.parse_args()
    first, last = map(int, chosen.seeds.split(":"))
    began, found = time.monotonic(), Counter[str]()
    broken = 0
    with ProcessPoolExecutor(chosen.jobs) as pool:
        for one in pool.map(live, range(first, last), chunksize=4):
            found[one.kind] += 1
            if one.broken:
                broken += 1
                print(f"seed {one.seed}: {one.kind}: {one.broken}", flush=True)
    print(f"{last - first} runs, {time.monotonic() - began:.0f} s: {dict(found)}; {broken} with a round held up")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
