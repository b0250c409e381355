"""The machine of a peer in tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer.node.config import JoinConfig, Machine
from peer.node.open_run import Run
from peer.training.device import Hardware


def machine(
    folder: Path,
    memory_bytes: int,
    *,
    devices: tuple[str, ...] = ("cpu",),
    nodes: Sequence[str] = (),
    up_bps: int = 10**9,
    down_bps: int = 10**9,
    **options: Any,
) -> Machine:
    """That of a peer whose line is not measured; it begins with the nodes at these addresses."""
    run = Run(None, "", tuple(nodes))
    config = JoinConfig(run=run, folder=folder, up_bps=up_bps, down_bps=down_bps, **options)
    return Machine(config, Hardware(devices, memory_bytes))
