"""A bootstrap node as a service: it says where it listens, and serves; besides the run, it relays between its peers."""

from __future__ import annotations

import asyncio

from bootstrap.node import BootstrapNode
from peer import events
from peer.net.base import Transport
from peer.net.relay import RelayServer

RELAYED_SECONDS = 60.0
"""How often it is told what was relayed, while something is."""


async def serve_bootstrap(node: BootstrapNode, transport: Transport, emit: events.Emit, relay_bps: int = 0) -> None:
    """Runs until it is cancelled. `relay_bps`: bits a second that it relays, at most. Raises UsageError when the disk refuses."""
    emit(events.listening(node.manifest.run_id, transport.addresses))
    if not relay_bps:
        return await node.run()
    relay = RelayServer(transport, relay_bps, node.has_session)
    await relay.serve()
    telling = asyncio.create_task(_tell(relay, emit))
    try:
        await node.run()
    finally:
        telling.cancel()
        relay.close()


async def _tell(relay: RelayServer, emit: events.Emit) -> None:
    """Tells now and then what was relayed. Never returns."""
    told = (0, 0)
    while True:
        await asyncio.sleep(RELAYED_SECONDS)
        if relay.passed != told[0] or (
            relay.refused and not told[1]
        ):  # those who go on asking are not worth a line each time
            emit(
                events.Relayed(
                    circuits=relay.circuits,
                    bytes=relay.passed,
                    refused=relay.refused,
                    bps=8 * (relay.passed - told[0]) / RELAYED_SECONDS,
                )
            )
            told = relay.passed, relay.refused
