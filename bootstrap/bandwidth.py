"""Answers peers that measure their lines (peer/net/bandwidth.py says how), as far as our own line and time allow.

One probe of a peer at a time, and AT_ONCE of all: more would measure each other. Before one begins, all the bytes that it may take are
set aside from what it gives in a minute, and what it did not take is given back. Whoever finds no room is told so by the end of its stream, at once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from peer.net.bandwidth import HEAD, PIECE, WAY_BYTES
from peer.net.base import Ended, Stream, Transport
from peer.net.clock import Clock
from peer.net.striped_stream import STRIPES
from protocol.identity import short_peer
from protocol.wire import endpoints
from protocol.wire.encoding import MessageError

AT_ONCE = 2
PROBE_BYTES = WAY_BYTES + 1_000_000
"""One way, with what requests and pings take."""
LEAST_BYTES = 2048
"""A request and its answer count as so many at least: they take our time, too."""
STREAMS = 2 * STRIPES + 1
"""Of one probe: those of the way before may not be closed yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a node gives all peers together in a minute, and how many seconds it has for a probe and waits for a request."""

    bytes_per_minute: int = 16 * PROBE_BYTES
    probe_s: float = 30.0
    idle_s: float = 10.0


BOUNDS = Bounds()


@dataclass(slots=True)
class _Probe:
    """One that is under way: bytes that it may still take, until when, and its open streams."""

    left: int
    until: float
    streams: int = 0


class Bandwidth:
    """One per node."""

    def __init__(self, clock: Clock, bounds: Bounds = BOUNDS) -> None:
        self._clock = clock
        self._bounds = bounds
        self._probes: dict[str, _Probe] = {}
        self._free = float(bounds.bytes_per_minute)
        self._free_at = clock.steady()

    @property
    def probes(self) -> int:
        """How many are under way."""
        return len(self._probes)

    async def serve(self, transport: Transport) -> None:
        """Lets peers measure."""
        await transport.serve(endpoints.BANDWIDTH, self.answer)

    async def answer(self, stream: Stream) -> None:
        """One stream of a probe. Raises RemoteError."""
        probe = self._admit(stream.remote)
        if probe is None:
            return  # which tells the peer that we are busy
        probe.streams += 1
        try:
            async with asyncio.timeout(max(0.0, probe.until - self._clock.steady())):
                while True:
                    await self._next(stream, probe)
        except Ended:
            return
        except TimeoutError:
            raise self._bad(stream, f"longer than {self._bounds.probe_s:g} s") from None
        finally:
            probe.streams -= 1
            if not probe.streams:
                del self._probes[stream.remote]
                self._free += probe.left

    def _admit(self, peer: str) -> _Probe | None:
        """The probe that a stream of `peer` belongs to, or None where there is no room for it."""
        probe = self._probes.get(peer)
        if probe is not None:
            return probe if probe.streams < STREAMS else None
        now = self._clock.steady()
        most = self._bounds.bytes_per_minute
        self._free = min(most, self._free + (now - self._free_at) * most / 60)
        self._free_at = now
        if len(self._probes) >= AT_ONCE or self._free < PROBE_BYTES:
            return None
        self._free -= PROBE_BYTES
        self._probes[peer] = probe = _Probe(PROBE_BYTES, now + self._bounds.probe_s)
        return probe

    async def _next(self, stream: Stream, probe: _Probe) -> None:
        request = await stream.recv(HEAD + PIECE, timeout=self._bounds.idle_s)
        wanted = int.from_bytes(request[:HEAD], "big")
        if len(request) < HEAD or wanted > PIECE:
            raise self._bad(stream, f"{wanted} bytes at once")
        taken = max(LEAST_BYTES, len(request) + wanted)
        if taken > probe.left:
            raise self._bad(stream, f"more than {PROBE_BYTES} bytes")
        probe.left -= taken
        await stream.send(bytes(wanted), timeout=self._bounds.idle_s)

    def _bad(self, stream: Stream, what: str) -> MessageError:
        return MessageError(stream.remote, f"bandwidth of {short_peer(stream.remote)}: wants {what}; it was closed")
