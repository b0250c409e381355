"""The network of a peer, as its parts use it."""

from __future__ import annotations

from dataclasses import dataclass

from peer import events
from peer.net.base import Clock, Transport
from peer.net.directory import Directory
from peer.net.uplink import Uplink


@dataclass(frozen=True, slots=True)
class Network:
    """One per peer."""

    transport: Transport
    directory: Directory  # where the others are; it connects to them, and knows the operators' nodes
    clock: Clock
    emit: events.Emit
    uplink: Uplink  # what is sent takes turns in it

    def warn(self, text: str) -> None:
        self.emit(events.Warning(text=text))
