"""What it costs a peer to be known: bytes a minute of announcements, signs of life and the DHT, with real daemons.

    python -m tests.benchmarks.announcements --peers 10 30 --seconds 120

One bootstrap node and so many peers, each with a network daemon of its own, in one process. A peer does what `potluck join` does to be
known: it announces itself, something new every five seconds as a peer that trains does, keeps its session, and stores and holds records of
the DHT. Counted are all bytes that its daemon writes, to other daemons, to us, and to its pipes (Linux counts them in
/proc/PID/io): more than what leaves the machine. What 10,000 peers would cost follows from the rules in peer/net/directory.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bootstrap.archive import Archive
from bootstrap.node import BootstrapNode
from peer import events
from peer.net import directory, keyfile, p2p
from peer.net.base import Clock
from peer.net.directory import PUBLISH_SECONDS, SAMPLE, TOGETHER, TTL_SECONDS, Directory
from peer.net.network import Network
from peer.net.sockets import socket_base
from peer.net.uplink import Uplink
from peer.node.sessions import Sessions
from protocol.identity import Identity
from protocol.run.manifest import Manifest
from protocol.wire.announcement import Announcement
from protocol.wire.commit import Record
from protocol.wire.encoding import Message
from protocol.wire.session import Announced
from tests.support import tiny
from tests.support.volunteers import QuickDisk


def written(pid: int) -> int:
    """Bytes that a process wrote so far."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


class Peer:
    """All of a peer that others need to know it."""

    def __init__(
        self, manifest: Manifest, identity: Identity, transport: p2p.P2PTransport, node: tuple[str, ...]
    ) -> None:
        self.transport = transport
        about = Announcement(
            run=manifest.run_id, peer=identity.peer_id, addresses=transport.addresses, memory_bytes=1, up_bps=10**7
        )
        self.directory = Directory(manifest, identity, transport, node, about)
        self.sessions = Sessions(Network(transport, self.directory, Clock(), lambda body: None, Uplink()))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.directory.announce(lambda raw: self.sessions.tell(Announced(sealed=raw))))
            group.create_task(self.directory.publish())
            group.create_task(self.sessions.run(self._hear, self._open))
            group.create_task(self._train())

    async def _hear(self, message: Message | Record) -> None: ...

    async def _open(self) -> None: ...

    async def _train(self) -> None:
        step = 0
        while True:
            await asyncio.sleep(1.0)
            step += 1
            self.directory.update(phase="training", round=1, step=step, loss=2.0 + 1 / step)


async def measured(count: int, seconds: float) -> dict[str, Any]:
    manifest = tiny.manifest(start_peers=10**6)  # it never begins
    valid = directory.valid_record(manifest.run_id)
    with tempfile.TemporaryDirectory(prefix="potluck-announcements-") as name:
        folder = Path(name)
        key = folder / "node"
        tasks: list[asyncio.Task[None]] = []
        transports: list[p2p.P2PTransport] = []
        ready: set[str] = set()

        def emit(body: events.Body) -> None:
            if isinstance(body, events.Ready):
                ready.add(body.peer)

        async def begin(path: Path, bootstrap: tuple[str, ...] = ()) -> p2p.P2PTransport:
            transport = await p2p.start(
                path, host="127.0.0.1", bootstrap=bootstrap, validate=valid, sockets=socket_base(), timeout=300.0
            )
            transports.append(transport)
            return transport

        key.write_bytes(tiny.OPERATOR.libp2p_bytes())
        node = await begin(key)
        archive = Archive(folder / "archive", manifest, QuickDisk())
        machine = BootstrapNode(tiny.OPERATOR, node, archive, emit)
        tasks.append(asyncio.create_task(machine.run()))
        peers = []
        for index in range(count):
            path = folder / f"peer-{index}"
            identity = keyfile.load_or_create(path)
            peer = Peer(manifest, identity, await begin(path, node.addresses), node.addresses)
            peer.directory.crowd = count
            peers.append(peer)
            tasks.append(asyncio.create_task(peer.run()))
        while len(ready) < count:
            await asyncio.sleep(0.5)
        before = [(written(p.transport.daemon.pid), p.transport.traffic.bytes_sent) for p in peers]
        node_before, began = written(node.daemon.pid), time.monotonic()
        await asyncio.sleep(seconds)
        minutes = (time.monotonic() - began) / 60
        daemon = [written(p.transport.daemon.pid) - b for p, (b, _) in zip(peers, before, strict=True)]
        streams = [p.transport.traffic.bytes_sent - s for p, (_, s) in zip(peers, before, strict=True)]
        result = {
            "peers": count,
            "seconds": round(60 * minutes),
            "session_kb_a_minute": round(statistics.mean(streams) / minutes / 1e3, 2),
            "daemon_kb_a_minute": round(statistics.mean(daemon) / minutes / 1e3, 1),
            "daemon_kb_a_minute_most": round(max(daemon) / minutes / 1e3, 1),
            "node_daemon_kb_a_minute": round((written(node.daemon.pid) - node_before) / minutes / 1e3, 1),
        }
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for transport in reversed(transports):
            await transport.aclose()
        archive.close()
        return result


def computed(count: int) -> dict[str, Any]:
    """By the rules: what each of so many peers says a minute, what the node hears, and what each of the five peers that hold the DHT's
    key sends: all records for every store."""
    size = 1000  # an announcement of a chain's member with four addresses, and the message around it
    pace = max(PUBLISH_SECONDS, count / TOGETHER)
    sampled = min(count, SAMPLE)
    stores = sampled / (TTL_SECONDS / 3)
    return {
        "peers": count,
        "announcements_kb_a_minute": round(size * 60 / pace / 1e3, 2),
        "node_hears_kb_a_second": round(size * count / pace / 1e3, 1),
        "holder_of_the_dht_key_kb_a_second": round(stores * sampled * size / 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[10, 30])
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    for count in options.peers:
        print(json.dumps(asyncio.run(measured(count, options.seconds))), flush=True)
    for count in (100, 1000, 10_000):
        print(json.dumps(computed(count)), flush=True)


if __name__ == "__main__":
    main()
