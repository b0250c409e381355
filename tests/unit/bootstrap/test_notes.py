"""Notes about payloads: bounded, no offer takes another's place, and what is missing is found again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from bootstrap.archive import Archive
from bootstrap.payloads import Payloads
from peer.net.blobs import BlobServer, BlobStore
from peer.net.memory import MemoryNetwork
from protocol.codec import sparse
from protocol.ledger import part_lists
from protocol.quorum import paxos_events
from protocol.round import leader_events
from protocol.round.comparing import NOTES_PER_PEER, OVERHEAD_BYTES, Examined, Notes
from protocol.run import layout
from protocol.wire.commit import Commit, Contribution, Part, Share
from protocol.wire.session import Withdraw
from tests.support import tiny
from tests.support.plain_codec import norm_of

SIZE = 1000
"""Bytes that a payload takes here."""


def found(number: int = 0) -> Examined:
    marked = np.full((SIZE - OVERHEAD_BYTES) // 2, number, np.uint16)
    return Examined(
        size=9, square=1.0, counts=(marked.size,), marked=marked, values=np.zeros(0, np.float32), coded=False
    )


def part(number: int, shard: str = "head") -> Part:
    return Part(shard=shard, digest=f"{number:064x}", size=9, norm=1.0)


class Finder:
    """Counts how often something had to be found."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> Examined:
        self.times += 1
        return found()


def is_noted(notes: Notes, wanted: Part) -> bool:
    finder = Finder()
    Notes.known(notes, "who asks", wanted, finder)
    return not finder.times


def test_what_is_noted_is_not_found_again_and_is_of_one_shard() -> None:
    notes, finder = Notes(), Finder()
    notes.known("a", part(1), finder)
    notes.known("b", part(1), finder)
    assert finder.times == 1
    notes.known("a", part(1, "embed"), finder)
    assert finder.times == 2, "the same bytes are something else as a payload of another shard"


def test_what_cannot_be_decoded_is_not_noted() -> None:
    notes = Notes()

    def broken() -> Examined:
        raise ValueError("is none")

    with pytest.raises(ValueError, match="is none"):
        notes.known("a", part(1), broken)
    assert notes.used == 0
    assert not is_noted(notes, part(1))


def test_whoever_offers_again_and_again_fills_nothing_and_drops_only_his_own() -> None:
    notes = Notes()
    notes.keep("honest", part(1), found())
    for number in range(100, 200):
        notes.keep("enemy", part(number), found(number))
        assert notes.used <= (1 + NOTES_PER_PEER) * SIZE
    assert is_noted(notes, part(1))
    assert is_noted(notes, part(199))
    assert not is_noted(notes, part(100))


def test_where_there_is_no_room_nothing_goes_and_nothing_comes() -> None:
    notes = Notes(limit=3 * SIZE)
    for number in range(3):
        notes.keep(f"p{number}", part(number), found())
    for number in range(10, 50):
        notes.keep(f"enemy {number}", part(number), found())
    assert notes.used == 3 * SIZE
    assert all(is_noted(notes, part(number)) for number in range(3))


def test_of_a_decided_round_what_was_committed_stays_for_one_round_beside_one_new_payload() -> None:
    notes = Notes()
    for number in range(4):
        notes.keep(f"p{number}", part(number), found())
    notes.settle({part(n).digest for n in (0, 1)})
    assert notes.used == 2 * SIZE
    for number in (10, 20, 30):
        notes.keep("p0", part(number), found())
    assert [is_noted(notes, part(n)) for n in (0, 1)] == [True, True], "the last round's is needed whatever is offered"
    notes.settle({part(30).digest})
    assert notes.used == SIZE
    notes.settle(set())
    assert notes.used == 0


# --- a node's


class Everybody:
    """In place of a directory: every peer is there, and the run has no operator."""

    operators: tuple[str, ...] = ()

    async def reach(self, peer: str) -> None:
        """Nothing is to be done."""


async def test_a_node_notes_what_comes_and_forgets_what_is_not_committed(tmp_path: Path) -> None:
    """Offers are judged without a look at their payloads; after the round only committed ones are noted."""
    manifest, network = tiny.manifest(), MemoryNetwork()
    codec, shapes = manifest.outer.codec, layout.shapes(manifest.model, "head")
    theirs, parts = BlobStore(tmp_path / "theirs"), []
    for number in (1, 2):
        data = sparse.encode(codec, [np.full(shape, number, np.float32) for shape in shapes])
        norm = norm_of(sparse.decode(codec, shapes, data))
        parts.append(Part(shard="head", digest=theirs.put(data), size=len(data), norm=norm))

    def unknown() -> Examined:
        raise AssertionError("it has to be decoded again")

    holder, transport = network.transport("holder"), network.transport(tiny.OPERATOR.peer_id)
    await BlobServer(theirs).serve(holder)
    here: asyncio.Queue[str] = asyncio.Queue()
    archive = Archive(tmp_path / "node", manifest)

    def put(event: leader_events.Event | paxos_events.Event) -> None:
        match event:
            case leader_events.Held(name):
                here.put_nowait(name)
            case leader_events.Received(_, Withdraw(reason=reason)):
                here.put_nowait(reason)

    node = Payloads(
        transport,
        archive,
        Everybody(),  # type: ignore[arg-type]
        lambda event: None,
        put,
    )
    for sender, part in zip(("honest", "other"), parts, strict=True):
        node.fetch(("holder",), part, sender, 0)
        assert await asyncio.wait_for(here.get(), 60.0) == part.digest
        assert node.notes.known(sender, part, unknown).norm == pytest.approx(part.norm)
    packed = part_lists.pack((parts[0],))
    root = archive.blobs.put(packed, 0)
    share = Share(peer="honest", root=root, size=1, norm=parts[0].norm, listed=len(packed))
    contribution = Contribution(replica=0, tokens=1, steps=1, loss=None, shares=(share,))
    said = {"plan": None, "diverged": (), "digests": {}, "time": 0.0, "left_out": (), "parent": "", "run": "r"}
    await node.settle(Commit(round=0, contributions=(contribution,), **said))  # type: ignore[arg-type]
    assert node.notes.known("honest", parts[0], unknown).norm == pytest.approx(parts[0].norm)
    with pytest.raises(AssertionError, match="decoded again"):
        node.notes.known("other", parts[1], unknown)
    await node.aclose()
