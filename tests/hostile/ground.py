"""Where attacks are tried: a bootstrap node, peers that do everything but compute (tests/support/volunteers.py), and
enemies. Each has a network daemon of its own; all live in this process, so that a test sees into them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hivemind.proto import p2pd_pb2

from peer import events
from peer.net import directory, p2p
from peer.net.base import Stream, Transport, Validate
from peer.net.blobs import BlobServer, BlobStore
from peer.net.daemon import raw_id
from peer.net.p2p import P2PTransport
from protocol.codec import sparse
from protocol.errors import RemoteError
from protocol.identity import Identity
from protocol.planning.memory import stage_memory, stage_shards
from protocol.run import layout
from protocol.run.manifest import Manifest, TimingSpec
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import VERSION, Announcement
from protocol.wire.commit import Part
from protocol.wire.encoding import Message
from protocol.wire.session import Announced, Attest, Heartbeat, Hello, Offer
from tests.support import tiny, volunteers
from tests.support.plain_codec import norm_of
from tests.support.volunteers import Volunteer

SOON = 60.0
MODEL = dataclasses.replace(volunteers.MODEL, n_layers=2)
HOLD_SECONDS = 0.2
"""That a round's work takes: nothing is computed, and rounds as fast as they can be would take all processor time."""


def manifest(**changes: Any) -> Manifest:
    """A long run with two replicas at least, short silences, and a model of two blocks: a round costs time by its
    tensors, however small."""
    timing = TimingSpec(round_deadline=30.0, round_seconds=1.0, heartbeat=0.5, gone_after=5.0)
    return volunteers.manifest(**{"rounds": 1_000_000, "timing": timing, "model": MODEL, **changes})


async def hold(peer: str, round: int) -> None:
    """A round's work."""
    await asyncio.sleep(HOLD_SECONDS)


def identity(name: str) -> Identity:
    """Everybody's key follows from a name."""
    return Identity(hashlib.sha256(name.encode()).digest())


async def daemon(who: Identity, run: str, folder: Path, sockets: Path, host: str = "127.0.0.1") -> P2PTransport:
    """Starts a daemon. `folder`: for the key; `host`: where it listens, and comes from."""
    key = folder / f"{who.peer_id}.key"
    key.write_bytes(who.libp2p_bytes())
    key.chmod(0o600)
    valid, latest = directory.valid_record(run), directory.latest_expiry(run)
    return await p2p.start(key, host=host, validate=valid, latest=latest, sockets=sockets)


class Daemons:
    """Transports that were started beforehand, in the place of a network in memory."""

    def __init__(self) -> None:
        self.started: dict[str, P2PTransport] = {}

    def transport(self, peer_id: str, validate: Validate) -> Transport:
        return self.started[peer_id]


@dataclass(frozen=True)
class Enemy:
    """A key and a daemon, connected to the node, with the protocol's messages."""

    identity: Identity
    transport: P2PTransport
    manifest: Manifest
    node: str

    @property
    def id(self) -> str:
        return self.identity.peer_id

    async def open(self, peer: str, name: str) -> Stream:
        return await self.transport.open(peer, name, timeout=SOON)

    async def raw(self, peer: str, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The same without frames, as libp2p has it."""
        asked = p2pd_pb2.StreamOpenRequest(peer=raw_id(peer), proto=[name], timeout=int(SOON))
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=asked)
        reader, writer, _ = await self.transport.daemon.ask(request, peer, f"peer {peer}", SOON)
        return reader, writer

    async def session(self, **said: Any) -> Stream:
        """One that begins as it should, with an announcement of what is `said`."""
        stream = await self.open(self.node, endpoints.SESSION)
        await stream.send(encoding.encode(Hello(run=self.manifest.run_id, version=VERSION)))
        await self.say(stream, Announced(sealed=self.sealed(**said)))
        return stream

    async def lives(self, session: Stream) -> None:
        """Gives signs of life until it is cancelled."""
        while True:
            await self.say(session, Heartbeat(phase="x", round=0))
            await asyncio.sleep(self.manifest.timing.heartbeat)

    async def say(self, stream: Stream, message: Message) -> None:
        await stream.send(encoding.encode(message))

    def sealed(self, **said: Any) -> bytes:
        """What we announce, signed."""
        values = {"addresses": self.transport.addresses, "serial": 1, "up_bps": 10**8, "down_bps": 10**8, **said}
        return encoding.seal(self.identity, Announcement(run=self.manifest.run_id, peer=self.id, **values))

    @property
    def whole(self) -> int:
        """Memory with which one is planned as a full replica."""
        return stage_memory(self.manifest, 0, self.manifest.model.n_layers)


class Ground(volunteers.Swarm):
    """Use as `async with`."""

    def __init__(self, folder: Path, of: Manifest | None = None) -> None:
        super().__init__(folder, of or manifest())
        self.network = self.daemons = Daemons()
        self.hold = hold
        self._sockets = Path(f"/tmp/hostile-{os.getpid()}")

    async def __aenter__(self) -> Ground:
        self._sockets.mkdir()
        await self.listen(tiny.OPERATOR)
        await super().__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        await asyncio.gather(*(transport.aclose() for transport in self.daemons.started.values()))
        shutil.rmtree(self._sockets)

    async def listen(self, who: Identity) -> P2PTransport:
        """Starts a daemon."""
        made = await daemon(who, self.manifest.run_id, self.folder, self._sockets)
        self.daemons.started[who.peer_id] = made
        return made

    async def join(self, *names: str, **config: Any) -> list[Volunteer]:
        """Starts honest peers."""
        await asyncio.gather(*(self.listen(identity(name)) for name in names))
        return [self.start(name, **config) for name in names]

    async def enemy(self, name: str = "enemy") -> Enemy:
        """Starts an enemy and connects it to the node."""
        who = identity(name)
        transport = await self.listen(who)
        await transport.connect(self.boot.addresses, timeout=SOON)
        return Enemy(who, transport, self.manifest, self.boot.peer_id)

    # --- what must hold

    async def goes_on(self, rounds: int = 3) -> None:
        """More rounds are decided, with the work of every honest peer that runs in one of them at least."""
        before = self.head
        await self.until(lambda: self.head >= before + rounds)
        await self.until(
            lambda: (
                {v.id for v in self.peers.values()}
                <= {s.peer for commit in self.archive.commits[before + 1 :] for s in commit.shares}
            )
        )

    def refusals(self, enemy: Enemy, told: list[Any] | None = None) -> list[str]:
        """Why the node (or the peer whose events these are) refused the enemy."""
        found = [e.body for e in (self.events if told is None else told)]
        return [b.reason for b in found if isinstance(b, events.Refused) and b.peer == enemy.id]


class Trainee:
    """An enemy that is planned as a full replica, attests as others do, and makes up the updates that it offers."""

    is_modest = True
    """Whether it offers once a round."""

    def __init__(self, ground: Ground, enemy: Enemy) -> None:
        self.ground, self.enemy = ground, enemy
        self.store = BlobStore(ground.folder / enemy.id / "blobs")
        self.offered: set[int] = set()
        """Rounds."""

    def updates(self, round: int) -> Iterator[tuple[Part, ...]]:
        """What it offers now, one after the other."""
        raise NotImplementedError

    async def serve(self) -> None:
        await BlobServer(self.store).serve(self.enemy.transport)

    def part(self, shard: str, arrays: Sequence[np.ndarray], said: float | None = None) -> Part:
        """A payload that others can fetch. `said`: its norm, as it says; None: as it is."""
        made = self.ground.manifest
        payload = sparse.encode(made.outer.codec, arrays)
        shapes = layout.shapes(made.model, shard)
        norm = norm_of(sparse.decode(made.outer.codec, shapes, payload)) if said is None else said
        return Part(shard=shard, digest=self.store.put(payload, 0), size=len(payload), norm=norm)

    @property
    def shards(self) -> Sequence[str]:
        return stage_shards(self.ground.manifest, 0, self.ground.manifest.model.n_layers)

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """It goes on within the block, whatever the others answer."""
        await self.serve()
        session = await self.enemy.session(memory_bytes=self.enemy.whole, reachable="direct")
        going_on = asyncio.create_task(self._go_on(session))
        try:
            yield
            assert not going_on.done()
        finally:
            going_on.cancel()
            await asyncio.gather(going_on, return_exceptions=True)

    async def _go_on(self, session: Stream) -> None:
        while True:
            await asyncio.sleep(0.05)
            head, plan = self.ground.head, self.ground.archive.commits[-1].plan
            known = self.ground.leader.attestations.majority(head)
            await self.enemy.say(session, Attest(round=head, digests=known))
            number = plan.replica_of(self.enemy.id) if plan is not None else None
            if plan is None or number is None or not known or (self.is_modest and plan.round in self.offered):
                continue
            self.offered.add(plan.round)
            steps = plan.replica(number).work.steps
            tokens = self.ground.manifest.train.tokens(steps, plan.replica(number).work.micro_batches)
            for parts in self.updates(plan.round):
                offer = Offer(round=plan.round, replica=number, parts=parts, tokens=tokens, steps=steps, loss=1.0)
                await self.enemy.say(session, offer)


async def ended(stream: Stream) -> int:
    """Reads what still comes until the other side has ended the stream; the bytes of it."""
    came = 0
    with contextlib.suppress(RemoteError):
        while True:
            came += len(await stream.recv(timeout=SOON))
    return came


async def until_it_breaks(work: Callable[[int], Coroutine[Any, Any, Any]], times: int) -> int:
    """Does `work(i)` up to `times` times, until it is refused; how often it was done."""
    done = 0
    with contextlib.suppress(RemoteError, ConnectionError):
        for i in range(times):
            await work(i)
            done = i + 1
    return done
