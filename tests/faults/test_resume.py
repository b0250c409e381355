"""A download whose process is killed again and again: what came stays, over real daemons."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from peer.net import p2p
from peer.net.blobs import BlobServer, BlobStore, Fetcher
from peer.net.uplink import Uplink
from protocol.codec import blob_hash
from protocol.wire import endpoints
from tests.support import potluck

SIZE = 200_000_000
"""Bytes: the state of 50 million parameters."""
KILLS = 10
HOLDERS = 3
RATE_BPS = 60_000_000
"""Of each holder: the download takes about nine seconds in all."""


@contextlib.asynccontextmanager
async def holders(folder: Path, count: int, data: bytes) -> AsyncIterator[list[p2p.P2PTransport]]:
    """Daemons that serve `data`, each at RATE_BPS."""
    transports: list[p2p.P2PTransport] = []
    try:
        for index in range(count):
            transports.append(await start(folder / f"holder-{index}"))
            store = BlobStore(folder / f"holder-{index}-blobs")
            await asyncio.to_thread(store.put, data)
            await BlobServer(store, uplink=Uplink(RATE_BPS)).serve(transports[-1])
        yield transports
    finally:
        for transport in transports:
            await transport.aclose()


async def start(key: Path, *bootstrap: str) -> p2p.P2PTransport:
    return await p2p.start(key, host="127.0.0.1", bootstrap=bootstrap, validate=lambda key, subkey, value: True)


async def fetch(folder: Path, name: str, size: int, *addresses: str) -> None:
    """What the process that is killed does."""
    transport = await start(folder / "key")
    for address in addresses:
        await transport.connect([address], timeout=60)
    store = BlobStore(folder / "blobs")
    await Fetcher(transport, store).fetch(name, size, [a.rpartition("/p2p/")[2] for a in addresses])
    await transport.aclose()


def here(folder: Path, name: str) -> int:
    """Bytes of the file that grows (it has holes, so its size does not tell)."""
    path = folder / "blobs" / "parts" / name
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_blocks * 512
    return SIZE if (folder / "blobs" / name).exists() else 0


@pytest.mark.campaign
async def test_ten_kills_repeat_less_than_two_percent(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(SIZE)
    name = blob_hash.name_of(data)

    async with holders(tmp_path, HOLDERS, data) as serving:
        addresses = [t.addresses[0] for t in serving]
        command = (tmp_path, name, SIZE, *addresses)
        for kill in range(KILLS + 1):
            process = await asyncio.to_thread(potluck.Popen, *command, module="tests.faults.test_resume")
            while process.poll() is None and (kill == KILLS or here(tmp_path, name) < SIZE * (kill + 1) // (KILLS + 1)):
                await asyncio.sleep(0.002)
            if kill < KILLS:
                assert process.poll() is None, "it was to be killed before its end"
                os.kill(process.pid, signal.SIGKILL)
                await asyncio.to_thread(process.wait)
        assert process.returncode == 0
        assert BlobStore(tmp_path / "blobs").get(name) == data
        sent = sum(t.traffic.sent[endpoints.BLOB] for t in serving)
        print(f"repeated {100 * (sent / SIZE - 1):.2f} % of {SIZE} bytes in {KILLS} kills")
        assert sent < 1.02 * SIZE, f"{100 * (sent / SIZE - 1):.2f} % were sent again"


if __name__ == "__main__":
    asyncio.run(fetch(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:]))
