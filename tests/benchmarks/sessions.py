"""What a swarm costs its bootstrap node: the real node in a process of its own, and light clients that keep sessions with it.

    python -m tests.benchmarks.sessions --peers 100 300 1000 --rounds 20
    python -m tests.benchmarks.sessions --peers 300 --rounds 3 --own 14 --profile

Every client announces itself, attests, offers payloads of 14 shards, of which `--own` are its own and the others everybody's, serves
them, and reads every record and message, each over streams of its own; what is left out is training, and applying updates. What the
node does to take a payload, to check it and to store it is a cost for each payload, not of sessions: it shows with `--own 14`. The streams are Unix sockets, as those between a node and its
daemon. For each size are printed, of the node: seconds of processor time a round (all its threads; the first rounds, in which
the clients come, apart), its peak memory, the bytes of a record, messages and bytes it sent to each client a round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import functools
import itertools
import json
import multiprocessing
import pstats
import statistics
import tempfile
import time
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from bootstrap.archive import Archive
from bootstrap.node import BootstrapNode
from peer import events
from peer.net.base import Closed, Handler, Stream, Unreachable
from peer.net.stream import Endpoint, FrameStream
from peer.training.device import peak_rss
from protocol.codec import blob_hash, sparse
from protocol.errors import RemoteError
from protocol.identity import Identity
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest, TimingSpec
from protocol.wire import encoding, endpoints, framing
from protocol.wire.announcement import VERSION, Announcement
from protocol.wire.commit import Commit, Part, Record
from protocol.wire.session import Announced, Attest, Finished, Heartbeat, Hello, Offer
from tests.support import tiny
from tests.support.volunteers import QuickDisk

NODE = tiny.OPERATOR.peer_id
LAYERS = 12
"""14 shards, as a model of 0.5B has."""


def make_run(peers: int, rounds: int) -> Manifest:
    return tiny.manifest(
        rounds=rounds,
        start_peers=peers,
        model=ModelSpec(vocab_size=16, d_model=8, n_layers=LAYERS, n_heads=2, d_ff=16, context=8),
        timing=TimingSpec(round_deadline=3600.0, heartbeat=10.0, gone_after=600.0),
    )


# --- streams between the two processes


class SocketTransport(Endpoint):
    """One peer's streams: to the node through `folder`/node, to clients through `folder`/clients. Nobody is in a DHT."""

    def __init__(self, folder: Path, peer: str) -> None:
        super().__init__()
        self.peer_id = peer
        self.addresses: tuple[str, ...] = (f"/unix/p2p/{peer}",)
        self.lost = asyncio.Event()
        self.handlers: dict[str, Handler] = {}
        self._folder = folder

    async def serve(self, name: str, handler: Handler) -> None:
        self.handlers[name] = handler

    async def open(self, peer: str, name: str, *, timeout: float) -> FrameStream:
        path = self._folder / ("node" if peer == NODE else "clients")
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError:
            raise Unreachable(peer, "nobody is there") from None
        writer.write(framing.pack(framing.pack_message([self.peer_id, peer, name])))
        return self.stream(peer, name, reader, writer, writer.transport.abort)

    async def connect(self, addresses: Sequence[str], *, timeout: float) -> None: ...

    async def look(self) -> bool:
        return False

    def doubt(self, peer: str) -> None: ...

    def prefer(self, peers: Collection[str]) -> None: ...

    async def store(self, key: str, subkey: str, value: bytes, *, ttl: float) -> bool:
        return True

    async def get(self, key: str) -> dict[str, bytes]:
        return {}

    async def aclose(self) -> None:
        await self.shut()


async def listen(path: Path, local: dict[str, SocketTransport]) -> asyncio.Server:
    """Lets the other process open streams to our peers."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError, asyncio.IncompleteReadError):
            size = int.from_bytes(await reader.readexactly(framing.PREFIX))
            remote, to, name = framing.unpack_message(await reader.readexactly(size))
            there = local[to]
            if name in there.handlers:
                await there.run(
                    there.handlers[name], there.stream(remote, name, reader, writer, writer.transport.abort)
                )
            else:
                writer.close()  # a client that serves no pings

    return await asyncio.start_unix_server(accept, path, backlog=4096)


# --- the node


def node_process(folder: Path, manifest: Manifest, report: Connection, profile: bool) -> None:
    profiler = cProfile.Profile() if profile else None

    async def live() -> None:
        transport = SocketTransport(folder, NODE)
        archive = Archive(folder / "archive", manifest, QuickDisk())
        over = asyncio.Event()

        def emit(body: events.Body) -> None:
            if isinstance(body, events.Commit):
                if profiler is not None and body.round == 1:
                    profiler.enable()
                size = len(archive.records[body.round])
                spent = time.process_time()
                report.send((body.round, time.monotonic(), spent, peak_rss(), size, transport.traffic.bytes_sent))
            elif isinstance(body, events.Warning):
                report.send(body.text)
            elif isinstance(body, events.RunFinished):
                over.set()

        node = BootstrapNode(tiny.OPERATOR, transport, archive, emit)
        server = await listen(folder / "node", {NODE: transport})
        report.send("listening")
        task = asyncio.create_task(node.run())
        done, _ = await asyncio.wait({task, asyncio.create_task(over.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            task.result()
        if profiler is not None:
            profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
        report.send(None)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()
        await transport.aclose()
        archive.close()

    asyncio.run(live())


# --- the clients


@functools.lru_cache(maxsize=4)
def decoded(raw: bytes) -> Any:
    """What the node sent, which is often the same for everybody."""
    return encoding.decode_any(raw, NODE)


@functools.lru_cache(maxsize=4)
def digests_after(manifest: Manifest, round: int) -> dict[str, str]:
    return {s: blob_hash.name_of(b"%s %d" % (s.encode(), round)) for s in layout.shard_names(manifest.model)}


@functools.lru_cache(maxsize=256)
def payload(manifest: Manifest, shard: str, value: int) -> tuple[bytes, str]:
    """A payload that says `value`, and its digest."""
    arrays = [np.zeros(shape, np.float32) for shape in layout.shapes(manifest.model, shard)]
    arrays[0].flat[0] = value
    data = sparse.encode(manifest.outer.codec, arrays)
    return data, blob_hash.name_of(data)


class Client:
    """Does what the protocol wants of a peer, without a model."""

    def __init__(self, manifest: Manifest, folder: Path, index: int, own: int) -> None:
        self.manifest = manifest
        self.own = own
        self.identity = Identity(index.to_bytes(32))
        self.transport = SocketTransport(folder, self.identity.peer_id)
        self.messages = 0
        self._index = index
        self._payloads: dict[str, bytes] = {}
        self._offer: bytes | None = None

    async def run(self) -> None:
        """From its first word to the end of the run."""
        await self.transport.serve(endpoints.BLOB, self._give)
        stream = await self.transport.open(NODE, endpoints.SESSION, timeout=10.0)
        await stream.send(encoding.encode(Hello(run=self.manifest.run_id, version=VERSION)))
        about = Announcement(
            run=self.manifest.run_id,
            peer=self.identity.peer_id,
            addresses=self.transport.addresses,
            memory_bytes=tiny.full_memory(self.manifest),
            up_bps=10**7,
            serial=1,
        )
        await stream.send(encoding.encode(Announced(sealed=encoding.seal(self.identity, about))))
        beating = asyncio.create_task(self._beat(stream))
        try:
            while True:
                message = decoded(await stream.recv())
                self.messages += 1
                if isinstance(message, Record):
                    await self._decided(stream, message.commit)
                elif isinstance(message, Finished):
                    return
        finally:
            beating.cancel()
            await stream.close()

    async def _beat(self, stream: Stream) -> None:
        with contextlib.suppress(RemoteError):
            while True:
                await asyncio.sleep(self.manifest.timing.heartbeat)
                await stream.send(encoding.encode(Heartbeat(phase="training", round=0)))
                if self._offer is not None:  # as a peer does: a node that was busy may have given up
                    await stream.send(self._offer)

    async def _decided(self, stream: Stream, commit: Commit) -> None:
        attest = Attest(round=commit.round, digests=digests_after(self.manifest, commit.round))
        await stream.send(encoding.encode(attest))
        self._offer = None
        replica = commit.plan and next((r for r in commit.plan.replicas if self.identity.peer_id in r.peers), None)
        if replica is None or commit.plan is None:
            return
        self._payloads.clear()
        work, shards = replica.work, layout.shard_names(self.manifest.model)
        offer = Offer(
            round=commit.plan.round,
            replica=replica.number,
            parts=tuple(self._part(shard, number, commit.plan.round) for number, shard in enumerate(shards)),
            tokens=self.manifest.train.tokens(work.steps, work.micro_batches),
            steps=work.steps,
            loss=2.0,
        )
        self._offer = encoding.encode(offer)
        await stream.send(self._offer)

    def _part(self, shard: str, number: int, round: int) -> Part:
        whose = self._index if number < self.own else 0
        data, digest = payload(self.manifest, shard, 1 + (whose * 64 + round) * 64 + number)
        self._payloads[digest] = data
        return Part(shard=shard, digest=digest, size=len(data), norm=1.0)

    async def _give(self, stream: Stream) -> None:
        with contextlib.suppress(Closed):
            while True:
                request = framing.unpack_message(await stream.recv())
                await stream.send(framing.pack_message({"state": "here", "ask": [], "sure": False}))
                await stream.send(self._payloads[request["blob"]])


def measured(peers: int, rounds: int, own: int, profile: bool) -> dict[str, Any]:
    """One run of so many clients."""
    manifest = make_run(peers, rounds)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    marks: list[tuple[Any, ...]] = []
    with tempfile.TemporaryDirectory(prefix="potluck-sessions-", dir="/dev/shm") as name:
        folder = Path(name)
        process = context.Process(target=node_process, args=(folder, manifest, there, profile), daemon=True)
        process.start()
        there.close()
        assert here.recv() == "listening"

        async def watch() -> None:
            while (mark := await asyncio.to_thread(here.recv)) is not None:
                print(mark, flush=True)
                if not isinstance(mark, str):
                    marks.append(mark)

        async def live() -> list[Client]:
            clients = [Client(manifest, folder, index, own) for index in range(1, peers + 1)]
            server = await listen(folder / "clients", {c.identity.peer_id: c.transport for c in clients})
            async with asyncio.TaskGroup() as group:
                group.create_task(watch())
                for client in clients:
                    group.create_task(client.run())
            for client in clients:
                await client.transport.aclose()
            server.close()
            return clients

        clients = asyncio.run(live())
        process.join()
    first, *others = [(a, b) for a, b in itertools.pairwise(marks)]
    spent = [b[2] - a[2] for a, b in others]
    wall = [b[1] - a[1] for a, b in others]
    return {
        "peers": peers,
        "rounds": rounds,
        "own_payloads": own,
        "cpu_s_coming": round(first[0][2], 2),
        "cpu_s_a_round": round(statistics.median(spent), 3),
        "cpu_s_worst_round": round(max(spent), 3),
        "wall_s_a_round": round(statistics.median(wall), 3),
        "peak_rss_mb": round(max(m[3] for m in marks) / 1e6, 1),
        "record_kb": round(max(m[4] for m in marks) / 1e3, 1),
        "messages_to_a_client_a_round": round(sum(c.messages for c in clients) / peers / rounds, 2),
        "kb_to_a_client_a_round": round((marks[-1][5] - marks[0][5]) / peers / rounds / 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--own", type=int, default=1, help="payloads of a client that are its own, of 14")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    for peers in options.peers:
        print(json.dumps(measured(peers, options.rounds, options.own, options.profile)), flush=True)


if __name__ == "__main__":
    main()
