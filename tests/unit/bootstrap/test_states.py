"""What a node's archive keeps of a long run, and who goes on where the payloads before that are gone: whole nodes and
peers, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bootstrap.archive import Archive
from bootstrap.node import BootstrapNode, Work
from bootstrap.payloads import Payloads
from bootstrap.states import StateKeeper
from peer.events import Emitter, Event
from peer.log import reader, replay
from peer.log.recompute import Recomputer, store_state
from peer.net import directory
from peer.net.base import Clock, Unreachable, Validate
from peer.net.blobs import NO_ROUND, BlobStore
from peer.net.memory import MemoryNetwork, MemoryTransport
from peer.net.stream import FrameStream
from peer.state.outer_optimizer import Outer
from protocol.codec import blob_hash
from protocol.ledger import part_lists, retention
from protocol.ledger.part_lists import share_of
from protocol.round import handover
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import OuterSpec, TimingSpec
from protocol.wire import endpoints
from protocol.wire.commit import Part
from tests.support import potluck, tiny
from tests.support.chains import random_theta
from tests.support.family import FAMILY
from tests.support.volunteers import Swarm, Volunteer, manifest

pytestmark = [pytest.mark.slow, pytest.mark.virtual]

MODEL = ModelSpec(vocab_size=32, d_model=8, n_layers=1, n_heads=2, d_ff=8, context=8)
SHARDS = layout.shard_names(MODEL)
TIMING = TimingSpec(round_deadline=8.0, round_seconds=1.0, heartbeat=0.2, gone_after=2.0)
PEERS = ("a", "b", "c", "d")


class Line(MemoryTransport):
    """A peer's line, on which it can open no streams of some names for a while."""

    def __init__(self, network: MemoryNetwork, peer_id: str, validate: Validate) -> None:
        super().__init__(network, peer_id, validate)
        self._refused: tuple[str, ...] = ()
        self._opened: list[tuple[str, FrameStream]] = []

    def refuse(self, *names: str) -> None:
        """These names from now on, and no others; streams that are open end."""
        self._refused = names
        for name, stream in self._opened:
            if name in names:
                stream.abort()

    async def open(self, peer: str, name: str, *, timeout: float) -> FrameStream:
        if name in self._refused:
            raise Unreachable(peer, "the line is cut; it is tried again")
        self._opened.append((name, stream := await super().open(peer, name, timeout=timeout)))
        if name in self._refused:  # since it was begun
            stream.abort()
        return stream


class Lines(MemoryNetwork):
    """A network of them."""

    def transport(self, peer_id: str, validate: Validate = lambda key, subkey, value: True) -> Line:
        """As MemoryNetwork's."""
        self.peers[peer_id] = line = Line(self, peer_id, validate)
        return line


@contextlib.asynccontextmanager
async def begun(folder: Path, peers: Sequence[str] = PEERS, **changes: Any) -> AsyncIterator[Swarm]:
    """A run of `peers`, whose payloads of some fifteen rounds are eight times a state; they keep little of others'."""
    values = {"model": MODEL, "timing": TIMING, "rounds": 1000, "start_peers": len(peers)}
    made = Swarm(folder, manifest(**{**values, "outer": OuterSpec(topk=4096), **changes}))
    made.network = Lines()
    async with made as swarm:
        for name in peers:
            swarm.start(name, limit=1)
        yield swarm


async def pruned(swarm: Swarm, archive: Archive, after: int = 0) -> int:
    """Waits until an archive has removed what is before a state of a round after `after`. Returns that round."""
    await swarm.until(lambda: archive.states.begin > after and not archive.blobs.older(archive.states.begin))
    return archive.states.begin


def payloads(archive: Archive, round: int) -> set[str]:
    """The names of the payloads and lists of a round; "" stands for the payloads of a list that is gone."""
    found = set[str]()
    for share in archive.commits[round].shares:
        raw = archive.blobs.get(share.root)
        found |= {share.root, *(part.digest for part in part_lists.unpack(raw))} if raw is not None else {""}
    return found


def is_whole(archive: Archive) -> bool:
    """Whether an archive has the states that are kept, and all payloads since the older one."""
    later = [payloads(archive, round) for round in range(archive.states.begin + 1, len(archive.commits))]
    return not any(map(archive.lacks, archive.states.kept)) and set().union(*later) <= set(archive.blobs)


def payloads_of(archive: Archive, network: MemoryNetwork | None = None) -> Payloads:
    """Those of a node with this archive."""
    transport = (network or MemoryNetwork()).transport(tiny.OPERATOR.peer_id)
    return Payloads(transport, archive, Everybody(), lambda event: None, lambda event: None)  # type: ignore[arg-type]


def makers(swarm: Swarm, after: int) -> set[str]:
    """The peers whose work was committed after this round."""
    return {share.peer for commit in swarm.archive.commits[after + 1 :] for share in commit.shares}


async def forever(peer: str, round: int) -> None:
    """Work that is never done: the rounds that follow bring nothing."""
    await asyncio.Event().wait()


async def verified(swarm: Swarm, folder: Path) -> tuple[int, replay.Verification]:
    """The round from which a node's folder replays, and what its verification says."""
    source = reader.Folder(folder)
    start = await replay.archived_state(swarm.manifest, source, await replay.extent(swarm.manifest, source))
    done = await replay.verify(swarm.manifest, source.records(), source.payload, lambda problem: None, start)
    return start.round if start is not None else 0, done


@pytest.mark.parametrize("outer", [{"topk": 4096}, FAMILY["diloco in int8"]], ids=["usual", "momentum"])
async def test_an_archive_keeps_two_states_and_the_payloads_since_the_older_one(
    tmp_path: Path, outer: dict[str, Any]
) -> None:
    async with begun(tmp_path, outer=OuterSpec(**outer)) as swarm:
        archive = swarm.archive
        await swarm.until(lambda: len(archive.states.digests) == 2 and not archive.lacks(archive.states.kept[1]))
        first = archive.states.kept[1]
        assert archive.states.begin == 0
        assert all(payloads(archive, round) <= set(archive.blobs) for round in range(1, first)), "nothing is gone"
        begin = await pruned(swarm, archive)
        assert begin == first
        head = len(archive.commits)
        assert is_whole(archive)
        named = set().union(*(payloads(archive, round) for round in range(begin + 1, head)))
        states = {digest for round in archive.states.kept for digest in archive.states.digests[round].values()}
        assert {name for name in archive.blobs if archive.blobs.round_of(name) == NO_ROUND} == states
        kept = [name for name in archive.blobs if archive.blobs.round_of(name) < head]
        assert set(kept) == named
        assert archive.blobs.get(archive.commits[1].shares[0].root) is None
        begun_at, done = await verified(swarm, swarm.folder / "bootstrap")
        assert (begun_at, done.problems) == (begin, [])
        assert done.head is not None
        assert done.head.round >= head - 1
        assert done.agreed == done.attested > len(SHARDS) * (head - 2 - begin)
        steps = [later - round for round, later in itertools.pairwise(archive.states.digests)]
        assert min(steps) >= retention.STATE_ROUNDS
        assert not [e for e in swarm.events if e.kind == "warning"]


def whole_feedback(swarm: Swarm, peer: Volunteer) -> Outer:
    """A copy of a peer's error feedback, with what it is about to hand over."""
    spec = swarm.manifest.outer
    found = Outer(MODEL, spec.codec, spec.beta, spec.eta)
    found.feedback = {shard: [e.copy() for e in arrays] for shard, arrays in peer.rounds.outer.feedback.items()}
    for given in peer.storage.load_handovers():
        codec = handover.codec(swarm.manifest, given.topk)
        found.restore_feedback(given.shard, peer.storage.read_handover(given), codec)
    return found


async def test_a_peer_whose_payloads_are_gone_while_it_waits_for_them_takes_a_newer_state_and_keeps_its_feedback(
    tmp_path: Path,
) -> None:
    stopped: list[float] = []  # for it no minute passes, after which it looks for a cheaper state again
    clock = Clock(steady=lambda: stopped[0] if stopped else time.monotonic())
    async with begun(tmp_path) as swarm:
        victim, goes_on = swarm.start("victim", limit=1, clock=clock), asyncio.Event()

        async def hold(peer: str, round: int) -> None:
            if peer == victim.id and round > 6:
                await goes_on.wait()

        swarm.hold = hold
        await swarm.until(lambda: bool(victim.rounds and victim.rounds.offer and victim.rounds.offer.round >= 5))
        stopped.append(time.monotonic())
        stuck, offer, outer = victim.rounds.member.applied, victim.rounds.offer, victim.rounds.outer
        line = victim.transport
        assert isinstance(line, Line)
        line.refuse(endpoints.BLOB, endpoints.HANDOVER)  # who is planned no more gives its feedback away
        before = whole_feedback(swarm, victim)
        await swarm.until(lambda: victim.rounds.member.head > stuck + retention.STATE_ROUNDS)
        assert victim.rounds.member.applied == stuck, "it waits for the payloads of the next round, and learns the log"
        assert set(outer.theta) == set(SHARDS)
        await swarm.until(lambda: victim.rounds.member.applied > stuck)
        begin = swarm.archive.states.begin
        assert begin > stuck, "it waited as long as they were kept"
        stopped.clear()
        if not swarm.archive.commits[offer.round].includes(victim.id, part_lists.root_of(offer.parts)):
            for part in offer.parts:
                before.restore_feedback(part.shard, victim.storage.own_payload(offer, part))

        line.refuse(endpoints.HANDOVER)
        await swarm.until(lambda: victim.rounds.member.applied > begin and bool(victim.rounds.outer.theta))
        assert victim.rounds.outer is outer
        assert [text for text in victim.texts() if "no archive keeps them any more" in text]
        assert min(victim.bases[shard] for shard in SHARDS) >= begin

        kept = whole_feedback(swarm, victim).feedback
        for shard in SHARDS:
            for x, y in zip(before.feedback[shard], kept[shard], strict=True):
                np.testing.assert_allclose(x, y, rtol=0, atol=1e-8)
        line.refuse()
        goes_on.set()
        head = swarm.head
        await swarm.until(lambda: victim.id in makers(swarm, head))
        assert not any("other bits" in text for peer in swarm.peers.values() for text in peer.texts())


async def test_without_a_peers_state_one_of_the_archive_leads_in_and_an_auditor_takes_the_oldest(
    tmp_path: Path,
) -> None:
    async with begun(tmp_path) as swarm:
        begin = await pruned(swarm, swarm.archive)
        auditor = swarm.start("auditor", audit=True)
        await swarm.until(lambda: bool(auditor.rounds and auditor.rounds.outer.theta))
        assert auditor.bases == dict.fromkeys(SHARDS, begin), "it believes no other peer"
        for silent in swarm.peers.values():
            silent.storage.states = lambda: {}  # type: ignore[method-assign]
        newcomer = swarm.start("newcomer")
        await swarm.until(lambda: bool(newcomer.rounds and newcomer.rounds.outer.theta))
        assert set(newcomer.bases.values()) <= set(swarm.archive.states.kept)
        head = swarm.head
        await swarm.until(lambda: newcomer.id in makers(swarm, head))
        assert not [e for e in newcomer.events if e.kind == "shard_rebuilt"]


@contextlib.asynccontextmanager
async def other_node(swarm: Swarm, folder: Path) -> AsyncIterator[tuple[Archive, list[Event]]]:
    """The node of the second operator, a spare one, while the block lasts."""
    archive, heard = Archive(folder, swarm.manifest, swarm.disk), list[Event]()
    who = tiny.OPERATORS[1]
    transport = swarm.network.transport(who.peer_id, directory.valid_record(swarm.manifest.run_id))
    logged = (swarm.manifest, archive.commits)
    known = Recomputer(*logged, archive.blobs.get, newest_state=archive.newest_state)
    work = Work(digest=known.digest, store_state=functools.partial(store_state, *logged, archive.blobs))
    emit = Emitter("other", heard.append)
    node = BootstrapNode(who, transport, archive, emit, swarm.boot.addresses, work=work)
    task = asyncio.create_task(node.run())
    try:
        yield archive, heard
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await transport.aclose()
        archive.close()


async def test_a_node_that_was_away_takes_what_is_kept_from_the_others_and_asks_for_nothing_that_is_gone(
    tmp_path: Path,
) -> None:
    operators = tuple(operator.peer_id for operator in tiny.OPERATORS[:2])
    async with begun(tmp_path, operators=operators) as swarm:
        async with other_node(swarm, tmp_path / "other") as (archive, _):
            await swarm.until(
                lambda: len(archive.commits) > 4 and 4 in {archive.blobs.round_of(n) for n in archive.blobs}
            )
        begin = await pruned(swarm, swarm.archive)
        async with other_node(swarm, tmp_path / "other") as (archive, heard):
            await swarm.until(lambda: archive.states.begin >= begin and is_whole(archive))
            swarm.hold = forever
            begin = await pruned(swarm, archive)
            await swarm.until(lambda: is_whole(archive) and not archive.commits[-1].contributions)
            assert not any(archive.lacks(round) for round in archive.states.kept)
            assert begin <= min(r for n in archive.blobs if (r := archive.blobs.round_of(n)) > 0)
            begun_at, done = await verified(swarm, tmp_path / "other")
            assert (begun_at, done.problems) == (begin, [])
            said = [event.fields["text"] for event in heard if event.kind == "warning"]
            assert not [text for text in said if "payload" in text or "list of parts" in text]


async def test_weights_to_begin_with_are_fetched_by_another_node_and_removed_like_any_older_state(
    tmp_path: Path,
) -> None:
    operators = tuple(operator.peer_id for operator in tiny.OPERATORS[:2])
    theta = random_theta(MODEL)
    first = {shard: layout.shard_digest(theta[shard]) for shard in SHARDS}
    store = BlobStore(tmp_path / "bootstrap" / "blobs")
    for shard, digest in first.items():
        store.put_of_no_round(layout.shard_pieces(theta[shard]), digest)
    async with begun(tmp_path, operators=operators, initial_state=tuple(first.values())) as swarm:
        assert swarm.archive.states.digests == {0: first}
        async with other_node(swarm, tmp_path / "other") as (archive, _):
            assert archive.lacks(0) == list(SHARDS)
            await swarm.until(lambda: not archive.lacks(0) or archive.states.begin > 0)
            begin = await pruned(swarm, archive)
            assert not set(first.values()) & set(archive.blobs)
            await swarm.until(lambda: is_whole(archive))
        assert begin > 0
        await pruned(swarm, swarm.archive)
        assert not set(first.values()) & set(swarm.archive.blobs)
        newcomer = swarm.start("newcomer")
        await swarm.until(lambda: bool(newcomer.rounds and newcomer.rounds.outer.theta))
        assert 0 not in newcomer.bases.values()
        begun_at, done = await verified(swarm, tmp_path / "bootstrap")
        assert (begun_at > 0, done.problems) == (True, [])


async def test_a_node_that_starts_again_has_what_it_had_and_its_log_says_how_far_back_it_replays(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "bootstrap"
    async with begun(tmp_path) as swarm:
        begin = await pruned(swarm, swarm.archive)
        swarm.hold = forever
        await swarm.until(lambda: is_whole(swarm.archive) and not swarm.archive.commits[-1].contributions)
    with contextlib.closing(Archive(folder, swarm.manifest)) as archive:
        assert archive.states.begin == begin
        assert not any(map(archive.lacks, archive.states.kept))
        assert is_whole(archive)
        known = Recomputer(swarm.manifest, archive.commits, archive.blobs.get, newest_state=archive.newest_state)
        assert known.digest("embed", begin - 1) is None
        assert known.digest("embed", begin + 3) == archive.commits[begin + 4].digests["embed"]
    done = potluck.run("log", "verify", folder, text=True)
    assert done.returncode == 0, done
    assert f" from round {begin} on" in done.stdout
    assert f"up to round {begin} only the commits were checked: the archive begins with the state after" in done.stdout
    early = potluck.run("export", folder, "--round", begin - 1, "--out", tmp_path / "out", text=True)
    assert early.returncode == 2
    assert f"its archive begins after round {begin}; give a later --round, or a --checkpoint" in early.stderr
    lost = next(iter(payloads(archive, begin + 2)))
    (folder / "blobs" / lost).unlink()
    done = potluck.run("log", "verify", folder, text=True)
    assert done.returncode == 1
    assert f"round {begin + 2}" in done.stdout


# --- what a decision removes


class Everybody:
    """In place of a directory: the run has no other operator."""

    operators: tuple[str, ...] = ()

    async def reach(self, peer: str) -> None:
        """Nothing is to be done."""


def logged(folder: Path, rounds: int) -> Archive:
    """An archive of a run whose payload of each round is nine times a state; round 12 names that of round 3, too."""
    run = tiny.manifest()
    archive, before = Archive(folder, run), None
    for round in range(rounds):
        names = [archive.blobs.put(b"payload %d" % each, each) for each in ([round, 3] if round == 12 else [round])]
        parts = tuple(
            Part(shard=shard, digest=name, size=9, norm=1.0)
            for shard, name in zip(layout.shard_names(run.model), names, strict=False)
        )
        share = dataclasses.replace(share_of("a", parts), size=9 * retention.state_bytes(run))
        assert archive.blobs.put(part_lists.pack(parts), round) == share.root
        made = (tiny.contribution(0, shares=(share,)),) if round else ()
        digests = {s: state_name(s, round - 1) for s in layout.shard_names(run.model)} if round else {}
        before = tiny.commit(run, before, contributions=made, digests=digests)
        archive.append(tiny.record(before))
    return archive


def state_name(shard: str, round: int) -> str:
    return blob_hash.name_of(b"state %s %d" % (shard.encode(), round))


def store(archive: Archive, round: int) -> None:
    for shard in layout.shard_names(archive.manifest.model):
        archive.blobs.put_of_no_round([memoryview(b"state")], state_name(shard, round))


def rounds_in(archive: Archive) -> set[int]:
    """The rounds of the payloads that are there."""
    return {archive.blobs.round_of(name) for name in archive.blobs} - {NO_ROUND}


async def test_nothing_is_removed_before_both_states_are_stored_and_what_is_named_again_stays(tmp_path: Path) -> None:
    archive = logged(tmp_path, 20)
    network = MemoryNetwork()
    node = payloads_of(archive, network)
    assert archive.states.kept == (8, 16)
    newest = archive.commits[-1]
    store(archive, 8)
    assert await node.settle(newest) == set()
    store(archive, 7)  # of no use any more
    for shard in layout.shard_names(archive.manifest.model)[1:]:
        archive.blobs.put_of_no_round([memoryview(b"state")], state_name(shard, 16))
    assert await node.settle(newest) == set(), "a shard of the newer one is missing"
    store(archive, 16)
    again, offered = archive.blobs.put(b"payload 3"), archive.blobs.put(b"payload 5")
    node.fetch(("b",), Part(shard="head", digest=offered, size=9, norm=1.0), "b", 20)
    node.complete(range(9, 20))
    gone = await node.settle(newest)
    assert again not in gone, "round 12 names it, whether that is noted on disk or not"
    assert offered not in gone
    assert len([name for name in gone if archive.blobs.has(name)]) == 0
    assert {state_name(shard, 7) for shard in layout.shard_names(archive.manifest.model)} <= gone
    assert not {state_name(shard, 8) for shard in layout.shard_names(archive.manifest.model)} & gone
    while rounds_in(archive) != {5, *range(9, 20)}:  # once what the rounds name is looked through
        await asyncio.sleep(0.01)
        await node.settle(newest)
    assert archive.blobs.round_of(again) == 12
    await node.aclose()
    archive.close()
    again_there = Archive(tmp_path, archive.manifest)
    assert list(again_there.states.digests) == list(archive.states.digests) == [0, 8, 16]
    assert again_there.blobs.round_of(again) == 12
    assert [again_there.newest_state(round) for round in (7, 8, 15, 16, 19)] == [0, 8, 8, 16, 16]
    again_there.close()


async def test_an_archive_of_an_earlier_version_is_cleared_some_rounds_at_a_time(tmp_path: Path) -> None:
    archive = logged(tmp_path, 60)
    node = payloads_of(archive)
    begin, newest = archive.states.kept
    store(archive, begin), store(archive, newest)
    sizes = []
    while min(rounds_in(archive)) <= begin:
        await node.settle(archive.commits[-1])
        sizes.append(len(rounds_in(archive)))
    assert sizes == [60 - retention.PRUNED_ROUNDS * (i + 1) for i in range(len(sizes) - 1)] + [59 - begin]
    await node.aclose()
    archive.close()


async def test_a_node_that_computes_other_bits_says_so_once_and_keeps_everything(tmp_path: Path) -> None:
    archive, said, asked = logged(tmp_path, 20), list[str](), list[tuple[str, int, int]]()
    node = payloads_of(archive)

    def computes(shard: str, after: int, round: int, is_over: Callable[[], bool]) -> bool:
        asked.append((shard, after, round))
        return False

    keeper = StateKeeper(archive, node, computes, said.append)
    task = asyncio.create_task(keeper.run())
    for _ in range(3):
        keeper.news.set()
        while keeper.news.is_set() or len(asked) < 2:
            await asyncio.sleep(0.01)
    assert asked == [("embed", 0, 8), ("embed", 0, 16)], "again for the next state, and not for the same one"
    assert ["other bits" in text for text in said] == [True, True]
    assert await node.settle(archive.commits[-1]) == set()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await node.aclose()
    archive.close()
