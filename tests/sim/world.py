"""A virtual clock, a bad network and bad luck, all driven by one seed. What they happen to is the code that ships.

A process is a `Peer` or a `BootstrapNode` as its command builds it, with another transport, disk, clock and inner loop.
It dies at any operation of its disk or its network: from that moment on neither does anything for it, and its tasks are
ended. It comes back with what its disk kept. After `calm_at` nothing goes wrong any more: from there on the run must
end by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer.events import Emitter, Event
from peer.net import base
from peer.net.base import Clock
from peer.net.memory import MemoryTransport
from protocol.identity import Identity
from tests.sim.disk import Files
from tests.sim.loop import VirtualLoop
from tests.sim.network import SimNetwork

NODE_POINTS = (
    "disk: append to log", "disk: appended to log", "disk: write vote", "disk: wrote vote", "disk: write a payload",
    "disk: wrote a payload", "network: send to quorum", "network: sent to quorum",
)  # fmt: skip
PEER_POINTS = (
    "disk: write a payload", "disk: wrote a payload", "disk: write offer", "disk: wrote offer", "disk: write feedback",
    "disk: wrote feedback", "disk: write a copy in memory", "disk: wrote a copy in memory",
    "disk: write a checkpoint's file", "disk: wrote a checkpoint's file",
    "disk: rename to checkpoint", "disk: renamed to checkpoint", "disk: remove", "disk: read",
)  # fmt: skip
SHARED_POINTS = (
    "disk: lock", "disk: list", "network: dial", "network: DHT", "network: send to session", "network: sent to session",
    "network: send to blob", "network: sent to blob",
)  # fmt: skip
HAVE_MEMORY = 0.8
"""Of the machines have room in memory for a copy of the feedback."""
POINTS = tuple(dict.fromkeys(NODE_POINTS + PEER_POINTS + SHARED_POINTS))
"""Where a process may die; each has to be seen, and to be deadly, in the runs of tests/sim/test_sim.py."""
OFTEN = (
    *(p for p in POINTS if p.startswith("network: ")),
    "disk: read",
    "disk: write a payload",
    "disk: wrote a payload",
)
"""Where processes come many times in each life."""
JUMP_SECONDS = 3600.0
"""How far the time of day jumps."""


BOUND = "bound"
"""Not a promise: what every promise assumes, at most f dishonest members of 3f + 1. A fault of the simulation."""


class Violation(Exception):
    """A promise was broken; `promise` names it (design of the protocol: P1 to P4), or BOUND."""

    def __init__(self, promise: str, text: str) -> None:
        super().__init__(f"{promise}: {text}")
        self.promise = promise


class Crashed(BaseException):
    """The process is dead; nothing of it goes on."""


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad it is: probabilities per message, per operation, per second, and durations in seconds."""

    drop: float
    duplicate: float
    overtake: float
    slow: float
    crash: float
    focus: str
    focus_crash: float
    power: float
    away: float
    kill: float
    partition: float
    cut: float
    heal: float
    jump: float
    fetch_failure: float
    chain_failure: float
    corrupt: float
    calm_at: float

    @classmethod
    def draw(cls, rng: random.Random, focus: str) -> Weather:
        bad = rng.choice((0.0, 0.3, 1.0, 1.0, 1.0, 2.0))
        return cls(
            drop=bad * rng.choice((0.0, 0.02, 0.1)),
            duplicate=bad * rng.choice((0.0, 0.05, 0.2)),
            overtake=bad * rng.choice((0.0, 0.05, 0.2)),
            slow=rng.choice((0.02, 0.3, 1.5)),
            crash=bad * rng.choice((0.0, 0.0002, 0.0006)),
            focus=focus,
            focus_crash=max(bad, 0.3) * rng.choice((0.02, 0.05, 0.15) if focus in OFTEN else (0.3, 0.6, 0.9)),
            power=rng.choice((0.0, 0.5)),
            away=rng.choice((2.0, 8.0, 20.0)),
            kill=bad * rng.choice((0.0, 0.001, 0.004)),
            partition=bad * rng.choice((0.0, 0.01, 0.03)),
            cut=bad * rng.choice((0.0, 0.0, 0.05, 0.2)),
            heal=rng.choice((0.05, 0.1, 0.3)),
            jump=rng.choice((0.0, 0.05)),
            fetch_failure=bad * rng.choice((0.0, 0.1, 0.3)),
            chain_failure=0.15,
            corrupt=rng.choice((0.0, 0.0, 0.0, 0.004)),
            calm_at=rng.uniform(30.0, 90.0),
        )


class Failures(logging.Handler):
    """Hears of handlers of streams that failed: what honest processes send must never make one fail."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            self._world.broken(Violation("P4", f"{record.getMessage()}: {error!r}"))


class World:
    """What all processes of a run share."""

    def __init__(self, seed: int, weather: Weather, rng: random.Random, verbose: bool) -> None:
        self.seed = seed
        self.rng = rng
        self.weather = weather
        self.verbose = verbose
        self.stats: Counter[str] = Counter()
        self.loop = VirtualLoop(random.Random(f"threads {seed}"))
        self.network = SimNetwork(self)
        self.streams = itertools.count()
        self.processes: dict[str, Process] = {}
        self.tells: Callable[[str, bytes], None] = lambda who, message: None
        """Is called with every message that a process is about to send."""
        self.loses_power: Callable[[Process], None] = lambda process: None
        """Is called when its machine has lost power."""
        self.dies: Callable[[Process], None] = lambda process: None
        """Is called when a process dies, before anything else becomes of its disk."""
        self.violation: Violation | None = None
        self.over = self.loop.create_future()
        self._islands: dict[str, int] = {}
        self._cuts: set[tuple[str, str]] = set()
        self._wall_offset = 0.0

    @property
    def now(self) -> float:
        return self.loop.time()

    @property
    def calm(self) -> bool:
        """Whether nothing goes wrong any more."""
        return self.now >= self.weather.calm_at

    def clock(self) -> Clock:
        """A process's clocks. Its time of day jumps with everybody's, an hour at a time."""
        return Clock(steady=self.loop.time, wall=lambda: 1.7e9 + self.now + self._wall_offset)

    def trace(self, who: str, text: str) -> None:
        if self.verbose:
            print(f"{self.now:9.3f}  {who[-8:]:8s} {text}")

    def chance(self, probability: float, rng: random.Random) -> bool:
        """Whether a fault of this probability happens."""
        return probability > 0 and not self.calm and rng.random() < probability

    def delay(self, rng: random.Random) -> float:
        """Seconds that something takes to get from one process to another."""
        return rng.uniform(0.005, 0.02) + rng.expovariate(1 / (0.02 if self.calm else self.weather.slow))

    def point(self, who: str, where: str) -> None:
        """Before an operation of the process `who`: raises Crashed if it dies here, or is dead."""
        process = self.processes.get(who)
        if process is not None:
            process.point(where)

    def broken(self, violation: Violation) -> None:
        """A promise was broken: the run is over."""
        if not self.over.done():
            self.violation = violation
            self.over.set_result(None)

    def parted(self, sender: str, receiver: str) -> bool:
        """Whether nothing passes from one to the other now."""
        return self._islands.get(sender) != self._islands.get(receiver) or (sender, receiver) in self._cuts

    def isolate(self, *names: str) -> None:
        """From now on nothing passes between these and all others; without names the network is whole."""
        self._islands = dict.fromkeys(names, 1)

    async def weathers(self, names: list[str], nodes: list[str]) -> None:
        """Once a second: perhaps the network falls into two parts, or is whole again; perhaps one bootstrap node hears
        another no more, or hears it again; perhaps the time of day jumps, or a process is killed."""
        rng, weather = self.rng, self.weather
        while not self.calm:
            if rng.random() < weather.heal:
                self._islands = {}
            elif not self._islands and rng.random() < weather.partition:
                self._islands = {name: rng.randrange(2) for name in names}
                self.stats["partitions"] += 1
            if rng.random() < weather.cut:
                self._cuts.add((rng.choice(nodes), rng.choice(nodes)))
                self.stats["cuts"] += 1
            self._cuts = {link for link in sorted(self._cuts) if rng.random() >= weather.heal}
            if rng.random() < weather.jump:
                self._wall_offset += rng.choice((-JUMP_SECONDS, JUMP_SECONDS))
                self.stats["jumps of the wall clock"] += 1
            for process in self.processes.values():
                if process.alive and rng.random() < weather.kill:
                    process.die("killed")
            await asyncio.sleep(1.0)
        self._islands, self._cuts = {}, set()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` and everything that it begins. Raises Violation."""
        loop = self.loop
        loop.set_exception_handler(self._heard)
        failures = Failures(self)
        base.log.addHandler(failures)
        base.log.propagate = False
        asyncio.set_event_loop(loop)
        random.seed(self.seed)
        try:
            loop.run_until_complete(work)
        finally:
            for process in self.processes.values():
                process.alive = False
            tasks = asyncio.all_tasks(loop)
            for task in sorted(tasks, key=lambda t: t.number):  # type: ignore[attr-defined]
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.close()
            asyncio.set_event_loop(None)
            base.log.removeHandler(failures)
            base.log.propagate = True
        if self.violation is not None:
            raise self.violation

    def _heard(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception) and not isinstance(error, asyncio.CancelledError):
            self.broken(Violation("P4", f"{context['message']}: {error!r}"))


class Process:
    """Something that lives, dies and comes back. `run(self)` is its life: it is called again each time."""

    def __init__(
        self, world: World, identity: Identity, run: Callable[[Process], Coroutine[Any, Any, None]], kind: str
    ) -> None:
        self.world = world
        self.identity = identity
        self.name = identity.peer_id
        self.kind = kind
        self.folder = Path("/") / self.name
        self.files = Files(has_memory=world.rng.random() < HAVE_MEMORY)
        self.alive = False
        self.finished = False
        self.lives = 0
        self.running: Any = None
        """The Peer or BootstrapNode of this life."""
        self.rng = random.Random(f"{world.seed} {self.name}")
        self._run = run
        self._task: asyncio.Task[None] | None = None
        self._transport: MemoryTransport | None = None
        world.processes[self.name] = self

    def start(self) -> None:
        """Begins a life."""
        self.alive = True
        self.lives += 1
        self.world.trace(self.name, "starts")
        self._transport = self.world.network.transport(self.name)
        self._task = asyncio.ensure_future(self._live())

    def points(self) -> Callable[[str], None]:
        """What is called before every operation of this life's disk."""
        life = self.lives

        def point(where: str) -> None:
            if life != self.lives:
                raise Crashed
            self.point(where)

        return point

    @property
    def transport(self) -> MemoryTransport:
        """This life's."""
        assert self._transport is not None
        return self._transport

    def emitter(self, hear: Callable[[Event], None]) -> Emitter:
        """For what this life tells."""
        life = self.lives

        def sink(event: Event) -> None:
            if self.alive and life == self.lives:
                hear(event)

        return Emitter(self.name, sink)

    def point(self, where: str) -> None:
        """See World.point."""
        world = self.world
        if not self.alive:
            raise Crashed
        world.stats[f"at {where}"] += 1
        weather = world.weather
        probability = weather.focus_crash if where == weather.focus else weather.crash
        if world.chance(probability, self.rng):
            world.stats[f"crash {where}"] += 1
            self.die(where)
            raise Crashed

    def die(self, where: str) -> None:
        """SIGKILL, or a loss of power: memory is gone. It comes back after a while."""
        world = self.world
        world.trace(self.name, f"DIES at {where}")
        world.stats[f"deaths of {self.kind}"] += 1
        self.alive = False
        world.dies(self)
        world.loop.call_soon(self._bury)
        if self.rng.random() < world.weather.power:
            world.stats["losses of power"] += 1
            self.files.lose_power(self.rng)
            world.loses_power(self)
        world.loop.call_later(self.rng.uniform(0.5, 2 * world.weather.away), self.start)

    def _bury(self) -> None:
        self.world.network.vanish(self.transport)
        if self._task is not None:
            self._task.cancel()

    async def _live(self) -> None:
        life = self.lives
        try:
            await self._run(self)
            self.finished = True
            self.world.trace(self.name, "has finished")
        except (Crashed, asyncio.CancelledError, BaseExceptionGroup) as error:
            if self.alive and life == self.lives and not isinstance(error, asyncio.CancelledError):
                self.world.broken(Violation("P4", f"{self.kind} {self.name[-8:]} ended by {error!r}"))
        except Exception as error:
            if self.alive and life == self.lives:
                promise = "P2" if "history of the run" in str(error) else "P3" if "work is lost" in str(error) else "P4"
                self.world.broken(Violation(promise, f"{self.kind} {self.name[-8:]} ended: {error!r}"))
        finally:
            if life == self.lives:
                self.alive = False
                self.world.network.vanish(self.transport)
