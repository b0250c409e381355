"""Streams between two peers through a third one, which can neither read nor change them (docs/adr/0022)."""

from peer.net.relay.transport import RelayedTransport, RelayServer

__all__ = ["RelayServer", "RelayedTransport"]
