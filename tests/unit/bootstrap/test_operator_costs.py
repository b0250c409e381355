"""What another operator says costs no more than its turns, and a commit that can change nothing is not decoded
(bootstrap/sessions.py, peer/node/sessions.py)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from bootstrap.archive import Archive
from bootstrap.node import BootstrapNode
from peer.events import Emitter
from peer.net import directory
from peer.net.base import Handler, Stream
from peer.net.guests import OF_AN_ADDRESS, TURN_VALUES, StreamTurns, Turns
from peer.net.memory import MemoryNetwork
from protocol.identity import Identity
from protocol.wire import encoding, endpoints, framing
from protocol.wire.ballot import Accept, Promise
from protocol.wire.encoding import MessageError
from tests.support import tiny
from tests.support.volunteers import QuickDisk

NAMES = tuple(o.peer_id for o in tiny.OPERATORS[:4])
M = tiny.manifest(operators=NAMES, quorum=4)
LEADER, NODE, LIAR = tiny.OPERATORS[0], tiny.OPERATORS[1], tiny.OPERATORS[3]
ROWS = 50_000
MESSAGES = 12


def dear(kind: type = Accept, number: int = 0, **said: Any) -> bytes:
    """A message of a quarter of a million values, each of which makes an object."""
    commit = tiny.commit(M, leader=LEADER.peer_id)
    message = Accept(round=0, ballot=0, commit=commit) if kind is Accept else Promise(round=0, ballot=5, commit=commit)
    plain = framing.unpack_message(encoding.encode(message))
    plain["commit"] |= {"left_out": [[number, ""]] * ROWS, "diverged": [["", ""]] * ROWS}
    plain["commit"] |= {key: said.pop(key) for key in ("parent",) if key in said}
    raw: bytes = msgpack.packb({**plain, **said})
    return raw


@dataclasses.dataclass
class Office:
    """A node of four, in memory, and what it was told. Its guests have turns, as over sockets."""

    node: BootstrapNode
    network: MemoryNetwork
    came: list[Any] = dataclasses.field(default_factory=list)

    async def stream(self, who: Identity) -> Stream:
        return await self.network.transport(who.peer_id).open(NODE.peer_id, endpoints.QUORUM, timeout=5.0)

    async def heard(self, done: Callable[[], bool]) -> None:
        while not done():
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def office(folder: Path, deaf: bool = False) -> AsyncIterator[Office]:
    """deaf: what comes is read, and nothing follows from it"""
    network, turns = MemoryNetwork(), Turns()
    own = network.transport(NODE.peer_id, directory.valid_record(M.run_id))
    serve, served_names = own.serve, set[str]()

    async def in_turns(name: str, handler: Handler) -> None:
        async def served(stream: Any) -> None:
            stream.turns = StreamTurns(turns, stream.remote, own.guests.account(stream.remote, ""), passes=True)
            await handler(stream)

        await serve(name, served)
        served_names.add(name)

    own.serve = in_turns  # type: ignore[method-assign]
    archive = Archive(folder, M, QuickDisk())
    node = BootstrapNode(NODE, own, archive, Emitter("node", lambda event: None))
    made, receive = Office(node, network), node.operators.receive

    async def hear(peer: str, said: Any) -> None:
        made.came.append(said)
        if not deaf:
            await receive(peer, said)

    node.operators.receive = hear
    serving = asyncio.create_task(node.run())
    await made.heard(lambda: endpoints.QUORUM in served_names)
    try:
        yield made
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        archive.close()


@pytest.mark.parametrize(
    ("who", "raw"),
    [
        (LIAR, dear()),
        (LIAR, dear(Promise)),
        (LIAR, dear(round=7)),
        (LEADER, dear(parent="f" * 64)),
        (LEADER, dear(ballot=7)),
        (LEADER, dear(Promise)),
    ],
    ids=["not leading", "not asked", "another round", "another parent", "another's ballot", "leads, not asked"],
)
async def test_a_commit_that_can_change_nothing_is_not_decoded(who: Identity, raw: bytes, tmp_path: Path) -> None:
    began = time.process_time()
    with contextlib.suppress(MessageError):
        encoding.decode(raw, "p")
    whole = time.process_time() - began
    async with office(tmp_path) as here:
        stream = await here.stream(who)
        began = time.process_time()
        for _ in range(MESSAGES):
            await stream.send(raw, timeout=60.0)
        await here.heard(lambda: len(here.came) == MESSAGES)
        assert time.process_time() - began < whole, f"{MESSAGES} messages cost less than to decode one"
        assert here.node.quorum.acceptor.waiting is None


@pytest.mark.virtual
async def test_the_leader_too_has_so_many_values_a_second(tmp_path: Path) -> None:
    raws = [dear(number=number) for number in range(3)]
    loop = asyncio.get_running_loop()
    async with office(tmp_path, deaf=True) as here:
        stream = await here.stream(LEADER)
        began = loop.time()
        for raw in raws:
            await stream.send(raw, timeout=600.0)
        await here.heard(lambda: len(here.came) == len(raws))
        assert all(isinstance(said, Accept) for said in here.came)
        turns = (len(raws) - 1) * framing.count(raws[0]) / TURN_VALUES - OF_AN_ADDRESS.burst
        assert loop.time() - began >= turns / OF_AN_ADDRESS.per_second, "the last one begins when the others are paid"


async def test_operators_take_turns_by_their_names_and_strangers_by_their_addresses(tmp_path: Path) -> None:
    where = "/ip4/203.0.113.5/tcp/1"
    async with office(tmp_path) as here:
        guests = here.node.operators.transport.guests
        assert guests.account(LIAR.peer_id, where) == ""
        assert guests.account(tiny.OPERATORS[6].peer_id, where) == "203.0.113.5/32"
