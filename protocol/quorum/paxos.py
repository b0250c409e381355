"""Consensus on a commit: single-decree Paxos for each round, among the members that the commit before names.

1, 4 or 7 bootstrap nodes vote. A commit is decided once n - f of them have accepted it in one ballot, f = (n - 1) // 3;
the signatures of those votes are its proof (`commit.Record`). The acceptor votes (protocol/quorum/acceptor.py),
leadership names the proposer (protocol/quorum/leadership.py), and the proposer is here.

Ballot 0 of a round belongs to the leader of the round before and needs no promises: a round without failures costs two
exchanges. Ballot b > 0 belongs to member b mod n. A proposer is its own first acceptor, so a used ballot is on disk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from protocol.ledger import board
from protocol.ledger.history import why_not_next
from protocol.quorum import paxos_events as ev
from protocol.quorum.acceptor import Acceptor
from protocol.quorum.leadership import Leadership
from protocol.quorum.paxos_events import Effect, Event, Phase
from protocol.quorum.table import Position
from protocol.run.manifest import Manifest
from protocol.wire.ballot import Accept, Pledge, Prepare, Promise, Reject, Vote
from protocol.wire.bounds import MAX_BALLOT
from protocol.wire.commit import Commit, Record, body_of, liars_borne, pledge_body, votes_needed
from protocol.wire.encoding import MessageHead, RecordHead
from protocol.wire.session import Heartbeat, LogRequest

RETRY_SECONDS = 1.0
"""Unanswered requests are sent again after this time; a rejected proposer waits this time times one plus its rank."""
BALLOTS_PER_SECOND, AHEAD_SECONDS = 16, 60.0
"""Ballots that each member may use in a second of a round, and how much longer it may have lasted elsewhere."""


class Quorum:
    """One node of the quorum; `handle` is the only entry, `now` is in seconds on a steady clock.

    vote: the durable vote; held: durable payloads; mine: this node's proposal; ballot: its ballot or -1
    """

    def __init__(
        self,
        manifest: Manifest,
        peer: str,
        commits: Sequence[Commit],
        vote: Promise | None,
        held: Iterable[str],
        sign: Callable[[bytes], bytes],
        verify: Callable[[str, bytes, bytes], bool],
        now: float,
    ) -> None:
        self.manifest = manifest
        self.peer = peer
        self._verify = verify
        self.head = commits[-1] if commits else None
        self.position = Position(ev.TABLE, Phase.IDLE)
        self.leadership = Leadership(manifest, peer, now, self.operators)
        self.former = self._former(commits[-2] if len(commits) > 1 else None)
        self.leadership.begin(self.round)
        known = Promise(round=self.round) if vote is None or vote.round < self.round else vote
        self.acceptor = Acceptor(manifest, known, held, sign, verify)
        self._now = now
        self._beat_at = float("-inf")
        self._told_turn = 0
        self._highest = -1
        self.mine: Commit | None = None
        self._value: Commit | None = None
        self.ballot = -1
        self._promises: dict[str, Promise] = {}
        self._pledges: dict[str, bytes] = {}
        self._votes: dict[str, bytes] = {}
        self._proof: tuple[int, Mapping[str, bytes]] = (-1, {})
        self._rejects: dict[str, int] = {}
        self._began = now
        self._retry_at = float("-inf")
        self._due: tuple[str, float] | None = None

    @property
    def phase(self) -> Phase:
        return self.position.phase

    @property
    def leads(self) -> bool:
        return self.leadership.leads

    @property
    def leader(self) -> str:
        return self.leadership.leader(self.members, self._before)

    @property
    def round(self) -> int:
        return 0 if self.head is None else self.head.round + 1

    @property
    def members(self) -> tuple[str, ...]:
        return board.members_after(self.manifest, self.head)

    @property
    def operators(self) -> tuple[str, ...]:
        return board.operators(self.manifest, self.head)

    @property
    def reached(self) -> tuple[str, ...]:
        """Nodes that are told what happens: operators, and those that the last commit dismissed."""
        return (*self.operators, *self.former)

    def _former(self, before: Commit | None) -> tuple[str, ...]:
        """The operators after `before` that are none any more after the log's last commit."""
        return tuple(name for name in board.operators(self.manifest, before) if name not in self.operators)

    @property
    def living(self) -> frozenset[str]:
        return self.leadership.living(self.members)

    @property
    def _before(self) -> str:
        """The leader of the round before, to whom ballot 0 belongs."""
        return self.members[0] if self.head is None else self.head.leader

    def handle(self, event: Event, now: float) -> list[Effect]:
        """One step of the machine."""
        self._now = now
        self.leadership.heard(event.peer if isinstance(event, ev.Heard | ev.Learned) else None, now)
        out: list[Effect] = []
        match event:
            case ev.Proposed(commit):
                if self.leads and self.mine is None and commit.round == self.round:
                    self.mine = self.of_ours(commit)
                    self.acceptor.verdicts[self.mine.digest] = None
            case ev.Heard(peer, message):
                self._hear(peer, message, out)
            case ev.Learned(peer, record):
                self._learn(peer, record, out)
            case ev.Held(digest):
                if self.acceptor.hold(digest):
                    self._look_again(ev.Held, out)
            case ev.Listed(root, parts):
                if self.acceptor.know(root, parts):
                    self._look_again(ev.Listed, out)
            case ev.Judged(digest, unfair):
                self._route(self.acceptor.judge(digest, unfair), out)
                if unfair is None:
                    self._look_again(ev.Judged, out)
            case ev.Appended(record):
                self._begin(record, out)
            case ev.Tick(due):
                self._wait_for_leader(due, out)
        self._watch(out)
        self._advance(out)
        return out

    def of_ours(self, commit: Commit) -> Commit:
        """`commit` with this node as leader and the next members; the same object if it has them already."""
        then, living = board.of(self.manifest, commit), self.leadership.present
        members = board.completed(then, self.leadership.next_members(self.members), living)
        same = (commit.leader, commit.members) == (self.peer, members)
        return commit if same else dataclasses.replace(commit, leader=self.peer, members=members)

    # --- the other nodes

    def _watch(self, out: list[Effect]) -> None:
        """Updates the leader, and sends a sign of life."""
        changed = self.leadership.elect(self.members, self._before)
        out += changed
        if changed and not self.leads:
            if self.phase is not Phase.IDLE:
                self.position.step(ev.Leads, Phase.IDLE)
            self._rest()
        out += self.leadership.stalled(self.members)
        turn = self.leadership.turn
        if self._now - self._beat_at >= self.manifest.timing.heartbeat or turn != self._told_turn:
            self._beat_at, self._told_turn = self._now, turn
            beat = Heartbeat(phase="leading" if self.leads else "following", round=self.round, turn=turn)
            out += self._to(None, self._others(self.reached), beat)

    def _wait_for_leader(self, due: bool, out: list[Effect]) -> None:
        """A leader that has not got a round decided a lease after this node would have proposed it is skipped."""
        leader = self.leader
        if not due or leader == self.peer or self.leadership.has_stalled:
            self._due = None
        elif self._due is None or self._due[0] != leader:
            self._due = (leader, self._now)
        elif self._now - self._due[1] >= self.manifest.timing.gone_after:
            self._due = None
            self._skip(leader)
            out += self.position.stay(ev.Tick, [ev.Skipped(leader, self.round)])

    def _skip(self, peer: str) -> None:
        if peer == self.leader:
            self.leadership.next_turn(self.members)

    def _hear(self, peer: str, message: object, out: list[Effect]) -> None:
        match message:
            case Heartbeat(round=round, turn=turn):
                self.leadership.turned(peer, round, turn)
                self._help(peer, round, out)
            case Prepare() if self._is_current(peer, message, out):
                self._route(self.acceptor.prepare(peer, message), out)
            case MessageHead() if message.kind is Accept:
                self._help(peer, message.round, out)
            case Accept() if self._is_current(peer, message, out):
                self._on_accept(peer, message, out)
            case Promise() if message.round == self.round and peer in self.members:
                self._on_promise(peer, message, out)
            case Pledge() if message.round == self.round and peer in self.members:
                self._on_pledge(peer, message, out)
            case Vote() if message.round == self.round and peer in self.members:
                self._on_vote(peer, message, out)
            case Reject() if message.round == self.round and message.ballot == self.ballot and peer in self.members:
                self._on_reject(peer, message)
            case _:
                pass

    def _help(self, peer: str, round: int, out: list[Effect]) -> None:
        """Sends `peer`, which is at `round`, the records that it lacks."""
        if round > self.round:
            out += self.position.stay(ev.Heard, [ev.Send(peer, LogRequest(after=self.round - 1))])
        elif round < self.round:
            out += self.position.stay(ev.Heard, [ev.SendLog(peer, round - 1)])

    def _is_current(self, peer: str, message: Prepare | Accept, out: list[Effect]) -> bool:
        """Whether this round is to be decided here, by a message of the leader of this turn, in a ballot of its own."""
        self._help(peer, message.round, out)
        return self._may_ask(peer, message.round, message.ballot)

    def _may_ask(self, peer: str, round: int, ballot: int) -> bool:
        here = self.peer in self.members and self.acceptor.vote.round == self.round == round
        heard = peer in (self.peer, self.leader)
        in_reach = 0 <= ballot <= self._highest_yet()
        return here and heard and in_reach and self._owner(ballot) == peer

    def hears(self, peer: str, head: MessageHead) -> bool:
        """Returns whether a message with a commit can change anything now, by its head: only then is it decoded."""
        if head.kind is Promise:
            asked = self.phase in (Phase.PREPARING, Phase.PLEDGING) and head.ballot == self.ballot
            return asked and head.round == self.round and peer in self.members
        before = self.manifest.run_id if self.head is None else self.head.digest
        follows = head.commit is not None and head.commit.parent == before
        return follows and self._may_ask(peer, head.round, head.ballot)

    def _highest_yet(self) -> int:
        """The highest ballot that honest members can have reached; a bound against using ballots up."""
        grown = int(BALLOTS_PER_SECOND * len(self.members) * (self._now - self._began + AHEAD_SECONDS))
        return min(MAX_BALLOT, max(self.acceptor.vote.ballot, 0) + grown)

    def _owner(self, ballot: int) -> str:
        return self._before if ballot == 0 else self.members[ballot % len(self.members)]

    def _on_accept(self, peer: str, accept: Accept, out: list[Effect], event: type = Accept) -> None:
        self._route(self.acceptor.accept(peer, accept, self.head, self.members, event), out)

    def _look_again(self, event: type, out: list[Effect]) -> None:
        if self.acceptor.waiting is not None:
            peer, accept = self.acceptor.waiting
            self._on_accept(peer, accept, out, event)

    def _route(self, effects: Sequence[Effect], out: list[Effect]) -> None:
        """Carries out the acceptor's effects. Answers to this node are heard at once; a lone member stores no vote."""
        for effect in effects:
            if isinstance(effect, ev.Refused) and effect.peer == self.peer:
                if self.phase in (Phase.PLEDGING, Phase.ACCEPTING):
                    self.position.step(ev.Judged, Phase.IDLE)
                continue
            if isinstance(effect, ev.Refused):
                self._skip(effect.peer)
            if isinstance(effect, ev.Send) and effect.peer == self.peer:
                self._hear(self.peer, effect.message, out)
            elif not isinstance(effect, ev.Save) or len(self.members) > 1:
                out.append(effect)

    def _others(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name != self.peer]

    def _to(self, event: type | None, names: Sequence[str], message: Prepare | Accept | Heartbeat) -> list[ev.Send]:
        return self.position.stay(event, [ev.Send(name, message) for name in names]) if names else []

    # --- the proposer

    def _rest(self) -> None:
        self.mine, self._value, self.ballot = None, None, -1
        self._forget_answers()
        self._retry_at = float("-inf")

    def _forget_answers(self) -> None:
        self._promises, self._pledges, self._votes, self._rejects = {}, {}, {}, {}
        self._proof = (-1, {})

    def _is_enough(self, peers: Iterable[str]) -> bool:
        return len(set(peers) & set(self.members)) >= votes_needed(len(self.members))

    def _advance(self, out: list[Effect]) -> None:
        vote = self.acceptor.vote
        if not self.leads or vote.round != self.round or self._now < self._retry_at:
            return
        if self.phase is Phase.IDLE and (self.mine is not None or vote.commit is not None):
            self._forget_answers()
            if vote.ballot < 0 and self._before == self.peer and self.mine is not None:
                self.ballot, self._value = 0, self.mine
                self.position.step(None, Phase.PLEDGING)
            else:
                size, rank = len(self.members), self.members.index(self.peer)
                above = max(vote.ballot, min(self._highest, self._highest_yet() - size), 0)
                if above + size > self._highest_yet():  # nobody would hear a higher one
                    return
                self.ballot = next(b for b in range(above + 1, above + 1 + size) if b % size == rank)
                self.position.step(None, Phase.PREPARING)
            self._ask(out)
        elif self.phase in (Phase.PREPARING, Phase.PLEDGING, Phase.ACCEPTING):
            self._ask(out)

    def _ask(self, out: list[Effect]) -> None:
        """Asks every member that has not answered yet, ourselves first: what we send is on our disk before."""
        self._retry_at = self._now + RETRY_SECONDS
        phase, round = self.phase, self.round
        request: Prepare | Accept
        if phase is Phase.PREPARING:
            request, answered = Prepare(round=round, ballot=self.ballot), set(self._promises)
        else:
            assert self._value is not None
            answered = set(self._pledges if phase is Phase.PLEDGING else self._votes)
            certified, pledges = self._proof
            request = Accept(
                round=round,
                ballot=self.ballot,
                commit=self._value,
                certified=certified,
                pledges=dict(pledges),
            )
        if self.peer not in answered:
            self._hear(self.peer, request, out)
        if self.phase is phase and self.acceptor.vote.ballot >= self.ballot:
            out += self._to(None, [m for m in self._others(self.members) if m not in answered], request)

    def _on_promise(self, peer: str, promise: Promise, out: list[Effect]) -> None:
        if self.phase is Phase.PLEDGING and promise.ballot == self.ballot and promise.accepted > self._proof[0]:
            if self._is_proven(promise) and promise.commit != self._value:
                self.position.step(Promise, Phase.IDLE)
            return
        if self.phase is not Phase.PREPARING or promise.ballot != self.ballot:
            return
        self._promises[peer] = promise
        if not self._is_enough(self._promises):
            return
        best = max(filter(self._is_proven, self._promises.values()), key=lambda p: p.accepted, default=None)
        self._proof = (best.accepted, best.pledges) if best is not None else (-1, {})
        self._value = best.commit if best is not None else self.mine
        self.position.step(Promise, Phase.PLEDGING)
        self._ask(out)

    def _is_proven(self, promise: Promise) -> bool:
        """Returns whether the commit that a member says to have accepted was certified."""
        commit = promise.commit
        if commit is None or commit.round != self.round:
            return False
        return self.acceptor.is_proof(commit, promise.accepted, promise.pledges, self.members)

    def _on_pledge(self, peer: str, pledge: Pledge, out: list[Effect]) -> None:
        if self.phase is not Phase.PLEDGING or pledge.ballot != self.ballot or self._value is None:
            return
        body = pledge_body(self._value.run, self.round, pledge.ballot, self._value.digest)
        if pledge.digest != self._value.digest or not self._verify(peer, body, pledge.signature):
            return
        self._pledges[peer] = pledge.signature
        if self._is_enough(self._pledges):
            self._proof = (self.ballot, dict(sorted(self._pledges.items())))
            self.position.step(Pledge, Phase.ACCEPTING)
            self._ask(out)

    def _on_vote(self, peer: str, vote: Vote, out: list[Effect]) -> None:
        if self.phase is not Phase.ACCEPTING or vote.ballot != self.ballot or self._value is None:
            return
        body = body_of(self._value, vote.ballot)
        if vote.digest != self._value.digest or not self._verify(peer, body, vote.signature):
            return
        self._votes[peer] = vote.signature
        if self._is_enough(self._votes):
            record = Record(commit=self._value, ballot=self.ballot, votes=dict(sorted(self._votes.items())))
            out += self.position.step(Vote, Phase.APPENDING, [ev.Append(record)])

    def _on_reject(self, peer: str, reject: Reject) -> None:
        """So few as may lie are not believed."""
        if reject.promised > self.ballot:
            self._rejects[peer] = reject.promised
        if len(self._rejects) <= liars_borne(len(self.members)):
            return
        self._highest = max(self._highest, *self._rejects.values())
        if self.phase in (Phase.PREPARING, Phase.PLEDGING, Phase.ACCEPTING):
            self.position.step(Reject, Phase.IDLE)
            self._retry_at = self._now + RETRY_SECONDS * (1 + self.members.index(self.peer))

    # --- the decision

    def _learn(self, peer: str, record: Record | RecordHead, out: list[Effect]) -> None:
        if record.commit.round > self.round:
            out += self.position.stay(ev.Learned, [ev.Send(peer, LogRequest(after=self.round - 1))])
        elif isinstance(record, RecordHead):
            return
        elif self.phase is not Phase.APPENDING and why_not_next(self.manifest, self.head, record) is None:
            out += self.position.step(ev.Learned, Phase.APPENDING, [ev.Append(record)])

    def _begin(self, record: Record, out: list[Effect]) -> None:
        """The record is in the log: the next round begins."""
        commit, before = record.commit, self.head
        self.head = commit
        self.former = self._former(before)
        self.leadership.follow(self.operators)
        self.acceptor.begin(self.round)
        self.leadership.begin(self.round)
        self._due = None
        self._highest = -1
        self._began = self._now
        self._rest()
        out += self.position.step(ev.Appended, Phase.IDLE, [ev.Decided(record)])
        others = self._others(self.reached)
        if commit.leader == self.peer and others:
            out += self.position.stay(ev.Appended, [ev.SendLog(o, commit.round - 1) for o in others])
