"""Streams between two peers through a third one, who can neither read nor change what passes (docs/adr/0022-sealed-relays.md)."""

from peer.net.relay.server import RelayServer
from peer.net.relay.transport import RelayedTransport

__all__ = ["RelayServer", "RelayedTransport"]
