"""A bootstrap node as a service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bootstrap.archive import Archive
from bootstrap.node import Node
from peer import events
from peer.events import Emitter
from peer.net.base import Transport
from protocol.identity import Identity
from protocol.run.manifest import Manifest

if TYPE_CHECKING:
    pass


async def serve_bootstrap(
    manifest: Manifest,
    key: Identity,
    transport: Transport,
    archive: Archive,
    emit: Emitter,
    initial_peers: Sequence[str] = (),
) -> None:
    """The node, once everything that it needs is there; runs until it is cancelled."""
    node = Node(manifest, key, transport, archive, emit, initial_peers)
    address = next((a for a in transport.addresses if "/127." not in a), transport.addresses[0])
    emit(events.Listening(address=f"{address}#{manifest.run_id}", addresses=tuple(transport.addresses)))
    await node.run()
