"""The quorum alone, in far worse weather than a run could live in: bootstrap nodes that decide empty commits.

A life is short and dense, so that the rare orders of events that fork a careless quorum are met in every test run. Checked:
P2 (nobody writes another commit than somebody before), and that rounds are decided again once the weather is calm (P4).
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque

from protocol.rounds import paxos_events as paxos
from protocol.rounds.paxos import Quorum
from protocol.run.manifest import TimingSpec
from protocol.wire.ballot import Promise
from protocol.wire.commit import Commit, Record
from protocol.wire.encoding import Message
from protocol.wire.session import LogRequest
from tests import tiny
from tests.sim.ledger import Violation
from tests.sim.world import Node, Weather, World

CALM_ROUNDS = 3


def storm(rng: random.Random) -> Weather:
    return Weather(
        drop=rng.choice((0.0, 0.1, 0.2)),
        duplicate=rng.choice((0.0, 0.2)),
        delay=rng.choice((0.05, 0.5, 2.0)),
        boundary=rng.choice((0.01, 0.03, 0.1)),
        focus=(),
        focus_boundary=0.0,
        away=rng.choice((1.0, 4.0, 8.0)),
        kill=0.0,
        disconnect=0.0,
        partition=rng.choice((0.0, 0.1, 0.2)),
        heal=rng.choice((0.1, 0.2, 0.3)),
        cut=rng.choice((0.0, 0.3, 0.8)),
        fetch_failure=0.0,
        corrupt=0.0,
        calm_at=100.0,
    )


class Voter(Node):
    """Disk: `log`, `vote`."""

    quorum_class: type[Quorum] = Quorum

    def __init__(self, council: Council, name: str) -> None:
        super().__init__(council.world, name)
        self.council = council
        self.log: list[Record] = []
        self.vote: Promise | None = None

    def lost(self) -> None:
        pass

    def started(self) -> None:
        head = self.log[-1].commit if self.log else None
        self.quorum = self.quorum_class(
            self.council.manifest,
            self.name,
            head,
            self.vote,
            (),
            lambda body: b"vote of " + self.name.encode(),
            lambda peer, body, signature: signature == b"vote of " + peer.encode(),
            self.world.now,
        )
        self.tick()

    def tick(self) -> None:
        self.feed(paxos.Tick())
        if self.quorum.leads and self.world.rng.random() < 0.5:
            self.propose()
        self.later(1.0, self.tick)

    def propose(self) -> None:
        head = self.quorum.head
        commit = Commit(
            run=self.council.manifest.run_id,
            round=self.quorum.round,
            parent=head.digest if head else self.council.manifest.run_id,
            time=self.world.rng.random(),
            contributions=(),
            left_out=(),
            diverged=(),
            digests={},
            plan=None,
        )
        self.feed(paxos.Proposed(commit))

    def hear(self, name: str, message: Message | Record) -> None:
        match message:
            case Record():
                self.feed(paxos.Learned(name, message))
            case LogRequest(after=after):
                self.send_log(name, after)
            case _:
                self.feed(paxos.Heard(name, message))  # type: ignore[arg-type]

    def send_log(self, name: str, after: int) -> None:
        for record in self.log[after + 1 :]:
            self.send(name, record)

    def send(self, name: str, message: Message | Record) -> None:
        node = self.council.voters[name]
        self.world.send(self.name, name, message, lambda m: node.post(0.0, node.hear, self.name, m))

    def feed(self, event: paxos.Event) -> None:
        soon = deque([event])
        while soon:
            self.do(soon.popleft(), soon)

    def do(self, event: paxos.Event, soon: deque[paxos.Event]) -> None:
        for effect in self.quorum.handle(event, self.world.now):
            match effect:
                case paxos.Save(vote):
                    self.boundary("before Save")
                    self.save(vote)
                    self.boundary("vote durable")
                case paxos.Send(peer, message):
                    self.trace(f"-> {peer[-4:]}: {message if not isinstance(message, Commit) else ''}"[:120])
                    self.send(peer, message)
                    self.boundary("after Send")
                case paxos.SendLog(peer, after):
                    self.send_log(peer, after)
                case paxos.Append(record):
                    self.boundary("before Append")
                    self.append(record)
                    self.boundary("log durable")
                    soon.append(paxos.Appended(record))
                case paxos.Leads(leads):
                    self.trace(f"leads: {leads}")
                case _:
                    pass

    def save(self, vote: Promise) -> None:
        self.vote = vote

    def append(self, record: Record) -> None:
        self.council.saw(self.name, record)
        self.log.append(record)


class Council:
    """One life of a quorum, decided by its seed; `run` raises Violation."""

    def __init__(self, seed: int, voter_class: type[Voter] = Voter, verbose: bool = False) -> None:
        rng = random.Random(seed)
        size, nodes = rng.choice(((1, 1), (3, 3), (3, 4), (5, 5), (5, 7)))
        names = tuple(o.peer_id for o in tiny.OPERATORS[:nodes])
        self.manifest = tiny.manifest(
            operators=names, quorum=size, timing=TimingSpec(round_deadline=60.0, heartbeat=1.0, gone_after=4.0)
        )
        self.world = World(rng, storm(rng), wire=False, verbose=verbose)
        self.history: dict[int, Commit] = {}
        self.voters = {name: voter_class(self, name) for name in names}
        for voter in self.voters.values():
            self.world.at(rng.uniform(0.0, 5.0), voter.start)
        self.world.weathers(list(names), list(names))

    def saw(self, who: str, record: Record) -> None:
        commit = record.commit
        known = self.history.setdefault(commit.round, commit)
        self.world.trace(who, f"writes round {commit.round}: {commit.time:.3f}, ballot {record.ballot}")
        if known != commit:
            raise Violation("P2", f"{who[-8:]} writes another commit for round {commit.round} than somebody before")

    def run(self) -> None:
        world, lease = self.world, self.manifest.timing.gone_after
        world.run(world.weather.calm_at, lambda: False)
        rounds = len(self.history) + CALM_ROUNDS
        patience = 2 * world.weather.away + CALM_ROUNDS * 4 * lease
        if not world.run(world.now + patience, lambda: all(len(v.log) >= rounds for v in self.voters.values())):
            raise Violation("P4", f"not decided: {[len(v.log) for v in self.voters.values()]} of {rounds}")


class Forgetful(Voter):
    """Does not write its votes to disk."""

    def save(self, vote: Promise) -> None:
        pass


class Hasty(Voter):
    """Answers before its vote is durable."""

    def save(self, vote: Promise) -> None:
        self.later(self.world.rng.uniform(0.0, 2.0), super().save, vote)


class AcceptsStaleLeaders(Quorum):
    """Takes an Accept of a leader whose ballot is below what it promised."""

    def _on_accept(self, peer, accept, out, fetch=True):  # type: ignore[no-untyped-def]
        vote = self.acceptor.vote
        self.acceptor.vote = dataclasses.replace(vote, ballot=min(vote.ballot, accept.ballot))
        super()._on_accept(peer, accept, out, fetch)


class OwnCommitFirst(Quorum):
    """Proposes its own commit, whatever the promises say was accepted before."""

    def _on_promise(self, peer, promise, out):  # type: ignore[no-untyped-def]
        super()._on_promise(peer, dataclasses.replace(promise, accepted=-1, commit=None), out)


class StaleLeader(Voter):
    quorum_class = AcceptsStaleLeaders


class Selfish(Voter):
    quorum_class = OwnCommitFirst


BUGS: dict[str, type[Voter]] = {
    "a vote is not persisted": Forgetful,
    "a vote is told before it is durable": Hasty,
    "a stale leader is accepted": StaleLeader,
    "a leader ignores what was accepted before": Selfish,
}
"""Each forks the history."""
