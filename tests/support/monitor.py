"""Parts that unit tests of monitor share with others."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from peer.events import Event
from peer.net import compression
from peer.net.base import serve_calls
from peer.net.memory import MemoryNetwork
from peer.ui.monitor import Monitor
from protocol.identity import Identity
from protocol.ledger import part_lists
from protocol.wire import encoding, endpoints, framing
from protocol.wire.announcement import Announcement
from protocol.wire.commit import Commit, Contribution, LeftOut, Part
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec, Work
from protocol.wire.session import LogRequest
from tests.support import tiny

MANIFEST = tiny.manifest(rounds=2)
ALICE, BOB, CAROL = (Identity(bytes([i] * 32)) for i in (1, 2, 3))
WATCHER = Identity(bytes([9] * 32)).peer_id


def plan(number: int) -> Plan:
    work = Work(slot=16 * number, steps=MANIFEST.train.inner_steps, micro_batches=2)
    full = ReplicaSpec(stages=(StageSpec(peer=ALICE.peer_id, first=0, last=4),), work=work)
    chain = ReplicaSpec(
        number=1,
        stages=(
            StageSpec(peer=BOB.peer_id, first=0, last=2),
            StageSpec(peer=CAROL.peer_id, first=2, last=4),
        ),
        work=work,
    )
    return Plan(round=number, replicas=(full, chain), next_number=2)


def commits() -> list[Commit]:
    """Rounds 0 to 2, the whole run; the chain is left out of round 2."""
    parts = (Part(shard="embed", digest="0" * 64, size=70, norm=1.0),)
    out: list[Commit] = []
    for number in range(3):
        share = (part_lists.share_of(ALICE.peer_id, parts),)
        made = Contribution(replica=0, tokens=64, steps=4, loss=3.0 - number, shares=share)
        left = LeftOut(replica=1, reason=f"peer {BOB.peer_id[-8:]}: gone", judged="0" * 64)
        out.append(
            tiny.commit(
                MANIFEST,
                out[-1] if out else None,
                time=100.0 + number,
                contributions=(made,) if number else (),
                left_out=(left,) if number == 2 else (),
                plan=plan(number + 1) if number < 2 else None,
            )
        )
    return out


def announcement(who: Identity, **changes: Any) -> Announcement:
    values: dict[str, Any] = {"run": MANIFEST.run_id, "peer": who.peer_id, "memory_bytes": 5, "up_bps": 7, "serial": 1}
    return Announcement(**{**values, **changes})


class Node:
    """Serves `log` (records, two a reply) and stores announcements."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.transport = network.transport(tiny.OPERATOR.peer_id)
        self.log: list[bytes] = []
        self.asked: list[int] = []

    async def start(self) -> None:
        async def answer(remote: str, request: bytes) -> bytes:
            ask = encoding.expect(LogRequest, encoding.decode(request, remote), remote)
            self.asked.append(ask.after)
            return compression.pack(framing.pack_message(self.log[ask.after + 1 : ask.after + 3]), compression.PLAIN)

        await serve_calls(self.transport, endpoints.LOG, answer)

    async def announce(self, who: Identity, ttl: float = 60.0, **changes: Any) -> None:
        raw = encoding.seal(who, announcement(who, **changes))
        assert await self.transport.store(endpoints.announcements_key(MANIFEST.run_id), who.peer_id, raw, ttl=ttl)


@contextlib.asynccontextmanager
async def watching() -> AsyncIterator[tuple[Node, Monitor, list[Event]]]:
    """A node, its monitor, and where the monitor's events are to go."""
    network = MemoryNetwork()
    node = Node(network)
    await node.start()
    watcher = network.transport(WATCHER)
    yield node, Monitor(MANIFEST, watcher, bootstrap=node.transport.addresses), []
    await watcher.aclose()
    await node.transport.aclose()


def records(found: list[Commit]) -> list[bytes]:
    return [encoding.encode_record(tiny.record(commit)) for commit in found]
