"""The streams between a chain's neighbours: the earlier stage dials, the later one accepts.

A pipe is several streams (peer/net/striped_stream.py). Each of them begins with a hello that names its stripe. A pipe belongs to one
*generation* of a replica's chain in a round (protocol/round/chain_repair.py), so the members of different chains never meet. A
member may not be ready yet: it still applies the round before, does not know of the new generation, or waits for its other
neighbour. It then sends signs of life.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from peer.chain.frames import NeighbourLost
from peer.chain.link import LIVENESS, Liveness, keep_alive
from peer.net.base import REQUEST_SECONDS, Stream
from peer.net.cooldown import Cooldown
from peer.net.network import Network
from peer.net.striped_stream import STRIPES, StripedStream
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import calls, endpoints
from protocol.wire.announcement import MOST_APART
from protocol.wire.calls import PipeHello
from protocol.wire.plan import Plan

APART_SECONDS = 600.0
"""How long a peer counts as apart the first time,"""
MOST_SECONDS = 6 * 3600.0
"""and at most."""
REMEMBERED = 4 * MOST_APART
"""Peers whose failures are remembered."""


class Apart:
    """`announce(apart=peers)` changes what we say of ourselves, `warn` hears of each peer once, with the reason."""

    def __init__(self, announce: Callable[..., None], warn: Callable[[str], None]) -> None:
        self._announce = announce
        self._warn = warn
        self._failed: OrderedDict[str, None] = OrderedDict()  # those whose last dial failed
        self._cooldown = Cooldown(APART_SECONDS, MOST_SECONDS, REMEMBERED)
        self._apart: dict[str, asyncio.TimerHandle] = {}

    @property
    def peers(self) -> tuple[str, ...]:
        """Those whom no plan should put beside us."""
        return tuple(self._apart)

    def reached(self, peer: str) -> None:
        """A dial of `peer` succeeded."""
        self._failed.pop(peer, None)
        self._cooldown.end(peer)
        if peer in self._apart:
            self._join(peer)

    def failed(self, peer: str, why: str) -> None:
        """A dial of `peer` failed as long as it could."""
        known = peer in self._failed
        self._failed[peer] = None
        self._failed.move_to_end(peer)
        if len(self._failed) > REMEMBERED:
            self._failed.popitem(last=False)
        if not known or peer in self._apart:
            return
        if len(self._apart) == MOST_APART:
            self._apart.pop(self.peers[0]).cancel()
        loop = asyncio.get_running_loop()
        seconds = self._cooldown.begin(peer, loop.time())
        self._apart[peer] = loop.call_later(seconds, self._join, peer)
        self._announce(apart=self.peers)
        if self._cooldown.times(peer) == 1:
            self._warn(
                f"chain: peer {short_peer(peer)} cannot be reached: {why}; plans put it elsewhere for a while, forward this machine's"
                " port in its router, or let a bootstrap node relay"
            )

    def close(self) -> None:
        """Waits for nothing any more."""
        for timer in self._apart.values():
            timer.cancel()
        self._apart.clear()

    def _join(self, peer: str) -> None:
        """It may be a neighbour again; the next failure counts at once."""
        self._apart.pop(peer).cancel()
        self._announce(apart=self.peers)


MAX_PIPES = 64
PIPES_OF_A_PEER = 4
"""Pipes, of all and of one peer, that may wait here for a chain that we do not know of yet: a neighbour may be ahead of us. Strangers
who take these places keep no neighbour out whom our plan names; it dials until then."""
AHEAD = 3
"""A neighbour may be one commit ahead of us, and train one round ahead of that."""

Key = tuple[int, int, int, str]
"""Round, generation, replica, peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How many seconds a neighbour may take: to answer a dial; to dial us in a round's first chain, when it may still fetch shards; and
    to dial us in a later generation of the chain."""

    dial: float = 10.0
    accept: float = 90.0
    reconfigured: float = 30.0


PATIENCE = Patience()


class Pipes:
    """A peer's pipes, one object per peer. `apart` hears whether neighbours could be dialled."""

    def __init__(
        self,
        network: Network,
        *,
        apart: Apart | None = None,
        patience: Patience = PATIENCE,
        liveness: Liveness = LIVENESS,
    ) -> None:
        self._transport = network.transport
        self._directory = network.directory
        self._uplink = network.uplink
        self._apart = apart
        self._patience = patience
        self._beat_s = liveness.beat_s
        self._incoming: dict[Key, asyncio.Future[Stream]] = {}
        self._stripes: dict[Key, dict[int, Stream]] = {}
        self._taken: set[Key] = set()
        self._awaited: set[Key] = set()  # those that our own plan names
        self._living: set[asyncio.Task[None]] = set()
        self._oldest = (0, 0)
        self._over = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Streams that were dialled to us for chains that are not over."""
        return sum(len(stripes) for stripes in self._stripes.values())

    def doubt(self, peer: str) -> None:
        """It is silent; it may be elsewhere now, and our connection to it be dead."""
        self._transport.doubt(peer)
        self._directory.lost(peer)

    async def neighbours(
        self, plan: Plan, replica: int, generation: int, position: int
    ) -> tuple[Stream | None, Stream | None]:
        """Streams to the stages before and after `position`, None where there is none. Raises NeighbourLost."""
        self.forget(plan.round, generation)
        stages, complete = plan.replica(replica).stages, asyncio.Event()
        tasks: dict[str, asyncio.Task[Stream]] = {}
        if position:
            key = (plan.round, generation, replica, stages[position - 1].peer)
            tasks["previous"] = asyncio.create_task(self._accept(key))
        if position + 1 < len(stages):
            work = self._dial(plan.round, generation, replica, stages[position + 1].peer, complete)
            tasks["following"] = asyncio.create_task(work)
        try:
            found = dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
            if position:
                self._taken.add(key)
            return found.get("previous"), found.get("following")
        except BaseException:
            for task in tasks.values():
                task.cancel()
            for stream in await asyncio.gather(*tasks.values(), return_exceptions=True):
                if not isinstance(stream, BaseException):
                    await stream.close()
            raise
        finally:
            complete.set()

    async def _dial(self, round: int, generation: int, replica: int, peer: str, complete: asyncio.Event) -> Stream:
        """A stream to a later stage. We send signs of life on it until all neighbours are there."""
        why = "it did not answer"
        try:
            async with asyncio.timeout(self._patience.dial):
                while True:
                    try:
                        await self._directory.reach(peer)
                        hello = PipeHello(round=round, generation=generation, replica=replica, stripe=0)
                        pipe = await self._open(peer, hello)
                        living = asyncio.create_task(keep_alive(pipe, complete.is_set, self._beat_s))
                        self._living.add(living)
                        living.add_done_callback(self._living.discard)
                        if self._apart is not None:
                            self._apart.reached(peer)
                        return pipe
                    except RemoteError as error:
                        why = str(error)
                        self._directory.lost(peer)  # it may have come back elsewhere
                        await asyncio.sleep(0.5)
        except TimeoutError:
            if self._apart is not None:
                self._apart.failed(peer, why)
            raise NeighbourLost(peer, f"did not answer for {self._patience.dial:g} s") from None

    async def _open(self, peer: str, chain: PipeHello) -> Stream:
        """A pipe of all stripes. Raises RemoteError."""
        streams: dict[int, Stream] = {}

        async def open(stripe: int) -> None:
            streams[stripe] = await self._transport.open(peer, endpoints.PIPE, timeout=self._patience.dial)
            await streams[stripe].send(calls.write(dataclasses.replace(chain, stripe=stripe)))

        tasks = [asyncio.create_task(open(stripe)) for stripe in range(STRIPES)]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in streams.values():
                await stream.close()
            raise
        return StripedStream([streams[stripe] for stripe in range(STRIPES)], self._uplink)

    async def _accept(self, key: Key) -> Stream:
        seconds = self._patience.reconfigured if key[1] else self._patience.accept
        self._awaited.add(key)
        try:
            async with asyncio.timeout(seconds):
                return await self._expect(key)
        except TimeoutError:
            raise NeighbourLost(key[3], f"did not dial for {seconds:g} s") from None

    def _expect(self, key: Key) -> asyncio.Future[Stream]:
        if key not in self._incoming:
            self._incoming[key] = asyncio.get_running_loop().create_future()
        return self._incoming[key]

    def _has_room(self, peer: str) -> bool:
        """Whether one more pipe that nobody here waits for yet may wait; those that we wait for need no room."""
        early = [key for key in self._incoming if key not in self._awaited]
        return len(early) < MAX_PIPES and sum(key[3] == peer for key in early) < PIPES_OF_A_PEER

    def forget(self, round: int, generation: int = 0) -> None:
        """Ends the handlers of the pipes that are older."""
        self._oldest = max(self._oldest, (round, generation))
        for key in [k for k in self._incoming if k[:2] < (round, generation)]:
            self._incoming.pop(key).cancel()
            self._stripes.pop(key, None)
            self._taken.discard(key)
            self._awaited.discard(key)
        self._wake()

    def _wake(self) -> None:
        """Lets the handlers see whether they are needed still."""
        self._over.set()
        self._over = asyncio.Event()

    async def serve(self, stream: Stream, applied: int) -> None:
        """An incoming pipe: hands the stream to the training that waits for it, and stays until that is over."""
        hello = calls.read(PipeHello, await stream.recv(256, timeout=REQUEST_SECONDS), stream.remote, "pipe")
        round, generation, stripe = hello.round, hello.generation, hello.stripe
        if not applied < round <= applied + AHEAD or (round, generation) < self._oldest or stripe >= STRIPES:
            raise RemoteError(stream.remote, f"pipe of {short_peer(stream.remote)}: not for this chain; it was closed")
        key = (round, generation, hello.replica, stream.remote)
        if key not in self._incoming and not self._has_room(stream.remote):
            raise RemoteError(stream.remote, f"pipe of {short_peer(stream.remote)}: too many wait here; it was closed")
        waiting = self._expect(key)
        if waiting.done():
            raise RemoteError(
                stream.remote, f"pipe of {short_peer(stream.remote)}: there is one already; it was closed"
            )
        stripes = self._stripes.setdefault(key, {})
        before, stripes[stripe] = stripes.get(stripe), stream
        if before is not None:  # it is of a dial that failed
            self._wake()
        if len(stripes) == STRIPES:
            pipe = StripedStream([stripes[i] for i in range(STRIPES)], self._uplink)
            waiting.set_result(pipe)
            await keep_alive(pipe, lambda: key in self._taken or key not in self._incoming, self._beat_s)
        while key in self._incoming and stripes[stripe] is stream:
            await self._over.wait()
