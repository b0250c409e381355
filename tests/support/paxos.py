"""Parts that unit tests of paxos share with others."""

from __future__ import annotations

from collections.abc import Callable

from protocol import identity
from protocol.ledger.history import why_not_next
from protocol.ledger.part_lists import share_of
from protocol.quorum.paxos import Quorum
from protocol.quorum.paxos_events import (
    Append,
    Appended,
    Effect,
    Event,
    FetchList,
    Heard,
    Judge,
    Judged,
    Learned,
    Listed,
    Objection,
    Proposed,
    Save,
    Send,
    SendLog,
    Tick,
)
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.ballot import Promise
from protocol.wire.commit import Commit, Contribution, Part, Record
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from protocol.wire.session import LogRequest
from tests.support import tiny

NAMES = tuple(o.peer_id for o in tiny.OPERATORS)
A, B, C, D, E = NAMES[:5]
PAYLOAD = tiny.digest("payload")
PARTS = tuple(Part(shard=s, digest=PAYLOAD, size=8, norm=1.0) for s in layout.shard_names(tiny.manifest().model))
SHARE = share_of("p", PARTS)
WITH_PAYLOAD = (Contribution(replica=0, tokens=64, steps=1, loss=1.0, shares=(SHARE,)),)
REPLICA = ReplicaSpec(stages=(StageSpec(peer="p", first=0, last=tiny.LAYERS),))
"""Planned for every round, so that WITH_PAYLOAD may be proposed."""


def manifest(quorum: int, operators: int = 0) -> Manifest:
    return tiny.manifest(operators=NAMES[: operators or quorum], quorum=quorum)


class Cluster:
    """Nodes whose messages arrive at once, but for those that `cut` catches; a node's disk survives `restart`."""

    def __init__(self, quorum: int, operators: int = 0) -> None:
        self.manifest = manifest(quorum, operators)
        self.lease = self.manifest.timing.gone_after
        self.now = 0.0
        self.cut: Callable[[str, str, object], bool] = lambda sender, to, message: False
        self.unfair: Callable[[str, Commit], Objection | None] = lambda name, commit: None
        self.logs: dict[str, list[Record]] = {n: [] for n in self.manifest.operators}
        self.votes: dict[str, list[Promise]] = {n: [] for n in self.manifest.operators}
        self.held: dict[str, set[str]] = {n: set() for n in self.manifest.operators}
        self.other: dict[str, list[Effect]] = {n: [] for n in self.manifest.operators}
        self.nodes: dict[str, Quorum] = {}
        for name in self.manifest.operators:
            self.restart(name)
        self.pass_time(0.0)

    def restart(self, name: str) -> None:
        log, votes = self.logs[name], self.votes[name]
        self.nodes[name] = Quorum(
            self.manifest,
            name,
            [record.commit for record in log],
            votes[-1] if votes else None,
            self.held[name],
            tiny.OPERATORS[NAMES.index(name)].sign,
            identity.verify,
            self.now,
        )

    def kill(self, *names: str) -> None:
        for name in names:
            del self.nodes[name]

    def do(self, name: str, event: Event) -> None:
        if name not in self.nodes:
            return
        for effect in self.nodes[name].handle(event, self.now):
            match effect:
                case Save(vote):
                    self.votes[name].append(vote)
                case Send(to, message) if not self.cut(name, to, message):
                    if isinstance(message, LogRequest):
                        self.send_log(to, name, message.after)
                    else:
                        self.do(to, Heard(name, message))
                case SendLog(to, after):
                    self.send_log(name, to, after)
                case Append(record):
                    assert (
                        why_not_next(self.manifest, self.logs[name][-1].commit if self.logs[name] else None, record)
                        is None
                    )
                    self.logs[name].append(record)
                    self.do(name, Appended(record))
                case Judge(_, commit):
                    self.do(name, Judged(commit.digest, self.unfair(name, commit)))
                case FetchList(_, share) if share.root in self.held[name]:
                    self.do(name, Listed(share.root, PARTS))
                case Send():
                    pass
                case _:
                    self.other[name].append(effect)

    def send_log(self, sender: str, to: str, after: int) -> None:
        for record in self.logs[sender][after + 1 :]:
            if sender in self.nodes and not self.cut(sender, to, record):
                self.do(to, Learned(sender, record))

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds) + 1):
            for name in list(self.nodes):
                self.do(name, Tick())
            self.now += 1.0

    def leaders(self) -> list[str]:
        return [n for n, q in self.nodes.items() if q.leads]

    def commit(self, name: str, time: float = 0.0, contributions: tuple[Contribution, ...] = ()) -> Commit:
        node = self.nodes[name]
        plan, decrees = Plan(round=node.round + 1, replicas=(REPLICA,)), node.head.decrees if node.head else 0
        said = {"time": time, "contributions": contributions, "plan": plan, "decrees": decrees}
        return tiny.commit(self.manifest, node.head, **{"leader": "", "members": (), **said})

    def propose(self, name: str, time: float = 0.0, contributions: tuple[Contribution, ...] = ()) -> None:
        self.do(name, Proposed(self.commit(name, time, contributions)))


def is_kind(*kinds: type) -> Callable[[str, str, object], bool]:
    return lambda sender, to, message: isinstance(message, kinds)


def leader_that_stalls() -> Cluster:
    """A leads and proposes nothing, while the others would."""
    cluster = Cluster(4)
    for _ in range(int(cluster.lease) + 1):
        cluster.now += 1.0
        for name in cluster.nodes:
            cluster.do(name, Tick(due=name != A))
    return cluster
