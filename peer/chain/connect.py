"""The streams between a chain's neighbours: the earlier stage dials, the later one accepts.

A pipe is several streams (peer/net/stream.py); each begins with a hello that names its stripe. A pipe belongs
to one *generation* of a replica's chain in a round (protocol/round/chain_repair.py). A stage that is not ready yet
sends signs of life. After the second failed dial in a row the peer is *apart* from us, in our announcement, and the
planner takes others as our neighbours; it is tried again later.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from peer.chain.frames import NeighbourLost
from peer.chain.link import LIVENESS, Liveness, keep_alive
from peer.net.base import REQUEST_SECONDS, Stream, all_of
from peer.net.lru import LruDict
from peer.net.network import Network
from peer.net.rate_limits import Cooldown
from peer.net.stream import STRIPES, StripedStream
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import calls, endpoints
from protocol.wire.announcement import MOST_APART
from protocol.wire.calls import PipeHello
from protocol.wire.plan import Plan

APART_SECONDS, MOST_APART_SECONDS = 600.0, 6 * 3600.0
"""How long a peer counts as apart the first time, and at most."""
REMEMBERED = 4 * MOST_APART
MAX_EARLY_PIPES, MAX_EARLY_OF_A_PEER = 64, 4
"""Pipes of all peers and of one that wait for a chain that we do not know yet: a neighbour may be ahead of us. A
neighbour in our plan needs none of these places, and dials until then."""
ROUNDS_AHEAD = 3
"""A neighbour may be one commit ahead of us, and train one round ahead of that."""
REDIAL_SECONDS = 0.5

Key = tuple[int, int, int, str]
"""Round, generation, replica, peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds that a neighbour may take.

    dial: to answer a dial.
    accept: to dial us in a round's first chain; it may still fetch shards.
    reconfigured: to dial us in a later generation.
    """

    dial: float = 10.0
    accept: float = 90.0
    reconfigured: float = 30.0


PATIENCE = Patience()


class UnreachablePeers:
    """The peers that are apart from us. `announce(apart=peers)` changes our announcement, `warn` gets each peer
    once."""

    def __init__(self, announce: Callable[..., None], warn: Callable[[str], None]) -> None:
        self._announce = announce
        self._warn = warn
        self._failed = LruDict[str, None](REMEMBERED)  # those whose last dial failed
        self._cooldown = Cooldown(APART_SECONDS, MOST_APART_SECONDS, REMEMBERED)
        self._apart: dict[str, asyncio.TimerHandle] = {}

    @property
    def peers(self) -> tuple[str, ...]:
        """The peers that plans should not put beside this one."""
        return tuple(self._apart)

    def reached(self, peer: str) -> None:
        """A dial of `peer` succeeded."""
        self._failed.pop(peer, None)
        self._cooldown.end(peer)
        if peer in self._apart:
            self._end(peer)

    def failed(self, peer: str, why: str) -> None:
        """A dial of `peer` failed until its timeout."""
        known = peer in self._failed
        self._failed[peer] = None
        if not known or peer in self._apart:
            return
        if len(self._apart) == MOST_APART:
            self._apart.pop(self.peers[0]).cancel()
        loop = asyncio.get_running_loop()
        self._apart[peer] = loop.call_later(self._cooldown.begin(peer, loop.time()), self._end, peer)
        self._announce(apart=self.peers)
        if self._cooldown.times(peer) == 1:
            self._warn(
                f"chain: peer {short_peer(peer)} cannot be reached: {why}; plans put it elsewhere for a while,"
                " forward this machine's port in its router, or let a bootstrap node relay"
            )

    def close(self) -> None:
        """Ends all timers."""
        for timer in self._apart.values():
            timer.cancel()
        self._apart.clear()

    def _end(self, peer: str) -> None:
        self._apart.pop(peer).cancel()
        self._announce(apart=self.peers)


class PipelineStreams:
    """A peer's pipes to its neighbours in chains. `unreachable` gets the results of dials."""

    def __init__(
        self,
        network: Network,
        *,
        unreachable: UnreachablePeers | None = None,
        patience: Patience = PATIENCE,
        liveness: Liveness = LIVENESS,
    ) -> None:
        self._network = network
        self._unreachable = unreachable
        self._patience = patience
        self._beat_s = liveness.beat_s
        self._incoming: dict[Key, asyncio.Future[Stream]] = {}
        self._stripes: dict[Key, dict[int, Stream]] = {}
        self._taken: set[Key] = set()
        self._awaited: set[Key] = set()  # by our own plan
        self._living: set[asyncio.Task[None]] = set()
        self._oldest = (0, 0)
        self._changed = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Incoming streams of chains that are not over."""
        return sum(len(stripes) for stripes in self._stripes.values())

    def doubt(self, peer: str) -> None:
        """`peer` is silent: it may have moved, and our connection be dead."""
        self._network.transport.doubt(peer)
        self._network.directory.lost(peer)

    async def neighbours(
        self, plan: Plan, replica: int, generation: int, position: int
    ) -> tuple[Stream | None, Stream | None]:
        """Pipes to the stages before and after `position`, None where there is none. Raises NeighbourLost."""
        self.forget(plan.round, generation)
        stages, complete = plan.replica(replica).stages, asyncio.Event()
        tasks: dict[str, asyncio.Task[Stream]] = {}
        if position:
            key = (plan.round, generation, replica, stages[position - 1].peer)
            tasks["previous"] = asyncio.create_task(self._accept(key))
        if position + 1 < len(stages):
            hello = PipeHello(round=plan.round, generation=generation, replica=replica, stripe=0)
            tasks["following"] = asyncio.create_task(self._dial(stages[position + 1].peer, hello, complete))
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

    async def _dial(self, peer: str, hello: PipeHello, complete: asyncio.Event) -> Stream:
        """A pipe to a later stage, with signs of life on it until both neighbours are `complete`."""
        why = "it did not answer"
        try:
            async with asyncio.timeout(self._patience.dial):
                while True:
                    try:
                        await self._network.directory.reach(peer)
                        pipe = await self._open(peer, hello)
                        break
                    except RemoteError as error:
                        why = str(error)
                        self._network.directory.lost(peer)  # it may have moved
                        await asyncio.sleep(REDIAL_SECONDS)
        except TimeoutError:
            if self._unreachable is not None:
                self._unreachable.failed(peer, why)
            raise NeighbourLost(peer, f"did not answer for {self._patience.dial:g} s") from None
        living = asyncio.create_task(keep_alive(pipe, complete.is_set, self._beat_s))
        self._living.add(living)
        living.add_done_callback(self._living.discard)
        if self._unreachable is not None:
            self._unreachable.reached(peer)
        return pipe

    async def _open(self, peer: str, hello: PipeHello) -> Stream:
        streams: dict[int, Stream] = {}

        async def open(stripe: int) -> None:
            streams[stripe] = await self._network.transport.open(peer, endpoints.PIPE, timeout=self._patience.dial)
            await streams[stripe].send(calls.write(dataclasses.replace(hello, stripe=stripe)))

        try:
            await all_of(map(open, range(STRIPES)))
        except BaseException:
            for stream in streams.values():
                await stream.close()
            raise
        return StripedStream([streams[stripe] for stripe in range(STRIPES)], self._network.uplink)

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
        """Returns whether one more early pipe may wait."""
        early = [key for key in self._incoming if key not in self._awaited]
        return len(early) < MAX_EARLY_PIPES and sum(key[3] == peer for key in early) < MAX_EARLY_OF_A_PEER

    def forget(self, round: int, generation: int = 0) -> None:
        """Ends the handlers of older pipes."""
        self._oldest = max(self._oldest, (round, generation))
        for key in [k for k in self._incoming if k[:2] < (round, generation)]:
            self._incoming.pop(key).cancel()
            self._stripes.pop(key, None)
            self._taken.discard(key)
            self._awaited.discard(key)
        self._wake_handlers()

    def _wake_handlers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def serve(self, stream: Stream, applied: int) -> None:
        """Handles an incoming stream until the training that takes its pipe is over."""
        peer = stream.remote
        hello = calls.read(PipeHello, await stream.recv(256, timeout=REQUEST_SECONDS), peer, "pipe")
        round, generation, stripe = hello.round, hello.generation, hello.stripe
        key = (round, generation, hello.replica, peer)
        if not applied < round <= applied + ROUNDS_AHEAD or (round, generation) < self._oldest or stripe >= STRIPES:
            raise RemoteError(peer, f"pipe of {short_peer(peer)}: not for this chain; it was closed")
        if key not in self._incoming and not self._has_room(peer):
            raise RemoteError(peer, f"pipe of {short_peer(peer)}: too many wait here; it was closed")
        waiting = self._expect(key)
        if waiting.done():
            raise RemoteError(peer, f"pipe of {short_peer(peer)}: there is one already; it was closed")
        stripes = self._stripes.setdefault(key, {})
        before, stripes[stripe] = stripes.get(stripe), stream
        if before is not None:  # of a dial that failed
            self._wake_handlers()
        if len(stripes) == STRIPES:
            pipe = StripedStream([stripes[i] for i in range(STRIPES)], self._network.uplink)
            waiting.set_result(pipe)
            await keep_alive(pipe, lambda: key in self._taken or key not in self._incoming, self._beat_s)
        while key in self._incoming and stripes[stripe] is stream:
            await self._changed.wait()
