"""Relayed streams over real daemons: a call, a blob and a chain's pipe, and the death of a relay."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from peer.chain.connect import PipelineStreams
from peer.net import keyfile, p2p
from peer.net.base import Stream, Unreachable, call, serve_calls
from peer.net.blobs import NO_ROUND, BlobServer, BlobStore, Fetcher
from peer.net.relay import RelayedTransport, RelayServer
from protocol.identity import short_peer
from protocol.wire import endpoints
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from tests.support import networks

SOCKETS = Path(f"/tmp/relay-{os.getpid()}")
"""Where socket folders are made: pytest's own folders have too long names for sockets."""


async def start(key: Path, bootstrap: tuple[str, ...] = ()) -> p2p.P2PTransport:
    return await p2p.start(key, host="127.0.0.1", bootstrap=bootstrap, validate=lambda *_: False, sockets=SOCKETS)


class Parted:
    """A transport with real daemons that finds a way to some peers only, as from behind a router."""

    def __init__(self, inner: p2p.P2PTransport, reached: Sequence[str]) -> None:
        self._inner, self._reached = inner, reached

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def open(self, peer: str, name: str, *, timeout: float) -> Stream:
        self._check(peer)
        return await self._inner.open(peer, name, timeout=timeout)

    async def connect(self, addresses: Sequence[str], *, timeout: float) -> None:
        self._check(addresses[0].rpartition("/p2p/")[2])
        await self._inner.connect(addresses, timeout=timeout)

    def _check(self, peer: str) -> None:
        if peer not in self._reached:
            raise Unreachable(peer, f"peer {short_peer(peer)}: no answer in time; check the address")


@contextlib.asynccontextmanager
async def homes(folder: Path) -> AsyncIterator[tuple[list[p2p.P2PTransport], list[RelayedTransport]]]:
    """Two relays, and two peers that are connected to both of them and cannot connect to each other."""
    SOCKETS.mkdir()
    relays: list[p2p.P2PTransport] = []
    peers: list[RelayedTransport] = []
    servers: list[RelayServer] = []
    try:
        for name in ("r1", "r2"):
            relays.append(await start(folder / name))
            servers.append(RelayServer(relays[-1], 10**9, lambda peer: True))
            await servers[-1].serve()
        names = [relay.peer_id for relay in relays]
        for name in ("a", "b"):
            direct = await start(folder / name)
            own: Any = Parted(direct, names)
            peers.append(await RelayedTransport.begin(own, keyfile.load_or_create(folder / name), names))
            for relay in relays:
                await direct.connect(relay.addresses, timeout=60.0)
        yield relays, peers
    finally:
        for server in servers:
            server.close()
        for transport in (*peers, *relays):
            await transport.aclose()
        SOCKETS.rmdir()


async def test_a_call_a_blob_and_a_pipe_go_through_a_relay(tmp_path: Path) -> None:
    async with homes(tmp_path) as (_, (a, b)):

        async def reverse(peer: str, request: bytes) -> bytes:
            return request[::-1] + peer.encode()

        async def reach(peer: str) -> None:
            await a.connect(b.addresses, timeout=60.0)

        await serve_calls(b, "reverse", reverse)
        await reach(b.peer_id)
        assert a.is_behind(b.peer_id)
        answer = await call(a, b.peer_id, "reverse", b"abc", timeout=60.0)
        assert answer == b"cba" + a.peer_id.encode()

        theirs, ours = BlobStore(tmp_path / "theirs"), BlobStore(tmp_path / "ours")
        data = os.urandom(3_000_000)
        name = theirs.put(data, sync=False)
        await BlobServer(theirs).serve(b)
        fetcher = Fetcher(a, ours, reach=reach)
        await fetcher.fetch(name, len(data), [b.peer_id], round=NO_ROUND)
        assert ours.get(name) == data
        await fetcher.aclose()

        ends = [PipelineStreams(networks.network(home, reach)) for home in (a, b)]
        await b.serve(endpoints.PIPE, lambda stream: ends[1].serve(stream, 0))
        stages = tuple(StageSpec(peer=home.peer_id, first=i, last=i + 1) for i, home in enumerate((a, b)))
        plan = Plan(round=1, replicas=(ReplicaSpec(stages=stages),))
        (_, there), (here, _) = await asyncio.gather(
            ends[0].neighbours(plan, 0, 0, 0), ends[1].neighbours(plan, 0, 0, 1)
        )
        assert here is not None
        frames = [os.urandom(size) for size in (1, 100_000, 1_000_000)]

        async def send(stream: Stream) -> None:
            for frame in frames:
                await stream.send(frame)

        async def heard(stream: Stream) -> list[bytes]:
            got: list[bytes] = []
            while len(got) < len(frames):
                frame = await stream.recv()
                if len(frame) in map(len, frames):  # the others are signs of life
                    got.append(frame)
            return got

        _, _, forward, backward = await asyncio.gather(send(there), send(here), heard(here), heard(there))
        assert forward == backward == frames
        for end in ends:
            end.forget(2)
        await there.close()
        assert a.is_behind(b.peer_id)
