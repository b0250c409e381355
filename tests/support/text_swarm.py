"""Peers that fetch a corpus of noise from nodes and from each other, over an in-memory network or real daemons."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bootstrap.archive import ServedText
from peer import events
from peer.corpus.fetched import FetchedText, FetchTimeouts, TextAccess, open_text
from peer.corpus.mirrors import Mirrors
from peer.corpus.records import ChunkWriter
from peer.net import p2p
from peer.net.base import Stream, Transport
from peer.net.blobs import BlobServer, BlobStore
from peer.net.disk import Disk
from peer.net.memory import MemoryNetwork
from peer.net.uplink import Uplink
from protocol.identity import Identity
from protocol.planning.allotment import HEADROOM
from protocol.run import corpus
from protocol.run.corpus import CorpusIndex
from protocol.run.layout import ModelSpec
from protocol.run.manifest import DataSpec, Manifest, TrainSpec
from protocol.wire import endpoints, framing
from tests.support import networks, tiny

L, VOCAB = 1023, 4096
"""A sequence has 2,048 bytes, a range sixteen sequences."""
STEP = 16
"""Sequences of an inner step."""
PATIENCE = FetchTimeouts(retry=0.05, hopeless=20.0)


@dataclass(frozen=True, slots=True)
class Noise:
    """A corpus in a folder, and its sequences [count, L + 1]."""

    folder: Path
    index: CorpusIndex
    ids: NDArray[np.int64]

    def slots(self, seed: bytes, at: range) -> NDArray[np.int64]:
        """What the slots `at` read."""
        parts = [self.ids[r.start : r.stop] for r in corpus.sequences(seed, self.index.sequences, at)]
        return np.concatenate(parts)


def write_noise(folder: Path, count: int, seed: int = 0) -> Noise:
    """A corpus of `count` sequences of noise, and 8 that are held out."""
    ids = np.random.default_rng(seed).integers(0, VOCAB, (count + 8, L + 1)).astype("<u2")
    disk, each = Disk(), corpus.sequences_per_chunk(L, VOCAB)
    disk.make_folder(folder / corpus.CHUNKS)
    train, held = (ChunkWriter(disk, folder / corpus.CHUNKS, each, lambda number: None) for _ in range(2))
    for writer, rows in ((train, ids[:count]), (held, ids[count:])):
        writer.add(rows)
        writer.finish()
    index = CorpusIndex(
        tokenizer="0" * 64,
        vocab_size=VOCAB,
        seed=0,
        sequence=L,
        sequences=count,
        chunks=b"".join(map(bytes.fromhex, train.names)),
        held_out=held.names[0],
        held_out_sequences=8,
        documents=1,
        tokens=ids.size,
        text_bytes=ids.size,
        held_out_tokens=8 * L,
        held_out_bytes=32 * L,
    )
    (folder / corpus.INDEX).write_bytes(index.to_bytes())
    return Noise(folder, index, ids[:count].astype(np.int64))


def manifest(index: CorpusIndex, nodes: Sequence[Identity], mirrors: Sequence[str] = ()) -> Manifest:
    """A run over this corpus."""
    return tiny.manifest(
        operators=tuple(node.peer_id for node in nodes),
        model=ModelSpec(vocab_size=VOCAB, d_model=8, n_layers=1, n_heads=2, d_ff=16, context=L),
        train=TrainSpec(inner_steps=500, micro_batches=4, rows=4, sequence=L, lr=1e-3, warmup_steps=0, total_steps=9),
        data=DataSpec(corpus=index.digest, mirrors=tuple(mirrors)),
    )


class Watched:
    """A served stream. `spoil(index, data)` replaces a range; its errors end the stream. Counts sent ranges."""

    def __init__(self, stream: Stream, member: Member) -> None:
        self._stream, self._member = stream, member
        self.remote, self.name = stream.remote, stream.name
        self._asked: tuple[str, int] | None = None
        self._here = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def recv(self, limit: int = framing.MAX_FRAME, *, timeout: float | None = None) -> bytes:
        frame = await self._stream.recv(limit, timeout=timeout)
        with contextlib.suppress(framing.FrameError):
            match framing.unpack_message(frame):
                case {"in": [str(chunk), int(), int(index)]}:
                    self._asked = chunk, index
        return frame

    async def send(self, *parts: bytes | memoryview, timeout: float = 60.0) -> None:
        data = b"".join(map(bytes, parts))
        if self._asked is not None:
            if not self._here and framing.unpack_message(data).get("state") == "here":
                self._here = data  # it is sent with the range
                return
            if self._here:
                asked, here, self._asked, self._here = self._asked, self._here, None, b""
                data = await self._member.spoil(asked[1], data)
                if not data:
                    data = framing.pack_message({"state": "absent"})
                elif isinstance(data, bytes):
                    self._member.gave[asked] += 1
                    await self._stream.send(here, timeout=timeout)
                else:
                    data = framing.pack_message(data)
        await self._stream.send(data, timeout=timeout)


async def honest(index: int, data: bytes) -> bytes:
    """What is sent in place of a range: itself."""
    return data


@dataclass(slots=True)
class Member:
    """A peer that serves. `gave`: how often each range of each chunk."""

    transport: Transport
    gave: Counter[tuple[str, int]] = field(default_factory=Counter)
    spoil: Callable[[int, bytes], Any] = honest

    async def serve(self, server: BlobServer) -> None:
        """Over streams that are watched."""
        member = self

        class Watching:
            async def serve(self, name: str, handler: Callable[[Stream], Any]) -> None:
                await member.transport.serve(name, lambda stream: handler(Watched(stream, member)))  # type: ignore[arg-type]

        await server.serve(Watching())  # type: ignore[arg-type]

    @property
    def sent(self) -> int:
        """Bytes of text, and about it."""
        return self.transport.traffic.sent[endpoints.BLOB]


@dataclass(slots=True)
class Reader(Member):
    """A peer that reads the text."""

    text: FetchedText = field(kw_only=True)
    told: list[events.Body] = field(kw_only=True)
    folder: Path = field(kw_only=True)

    @property
    def warnings(self) -> list[str]:
        return [body.text for body in self.told if isinstance(body, events.Warning)]

    async def settle(self) -> None:
        """Returns when all that is expected is here."""
        while self.text.is_fetching:
            await asyncio.sleep(0.001)


class TextSwarm:
    """Nodes that serve the corpus of `noise`, and peers; an async context. `kind`: memory or p2p (real daemons)."""

    def __init__(
        self,
        noise: Noise,
        folder: Path,
        kind: str = "memory",
        nodes: int = 1,
        mirrors: Sequence[str] = (),
        uplink: Uplink | None = None,
    ) -> None:
        self._count, self._mirrors, self._uplink = nodes, mirrors, uplink
        self.noise = noise
        self.folder = folder
        self.nodes: list[Member] = []
        self.peers: list[Reader] = []
        self._kind = kind
        self._network = MemoryNetwork()
        self._identities = [Identity(bytes([200 + i]) * 32) for i in range(8)]
        self._strangers: dict[int, Transport] = {}
        self._numbers = itertools.count()
        self._stack = contextlib.AsyncExitStack()
        self.manifest = manifest(noise.index, self._identities[:1])
        self.operating: list[str] = []
        """The nodes that the peers know."""

    async def __aenter__(self) -> TextSwarm:
        for i in range(self._count):
            transport = await self._transport(f"node-{i}", self._identities[i])
            member = Member(transport)
            served = ServedText(self.noise.folder, self.noise.index.to_bytes(), Disk())
            named = {endpoints.CORPUS_NAME: served.index}
            store = BlobStore(self.folder / f"node-{i}")
            server = BlobServer(store, named=named, uplink=self._uplink or Uplink())
            server.add_text(served)
            await member.serve(server)
            self.nodes.append(member)
        operators = [node.transport.peer_id for node in self.nodes] or [self._identities[0].peer_id]
        run = manifest(self.noise.index, self._identities[:1], self._mirrors)
        self.manifest = dataclasses.replace(run, operators=tuple(operators))
        self.operating = operators
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def start(
        self,
        limit: int = 1 << 30,
        folder: Path | None = None,
        disk: Disk | None = None,
        mirrors: Mirrors | None = None,
        patience: FetchTimeouts = PATIENCE,
    ) -> Reader:
        """A peer, in a new folder unless one is given."""
        number = next(self._numbers)
        transport = await self._transport(f"peer-{number}", Identity(bytes([number]) * 32))
        folder = folder or self.folder / f"text-{number}"
        told: list[events.Body] = []
        access = TextAccess(
            network=networks.network(transport, self._reach(transport), emit=told.append, nodes=lambda: self.operating),
            folder=folder,
            limit=limit,
            disk=disk or Disk(),
            patience=patience,
            mirrors=mirrors,
        )
        text = await open_text(self.manifest, access)
        self._stack.push_async_callback(text.aclose)
        reader = Reader(transport, text=text, told=told, folder=folder)
        server = BlobServer(BlobStore(self.folder / f"blobs-{number}"))
        server.add_text(text)
        await reader.serve(server)
        self.peers.append(reader)
        return reader

    def stranger(self, number: int = 0) -> Transport:
        """Another peer on the in-memory network."""
        if number not in self._strangers:
            self._strangers[number] = made = self._network.transport(Identity(bytes([100 + number]) * 32).peer_id)
            self._stack.push_async_callback(made.aclose)
        return self._strangers[number]

    async def stop(self, peer: Member) -> None:
        """It is gone."""
        await peer.transport.aclose()

    def slots(self, at: range) -> NDArray[np.int64]:
        """What these slots read."""
        return self.noise.slots(self.manifest.seed_bytes, at)

    def copies(self) -> list[int]:
        """How often the nodes sent each range, leaves left out, of those that they sent."""
        total: Counter[tuple[str, int]] = Counter()
        for node in self.nodes:
            total.update(node.gave)
        return [count for (_, index), count in total.items() if index >= 0]

    async def _transport(self, name: str, identity: Identity) -> Transport:
        transport: Transport
        if self._kind == "memory":
            transport = self._network.transport(identity.peer_id)
        else:
            transport = await p2p.start(
                self.folder / f"key-{name}",
                host="127.0.0.1",
                bootstrap=self.nodes[0].transport.addresses if self.nodes else (),
                validate=lambda key, subkey, value: True,
            )
        self._stack.push_async_callback(transport.aclose)
        return transport

    def _reach(self, transport: Transport) -> Callable[[str], Any]:
        async def reach(peer: str) -> None:
            if self._kind != "memory":
                for member in (*self.nodes, *self.peers):
                    if member.transport.peer_id == peer:
                        await transport.connect(member.transport.addresses, timeout=10.0)

        return reach


def given(expected: int) -> int:
    """Slots that a plan gives a replica that is expected to do `expected` steps (protocol/planning/allotment.py)."""
    return STEP * (math.ceil(expected * HEADROOM) + 1)
