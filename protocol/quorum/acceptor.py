"""The voting part of a quorum's member: the acceptor of single-decree Paxos with certificates.

It keeps its promises across restarts: an answer follows its `Save` in the list of effects. It accepts a commit only
when it holds every payload that the commit names, so a decided commit survives its sender, and only if it could have
proposed the commit itself (protocol/round/fairness.py).

Up to f of 3f + 1 members may lie, so a commit is *pledged* before it is accepted: n - f pledges of one ballot are its
*certificate*, and no other commit can have one of the same ballot. A member that has accepted a commit pledges another
one only if that was certified in a later ballot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from enum import Enum

from protocol.ledger import part_lists
from protocol.ledger.history import why_not_next
from protocol.ledger.part_lists import Parts
from protocol.quorum.paxos_events import (
    Appended,
    Fetch,
    FetchList,
    Held,
    Judge,
    Judged,
    Listed,
    Objection,
    Refused,
    Save,
    Send,
)
from protocol.quorum.table import Position, Row, Table, anywhere
from protocol.run.manifest import Manifest
from protocol.wire.ballot import Accept, Pledge, Prepare, Promise, Reject, Vote
from protocol.wire.commit import Commit, Part, Record, Share, body_of, pledge_body, votes_needed

MOST_JUDGED = 16
"""Different commits of one round that are judged for one sender: each costs a plan."""
Verify = Callable[[str, bytes, bytes], bool]
"""Whether this peer made this signature of these bytes: (peer, bytes, signature)."""
Answer = Save | Send | Fetch | FetchList | Judge | Refused


class Ballots(Enum):
    """The ballots and pledges that bind a member in a round."""

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
        Row(Ballots.FREE, Prepare, Ballots.PROMISED, (Save, Promise)),
        Row(Ballots.PROMISED, Prepare, Ballots.PROMISED, (Save, Promise), "its ballot is higher"),
        Row(Ballots.ACCEPTED, Prepare, Ballots.ACCEPTED, (Save, Promise), "its ballot is higher"),
        anywhere(Prepare, (Promise,), "its ballot is the promised one: the same answer again"),
        anywhere(Prepare, (Reject,), "its ballot is lower than the promised one"),
        Row(Ballots.FREE, Accept, Ballots.PROMISED, (Save, Pledge), "all is held, it was not certified"),
        Row(Ballots.PROMISED, Accept, Ballots.PROMISED, (Save, Pledge), "the same"),
        Row(Ballots.FREE, Accept, Ballots.ACCEPTED, (Save, Pledge), "the same, it was certified in an earlier ballot"),
        Row(Ballots.PROMISED, Accept, Ballots.ACCEPTED, (Save, Pledge), "the same"),
        Row(Ballots.ACCEPTED, Accept, Ballots.ACCEPTED, (Save, Pledge), "it was accepted before, or certified later"),
        Row(Ballots.FREE, Accept, Ballots.ACCEPTED, (Save, Vote), "it is certified in this ballot"),
        Row(Ballots.PROMISED, Accept, Ballots.ACCEPTED, (Save, Vote), "the same"),
        Row(Ballots.ACCEPTED, Accept, Ballots.ACCEPTED, (Save, Vote), "the same"),
        Row(Ballots.ACCEPTED, Accept, Ballots.ACCEPTED, (Vote,), "it is accepted already: the same answer again"),
        anywhere(Accept, (Pledge,), "it is pledged already: the same answer again"),
        Row(Ballots.ACCEPTED, Accept, Ballots.ACCEPTED, (Save, Promise), "another one was accepted before"),
        Row(Ballots.ACCEPTED, Accept, Ballots.ACCEPTED, (Promise,), "the same again"),
        anywhere(Accept, (Reject,), "its ballot is lower than the promised one"),
        anywhere(Accept, (FetchList,), "lists of parts are not known; it is looked at again when they are"),
        anywhere(Accept, (Fetch,), "the same of payloads that the lists name"),
        anywhere(Listed, (Fetch,), "all lists that were waited for are known, and payloads are not held"),
        anywhere(Accept, (Judge,), "all is held: it is looked at again when it is known whether it is fair"),
        anywhere(Accept, (Refused,), "nobody honest proposes this"),
        anywhere(Judged, (Refused,), "it is not fair: it gets no vote"),
        Row(Ballots.FREE, Appended, Ballots.FREE, (), "the next round begins"),
        Row(Ballots.PROMISED, Appended, Ballots.FREE, (), "the next round begins"),
        Row(Ballots.ACCEPTED, Appended, Ballots.FREE, (), "the next round begins"),
    ),
)


class Acceptor:
    """The acceptor of one node. Answers to the node itself are effects, too.

    vote: durable, of this round or a later one; held, lists: durable payloads and lists of parts
    """

    def __init__(
        self,
        manifest: Manifest,
        vote: Promise,
        held: Iterable[str],
        sign: Callable[[bytes], bytes],
        verify: Verify,
    ) -> None:
        self.manifest = manifest
        self._verify = verify
        self.vote = vote
        self.held = set(held)
        self.lists: dict[str, Parts] = {}
        self.waiting: tuple[str, Accept] | None = None
        self.verdicts: dict[str, Objection | None] = {}
        """What was found of the round's commits, by digest."""
        self._judged: dict[str, set[str]] = {}
        self._awaited: set[str] = set()
        self._signature = sign
        accepted = Ballots.ACCEPTED if vote.commit is not None else Ballots.PROMISED
        self.position = Position(TABLE, Ballots.FREE if vote.ballot < 0 else accepted)

    def begin(self, round: int) -> None:
        """`round` is to be decided from now on."""
        self.waiting = None
        self.lists.clear()
        self.verdicts.clear()
        self._judged.clear()
        self._awaited.clear()
        if self.vote.round < round:
            self.vote = Promise(round=round)
            self.position.step(Appended, Ballots.FREE)

    def hold(self, name: str) -> bool:
        """A payload is durable; whether nothing is lacking now of what `waiting` waits for."""
        self.held.add(name)
        return self._came(name)

    def know(self, root: str, parts: Parts) -> bool:
        """A list of parts is durable; the same."""
        self.lists[root] = parts
        return self._came(root)

    def judge(self, digest: str, unfair: Objection | None) -> list[Answer]:
        """Takes the verdict on a commit; `unfair`: its fault, None: it is fair."""
        self.verdicts[digest] = unfair
        self._awaited.discard(digest)
        if unfair is None or self.waiting is None or self.waiting[1].commit.digest != digest:
            return []
        peer, accept = self.waiting
        self.waiting = None
        return self.position.stay(Judged, [Refused(peer, accept.round, unfair)])

    def _came(self, name: str) -> bool:
        if self.waiting is None or name not in self._awaited:
            return False
        self._awaited.discard(name)
        return not self._awaited

    def prepare(self, peer: str, prepare: Prepare) -> list[Save | Send]:
        """`peer` asks for a promise for the round of `vote`."""
        if prepare.ballot < self.vote.ballot:
            return self.position.stay(Prepare, [Send(peer, self._reject(prepare))])
        if prepare.ballot == self.vote.ballot:
            return self.position.stay(Prepare, [Send(peer, self.vote)])
        self.vote = dataclasses.replace(self.vote, ballot=prepare.ballot, pledged="")
        bound = Ballots.PROMISED if self.position.phase is Ballots.FREE else self.position.phase
        return self.position.step(Prepare, bound, [Save(self.vote), Send(peer, self.vote)])

    def accept(
        self, peer: str, accept: Accept, head: Commit | None, members: tuple[str, ...], event: type = Accept
    ) -> list[Answer]:
        """`peer` asks for a vote. event: why it is examined; missing parts are fetched after Accept and Listed."""
        if accept.ballot < self.vote.ballot:
            self.waiting = None
            return self.position.stay(Accept, [Send(peer, self._reject(accept))])
        commit = accept.commit
        if commit.parent != (head.digest if head is not None else self.manifest.run_id):
            return []  # one of the logs is forked, or the sender lies: its log will tell
        own = Record(commit=commit, ballot=accept.ballot, votes=dict.fromkeys(members, b""))
        if (reason := why_not_next(self.manifest, head, own)) is not None:
            return self._refuse(peer, accept, reason)
        if accept.ballot == 0 and commit.leader != peer:
            unfair = Objection("says that another node proposes it", lie=True)
            return self.position.stay(Accept, [Refused(peer, accept.round, unfair)])
        plan = head.plan if head is not None else None
        if (reason := part_lists.why_not_planned(self.manifest, plan, commit)) is not None:
            return self._refuse(peer, accept, reason)
        unknown = [share for share in commit.shares if share.root not in self.lists]
        if unknown:
            self._wait(peer, accept, (share.root for share in unknown))
            asked = [FetchList((peer, s.peer), s) for s in unknown if part_lists.may_be_fetched(self.manifest, s)]
            return self.position.stay(Accept, asked) if event is Accept and asked else []
        reason = part_lists.why_refused(self.manifest, plan, commit, self.lists) if event is not Held else None
        if reason is not None:
            return self._refuse(peer, accept, reason)
        lacking = [(who, p) for s in commit.shares for who, p in self._lacking(s)]
        if lacking:
            self._wait(peer, accept, (part.digest for _, part in lacking))
            return self.position.stay(event, [Fetch((peer, who), p) for who, p in lacking]) if event is not Held else []
        proven = self.is_proof(commit, accept.certified, accept.pledges, members)
        if not proven and commit.digest not in self.verdicts:
            return self._ask(peer, accept)
        self.waiting = None
        if not proven and self.verdicts[commit.digest] is not None:
            return []
        if not (proven and accept.certified == accept.ballot):
            return self._pledge(peer, accept, accept.certified if proven else -1)
        if (self.vote.accepted, self.vote.ballot) == (accept.ballot, accept.ballot):
            return self.position.stay(Accept, [Send(peer, self._sign(accept))]) if self.vote.commit == commit else []
        self.vote = Promise(
            round=commit.round,
            ballot=accept.ballot,
            accepted=accept.ballot,
            commit=commit,
            pledged=commit.digest,
            pledges=accept.pledges,
        )
        return self.position.step(Accept, Ballots.ACCEPTED, [Save(self.vote), Send(peer, self._sign(accept))])

    def is_proof(self, commit: Commit, ballot: int, pledges: Mapping[str, bytes], members: tuple[str, ...]) -> bool:
        """Returns whether enough members pledged `commit` in this ballot, as these signatures show."""
        named = set(pledges) & set(members)
        if ballot < 0 or len(named) < votes_needed(len(members)):
            return False
        body = pledge_body(commit.run, commit.round, ballot, commit.digest)
        return all(self._verify(member, body, pledges[member]) for member in named)

    def _pledge(self, peer: str, accept: Accept, certified: int) -> list[Answer]:
        """`certified`: the earlier ballot in which enough members pledged the commit, -1 for none."""
        commit, vote = accept.commit, self.vote
        digest = commit.digest
        if vote.commit is not None and vote.commit != commit and certified <= vote.accepted:
            if accept.ballot == vote.ballot:
                return self.position.stay(Accept, [Send(peer, vote)])
            self.vote = dataclasses.replace(vote, ballot=accept.ballot, pledged="")
            return self.position.stay(Accept, [Save(self.vote), Send(peer, self.vote)])
        pledge = Send(peer, self._sign_pledge(accept))
        if vote.ballot == accept.ballot and vote.pledged:
            return self.position.stay(Accept, [pledge]) if vote.pledged == digest else []
        self.vote = dataclasses.replace(vote, ballot=accept.ballot, pledged=digest)
        if certified > vote.accepted:
            self.vote = dataclasses.replace(self.vote, accepted=certified, commit=commit, pledges=accept.pledges)
        bound = Ballots.ACCEPTED if self.vote.commit is not None else Ballots.PROMISED
        return self.position.step(Accept, bound, [Save(self.vote), pledge])

    def _sign_pledge(self, accept: Accept) -> Pledge:
        commit, digest = accept.commit, accept.commit.digest
        body = pledge_body(commit.run, commit.round, accept.ballot, digest)
        return Pledge(round=commit.round, ballot=accept.ballot, digest=digest, signature=self._signature(body))

    def _refuse(self, peer: str, accept: Accept, reason: str) -> list[Answer]:
        self.waiting = None
        unfair = self.verdicts[accept.commit.digest] = Objection(reason, lie=True)
        return self.position.stay(Accept, [Refused(peer, accept.round, unfair)])

    def _ask(self, peer: str, accept: Accept) -> list[Answer]:
        """Has the commit judged, once."""
        digest, asked = accept.commit.digest, self._judged.setdefault(peer, set())
        known = any(digest in digests for digests in self._judged.values())
        if not known and len(asked) >= MOST_JUDGED:
            return []
        self._wait(peer, accept, (digest,))
        asked.add(digest)
        return [] if known else self.position.stay(Accept, [Judge(peer, accept.commit)])

    def _wait(self, peer: str, accept: Accept, names: Iterable[str]) -> None:
        self.waiting, self._awaited = (peer, accept), set(names)

    def _lacking(self, share: Share) -> list[tuple[str, Part]]:
        return [(share.peer, part) for part in self.lists[share.root] if part.digest not in self.held]

    def _reject(self, request: Prepare | Accept) -> Reject:
        return Reject(round=request.round, ballot=request.ballot, promised=self.vote.ballot)

    def _sign(self, accept: Accept) -> Vote:
        commit, digest = accept.commit, accept.commit.digest
        body = body_of(commit, accept.ballot)
        return Vote(round=commit.round, ballot=accept.ballot, digest=digest, signature=self._signature(body))
