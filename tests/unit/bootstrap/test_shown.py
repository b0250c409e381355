"""A node calls no stranger: who knocks at the operators' stream shows the log there, or is not heard
(bootstrap/sessions.py)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgpack
import pytest

from bootstrap.archive import Archive
from bootstrap.node import BootstrapNode
from peer.events import Emitter
from peer.net import compression, directory
from peer.net.base import Stream, serve_calls
from peer.net.memory import MemoryNetwork
from protocol.errors import RemoteError
from protocol.identity import Identity
from protocol.ledger import board
from protocol.wire import encoding, endpoints, framing
from protocol.wire.commit import DOMAIN, Commit
from protocol.wire.decree import APPOINT, Decree, Enacted, Operator
from protocol.wire.session import Heartbeat, LogRequest
from tests.support import tiny
from tests.support.volunteers import QuickDisk

M = tiny.manifest()
STRANGER = Identity(b"s" * 32)
FRESH = tiny.OPERATORS[1]
VALUES = 300_000


class Street:
    """A node, and somebody that its log does not know, in memory. asked: calls that the node made to the stranger"""

    def __init__(self, node: BootstrapNode, network: MemoryNetwork, stranger: Identity) -> None:
        self.node = node
        self.boot = network.peers[tiny.OPERATOR.peer_id]
        self.stranger = network.transport(stranger.peer_id)
        self.asked = list[str]()

    async def serve(self) -> None:
        async def answer(peer: str, request: bytes) -> bytes:
            self.asked.append(peer)
            return compression.pack(framing.pack_message([]), compression.PLAIN)

        await serve_calls(self.stranger, endpoints.LOG, answer)

    async def knock(self) -> Stream:
        """Opens the operators' stream; what the node says first is that it asks for the log."""
        stream = await self.stranger.open(self.boot.peer_id, endpoints.QUORUM, timeout=5.0)
        await stream.send(encoding.encode(Heartbeat(phase="x", round=1)))
        said = encoding.decode(await stream.recv(timeout=5.0), self.boot.peer_id)
        assert said == LogRequest(after=-1)
        return stream


@contextlib.asynccontextmanager
async def street(folder: Path, stranger: Identity = STRANGER) -> AsyncIterator[Street]:
    network = MemoryNetwork()
    boot = network.transport(tiny.OPERATOR.peer_id, directory.valid_record(M.run_id))
    archive = Archive(folder, M, QuickDisk())
    node = BootstrapNode(tiny.OPERATOR, boot, archive, Emitter("node", lambda event: None))
    serving = asyncio.create_task(node.run())
    made = Street(node, network, stranger)
    await made.serve()
    while True:
        try:
            await (await made.stranger.open(boot.peer_id, endpoints.QUORUM, timeout=5.0)).close()
            break
        except RemoteError:
            await asyncio.sleep(0)
    try:
        yield made
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        archive.close()


def dear(**said: object) -> bytes:
    """A record of many values that is not signed by those who decide."""
    plain = framing.unpack_message(encoding.encode_record(tiny.record(tiny.commit(M), STRANGER)))
    plain["c"] |= {"contributions": [[0] * 15] * (VALUES // 16), **said}
    plain["v"] = {tiny.OPERATOR.peer_id: bytes(64)} if said.get("forged") else plain["v"]
    raw: bytes = msgpack.packb({key: plain[key] for key in sorted(plain)})
    return raw


@pytest.mark.parametrize(
    "raw", [dear(), dear(forged=True), dear(parent="f" * 64), dear(leader=STRANGER.peer_id)], ids=lambda raw: ""
)
async def test_a_stranger_is_not_called_and_its_records_are_not_decoded(raw: bytes, tmp_path: Path) -> None:
    async with street(tmp_path) as here:
        stream = await here.knock()
        costs = []
        for work in (lambda: framing.unpack_message(raw), None):
            began = time.process_time()
            if work is not None:
                work()
            else:
                await stream.send(raw)
                with pytest.raises(RemoteError):
                    await stream.recv(timeout=20.0)
            costs.append(time.process_time() - began)
        assert costs[1] < costs[0] / 2, "all that the node did, and to decode the record"
        assert here.asked == []
        assert here.node.operators.head is None


async def test_a_few_records_that_cannot_come_next_are_passed_over(tmp_path: Path) -> None:
    async with street(tmp_path) as here:
        stream = await here.knock()
        for _ in range(6):
            await stream.send(dear(round=7))
        await stream.send(encoding.encode_record(tiny.record(tiny.commit(M))))
        async with asyncio.timeout(20.0):
            while here.node.operators.head != tiny.commit(M):
                await asyncio.sleep(0)
        assert here.asked == []


async def test_a_node_that_was_appointed_meanwhile_shows_it_on_its_own_stream(tmp_path: Path) -> None:
    wish = Decree(
        run=M.run_id,
        number=0,
        action=APPOINT,
        operators=(Operator(peer=FRESH.peer_id, places=("/ip4/198.51.100.7/tcp/1",)),),
    )
    signatures = {tiny.OPERATOR.peer_id: tiny.OPERATOR.sign(DOMAIN + encoding.encode(wish))}
    enacted = Enacted(decree=wish, signatures=signatures)
    head = tiny.commit(M, decrees=1, decree=enacted, board=board.after(M, None, enacted))
    async with street(tmp_path, FRESH) as here:
        stream = await here.knock()
        await stream.send(encoding.encode_record(tiny.record(head)))
        async with asyncio.timeout(20.0):
            while FRESH.peer_id not in here.node.operators.links:
                await asyncio.sleep(0)
        known: Commit | None = here.node.operators.head
        assert known is not None
        assert dataclasses.replace(known) == head
        await stream.send(encoding.encode(Heartbeat(phase="x", round=1)))
        assert not stream.is_closed  # type: ignore[attr-defined]
