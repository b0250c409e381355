"""A simulated bootstrap node: the production Leader and Quorum around a log, a vote and a payload store on disk."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from protocol.rounds import leader_events as leader
from protocol.rounds import paxos_events as paxos
from protocol.rounds import validation
from protocol.rounds.leader import Leader
from protocol.rounds.paxos import Quorum
from protocol.rounds.presence import ABSENT_HEARTBEATS
from protocol.wire.ballot import Promise
from protocol.wire.commit import Commit, Part, Record
from protocol.wire.encoding import Message
from protocol.wire.session import Attest, ChainFailure, ChainReconfig, Finished, Heartbeat, LogRequest, Offer, Withdraw
from tests.sim.ledger import Vector, Violation
from tests.sim.world import Node

if TYPE_CHECKING:
    from tests.sim.swarm import Swarm


class BootstrapNode(Node):
    """Disk: `log`, `vote`, `payloads`. Memory: the machines, the sessions, when each peer was last heard."""

    leader_class: type[Leader] = Leader

    def __init__(self, swarm: Swarm, name: str) -> None:
        super().__init__(swarm.world, name)
        self.swarm = swarm
        self.log: list[Record] = []
        self.vote: Promise | None = None
        self.payloads: dict[str, Vector] = {}
        self.reports: set[tuple[int, str, str]] = set()
        self.lost()

    def lost(self) -> None:
        for peer, session in getattr(self, "sessions", {}).items():
            node = self.swarm.peers[peer]
            node.post(self.world.rng.uniform(0.0, 2.0), node.closed, self.name, session)
        self.sessions: dict[str, int] = {}
        self.heard: dict[str, float] = {}
        self.fetching: set[str] = set()
        self.done = False

    @property
    def commits(self) -> list[Commit]:
        return [record.commit for record in self.log]

    def started(self) -> None:
        commits, held = self.commits, tuple(self.payloads)
        head = commits[-1] if commits else None
        self.leader = self.leader_class(self.swarm.manifest, commits, held, self.world.now)
        self.quorum = Quorum(
            self.swarm.manifest,
            self.name,
            head,
            self.vote,
            held,
            lambda body: b"vote of " + self.name.encode(),
            lambda peer, body, signature: signature == b"vote of " + peer.encode(),
            self.world.now,
        )
        self.tick()
        for commit in commits:
            self.complete(commit)

    def tick(self) -> None:
        weather = self.world.weather
        if self.world.chance(weather.kill):
            self.trace("KILLED")
            self.die()
            return
        timing = self.swarm.manifest.timing
        for peer, heard in list(self.heard.items()):
            if self.world.now - heard >= timing.gone_after:
                del self.heard[peer]
                self.trace(f"{peer} is gone")
                session = self.sessions.pop(peer, None)
                if session is not None:
                    self.swarm.peers[peer].post(0.1, self.swarm.peers[peer].closed, self.name, session)
                self.work(leader.Gone(peer))
        closed = [(p, heard) for p, heard in self.heard.items() if p not in self.sessions]
        patience = ABSENT_HEARTBEATS * timing.heartbeat
        absent = frozenset(p for p, heard in closed if self.world.now - heard > patience)
        self.world.stats["absent"] += len(absent)
        self.work(leader.Tick(absent))
        self.work(paxos.Tick())
        self.later(1.0, self.tick)

    # --- sessions

    def opened(self, peer: str, session: int) -> None:
        self.sessions[peer] = session
        self.heard[peer] = self.world.now
        self.announced(peer)

    def announced(self, peer: str) -> None:
        if peer in self.sessions:
            self.work(leader.Ready(self.swarm.peers[peer].candidate))

    def closed(self, peer: str, session: int) -> None:
        if self.sessions.get(peer) == session:
            del self.sessions[peer]

    def receive(self, peer: str, message: Message) -> None:
        if peer in self.heard:
            self.heard[peer] = self.world.now
        match message:
            case LogRequest(after=after):
                for record in self.log[after + 1 :]:
                    self.tell(peer, record)
                if self.done:
                    self.tell(peer, Finished(round=self.log[-1].commit.round))
            case Offer() | Attest() | Withdraw() | ChainFailure() | ChainReconfig():
                self.work(leader.Received(peer, message))
            case _:
                pass

    def tell(self, peer: str, message: Message | Record) -> None:
        if peer in self.sessions:
            node = self.swarm.peers[peer]
            self.world.send(self.name, peer, message, lambda m: node.post(0.0, node.receive, m))

    # --- the other nodes

    def tell_node(self, name: str, message: Message | Record) -> None:
        node = self.swarm.nodes[name]
        self.world.send(self.name, name, message, lambda m: node.post(0.0, node.hear, self.name, m))

    def hear(self, name: str, message: Message | Record) -> None:
        match message:
            case Record():
                self.work(paxos.Learned(name, message))
            case LogRequest(after=after):
                self.send_log(name, after)
            case _:
                self.work(paxos.Heard(name, message))  # type: ignore[arg-type]

    def send_log(self, name: str, after: int) -> None:
        for record in self.log[after + 1 :]:
            self.tell_node(name, record)

    # --- the machines

    def work(self, event: leader.Event | paxos.Event) -> None:
        """An event, and then those that its effects bring about, as bootstrap/node.py does it."""
        self.soon = deque([event])
        while self.soon:
            event = self.soon.popleft()
            if isinstance(event, paxos.Event):
                self.quorum_does(event)
            else:
                self.leader_does(event)

    def leader_does(self, event: leader.Event) -> None:
        for effect in self.leader.handle(event, self.world.now):
            match effect:
                case leader.Fetch(peer, part):
                    self.boundary("before Fetch")
                    self.fetch([peer], part)
                case leader.Propose(commit):
                    self.boundary("before Propose")
                    self.soon.append(paxos.Proposed(commit))
                case leader.Send(peers, reconfig, first):
                    self.reconfigs(peers, reconfig, first)
                case leader.Report(round, peer, shard):
                    self.trace(f"reports: {peer} diverged on {shard} after round {round}")
                    self.reports.add((round, peer, shard))
                case leader.Moved(round, replica, before, after, reason):
                    self.world.stats["moved"] += 1
                    self.trace(f"replica {replica} from round {round}: {before.blocks} become {after.blocks}: {reason}")
                case leader.Done(round):
                    self.boundary("before Done")
                    self.done = True
                    self.trace(f"the run is over after round {round}")
                    for peer in list(self.sessions):
                        self.tell(peer, Finished(round=round))
                        self.boundary("half broadcast")

    def reconfigs(self, peers: tuple[str, ...], reconfig: ChainReconfig, first: bool) -> None:
        if first:
            self.boundary("before ChainReconfig")
            kind = "ended" if not reconfig.peers else "finished" if reconfig.steps else "chain_reconfigured"
            self.world.stats[f"chains {kind}"] += 1
            self.trace(f"{reconfig}")
        for peer in peers:
            self.tell(peer, reconfig)
            self.boundary("half broadcast")

    def quorum_does(self, event: paxos.Event) -> None:
        for effect in self.quorum.handle(event, self.world.now):
            match effect:
                case paxos.Save(vote):
                    self.save(vote)
                case paxos.Send(peer, message):
                    if not isinstance(message, Heartbeat):
                        self.boundary("before Send")
                        self.trace(f"-> {peer}: {type(message).__name__} {getattr(message, 'ballot', '')}")
                    self.tell_node(peer, message)
                    if not isinstance(message, Heartbeat):
                        self.boundary("after Send")
                case paxos.SendLog(peer, after):
                    self.send_log(peer, after)
                case paxos.Fetch(holders, part):
                    self.fetch(list(holders), part)
                case paxos.Append(record):
                    self.append(record)
                case paxos.Decided(record):
                    self.decided(record)
                case paxos.Leads(leads):
                    self.trace(f"leads: {leads}")
                    self.world.stats["leads"] += leads
                    self.soon.append(leader.Lead(leads))
                case paxos.Stalled(missing):
                    self.world.stats["stalls"] += bool(missing)

    def save(self, vote: Promise) -> None:
        self.boundary("before Save")
        self.vote = vote
        self.boundary("vote durable")

    def append(self, record: Record) -> None:
        self.boundary("before Append")
        self.write(record)
        self.boundary("log durable")
        self.soon.append(paxos.Appended(record))

    def write(self, record: Record) -> None:
        commit = record.commit
        self.swarm.ledger.saw(commit, f"the log of {self.name}")
        plan = self.log[-1].commit.plan if self.log else None
        for problem in validation.problems(self.swarm.manifest, plan, commit):
            raise Violation("P2", f"{self.name} writes a commit of round {commit.round} that {problem}")
        self.log.append(record)
        if commit.leader == self.name:
            self.world.stats["commits"] += 1
            self.world.stats["contributions"] += len(commit.contributions)
            spares = plan.spares if plan else ()
            self.world.stats["spares' shares"] += sum(s.peer in spares for c in commit.contributions for s in c.shares)
            self.world.stats["left out"] += len(commit.left_out)
        self.world.stats["higher ballots"] += record.ballot > 0
        self.trace(
            f"writes round {commit.round} of {commit.leader}: {[c.replica for c in commit.contributions]}, "
            f"left out {[(x.replica, x.reason) for x in commit.left_out]}, "
            f"plan {[r.peers for r in commit.plan.replicas] if commit.plan else None}"
        )

    def decided(self, record: Record) -> None:
        self.boundary("before broadcast")
        self.soon.append(leader.Decided(record.commit))
        for peer in list(self.sessions):
            self.tell(peer, record)
            self.boundary("half broadcast")
        self.complete(record.commit)

    # --- payloads

    def complete(self, commit: Commit) -> None:
        """Fetches what the commit names and is not here, until it is."""
        shares = [s for c in commit.contributions for s in c.shares]
        missing = [(s.peer, p) for s in shares for p in s.parts if p.digest not in self.payloads]
        for peer, part in missing:
            self.fetch([peer, *self.swarm.nodes], part)
        if missing:
            self.later(5.0, self.complete, commit)

    def fetch(self, holders: list[str], part: Part) -> None:
        if part.digest in self.fetching:
            return
        self.fetching.add(part.digest)
        self.later(self.world.rng.uniform(0.05, 2.0), self.fetched, holders, part)

    def fetched(self, holders: list[str], part: Part) -> None:
        self.fetching.discard(part.digest)
        for holder in dict.fromkeys([*holders, *self.swarm.nodes]):
            payload = self.swarm.serve(part.digest, holder, self.name) if holder != self.name else None
            if payload is not None:
                self.payloads[part.digest] = payload
                self.boundary("payload held")
                self.work(leader.Held(part.digest))
                self.work(paxos.Held(part.digest))
                return
