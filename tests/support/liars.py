"""A made-up identity that says what a session allows: false states, and others' messages with wrong contents."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence

from peer.net.base import Stream, Transport, serve_calls
from protocol.errors import RemoteError
from protocol.identity import Identity
from protocol.planning import memory
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire import encoding, endpoints, framing
from protocol.wire.announcement import VERSION, Announcement
from protocol.wire.commit import Part, Record
from protocol.wire.encoding import Message
from protocol.wire.session import (
    Announced,
    Attest,
    ChainFailure,
    ChainReconfig,
    Heartbeat,
    Hello,
    LogRequest,
    Offer,
    Withdraw,
)

AGAIN_SECONDS = 2.0
LIES_SECONDS = 6.0
"""Between lies, on average, besides those that follow on each record: what floods do is tested elsewhere."""


@functools.lru_cache(maxsize=256)
def _decoded(raw: bytes) -> Message | Record:
    """Returns a node's message; many liars read the same records."""
    return encoding.decode_any(raw, "a bootstrap node")


class Liar:
    """Has a session with each of the run's nodes, as long as `run` runs. `false`: the digests of its false state."""

    def __init__(
        self,
        manifest: Manifest,
        identity: Identity,
        transport: Transport,
        addresses: Sequence[str],
        false: Mapping[str, str],
        rng: random.Random,
    ) -> None:
        self.manifest = manifest
        self.identity = identity
        self.transport = transport
        self.said = 0
        self.round = 0
        self._addresses = addresses
        self._false = dict(false)
        self._rng = rng
        self._replicas: Sequence[tuple[int, tuple[str, ...]]] = [(0, ())]

    async def run(self, serve: Callable[[Transport], Awaitable[None]] | None = None) -> None:
        """Never returns. `serve` serves its blobs; else it answers each question for one with garbage."""

        async def states(remote: str, request: bytes) -> bytes:
            rounds = range(self.round + 1)
            return framing.pack_message([[r, list(layout.shard_names(self.manifest.model))] for r in rounds])

        await serve_calls(self.transport, endpoints.STATES, states, limit=1024)
        await (serve(self.transport) if serve is not None else self.transport.serve(endpoints.BLOB, self._garbage))
        async with asyncio.TaskGroup() as group:
            for node in self.manifest.operators:
                group.create_task(self._session(node))

    async def _garbage(self, stream: Stream) -> None:
        """Answers every question for a blob with other bytes."""
        with contextlib.suppress(RemoteError):
            while True:
                await stream.recv()
                await stream.send(framing.pack_message({"state": "here", "ask": [], "sure": True}))
                await stream.send(self._rng.randbytes(100))

    async def _session(self, node: str) -> None:
        while True:
            with contextlib.suppress(RemoteError):
                await self.transport.connect(self._addresses, timeout=5.0)
                stream = await self.transport.open(node, endpoints.SESSION, timeout=5.0)
                beating = None
                try:
                    await self._say(stream, Hello(run=self.manifest.run_id, version=VERSION))
                    await self._say(stream, Announced(sealed=encoding.seal(self.identity, self._announcement())))
                    beating = asyncio.create_task(self._beat(stream))
                    while True:
                        message = _decoded(bytes(await stream.recv()))
                        if isinstance(message, Record) and self._is_news(message):
                            for lie in self._lies():
                                await self._say(stream, lie)
                finally:
                    if beating is not None:
                        beating.cancel()
                    await stream.close()
            await asyncio.sleep(AGAIN_SECONDS)

    def _announcement(self) -> Announcement:
        whole = memory.stage_memory(self.manifest, 0, self.manifest.model.n_layers)
        return Announcement(
            run=self.manifest.run_id,
            peer=self.identity.peer_id,
            addresses=self.transport.addresses,
            memory_bytes=2 * whole,
            up_bps=10**8,
            down_bps=10**8,
            serial=1,
        )

    async def _beat(self, stream: Stream) -> None:
        with contextlib.suppress(RemoteError):
            while True:
                await asyncio.sleep(self.manifest.timing.heartbeat)
                await self._say(stream, Heartbeat(phase="training", round=self.round, loss=0.1))
                if self._rng.random() < self.manifest.timing.heartbeat / LIES_SECONDS:
                    for lie in self._lies():
                        await self._say(stream, lie)

    async def _say(self, stream: Stream, message: Message) -> None:
        self.said += 1
        await stream.send(encoding.encode(message))

    def _is_news(self, record: Record) -> bool:
        """Each record of a log that was asked for would bring the next question."""
        if record.commit.round < self.round:
            return False
        self.round, plan = record.commit.round, record.commit.plan
        if plan is not None and plan.replicas:
            self._replicas = [(r.number, r.peers) for r in plan.replicas] + [(s.number, ()) for s in plan.seats]
        return True

    def _lies(self) -> list[Message]:
        """A false state, and something about a replica that is not ours."""
        rng, round = self._rng, self.round
        replica, peers = rng.choice(self._replicas)
        victim = rng.choice(peers) if peers else self.identity.peer_id
        parts = tuple(Part(shard=s, digest=d, size=100, norm=1.0) for s, d in self._false.items())
        others: list[Message] = [
            Offer(round=round + 1, replica=replica, parts=parts, tokens=8, steps=1, loss=0.1),
            Withdraw(round=round + 1, reason="a lie"),
            ChainFailure(round=round + 1, replica=replica, generation=0, peer=victim, reason="a lie"),
            ChainReconfig(
                round=round + 1, replica=replica, generation=3, peers=(self.identity.peer_id,), steps=0, reason="a lie"
            ),
            LogRequest(after=-1),
        ]
        return [Attest(round=max(0, round - rng.randrange(2)), digests=self._false), rng.choice(others)]
