"""Newcomers of an open run, honest or not: when their work counts, and the share of a range of addresses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from peer import events
from peer.net import directory
from peer.net.memory import MemoryNetwork
from protocol.ledger import part_lists, rules, run_state
from protocol.run import layout
from protocol.run.manifest import AdmissionSpec
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import VERSION
from protocol.wire.commit import Commit, LeftOut, Part, Record
from protocol.wire.session import Hello, LogRequest, NotAdmitted
from tests.hostile.ground import MODEL, SOON, Ground, Trainee, hold, identity, manifest
from tests.support import volunteers
from tests.support.false_states import believes_the_log, digests_of, never_doubted
from tests.support.volunteers import Swarm

FOUNDERS = ("a", "b", "c", "d")
PROBATION = 3
OPEN = manifest(start_peers=4, admission=AdmissionSpec(probation=PROBATION))


def of_peer(swarm: Swarm, peer: str) -> list[Commit | LeftOut]:
    """What the log says of its work, in order: the commits that have it, and why others have not."""
    found: list[Commit | LeftOut] = []
    for commit in swarm.archive.commits:
        found += [commit] if any(share.peer == peer for share in commit.shares) else []
        found += [x for x in commit.left_out if peer in x.peers]
    return found


def was_late(found: Commit | LeftOut) -> bool:
    """Whether it was left out because it was not there in time, as anybody's work is on a machine that is busy."""
    return isinstance(found, LeftOut) and not found.probation and found.reason.startswith("no offer after ")


def is_the_logs(ground: Swarm) -> None:
    """Every digest that an honest peer ever attested is what the log gives, and nothing in the log is wrong."""
    right = digests_of(ground)
    said = [e.body for e in ground.events if isinstance(e.body, events.Attest)]
    honest = {peer.id for peer in ground.peers.values()}
    for attest in said:
        if attest.peer in honest and attest.round < len(right):
            assert attest.digests.items() <= right[attest.round].items()
    believes_the_log(ground.archive.commits, right)
    for peer in ground.peers.values():
        never_doubted(peer)
    now, head = run_state.begin(ground.manifest), ground.leader.round
    for commit in ground.archive.commits[:head]:
        assert list(rules.check(now, commit)) == []
        now = now.apply(commit)
    assert now.standing == ground.leader.standing


async def test_a_newcomers_work_has_no_weight_for_its_rounds_and_then_counts(tmp_path: Path) -> None:
    """With the same bits on every peer, and it is told."""

    async with Ground(tmp_path, OPEN) as ground:
        await ground.join(*FOUNDERS)
        await ground.goes_on(2)
        (new,) = await ground.join("new")
        await ground.goes_on(3)
        await ground.round(ground.head)
        found = [x for x in of_peer(ground, new.id) if not was_late(x)]
        served, counted = found[:PROBATION], found[PROBATION:]
        assert all(isinstance(x, LeftOut) and x.probation for x in served)
        assert counted
        assert all(isinstance(x, Commit) for x in counted), "from then on all of it counts"
        told = [e.body.probation for e in new.events if isinstance(e.body, events.Round) and e.body.probation]
        assert told == [x.reason for x in served if isinstance(x, LeftOut)]
        founders = {ground.peers[name].id for name in FOUNDERS}
        assert founders <= ground.leader.standing.founders
        is_the_logs(ground)


class Idle(Trainee):
    """It sends zeros."""

    def updates(self, round: int) -> Iterator[tuple[Part, ...]]:
        model = self.ground.manifest.model
        zeros = {s: [np.zeros(shape, np.float32) for shape in layout.shapes(model, s)] for s in self.shards}
        yield tuple(self.part(shard, arrays) for shard, arrays in zeros.items())


class Copyist(Trainee):
    """It sends what a founder has sent in the round before, under its own name."""

    def updates(self, round: int) -> Iterator[tuple[Part, ...]]:
        blobs = self.ground.archive.blobs
        found = part_lists.unpack(blobs.get(self.ground.archive.commits[-1].shares[0].root))
        for part in found:
            self.store.put(blobs.get(part.digest), 0)
        yield found


async def test_nobody_leaves_its_probation_by_zeros_or_copies(tmp_path: Path) -> None:
    async with Ground(tmp_path, OPEN) as ground, contextlib.AsyncExitStack() as at_work:
        await ground.join(*FOUNDERS)
        await ground.goes_on(2)
        enemies = {
            Idle(ground, await ground.enemy("idle")): "it changes nothing",
            Copyist(ground, await ground.enemy("copyist")): "it repeats the round before",
        }

        def found(one: Trainee) -> list[str]:
            return [x.reason for x in of_peer(ground, one.enemy.id) if isinstance(x, LeftOut)]

        for one in enemies:
            await at_work.enter_async_context(one.training())
        await ground.until(lambda: all(sum(why in x for x in found(one)) >= 2 for one, why in enemies.items()))
        await ground.goes_on(2)
        await at_work.aclose()
        for one in enemies:
            known = ground.leader.standing.of(one.enemy.id)
            assert (known.served, known.reputation < 1) == (0, True)
            assert not [x for x in of_peer(ground, one.enemy.id) if isinstance(x, Commit)]
        is_the_logs(ground)


# --- ranges of addresses; a network in memory, since all of loopback is one machine


def peer_id(name: str) -> str:
    return identity(name).peer_id


def placed(swarm: Swarm, where: dict[str, str]) -> None:
    """From where peers come, by their names."""
    assert isinstance(swarm.network, MemoryNetwork)
    for name, address in where.items():
        swarm.network.hosts[peer_id(name)] = f"/ip4/{address}/tcp/4001"


async def has_session(swarm: Swarm, name: str) -> bool:
    """Whether a peer that asks for a session is given one, and keeps it."""
    transport = swarm.network.transport(peer_id(name), directory.valid_record(swarm.manifest.run_id))
    await transport.connect(swarm.boot.addresses, timeout=SOON)
    stream = await transport.open(swarm.boot.peer_id, endpoints.SESSION, timeout=SOON)
    await stream.send(encoding.encode(Hello(run=swarm.manifest.run_id, version=VERSION)))
    await stream.send(encoding.encode(LogRequest(after=-1)))
    answer = encoding.decode_any(bytes(await stream.recv(timeout=SOON)), swarm.boot.peer_id)
    if isinstance(answer, NotAdmitted):
        assert answer.reason.startswith("2 others from its range of addresses take part")
        return False
    return isinstance(answer, Record)


async def test_strangers_of_one_range_have_together_no_more_than_its_share(tmp_path: Path) -> None:
    admission = AdmissionSpec(range_share=0.25)
    of = volunteers.manifest(start_peers=4, rounds=1_000_000, model=MODEL, admission=admission)
    crowd = [f"x{i}" for i in range(6)]

    async with Swarm(tmp_path, of) as swarm:
        swarm.hold = hold
        placed(swarm, {name: f"81.2.69.{i + 1}" for i, name in enumerate(crowd)})
        placed(swarm, {name: f"9.9.{i}.9" for i, name in enumerate(FOUNDERS)})
        for name in FOUNDERS:
            swarm.start(name)
        await swarm.until(lambda: swarm.head >= 2)
        for name in crowd:
            swarm.start(name)
        names = {peer_id(name) for name in crowd}
        await swarm.until(lambda: names <= swarm.leader.ready.keys())
        await swarm.until(lambda: any(s.peer in names for c in swarm.archive.commits for s in c.shares))
        head = swarm.head
        await swarm.until(lambda: swarm.head >= head + 5)
        for commit in swarm.archive.commits[1:]:
            tokens = [c.tokens for c in commit.contributions if c.peers[0] in names]
            assert len(tokens) <= 1, "beside four founders they have one place, also where founders were late"
            if len(commit.contributions) > len(FOUNDERS):
                assert sum(tokens) <= 0.25 * sum(c.tokens for c in commit.contributions)
        is_the_logs(swarm)


async def test_so_many_strangers_of_one_range_have_a_session(tmp_path: Path) -> None:
    """Thirty identities of a /24 want one; two get it, and a peer from elsewhere, too."""
    of = volunteers.manifest(start_peers=2, rounds=1_000_000, admission=AdmissionSpec(range_sessions=2))

    async with Swarm(tmp_path, of) as swarm:
        swarm.hold = hold
        swarm.start("a"), swarm.start("b")
        await swarm.until(lambda: swarm.head >= 1)
        crowd = [f"x{i}" for i in range(30)]
        placed(swarm, {name: f"81.2.69.{i + 1}" for i, name in enumerate(crowd)})
        placed(swarm, {"elsewhere": "9.9.9.9"})
        let_in = await asyncio.gather(*(has_session(swarm, name) for name in crowd))
        assert sum(let_in) == 2
        elsewhere = swarm.start("elsewhere")
        await swarm.until(lambda: elsewhere.id in swarm.leader.ready)
        await swarm.until(lambda: any(s.peer == elsewhere.id for c in swarm.archive.commits for s in c.shares))
