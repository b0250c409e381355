"""The monitor against a made-up bootstrap node on the in-memory transport."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import io
from collections.abc import Callable
from typing import Any, cast

import pytest
from rich.console import Console

from peer import events as kinds
from peer.events import Event
from peer.net import compression
from peer.net.base import Stream, Transport, serve_calls
from peer.net.memory import MemoryNetwork
from peer.ui.monitor import COMPARE_POLLS, BadLog, Monitor
from peer.ui.run_view import RunView
from peer.ui.screen import Screen
from peer.ui.state import state
from protocol.identity import short_peer
from protocol.wire import encoding, endpoints, framing, schema
from protocol.wire.announcement import Announcement, ChainReport, Means
from protocol.wire.commit import Commit, LeftOut
from protocol.wire.session import LogRequest
from tests.support import tiny
from tests.support.monitor import ALICE, BOB, CAROL, MANIFEST, WATCHER, Node, announcement, commits, records, watching

REPORT = ChainReport(
    seconds=2.0, busy_s=1.86, wait_forward_s=0.02, wait_backward_s=0.04, forward_link_s=0.5, backward_link_s=0.3,
    forward_bytes=4_000, backward_bytes=0, depth=7, queued=2, activations=Means(rms=1.5, largest=9.0, sampled=1,
    frames=8, refused=1),
)  # fmt: skip


async def test_a_whole_run_becomes_events_and_a_screen() -> None:
    async with watching() as (node, monitor, events):
        node.log = records(commits())
        await node.announce(ALICE, phase="training", round=2, step=3, loss=1.5)
        await node.announce(BOB, phase="waiting", round=1, bytes_sent=900, chain=REPORT)
        await monitor.follow(events.append)
        assert node.asked == [-1, 1, 2]
    told = [e.kind for e in events]
    assert told.count("commit") == 3
    assert told.count("ready") == 2
    assert told[-1] == "run_finished"
    roles = [(e.source, e.body.role, e.body.round) for e in events if isinstance(e.body, kinds.Role)]
    assert (CAROL.peer_id, "stage", 1) in roles
    news = {e.source: e.body for e in events if isinstance(e.body, kinds.Announced)}
    said = announcement(ALICE, phase="training", round=2, step=3, loss=1.5)
    assert news[ALICE.peer_id] == schema.extend(kinds.Announced, said)
    assert monitor.join_line == f"{monitor.bootstrap[0]}#{MANIFEST.run_id}"
    (left,) = [e.body.left_out for e in events if isinstance(e.body, kinds.Commit)][-1]
    assert left == LeftOut(replica=1, reason=f"peer {BOB.peer_id[-8:]}: gone", judged="0" * 64)
    watched = RunView(MANIFEST)
    view = watched
    for event in events[:-1]:
        watched.feed(event)
    alice, bob = view.peers[ALICE.peer_id], view.peers[BOB.peer_id]
    assert (alice.phase, alice.step, alice.loss) == ("training", 3, 1.5)
    assert (bob.phase, bob.sent_bytes) == ("waiting", None), "what it has measured its line with is no round's"
    assert {p.peer: p.busy for p in state(watched, 0.0).peers if p.busy} == {BOB.peer_id: 0.93}
    watched.feed(events[-1])
    assert view.losses == [(1, 2.0), (2, 1.0)]
    assert view.finished
    shown = [(p.phase, p.busy) for p in state(watched, 0.0).peers if p.here]
    assert shown == [("finished", None)] * len(shown), "nobody is busy with a run that is over, on the page neither"


@pytest.mark.parametrize(("peers", "looks"), [(3, 12), (160, 2), (4000, 1)])
def test_of_many_peers_the_announcements_are_read_less_often(peers: int, looks: int) -> None:
    """Each has to be verified. The log is read every time."""
    asked: list[str] = []
    many = {f"peer-{i}": dataclasses.replace(announcement(ALICE), peer=f"peer-{i}") for i in range(peers)}

    class Counted(Monitor):
        async def _current_announcements(self) -> dict[str, Announcement]:
            asked.append("announcements")
            return many

    async def run() -> int:
        network = MemoryNetwork()
        node = Node(network)
        await node.start()
        monitor = Counted(MANIFEST, network.transport(WATCHER), bootstrap=node.transport.addresses)
        for _ in range(12):
            await monitor.poll(lambda event: None)
        return len(node.asked)

    assert asyncio.run(run()) == 12
    assert len(asked) == looks


async def test_in_a_pipe_it_prints_a_line_a_round() -> None:
    out = io.StringIO()

    async with watching() as (node, monitor, _):
        node.log = records(commits())
        await node.announce(ALICE, phase="training", round=2, step=3, loss=1.5)
        await node.announce(CAROL, phase="training", round=2, step=3, chain=REPORT)
        await node.announce(BOB, phase="serving", device="bootstrap", memory_bytes=0)
        with Screen(MANIFEST, console=Console(file=out, width=60)) as screen:
            await monitor.follow(screen.feed)
    alice, bob, carol = map(short_peer, (ALICE.peer_id, BOB.peer_id, CAROL.peer_id))
    assert sorted(line.partition(" ")[2] for line in out.getvalue().splitlines()) == sorted([
        "✓ first plan: 2 replicas",
        "✓ round 1: 1 replica, loss 2.000",
        "✓ round 2: 1 replica, loss 1.000",
        f"! round 2 without replica 1: peer {bob}: gone",
        f"· {alice} is ready: cpu, 5 B",
        f"· {bob} is ready: bootstrap",
        f"· {carol} is ready: cpu, 5 B",
        "✓ run finished",
    ])  # fmt: skip


async def test_a_chain_that_only_announces_is_shown() -> None:
    async with watching() as (node, monitor, events):
        node.log = records(commits()[:2])
        await node.announce(BOB, phase="training", round=2, step=3)
        await node.announce(CAROL, phase="training", round=2, step=3, chain=REPORT)
        await monitor.poll(events.append)
        told = len(events)
        await node.announce(CAROL, 61.0, serial=2, phase="training", round=2, step=4, chain=REPORT)
        await monitor.poll(events.append)
        (news,) = [e.body for e in events[told:]]
        assert isinstance(news, kinds.Announced)
        assert (news.step, news.chain) == (4, REPORT)
    view = RunView(MANIFEST)
    for event in events:
        view.feed(event)
    assert view.chains[0].slowest == f"{CAROL.peer_id[-8:]} computes 93 %"


async def test_only_changes_are_told() -> None:
    async with watching() as (node, monitor, events):
        node.log = records(commits()[:1])
        await node.announce(ALICE, phase="training", round=1, step=1)
        await monitor.poll(events.append)
        told = len(events)
        await monitor.poll(events.append)
        assert len(events) == told
        await node.announce(ALICE, 61.0, serial=2, phase="training", round=1, step=2)
        node.log = records(commits()[:2])
        await monitor.poll(events.append)
        assert [e.kind for e in events[told:]] == ["commit", "role", "role", "role", "announced"]
        await node.announce(ALICE, 62.0, serial=1, phase="training", round=1, step=1)
        told = len(events)
        await monitor.poll(events.append)
        assert len(events) == told
        node.network.records.clear()
        await monitor.poll(events.append)
        assert [e.kind for e in events[told:]] == ["gone"]


async def test_announcements_of_others_are_not_believed() -> None:
    async with watching() as (node, monitor, events):
        key = endpoints.announcements_key(MANIFEST.run_id)
        forged = encoding.seal(BOB, announcement(ALICE))
        foreign = encoding.seal(CAROL, announcement(CAROL, run="another"))
        assert await node.transport.store(key, ALICE.peer_id, forged, ttl=60)
        assert await node.transport.store(key, CAROL.peer_id, foreign, ttl=60)
        assert await node.transport.store(key, "junk", b"junk", ttl=60)
        await monitor.poll(events.append)
    assert events == []


def _wrong_signer(log: list[Commit]) -> list[bytes]:
    return [encoding.encode_record(tiny.record(commit, ALICE)) for commit in log]


def _flipped(log: list[Commit]) -> list[bytes]:
    raw = records(log)
    return [raw[0][:-1] + bytes([raw[0][-1] ^ 1])]


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (_wrong_signer, "has too few votes"),
        (_flipped, "signature is wrong"),
        (lambda log: records(log[1:]), "not the one of round 0"),
        (lambda log: [records(log)[0]] * 2, "not the one of round 1"),
        (lambda log: records([log[0], dataclasses.replace(log[1], parent="0" * 64)]), "does not follow"),
        (lambda log: [encoding.encode(LogRequest(after=1))], "missing field"),
        (lambda log: [b"junk"], "record"),
    ],
)
async def test_a_forged_log_is_refused(forge: Callable[[list[Commit]], list[bytes]], reason: str) -> None:
    async with watching() as (node, monitor, events):
        node.log = forge(commits())
        with pytest.raises((BadLog, encoding.MessageError), match=reason):
            await monitor.poll(events.append)


class Astray:
    """A transport that finds no peer at first: it asks in turn for one of two that are not there."""

    def __init__(self, transport: Transport) -> None:
        self.transport, self.tries = transport, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    async def open(self, peer: str, name: str, *, timeout: float) -> Stream:
        self.tries += 1
        asked = f"nobody {self.tries % 2}" if self.tries < 7 else peer
        return await self.transport.open(asked, name, timeout=timeout)


async def test_a_node_that_is_away_is_a_warning_told_once() -> None:
    async with watching() as (node, monitor, events):
        monitor = Monitor(
            MANIFEST, cast(Transport, Astray(monitor.transport)), poll_seconds=0.0, bootstrap=node.transport.addresses
        )
        node.log = records(commits())
        await monitor.follow(events.append)
    assert [e.kind for e in events].count("warning") == 2, "one of each of two"


@pytest.mark.parametrize("voters", [(0, 1, 3), (0, 3)], ids=["decided", "not decided"])
def test_a_fork_between_two_nodes_is_found_and_told_once(voters: tuple[int, ...]) -> None:
    keys = tiny.OPERATORS[:4]
    ids = tuple(key.peer_id for key in keys)
    manifest = dataclasses.replace(tiny.manifest(), operators=ids, quorum=4)

    def first(time: float) -> Commit:
        return dataclasses.replace(
            commits()[0], run=manifest.run_id, parent=manifest.run_id, time=time, leader=ids[0], members=ids
        )

    async def run() -> list[Event]:
        network, told, places = MemoryNetwork(), list[Event](), list[str]()
        for key, record in (
            (keys[0], tiny.record(first(1.0), *keys[:3])),
            (keys[3], tiny.record(first(2.0), *(keys[i] for i in voters))),
        ):
            raw = framing.pack_message([encoding.encode_record(record)])
            node = network.transport(key.peer_id)
            places += node.addresses
            await serve_calls(node, endpoints.LOG, functools.partial(answer, raw))
        monitor = Monitor(manifest, network.transport(WATCHER), bootstrap=tuple(places))
        async with asyncio.timeout(30):
            for _ in range(7 * COMPARE_POLLS):
                await monitor.poll(told.append)
        return told

    async def answer(raw: bytes, remote: str, request: bytes) -> bytes:
        ask = encoding.expect(LogRequest, encoding.decode(request, remote), remote)
        return compression.pack(raw if ask.after < 0 else framing.pack_message([]), compression.PLAIN)

    found = [event.body for event in asyncio.run(run()) if isinstance(event.body, kinds.Forked)]
    assert found == ([kinds.Forked(round=0)] if len(voters) == 3 else [])
