"""How a commit becomes decided: single-decree Paxos for each round, among the members that the commit before names.

A round's *members* (1, 3 or 5 bootstrap nodes) vote; a commit is decided once a majority has accepted it in one ballot, and the
signatures of those votes are the proof that travels with it (`commit.Record`). One machine holds both parts of a node:

    acceptor   Prepare(b), b >= promised        promise b, durable, then answer with what was accepted before
               Accept(b, c), b >= promised      once every payload of c is held: accept, durable, then answer with a signed vote
               anything lower                   Reject
    proposer   idle       -> preparing          a commit is proposed (or an accepted one is undecided) and this node leads
               preparing  -> accepting          a majority promised: the accepted commit of the highest ballot, else our own
               accepting  -> appending          a majority voted: the record goes to the log
               any        -> idle               rejected (again later, with a higher ballot), or another node leads

Ballot 0 of a round belongs to the leader of the round before and needs no promises, since no lower ballot exists: a round
in calm weather costs one exchange. Ballot b > 0 belongs to member b mod n. A proposer is its own first acceptor, so a ballot that
was used is on disk and is never used again for another commit. A single member's vote is the log record itself.

Who leads decides nothing but who proposes: the leader of the round before while it gives signs of life, else the first
member that does; a leader that is silent for a lease (`gone_after`) is replaced. An operator's node that is not a member
takes the place of a member that was silent for ten leases, by the commit's `members`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from protocol.run.manifest import Manifest
from protocol.wire.ballot import Accept, Prepare, Promise, Reject, Vote
from protocol.wire.commit import Commit, Part, Record, is_decided, vote_body
from protocol.wire.session import Heartbeat, LogRequest

RETRY_SECONDS = 1.0
"""Unanswered requests are sent again after so long; a rejected proposer waits so long times one plus its rank."""
REPLACE_LEASES = 10


@dataclass(frozen=True, slots=True)
class Proposed:
    """Event: the leader machine wants this commit (its `leader` and `members` are filled in here)."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Heard:
    """Event: another operator's node sent this."""

    peer: str
    message: Prepare | Promise | Accept | Vote | Reject | Heartbeat


@dataclass(frozen=True, slots=True)
class Learned:
    """Event: `peer` sent a record; the signatures of its voters are right."""

    peer: str
    record: Record


@dataclass(frozen=True, slots=True)
class Held:
    """Event: a payload is durable here."""

    digest: str


@dataclass(frozen=True, slots=True)
class Appended:
    """Event: an `Append` is durable."""

    record: Record


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: time passed."""


@dataclass(frozen=True, slots=True)
class Save:
    """Effect: make this vote durable before anything that follows it is done."""

    vote: Promise


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: to another operator's node, if it can be reached; it is sent again while it matters."""

    peer: str
    message: Prepare | Promise | Accept | Vote | Reject | Heartbeat | LogRequest


@dataclass(frozen=True, slots=True)
class SendLog:
    """Effect: send the log's records after round `after`."""

    peer: str
    after: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Effect: get this payload from one of `holders`, then send `Held`."""

    holders: tuple[str, ...]
    part: Part


@dataclass(frozen=True, slots=True)
class Append:
    """Effect: make this record the durable next one of the log, then send `Appended`."""

    record: Record


@dataclass(frozen=True, slots=True)
class Decided:
    """Effect: this commit is the round's, for ever, and in the log."""

    record: Record


@dataclass(frozen=True, slots=True)
class Leads:
    """Effect: whether this node leads from now on."""

    leads: bool


@dataclass(frozen=True, slots=True)
class Stalled:
    """Effect: too few members give signs of life to decide anything; `missing` is empty when it goes on."""

    missing: tuple[str, ...]


def problem(manifest: Manifest, head: Commit | None, record: Record) -> str | None:
    """Why `record`, whose signatures are right, cannot come next after `head` in the log; None if it can."""
    commit, round = record.commit, 0 if head is None else head.round + 1
    members = manifest.first_members if head is None else head.members
    named = set(commit.members)
    if commit.run != manifest.run_id:
        return "is of another run"
    if commit.round != round:
        return f"is not the one of round {round}"
    if commit.parent != (head.digest if head else manifest.run_id):
        return "does not follow the one before it"
    if not (named <= set(manifest.operators) and len(named) == len(commit.members) == manifest.quorum):
        return "names other members than operators of the manifest"
    if commit.leader not in members:
        return "was proposed by a node that is not a member"
    if not is_decided(record, members):
        return "lacks the votes of a majority"
    return None


Event = Proposed | Heard | Learned | Held | Appended | Tick
Effect = Save | Send | SendLog | Fetch | Append | Decided | Leads | Stalled


class Quorum:
    """See the module's docstring. `handle` is the only entry; `now` is in seconds on any steady clock.

    `head`: the log's last commit. `vote`: the durable vote. `held`: digests of the payloads that are durable. `sign` and
    `verify` (peer, body, signature) are those of the node's and of others' identities.
    """

    def __init__(
        self,
        manifest: Manifest,
        peer: str,
        head: Commit | None,
        vote: Promise | None,
        held: Iterable[str],
        sign: Callable[[bytes], bytes],
        verify: Callable[[str, bytes, bytes], bool],
        now: float,
    ) -> None:
        self.manifest = manifest
        self.peer = peer
        self.head = head
        self.leads = False
        self._sign = sign
        self._verify = verify
        self._held = set(held)
        self._now = now
        self._heard = dict.fromkeys(manifest.operators, now)
        self._alive = set(manifest.operators)
        self._vote = vote if vote is not None and vote.round >= self.round else Promise(round=self.round)
        self._waiting: tuple[str, Accept] | None = None
        self._missing: tuple[str, ...] = ()
        self._beat_at = float("-inf")
        self._highest = -1
        self._phase = "idle"
        self._mine: Commit | None = None
        self._value: Commit | None = None
        self._ballot = -1
        self._promises: dict[str, Promise] = {}
        self._votes: dict[str, bytes] = {}
        self._retry_at = float("-inf")

    @property
    def round(self) -> int:
        """The round that is to be decided."""
        return 0 if self.head is None else self.head.round + 1

    @property
    def members(self) -> tuple[str, ...]:
        """Who decides it."""
        return self.manifest.first_members if self.head is None else self.head.members

    @property
    def leader(self) -> str | None:
        """Who leads as far as this node knows: see the module's docstring. None where no member gives signs of life."""
        before = self._before()
        if before in self.members and before in self._alive:
            return before
        return next((m for m in self.members if m in self._alive), None)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """One step of the machine."""
        self._now = now
        out: list[Effect] = []
        lease = self.manifest.timing.gone_after
        if isinstance(event, Heard | Learned) and event.peer in self._heard:
            self._heard[event.peer] = now
        self._alive = {o for o, at in self._heard.items() if o == self.peer or now - at < lease}
        match event:
            case Proposed(commit) if self.leads and self._mine is None and commit.round == self.round:
                self._mine = dataclasses.replace(commit, leader=self.peer, members=self._next_members())
            case Heard(peer, message):
                self._hear(peer, message, out)
            case Learned(peer, record):
                self._learn(peer, record, out)
            case Held(digest):
                self._held.add(digest)
                if self._waiting is not None:
                    peer, accept = self._waiting
                    self._on_accept(peer, accept, out, fetch=False)
            case Appended(record):
                self._begin(record, out)
            case _:
                pass
        self._watch(out)
        self._advance(out)
        return out

    # --- signs of life

    def _before(self) -> str:
        """The leader of the round before, to whom ballot 0 belongs."""
        return self.members[0] if self.head is None else self.head.leader

    def _watch(self, out: list[Effect]) -> None:
        leads = self.leader == self.peer
        if leads != self.leads:
            self.leads = leads
            out.append(Leads(leads))
            if not leads:
                self._rest()
        alive = [m for m in self.members if m in self._alive]
        missing = () if 2 * len(alive) > len(self.members) else tuple(m for m in self.members if m not in alive)
        if missing != self._missing:
            self._missing = missing
            out.append(Stalled(missing))
        if self._now - self._beat_at >= self.manifest.timing.heartbeat:
            self._beat_at = self._now
            beat = Heartbeat(phase="leading" if leads else "following", round=self.round)
            out += [Send(o, beat) for o in self.manifest.operators if o != self.peer]

    def _next_members(self) -> tuple[str, ...]:
        """The members of the round after this one."""
        silent = REPLACE_LEASES * self.manifest.timing.gone_after
        spares = [o for o in self.manifest.operators if o not in self.members and o in self._alive]
        return tuple(
            spares.pop(0) if spares and m != self.peer and self._now - self._heard[m] >= silent else m
            for m in self.members
        )

    # --- the acceptor

    def _hear(self, peer: str, message: object, out: list[Effect]) -> None:
        match message:
            case Heartbeat(round=round):
                if round > self.round:
                    out.append(Send(peer, LogRequest(after=self.round - 1)))
                elif round < self.round:
                    out.append(SendLog(peer, round - 1))
            case Prepare() if self._current(peer, message, out):
                self._on_prepare(peer, message, out)
            case Accept() if self._current(peer, message, out):
                self._on_accept(peer, message, out)
            case Promise() if message.round == self.round and peer in self.members:
                self._on_promise(peer, message, out)
            case Vote() if message.round == self.round and peer in self.members:
                self._on_vote(peer, message, out)
            case Reject() if message.round == self.round and message.ballot == self._ballot:
                self._highest = max(self._highest, message.promised)
                if message.promised > self._ballot and self._phase in ("preparing", "accepting"):
                    self._phase = "idle"
                    self._retry_at = self._now + RETRY_SECONDS * (1 + self.members.index(self.peer))
            case _:
                pass

    def _current(self, peer: str, message: Prepare | Accept, out: list[Effect]) -> bool:
        """Whether this round is to be decided here and the ballot is the sender's; whoever is behind is helped."""
        if message.round < self.round:
            out.append(SendLog(peer, message.round - 1))
        elif message.round > self.round:
            out.append(Send(peer, LogRequest(after=self.round - 1)))
        elif self.peer in self.members and self._vote.round == self.round:
            return self._owner(message.ballot) == peer
        return False

    def _owner(self, ballot: int) -> str:
        return self._before() if ballot == 0 else self.members[ballot % len(self.members)]

    def _send(self, peer: str, message: Promise | Vote | Reject, out: list[Effect]) -> None:
        """To a proposer; to ourselves at once."""
        if peer == self.peer:
            self._hear(peer, message, out)
        else:
            out.append(Send(peer, message))

    def _on_prepare(self, peer: str, prepare: Prepare, out: list[Effect]) -> None:
        if prepare.ballot < self._vote.ballot:
            self._send(peer, Reject(round=self.round, ballot=prepare.ballot, promised=self._vote.ballot), out)
            return
        if prepare.ballot > self._vote.ballot:
            self._save(dataclasses.replace(self._vote, ballot=prepare.ballot), out)
        self._send(peer, self._vote, out)

    def _on_accept(self, peer: str, accept: Accept, out: list[Effect], fetch: bool = True) -> None:
        commit = accept.commit
        if accept.ballot < self._vote.ballot:
            self._waiting = None
            self._send(peer, Reject(round=self.round, ballot=accept.ballot, promised=self._vote.ballot), out)
            return
        own = Record(commit=commit, ballot=accept.ballot, votes=dict.fromkeys(self.members, b""))
        if problem(self.manifest, self.head, own) is not None:
            return
        lacking = [p for c in commit.contributions for s in c.shares for p in s.parts if p.digest not in self._held]
        if lacking:
            self._waiting = (peer, accept)
            senders = {p.digest: s.peer for c in commit.contributions for s in c.shares for p in s.parts}
            if fetch:
                out += [Fetch((peer, senders[p.digest]), p) for p in lacking]
            return
        self._waiting = None
        if (self._vote.accepted, self._vote.ballot) != (accept.ballot, accept.ballot):
            self._save(Promise(round=self.round, ballot=accept.ballot, accepted=accept.ballot, commit=commit), out)
        elif self._vote.commit != commit:
            return
        digest = commit.digest
        body = vote_body(commit.run, self.round, accept.ballot, digest)
        vote = Vote(round=self.round, ballot=accept.ballot, digest=digest, signature=self._sign(body))
        self._send(peer, vote, out)

    def _save(self, vote: Promise, out: list[Effect]) -> None:
        self._vote = vote
        if len(self.members) > 1:
            out.append(Save(vote))

    # --- the proposer

    def _rest(self) -> None:
        """Nothing is proposed."""
        self._phase, self._mine, self._value, self._ballot = "idle", None, None, -1
        self._promises, self._votes = {}, {}
        self._retry_at = float("-inf")

    def _majority(self, peers: Iterable[str]) -> bool:
        return 2 * len(set(peers) & set(self.members)) > len(self.members)

    def _advance(self, out: list[Effect]) -> None:
        if not self.leads or self._vote.round != self.round or self._now < self._retry_at:
            return
        if self._phase == "idle" and (self._mine is not None or self._vote.commit is not None):
            self._promises, self._votes = {}, {}
            if self._vote.ballot < 0 and self._before() == self.peer and self._mine is not None:
                self._ballot, self._value, self._phase = 0, self._mine, "accepting"
            else:
                size, rank = len(self.members), self.members.index(self.peer)
                above = max(self._vote.ballot, self._highest, 0)
                self._ballot = next(b for b in range(above + 1, above + 1 + size) if b % size == rank)
                self._phase = "preparing"
            self._ask(out)
        elif self._phase in ("preparing", "accepting"):
            self._ask(out)

    def _ask(self, out: list[Effect]) -> None:
        """Asks every member that has not answered yet, ourselves first: what we send is on our disk before."""
        self._retry_at = self._now + RETRY_SECONDS
        phase, round = self._phase, self.round
        request: Prepare | Accept
        if phase == "preparing":
            request, answered = Prepare(round=round, ballot=self._ballot), set(self._promises)
        else:
            assert self._value is not None
            request, answered = Accept(round=round, ballot=self._ballot, commit=self._value), set(self._votes)
        if self.peer not in answered:
            self._hear(self.peer, request, out)
        if self._phase == phase and self._vote.ballot >= self._ballot:
            out += [Send(m, request) for m in self.members if m != self.peer and m not in answered]

    def _on_promise(self, peer: str, promise: Promise, out: list[Effect]) -> None:
        if self._phase != "preparing" or promise.ballot != self._ballot:
            return
        self._promises[peer] = promise
        if not self._majority(self._promises):
            return
        best = max(self._promises.values(), key=lambda p: p.accepted)
        self._value = best.commit if best.commit is not None else self._mine
        self._phase = "accepting" if self._value is not None else "idle"
        if self._value is not None:
            self._ask(out)

    def _on_vote(self, peer: str, vote: Vote, out: list[Effect]) -> None:
        if self._phase != "accepting" or vote.ballot != self._ballot or self._value is None:
            return
        body = vote_body(self._value.run, self.round, vote.ballot, self._value.digest)
        if vote.digest != self._value.digest or not self._verify(peer, body, vote.signature):
            return
        self._votes[peer] = vote.signature
        if self._majority(self._votes):
            self._phase = "appending"
            out.append(Append(Record(commit=self._value, ballot=self._ballot, votes=dict(sorted(self._votes.items())))))

    # --- the decision

    def _learn(self, peer: str, record: Record, out: list[Effect]) -> None:
        if record.commit.round > self.round:
            out.append(Send(peer, LogRequest(after=self.round - 1)))
        elif self._phase != "appending" and problem(self.manifest, self.head, record) is None:
            self._phase = "appending"
            out.append(Append(record))

    def _begin(self, record: Record, out: list[Effect]) -> None:
        commit = record.commit
        self.head = commit
        if self._vote.round < self.round:
            self._vote = Promise(round=self.round)
        self._waiting, self._highest = None, -1
        self._rest()
        out.append(Decided(record))
        if commit.leader == self.peer:
            out += [SendLog(o, commit.round - 1) for o in self.manifest.operators if o != self.peer]
