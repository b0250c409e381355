"""A bootstrap node of a dishonest operator: it does what the others do, but for what it says to them about commits, and
to volunteers about the round."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from bootstrap.node import BootstrapNode
from protocol.quorum import paxos_events
from protocol.quorum.paxos_events import Effect, Event, Send
from protocol.wire import encoding
from protocol.wire.ballot import Accept, Pledge, Prepare, Promise, Reject, Vote
from protocol.wire.bounds import MAX_BALLOT
from protocol.wire.commit import Commit, LeftOut, Record, Share, body_of, pledge_body
from protocol.wire.encoding import Message
from protocol.wire.plan import Plan, StageSpec
from protocol.wire.session import Aggregated, ChainReconfig, Finished, Heartbeat, Offered, TakeSeat, TimeUp


def weight(commit: Commit) -> Commit:
    """One contribution counts a thousand times."""
    one = dataclasses.replace(commit.contributions[0], tokens=1000 * commit.contributions[0].tokens)
    return dataclasses.replace(commit, contributions=(one, *commit.contributions[1:]))


def swapped(commit: Commit) -> Commit:
    """The first contribution has the shares of the last."""
    one = dataclasses.replace(commit.contributions[0], shares=commit.contributions[-1].shares[::-1])
    return dataclasses.replace(commit, contributions=(one, *commit.contributions[1:]))


def no_blocks(commit: Commit) -> Commit:
    """The plan's first replica has a block that the model does not have."""
    first = commit.plan.replicas[0]
    last = first.stages[-1]
    stages = (*first.stages[:-1], StageSpec(peer=last.peer, first=last.first, last=last.last + 1))
    replicas = (dataclasses.replace(first, stages=stages), *commit.plan.replicas[1:])
    return dataclasses.replace(commit, plan=dataclasses.replace(commit.plan, replicas=replicas))


def left_out(commit: Commit) -> Commit:
    """The first contribution is left out."""
    out = LeftOut(replica=commit.contributions[0].replica, reason="no offer")
    return dataclasses.replace(commit, contributions=commit.contributions[1:], left_out=(*commit.left_out, out))


def text(commit: Commit) -> Commit:
    """The run's text is used up."""
    assert commit.plan is not None
    return dataclasses.replace(commit, plan=dataclasses.replace(commit.plan, next_slot=2**61))


def aggregates(commit: Commit) -> Commit:
    """The first shard's aggregate is the last one's."""
    first, *rest = commit.aggregates
    return dataclasses.replace(commit, aggregates=(dataclasses.replace(rest[-1], shard=first.shard), *rest))


LIES: tuple[Callable[[Commit], Commit], ...] = (weight, swapped, no_blocks, left_out, text, aggregates)
"""What a leader may write; those that need what a commit does not have cannot be told."""


def lies_about(commit: Commit) -> list[Commit]:
    """`commit` with each of the lies that it has room for."""
    found = []
    for lie in LIES:
        if (
            (lie in (weight, swapped, left_out) and not commit.contributions)
            or (lie in (no_blocks, text) and (commit.plan is None or not commit.plan.replicas))
            or (lie is aggregates and not commit.aggregates)
        ):
            continue
        found.append(lie(commit))
    return [other for other in found if other != commit]


class LyingNode(BootstrapNode):
    """`told` counts its lies, by kind."""

    def __init__(self, *arguments: Any, rng: random.Random) -> None:
        super().__init__(*arguments)
        self.told: Counter[str] = Counter()
        self._rng = rng
        self._honest = self.quorum.handle
        self._sign_as_us = arguments[0].sign
        self.quorum.handle = self._handle  # type: ignore[method-assign]

    def _handle(self, event: Event, now: float) -> list[Effect]:
        effects = self._honest(event, now)
        if isinstance(event, paxos_events.Tick):
            self._misleads()
        if isinstance(event, paxos_events.Heard) and isinstance(event.message, Accept):
            effects += self._agree(event.peer, event.message)
        return [other for effect in effects for other in self._instead(effect)]

    def _misleads(self) -> None:
        """It gives every volunteer an order, whether it leads or not, and says false things of the log."""
        head, plan = self.quorum.head, self.leader.plan
        if head is None or self._rng.random() < 0.5:
            return
        said = self._rng.choice([*self._orders(head, plan), *self._false_records(head)])
        self.told["misleads"] += 1
        self._sessions.post_all(encoding.encode_record(said) if isinstance(said, Record) else encoding.encode(said))

    def _orders(self, head: Commit, plan: Plan | None) -> list[Message]:
        rng, round, members = self._rng, self.quorum.round, self.quorum.members
        share = Share(peer=self.quorum.peer, root="0" * 64, size=100, norm=1.0, listed=100)
        orders: list[Message] = [
            TimeUp(round=round),
            Finished(round=round),
            Offered(round=round, shares=(share,)),
            *([] if not head.aggregates else [Aggregated(round=head.round, aggregates=head.aggregates)]),
            *(Heartbeat(phase="leading", round=round, turn=turn) for turn in range(1, len(members))),
        ]
        for number in (s.number for s in plan.seats) if plan is not None else ():
            orders.append(TakeSeat(round=round, replica=number, seconds=rng.choice((0.0, 9.0))))
        for replica in plan.replicas if plan is not None else ():
            for peers in ((), replica.peers, replica.peers[::-1]):
                reconfig = ChainReconfig(
                    round=round,
                    replica=replica.number,
                    generation=rng.choice((1, 2, 31)),
                    peers=peers,
                    steps=rng.choice((0, 1, 10**6)),
                    reason="a lie",
                )
                orders += [] if self.quorum.leads and peers == replica.peers else [reconfig]
        return orders

    def _false_records(self, head: Commit) -> list[Record]:
        """Of the next round and a far one, with its own vote alone."""
        found = []
        for later in (1, 10**6):
            commit = dataclasses.replace(head, round=head.round + later, leader=self.quorum.peer)
            votes = {self.quorum.peer: self._sign_as_us(body_of(commit, 0))}
            found.append(Record(commit=commit, ballot=0, votes=votes))
        return found

    def _agree(self, peer: str, accept: Accept) -> list[Effect]:
        """It pledges and accepts whatever it is asked for, as often as it is asked."""
        commit, digest = accept.commit, accept.commit.digest
        said = (commit.run, commit.round, accept.ballot, digest)
        named = {"round": commit.round, "ballot": accept.ballot, "digest": digest}
        self.told["votes twice"] += 1
        return [
            Send(peer, Pledge(**named, signature=self._sign_as_us(pledge_body(*said)))),  # type: ignore[arg-type]
            Send(peer, Vote(**named, signature=self._sign_as_us(body_of(commit, accept.ballot)))),  # type: ignore[arg-type]
        ]

    def _instead(self, effect: Effect) -> list[Effect]:
        rng = self._rng
        if not isinstance(effect, Send) or rng.random() < 0.2:
            return [effect]
        message = effect.message
        match message:
            case Accept(commit=commit) if lies_about(commit) and rng.random() < 0.7:
                self.told["proposes a lie"] += 1
                other = rng.choice(lies_about(commit))
                if commit.leader != self.quorum.peer:
                    other = dataclasses.replace(other, leader=commit.leader)
                return [Send(effect.peer, dataclasses.replace(message, commit=other))]
            case Accept() if rng.random() < 0.3:
                self.told["keeps silent"] += 1
                return []
            case Promise(round=round, ballot=ballot):
                self.told["a false promise"] += 1
                mine = self.quorum.mine or message.commit
                pledges = dict.fromkeys(self.quorum.members, b"?" * 64)
                false = Promise(round=round, ballot=ballot, accepted=max(ballot - 1, 0), commit=mine, pledges=pledges)
                return [Send(effect.peer, false)]
            case Heartbeat(round=round):
                self.told["disturbs"] += 1
                size, rank = len(self.quorum.members), 0
                if self.quorum.peer in self.quorum.members:
                    rank = self.quorum.members.index(self.quorum.peer)
                high = rng.choice((MAX_BALLOT // size - 1, 10**6, rng.randrange(1, 50))) * size + rank
                return [
                    Send(effect.peer, dataclasses.replace(message, turn=rng.choice((0, 1, 2**40)))),
                    Send(effect.peer, Prepare(round=round, ballot=high)),
                    Send(effect.peer, Reject(round=round, ballot=rng.randrange(9), promised=high)),
                ]
        return [effect]
