"""A virtual clock, a bad network and bad luck, all driven by one random number generator.

Nodes run real state machines; this module decides when an event happens and what goes wrong: messages are dropped, delayed,
doubled and overtaken, sessions break, the network falls apart and heals, processes die at any boundary between two effects. After `calm_at` nothing goes
wrong any more: from there on the run must end by itself.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protocol.wire.commit import Record
from protocol.wire.encoding import Message, decode, encode

BOUNDARIES = (
    "before Train", "after Train", "before EncodeUpdate", "payload durable", "offer durable", "record durable", "before UpdateEncoded", "before Send",
    "after Send", "before RestoreFeedback", "after RestoreFeedback", "give-back durable", "before Apply", "theta changed", "after Apply", "before KeepInFeedback",
    "before HoldShards", "after HoldShards", "before Finish", "checkpoint written", "before Fetch", "payload held",
    "before Propose", "before ChainReconfig", "before Resume", "before Save", "vote durable", "before Send", "after Send", "before Append", "log durable", "before broadcast",
    "half broadcast", "before Done",
)  # fmt: skip
"""Where a process may die."""
ONCE = "before Finish"
"""A process comes there once in its life, and seldom while anything goes wrong."""
DECIDING = ("vote durable", "before Send", "after Send", "log durable", "before broadcast")
"""Those at which a bootstrap node knows more than the others."""


class Crash(Exception):
    """The process dies here."""


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad it is: probabilities per message, per boundary, per tick of a peer, and durations in seconds."""

    drop: float
    duplicate: float
    delay: float
    boundary: float
    focus: tuple[str, ...]
    away: float
    focus_boundary: float
    kill: float
    disconnect: float
    partition: float
    heal: float
    cut: float
    fetch_failure: float
    corrupt: float
    calm_at: float

    @classmethod
    def draw(cls, rng: random.Random) -> Weather:
        bad = rng.choice((0.0, 0.3, 1.0, 1.0, 1.0, 2.0))
        return cls(
            drop=bad * rng.choice((0.0, 0.02, 0.1)),  # up to 20 %
            duplicate=bad * rng.choice((0.0, 0.05, 0.2)),
            delay=rng.choice((0.05, 0.5, 3.0)),
            boundary=bad * rng.choice((0.002, 0.005, 0.01)),
            focus=rng.choice(((rng.choice(BOUNDARIES),), (rng.choice(BOUNDARIES),), DECIDING)),
            away=rng.choice((8.0, 8.0, 30.0)),
            focus_boundary=bad * rng.choice((0.05, 0.1, 0.2)),
            kill=bad * rng.choice((0.0, 0.0005, 0.002)),
            disconnect=bad * rng.choice((0.0, 0.002, 0.01)),
            partition=bad * rng.choice((0.0, 0.005, 0.02)),
            heal=rng.choice((0.03, 0.1, 0.3)),
            cut=bad * rng.choice((0.0, 0.0, 0.05, 0.3)),
            fetch_failure=rng.choice((0.0, 0.1, 0.4)),
            corrupt=rng.choice((0.0, 0.0, 0.0, 0.002)),
            calm_at=rng.uniform(60.0, 300.0),
        )


class World:
    """The clock, the heap of what will happen, and the faults."""

    def __init__(self, rng: random.Random, weather: Weather, wire: bool, verbose: bool) -> None:
        self.rng = rng
        self.weather = weather
        self.wire = wire
        self.verbose = verbose
        self.now = 0.0
        self.stats: Counter[str] = Counter()
        self.islands: dict[str, int] = {}
        self.cuts: set[tuple[str, str]] = set()
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0

    @property
    def calm(self) -> bool:
        """Whether nothing goes wrong any more."""
        return self.now >= self.weather.calm_at

    def at(self, delay: float, do: Callable[..., None], *arguments: Any) -> None:
        """Does it `delay` seconds from now."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay, self._sequence, do, arguments))

    def run(self, until: float, over: Callable[[], bool]) -> bool:
        """Lets time pass until `over()` or `until`; whether it is over."""
        while self._heap and not over():
            if self._heap[0][0] > until:
                self.now = until
                return False
            self.now, _, do, arguments = heapq.heappop(self._heap)
            do(*arguments)
        return over()

    def trace(self, who: str, text: str) -> None:
        if self.verbose:
            print(f"{self.now:9.3f}  {who:7s} {text}")

    def chance(self, probability: float) -> bool:
        """A fault happens, with this probability, while the weather is bad."""
        return not self.calm and self.rng.random() < probability

    def boundary(self, who: str, where: str) -> None:
        """A place between two effects: raises Crash if the process dies here."""
        assert where in BOUNDARIES, where
        weather = self.weather
        self.stats[f"at {where}"] += 1
        probability = weather.focus_boundary if where in weather.focus else weather.boundary
        if self.chance(20 * probability if where == ONCE else probability):
            self.stats[f"crash {where}"] += 1
            self.trace(who, f"CRASH {where}")
            raise Crash(where)

    def weathers(self, names: list[str], nodes: list[str]) -> None:
        """Once a second: perhaps the network falls into two parts, or is whole again; perhaps one bootstrap node hears another
        no more, or hears it again."""
        if self.calm or self.rng.random() < self.weather.heal:
            self.islands = {}
        elif not self.islands and self.chance(self.weather.partition):
            self.islands = {name: self.rng.randrange(2) for name in names}
            self.stats["partitions"] += 1
            self.trace("world", f"falls apart: {self.islands}")
        if self.chance(self.weather.cut):
            self.cuts.add((self.rng.choice(nodes), self.rng.choice(nodes)))
            self.stats["cuts"] += 1
        self.cuts = {link for link in sorted(self.cuts) if not self.calm and self.rng.random() >= self.weather.heal}
        if not self.calm:
            self.at(1.0, self.weathers, names, nodes)

    def parted(self, a: str, b: str) -> bool:
        """Whether nothing passes between two nodes now."""
        return self.islands.get(a) != self.islands.get(b)

    def send(
        self, sender: str, to: str, message: Message | Record, deliver: Callable[[Message | Record], None]
    ) -> None:
        """Delivers a message some time, perhaps never, perhaps twice, perhaps after later ones."""
        if self.parted(sender, to) or (sender, to) in self.cuts:
            self.stats["cut off"] += 1
            return
        if self.wire and not isinstance(message, Record):  # the votes of a simulated record are no real signatures
            message = decode(encode(message), sender)
        copies = 0 if self.chance(self.weather.drop) else 2 if self.chance(self.weather.duplicate) else 1
        self.stats["dropped" if copies == 0 else "doubled" if copies == 2 else "sent"] += 1
        for _ in range(copies):
            slow = 0.05 if self.calm else self.weather.delay
            self.at(self.rng.uniform(0.01, 0.02) + self.rng.expovariate(1 / slow), deliver, message)


class Node:
    """A process that can die and come back; what it schedules dies with it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = False
        self.life = 0

    def later(self, delay: float, do: Callable[..., None], *arguments: Any) -> None:
        """Does it later in this life."""
        self.world.at(delay, self._in_life, self.life, do, arguments)

    def post(self, delay: float, do: Callable[..., None], *arguments: Any) -> None:
        """Does it later, in whatever life this process has then."""
        self.world.at(delay, self._if_alive, do, arguments)

    def _if_alive(self, do: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.alive:
            self.guarded(do, *arguments)

    def _in_life(self, life: int, do: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.alive and self.life == life:
            self.guarded(do, *arguments)

    def guarded(self, do: Callable[..., None], *arguments: Any) -> None:
        """Runs a piece of the process; a Crash in it is the end of this life."""
        try:
            do(*arguments)
        except Crash:
            self.die()

    def die(self) -> None:
        """SIGKILL: memory is gone, the disk stays; restarts after a while."""
        self.alive = False
        self.life += 1
        self.world.stats[f"deaths {type(self).__name__}"] += 1
        self.lost()
        self.world.at(self.world.rng.uniform(0.5, 2 * self.world.weather.away), self.start)

    def start(self) -> None:
        self.alive = True
        self.world.trace(self.name, "starts")
        self.guarded(self.started)

    def boundary(self, where: str) -> None:
        self.world.boundary(self.name, where)

    def trace(self, text: str) -> None:
        self.world.trace(self.name, text)

    def lost(self) -> None:
        """Forget everything that is not on disk."""
        raise NotImplementedError

    def started(self) -> None:
        """Come up from what is on disk."""
        raise NotImplementedError
