"""How a commit becomes decided: single-decree Paxos for each round, among the members that the commit before names.

Long because the proposer's table, its rules and its answers belong together. What is confirmed of a commit, who voted twice and how that member is
taken out is in confirming.py, suspects.py and ousting.py beside it.

A round's *members* (1, 3, 4, 5 or 7 bootstrap nodes) vote. A commit is decided once enough of them have accepted it in
one ballot, and the signatures of those votes are the proof that travels with it (`commit.Record`). Of 1, 3 and 5 a majority
is enough: they bear crashes, and no lies. Of 4 and 7 it takes 3 and 5 votes, 2f + 1 of 3f + 1: they bear f members that say anything to
anybody. There a commit is pledged before it is accepted (protocol/quorum/acceptor.py). The others sign their promises, and a proposer shows
those that it stands on (protocol/wire/grounds.py): so who lies in one is named. A node has three
parts: the acceptor votes (protocol/quorum/acceptor.py), leadership says who should propose
(protocol/quorum/leadership.py), and the proposer, here, proposes:

    proposer   event     next       effects           condition
    IDLE                 ACCEPTING                    we lead, ballot 0 is ours and still free, a commit is proposed
    IDLE                 PREPARING                    we lead, and a commit is proposed or was accepted here and not
                                                      decided
    IDLE                 PLEDGING                     as for ACCEPTING, where members may lie
    PREPARING  Promise   PLEDGING                     the same
    PLEDGING             PLEDGING   Send(Accept)      some have not answered, every RETRY_SECONDS
    PLEDGING   Pledge    ACCEPTING                    enough have pledged it: their signatures go with it
    PLEDGING   Promise   IDLE                         another commit was certified before; later again, with that
    PLEDGING   Reject    IDLE                         a higher ballot is promised; later again, with a higher one
    PLEDGING   Learned   APPENDING  Append            the record is the next one of the log
    PLEDGING   Leads     IDLE                         another node leads
    PREPARING            PREPARING  Send(Prepare)     some have not answered, every RETRY_SECONDS
    PREPARING  Promise   ACCEPTING                    a majority promised: the commit that was accepted in the
                                                      highest ballot, else our own
    PREPARING  Promise   IDLE                         a majority promised, and there is no commit to propose
    ACCEPTING            ACCEPTING  Send(Accept)      some have not answered, every RETRY_SECONDS
    ACCEPTING  Vote      APPENDING  Append            a majority voted: the commit is decided
    PREPARING  Reject    IDLE                         a higher ballot is promised; later again, with a higher one
    ACCEPTING  Reject    IDLE                         a higher ballot is promised; later again, with a higher one
    IDLE       Learned   APPENDING  Append            the record is the next one of the log
    PREPARING  Learned   APPENDING  Append            the record is the next one of the log
    ACCEPTING  Learned   APPENDING  Append            the record is the next one of the log
    IDLE                 APPENDING  Append            we decide nothing, and the next one of the log counts by now
    ACCEPTING  Judged    IDLE                         what another claims to have accepted is not fair
    APPENDING  Appended  IDLE       Decided           the next round begins
    IDLE       Appended  IDLE       Decided           the next round begins; who leads changed meanwhile
    IDLE       Appended  IDLE       SendLog           the commit was ours: the other nodes get the record
    PREPARING  Leads     IDLE                         another node leads
    ACCEPTING  Leads     IDLE                         another node leads
    APPENDING  Leads     IDLE                         another node leads
    any                  the same   Send(Heartbeat)   every `heartbeat` seconds, to all other nodes
    any        Heard     the same   Send(LogRequest)  the sender is at a later round
    any        Heard     the same   SendLog           the sender is at an earlier round
    any        Heard     the same   Send(Confirmed)   the same, and enough members have confirmed our last commit
    any        Learned   the same   Send(LogRequest)  records in between are missing
    any        Appended  the same   Send(Holds)       the commit has to be confirmed: the other nodes hear that it
                                                      is in our log
    any                  the same   Send(Confirmed)   all members that give signs of life hold our last commit, or a
                                                      grace is over
    any                  the same   Certified         enough members have confirmed our last commit
    any        Learned   the same   Named             it and our log prove that a member voted twice
    any        Heard     the same   Named             another node has such a proof
    any                  the same   Send(DoubleVote)  the same: all other nodes get the proof
    any        Learned   the same   Forked            a member holds another decided commit than our log, and
                                                      nothing proves a lie
    any        Learned   the same   SendLog           a member holds another decided commit than our log: it gets
                                                      ours
    any        Ousted    the same   Undo              the decree may come with the commit after the last round that
                                                      stays
    any        Learned   the same   Undo              the record brings such a decree
    any        Heard     the same   Undo              the commit that we are asked to accept brings such a decree
    any        Tick      the same   Skipped           the leader lets the round wait that this node would decide

Ballot 0 of a round belongs to the leader of the round before and needs no promises, since no lower ballot exists: a
round in calm weather costs one exchange, or two where members may lie. Ballot b > 0 belongs to member b mod n. A proposer is its own first
acceptor, so a ballot that was used is on disk and is never used again for another commit. A single member's vote is
the log record itself.

Events, effects and the table are in protocol/quorum/paxos_events.py; bootstrap/node.py carries the effects out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from protocol.ledger import access, board, ousting
from protocol.ledger.confirming import GRACE_HEARTBEATS, Confirming, is_needed
from protocol.ledger.validation import why_not_next
from protocol.quorum.acceptor import Acceptor
from protocol.quorum.ahead import Ahead
from protocol.quorum.leadership import LIAR_ROUNDS, SLOW_ROUNDS, Leadership
from protocol.quorum.paxos_events import (
    TABLE,
    Append,
    Appended,
    Certified,
    Decided,
    Effect,
    Event,
    Forked,
    Heard,
    Held,
    Judged,
    Leads,
    Learned,
    Listed,
    Named,
    Ousted,
    Phase,
    Proposed,
    Refused,
    Save,
    Send,
    SendLog,
    Skipped,
    Tick,
    Undo,
)
from protocol.quorum.suspects import Recorded, Suspects
from protocol.quorum.table import Position
from protocol.run.manifest import Manifest
from protocol.wire import grounds
from protocol.wire.ballot import Accept, Confirmed, Holds, Pledge, Prepare, Promise, Reject, Vote
from protocol.wire.bounds import MAX_BALLOT
from protocol.wire.commit import (
    Commit,
    Record,
    are_shown,
    body_of,
    liars_borne,
    pledge_body,
    votes_needed,
)
from protocol.wire.decree import Enacted
from protocol.wire.double_vote import DoubleVote
from protocol.wire.grounds import MAX_GROUNDS, Sworn
from protocol.wire.session import Heartbeat, LogRequest

RETRY_SECONDS = 1.0
"""Unanswered requests are sent again after this time; a rejected proposer waits this time times one plus its rank."""
BALLOTS_PER_SECOND, AHEAD_SECONDS = 16, 60.0
"""Ballots that each member may use in a second of a round, and how much longer it may have lasted elsewhere."""
LONELY_LEASES = 2
"""So long a leader of one, three or five proposes without an answer before it hears everybody again."""


class Quorum:
    """One node of the quorum; `handle` is the only entry, and `now` is in seconds on any steady clock. `mine`: what this node would propose;
    `ballot`: that in which it proposes, negative for none.

    `recorded`: the log. `vote`: the durable vote. `held`: names of the payloads that are durable. `oust`: the durable decree that takes a
    member out, if the log has not got it yet. `sign` and `verify` (peer, body, signature) are those of the node's and of others' identities.
    """

    def __init__(
        self,
        manifest: Manifest,
        peer: str,
        last: Record | None,
        vote: Promise | None,
        held: Iterable[str],
        sign: Callable[[bytes], bytes],
        verify: Callable[[str, bytes, bytes], bool],
        now: float,
        recorded: Recorded,
        oust: Enacted | None = None,
    ) -> None:
        """Long because everything that is durable comes in here."""
        self.manifest = manifest
        self.peer = peer
        self._sign = sign
        self._verify = verify
        self._recorded = recorded
        self.begin(last, vote, held, now, oust)

    def begin(
        self, last: Record | None, vote: Promise | None, held: Iterable[str], now: float, oust: Enacted | None
    ) -> None:
        """From the start, or after an `Undo`, with what is durable then; `last`: the log's last record."""
        self.head = last.commit if last is not None else None
        self.oust = oust
        self.suspects = Suspects(self.manifest, self._recorded)
        self._last = last
        self.position = Position(TABLE, Phase.IDLE)
        self.leadership = Leadership(self.manifest, self.peer, now, self.operators)
        self.suspects.operators = self.operators
        self.ahead = Ahead(self.manifest, self.head, self._verify)
        before = self._recorded(self.round - 2) if self.round > 1 else None
        self.former: tuple[str, ...] = self._former(before.commit if before is not None else None)
        self.leadership.begin(self.round)
        fresh = vote is None or vote.round < self.round or vote.term != len(self.out)
        known = Promise(round=self.round, term=len(self.out)) if vote is None or fresh else vote
        self.acceptor = Acceptor(self.manifest, known, held, self._sign, self._verify)
        self.confirming = Confirming(self.peer, GRACE_HEARTBEATS * self.manifest.timing.heartbeat, now)
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
        self._grounds: tuple[Sworn, ...] = ()
        self._rejects: dict[str, int] = {}
        self._began = now
        self._retry_at = float("-inf")
        self._due: tuple[str, float] | None = None

    @property
    def phase(self) -> Phase:
        """What this node does about the round's commit, as a proposer."""
        return self.position.phase

    @property
    def leads(self) -> bool:
        """Whether this node leads as far as it knows."""
        return self.leadership.leads

    @property
    def leader(self) -> str | None:
        """Who leads as far as this node knows, None where no member gives signs of life."""
        return self.leadership.leader(self.members, self._before)

    @property
    def round(self) -> int:
        """The round that is to be decided."""
        return 0 if self.head is None else self.head.round + 1

    @property
    def members(self) -> tuple[str, ...]:
        """Who decides it."""
        return ousting.deciders(self.manifest, self.head, self.oust)

    @property
    def out(self) -> tuple[str, ...]:
        """The operators that are out."""
        return ousting.out_after(self.head, self.oust)

    @property
    def operators(self) -> tuple[str, ...]:
        """The others."""
        return board.operators(self.manifest, self.head, self.out)

    @property
    def reached(self) -> tuple[str, ...]:
        """Who is told what happens: the operators, and who was one until the log's last commit, so that it hears of that."""
        return (*self.operators, *self.former)

    def _former(self, before: Commit | None) -> tuple[str, ...]:
        """Who operated the run after `before`, and does no more after the log's last commit; those who are out aside."""
        names = board.operators(self.manifest, before, self.out)
        return tuple(name for name in names if name not in self.operators)

    @property
    def is_stopped(self) -> bool:
        """Whether this node decides nothing more, since the logs differ, or a member has voted twice where that may make them differ."""
        liars = self.suspects.named.keys() & set(self.members)
        return self.suspects.conflict is not None or bool(liars and not self._bears_liars)

    @property
    def may_oust(self) -> tuple[DoubleVote, int] | None:
        """As `Suspects.ousting` says."""
        return None if self.oust is not None else self.suspects.ousting(self.round - 1)

    @property
    def living(self) -> frozenset[str]:
        """The members that give signs of life."""
        return self.leadership.living(self.members)

    @property
    def _before(self) -> str:
        """The leader of the round before, to whom ballot 0 belongs."""
        return self.members[0] if self.head is None else self.head.leader

    def handle(self, event: Event, now: float) -> list[Effect]:
        """One step of the machine."""
        self._now = now
        self.leadership.heard(event.peer if isinstance(event, Heard | Learned) else None, now)
        out: list[Effect] = []
        match event:
            case Proposed(commit):
                if self.leads and self.mine is None and commit.round == self.round:
                    self.mine = self.of_ours(commit)
                    self.acceptor.verdicts[self.mine.digest] = None
            case Heard(peer, message):
                self._hear(peer, message, out)
            case Learned(peer, record):
                self._learn(peer, record, out)
            case Held(digest):
                if self.acceptor.hold(digest):
                    self._look_again(Held, out)
            case Listed(root, parts):
                if self.acceptor.know(root, parts):
                    self._look_again(Listed, out)
            case Judged(digest, unfair):
                self._route(self.acceptor.judge(digest, unfair), out)
                if unfair is None:
                    self._look_again(Judged, out)
            case Ousted(enacted):
                self._adopt(Ousted, enacted, out)
            case Appended(record):
                self._begin(record, out)
            case Tick(due):
                self._wait_for_leader(due, out)
        self._watch(out)
        self._follow(out)
        self._advance(out)
        self._confirm(out)
        return out

    def of_ours(self, commit: Commit) -> Commit:
        """`commit` as this node proposes it: with its leader, and the members of the next round. The same object if it is so already, so
        that a digest that was computed beforehand counts: of 10,000 replicas it takes a tenth of a second."""
        out = ousting.out_after(self.head, commit.decree)
        leader = self.peer
        then, living = board.of(self.manifest, commit), self.leadership.present
        members = ousting.completed(then, self.leadership.next_members(self.members, out), out, living)
        same = (commit.leader, commit.members) == (leader, members)
        return commit if same else dataclasses.replace(commit, leader=leader, members=members)

    # --- the other nodes

    def _watch(self, out: list[Effect]) -> None:
        """Finds out who leads, and gives a sign of life."""
        changed = self.leadership.elect(self.members, self._before)
        out += changed
        if changed and not self.leads:
            if self.phase is not Phase.IDLE:
                self.position.step(Leads, Phase.IDLE)
            self._rest()
        out += self.leadership.stalled(self.members)
        turn = self.leadership.turn
        if self._now - self._beat_at >= self.manifest.timing.heartbeat or turn != self._told_turn:
            self._beat_at, self._told_turn = self._now, turn
            beat = Heartbeat(
                phase="leading" if self.leads else "following", round=self.round, turn=turn, head=self._head_digest
            )
            out += self._to(None, self._others(self.reached), beat)
            own = self.confirming.own(self.head)
            if own is not None:
                out += self._to(None, self._others(self.reached), own)

    def _wait_for_leader(self, due: bool, out: list[Effect]) -> None:
        """A leader that has not got a round decided a lease after this node would have proposed it is skipped. Of three or five, all may come to
        skip each other, lead, and hear nobody: whoever gets no answer to what it proposes for LONELY_LEASES skips nobody any more."""
        leader, lease = self.leader, self.manifest.timing.gone_after
        ours = leader == self.peer
        waits = self.phase is not Phase.IDLE and not self._bears_liars if ours else due
        if not waits or leader is None or self.leadership.has_stalled:
            self._due = None
        elif self._due is None or self._due[0] != leader:
            self._due = (leader, self._now)
        elif self._now - self._due[1] >= (LONELY_LEASES * lease if ours else lease):
            self._due = None
            if ours:
                self.leadership.forgive()
                return
            self._skip(leader, SLOW_ROUNDS)
            out += self.position.stay(Tick, [Skipped(leader, self.round)])

    def _skip(self, peer: str, rounds: int) -> None:
        if not self._bears_liars:
            self.leadership.skip(peer, rounds)
        elif peer == self.leader:
            self.leadership.next_turn(self.members)

    def _hear(self, peer: str, message: object, out: list[Effect]) -> None:
        match message:
            case Heartbeat(round=round, turn=turn, head=head):
                self.leadership.turned(peer, round, turn)
                self.confirming.holds(peer, round - 1, head)
                self._help(peer, round, out)
                if round == self.round > 0 and head not in ("", self._head_digest):
                    out += self.position.stay(Heard, [SendLog(peer, round - 2)])
            case Holds(round=round, digest=digest):
                self.confirming.holds(peer, round, digest)
            case Confirmed():
                self.confirming.hear(message, self.operators, self._verify, self.manifest.run_id)
                if self.peer not in self.members and message.round >= self.round:
                    self.ahead.hear(peer, message)
                    self._help(peer, message.round + 1, out)  # what we could not take yet
            case DoubleVote():
                if self.suspects.hear(message, self.out):
                    self._name(Heard, (message,), out)
            case Accept(commit=commit) if commit.decree is not None and self._adopt(Heard, commit.decree, out):
                pass  # it is asked for again
            case Prepare() if self._is_current(peer, message, out):
                self._route(self.acceptor.prepare(peer, message), out)
            case Accept(commit=commit) if self._fits(commit) and self._is_current(peer, message, out):
                self._on_accept(peer, message, out)
            case Promise(term=term) if (message.round, term) == (self.round, len(self.out)) and peer in self.members:
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
        """`peer` is at `round`: who is behind gets the records in between."""
        if round > self.round:
            known = self.round - 1 if self.peer in self.members else self.ahead.end
            if round > known + 1:
                out += self.position.stay(Heard, [Send(peer, LogRequest(after=known))])
        elif round < self.round:
            out += self.position.stay(Heard, [SendLog(peer, round - 1)])
            if self.confirming.certificate is not None:
                out += self.position.stay(Heard, [Send(peer, self.confirming.certificate)])

    def _is_current(self, peer: str, message: Prepare | Accept, out: list[Effect]) -> bool:
        """Whether this round is to be decided here and the ballot is the sender's."""
        self._help(peer, message.round, out)
        here = self.peer in self.members and self.acceptor.vote.round == self.round == message.round
        if self._bears_liars:  # who does not lead would only disturb who does
            heard = peer in (self.peer, self.leader)
        else:
            heard = peer == self.peer or not self.leadership.is_skipped(peer, self.members)
        in_reach = message.ballot <= self._highest_yet()
        return here and heard and in_reach and not self.is_stopped and self._owner(message.ballot) == peer

    def _fits(self, commit: Commit) -> bool:
        """Whether a commit brings the decree that takes a member out, where one has to come now. Who is no member takes what has been
        confirmed only: its log is no reason to wait."""
        if self.oust is not None and not ousting.is_ousting(commit.decree):
            return False
        if self.peer in self.members or not is_needed(len(self.members), commit):
            return True
        known = self.confirming.newest(self.members)
        return known is not None and (commit.round < known[0] or (commit.round, commit.digest) == known)

    @property
    def _bears_liars(self) -> bool:
        return liars_borne(len(self.members)) > 0

    def _highest_yet(self) -> int:
        """The highest ballot that honest members can have come to in this round: who asks for more wants to use them up."""
        grown = int(BALLOTS_PER_SECOND * len(self.members) * (self._now - self._began + AHEAD_SECONDS))
        return min(MAX_BALLOT, max(self.acceptor.vote.ballot, 0) + grown)

    def _owner(self, ballot: int) -> str:
        return self._before if ballot == 0 else self.members[ballot % len(self.members)]

    def _on_accept(self, peer: str, accept: Accept, out: list[Effect], event: type = Accept) -> None:
        self._route(self.acceptor.accept(peer, accept, self.head, self.members, event), out)

    def _look_again(self, event: type, out: list[Effect]) -> None:
        """What a vote waited for is here."""
        if self.acceptor.waiting is not None:
            peer, accept = self.acceptor.waiting
            self._on_accept(peer, accept, out, event)

    def _route(self, effects: Sequence[Effect], out: list[Effect]) -> None:
        """What the acceptor does. Its answers to ourselves are heard at once; a single member needs no durable vote."""
        for effect in effects:
            if isinstance(effect, Refused) and effect.peer == self.peer:  # a liar claimed to have accepted it
                self.position.step(Judged, Phase.IDLE)
                self._retry_at = self._now
                continue
            if isinstance(effect, Refused):
                self._skip(effect.peer, LIAR_ROUNDS if effect.unfair.accuses else 1)
            if isinstance(effect, Send) and effect.peer == self.peer:
                self._hear(self.peer, effect.message, out)
            elif not isinstance(effect, Save) or len(self.members) > 1:
                out.append(effect)

    def _others(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name != self.peer]

    def _to(
        self,
        event: type | None,
        names: Sequence[str],
        message: Prepare | Accept | Heartbeat | Holds | Confirmed | DoubleVote,
    ) -> list[Send]:
        return self.position.stay(event, [Send(name, message) for name in names]) if names else []

    # --- the proposer

    def _rest(self) -> None:
        """Nothing is proposed."""
        self.mine, self._value, self.ballot = None, None, -1
        self._forget_answers()
        self._retry_at = float("-inf")

    def _forget_answers(self) -> None:
        self._promises, self._pledges, self._votes, self._rejects = {}, {}, {}, {}
        self._proof, self._grounds = (-1, {}), ()

    def _is_enough(self, peers: Iterable[str]) -> bool:
        return len(set(peers) & set(self.members)) >= votes_needed(len(self.members))

    def _advance(self, out: list[Effect]) -> None:
        vote = self.acceptor.vote
        if self.is_stopped or not self.leads or vote.round != self.round or self._now < self._retry_at:
            return
        if self.phase is Phase.IDLE and (self.mine is not None or vote.commit is not None):
            self._forget_answers()
            if vote.ballot < 0 and self._before == self.peer and self.mine is not None:
                self.ballot, self._value = 0, self.mine
                self.position.step(None, Phase.PLEDGING if self._bears_liars else Phase.ACCEPTING)
            else:
                size, rank = len(self.members), self.members.index(self.peer)
                above = max(vote.ballot, min(self._highest, self._highest_yet() - size), 0)
                if above + size > self._highest_yet():  # nobody would hear a higher one
                    return
                self.ballot = next(b for b in range(above + 1, above + 1 + size) if b % size == rank)
                self.position.step(None, Phase.PREPARING)
            self._ask(out)
        elif self.phase in (Phase.PREPARING, Phase.PLEDGING, Phase.ACCEPTING):
            if self.phase is Phase.PREPARING:
                self._choose(out)  # who could have told may have gone
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
                grounds=self._grounds,
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
        known = self._sworn(peer, promise) if are_shown(len(self.members)) else promise
        if known is not None:
            self._promises[peer] = known
            self._choose(out)

    def _choose(self, out: list[Effect]) -> None:
        """Goes on with a commit, if so many have promised that it is known which."""
        if not self._is_enough(self._promises):
            return
        claimed, is_possible = self._accepted_before()
        if claimed is not None and not is_possible:
            return
        value = claimed.commit if claimed is not None else self.mine
        if are_shown(len(self.members)) and value is not None:
            stands_on = self._stands_on(claimed)
            if stands_on is None:
                return
            self._grounds = stands_on
        self._value = value
        asking = Phase.PLEDGING if self._bears_liars else Phase.ACCEPTING
        self.position.step(Promise, Phase.IDLE if self._value is None else asking)
        if self._value is not None:
            self._ask(out)

    def _sworn(self, peer: str, promise: Promise) -> Promise | None:
        """The promise as others can be shown it: it is signed, and what was accepted was allowed. None for any other."""
        (own,) = _said({peer: promise})
        if (own.accepted < 0) != (promise.commit is None) or own.accepted >= own.ballot:
            return None
        needed, run, term = votes_needed(len(self.members)), self.manifest.run_id, len(self.out)
        found = grounds.chain(promise.grounds, self.members, needed, own.accepted, own.digest)
        if found is None or not grounds.are_signed((own, *found), run, term, self.round, self._verify):
            return None
        return dataclasses.replace(promise, grounds=found)

    def _stands_on(self, claim: Promise | None) -> tuple[Sworn, ...] | None:
        """The promises that allow what one of them claims (None: a commit of our own), if there are enough."""
        top, commit = (-1, None) if claim is None else (claim.accepted, claim.commit)
        fits = {
            m: p
            for m, p in sorted(self._promises.items())
            if m in self.members and (p.accepted < top or (p.accepted, p.commit) == (top, commit))
        }
        found = (*_said(fits), *(() if claim is None else claim.grounds))
        return found if self._is_enough(fits) and len(found) <= MAX_GROUNDS else None

    def _accepted_before(self) -> tuple[Promise | None, bool]:
        """Who says which commit has to be proposed, since it may be decided: the one that was accepted in the highest ballot. One that is not fair
        counts only if so many claim it, and the others' promises have not told yet whether they do (False). Where those give no sign of
        life, who could tell, a mere doubt is dropped: a quorum that bears crashes goes on with as many as decide."""
        claims = [p for p in self._promises.values() if p.commit is not None]
        if self._bears_liars:
            best = max(filter(self._is_proven, claims), key=lambda p: p.accepted, default=None)
            self._proof = (best.accepted, best.pledges) if best is not None else (-1, {})
            return best, True
        for claim in sorted(claims, key=lambda p: p.accepted, reverse=True):
            assert claim.commit is not None
            if self.acceptor.verdicts.get(claim.commit.digest) is None:
                return claim, True
            agree = {m for m, p in self._promises.items() if (p.accepted, p.commit) == (claim.accepted, claim.commit)}
            if self._is_enough(agree):
                return claim, True
            silent = set(self.members) - self._promises.keys()
            gone = silent - self.living
            if self._is_enough(agree | gone) and self.acceptor.drops_doubt(claim.commit):
                return claim, True
            if self._is_enough(agree | silent):
                return claim, False
        return None, True

    def _is_proven(self, promise: Promise) -> bool:
        """Whether the commit that a member says to have accepted was certified."""
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
            record = Record(
                commit=self._value,
                ballot=self.ballot,
                votes=dict(sorted(self._votes.items())),
                grounds=self._grounds,
            )
            out += self.position.step(Vote, Phase.APPENDING, [Append(record)])

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

    @property
    def _head_digest(self) -> str:
        return self.head.digest if self.head is not None else ""

    def _compare(self, peer: str, record: Record, out: list[Effect]) -> None:
        """Looks whether `peer` holds another commit of a round than our log, and who voted for both."""
        proofs, differs = self.suspects.compare(peer, record, self.out)
        self._name(Learned, proofs, out)
        if not differs:
            return
        if all(proof.round != record.commit.round for proof in self.suspects.named.values()):
            out += self.position.stay(Learned, [Forked(record)])
        out += self.position.stay(Learned, [SendLog(peer, record.commit.round - 1)])

    def _name(self, event: type, proofs: Sequence[DoubleVote], out: list[Effect]) -> None:
        for proof in proofs:
            out += self.position.stay(event, [Named(proof)])
            out += self._to(None, self._others(self.reached), proof)

    def _adopt(self, event: type, enacted: Enacted, out: list[Effect]) -> bool:
        """Whether a member is taken out by this decree here and now."""
        after = enacted.decree.after
        is_new = self.oust is None and ousting.is_ousting(enacted) and enacted.decree.subject not in self.out
        if not is_new or after is None or after >= self.round:
            return False
        before = self._recorded(after) if after >= 0 else None
        if access.why_not_decreed(self.manifest, before.commit if before is not None else None, enacted) is not None:
            return False
        out += self.position.stay(event, [Undo(enacted)])
        return True

    def _confirm(self, out: list[Effect]) -> None:
        """Confirms our last commit, if it has to be and may be, and says so when enough have."""
        if self._last is None or self.head is None or self.suspects.conflict is not None:
            return
        members = self.suspects.members_of(self._last)
        if not is_needed(len(members), self.head):
            return
        waited = [m for m in self._others(members) if m in self.living and m not in self.suspects.named]
        if self.peer not in members:
            self.confirming.is_done = True  # it only passes on what the members say
        elif self.confirming.is_due(self.head, waited, self._now):
            own = self.confirming.confirm(self.head, self._sign)
            out += self._to(None, self._others(self.reached), own)
        found = self.confirming.certified(self.head, members)
        if found is not None:
            out += self.position.stay(None, [Certified(found)])

    def _learn(self, peer: str, record: Record, out: list[Effect]) -> None:
        self._compare(peer, record, out)
        if record.commit.decree is not None and self._adopt(Learned, record.commit.decree, out):
            return
        # who takes not all that comes does not ask: the same would come again and again; signs of life tell that there is more
        takes = self.peer in self.members or not is_needed(len(self.members), record.commit)
        asks = takes and self.oust is None and not self.is_stopped
        if asks and record.commit.round == self.round > 0 and record.commit.parent != self._head_digest:
            out += self.position.stay(Learned, [Send(peer, LogRequest(after=self.round - 2))])
        if record.commit.round > self.round and self.peer not in self.members:
            self.ahead.learn(record)
        if record.commit.round > self.round:
            if asks:
                out += self.position.stay(Learned, [Send(peer, LogRequest(after=self.round - 1))])
        elif self.peer not in self.members and self.oust is None and not self._fits(record.commit):
            self.ahead.learn(record)
        elif self.phase is Phase.APPENDING or not self._fits(record.commit):
            pass
        elif why_not_next(self.manifest, self.head, record) is None:
            out += self.position.step(Learned, Phase.APPENDING, [Append(record)])

    def _follow(self, out: list[Effect]) -> None:
        """Who decides nothing takes what counts."""
        found = self.ahead.next() if self.phase is Phase.IDLE and self.oust is None else None
        if found is not None:
            out += self.position.step(None, Phase.APPENDING, [Append(found)])

    def _begin(self, record: Record, out: list[Effect]) -> None:
        """The record is in the log: the next round begins."""
        commit = record.commit
        decided_by, before = self.members, self.head
        self.head, self._last, self.oust = commit, record, None
        self.former = self._former(before)
        self.ahead.begin(commit)
        self.leadership.follow(self.operators)
        self.suspects.operators = self.operators
        self.confirming.begin(self._now)
        self.acceptor.begin(self.round)
        self.leadership.begin(self.round)
        self._due = None
        self._highest = -1
        self._began = self._now
        self._rest()
        out += self.position.step(Appended, Phase.IDLE, [Decided(record)])
        others = self._others(self.reached)
        if commit.leader == self.peer and others:
            out += self.position.stay(Appended, [SendLog(o, commit.round - 1) for o in others])
        if is_needed(len(decided_by), commit):
            out += self._to(Appended, others, Holds(round=commit.round, digest=commit.digest))


def _said(promises: Mapping[str, Promise]) -> tuple[Sworn, ...]:
    """What these say, as others are shown it."""
    return tuple(
        Sworn(
            peer=peer,
            ballot=p.ballot,
            accepted=p.accepted,
            digest=p.commit.digest if p.commit is not None else "",
            signature=p.signature,
        )
        for peer, p in promises.items()
    )
