"""A bootstrap node of a made-up run with many peers, for monitors: over a real network daemon it serves a log
that holds before every check, and announcements that their peers have signed. No peer trains."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

from bootstrap.archive import Archive
from bootstrap.calls import AnnouncementTable, LogAndRosterHandler
from peer import events
from peer.net import directory, p2p
from peer.net.base import Handler
from peer.net.blobs import BlobServer
from peer.net.disk import Disk
from peer.net.sockets import socket_base
from protocol.identity import Identity
from protocol.ledger import part_lists
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import NODE_DEVICE, Announcement, ChainReport
from protocol.wire.commit import Commit, Contribution, Part, Record
from tests.support import tiny
from tests.support.watched import BEGAN, ROUND_SECONDS, MadeUp

DEADLINE = 120.0
"""Seconds for it to be there."""
PARTS = (Part(shard="embed", digest="0" * 64, size=70, norm=1.0),)


@dataclasses.dataclass(frozen=True)
class Signing(MadeUp):
    """A made-up run whose peers have keys."""

    @functools.cached_property
    def keys(self) -> dict[str, Identity]:
        """By peer id, in the order of the peers."""
        made = [Identity(b"crowd" + index.to_bytes(27, "big")) for index in range(self.peers)]
        return {key.peer_id: key for key in made}

    @functools.cached_property
    def ids(self) -> list[str]:
        return list(self.keys)

    def name_of(self, index: int) -> str:
        """What a peer calls itself."""
        return f"peer {index}"

    def record(self, before: Commit | None) -> Record:
        """The next record of the log; every tenth round leaves a replica out."""
        round = 0 if before is None else before.round + 1
        told = self.commit(round).body
        assert isinstance(told, events.Commit)
        made = tuple(
            Contribution(
                replica=c.replica,
                tokens=self.manifest.train.tokens(4, 2),
                steps=4,
                loss=c.loss,
                shares=tuple(part_lists.share_of(peer, PARTS) for peer in c.peers),
            )
            for c in told.contributions
        )
        return tiny.record(
            tiny.commit(
                self.manifest,
                before,
                round=round,
                time=BEGAN + round * ROUND_SECONDS,
                contributions=made,
                left_out=told.left_out,
                plan=told.plan,
            )
        )

    def announcements(self, round: int, step: int, serial: int, phase: str = "training") -> dict[str, bytes]:
        """The sealed announcements of step `step` of a round, by peer id; more addresses and places than most have."""
        out = {}
        chained = {p for r in self.plan(round).replicas if r.is_chain for p in r.peers}
        for index, (peer, key) in enumerate(self.keys.items()):
            load = ChainReport(
                seconds=2.0, busy_s=(400 + index) / 1000, wait_forward_s=0.1, wait_backward_s=0.2, forward_link_s=0.9,
                backward_link_s=0.3, forward_bytes=12_000, backward_bytes=4_500, depth=7, queued=3,
            )  # fmt: skip
            about = Announcement(
                run=self.manifest.run_id,
                peer=peer,
                addresses=tuple(f"/ip4/10.{index % 250}.{n}.7/tcp/31337/p2p/{peer}" for n in range(4)),
                memory_bytes=(4 + index % 20) * 10**9,
                up_bps=(5 + index % 40) * 10**6,
                down_bps=10**8,
                speed_flops=10**12,
                device=("cuda", "cpu", "mps")[index % 3],
                serial=serial,
                phase=phase,
                round=round,
                step=step,
                loss=self.loss(round, step, index),
                bytes_sent=round * 200_000 + index,
                bytes_received=round * 300_000,
                bytes_written=round * 30_000,
                chain=load if peer in chained else None,
                coordinates=(1.0 * index, 2.0, 3.0),
                reachable=("direct", "mapped", "private", "")[index % 4],
                name=self.name_of(index),
            )
            out[peer] = encoding.seal(key, about)
        return out


class Node:
    """The node. `line`: what one watches with; `round`: the newest that is decided; `away`: who says nothing."""

    def __init__(self, made: Signing, folder: Path, transport: p2p.P2PTransport) -> None:
        self.made = made
        self.line = f"{transport.addresses[0]}#{made.manifest.run_id}"
        self.transport = transport
        self.archive = Archive(folder / "archive", made.manifest, Disk())
        self.heard = AnnouncementTable(made.manifest.run_id, 0)
        self.away: frozenset[str] = frozenset()
        self._serial = 0

    @property
    def round(self) -> int:
        return len(self.archive.commits) - 1

    def decide(self, rounds: int = 1) -> None:
        """This number of rounds more is decided."""
        for _ in range(rounds):
            self.archive.append(self.made.record(self.archive.commits[-1] if self.archive.commits else None))

    def hear(self, step: int, phase: str = "training") -> None:
        """Everybody announces this step of the open round, who is not away."""
        self._serial += 1
        for peer, raw in self.made.announcements(self.round + 1, step, self._serial, phase).items():
            if peer in self.away:
                self.heard.remove(peer)
            else:
                assert self.heard.add(peer, raw) is not None
        about = Announcement(
            run=self.made.manifest.run_id, peer=tiny.OPERATOR.peer_id, device=NODE_DEVICE, serial=self._serial
        )
        self.heard.add(tiny.OPERATOR.peer_id, encoding.seal(tiny.OPERATOR, about))


@contextlib.asynccontextmanager
async def node(made: Signing, folder: Path, instead: Mapping[str, Handler] | None = None) -> AsyncIterator[Node]:
    """It serves until the block ends. `instead`: what answers under these names on the wire in its place."""
    folder.mkdir(parents=True, exist_ok=True)
    key = folder / "identity.key"
    key.write_bytes(tiny.OPERATOR.libp2p_bytes())
    transport = await p2p.start(
        key, host="127.0.0.1", validate=directory.valid_record(made.manifest.run_id), sockets=socket_base()
    )
    found = Node(made, folder, transport)
    try:
        if endpoints.LOG not in (instead or {}):
            await LogAndRosterHandler(found.archive, found.heard).serve(transport)
        if endpoints.BLOB not in (instead or {}):
            named = {endpoints.MANIFEST_NAME: made.manifest.to_bytes()}
            await BlobServer(found.archive.blobs, named=named).serve(transport)
        for name, handler in (instead or {}).items():
            await transport.serve(name, handler)
        yield found
    finally:
        await transport.aclose()
        found.archive.close()


THREE = Signing(3)


@contextlib.contextmanager
def living(
    folder: Path,
    spoil: Callable[[Node], None] = lambda node: None,
    *,
    made: Signing = THREE,
    instead: Mapping[str, Handler] | None = None,
) -> Iterator[str]:
    """The line of a node with two rounds, and three peers unless `made` has others, which lives on another thread;
    `spoil` changes what it says. `instead`: see `node`."""
    loop, found, over = asyncio.new_event_loop(), queue.SimpleQueue[str](), asyncio.Event()

    async def live() -> None:
        async with node(made, folder, instead) as there:
            there.decide(3)
            there.hear(1)
            spoil(there)
            found.put(there.line)
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(live(),))
    thread.start()
    try:
        yield found.get(timeout=DEADLINE)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()
