"""Tries for others whether they can be reached (docs/adr/0023-dial-back.md).

Who asks names ports only. They are tried at the address that its connection to us comes from, so nobody can send us elsewhere. What
counts is that a libp2p host greets there; that one refuses, is silent or is something else is not told apart, not by the time
of the answer either. Each address, each peer and all together may ask so often, and a connection is closed after its first bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from peer.net import greeting
from peer.net.address import host_of, is_circuit, port_of
from peer.net.base import Transport, serve_calls
from peer.net.clock import Clock
from peer.net.guests import network_of
from peer.net.token_bucket import Rate, TokenBucket, TokenBuckets
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import Dialled, DialMe

MAX_REQUEST = 256
EACH = Rate(1 / 30, 6.0)
TOGETHER = Rate(4.0, 32.0)

Greets = Callable[[str, int], Coroutine[Any, Any, bool]]
"""(IP address, port) -> whether a libp2p host greets there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """`seconds` that a port has to greet; requests a second on average and at once, of one address or peer, and of all; `at_once`:
    that are under way; `kept`: addresses and peers whose requests are counted."""

    seconds: float = 3.0
    each: Rate = EACH
    together: Rate = TOGETHER
    at_once: int = 16
    kept: int = 4096


BOUNDS = Bounds()


async def greets(host: str, port: int) -> bool:
    """Whether a libp2p host greets there. Takes as long as the other side likes."""
    try:
        return await greeting.is_given(host, port)
    except OSError:
        return False


class DialBack:
    """One per process that answers."""

    def __init__(self, transport: Transport, clock: Clock, greets: Greets = greets, bounds: Bounds = BOUNDS) -> None:
        self._transport = transport
        self._clock = clock
        self._greets = greets
        self._bounds = bounds
        self._asked = TokenBuckets(bounds.each, bounds.kept)
        self._together = TokenBucket(*bounds.together)
        self._under_way = 0

    async def serve(self) -> None:
        """Lets others ask."""
        await serve_calls(self._transport, endpoints.DIAL_BACK, self._answer, limit=MAX_REQUEST)

    async def _answer(self, peer: str, request: bytes) -> bytes:
        """The reply to a call. Raises RemoteError."""
        ask = encoding.expect(DialMe, encoding.decode(request, peer), peer)
        seen = self._transport.seen_at(peer)
        host = "" if is_circuit(seen) else host_of(seen)
        network = "" if is_circuit(seen) else network_of(seen)
        if not network:
            return encoding.encode(Dialled(host=""))
        now = self._clock.steady()
        may = all(self._asked.of(who).take(now) for who in (peer, network))
        if not may or self._under_way >= self._bounds.at_once or not self._together.take(now):
            raise RemoteError(peer, f"dial-back for {short_peer(peer)}: asked too often; ask somebody else")
        self._under_way += 1
        try:
            return encoding.encode(Dialled(host=host, ports=await self._try(host, {*ask.ports, port_of(seen)})))
        finally:
            self._under_way -= 1

    async def _try(self, host: str, ports: set[int]) -> tuple[int, ...]:
        """The ports at which a libp2p host greets. Takes all its time unless it is all of them."""
        tasks = {asyncio.create_task(self._greets(host, port)): port for port in ports if port}
        over = asyncio.create_task(asyncio.sleep(self._bounds.seconds))
        try:
            while not over.done() and not all(task.done() and task.result() for task in tasks):
                pending = [task for task in tasks if not task.done()]
                await asyncio.wait([over, *pending], return_when=asyncio.FIRST_COMPLETED)
            return tuple(sorted(port for task, port in tasks.items() if task.done() and task.result()))
        finally:
            for task in (over, *tasks):
                task.cancel()
            await asyncio.gather(over, *tasks, return_exceptions=True)
