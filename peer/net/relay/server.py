"""A relay: passes sealed records between peers that are connected to it (docs/adr/0022-sealed-relays.md).

The bytes a second of all circuits are bounded, and shared in turn among the peers that asked for them. A record is read
when the one before has been sent, so nothing is kept.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from peer.net.base import Ended, Stream, Timeout, Transport, cancel
from peer.net.uplink import Uplink
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import endpoints, framing, relaying
from protocol.wire.encoding import MessageError
from protocol.wire.relaying import ABSENT, FULL, HERE, MAX_ASK, MAX_RECORD

RECORD_COST = 1024
"""Bytes that a record counts besides its own: many small ones cost the relay more than they carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """Limits of a relay; times in seconds.

    circuits, of_a_peer: circuits at once, in all and that one peer has asked for
    """

    circuits: int = 256
    of_a_peer: int = 64
    ask: float = 10.0  # until a peer says whom it asks for
    open: float = 4.0  # until that one answers
    idle: float = 120.0  # a circuit without records ends after so long
    stalled: float = 30.0  # one whose receiver does not read ends after so long


RELAY_LIMITS = RelayLimits()


class RelayServer:
    """Relays `bps` bits a second at most, between peers for which `is_here` is true."""

    def __init__(
        self, transport: Transport, bps: int, is_here: Callable[[str], bool], *, limits: RelayLimits = RELAY_LIMITS
    ) -> None:
        self.passed = 0
        """Bytes of records, both ways, since the start."""
        self.refused = 0
        """Asks that were answered with no, since the start."""
        self._transport = transport
        self._uplink = Uplink(bps)
        self._is_here = is_here
        self._limits = limits
        self._of: Counter[str] = Counter()

    @property
    def circuits(self) -> int:
        return self._of.total()

    async def serve(self) -> None:
        await self._transport.serve(endpoints.RELAY, self._serve)

    def close(self) -> None:
        self._uplink.close()

    async def _serve(self, stream: Stream) -> None:
        asker = stream.remote
        try:
            peer = relaying.ask_of(await stream.recv(MAX_ASK, timeout=self._limits.ask))
        except framing.FrameError as error:
            raise MessageError(asker, f"relay for {short_peer(asker)}: {error}; it was closed") from None
        if asker == peer or not self._is_here(asker) or not self._is_here(peer):
            return await self._refuse(stream, ABSENT)
        if self.circuits >= self._limits.circuits or self._of[asker] >= self._limits.of_a_peer:
            return await self._refuse(stream, FULL)
        self._of[asker] += 1
        try:
            await self._relay(stream, peer)
        finally:
            self._of[asker] -= 1
            if not self._of[asker]:
                del self._of[asker]

    async def _refuse(self, stream: Stream, state: str) -> None:
        self.refused += 1
        await stream.send(relaying.pack_answer(state))

    async def _relay(self, stream: Stream, peer: str) -> None:
        try:
            onward = await self._transport.open(peer, endpoints.RELAYED, timeout=self._limits.open)
        except RemoteError:
            return await self._refuse(stream, ABSENT)
        try:
            await stream.send(relaying.pack_answer(HERE))
            await self._splice(stream, onward)
        finally:
            await onward.close()

    async def _splice(self, stream: Stream, onward: Stream) -> None:
        idle = self._limits.idle
        try:
            async with asyncio.timeout(idle) as end:

                def lives() -> None:
                    end.reschedule(asyncio.get_running_loop().time() + idle)

                ways = ((stream, onward), (onward, stream))
                pumps = [asyncio.create_task(self._pump(a, b, stream.remote, lives)) for a, b in ways]
                try:
                    await asyncio.gather(*pumps)
                finally:
                    await cancel(*pumps)
        except TimeoutError:
            text = f"circuit of {short_peer(stream.remote)}: nothing came for {idle:g} s; it was closed"
            raise Timeout(stream.remote, text) from None

    async def _pump(self, source: Stream, target: Stream, asker: str, lives: Callable[[], None]) -> None:
        try:
            while True:
                record = await source.recv(MAX_RECORD)
                lives()
                await self._uplink.turn(asker, len(record) + RECORD_COST)
                await target.send(record, timeout=self._limits.stalled)
                self.passed += len(record)
        except Ended:
            await target.finish()
