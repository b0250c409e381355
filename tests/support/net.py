"""Parts that unit tests of net share with others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from peer.net import base, p2p
from peer.net.base import (
    Transport,
)
from peer.net.memory import MemoryNetwork
from protocol.identity import Identity

DEADLINE = 200.0
"""Seconds; far above what anything here takes, for machines that are busy."""


SOON = 60.0
SOCKETS = Path(f"/tmp/net-{os.getpid()}")
"""Where socket folders are made: pytest's own folders have too long names for sockets."""


@pytest.fixture(autouse=True)
def sockets() -> Iterator[Path]:
    """No child process, socket or socket folder may outlive a test."""
    before = len(psutil.Process().net_connections("all"))
    children = set(psutil.Process().children())  # torch may have started its shared-memory manager before
    SOCKETS.mkdir()
    yield SOCKETS
    _, alive = psutil.wait_procs(set(psutil.Process().children()) - children, timeout=5)
    assert alive == []
    assert len(psutil.Process().net_connections("all")) <= before
    SOCKETS.rmdir()


async def start(key: Path, **options: Any) -> p2p.P2PTransport:
    """A peer on the loopback interface that believes every record."""
    return await p2p.start(key, **{"host": "127.0.0.1", "validate": anything, "sockets": SOCKETS, **options})


def anything(key: str, subkey: str, value: bytes) -> bool:
    return True


@contextlib.asynccontextmanager
async def swarm(
    kind: str, folder: Path, count: int, *validate: base.Validate, **options: Any
) -> AsyncIterator[list[Transport]]:
    """`count` connected peers; the first is the others' bootstrap node. `options`: of `p2p.start`."""
    peers: list[Transport] = []
    network = MemoryNetwork()
    try:
        for index in range(count):
            check = validate[index] if index < len(validate) else anything
            if kind == "memory":
                peers.append(network.transport(Identity(bytes([index]) * 32).peer_id, check))
            else:
                bootstrap = peers[0].addresses if peers else ()
                peers.append(await start(folder / str(index), bootstrap=bootstrap, validate=check, **options))
        yield peers
    finally:
        for peer in reversed(peers):
            await peer.aclose()
