"""A simulated swarm of machines of different paces and lines, in calm weather: what of all that they can train reaches
commits.

The processes are the real `Peer` and `BootstrapNode` (tests/sim/world.py). Training takes as long as the machine's pace
says, inner step by inner step; a chain goes as fast as its slowest stage. What is sent takes as long as the sender's
uplink and the receiver's downlink need for it, one after the other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bootstrap.archive import Archive
from bootstrap.node import BootstrapNode
from peer import events
from peer.chain.reading import StopSign
from peer.events import Event
from peer.net.link_monitor import LIMIT_SHARE
from peer.node.audit import held_out_text
from peer.node.peer import Factories, Peer
from peer.node.training import ChainOrders, InnerLoop, Result
from peer.state.storage import Storage
from protocol.identity import Identity
from protocol.planning import partition
from protocol.round.member_events import TrainOrder
from protocol.run import layout
from protocol.run.manifest import Manifest, OuterSpec, TimingSpec
from tests.sim.disk import SimDisk
from tests.sim.world import Process, Weather, World
from tests.support import displacement, machines, tiny

CALM = Weather(
    drop=0.0, duplicate=0.0, overtake=0.0, slow=0.02, crash=0.0, focus="", focus_crash=0.0, power=0.0, away=1e9,
    kill=0.0, partition=0.0, cut=0.0, heal=1.0, jump=0.0, fetch_failure=0.0, chain_failure=0.0, corrupt=0.0,
    calm_at=0.0,
)  # fmt: skip
LEARNING = 0.01
OWN = ("block.0",)
"""Shards of which each learns something of its own, and much more than of the others."""


@dataclass(slots=True)
class Machine:
    """`pace`: seconds of an inner step of the whole model. `up`, `down`: bits a second. `whole`: it can train the whole
    model; else three such, or with `half` two, make a chain."""

    pace: float
    up: float = 20e6
    down: float = 100e6
    whole: bool = True
    half: bool = False


@dataclass(slots=True)
class Together:
    """A replica that trains in lockstep: its members, once they are there."""

    size: int
    members: dict[str, tuple[StopSign, Callable[[int, float | None], None], float]] = field(default_factory=dict)
    done: asyncio.Future[int] | None = None
    training: asyncio.Task[None] | None = None


class Floor:
    """Where the members of replicas meet and train."""

    def __init__(self) -> None:
        self._replicas: dict[object, Together] = {}

    async def train(
        self,
        key: object,
        size: int,
        most: int,
        who: str,
        seconds: float,
        end: StopSign,
        progress: Callable[[int, float | None], None],
    ) -> int:
        """The inner steps of member `key` of `size`, at most `most`; `seconds`: of a step of this one."""
        loop = asyncio.get_running_loop()
        here = self._replicas.setdefault(key, Together(size))
        if who in here.members:  # it died since then
            here = self._replicas[key] = Together(size)
        here.members[who] = (end, progress, seconds)
        if here.done is None:
            here.done = loop.create_future()
        if len(here.members) == size:
            here.training = loop.create_task(self._steps(here, most))
        return await asyncio.shield(here.done)

    async def _steps(self, here: Together, most: int) -> None:
        steps, over = 0, False
        while steps < most and not over:
            await asyncio.sleep(max(seconds for _, _, seconds in here.members.values()))
            steps += 1
            over = any(end.is_set() for end, _, _ in list(here.members.values()))
            for _, progress, _ in here.members.values():
                progress(steps, 1.0)
        here.done.set_result(steps)


class PacedTrainer(InnerLoop):
    """An inner loop that lasts as long as its machine's pace says; what it learns is drawn."""

    def __init__(
        self,
        floor: Floor,
        machine: Machine,
        own: Collection[str],
        peer: str,
        manifest: Manifest,
        announce: Callable[..., None],
    ) -> None:
        self._floor, self._machine, self._own, self._peer = floor, machine, own, peer
        self._manifest, self._announce = manifest, announce
        self._round = 0

    async def train(
        self,
        order: TrainOrder,
        theta: Any,
        stop: asyncio.Event,
        end: StopSign,
        progress: Callable[[int, float | None], None],
        chain_orders: ChainOrders,
    ) -> Result:
        """Inner steps of one round."""
        self._round = order.plan.round
        replica = order.plan.replica(order.replica)
        stage, work, train = replica.stage_of(self._peer), replica.work, self._manifest.train
        share = (stage.last - stage.first) / self._manifest.model.n_layers
        seconds = self._machine.pace * share * work.micro_batches / train.micro_batches
        operations = partition.stage_operations(self._manifest)[stage.first, stage.last]
        self._announce(speed_flops=max(1, round(operations * train.micro_batches / (self._machine.pace * share))))
        key = (order.plan.round, order.replica, order.generation, replica.peers)
        training = asyncio.ensure_future(
            self._floor.train(key, len(replica.stages), work.steps, self._peer, seconds, end, progress)
        )
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait({training, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not training.done():
            training.cancel()
            return Result(0, 0, None, "the round was decided before all steps were done")
        steps = training.result()
        return Result(steps, train.tokens(steps, work.micro_batches), 1.0, None)

    def displacement(self, shard: str) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """θ(r-1) - θ local: the same for all but large values in `own` shards, or they would be judged to be copies."""
        own = shard in self._own
        draw = np.random.default_rng([*self._peer.encode(), *shard.encode(), self._round] if own else len(shard))
        shapes = layout.shapes(self._manifest.model, shard)
        scale = LEARNING * (100 if own else 1)
        return displacement.of(scale * draw.standard_normal(shape, dtype=np.float32) for shape in shapes)


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit: when it was decided, and the tokens of each replica, by number."""

    at: float
    round: int
    tokens: dict[int, int]
    left_out: tuple[str, ...]


class PacedSwarm:
    """The manifest's bootstrap nodes, and a peer for each machine. `script` may change machines, start and kill peers
    while the run lasts. `node` is the first of the nodes, which leads as long as it lives. `own`: see OWN."""

    def __init__(self, machines: list[Machine], manifest: Manifest, seed: int = 0, own: Collection[str] = OWN) -> None:
        rng = random.Random(seed)
        self.manifest = manifest
        self.world = World(seed, CALM, rng, False)
        self.machines = machines
        self.commits: list[Committed] = []
        self.plans: list[Any] = []
        self.applied: dict[str, float] = {}
        self.leading: BootstrapNode
        floor = Floor()
        operators = tiny.OPERATORS[: len(manifest.operators)]
        assert tuple(operator.peer_id for operator in operators) == manifest.operators
        self.nodes = [Process(self.world, operator, self._node, "nodes") for operator in operators]
        self.node = self.nodes[0]
        for node in self.nodes:
            self.world.network.rates[node.name] = (1e9, 1e9)
        self.peers: list[Process] = []
        for machine in machines:
            process = Process(self.world, Identity(rng.randbytes(32)), self._peer(machine, floor, own), "peers")
            self.world.network.rates[process.name] = (machine.up, machine.down)
            self.peers.append(process)
        self._heard = asyncio.Event()

    async def _node(self, process: Process) -> None:
        archive = Archive(process.folder, self.manifest, SimDisk(process.files, process.points(), process.rng))
        emit = process.emitter(self._hear if process is self.node else lambda event: None)
        first = () if process is self.node else (f"/memory/p2p/{self.node.name}",)
        clock = self.world.clock()
        node = BootstrapNode(process.identity, process.transport, archive, emit, first, clock)
        process.running = node
        if process is self.node:
            self.leading = node
        await node.run()

    def _peer(self, machine: Machine, floor: Floor, own_shards: Collection[str]) -> Callable[[Process], Any]:
        whole = tiny.full_memory(self.manifest)
        memory = whole if machine.whole else whole - 1 if machine.half else tiny.third_memory(self.manifest)

        async def live(process: Process) -> None:
            def inner_loop(manifest: Manifest, peer: str, *rest: Any) -> PacedTrainer:
                return PacedTrainer(floor, machine, own_shards, peer, manifest, rest[3])

            storage = Storage(process.folder, None, SimDisk(process.files, process.points(), process.rng))
            made = Factories(clock=self.world.clock(), text=held_out_text, inner_loop=inner_loop)
            line = {"up_bps": round(machine.up), "down_bps": round(machine.down)}
            line["up_limit_bps"] = round(LIMIT_SHARE * machine.up)
            own = machines.machine(Path("/"), memory, nodes=[f"/memory/p2p/{self.node.name}"], **line)
            emit = process.emitter(lambda event: None)
            await Peer(self.manifest, process.identity, process.transport, storage, own, emit, made).run()

        return live

    def _hear(self, event: Event) -> None:
        match event.body:
            case events.Commit() as commit:
                tokens = {c.replica: c.tokens for c in commit.contributions}
                left = tuple(x.reason for x in commit.left_out)
                self.commits.append(Committed(self.world.now, commit.round, tokens, left))
                self.plans.append(commit.plan)
                self._heard.set()

    async def round(self, number: int) -> Committed:
        """Waits for the commit of a round."""
        while not self.commits or self.commits[-1].round < number:
            self._heard.clear()
            await self._heard.wait()
        return self.commits[-1]

    def run(self, script: Callable[[PacedSwarm], Any], begin: int | None = None) -> None:
        """Starts the nodes and the first `begin` peers (None: all), carries `script` out and ends."""

        async def live() -> None:
            for node in self.nodes:
                node.start()
            for peer in self.peers[:begin]:
                peer.start()
            work = asyncio.ensure_future(script(self))
            await asyncio.wait({work, self.world.over}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                return
            work.result()

        self.world.run(live())

    def rate(self, first: int, last: int) -> float:
        """Committed tokens a second of the rounds after `first`, up to `last`."""
        found = {c.round: c for c in self.commits}
        tokens = sum(sum(found[r].tokens.values()) for r in range(first + 1, last + 1))
        return tokens / (found[last].at - found[first].at)

    def durations(self) -> dict[int, float]:
        """Seconds of each round, from commit to commit."""
        return {after.round: after.at - before.at for before, after in itertools.pairwise(self.commits)}


def manifest(seconds: float, start_peers: int, **changes: Any) -> Manifest:
    """A run whose rounds last `seconds`."""
    made = tiny.manifest(
        rounds=1000,
        start_peers=start_peers,
        outer=OuterSpec(overlap=changes.pop("overlap", 0)),
        timing=TimingSpec(round_deadline=4 * seconds, round_seconds=seconds, heartbeat=3.0, gone_after=12.0),
    )
    train = dataclasses.replace(made.train, inner_steps=1000, total_steps=10**6)
    return dataclasses.replace(made, train=train, **changes)


def state_bytes(manifest: Manifest) -> int:
    """Of a state, in fp32."""
    return sum(layout.shard_bytes(manifest.model, shard) for shard in layout.shard_names(manifest.model))


def possible(manifest: Manifest, replicas: list[list[float]]) -> float:
    """Tokens a second of replicas whose members have these paces, if none of them ever waited for anybody but its own
    chain: the blocks are shared out as well as they can be."""
    layers, total = manifest.model.n_layers, 0.0
    for paces in replicas:
        slowest = min(
            max(pace * blocks / layers for pace, blocks in zip(paces, cut, strict=True))
            for cut in _cuts(layers, len(paces))
        )
        total += manifest.train.step_tokens / slowest
    return total


def _cuts(layers: int, stages: int) -> list[tuple[int, ...]]:
    if stages == 1:
        return [(layers,)]
    return [(n, *rest) for n in range(1, layers - stages + 2) for rest in _cuts(layers - n, stages - 1)]
