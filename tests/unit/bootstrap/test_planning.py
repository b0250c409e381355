"""Plans are made outside a bootstrap node's loop, and one that comes too late does no harm."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bootstrap.archive import Archive
from bootstrap.background_jobs import LatestJob
from bootstrap.node import BootstrapNode, Work
from peer.events import Emitter
from peer.net import directory
from peer.net.base import Stream, Unreachable
from peer.net.memory import MemoryNetwork
from protocol.identity import Identity
from protocol.planning.partition import Candidate
from protocol.round.attestations import Attestations
from protocol.round.leader import Leader
from protocol.round.leader_events import (
    Decided,
    Effect,
    Event,
    Lead,
    MakePlan,
    Phase,
    Planned,
    Propose,
    Question,
    Ready,
    Tick,
)
from protocol.run.manifest import Manifest
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import VERSION, Announcement
from protocol.wire.commit import Record
from protocol.wire.plan import Plan
from protocol.wire.session import Announced, Attest, Heartbeat, Hello
from tests.support import tiny
from tests.support.volunteers import QuickDisk

M = tiny.manifest(rounds=3)
FULL = tiny.full_memory(M)
DEADLINE = 30.0


def candidate(peer: str, memory: int = FULL) -> Candidate:
    return Candidate(peer=peer, memory_bytes=memory, up_bps=10**7)


def question(*peers: str) -> Question:
    return Question(
        manifest=M,
        candidates=tuple(candidate(p) for p in peers),
        round=1,
        previous=None,
        contributions=(),
        left_out=(),
        attested=None,
    )


# --- outside the loop


class Planners:
    """Answers that come when a test lets them: `begun` says for which peers one is being found."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.begun: asyncio.Queue[list[str]] = asyncio.Queue()
        self.go_on = threading.Semaphore(0)
        self.came: asyncio.Queue[Planned] = asyncio.Queue()
        self.planning = LatestJob[Question, Planned](
            "planner", lambda asked: Planned(asked, self.answer(asked)), self.came.put_nowait, retry_seconds=0.0
        )

    def answer(self, asked: Question) -> Plan | None:
        self.loop.call_soon_threadsafe(self.begun.put_nowait, [c.peer for c in asked.candidates])
        assert self.go_on.acquire(timeout=DEADLINE), "the loop does nothing while a plan is made"
        return asked.answer()


@pytest.fixture
@contextlib.asynccontextmanager
async def planners() -> AsyncIterator[Planners]:
    """Planners that work until the test ends."""
    made = Planners()
    working = asyncio.create_task(made.planning.run())
    try:
        yield made
    finally:
        for _ in range(9):
            made.go_on.release()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def test_of_obsolete_questions_only_the_one_under_way_is_answered(planners: Planners) -> None:
    planners.planning.ask(question("a"))
    assert await planners.begun.get() == ["a"]
    planners.planning.ask(question("b"))
    planners.planning.ask(question("c"))
    planners.go_on.release()
    assert (await planners.came.get()).question == question("a")
    assert await planners.begun.get() == ["c"]
    planners.go_on.release()
    assert (await planners.came.get()).question == question("c")


async def test_a_node_answers_its_peers_while_a_plan_is_made(tmp_path: Path, planners: Planners) -> None:
    manifest = tiny.manifest(start_peers=1)
    network, me = MemoryNetwork(), Identity(b"9" * 32)
    boot = network.transport(tiny.OPERATOR.peer_id, directory.valid_record(manifest.run_id))
    archive = Archive(tmp_path, manifest, QuickDisk())
    node = BootstrapNode(tiny.OPERATOR, boot, archive, Emitter("node", lambda event: None), work=Work(planners.answer))
    serving = asyncio.create_task(node.run())
    try:
        stream = await opened(network, manifest, me)
        assert await planners.begun.get() == [me.peer_id]
        await stream.send(encoding.encode(Heartbeat(phase="waiting", round=0)))
        heard = encoding.decode(bytes(await stream.recv()), tiny.OPERATOR.peer_id)
        assert heard == Heartbeat(phase="leading", round=0)
        planners.go_on.release()
        record = encoding.decode_any(bytes(await stream.recv()), tiny.OPERATOR.peer_id)
        assert isinstance(record, Record)
        assert [r.peers for r in record.commit.plan.replicas] == [(me.peer_id,)]
    finally:
        planners.go_on.release()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        archive.close()


async def opened(network: MemoryNetwork, manifest: Manifest, me: Identity) -> Stream:
    """A session of a peer that is ready."""
    transport = network.transport(me.peer_id)
    while True:
        try:
            stream = await transport.open(tiny.OPERATOR.peer_id, endpoints.SESSION, timeout=DEADLINE)
            break
        except Unreachable:  # it does not serve yet
            await asyncio.sleep(0)
    about = Announcement(
        run=manifest.run_id,
        peer=me.peer_id,
        addresses=transport.addresses,
        memory_bytes=tiny.full_memory(manifest),
        up_bps=10**7,
        serial=1,
    )
    await stream.send(encoding.encode(Hello(run=manifest.run_id, version=VERSION)))
    await stream.send(encoding.encode(Announced(sealed=encoding.seal(me, about))))
    return stream


# --- as the machine sees it


class Slow:
    """A leader whose plans are made when a test says so."""

    def __init__(self, *peers: str, memory: int = FULL) -> None:
        self.leader = Leader(M, (), (), 0.0)
        self.do(Lead(True))
        (self.effect,) = self.do(*(Ready(candidate(p, memory)) for p in peers))

    def do(self, *events: Event) -> list[Effect]:
        return [effect for event in events for effect in self.leader.handle(event, 0.0)]

    @property
    def asked(self) -> Question:
        assert isinstance(self.effect, MakePlan)
        return self.effect.question

    def answer(self, asked: Question) -> list[Effect]:
        return self.do(Planned(asked, asked.answer()))


def test_a_commit_waits_for_its_plan_and_everything_else_goes_on() -> None:
    slow = Slow("a", "b")
    assert slow.do(Ready(candidate("c")), Tick()) == [], "nothing is asked twice"
    (proposed,) = slow.answer(slow.asked)
    assert isinstance(proposed, Propose)
    assert [r.peers for r in proposed.commit.plan.replicas] == [("a",), ("b",)]
    assert slow.do(Planned(slow.asked, None)) == [], "a plan is answered once"
    assert slow.leader.phase is Phase.DECIDING


def test_a_plan_that_comes_after_the_lease_was_lost_does_nothing() -> None:
    slow = Slow("a", "b")
    assert slow.do(Lead(False)) == []
    assert slow.answer(slow.asked) == []
    assert slow.leader.phase is Phase.GATHERING


def test_a_plan_that_comes_after_another_nodes_commit_does_nothing() -> None:
    slow, other = Slow("a", "b"), Slow("a", "b")
    (proposed,) = other.answer(other.asked)
    assert isinstance(proposed, Propose)
    assert slow.do(Decided(proposed.commit)) == []
    assert slow.answer(slow.asked) == []
    assert (slow.leader.phase, slow.leader.round) == (Phase.OPEN, 1)


def test_who_leads_again_asks_anew_and_takes_no_answer_to_what_it_asked_before() -> None:
    slow = Slow("a", "b")
    assert slow.do(Lead(False), Ready(candidate("c"))) == []
    (again,) = slow.do(Lead(True))
    assert isinstance(again, MakePlan)
    assert [c.peer for c in again.question.candidates] == ["a", "b", "c"]
    assert slow.answer(slow.asked) == []
    (proposed,) = slow.answer(again.question)
    assert isinstance(proposed, Propose)
    assert len(proposed.commit.plan.replicas) == 3


def test_who_leads_again_with_the_same_peers_does_not_take_itself_for_answered() -> None:
    slow = Slow("a", "b")
    (again,) = slow.do(Lead(False), Lead(True))
    assert again == slow.effect


def test_what_makes_no_replica_is_asked_again_when_somebody_comes() -> None:
    slow = Slow("a", "b", memory=tiny.third_memory(M))
    assert slow.answer(slow.asked) == []
    assert slow.leader.phase is Phase.GATHERING
    assert slow.do(Tick(), Ready(candidate("a", tiny.third_memory(M)))) == [], "the same question has the same answer"
    (again,) = slow.do(Ready(candidate("c", tiny.third_memory(M))))
    assert isinstance(again, MakePlan)
    (proposed,) = slow.answer(again.question)
    assert isinstance(proposed, Propose)


def test_a_question_does_not_change_with_what_is_attested_later() -> None:
    known = Attestations(lambda: {})
    known.add("a", Attest(round=0, digests={"embed": "x"}))
    seen = known.snapshot(0)
    known.add("a", Attest(round=0, digests={"head": "x"}))
    known.add("b", Attest(round=0, digests={"embed": "x"}))
    assert (seen.holds("a", ["embed"]), seen.holds("a", ["head"]), seen.holds("b", ["embed"])) == (True, False, False)
    assert (known.holds("a", 0, ["embed"]), known.holds("a", 0, ["head"])) == (False, True)
