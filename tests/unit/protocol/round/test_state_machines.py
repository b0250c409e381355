"""The tables of the state machines: what shows them agrees with them, and random lives take each of their rows.

The machines check every step themselves (protocol/quorum/table.py): a life that needs a row which is missing ends in a
TableError.
"""

from __future__ import annotations

import dataclasses
import random
from enum import Enum
from typing import Any

import pytest

from protocol.ledger import history, part_lists, schedule
from protocol.ledger.part_lists import share_of
from protocol.planning import memory
from protocol.planning.allotment import allot
from protocol.planning.partition import Candidate
from protocol.quorum import leadership, paxos_events
from protocol.quorum.acceptor import TABLE as ACCEPTOR
from protocol.quorum.paxos_events import Objection
from protocol.quorum.table import Position, Row, Table, TableError
from protocol.round import leader_events as leading
from protocol.round import member
from protocol.round import member_events as events
from protocol.round.accusations import LIES
from protocol.round.chain_repair import SLOW
from protocol.round.judging import JudgingJob, Verdict
from protocol.round.leader import Leader
from protocol.round.leader_events import Question
from protocol.round.member import Member
from protocol.run import layout
from protocol.run.manifest import Manifest, OuterSpec
from protocol.wire import encoding
from protocol.wire.ballot import Accept, Pledge, Prepare, Promise, Reject, Vote
from protocol.wire.commit import Commit, Contribution, Part, pledge_body
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from protocol.wire.session import (
    Attest,
    ChainFailure,
    ChainReconfig,
    Finished,
    Heartbeat,
    Offer,
    TakeSeat,
    TimeUp,
    Withdraw,
)
from tests.docs import state_machines
from tests.support import tiny
from tests.support.history import gap_in_the_log
from tests.support.leader import Driver
from tests.support.paxos import (
    PARTS,
    PAYLOAD,
    SHARE,
    WITH_PAYLOAD,
    A,
    B,
    C,
    Cluster,
    D,
    leader_that_stalls,
)
from tests.support.pledges import learned_while_asking, pledges, rejected, shown_another


def taken_by(*positions: Position[Any]) -> set[tuple[str, Row[Any]]]:
    return {(position.table.name, row) for position in positions for row in position.taken}


def rows(*tables: Table[Any]) -> set[tuple[str, Row[Any]]]:
    return {(table.name, row) for table in tables for row in table.rows}


# --- what shows the tables


def test_the_document_is_what_the_tables_say() -> None:
    shown = state_machines.PATH.read_text(encoding="utf-8")
    assert shown == state_machines.document(), "run `python -m tests.docs.state_machines`"


# --- tables as such


class Light(Enum):
    RED = 1
    GREEN = 2


class Go:
    pass


class Beep:
    pass


CROSSING = Table(
    "light",
    Light,
    (
        Row(Light.RED, Go, Light.GREEN, (Beep,)),
        Row(Light.GREEN, None, Light.RED),
        Row(None, Go, None),
    ),
)


def test_a_step_that_no_row_allows_is_an_error_and_changes_nothing() -> None:
    light = Position(CROSSING, Light.RED)
    with pytest.raises(TableError, match="light: no row says RED → GREEN upon Go with no effect"):
        light.step(Go, Light.GREEN)
    with pytest.raises(TableError, match="light: no row says RED → RED upon a condition with no effect"):
        light.step(None, Light.RED)
    assert (light.phase, light.taken) == (Light.RED, set())
    beep = Beep()
    assert light.step(Go, Light.GREEN, [beep, beep]) == [beep, beep], "a kind that is repeated is in its row once"
    light.stay(Go)
    light.step(None, Light.RED)
    assert taken_by(light) == rows(CROSSING)


def test_a_table_has_no_row_twice() -> None:
    with pytest.raises(TableError, match="two rows say GREEN → GREEN upon Go"):
        Table("light", Light, (*CROSSING.rows, Row(Light.GREEN, Go, Light.GREEN)))


# --- the volunteer, and training ahead

IN_TIME = dataclasses.replace(tiny.manifest().timing, round_seconds=48.0)
ME = "me"
SPARES = {("a", "me", "z"): ("s",), ("a", "b", "z"): ("me", "s"), ("me",): (), ("other",): ()}
"""The replicas that plans have, and with which spares."""


class Life:
    """A volunteer whose disk, network and trainer answer when chance wants, and a run that goes on whatever it does."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.manifest = tiny.manifest(rounds=5, outer=OuterSpec(overlap=self.rng.choice((0, 1))), timing=IN_TIME)
        self.member = Member(self.manifest, ME)
        self.commits: list[Commit] = []
        self.answers: list[events.Event] = []
        self.job: events.TrainOrder | None = None
        self.applied: list[int] = []
        self.now = 0.0
        self.publish()

    def publish(self) -> None:
        """The next commit of the run, with our offer or without it."""
        before = self.commits[-1] if self.commits else None
        round = len(self.commits)
        share = share_of(ME, self.offer(round, 0).parts)
        mine = Contribution(replica=0, tokens=8, steps=1, loss=None, shares=(share,))
        self.commits.append(
            tiny.commit(
                self.manifest,
                before,
                contributions=(mine,) if round and self.rng.random() < 0.5 else (),
                plan=self.plan(before.plan if before else None) if round < self.manifest.rounds else None,
            )
        )

    def plan(self, before: Plan | None) -> Plan:
        peers = self.rng.choice(list(SPARES))
        if before is not None and self.rng.random() < 0.6:
            return allot(self.manifest, before.round + 1, before.replicas, before.spares, {}, before)
        edges = ((0, 1), (1, 2), (2, 4)) if len(peers) > 1 else ((0, 4),)
        stages = tuple(StageSpec(peer=p, first=a, last=b) for p, (a, b) in zip(peers, edges, strict=True))
        return allot(self.manifest, len(self.commits) + 1, [ReplicaSpec(stages=stages)], SPARES[peers], {})

    def offer(self, round: int, replica: int) -> Offer:
        parts = (Part(shard="embed", digest=tiny.digest(f"payload {round}"), size=8, norm=1.0),)
        return Offer(round=round, replica=replica, parts=parts, tokens=8, steps=1, loss=None)

    def live(self, steps: int) -> None:
        for _ in range(steps):
            self.feed(self.happens())

    def happens(self) -> events.Event:
        rng = self.rng
        match rng.randrange(13):
            case 0 | 1 | 2 | 3 if self.answers:
                return self.answers.pop(rng.randrange(len(self.answers)))
            case 4 if self.job is not None and rng.random() < 0.5:
                return self.end()
            case 5 if len(self.commits) <= self.manifest.rounds and rng.random() < 0.5:
                self.publish()
            case 6:
                return events.Committed(tiny.record(rng.choice(self.commits)))
            case 7:
                return self.failure()
            case 8 | 9:
                return self.told(self.reconfig())
            case 10:
                said = (Finished(round=3), TimeUp(round=self.member.applied + 1), Heartbeat(phase="x", round=1, turn=1))
                return rng.choice((events.Connected(), *map(self.told, said)))
            case 11 if (plan := self.member.plan) is not None:
                return self.told(
                    TakeSeat(
                        round=plan.round - rng.randrange(2),
                        replica=plan.seats[0].number - rng.randrange(2),
                        seconds=9.0,
                    )
                )
        self.now += rng.choice((1.0, 6.0))
        return events.Tick()

    def told(self, message: Any) -> events.Told:
        return events.Told(self.rng.choice((*[self.member.leader] * 3, "another")), message)

    def end(self) -> events.Event:
        round, self.job = self.job.plan.round, None
        return self.rng.choice((events.Trained(round, 1, 8, None), events.Failed(round, 0, "?")))

    def failure(self) -> events.Event:
        round = self.job.plan.round if self.job else 1
        return events.ChainFailed(round, self.rng.randrange(2), "z", self.rng.choice(("lost", SLOW)))

    def reconfig(self) -> ChainReconfig:
        names = self.rng.choice((("a", "me", "z"), ("a", "me", "s"), ("a", "s", "z"), ()))
        round, generation = self.rng.choice((self.member.applied + 1, 1)), self.rng.randrange(1, 4)
        return ChainReconfig(round=round, replica=0, generation=generation, peers=names, steps=0, reason="why")

    def feed(self, event: events.Event) -> None:
        for effect in self.member.handle(event, self.now):
            match effect:
                case events.TrainOrder(resume=True):
                    self.job = effect if self.job is not None else None
                case events.TrainOrder():
                    assert self.job is None, "one training at a time"
                    self.job = effect
                case events.Stop(round):
                    assert self.job is None or self.job.plan.round == round
                case events.EncodeUpdate(plan, replica):
                    self.answers.append(events.UpdateEncoded(plan.round, self.offer(plan.round, replica)))
                case events.KeepInFeedback(round):
                    self.answers.append(events.UpdateEncoded(round, None))
                case events.Apply(commit):
                    self.applied.append(commit.round)
                    self.answers.append(events.Applied(commit.round))
                case events.ReadLog(tip):
                    raws = [encoding.encode_record(tiny.record(commit)) for commit in self.commits[tip.round + 1 :]]
                    found = tuple(history.read(self.manifest, tip, raws, ME))
                    self.answers += [events.LogCame(found), events.LogRead()]
                case events.HoldShards(commit):
                    self.answers += [events.ShardsHeld(commit.round), events.Digested(commit.round, {"embed": "x"})]


def test_random_lives_of_a_volunteer_take_every_row_and_apply_every_commit_once() -> None:
    taken = taken_by(gap_in_the_log().position)
    for seed in range(300):
        life = Life(seed)
        life.live(400)
        assert life.applied == list(range(len(life.applied)))
        taken |= taken_by(life.member.position, life.member.overlap.position)
    assert rows(events.TABLE, member.OVERLAP_TABLE) - taken == set()


# --- the round, as a bootstrap node sees it

M = tiny.manifest(rounds=2, start_peers=2, timing=IN_TIME)
FULL, THIRD = tiny.full_memory(M), tiny.third_memory(M)
SHARDS = layout.shard_names(M.model)
CROWDS = (
    dict.fromkeys("cdefg", THIRD),
    dict.fromkeys("cdf", FULL - 1),
    {"a": FULL, "b": FULL, **dict.fromkeys("cdef", THIRD)},
    dict.fromkeys("ab", FULL),
    dict.fromkeys("cd", THIRD),
)
"""The memory of each peer: for a chain and spares, in the third with full replicas; for full replicas; for none."""


class Twins:
    """Two nodes that hear the same; one of them leads at a time, and chance says which and what happens."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.memory = self.rng.choice(CROWDS)
        few = len(self.memory) - self.rng.randrange(2)
        self.manifest: Manifest = dataclasses.replace(M, start_peers=few, rounds=self.rng.choice((1, 2)))
        self.nodes = [Leader(self.manifest, (), (), 0.0) for _ in range(2)]
        self.now = 0.0
        self.commit: Commit | None = None
        self.sent: list[ChainReconfig] = []
        self.questions: list[tuple[Leader, Question | JudgingJob | leading.Recompute]] = []
        self.lead(0)

    def lead(self, index: int) -> None:
        for i, node in enumerate(self.nodes):
            self.tell(node, leading.Lead(i == index))

    def tell(self, node: Leader, event: leading.Event) -> None:
        for effect in node.handle(event, self.now):
            match effect:
                case leading.MakePlan(question):
                    self.questions.append((node, question))
                case leading.Judge(case):
                    self.questions.append((node, case))
                case leading.Recompute() if self.rng.random() < 0.7:
                    self.questions.append((node, effect))
                case leading.Propose(commit):
                    self.commit = commit
                case leading.Send(_, ChainReconfig() as message):
                    self.sent.append(message)

    def live(self, steps: int) -> None:
        for _ in range(steps):
            if self.rng.random() < 0.03:
                self.lead(self.rng.randrange(2))
                continue
            if self.questions and self.rng.random() < (0.5 if isinstance(self.questions[0][1], Question) else 0.1):
                node, question = self.questions.pop(0)
                self.tell(node, self.answer(question))
                continue
            event = self.happens()
            for node in self.nodes:
                self.tell(node, event)

    def answer(self, question: Question | JudgingJob | leading.Recompute) -> leading.Event:
        if isinstance(question, leading.Recompute):
            return question.answer(lambda shard, round: "same" if self.rng.random() < 0.7 else None)
        if isinstance(question, Question):
            return leading.Planned(question, question.answer())
        reason = self.rng.choice((None, None, None, "it is a copy"))
        return leading.JudgingDone(question, (Verdict(1.0, reason),) * len(question.contributions))

    def happens(self) -> leading.Event:
        rng, peer = self.rng, self.rng.choice(list(self.memory))
        match rng.randrange(13):
            case 0 | 1:
                speed = rng.choice((10**6, 5 * 10**5))
                known = Candidate(peer=peer, memory_bytes=self.memory[peer], up_bps=10**12, down_bps=10**12)
                return leading.Ready(dataclasses.replace(known, speed_flops=speed))
            case 2 if rng.random() < 0.1:
                return leading.Gone(peer)
            case 3 if self.commit is not None and rng.random() < 0.4:
                return leading.Decided(self.commit)
            case 4 if (head := self.nodes[0].head) and schedule.is_over(self.manifest, head) and rng.random() < 0.1:
                return leading.Decided(dataclasses.replace(head, round=head.round + 1, parent=head.digest))
            case 5:
                self.now += rng.choice((1.0, 1.0, 30.0, 50.0, 70.0))
                return leading.Tick(frozenset({peer} if rng.random() < 0.1 else ()))
            case 6 | 7 | 8:
                digests = dict.fromkeys(SHARDS, "same")
                if rng.random() < 0.15:
                    digests |= dict.fromkeys(rng.choice((SHARDS, SHARDS[:1], SHARDS[-1:])), "other")
                return self.says(peer, Attest(round=self.nodes[0].round - 1, digests=digests))
            case 9 | 10 | 11:
                return self.offers(peer)
        return self.says(peer, self.trouble())

    def says(self, peer: str, message: Any) -> leading.Received:
        return leading.Received(peer, message)

    def trouble(self) -> Any:
        rng, round = self.rng, self.nodes[0].round
        if rng.random() < 0.1:
            return Withdraw(round=round, reason="?")
        if self.sent and rng.random() < 0.5:
            return rng.choice(self.sent)
        lost, plan = rng.choice(list(self.memory)), self.nodes[0].roster.plan
        return ChainFailure(
            round=round,
            replica=rng.choice([r.number for r in plan.replicas] if plan else [0]),
            generation=rng.randrange(2),
            peer=lost,
            reason=rng.choice(("?", SLOW, LIES)),
        )

    def offers(self, peer: str) -> leading.Event:
        """What `peer` offers, or a payload of it arrives."""
        plan = self.rng.choice(self.nodes).roster.plan
        replica = plan.replica_of(peer) if plan else None
        if plan is None or replica is None:
            return leading.Tick()
        spec = plan.replica(replica)
        stage = spec.stage_of(peer)
        shards = memory.stage_shards(self.manifest, stage.first, stage.last)
        parts = tuple(
            Part(
                shard=s, digest=tiny.digest(f"{peer}/{s}/{plan.round}"), size=8, norm=self.rng.choice((1.0, 1.0, 99.0))
            )
            for s in shards
        )
        names = [part_lists.root_of(parts), *(p.digest for p in parts)]
        missing = [name for name in names if name not in self.nodes[0].offers.held]
        if missing and self.rng.random() < 0.7:
            for name in missing[1:] if self.rng.random() < 0.6 else ():
                for node in self.nodes:
                    self.tell(node, leading.Held(name))
            return leading.Held(missing[0])
        tokens, loss = M.train.tokens(1, spec.work.micro_batches), self.rng.choice((None, 2.0))
        offer = Offer(round=plan.round, replica=replica, parts=parts, tokens=tokens, steps=1, loss=loss)
        return self.says(peer, offer)


@pytest.mark.slow
def test_random_lives_of_two_bootstrap_nodes_take_every_row() -> None:
    taken = set()
    for seed in range(110):
        twins = Twins(seed)
        twins.live(400)
        taken |= taken_by(*(node.position for node in twins.nodes))
    taken |= taken_by(led_by_another_in_its_last_round().position)
    assert rows(leading.TABLE) - taken == set()


def led_by_another_in_its_last_round() -> Leader:
    """A leader that plans another round, since nobody has offered anything to it, when the other node's last commit
    comes; random lives come there once in several hundred."""
    full = dict.fromkeys("ab", tiny.full_memory(M))
    drivers = [Driver(full, tiny.manifest(rounds=1, start_peers=2)) for _ in range(2)]
    for driver in drivers:
        driver.decide(driver.ready("a", "b"))
        driver.attest("a", "b")
    other, driver = drivers
    (commit,) = [e.commit for e in other.offered("a", "b") if isinstance(e, leading.Propose)]
    late, members = 10 * driver.manifest.timing.round_deadline, driver.manifest.first_members
    (asked,) = driver.leader.handle(leading.Tick(), late)
    assert isinstance(asked, leading.MakePlan)
    driver.leader.handle(leading.Decided(dataclasses.replace(commit, leader=members[0], members=members)), late)
    assert driver.leader.phase is leading.Phase.CLOSING
    return driver.leader


# --- the quorum


def taken_by_quorum(cluster: Cluster) -> set[tuple[str, Row[Any]]]:
    return set().union(
        *(taken_by(n.position, n.leadership.position, n.acceptor.position) for n in cluster.nodes.values())
    )


class Council(Cluster):
    """Nodes that die and come back, with lost, late or doubled messages; some do not hear each other."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.late: list[tuple[str, str, Any]] = []
        self.taken: set[tuple[str, Row[Any]]] = set()
        self.loss = self.rng.choice((0.0, 0.1, 0.4))
        self.apart: frozenset[str] = frozenset()
        super().__init__(*self.rng.choice(((1, 1), (1, 2), (4, 4), (4, 5))))
        self.cut = self.is_lost

    def is_lost(self, sender: str, to: str, message: object) -> bool:
        if not isinstance(message, paxos_events.Record) and self.rng.random() < 0.3:
            self.late.append((sender, to, message))
        return self.rng.random() < self.loss or self.apart == {sender, to}

    def live(self, steps: int) -> None:
        for _ in range(steps):
            self.happens(self.rng.choice(self.manifest.operators))
            self.taken |= taken_by_quorum(self)
        for name, log in self.logs.items():
            assert [r.commit.digest for r in log] == [r.commit.digest for r in self.longest[: len(log)]], name

    @property
    def longest(self) -> list[paxos_events.Record]:
        return max(self.logs.values(), key=len)

    def happens(self, name: str) -> None:
        rng = self.rng
        match rng.randrange(10):
            case 0 if name in self.nodes and rng.random() < 0.2:
                self.kill(name)
            case 1 if name not in self.nodes:
                self.restart(name)
            case 2 | 3 if name in self.nodes:
                self.propose(name, rng.random(), rng.choice(((), WITH_PAYLOAD if self.nodes[name].head else ())))
            case 4 if rng.random() < 0.5:
                self.apart = frozenset(rng.choices(self.manifest.operators, k=2))
            case 5 if self.late:
                sender, to, message = self.late.pop(rng.randrange(len(self.late)))
                self.do(to, paxos_events.Heard(sender, message))
            case 6:
                came = rng.choice((paxos_events.Held(PAYLOAD), paxos_events.Listed(SHARE.root, PARTS)))
                self.held[name].add(PAYLOAD if isinstance(came, paxos_events.Held) else SHARE.root)
                self.do(name, came)
            case 7 if self.longest:
                other = rng.choice(self.manifest.operators)
                self.do(name, paxos_events.Learned(other, rng.choice((self.longest[-1], rng.choice(self.longest)))))
            case 8 if name in self.nodes:
                lie = Promise(round=self.nodes[name].round, ballot=rng.randrange(9), accepted=99, commit=None)
                self.do(name, paxos_events.Heard(rng.choice(self.manifest.operators), lie))
            case _:
                self.pass_time(rng.choice((0.0, 0.0, self.lease)))


def leader_that_is_overtaken() -> Cluster:
    """B leads after A, learns what was decided without it, and leads no more before that is written."""
    cluster = Cluster(4)
    first = dataclasses.replace(cluster.commit(A, 1.0), leader=A, members=cluster.manifest.first_members)
    record = tiny.record(first, *(tiny.OPERATORS[i] for i in (0, 2, 3)))
    cluster.kill(A)
    cluster.pass_time(cluster.lease)
    assert cluster.leaders() == [B]
    node = cluster.nodes[B]
    assert paxos_events.Append(record) in node.handle(paxos_events.Learned(C, record), cluster.now)
    for other in (C, D):
        node.handle(paxos_events.Heard(other, Heartbeat(phase="following", round=0, turn=2)), cluster.now)
    assert not node.leads
    assert paxos_events.Decided(record) in node.handle(paxos_events.Appended(record), cluster.now)
    return cluster


def leader_that_gets_no_promise() -> Cluster:
    """B leads after A; C and D have promised more, and then say that it is C's turn."""
    cluster = Cluster(4)
    cluster.kill(A)
    cluster.pass_time(cluster.lease)
    cluster.cut = lambda sender, to, message: isinstance(message, Promise)
    cluster.propose(B, 2.0)
    node = cluster.nodes[B]
    for phase in (paxos_events.Phase.PREPARING, paxos_events.Phase.IDLE):
        assert node.phase is phase
        for other in (C, D):
            cluster.do(B, paxos_events.Heard(other, Reject(round=0, ballot=node.ballot, promised=50)))
    cluster.pass_time(5)
    assert node.phase is paxos_events.Phase.PREPARING
    for other in (C, D):
        cluster.do(B, paxos_events.Heard(other, Heartbeat(phase="following", round=0, turn=2)))
    assert not node.leads
    return cluster


def leader_that_gets_no_votes() -> Cluster:
    """A asks for votes, hears of higher ballots, asks again, and learns the decision; D promises no lower ballot."""
    cluster = Cluster(4)
    cluster.cut = lambda sender, to, message: isinstance(message, Vote)
    for ballot in (8, 4):
        cluster.do(D, paxos_events.Heard(A, Prepare(round=0, ballot=ballot)))
    cluster.propose(A, 1.0)
    node = cluster.nodes[A]
    assert node.phase is paxos_events.Phase.ACCEPTING, "D alone rejects it"
    cluster.do(A, paxos_events.Heard(C, Reject(round=0, ballot=0, promised=9)))
    assert node.phase is paxos_events.Phase.IDLE
    cluster.pass_time(5)
    assert node.phase is paxos_events.Phase.ACCEPTING
    first = cluster.votes[A][-1].commit
    assert first is not None
    cluster.do(A, paxos_events.Learned(B, tiny.record(first, *tiny.OPERATORS[1:4])))
    assert node.phase is paxos_events.Phase.IDLE
    return cluster


def more_liars_than_are_borne() -> Cluster:
    """Three members have certified what cannot be: B finds it at once, or when its payloads' list is there."""
    cluster = Cluster(4)
    cluster.propose(A)
    assert cluster.nodes[B].round == 1
    cluster.cut = lambda sender, to, message: not isinstance(message, Heartbeat)
    cluster.kill(A)
    cluster.pass_time(cluster.lease + 1)
    made = dataclasses.replace(cluster.commit(B, 1.0), leader=A, members=cluster.manifest.first_members)
    longer = dataclasses.replace(WITH_PAYLOAD[0], shares=(dataclasses.replace(SHARE, norm=99.0),))
    for lie in (
        dataclasses.replace(made, decrees=9),
        dataclasses.replace(made, contributions=(longer,)),
    ):
        cluster.propose(B, 2.0)
        cluster.pass_time(5)
        ballot = cluster.nodes[B].ballot
        claim = Promise(round=1, ballot=ballot, accepted=0, commit=lie, pledges=pledges(lie, 0, 0, 2, 3))
        for name in (C, D):
            cluster.do(B, paxos_events.Heard(name, claim))
        body = pledge_body(lie.run, 1, ballot, lie.digest)
        for name, key in ((A, 0), (C, 2), (D, 3)):
            pledge = Pledge(round=1, ballot=ballot, digest=lie.digest, signature=tiny.OPERATORS[key].sign(body))
            cluster.do(B, paxos_events.Heard(name, pledge))
        if lie.contributions:
            assert cluster.nodes[B].phase is paxos_events.Phase.ACCEPTING
            cluster.do(B, paxos_events.Listed(SHARE.root, PARTS))
        assert cluster.nodes[B].phase is paxos_events.Phase.IDLE
    return cluster


def leader_that_lies() -> Cluster:
    """A proposes what is not fair, and what does not follow."""
    cluster = Cluster(4)
    cluster.unfair = lambda name, commit: Objection("is not fair", True)
    cluster.propose(A, 1.0)
    wrong = dataclasses.replace(cluster.commit(C), leader=B, members=cluster.manifest.operators, time=666.0, run="?")
    cluster.do(C, paxos_events.Heard(B, Accept(round=0, ballot=1, commit=wrong)))
    return cluster


SPECIAL = (
    leader_that_stalls,
    leader_that_lies,
    shown_another,
    rejected,
    learned_while_asking,
    leader_that_is_overtaken,
    leader_that_gets_no_promise,
    leader_that_gets_no_votes,
    more_liars_than_are_borne,
)
"""What rarely happens."""


def test_random_lives_of_a_quorum_take_every_row_and_have_one_history() -> None:
    taken = set().union(*(taken_by_quorum(tell()) for tell in SPECIAL))
    for seed in range(160):
        council = Council(seed)
        council.live(100)
        taken |= council.taken
    assert rows(paxos_events.TABLE, leadership.TABLE, ACCEPTOR) - taken == set()
