"""The network of a peer in tests that need no directory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from peer import events
from peer.net.base import Clock, Transport
from peer.net.network import Network
from peer.net.uplink import Uplink


class Known:
    """Stands for a Directory. `nodes` are the operators, or give them."""

    def __init__(
        self,
        reach: Callable[[str], Awaitable[None]] | None = None,
        lost: Callable[[str], None] | None = None,
        nodes: Sequence[str] | Callable[[], Sequence[str]] = (),
        peers: Callable[[], Awaitable[list[str]]] | None = None,
        addresses: Callable[[str], Sequence[str]] = lambda peer: (),
    ) -> None:
        self._reach, self._nodes, self._peers = reach, nodes, peers
        self.lost = lost or (lambda peer: None)
        self.addresses = addresses

    @property
    def operators(self) -> Sequence[str]:
        return self._nodes() if callable(self._nodes) else self._nodes

    async def reach(self, peer: str) -> None:
        if self._reach is not None:
            await self._reach(peer)

    async def peers(self) -> list[str]:
        return [] if self._peers is None else await self._peers()


def network(
    transport: Transport,
    reach: Callable[[str], Awaitable[None]] | None = None,
    *,
    clock: Clock | None = None,
    emit: events.Emit = lambda body: None,
    limit: int | None = None,
    **known: Any,
) -> Network:
    """A network over this transport. `limit`: of the uplink, in bits per second; `known`: see Known."""
    return Network(transport, Known(reach, **known), clock or Clock(), emit, Uplink(limit))  # type: ignore[arg-type]
