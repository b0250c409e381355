"""The part of a quorum's member that votes, and must not forget it: the acceptor of single-decree Paxos.

It never goes back behind a promise, and what it accepted it tells everybody who prepares a higher ballot. Whatever it
says is on its disk before: an answer follows its `Save` in the list of effects. It accepts a commit only once it
holds every payload that the commit names, so that what is decided cannot be lost with its sender.

    acceptor  event     next      effects              condition
    FREE      Prepare   PROMISED  Save, Send(Promise)
    PROMISED  Prepare   PROMISED  Save, Send(Promise)  its ballot is higher
    ACCEPTED  Prepare   ACCEPTED  Save, Send(Promise)  its ballot is higher
    any       Prepare   the same  Send(Promise)        its ballot is the promised one: the same answer again
    any       Prepare   the same  Send(Reject)         its ballot is lower than the promised one
    FREE      Accept    ACCEPTED  Save, Send(Vote)     all its payloads are held
    PROMISED  Accept    ACCEPTED  Save, Send(Vote)     not lower, all its payloads are held
    ACCEPTED  Accept    ACCEPTED  Save, Send(Vote)     its ballot is higher than the accepted one
    ACCEPTED  Accept    ACCEPTED  Send(Vote)           it is accepted already: the same answer again
    any       Accept    the same  Send(Reject)         its ballot is lower than the promised one
    any       Accept    the same  Fetch                payloads are not held yet; it is looked at again when they
                                                       are
    FREE      Appended  FREE                           the next round begins
    PROMISED  Appended  FREE                           the next round begins
    ACCEPTED  Appended  FREE                           the next round begins
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from enum import Enum

from protocol.rounds.paxos_events import Appended, Fetch, Save, Send
from protocol.rounds.table import Position, Table, Transition
from protocol.rounds.validation import why_not_next
from protocol.run.manifest import Manifest
from protocol.wire.ballot import Accept, Prepare, Promise, Reject, Vote
from protocol.wire.commit import Commit, Record, vote_body


class Ballots(Enum):
    """What a member is bound to in a round."""

    FREE = "free"
    """It has neither promised nor accepted anything."""
    PROMISED = "promised"
    """It takes no lower ballot than the one that it promised."""
    ACCEPTED = "accepted"
    """It has accepted a commit besides."""


TABLE = Table(
    "acceptor",
    Ballots,
    (
        Transition(Ballots.FREE, Prepare, Ballots.PROMISED, (Save, Promise)),
        Transition(Ballots.PROMISED, Prepare, Ballots.PROMISED, (Save, Promise), "its ballot is higher"),
        Transition(Ballots.ACCEPTED, Prepare, Ballots.ACCEPTED, (Save, Promise), "its ballot is higher"),
        Transition(None, Prepare, None, (Promise,), "its ballot is the promised one: the same answer again"),
        Transition(None, Prepare, None, (Reject,), "its ballot is lower than the promised one"),
        Transition(Ballots.FREE, Accept, Ballots.ACCEPTED, (Save, Vote), "all its payloads are held"),
        Transition(Ballots.PROMISED, Accept, Ballots.ACCEPTED, (Save, Vote), "not lower, all its payloads are held"),
        Transition(
            Ballots.ACCEPTED, Accept, Ballots.ACCEPTED, (Save, Vote), "its ballot is higher than the accepted one"
        ),
        Transition(
            Ballots.ACCEPTED, Accept, Ballots.ACCEPTED, (Vote,), "it is accepted already: the same answer again"
        ),
        Transition(None, Accept, None, (Reject,), "its ballot is lower than the promised one"),
        Transition(None, Accept, None, (Fetch,), "payloads are not held yet; it is looked at again when they are"),
        Transition(Ballots.FREE, Appended, Ballots.FREE, (), "the next round begins"),
        Transition(Ballots.PROMISED, Appended, Ballots.FREE, (), "the next round begins"),
        Transition(Ballots.ACCEPTED, Appended, Ballots.FREE, (), "the next round begins"),
    ),
)


class Acceptor:
    """`vote`: the durable vote of the round to be decided, or of a later round, which is kept until its time.

    `held`: digests of the payloads that are durable here. `sign` signs with the node's identity. Answers to the node
    itself are effects as those to others are.
    """

    def __init__(self, manifest: Manifest, vote: Promise, held: Iterable[str], sign: Callable[[bytes], bytes]) -> None:
        self.manifest = manifest
        self.vote = vote
        self.held = set(held)
        self.waiting: tuple[str, Accept] | None = None
        self._signature = sign
        accepted = Ballots.ACCEPTED if vote.commit is not None else Ballots.PROMISED
        self.position = Position(TABLE, Ballots.FREE if vote.ballot < 0 else accepted)

    def begin(self, round: int) -> None:
        """`round` is to be decided from now on."""
        self.waiting = None
        if self.vote.round < round:
            self.vote = Promise(round=round)
            self.position.step(Appended, Ballots.FREE)

    def prepare(self, peer: str, prepare: Prepare) -> list[Save | Send]:
        """`peer` asks for a promise for the round of `vote`."""
        if prepare.ballot < self.vote.ballot:
            return self.position.stay(Prepare, [Send(peer, self._reject(prepare))])
        if prepare.ballot == self.vote.ballot:
            return self.position.stay(Prepare, [Send(peer, self.vote)])
        self.vote = dataclasses.replace(self.vote, ballot=prepare.ballot)
        bound = Ballots.PROMISED if self.position.phase is Ballots.FREE else self.position.phase
        return self.position.step(Prepare, bound, [Save(self.vote), Send(peer, self.vote)])

    def accept(
        self, peer: str, accept: Accept, head: Commit | None, members: tuple[str, ...], fetch: bool = True
    ) -> list[Save | Send | Fetch]:
        """`peer` asks for a vote; `head` is the log's last commit, `members` decide the round after it.

        `fetch` False: payloads that are not held are being fetched already.
        """
        if accept.ballot < self.vote.ballot:
            self.waiting = None
            return self.position.stay(Accept, [Send(peer, self._reject(accept))])
        commit = accept.commit
        own = Record(commit=commit, ballot=accept.ballot, votes=dict.fromkeys(members, b""))
        if why_not_next(self.manifest, head, own) is not None:
            return []
        offered = [(s.peer, p) for c in commit.contributions for s in c.shares for p in s.parts]
        lacking = [(sender, p) for sender, p in offered if p.digest not in self.held]
        if lacking:
            self.waiting = (peer, accept)
            return self.position.stay(Accept, [Fetch((peer, who), p) for who, p in lacking]) if fetch else []
        self.waiting = None
        if (self.vote.accepted, self.vote.ballot) == (accept.ballot, accept.ballot):
            return self.position.stay(Accept, [Send(peer, self._sign(accept))]) if self.vote.commit == commit else []
        self.vote = Promise(round=commit.round, ballot=accept.ballot, accepted=accept.ballot, commit=commit)
        return self.position.step(Accept, Ballots.ACCEPTED, [Save(self.vote), Send(peer, self._sign(accept))])

    def _reject(self, request: Prepare | Accept) -> Reject:
        return Reject(round=request.round, ballot=request.ballot, promised=self.vote.ballot)

    def _sign(self, accept: Accept) -> Vote:
        commit, digest = accept.commit, accept.commit.digest
        body = vote_body(commit.run, commit.round, accept.ballot, digest)
        return Vote(round=commit.round, ballot=accept.ballot, digest=digest, signature=self._signature(body))
