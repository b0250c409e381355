"""A bootstrap node and peers in one process that do everything but compute: the update of a shard is noise that follows
from peer, round and shard. Network in memory, disks real."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bootstrap.archive import Archive
from bootstrap.node import BootstrapNode, Work
from peer.chain.reading import StopSign
from peer.corpus.text import Text
from peer.events import Emitter, Event
from peer.log.recompute import Recomputer, store_state
from peer.net import directory
from peer.net.base import Clock, Transport, Validate
from peer.net.disk import Disk, Piece
from peer.net.memory import MemoryNetwork
from peer.node.audit import held_out_text
from peer.node.peer import Factories, Peer
from peer.node.training import ChainOrders, InnerLoop, Result
from peer.state.storage import Storage
from protocol.identity import Identity
from protocol.planning.memory import stage_memory
from protocol.round.leader import Leader
from protocol.round.member_events import TrainOrder
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest, TimingSpec, TokenizerSpec
from protocol.wire import endpoints
from tests.support import displacement, machines, tiny

TOKENIZER = b'{"not": "read"}'
MODEL = ModelSpec(vocab_size=512, d_model=64, n_layers=4, n_heads=2, d_ff=128, context=8)
STEP = 1e-3


def manifest(**changes: Any) -> Manifest:
    """A run of volunteers, with a model of 190,000 parameters and short silences."""
    values = {
        "model": MODEL,
        "tokenizer": TokenizerSpec(digest=hashlib.sha256(TOKENIZER).hexdigest()),
        "timing": TimingSpec(round_deadline=30.0, heartbeat=0.2, gone_after=2.0),
    }
    return tiny.manifest(**{**values, **changes})


def noise(spec: ModelSpec, peer: str, round: int, shard: str) -> list[np.ndarray]:
    """What a peer learned of a shard in a round."""
    seed = hashlib.sha256(f"{peer} {round} {shard}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(seed[:8], "little"))
    return [STEP * rng.standard_normal(shape, dtype=np.float32) for shape in layout.shapes(spec, shard)]


def identity_of(name: str) -> Identity:
    """Of a peer of a swarm."""
    return Identity(hashlib.sha256(name.encode()).digest())


Hold = Callable[[str, int], Awaitable[None]]


class Network(Protocol):
    """Where a swarm's transports come from."""

    def transport(self, peer_id: str, validate: Validate) -> Transport:
        """A peer's."""
        ...


class Noise(InnerLoop):
    """In place of the inner loop of a stage. `hold(peer, round)` is awaited before a round's work is done."""

    def __init__(self, hold: Hold, manifest: Manifest, peer: str) -> None:
        self._hold, self.manifest, self.peer, self.round = hold, manifest, peer, 0

    async def train(
        self,
        order: TrainOrder,
        theta: Any,
        stop: asyncio.Event,
        end: StopSign,
        progress: Any,
        chain_orders: ChainOrders,
    ) -> Result:
        held = asyncio.ensure_future(self._hold(self.peer, order.plan.round))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({held, stopped}, return_when=asyncio.FIRST_COMPLETED)
        held.cancel(), stopped.cancel()
        if stop.is_set():
            return Result(0, 0, None, "the round was decided before all steps were done")
        self.round = order.plan.round
        work = order.plan.replica(order.replica).work
        return Result(work.steps, self.manifest.train.tokens(work.steps, work.micro_batches), 1.0, None)

    def displacement(self, shard: str) -> list[tuple[np.ndarray, np.ndarray]]:
        return displacement.of(noise(self.manifest.model, self.peer, self.round, shard))


class QuickDisk(Disk):
    """Nothing here loses power."""

    def write(self, path: Path, *pieces: Piece, sync: bool = True, **options: Any) -> None:
        super().write(path, *pieces, sync=False, **options)

    def sync(self, path: Path) -> None: ...


@dataclasses.dataclass
class Volunteer:
    """A peer that runs; its rounds are `rounds` as soon as it has begun."""

    name: str
    identity: Identity
    folder: Path
    transport: Transport
    storage: Storage
    peer: Peer
    task: asyncio.Task[None]
    events: list[Event]

    @property
    def rounds(self) -> Any:
        return self.peer.rounds

    @property
    def id(self) -> str:
        return self.identity.peer_id

    @property
    def received(self) -> int:
        """Bytes of blobs since it was started."""
        return self.transport.traffic.received[endpoints.BLOB]

    @property
    def bases(self) -> dict[str, int]:
        """The round of the state that each shard was built from, the last time."""
        return dict([e for e in self.events if e.kind == "recovered"][-1].fields["bases"])

    def texts(self, kind: str = "warning") -> list[str]:
        return [e.fields["text"] for e in self.events if e.kind == kind]


class Swarm:
    """Use as `async with`; `start` and `stop` peers at will."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self.folder = folder
        self.network: Network = MemoryNetwork()
        self.peers: dict[str, Volunteer] = {}
        self.events: list[Event] = []
        self._happened = asyncio.Event()
        self.hold: Hold = self._at_once
        """Is awaited with a peer and a round before the round's work of that peer is done."""
        self.inner_loop: Callable[..., InnerLoop] = self._noise
        """What a peer is given to train with."""
        self.text: Callable[..., Awaitable[Text]] = held_out_text
        """What a peer is given to train on."""
        self.tokenizer = TOKENIZER
        """The file of the run's."""
        self.disk = QuickDisk()
        self.computes = True
        """Whether the bootstrap node can compute disputed states, as where that is cheap."""
        self.relay_bps = 0
        """Bits a second that the bootstrap node relays, if it is set before the swarm begins."""

    async def _at_once(self, peer: str, round: int) -> None: ...

    async def __aenter__(self) -> Swarm:
        self.archive = Archive(self.folder / "bootstrap", self.manifest, self.disk)
        self.archive.save_tokenizer(self.tokenizer)
        self.boot = self.network.transport(tiny.OPERATOR.peer_id, directory.valid_record(self.manifest.run_id))
        emit = Emitter("bootstrap", self._hear(self.events))
        logged = (self.manifest, self.archive.commits)
        known = Recomputer(*logged, self.archive.blobs.get, newest_state=self.archive.newest_state)
        compute = known.digest if self.computes else lambda shard, round: None
        work = Work(digest=compute, store_state=functools.partial(store_state, *logged, self.archive.blobs))
        self.machine = BootstrapNode(tiny.OPERATOR, self.boot, self.archive, emit, work=work)
        self.node = asyncio.create_task(self.machine.serve(self.relay_bps))
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in list(self.peers):
            await self.stop(name)
        self.node.cancel()
        await asyncio.gather(self.node, return_exceptions=True)
        await self.boot.aclose()
        self.archive.close()

    def _hear(self, events: list[Event]) -> Callable[[Event], None]:
        def hear(event: Event) -> None:
            events.append(event)
            self._happened.set()

        return hear

    def start(
        self, name: str, memory: int | None = None, limit: int | None = None, clock: Clock | None = None, **config: Any
    ) -> Volunteer:
        """Starts a peer in its folder, which may have been used before."""
        who = identity_of(name)
        transport = self.network.transport(who.peer_id, directory.valid_record(self.manifest.run_id))
        folder = self.folder / name
        storage, events = Storage(folder, limit, self.disk), list[Event]()
        machine = machines.machine(
            folder,
            memory or stage_memory(self.manifest, 0, self.manifest.model.n_layers),
            nodes=self.boot.addresses,
            **{"up_bps": 10**8, "down_bps": 10**8, **config},
        )
        emit = Emitter(who.peer_id, self._hear(events))
        made = Factories(text=self.text, inner_loop=self.inner_loop, clock=clock or Clock())
        peer = Peer(self.manifest, who, transport, storage, machine, emit, made)
        task = asyncio.create_task(peer.run())
        task.add_done_callback(lambda _: self._happened.set())
        self.peers[name] = Volunteer(name, who, folder, transport, storage, peer, task, events)
        return self.peers[name]

    def _noise(self, manifest: Manifest, peer: str, *_: object) -> Noise:
        return Noise(lambda who, round: self.hold(who, round), manifest, peer)

    async def stop(self, name: str) -> None:
        """As Ctrl-C does."""
        peer = self.peers.pop(name)
        peer.task.cancel()
        await asyncio.gather(peer.task, return_exceptions=True)
        await peer.transport.aclose()
        peer.storage.close()

    async def until(self, wanted: Callable[[], bool]) -> None:
        """Waits for a condition; a failure of a peer meanwhile is raised."""
        while not wanted():
            self._happened.clear()
            for task in (self.node, *(p.task for p in self.peers.values())):
                if task.done() and not task.cancelled() and task.exception() is not None:
                    task.result()
            with contextlib.suppress(TimeoutError):  # not everything is an event
                await asyncio.wait_for(self._happened.wait(), 0.05)

    async def round(self, number: int) -> None:
        """Waits until everybody who runs has applied this round."""
        await self.until(
            lambda: all(p.rounds is not None and p.rounds.member.applied >= number for p in self.peers.values())
        )

    @property
    def leader(self) -> Leader:
        """The leading machine."""
        return self.machine.leader

    @property
    def head(self) -> int:
        """The newest round that was decided."""
        return len(self.archive.commits) - 1
