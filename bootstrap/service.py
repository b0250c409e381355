"""A bootstrap node as a service: it says where it listens, and serves."""

from __future__ import annotations

from bootstrap.node import BootstrapNode
from peer import events
from peer.net.base import Transport


async def serve_bootstrap(node: BootstrapNode, transport: Transport, emit: events.Emit) -> None:
    """Runs until it is cancelled. Raises UsageError when the disk refuses."""
    emit(events.listening(node.manifest.run_id, transport.addresses))
    await node.run()
