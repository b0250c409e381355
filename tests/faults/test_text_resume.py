"""A peer that fetches text is killed in the middle: what came stays, over real daemons."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from bootstrap.archive import ServedText
from peer.corpus.fetched import TextAccess, open_text
from peer.net import p2p
from peer.net.blobs import BlobServer, BlobStore
from peer.net.disk import Disk
from peer.net.uplink import Uplink
from protocol.codec import blob_hash
from protocol.identity import Identity
from protocol.run import corpus
from protocol.run import manifest as manifests
from protocol.run.manifest import Manifest
from protocol.wire import endpoints
from tests.support import networks, potluck
from tests.support.text_swarm import STEP, manifest, write_noise

SEQUENCES = 16_000
"""32 MB."""
KILLS = 1
RATE_BPS = 60_000_000


async def start(key: Path, *bootstrap: str) -> p2p.P2PTransport:
    return await p2p.start(key, host="127.0.0.1", bootstrap=bootstrap, validate=lambda key, subkey, value: True)


async def fetch(folder: Path, run: Manifest, address: str) -> None:
    """What the process that is killed does: reads a round, the whole corpus."""
    transport = await start(folder / "key", address)

    async def reach(peer: str) -> None:
        await transport.connect([address], timeout=60.0)

    access = TextAccess(
        network=networks.network(transport, reach, emit=lambda body: print(body, flush=True), nodes=run.operators),
        folder=folder / "text",
        limit=1 << 30,
        disk=Disk(),
    )
    text = await open_text(run, access)
    slots = corpus.slots(0, 0, SEQUENCES)
    text.expect([slots])
    for step in range(SEQUENCES // STEP):
        await text.sequences(corpus.slots(0, step, STEP))
    await text.aclose()
    await transport.aclose()


def here(folder: Path) -> int:
    """Bytes of ranges that are on disk."""
    return sum(path.stat().st_size for path in folder.glob("text/*") if blob_hash.is_name(path.name))


async def test_a_kill_repeats_less_than_two_percent(tmp_path: Path) -> None:
    noise = write_noise(tmp_path / "corpus", SEQUENCES)
    whole = SEQUENCES * noise.index.stride
    node = await start(tmp_path / "node")
    try:
        served = ServedText(noise.folder, noise.index.to_bytes(), Disk())
        named = {endpoints.CORPUS_NAME: served.index}
        store = BlobStore(tmp_path / "blobs")
        server = BlobServer(store, named=named, uplink=Uplink(RATE_BPS))
        server.add_text(served)
        await server.serve(node)
        operator = Identity.from_libp2p((tmp_path / "node").read_bytes())
        run = manifest(noise.index, [operator])
        (tmp_path / "run.json").write_bytes(run.to_bytes())
        command = (tmp_path, node.addresses[0])
        for kill in range(KILLS + 1):
            process = await asyncio.to_thread(potluck.Popen, *command, module="tests.faults.test_text_resume")
            while process.poll() is None and (kill == KILLS or here(tmp_path) < whole * (kill + 1) // (KILLS + 1)):
                await asyncio.sleep(0.005)
            if kill < KILLS:
                assert process.poll() is None, "it was to be killed before its end"
                os.kill(process.pid, signal.SIGKILL)
                await asyncio.to_thread(process.wait)
        assert process.returncode == 0
        sent = node.traffic.sent[endpoints.BLOB]
        print(f"repeated {100 * (sent / whole - 1):.2f} % of {whole} bytes in {KILLS} kills")
        assert sent < 1.02 * whole, f"{100 * (sent / whole - 1):.2f} % were sent again"
    finally:
        await node.aclose()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    asyncio.run(fetch(folder, manifests.from_bytes((folder / "run.json").read_bytes(), "here"), sys.argv[2]))
