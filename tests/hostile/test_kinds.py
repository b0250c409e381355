"""Attacks of eight kinds (KINDS), besides those that tests/hostile and the units try already: ATTACKS has one
row for each, who makes it, and what comes of it. What is honest counts in four fifths of the rounds or more, and where
time is virtual, in four fifths of those that fit into it without the attack; nobody honest rests or is named; a liar is
named within ROUNDS rounds where it can be known who lies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bootstrap.archive import Archive
from bootstrap.node import BootstrapNode
from bootstrap.payloads import Payloads
from peer import events
from peer.events import Emitter
from peer.net import greeting, node_calls
from peer.net.base import Stream, serve_calls
from peer.net.blobs import BlobServer, BlobStore
from peer.net.directory import Contacts
from peer.net.memory import MemoryNetwork
from protocol.codec import sparse
from protocol.errors import RemoteError, UsageError
from protocol.identity import Identity
from protocol.ledger import capacity, schedule
from protocol.planning import memory
from protocol.round import chain_repair, leader_events
from protocol.round.accusations import EXPEL_COUNT, Accusation
from protocol.round.leader import MOST_RECOMPUTED
from protocol.round.leader_events import Decided, Propose, Received, Recompute, Recomputed, Resting, Send
from protocol.run import corpus, layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TimingSpec
from protocol.wire import encoding, endpoints, framing
from protocol.wire.announcement import Announcement, Roster
from protocol.wire.commit import Commit, Diverged, Part, Share
from protocol.wire.decree import BAN, Board, Decree, Motion, Motions, Operator
from protocol.wire.encoding import Message
from protocol.wire.plan import Plan
from protocol.wire.session import Attest, ChainFailure, ChainReconfig, LogRequest, Offer, Offered, Withdraw
from tests.hostile.ground import identity
from tests.hostile.test_orders import Attacker, Run
from tests.sim.loop import VirtualLoop
from tests.support import leader as leading
from tests.support import long_logs, tiny, volunteers
from tests.support.plain_codec import norm_of
from tests.support.volunteers import QuickDisk, Swarm, Volunteer

ROUNDS = 10
"""Within which a liar is named."""
RATE = 0.8
SECONDS = 60.0
Work = Callable[[Path], Coroutine[Any, Any, None]]
HOLD_SECONDS = 0.05


def real(work: Work) -> Callable[[Path], None]:
    """Carries it out with real threads and disks."""
    return lambda folder: asyncio.run(asyncio.wait_for(work(folder), SECONDS))


def virtual(work: Work) -> Callable[[Path], None]:
    """Carries it out where time costs nothing."""

    def tried(folder: Path) -> None:
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(random.Random(0))) as runner:
            runner.run(work(folder))

    return tried


# --- what volunteers attest

Digests = Mapping[str, str]


def attests(liar: Volunteer, lies: Callable[[Digests], Sequence[Digests]]) -> None:
    """From now on it attests each of these of a round, one after the other, in the place of what it has."""
    tell = liar.peer.sessions.tell

    def told(message: Any) -> None:
        if not isinstance(message, Attest):
            return tell(message)
        for digests in lies(message.digests):
            tell(Attest(round=message.round, digests=dict(digests)))
        return None

    liar.peer.sessions.tell = told  # type: ignore[method-assign]


async def hold(peer: str, round: int) -> None:
    await asyncio.sleep(HOLD_SECONDS)


def works_on(commits: Sequence[Commit], swarm: Swarm, honest: Volunteer) -> None:
    """The honest one's work counts in enough of the rounds, and nothing is held against it."""
    counted = [commit for commit in commits if any(share.peer == honest.id for share in commit.shares)]
    assert len(counted) >= RATE * len(commits), [commit.diverged for commit in commits]
    assert honest.id not in {d.peer for commit in commits for d in commit.diverged}
    assert swarm.leader.standing.of(honest.id).reputation == 1.0


async def one_shard_after_another(folder: Path) -> None:
    """Of each shard once, more than a node computes in a round; the last lie stays."""
    async with Swarm(folder, volunteers.manifest(start_peers=2, rounds=1000)) as swarm:
        swarm.hold = hold
        honest, liar = swarm.start("honest"), swarm.start("liar")
        await swarm.until(lambda: swarm.head >= 3)
        attests(liar, lambda right: [{**right, shard: "f" * 64} for shard in sorted(right)])
        first = swarm.head + 3
        await swarm.until(lambda: swarm.head >= first + ROUNDS)
        works_on(list(swarm.archive.commits[first : first + ROUNDS]), swarm, honest)
        assert {e.body.peer for e in swarm.events if isinstance(e.body, events.Diverged)} == {liar.id}


async def alone_from_the_beginning(folder: Path) -> None:
    """It alone has worked, so it alone is a witness when somebody comes whose state is right."""
    async with Swarm(folder, volunteers.manifest(start_peers=1, rounds=1000)) as swarm:
        swarm.hold = hold
        liar = swarm.start("liar")
        attests(liar, lambda right: [dict.fromkeys(right, "f" * 64)])
        await swarm.until(lambda: swarm.head >= 3)
        honest = swarm.start("honest")
        await swarm.until(lambda: honest.rounds is not None and honest.rounds.member.applied >= 1)
        first = swarm.head + 1
        await swarm.until(lambda: swarm.head >= first + 2 * ROUNDS)
        commits = list(swarm.archive.commits[first : first + 2 * ROUNDS])
        assert {d.peer for commit in commits[:ROUNDS] for d in commit.diverged if d.refuted} == {liar.id}
        later = commits[ROUNDS:]
        counted = [commit for commit in later if any(share.peer == honest.id for share in commit.shares)]
        assert len(counted) >= RATE * ROUNDS
        assert swarm.leader.standing.of(honest.id).reputation == 1.0


def each_disputes_another_shard(folder: Path) -> None:
    """Five of eight, who have worked, in every round from then on: more shards than a node computes in one."""
    honest, liars = tuple(f"honest {n}" for n in range(3)), tuple(f"liar {n}" for n in range(5))
    of = tiny.manifest(rounds=99, start_peers=8)
    driver = leading.Driver(dict.fromkeys((*honest, *liars), tiny.full_memory(of)), of)
    driver.decide(driver.ready(*driver.memory))
    shards, computed = layout.shard_names(of.model), list[int]()
    assert len(liars) <= len(shards)
    driver.attest(*driver.memory, shards=shards)
    driver.decide(driver.offered(*driver.memory))
    for round in range(1, 1 + ROUNDS):
        asked = [e for e in driver.attest(*honest, shards=shards) if isinstance(e, Recompute)]
        for liar, false in zip(liars, shards, strict=False):
            said = {**dict.fromkeys(shards, "same"), false: f"of {liar}"}
            asked += [
                e for e in driver.do(Received(liar, Attest(round=round, digests=said))) if isinstance(e, Recompute)
            ]
        computed.append(0)
        while asked:
            computed[-1] += 1
            answer = asked.pop(0).answer(lambda shard, round: "same")
            asked += [e for e in driver.do(answer) if isinstance(e, Recompute)]
        assert driver.leader.plan is not None
        commit = driver.decide(driver.offered(*(peer for r in driver.leader.plan.replicas for peer in r.peers)))
        assert {c.peers[0] for c in commit.contributions} == set(honest)
        assert not set(honest) & {d.peer for d in commit.diverged}
        assert round < 2 or driver.leader.witnesses.refuted == set(liars), "who was not refuted yet comes first"
    assert max(computed) == MOST_RECOMPUTED
    assert driver.now == 0.0, "no round waits that would not without them"


def doubts_without_work(folder: Path) -> None:
    """A node computes one shard a round for it, and finds it wrong."""
    driver = leading.opened({"a": leading.FULL, "b": leading.FULL, "spare": leading.FULL // 8})
    shards = layout.shard_names(driver.manifest.model)
    driver.attest("a", "b", shards=shards)
    asked = [
        effect
        for shard in shards
        for effect in driver.attest("spare", digest="other", shards=(shard,))
        if isinstance(effect, Recompute)
    ]
    assert len(asked) <= 1
    driver.do(*(Recomputed(effect.round, effect.shards[0], "same") for effect in asked))
    commit = driver.decide(driver.offered("a", "b"))
    assert [c.peers for c in commit.contributions] == [("a",), ("b",)]
    assert {d.peer for d in commit.diverged} <= {"spare"}


def all_shards_by_strangers(folder: Path) -> None:
    """A hundred of them, of a model of 66 shards."""
    spec = ModelSpec(vocab_size=16, d_model=8, n_layers=64, n_heads=2, d_ff=16, context=8)
    of = tiny.manifest(rounds=9, start_peers=2, model=spec)
    driver = leading.Driver(dict.fromkeys("ab", tiny.full_memory(of)), of)
    driver.decide(driver.ready("a", "b"))
    shards = layout.shard_names(spec)
    driver.attest("a", "b", shards=shards)

    def cost() -> float:
        """Processor seconds of an event, and of what an honest peer says."""
        found = []
        for _ in range(9):
            began = time.process_time()
            for _ in range(20):
                driver.at(driver.now + 0.001)
            driver.attest("a", shards=shards)
            found.append(time.process_time() - began)
        return statistics.median(found)

    quiet = cost()
    for number in range(100):
        driver.attest(f"stranger {number}", digest=f"{number:064}", shards=shards)
    assert cost() <= 2 * quiet, "a fraction of a millisecond; it was half a second"
    commit = driver.decide(driver.offered("a", "b"))
    assert len(commit.contributions) == 2


def hidden_behind_accomplices(folder: Path) -> None:
    """Four of them have another state in every one of 515 shards; a commit has room for fewer entries."""
    shards, liars = [f"block.{n}" for n in range(515)], [f"liar {n}" for n in range(5)]
    of = Plan(round=1, replicas=tuple(tiny.replica(n, liar) for n, liar in enumerate(liars)), next_number=5)
    found = [Diverged(peer=liar, shard=shard, refuted=shard == shards[-1]) for liar in liars for shard in shards]
    told = capacity.foremost(found, of)
    assert len(told) == capacity.MAX_DIVERGED < len(found)
    assert {d.peer for d in told if d.refuted} == set(liars)


# --- who is first

MADE = volunteers.manifest()
OFFERED = 1
"""The round of the offers."""


async def named_first(folder: Path, serves: bool, norm: float | None) -> tuple[float, list[Any]]:
    """A volunteer offers another's payload before that one does: after how many seconds a node has it, and what it
    heard. serves: whether the first gives it, too; norm: what it says of it, None: the truth."""
    network = MemoryNetwork()
    node, honest, liar = (network.transport(who.peer_id) for who in tiny.OPERATORS[:3])
    archive, told = Archive(folder / "node", MADE, QuickDisk()), list[Any]()

    async def reach(peer: str) -> None:
        """Everybody is there."""

    async def silent(stream: Stream) -> None:
        await asyncio.sleep(600.0)

    contacts: Any = SimpleNamespace(reach=reach, operators=())
    payloads = Payloads(node, archive, contacts, told.append, told.append)
    store = BlobStore(folder / "honest")
    raw = sparse.encode(MADE.outer.codec, volunteers.noise(MADE.model, "honest", OFFERED, "embed"))
    right = norm_of(sparse.decode(MADE.outer.codec, layout.shapes(MADE.model, "embed"), raw))
    part = Part(shard="embed", digest=store.put(raw, 0), size=len(raw), norm=right)
    await BlobServer(store).serve(honest)
    await (BlobServer(store).serve(liar) if serves else liar.serve(endpoints.BLOB, silent))
    began = asyncio.get_running_loop().time()
    said = dataclasses.replace(part, norm=right if norm is None else norm)
    payloads.fetch((liar.peer_id,), said, liar.peer_id, OFFERED)
    await asyncio.sleep(0)
    payloads.fetch((honest.peer_id,), part, honest.peer_id, OFFERED)
    while leader_events.Held(part.digest) not in told and asyncio.get_running_loop().time() < began + SECONDS:
        await asyncio.sleep(0.1)
    await payloads.aclose()
    archive.close()
    return asyncio.get_running_loop().time() - began, told


async def keeps_what_it_names(folder: Path) -> None:
    seconds, told = await named_first(folder, serves=False, norm=None)
    assert seconds < 5.0
    assert not [event for event in told if isinstance(event, Received)]


async def says_a_false_norm_of_it(folder: Path) -> None:
    seconds, told = await named_first(folder, serves=True, norm=99.0)
    assert seconds < 5.0
    withdrawn = [event for event in told if isinstance(event, Received) and isinstance(event.message, Withdraw)]
    assert [event.peer for event in withdrawn] == [tiny.OPERATORS[2].peer_id], "the liar is, and nobody else"


def takes_the_seat_first_and_brings_nothing(folder: Path) -> None:
    """In every round in which it may, before an honest newcomer asks."""
    founders, rounds, step = ("a", "b", "c", "d"), 32, 10.0
    of = tiny.manifest(rounds=99, start_peers=len(founders), timing=leading.QUICK)
    driver = leading.Driver(dict.fromkeys((*founders, "liar", "honest"), leading.FULL), of)
    driver.decide(driver.ready(*founders))
    shards, members, took = layout.shard_names(of.model), of.first_members, driver.now
    rested = set[str]()
    for round in range(1, rounds + 1):
        driver.attest(*founders, shards=shards)
        for newcomer in ("liar", "honest"):
            driver.ready(newcomer)
            driver.attest(newcomer, shards=shards)
        driver.now += step
        plan = driver.leader.roster.plan
        assert plan is not None
        effects = driver.offered(*(peer for peer in (*founders, "honest") if plan.replica_of(peer) is not None))
        while not (proposed := [effect.commit for effect in effects if isinstance(effect, Propose)]):
            effects = driver.at(driver.now + 1.0)
        commit = dataclasses.replace(proposed[0], leader=members[0], members=members)
        driver.commits.append(commit)
        rested |= {effect.peer for effect in driver.do(Decided(commit)) if isinstance(effect, Resting)}
        assert round == 1 or {c.peers for c in commit.contributions} == {(peer,) for peer in (*founders, "honest")}
    assert rested == {"liar"}
    assert rounds * step >= RATE * (driver.now - took)


# --- chains


def says_in_every_round_that_its_neighbour_is_lost(folder: Path) -> None:
    driver = leading.Driver({**leading.CHAIN, "f": leading.THIRD}, tiny.manifest(rounds=99, start_peers=4))
    driver.decide(driver.ready(*driver.memory))
    for round in range(1, ROUNDS + 1):
        driver.attest(*driver.memory, shards=leading.SHARDS)
        plan = driver.leader.plan
        assert plan is not None
        number, victim = plan.replicas[0].number, plan.replicas[0].peers[1]
        said = ChainFailure(round=round, replica=number, generation=0, peer=victim, reason="gave no sign of life")
        (reconfig,) = (e.message for e in driver.do(Received("c", said)) if isinstance(e, Send))
        assert isinstance(reconfig, ChainReconfig)
        driver.do(*(Received(peer, reconfig) for peer in (*reconfig.peers, victim)))
        now, effects = chain_repair.reconfigured(plan, reconfig), list[Any]()
        assert now is not None
        for stage in now.replicas[0].stages:
            shards = memory.stage_shards(driver.manifest, stage.first, stage.last)
            parts = tuple(leading.part(f"{stage.peer} {round}", shard, 1.0) for shard in shards)
            tokens = 4 * driver.manifest.train.step_tokens
            offer = Offer(round=round, replica=number, parts=parts, tokens=tokens, steps=4, loss=2.0)
            for effect in driver.do(Received(stage.peer, offer)):
                effects += driver.come(effect)
        (proposed,) = (effect.commit for effect in effects if isinstance(effect, Propose))
        assert [c.peers for c in proposed.contributions] == [reconfig.peers], "the work of the round counts"
        members = driver.manifest.first_members
        commit = dataclasses.replace(proposed, leader=members[0], members=members)
        driver.commits.append(commit)
        assert not [effect for effect in driver.do(Decided(commit)) if isinstance(effect, Resting)]


def ends_its_chains_rounds_where_no_spare_is_ready(folder: Path) -> None:
    """By saying again and again that its neighbour is lost, before that one can say anything; one of two chains."""
    of = tiny.manifest(rounds=99, start_peers=4)
    liar, honest = "liar", ("a", "b", "c")
    driver = leading.Driver(dict.fromkeys((liar, *honest), leading.FULL - 1), of)
    driver.decide(driver.ready(*driver.memory))
    shards, members, named, counted = layout.shard_names(of.model), of.first_members, list[Accusation](), 0
    for round in range(1, ROUNDS + 1):
        effects, plan = driver.attest(*driver.memory, shards=shards), driver.leader.plan
        assert plan is not None
        for replica in plan.replicas:
            if liar not in replica.peers:
                effects += driver.offered(*replica.peers)
                continue
            (victim,) = {*replica.peers} - {liar}
            said = ChainFailure(round=round, replica=replica.number, generation=0, peer=victim, reason="left the chain")
            for generation in (0, 1):
                effects += driver.do(Received(liar, dataclasses.replace(said, generation=generation)))
            ended = next(e.message for e in reversed(effects) if isinstance(e, Send))
            effects += driver.do(Received(victim, ended))
        while not (proposed := [effect.commit for effect in effects if isinstance(effect, Propose)]):
            assert driver.now < leading.DEADLINE * round
            effects += driver.at(driver.now + 1.0)
        named += [effect for effect in effects if isinstance(effect, Accusation)]
        counted += bool(proposed[0].contributions)
        commit = dataclasses.replace(proposed[0], leader=members[0], members=members)
        driver.commits.append(commit)
        rested = {effect.peer for effect in driver.do(Decided(commit)) if isinstance(effect, Resting)}
        assert rested <= {liar}
    assert counted >= RATE * ROUNDS, "as many as the three have without it"
    assert driver.now == 0.0, "no round waits that would not without it"
    assert {accusation.accuser for accusation in named} == {liar}
    assert len(named) <= EXPEL_COUNT, "with a second one it would be in no chain"


async def tells_nodes_of_a_repair_that_nobody_ordered(folder: Path) -> None:
    async with Run(folder, says=lambda node: iter(())) as ground:
        await ground.start_chain()
        await ground.until(lambda: ground.head >= 2)
        liar, said = ground.peers["a"], 0

        async def misleads() -> None:
            nonlocal said
            while True:
                plan = ground.archive.commits[-1].plan
                for replica in plan.replicas if plan is not None else ():
                    named = {"round": plan.round, "replica": replica.number, "steps": 0, "reason": "a lie"}
                    for peers in ((), replica.peers[::-1], replica.peers):
                        liar.peer.sessions.tell(ChainReconfig(peers=peers, generation=31, **named))
                        said += 1
                await asyncio.sleep(0.1)

        misleading = asyncio.create_task(misleads())
        commits = await ground.rounds(4)
        misleading.cancel()
        assert said > 10
        assert [len(commit.contributions) for commit in commits] == [1] * len(commits)
        assert not ground.of_kind(events.Unfair)
        await asyncio.gather(*map(ground.stop, list(ground.peers)))


# --- one dishonest node of four


async def names_payloads_that_nobody_offered(folder: Path) -> None:
    """It does not lead. Hundreds in each round, whose lists and garbage it would serve."""
    asked = set[object]()

    def name(round: int, number: int) -> str:
        return tiny.digest(f"{round} {number}")

    def junk(node: Attacker) -> Iterator[Message]:
        named = [name(node.quorum.round, number) for number in range(100)]
        shares = [Share(peer=node.identity.peer_id, root=root, size=10**6, norm=1.0, listed=100) for root in named]
        yield Offered(round=node.quorum.round, shares=tuple(shares))

    async def serve(stream: Stream) -> None:
        asked.add(framing.unpack_message(await stream.recv())["blob"])

    async with Run(folder, says=junk) as ground:
        await ground.join("a", "b")
        await ground.until(lambda: ground.head >= 2)
        await ground.daemons.started[ground.liar].serve(endpoints.BLOB, serve)
        ground.attacker.attacks = True
        commits = await ground.rounds(4)
        assert ground.attacker.said > 4
        assert [len(commit.contributions) for commit in commits] == [2] * len(commits)
        assert asked.isdisjoint(name(round, number) for round in range(ground.head + 2) for number in range(100))
        await asyncio.gather(*map(ground.stop, list(ground.peers)))


async def attests_nothing(folder: Path) -> None:
    """So nothing that it attests can be false; its work is waited for."""
    timing = TimingSpec(round_deadline=30.0, round_seconds=1.0, heartbeat=0.2, gone_after=2.0)
    async with Swarm(folder, volunteers.manifest(start_peers=3, rounds=1000, timing=timing)) as swarm:
        honest, liar = swarm.start("honest"), swarm.start("liar")
        swarm.start("other")
        await swarm.until(lambda: swarm.head >= 3)
        attests(liar, lambda right: [])
        first = swarm.head + 2
        await swarm.until(lambda: swarm.head >= first + ROUNDS)
        commits = list(swarm.archive.commits[first : first + ROUNDS])
        works_on(commits, swarm, honest)
        assert sum(liar.id in commit.plan.peers for commit in commits) <= 2, "it holds no state that anybody knows"


async def names_other_operators(folder: Path) -> None:
    """To a newcomer, with a decree's number that no log will have."""
    strangers = [identity(f"stranger {n}").peer_id for n in range(12)]
    board = Board(operators=tuple(Operator(peer=peer, places=()) for peer in strangers), quorum=1)

    async with Run(folder, says=lambda node: iter(())) as ground:
        await ground.join("a", "b")
        await ground.until(lambda: ground.head >= 2)

        async def lies(remote: str, request: bytes) -> bytes:
            found = Motions(number=2**31, schedule=schedule.of(ground.manifest, None), board=board, wanted=1)
            return encoding.encode(found)

        await serve_calls(ground.daemons.started[ground.liar], endpoints.DECREES, lies)
        (late,) = await ground.join("late")
        first = ground.head
        await ground.until(lambda: ground.head >= first + ROUNDS)
        commits = ground.archive.commits[first : first + ROUNDS]
        assert any(late.id in commit.plan.peers for commit in commits), "it takes part"
        assert all(len(commit.contributions) >= 2 for commit in commits)
        assert {commit.leader for commit in commits} <= set(ground.manifest.operators)
        await asyncio.gather(*map(ground.stop, list(ground.peers)))


OPERATORS = tuple(who.peer_id for who in tiny.OPERATORS[:4])
OF_FOUR = tiny.manifest(operators=OPERATORS, quorum=4, rounds=1000)


@contextlib.asynccontextmanager
async def office(folder: Path, log: Sequence[Any] = ()) -> Any:
    """A node of four, what it tells its operator, and the stream of another one to it."""
    network, told = MemoryNetwork(), list[Any]()
    long_logs.write(folder, OF_FOUR, iter(log))
    archive, liar, came = Archive(folder, OF_FOUR, QuickDisk()), network.transport(OPERATORS[3]), 0
    own, emit = network.transport(OPERATORS[1]), Emitter("node", lambda event: told.append(event))
    node = BootstrapNode(tiny.OPERATORS[1], own, archive, emit, liar.addresses)
    serving = asyncio.create_task(node.run())

    async def hear(stream: Stream) -> None:
        nonlocal came
        while True:
            came += len(await stream.recv())

    await liar.serve(endpoints.QUORUM, hear)
    while True:
        with contextlib.suppress(RemoteError):
            stream = await liar.open(OPERATORS[1], endpoints.QUORUM, timeout=5.0)
            break
        await asyncio.sleep(0.01)
    try:
        yield told, stream, lambda: came
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        archive.close()


async def signs_one_decree_after_another(folder: Path) -> None:
    """To other operators' screens, each of which would show all of them."""
    async with office(folder) as (told, stream, _):
        for n in range(200):
            decree = Decree(run=OF_FOUR.run_id, number=0, action=BAN, subject=identity(f"{n}").peer_id, reason="x")
            await stream.send(encoding.encode(Motion(sealed=encoding.seal(tiny.OPERATORS[3], decree))), timeout=60.0)
        await asyncio.sleep(5.0)
        lines = [e.body.text for e in told if isinstance(e.body, events.Warning) and "decree" in e.body.text]
        assert 1 <= len(lines) <= 11
        assert OPERATORS[3][-6:] in lines[0], "it is named"


async def asks_for_the_log_again_and_again(folder: Path) -> None:
    """And reads it, on the operators' stream."""
    peers = tuple(identity(f"peer {n}").peer_id for n in range(40))
    log = list(long_logs.records(long_logs.commits(OF_FOUR, 300, peers), *tiny.OPERATORS[:3]))
    async with office(folder, log) as (_, stream, came):
        await asyncio.sleep(30.0)
        began, seconds = came(), 20.0
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until:
            await stream.send(encoding.encode(LogRequest(after=-1)), timeout=60.0)
            await asyncio.sleep(0.02)
        assert 10**5 < came() - began < 4e6 + 1e6 * (seconds + 2), "it has the rate of a session"


# --- strangers who make others their clients

HOUSE = "/ip4/198.51.100.7/tcp/4001"
"""Of a node on the internet."""
STRANGER = Identity(bytes([9] * 32)).peer_id
INSIDE = ("10.0.0.1", "169.254.169.254", "127.0.0.1", "192.168.7.1", "100.64.0.1")
OUTSIDE = "198.51.100.99"


def at(host: str) -> str:
    return f"/ip{6 if ':' in host else 4}/{host}/tcp/22/p2p/{STRANGER}"


async def dialled(announced: Sequence[str], own: Sequence[str], begun: Sequence[str]) -> list[str]:
    """Where somebody with these addresses connects to, of what a stranger announces."""
    found = list[str]()

    async def connect(addresses: Sequence[str], *, timeout: float) -> None:
        found.extend(addresses)

    transport: Any = SimpleNamespace(
        peer_id=OPERATORS[0], addresses=tuple(own), connect=connect, seen_at=lambda peer: "", prefer=lambda peers: None
    )
    contacts = Contacts(OF_FOUR, transport, begun)
    contacts.learn([Announcement(run=OF_FOUR.run_id, peer=STRANGER, addresses=tuple(announced), serial=1)])
    with contextlib.suppress(RemoteError):
        await contacts.reach(STRANGER)
    return found


async def announces_addresses_of_our_network(folder: Path) -> None:
    node, home = f"{HOUSE}/p2p/{OPERATORS[0]}", "/ip4/192.168.1.20/tcp/4001"
    inside = [*map(at, INSIDE), at("fd00::1"), at("::ffff:10.0.0.1")]
    assert await dialled([*inside, at(OUTSIDE)], [home, "/ip4/127.0.0.1/tcp/4001"], [node]) == [at(OUTSIDE)]
    assert await dialled(inside, [home], [node]) == []
    beside = at("192.168.1.9")
    assert await dialled([beside], [home], [node]) == [beside], "who is in our own network"
    local = f"/ip4/10.2.0.1/tcp/4001/p2p/{OPERATORS[0]}"
    assert await dialled([at("10.9.9.9")], [home], [local]) == [at("10.9.9.9")], "a run that is not on the internet"
    alone = ["/ip4/127.0.0.1/tcp/4001"]
    assert await dialled([at("127.0.0.1")], alone, []) == [at("127.0.0.1")], "a run on one machine"


async def announces_a_name_of_our_network(folder: Path) -> None:
    where = {"inside.example": "169.254.169.254", "outside.example": OUTSIDE}

    async def ask(host: str, family: int) -> Any:
        if host not in where:
            raise socket.gaierror(socket.EAI_NONAME, "no")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (where[host], 0))]

    names = [f"/dns4/{name}/tcp/22/p2p/{STRANGER}" for name in (*where, "nowhere.example")]
    found = await greeting.dialable(names, [], [f"{HOUSE}/p2p/{OPERATORS[0]}"], ask)
    assert found == [at(OUTSIDE)], "the connection goes where the name was looked up"


async def decrees_places_of_its_guests_networks(folder: Path) -> None:
    found = list[str]()

    async def connect(addresses: Sequence[str], *, timeout: float) -> None:
        found.extend(addresses)

    transport: Any = SimpleNamespace(
        peer_id=STRANGER, addresses=("/ip4/192.168.1.20/tcp/1",), connect=connect, prefer=lambda peers: None
    )
    begun = f"{HOUSE}/p2p/{OPERATORS[0]}"
    contacts = Contacts(OF_FOUR, transport, [begun])
    places = tuple(f"/ip4/{host}/tcp/22" for host in (*INSIDE[:2], OUTSIDE))
    contacts.follow(Board(operators=(Operator(peer=OPERATORS[3], places=places),), quorum=4))
    await contacts.connect()
    assert found == [begun, f"{places[2]}/p2p/{OPERATORS[3]}"]


async def answers_with_announcements_that_nobody_asked_for(folder: Path) -> None:
    """A node, to a volunteer that looks for one peer: each has a signature to be checked."""
    network = MemoryNetwork()
    node, volunteer = network.transport(OPERATORS[0]), network.transport(STRANGER)
    who = identity("announced")
    sealed = encoding.seal(who, Announcement(run=OF_FOUR.run_id, peer=who.peer_id, serial=1))
    others = [sealed[:-1] + bytes([n % 256]) + bytes([n // 256]) for n in range(1500)]
    answer = list[bytes]()

    async def serve(remote: str, request: bytes) -> bytes:
        return encoding.encode(Roster(announcements=tuple(answer)))

    await serve_calls(node, endpoints.ROSTER, serve)

    async def cost(said: Sequence[bytes]) -> float:
        answer[:] = said
        began = time.process_time()
        found = await node_calls.look_up_peers(volunteer, OF_FOUR.run_id, OPERATORS[0], [who.peer_id])
        assert set(found) == {who.peer_id}
        return time.process_time() - began

    began = time.process_time()
    for raw in others[:500]:
        encoding.unseal_announcement(raw, None, OF_FOUR.run_id)
    third = time.process_time() - began
    await cost([sealed])
    assert await cost([sealed, *others[500:]]) < third, "twice as many are not looked at"


# --- data


def an_index_of_a_million_values(folder: Path) -> None:
    """An operator's, to volunteers: each byte would be an object."""
    raw = b"\xdd" + (10**7).to_bytes(4, "big") + b"\x01" * 10**7
    few = framing.pack_message([1] * 10**5)
    began = time.process_time()
    framing.unpack_message(few)
    quiet = time.process_time() - began
    began = time.process_time()
    with pytest.raises(UsageError, match="its index"):
        corpus.from_bytes(raw, "the run's")
    assert time.process_time() - began < 10 * quiet, "a hundred times as many values"


# --- the table


@dataclasses.dataclass(frozen=True)
class Attack:
    """kind: of KINDS; who: tries it; what: it does; tried: carries it out, and checks."""

    kind: int
    who: str
    what: str
    tried: Callable[[Path], None]


KINDS = {
    1: "a check that is silent where its signal is weak",
    2: "order of arrival taken for authorship",
    3: "blame that falls on the victim",
    4: "voting on what can be computed",
    5: "control believed from any one node",
    6: "a privileged channel without an allowance",
    7: "dear work before the cheap check, and strangers who make us their client",
    8: "bounds by count where size is free, and data or runs without limits for their guests",
}
VOLUNTEER, MEMBER, STRANGER_IS, NODE, AGAINST = (
    "a volunteer", "a chain member", "a stranger", "a node of four", "an operator against volunteers",
)  # fmt: skip
ATTACKS = (
    Attack(1, VOLUNTEER, "attests one false shard after the other until no more are computed",
           real(one_shard_after_another)),
    Attack(1, VOLUNTEER, "with four others disputes more shards than are computed", each_disputes_another_shard),
    Attack(1, VOLUNTEER, "attests nothing", real(attests_nothing)),
    Attack(1, VOLUNTEER, "hides behind accomplices whose differences fill the commit", hidden_behind_accomplices),
    Attack(2, VOLUNTEER, "names another's payload first and keeps it", virtual(keeps_what_it_names)),
    Attack(2, VOLUNTEER, "takes the seat first in every round and brings nothing",
           takes_the_seat_first_and_brings_nothing),
    Attack(3, VOLUNTEER, "names another's payload first with a false norm", virtual(says_a_false_norm_of_it)),
    Attack(3, MEMBER, "says in every round that its neighbour is lost",
           says_in_every_round_that_its_neighbour_is_lost),
    Attack(3, MEMBER, "ends its chain's rounds by it where no spare is ready",
           ends_its_chains_rounds_where_no_spare_is_ready),
    Attack(4, VOLUNTEER, "attests a false state as the only witness when others come", real(alone_from_the_beginning)),
    Attack(4, VOLUNTEER, "without work doubts the state of those who have some", doubts_without_work),
    Attack(5, NODE, "names payloads that nobody offered", real(names_payloads_that_nobody_offered)),
    Attack(5, NODE, "names other operators to a newcomer", real(names_other_operators)),
    Attack(5, MEMBER, "tells nodes of a repair that nobody ordered", real(tells_nodes_of_a_repair_that_nobody_ordered)),
    Attack(6, NODE, "signs one decree after the other", virtual(signs_one_decree_after_another)),
    Attack(6, NODE, "asks for the log again and again", virtual(asks_for_the_log_again_and_again)),
    Attack(7, STRANGER_IS, "announces addresses of others' networks", real(announces_addresses_of_our_network)),
    Attack(7, STRANGER_IS, "announces a name that leads there", real(announces_a_name_of_our_network)),
    Attack(7, NODE, "answers with announcements that nobody asked for",
           real(answers_with_announcements_that_nobody_asked_for)),
    Attack(8, STRANGER_IS, "with others, attests false digests of all shards", all_shards_by_strangers),
    Attack(8, AGAINST, "gives the run's text an index of a million values", an_index_of_a_million_values),
    Attack(8, AGAINST, "decrees places in its guests' networks", real(decrees_places_of_its_guests_networks)),
)  # fmt: skip


@pytest.mark.parametrize("attack", [pytest.param(a, id=f"{a.kind}: {a.who} {a.what}") for a in ATTACKS])
def test_nothing_comes_of_an_attack(attack: Attack, tmp_path: Path) -> None:
    attack.tried(tmp_path)


def test_every_kind_is_tried() -> None:
    assert {attack.kind for attack in ATTACKS} == set(KINDS)
