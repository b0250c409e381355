"""One simulated run: who takes part, when it is over, and what must hold at the end."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import io
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bootstrap.archive import Archive
from bootstrap.node import BootstrapNode, Work
from peer import events
from peer.events import Event
from peer.log.recompute import Recomputer, store_state
from peer.node.audit import held_out_text
from peer.node.config import Machine
from peer.node.peer import Factories, Peer
from peer.state.storage import Storage
from protocol.codec import blob_hash
from protocol.identity import Identity
from protocol.ledger import part_lists, schedule
from protocol.ledger.retention import StateRounds
from protocol.run import layout
from protocol.run.manifest import AdmissionSpec, Manifest, OuterSpec
from protocol.wire import logfile
from protocol.wire.commit import liars_borne
from tests.sim.board import BoardChanges, newcomers
from tests.sim.disk import SimDisk
from tests.sim.ledger import Ledger
from tests.sim.trainer import CommonTrainer, DrawnTrainer, Meetings
from tests.sim.world import BOUND, NODE_POINTS, POINTS, Crashed, Process, Violation, Weather, World
from tests.support import machines, tiny
from tests.support.liars import Liar
from tests.support.lying_nodes import LyingNode

KINDS = ("crowd", "swarm", "storm", "swarm", "swarm", "storm")
"""By the seed: a swarm; a crowd of weak peers, whose two chains break often; a storm over the quorum, with one peer."""
PEERS = {"swarm": (3, 4, 4, 4, 6, 8), "crowd": (7,), "storm": (1,)}
FULL = {"swarm": (0, 1, 2, 2, 3), "crowd": (0,), "storm": (1,)}
"""How many of them can train the whole model."""
QUORUMS = {
    "swarm": ((1, 1), (1, 1), (1, 1), (4, 4), (4, 4), (4, 5)),
    "crowd": ((1, 1),),
    "storm": ((4, 4), (4, 4), (4, 5), (7, 7)),
}
"""Sizes of the quorum, and operators' nodes."""
COLLUDERS = ((5, 1), (7, 2), (8, 2), (8, 3))
"""Full replicas of a run with colluders, and how many of them are."""
QUARREL_ROUNDS, QUARRELING = 4, (3, 3, 4, 5)
"""More rounds of a run with quarrels, which show in the next plans; and its peers: each chain counts."""
LONG_PEERS, LONG_ROUNDS, LONG_STORM = 8, 24, 4
"""Full replicas and more rounds of a long run, and how many times as long faults go on in it."""
LONG_QUORUMS = ((1, 1), (4, 4), (4, 5))
LATE = 2
"""Newest rounds of which a node that learned the commit before it had all payloads removes what was coming for an
offer, and fetches it again for the commit."""
FAMILY = (
    OuterSpec(topk=4096, values="fp32", optimizer="nesterov", eta=0.7),
    OuterSpec(topk=4096, values="int8", optimizer="nesterov", momentum=0.5),
    OuterSpec(topk=1024, transform="dct"),
    OuterSpec(topk=512, values="int4", sample=0.25),
)
SHARE = 0.4
AGGREGATE_TOPK = 512
"""Half as many entries as an update: two of them are worth an aggregate."""
LATEST = 40.0
"""By then everybody has started."""


class Swarm:
    """Everything that one seed decides; `run` raises Violation if a promise is broken. `liars`: made-up identities that
    take part. `lying_nodes`: as many operators as a quorum of 3f + 1 bears are dishonest, also after decrees. `calm`:
    nothing else goes wrong. `honest`: the same run, with operators who could lie and do not, and chains that could
    quarrel and do not. `probation`: newcomers' rounds of it; nobody has more than SHARE of a round's weight then.
    `aggregates`: nodes add up the updates of two replicas and more.
    `fixed`: nobody becomes an operator, or ceases to be one. `quarrels`: members of chains say of each other that they
    lie, for no reason. `colluders`: volunteers agree on bad work. `long`: so many rounds of so large payloads that the
    archives remove the first ones. `family`: another method than the usual one, by the seed."""

    def __init__(
        self,
        seed: int,
        verbose: bool = False,
        liars: int = 0,
        lying_nodes: bool = False,
        calm: bool = False,
        honest: bool = False,
        probation: int = 0,
        fixed: bool = False,
        quarrels: bool = False,
        colluders: bool = False,
        long: bool = False,
        family: bool = False,
        aggregates: bool = False,
    ) -> None:
        rng = random.Random(seed)
        kind = "swarm" if quarrels else kind_of(seed)
        quorum, nodes = rng.choice(QUORUMS[kind])
        if quarrels:
            quorum, nodes = rng.choice(((1, 1), (4, 4), (4, 4), (4, 5)))
        if lying_nodes:
            quorum, nodes = rng.choice(((4, 4), (4, 4), (4, 5), (7, 7)))
        count = rng.choice(QUARRELING if quarrels else PEERS[kind])
        bad = 0
        if colluders:
            count, bad = rng.choice(COLLUDERS)
        if long:
            quorum, nodes = LONG_QUORUMS[seed % len(LONG_QUORUMS)]
            count = LONG_PEERS
        operators = tiny.OPERATORS[:nodes]
        names = tuple(o.peer_id for o in operators)
        self.manifest = tiny.manifest(
            seed=seed,
            model=dataclasses.replace(tiny.manifest().model, n_layers=3, residual_width=2),
            rounds=rng.randint(3, 5) + (QUARREL_ROUNDS if quarrels else LONG_ROUNDS if long else 0),
            start_peers=rng.randint(1, count),
            operators=names,
            quorum=quorum,
            checkpoint_rounds=rng.choice((1, 2, 4)),
            admission=AdmissionSpec(probation=probation, share=SHARE if probation else 1.0),
            outer=dataclasses.replace(
                FAMILY[seed % len(FAMILY)] if family else OuterSpec(topk=4096 if long else 1024),
                beta=rng.choice((0.5, 1.0)),
                overlap=rng.choice((0, 1)),
                aggregate_topk=AGGREGATE_TOPK if aggregates else 0,
            ),
        )
        drawn = weather(rng, seed)
        drawn = dataclasses.replace(drawn, calm_at=0.0 if calm else drawn.calm_at * (LONG_STORM if long else 1))
        self.world = world = World(seed, drawn, rng, verbose)
        self.ledger = Ledger(self.manifest, world.stats)
        world.tells = self._told
        world.dies = self._check_disk
        world.loses_power = lambda process: self.ledger.lost_power(process.name)
        self.meetings = Meetings(world, quarrels and not honest)
        self.reports: set[tuple[int, str, str]] = set()
        self._excused: dict[str, set[str]] = {}
        self._trainers: dict[str, DrawnTrainer] = {}
        self._applied: dict[str, int] = {}
        self._ended: dict[str, asyncio.Future[None]] = {}
        self._names: list[set[str]] = []
        """Of all payloads of each round."""
        fresh = () if fixed or calm else newcomers(seed)
        addresses = tuple(f"/memory/p2p/{name}" for name in (*names, *(who.peer_id for who in fresh)))
        operators = (*operators, *fresh)
        self.nodes = [Process(world, o, lambda p: self._node(p, addresses), "nodes") for o in operators]
        whole, third = tiny.full_memory(self.manifest), tiny.third_memory(self.manifest)
        full = count if colluders or long else rng.choice((0, 1, 1) if quarrels else FULL[kind])
        self.peers = []
        for i in range(count):
            some = (third, whole - 1, whole - 1, whole - 1) if quarrels else (third, third, third, whole - 1)
            memory = whole if i < full else third if kind == "crowd" else rng.choice(some)
            up_bps = rng.choice((10**6, 10**7))
            machine = machines.machine(Path("/"), memory, nodes=addresses, up_bps=up_bps, down_bps=10**7)
            identity = Identity(rng.randbytes(32))
            self.peers.append(Process(world, identity, self._peer_life(machine), "peers"))
            self._ended[identity.peer_id] = world.loop.create_future()
        self._common = colluders
        self.colluders = set() if honest else {peer.name for peer in rng.sample(self.peers, bad)}
        self.liars = [Process(world, Identity(rng.randbytes(32)), self._lie, "liars") for _ in range(liars)]
        self.lying = {liar.name for liar in self.liars}
        chosen: set[str] = set(rng.sample(names[:quorum], liars_borne(quorum))) if lying_nodes else set()
        self.lying |= set() if honest else chosen
        self.changes = BoardChanges(self, random.Random(f"board {seed}"), fresh, chosen)
        self._decided_at: list[float] = []
        world.trace("world", f"{world.weather}")

    # --- the processes

    async def _node(self, process: Process, addresses: tuple[str, ...]) -> None:
        archive = Archive(process.folder, self.manifest, self._disk(process))
        emit = process.emitter(lambda event: self._hear_node(process, event))
        clock = self.world.clock()
        parts = (process.identity, process.transport, archive, emit, addresses, clock)
        if process.name not in self.lying:
            logged = (self.manifest, archive.commits)
            known = Recomputer(*logged, archive.blobs.get, newest_state=archive.newest_state)
            store = functools.partial(store_state, *logged, archive.blobs)
            process.running = BootstrapNode(*parts, work=Work(digest=known.digest, store_state=store))
            await process.running.run()
            self.changes.left(process)
            return
        liar = process.running = LyingNode(*parts, rng=process.rng)
        try:
            await liar.run()
        finally:
            self.world.stats["lies"] += liar.told.total()

    def _peer_life(self, machine: Machine) -> Any:
        async def live(process: Process) -> None:
            trainer: list[DrawnTrainer] = []

            def inner_loop(manifest: Manifest, peer: str, *rest: Any) -> DrawnTrainer:
                announce = rest[3]
                parts = (process, self.meetings, manifest, announce)
                bad = process.name in self.colluders
                trainer.append(CommonTrainer(bad, *parts) if self._common else DrawnTrainer(*parts))
                self._trainers[process.name] = trainer[0]
                return trainer[0]

            self._trainers.pop(process.name, None)
            self._applied.pop(process.name, None)
            storage = Storage(process.folder, None, self._disk(process))
            made = Factories(clock=self.world.clock(), text=held_out_text, inner_loop=inner_loop)
            emit = process.emitter(lambda event: self._hear_peer(process, event))
            peer = Peer(self.manifest, process.identity, process.transport, storage, machine, emit, made)
            process.running = peer
            try:
                await peer.run()
            finally:
                self.meetings.left(process.name)
            self._check_end(process, peer)
            if process.lives == 1:
                self._check_store(process, storage)
            self._ended[process.name].set_result(None)

        return live

    async def _lie(self, process: Process) -> None:
        addresses = tuple(f"/memory/p2p/{name}" for name in self.manifest.operators)
        false = {s: blob_hash.name_of(f"false {s}".encode()) for s in layout.shard_names(self.manifest.model)}
        liar = Liar(self.manifest, process.identity, process.transport, addresses, false, process.rng)
        process.running = liar
        try:
            await liar.run()
        finally:
            self.world.stats["lies"] += liar.said

    def _told(self, who: str, raw: bytes) -> None:
        if who not in self.lying:
            self._guarded(self.ledger.told, who, raw)

    def _disk(self, process: Process) -> SimDisk:
        def heard(path: Path, data: bytes) -> None:
            if process.name in self.lying:
                return
            if path.name == logfile.LOG:
                known = len(self.ledger.log)
                for _, record in logfile.records(io.BytesIO(data), path):
                    self._guarded(self.ledger.appended, process.name, record)
                self._decided_at += [self.world.now] * (len(self.ledger.log) - known)
                self._guarded(self.check_bound, known)
                self._guarded(self.check_judged, known)
            else:
                self._guarded(self.ledger.written, process.name, path, data, self._trainers.get(process.name))

        def removes(path: Path) -> None:
            if isinstance(process.running, BootstrapNode) and path.parent.name == "blobs":
                self._guarded(self._check_removal, process, path.name)

        return HeardDisk(process, heard, removes)

    def _check_removal(self, process: Process, name: str) -> None:
        """That a node removes a committed payload only once the power may be lost: both states that it keeps are on its
        disk, and what it removes is of no round since the older one."""
        commits = self.ledger.log[: self.ledger.heads.get(process.name, -1) + 1]
        self._names += [self.ledger.names(commit) for commit in commits[len(self._names) :]]
        newest = max((round for round, names in enumerate(self._names[: len(commits)]) if name in names), default=-1)
        if newest < 0 or newest >= len(commits) - LATE:
            return
        states = StateRounds(self.manifest)
        for commit in commits:
            states.follow(commit)
        self.world.stats["payloads removed"] += 1
        durable = {path.name for path, file in process.files.durable.items() if file.synced is not None}
        held = all(set(commits[round + 1].digests.values()) <= durable for round in states.kept)
        if newest > states.begin or not held:
            kept = f"of which {states.kept} all are there: {held}"
            raise Violation("P4", f"{process.name[-8:]} removes a payload of round {newest}, with states {kept}")

    def check_bound(self, known: int) -> None:
        """That no commit names more dishonest members than its quorum bears. `known`: commits that were checked
        before."""
        for commit in self.ledger.log[known:]:
            members, lying = len(commit.members), len(self.lying & set(commit.members))
            if lying > liars_borne(members):
                raise Violation(BOUND, f"{lying} of the {members} members after round {commit.round} are dishonest")

    def check_judged(self, known: int) -> None:
        """That no honest work is left out for what colluders sent, but where their feedback was handed over and is in
        it. `known`: commits that were checked before."""
        heirs = set[str]().union(*(self.ledger.heirs.get(giver, ()) for giver in self.colluders)) - self.colluders
        for commit in self.ledger.log[known:] if self._common else ():
            for x in commit.left_out:
                if x.judged is None:
                    continue
                if not set(x.peers) <= self.colluders | heirs:
                    raise Violation("P8", f"honest work of round {commit.round} is left out: {x.reason}")
                self.world.stats["heirs left out" if heirs & set(x.peers) else "colluders left out"] += 1
            makers = [share.peer for share in commit.shares]
            self.world.stats["colluders counted"] += len(self.colluders & set(makers))
            self.world.stats["less weight"] += sum(c.weight < 1 for c in commit.contributions)

    # --- what they tell

    def _hear_node(self, process: Process, event: Event) -> None:
        self.world.trace(process.name, f"{event.body}")
        if process.name in self.lying:
            return
        match event.body:
            case events.Attest(peer=peer) if peer in self.lying:
                pass
            case events.Attest(peer=peer, round=round, digests=digests):
                self._guarded(self.ledger.attested, peer, round, dict(digests), self._excused.get(peer, set()))
            case events.Diverged(peer=peer, round=round, shard=shard):
                self.reports.add((round, peer, shard))
            case events.Leads(leads=leads):
                self.world.stats["leads"] += leads
            case events.Moved():
                self.world.stats["moved"] += 1
            case events.ChainReconfigured(peers=members, steps=steps):
                kind = "ended" if not members else "finished" if steps else "reconfigured"
                self.world.stats[f"chains {kind}"] += 1
            case events.Warning(text=text) if text.startswith("quorum:"):
                self.world.stats["stalls"] += 1
            case events.Warning(text=text) if text.endswith("another node leads this round"):
                self.world.stats["doubts"] += 1
            case events.Warning(text=text) if text.endswith("another node leads"):
                self.world.stats["skipped"] += 1
            case events.Unfair(peer=peer, reason=reason):
                self._guarded(self._accused, process.name, peer, reason)

    def _hear_peer(self, process: Process, event: Event) -> None:
        match event.body:
            case events.Round(round=round, holds=holds):
                before = self._applied.get(process.name, round - 1)
                if round <= before or (holds and round != before + 1):  # without a shard there is nothing to apply
                    self._guarded(self._wrong_round, process.name, round, before)
                self._applied[process.name] = round
                self._spoil(process)
            case events.Offered():
                self.world.stats["offers"] += 1
            case events.Withdrew():
                self.world.stats["withdrawals"] += 1
            case events.ShardRebuilt(shards=shards):
                self.world.stats["rebuilt"] += len(shards)
            case events.Recovered():
                self.world.stats["recovered"] += 1
        self.world.trace(process.name, f"{event.body}")

    def _wrong_round(self, name: str, round: int, before: int) -> None:
        raise Violation("P2", f"{name[-8:]} applies round {round} to the state after round {before}")

    def _accused(self, who: str, peer: str, reason: str) -> None:
        """A node says that another one lies."""
        self.world.stats["accused"] += 1
        if peer not in self.lying:
            raise Violation("P2", f"{who[-8:]} accuses {peer[-8:]}, which is honest: {reason}")

    def _spoil(self, process: Process) -> None:
        """Perhaps a bit of its memory flips."""
        world, rounds = self.world, process.running.rounds
        early = rounds.member.applied < self.manifest.rounds - 1 and process.name not in self._excused
        if early and rounds.outer.theta and world.chance(world.weather.corrupt, world.rng):
            shard = world.rng.choice(sorted(rounds.outer.theta))
            array, *others = rounds.outer.theta[shard]
            rounds.outer.theta[shard] = [array + 1, *others]
            self._excused[process.name] = {shard}
            world.stats["memory errors"] += 1

    def _guarded(self, check: Any, *arguments: Any) -> None:
        try:
            check(*arguments)
        except Violation as violation:
            self.world.broken(violation)

    def _check_disk(self, process: Process) -> None:
        """A checkpoint that has its name is whole: any peer may get any shard of it."""
        there = process.files.there
        for folder in {p.parent for p in there if p.parent.name.startswith("checkpoint-")}:
            meta = there.get(folder / "meta.json")
            shards = json.loads(meta.data)["digests"] if meta is not None else ["meta.json"]
            if not all(folder / f"{shard}.safetensors" in there for shard in shards):
                self.world.broken(Violation("P7", f"{process.name[-8:]}: {folder.name} is there and not whole"))

    # --- from begin to end

    def longest_round(self, with_work: bool = False) -> float:
        """Seconds of the slowest round: from the moment at which the commit before was in an honest node's log.

        with_work: of rounds after the first with work. Until then, a silent stranger cannot be told from a slow first
        peer, and is waited for until the deadline.
        """
        worked = (at for at, commit in enumerate(self.ledger.log) if commit.contributions)
        times = self._decided_at[next(worked, len(self._decided_at)) if with_work else 0 :]
        return max((later - at for at, later in itertools.pairwise(times)), default=0.0)

    def run(self) -> None:
        """Lives through the run and checks what must hold at its end. Raises Violation."""
        self.world.run(self._live())

    async def _live(self) -> None:
        world, rng = self.world, self.world.rng
        for node in self.nodes:
            world.loop.call_later(rng.uniform(0.0, 3.0), node.start)
        for peer in self.peers:
            late = rng.random() < 0.15
            world.loop.call_later(rng.uniform(10.0, LATEST) if late else rng.uniform(0.0, 5.0), peer.start)
        for liar in self.liars:
            world.loop.call_later(rng.uniform(0.0, LATEST), liar.start)
        names = [p.name for p in (*self.nodes, *self.peers)]
        weathers = asyncio.ensure_future(world.weathers(names, [n.name for n in self.nodes]))
        changes = asyncio.ensure_future(self.changes.run())
        over = asyncio.ensure_future(asyncio.wait(list(self._ended.values())))
        await asyncio.wait({weathers, over, world.over}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({over, world.over}, timeout=LATEST, return_when=asyncio.FIRST_COMPLETED)
        deadlines = self._last_round - len(self.ledger.log) + 3
        patience = deadlines * self.manifest.timing.round_deadline
        await asyncio.wait({over, world.over}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if not over.done() and not world.over.done():
            states = {p.name[-8:]: describe(p) for p in (*self.peers, *self.nodes)}
            text = f"not over {deadlines} deadlines after the faults ended: {len(self.ledger.log)} commits, {states}"
            world.broken(Violation("P4", text))
        for task in (over, weathers, changes):
            if task.done():
                task.result()  # raises the error of a part of the simulation itself, which would be silent
            task.cancel()

    @property
    def _last_round(self) -> int:
        """As far as is known: a round without work makes the run longer."""
        log = self.ledger.log
        return schedule.last_round(self.manifest, log[-1] if log else None)

    def _check_end(self, process: Process, peer: Peer) -> None:
        member, outer, excused = peer.rounds.member, peer.rounds.outer, self._excused.get(process.name, set())
        if member.is_late:
            return
        final = self._last_round
        if member.applied != final:
            raise self._said(Violation("P4", f"{process.name[-8:]} finished after round {member.applied} of {final}"))
        for round, commit in member.commits.items():
            if self.ledger.log[round] != commit:
                raise self._said(Violation("P2", f"{process.name[-8:]} learned another commit for round {round}"))
        right = self.ledger.digests(final)
        for shard in outer.theta:
            if outer.digest(shard) != right[shard]:
                if shard not in excused:
                    raise self._said(Violation("P1", f"{process.name[-8:]}: {shard} is not what the log gives"))
                self._check_told(process.name, shard)
        try:
            if not self.manifest.outer.overlap:  # else work that was done ahead may have been in vain
                self.ledger.check_work(process.name, self._trainers[process.name].done)
            self.ledger.check_feedback(process.name, outer.feedback)
        except Violation as violation:
            raise self._said(violation) from None

    def _check_store(self, process: Process, storage: Storage) -> None:
        """A process that never died keeps no uncommitted payload but its own offers since the durable feedback."""
        lists = [self.ledger.lists(commit) for commit in self.ledger.log]
        committed = {x for known in lists for root, parts in known.items() for x in (root, *(p.digest for p in parts))}
        own = {name for o in storage.offers for name in (part_lists.root_of(o.parts), *(p.digest for p in o.parts))}
        states = {digest for round in range(len(self.ledger.log)) for digest in self.ledger.digests(round).values()}
        moved = {move.handover.blob for moves in self.ledger.moves.values() for move in moves}
        useless = set(storage.blobs) - committed - own - states - moved - self.ledger.aggregates
        if useless:
            raise self._said(
                Violation("P6", f"{process.name[-8:]} keeps {len(useless)} payloads that nobody committed")
            )

    def _said(self, violation: Violation) -> Crashed:
        self.world.broken(violation)
        return Crashed()

    def _check_told(self, name: str, shard: str) -> None:
        """A memory error that is left at the end is reported by every node that could tell: two others had the right
        bits."""
        final, right = self._last_round, self.ledger.digests(self._last_round)[shard]
        for node in (n.running for n in self.nodes if n.alive):
            known = {who: digests.get(shard) for who, digests in node.leader.attestations.of(final).items()}
            told = (final, name, shard) in self.reports
            if known.get(name) not in (None, right) and not told and list(known.values()).count(right) >= 2:
                raise self._said(Violation("P1", f"{name[-8:]}: the memory error in {shard} was not reported"))


class HeardDisk(SimDisk):
    """A disk of which the ledger hears. `heard(path, data)` is called with whatever is durable, `removes(path)` before
    something is removed."""

    def __init__(self, process: Process, heard: Callable[[Path, bytes], None], removes: Callable[[Path], None]) -> None:
        super().__init__(process.files, process.points(), process.rng)
        self._heard = heard
        self._removes = removes

    def remove(self, path: Path) -> None:
        self._removes(path)
        super().remove(path)

    def kept(self, path: Path, data: bytes) -> None:
        self._heard(path, data)


def kind_of(seed: int) -> str:
    """What kind of run a seed is; see KINDS."""
    return KINDS[seed % len(KINDS)]


def weather(rng: random.Random, seed: int) -> Weather:
    """Weather of a run. Every operation gets its share of deaths; a storm kills nodes and breaks links."""
    kind = kind_of(seed)
    points = NODE_POINTS if kind == "storm" else POINTS
    alike = [i for i, other in enumerate(KINDS) if (other == "storm") == (kind == "storm")]
    number = seed // len(KINDS) * len(alike) + alike.index(seed % len(KINDS))
    drawn = Weather.draw(rng, points[number % len(points)])
    if kind == "crowd":
        return dataclasses.replace(drawn, chain_failure=0.5)
    if kind == "swarm":
        return drawn
    return dataclasses.replace(
        drawn,
        drop=rng.choice((0.0, 0.1, 0.2)),
        crash=rng.choice((0.0005, 0.002)),
        focus_crash=rng.choice((0.02, 0.1, 0.2)),
        partition=rng.choice((0.0, 0.05, 0.1)),
        cut=rng.choice((0.0, 0.2, 0.6)),
        kill=0.0,
        away=rng.choice((1.0, 4.0)),
    )


def describe(process: Process) -> str:
    """Where a process stands, for a reader of why a run did not end."""
    running = process.running
    if not process.alive:
        return "finished" if process.finished else "dead"
    if isinstance(running, Peer):
        return (
            "starting" if running.rounds is None else f"{running.rounds.member.phase} {running.rounds.member.applied}"
        )
    return f"round {running.leader.round}"
