"""A bootstrap node as a service: it says where it listens, and serves."""

from __future__ import annotations

from bootstrap.node import BootstrapNode
from peer import events
from peer.net.base import Transport


async def serve_bootstrap(node: BootstrapNode, transport: Transport, emit: events.Emit) -> None:
    """Runs until it is cancelled. Raises UsageError when the disk refuses."""
    address = next((a for a in transport.addresses if "/127." not in a), transport.addresses[0])
    emit(events.Listening(address=f"{address}#{node.manifest.run_id}", addresses=tuple(transport.addresses)))
    await node.run()
