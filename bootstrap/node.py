"""A bootstrap node as a process: pumps sessions, votes, DHT records and payloads through the leader's and the quorum's machines.

One task owns both machines (`_pump`). Handlers of streams only put events into its queue. Nothing is decided here: who leads and
what is decided follows from the machines, who is there from protocol/round/presence.py. A vote is on disk before it is sent, a
commit before anybody hears of it. Every operator's node hears every peer, so that any of them can lead.

Long because the effects of both machines are carried out here; what decides anything has a module of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from bootstrap import told
from bootstrap.archive import Archive
from bootstrap.bandwidth import Bandwidth
from bootstrap.calls import Calls
from bootstrap.decrees import Decrees
from bootstrap.doorman import Doorman
from bootstrap.fairness import Fairness
from bootstrap.inbox import Inbox
from bootstrap.latest_job import LatestJob, wanted
from bootstrap.links import Links
from bootstrap.news import News
from bootstrap.operators import Dismissed, Operators
from bootstrap.payloads import Payloads
from bootstrap.roster import Heard
from bootstrap.sessions import OUTBOX, Session, Sessions, unexpected
from peer import events
from peer.net.base import Transport
from peer.net.blobs import NODE_COPIES, BlobServer
from peer.net.clock import Clock
from peer.net.dial_back import DialBack
from peer.net.directory import Directory
from peer.net.latency import Latency
from peer.net.token_bucket import TokenBucket
from protocol import identity as identities
from protocol.errors import LocalError, RemoteError, shown
from protocol.identity import Identity, short_peer
from protocol.ledger import access, claims, ranges
from protocol.planning import partition
from protocol.planning.partition import Candidate
from protocol.quorum import paxos_events
from protocol.quorum.paxos import Quorum
from protocol.round import fairness, leader_events, offers, presence
from protocol.round.judging import JudgingJob
from protocol.round.leader import Leader
from protocol.round.leader_events import Question
from protocol.run.manifest import Manifest
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import NODE_DEVICE, Announcement
from protocol.wire.ballot import Accept, Pledge, Prepare, Promise, Reject, Vote
from protocol.wire.claims import Audit, Evaluation, Score
from protocol.wire.commit import Part, Record
from protocol.wire.decree import Motion
from protocol.wire.encoding import Message
from protocol.wire.plan import Plan
from protocol.wire.schema import extend
from protocol.wire.session import (
    Announced,
    Attest,
    ChainFailure,
    ChainReconfig,
    Finished,
    Heartbeat,
    Leave,
    LogRequest,
    Offer,
    Offered,
    Withdraw,
)

POLL_SECONDS = 1.0
PLAN_PAUSE_SECONDS, JUDGE_PAUSE_SECONDS = 5.0, 1.0
"""After a plan that could not be made, and before what could not be judged, such as a payload on its way here, is looked at again."""
HEARD_PER_SECOND, HEARD_AT_ONCE = 200.0, 1000.0
"""Announcements that are looked at, besides the first one of each session."""


class BootstrapNode:
    """See the module's docstring. `initial_peers`: addresses of other bootstrap nodes of the run, as far as known; `answer` makes plans,
    on a thread; `auditors`: peers that it believes before all others."""

    def __init__(
        self,
        manifest: Manifest,
        identity: Identity,
        transport: Transport,
        archive: Archive,
        emit: events.Emit,
        initial_peers: Sequence[str] = (),
        clock: Clock | None = None,
        answer: Callable[[Question], Plan | None] = Question.answer,
        auditors: frozenset[str] = frozenset(),
    ) -> None:
        """Long because a node has its place, its files and its user."""
        self.manifest = manifest
        self.archive = archive
        self._identity = identity
        self._transport = transport
        self._emit = emit
        self._clock = clock or Clock()
        own, addresses = identity.peer_id, tuple(transport.addresses)
        announcement = Announcement(
            run=manifest.run_id, peer=own, addresses=addresses, device=NODE_DEVICE, phase="serving"
        )
        self._directory = Directory(
            manifest,
            identity,
            transport,
            initial_peers,
            announcement,
            self._clock,
            lambda addresses: emit(events.listening(manifest.run_id, addresses)),
        )
        transport.guests.follow(told.refusing(emit, self._directory))
        self._events = Inbox[leader_events.Event | paxos_events.Event](manifest.timing.heartbeat)
        self._operators = Operators(self._directory, transport, archive, initial_peers, lambda: self.quorum, self._told)
        self._links = Links(transport, self._directory, self._vote, self._operators.knocks)
        self._news = News(self._tell_offered, lambda: len(self._sessions.open))
        self.roster = Heard(manifest.run_id, int(1000 * self._clock.wall()))
        self._heard = TokenBucket(HEARD_PER_SECOND, HEARD_AT_ONCE)
        self._ready: dict[str, Candidate] = {}
        self._stays = presence.PresenceRecord()
        self._latency = Latency(transport, self._clock, self._directory.placed, random.Random(identity.peer_id))
        self._payloads = Payloads(
            manifest, transport, archive, self._directory, emit, self._held, self._listed, self._refused
        )
        known, read = self._payloads.notes.known, wanted(archive.blobs.get)
        self._planning = LatestJob[Question, leader_events.Planned](
            "planner",
            lambda question: leader_events.Planned(question, answer(question)),
            self._events.put,
            pause=PLAN_PAUSE_SECONDS,
            failed=lambda question: leader_events.Planned(question, None),
        )
        self._judging = LatestJob[JudgingJob, leader_events.JudgingDone](
            "judge",
            lambda case: leader_events.JudgingDone(case, case.answer(read, known)),
            self._events.put,
            pause=JUDGE_PAUSE_SECONDS,
        )
        self._finished: Finished | None = None
        self._stalled = False
        held, now = list(archive.blobs), self._clock.steady()
        self.leader = Leader(manifest, archive.commits, held, now, auditors)
        doorman = Doorman(self.leader, self._events.hand_in, self._clock)
        self._sessions = Sessions(manifest, self._clock, self._hear, self._opened, transport, doorman)
        self.decrees = Decrees(
            self.leader,
            self._events.hand_in,
            self._spread,
            lambda: self._alive()[1],
            self._told,
        )
        self._fairness = Fairness(self.leader, self._clock, self._events.put, archive.blobs.get, known, self._alive)
        self.quorum = Quorum(
            manifest,
            identity.peer_id,
            archive.commits,
            archive.vote,
            held,
            identity.sign,
            identities.verify,
            now,
        )

    def _alive(self) -> tuple[frozenset[str], frozenset[str]]:
        """The members that give signs of life, and the operators that do."""
        return self.quorum.living, self.quorum.leadership.present

    async def run(self) -> None:
        """Serves until it is cancelled, or the operators dismiss this node. Raises UsageError when the disk refuses."""
        await self._operators.follow(self._links)
        await self._transport.serve(endpoints.SESSION, self._sessions.serve)
        await self._links.serve()
        await Calls(self.archive, self.roster).serve(self._transport)
        await self.decrees.serve(self._transport)
        await self._latency.serve()
        await Bandwidth(self._clock).serve(self._transport)
        await DialBack(self._transport, self._clock).serve()
        named = {endpoints.MANIFEST_NAME: self.manifest.to_bytes()}
        if self.archive.tokenizer is not None:
            named[endpoints.TOKENIZER_NAME] = self.archive.tokenizer
        await self._serve_blobs(named)
        if self.archive.commits:
            self._emit(extend(events.Commit, self.archive.commits[-1]))
        self._forget(await self._payloads.sweep(self.archive.commits))
        self._payloads.complete(itertools.islice(self.archive.commits, len(self.archive.commits)))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump())
                group.create_task(self._watch())
                group.create_task(self._planning.run())
                group.create_task(self._judging.run())
                group.create_task(self._fairness.run())
                group.create_task(self._directory.announce(self._announce_own))
                group.create_task(self._directory.publish())
                group.create_task(self._directory.watch())
                group.create_task(self._news.run())
                group.create_task(self._latency.run(lambda: tuple(self._sessions.open)))
                group.create_task(self._links.run())
                group.create_task(self._operators.watch(self._links))
        except* Dismissed:
            self._told("the operators dismissed this one, and others decide now; it ends, as potluck log show says why")
        finally:
            await self._payloads.aclose()

    def _told(self, text: str) -> None:
        self._emit(events.Warning(text=f"run {shown(self.manifest.name)}: {text}"))

    async def _serve_blobs(self, named: dict[str, bytes]) -> None:
        """Payloads, the run's text, and what has a name."""
        text, coming = self.archive.text, self._payloads.fetcher.coming
        if text is not None:
            named[endpoints.CORPUS_NAME] = text.index
        blobs = BlobServer(self.archive.blobs, coming=coming, named=named, copies=NODE_COPIES)
        if text is not None:
            text.warn = lambda line: self._emit(events.Warning(text=line))
            blobs.add_text(text, self.has_session)
        await blobs.serve(self._transport)

    def has_session(self, peer: str) -> bool:
        """Whether `peer` is connected to us."""
        return peer in self._sessions.open

    # --- the other operators' nodes

    async def _vote(self, node: str, message: Message | Record) -> None:
        match message:
            case Record():
                await self._events.hand_in(paxos_events.Learned(node, message))
            case Prepare() | Promise() | Accept() | Pledge() | Vote() | Reject() | Heartbeat():
                await self._events.hand_in(paxos_events.Heard(node, message))
            case LogRequest(after=after):
                if node in self._links.to:
                    self._send_log(self._links.to[node], after)
            case Evaluation():
                await self._events.hand_in(leader_events.Received(node, message))
            case Motion():
                with contextlib.suppress(
                    RemoteError
                ):  # its node knew other members, perhaps, and is not to be cut off for it
                    await self.decrees.hear(message)
            case _:
                raise unexpected(node, "votes", message)

    def _spread(self, motion: Motion) -> None:
        """Tells the other nodes what an operator has signed."""
        for link in self._links.to.values():
            link.post(encoding.encode(motion))

    # --- the peers

    def _announce_own(self, sealed: bytes) -> None:
        self.roster.take(self._transport.peer_id, sealed)

    def _opened(self, session: Session) -> None:
        """Says what the newest round is, so that the peer knows how far it has to read, and that the run is over, if it is."""
        if self.archive.records:
            session.post(self.archive.records[-1])
        self._tell_end(session)

    def _tell_end(self, session: Session) -> None:
        """Again with every answer about the log, since a message may find no place."""
        if self._finished is not None:
            session.post(encoding.encode(self._finished))

    async def _hear(self, peer: str, session: Session, message: Message) -> None:
        if isinstance(message, Leave):
            session.leaves = True
            self._lost(peer)
            await self._events.hand_in(leader_events.Gone(peer, leaves=True))
            return
        if isinstance(message, Announced):
            if not session.leaves and session.may_announce(self._heard, self._clock.steady()):
                announcement = self.roster.take(peer, message.sealed)
                if announcement is not None:
                    self._directory.learn([announcement])
                    self._announced(peer, announcement)
            return
        if (
            not session.leaves and peer not in self._ready and peer in self._directory.known
        ):  # it was gone, in the same session
            self._announced(peer, self._directory.known[peer])
        match message:
            case Offer() | Attest() | Withdraw() | ChainFailure() | ChainReconfig():
                if isinstance(message, Attest) and not offers.is_sound_attestation(self.manifest, message):
                    raise RemoteError(peer, f"session of {short_peer(peer)}: attests what is no shard; it was closed")
                if isinstance(message, Attest) and self._is_news(session, message):
                    self._emit(events.Attest(peer=peer, round=message.round, digests=message.digests))
                await self._events.hand_in(leader_events.Received(peer, message))
            case Evaluation() if peer in self.leader.witnesses.auditors:
                await self._events.hand_in(leader_events.Received(self._identity.peer_id, self._signed(message)))
            case Evaluation() | Score() | Audit():
                await self._events.hand_in(leader_events.Received(peer, message))
            case LogRequest(after=after):
                self._send_log(session, after)
                self._tell_end(session)
            case Heartbeat():
                phase = "stalled" if self._stalled else "leading" if self.quorum.leads else "following"
                session.post(encoding.encode(Heartbeat(phase=phase, round=self.leader.round)))
            case _:
                raise unexpected(peer, "session", message)

    def _signed(self, found: Evaluation) -> Evaluation:
        """What our auditor has found, as we say it; the other nodes hear of it."""
        said = claims.signed(self._identity, self.leader.state.due.of, found)
        for link in self._links.to.values():
            link.post(encoding.encode(said))
        return said

    def _is_news(self, session: Session, attest: Attest) -> bool:
        return abs(attest.round - self.leader.round + 1) <= 2 and session.may_tell(attest.round, self._clock.steady())

    def _send_log(self, session: Session, after: int) -> None:
        session.post_records(itertools.islice(self.archive.since(after), OUTBOX // 2), self._clock.steady())

    async def _watch(self) -> None:
        """Turns silences into events."""
        while True:
            now, heard, timing = self._clock.steady(), self._sessions.heard, self.manifest.timing
            for peer in presence.gone(self._ready, heard, timing, now):
                self._lost(peer)
                if peer not in self._sessions.open:
                    self._directory.lost(peer)
                self._events.put(leader_events.Gone(peer))
            self._sessions.forget(self._ready)
            known, there = self._directory.known, (self._ready, self._sessions.open, self._links.to)
            for peer in [p for p in known if not any(p in some for some in there)]:
                self._directory.lost(peer)
            await self._sessions.dismiss()
            absent = presence.absent(self._ready, self._sessions.open, heard, timing, now)
            for peer in absent:
                self._stays.lost(peer)
            self._events.put(leader_events.Tick(absent, self.quorum.leadership.present))
            self._events.put(paxos_events.Tick(not self.quorum.leads and fairness.is_due(self.leader, now)))
            await asyncio.sleep(POLL_SECONDS)

    def _lost(self, peer: str) -> None:
        """A peer is there no more."""
        if self._ready.pop(peer, None) is not None:
            self._stays.lost(peer)
            self.roster.remove(peer)
            self._emit(events.Gone(peer=peer))

    def _announced(self, peer: str, announcement: Announcement) -> None:
        """A peer with a session says this of itself."""
        stays = round(self._stays.of(peer), 2)
        where = ranges.range_of(self._transport.seen_at(peer))
        candidate = dataclasses.replace(partition.candidate(announcement), presence=stays, range=where)
        known = self._ready.get(peer)
        if known != candidate:
            self._ready[peer] = candidate
            self._events.put(leader_events.Ready(candidate))
            if told.is_news(known, candidate):
                self._emit(extend(events.Ready, announcement))

    # --- the machines

    async def _pump(self) -> None:
        await self._directory.connect()
        while True:
            entry = await self._events.get()
            entry.finish(await self._tell(entry.event))

    async def _tell(self, event: leader_events.Event | paxos_events.Event) -> Exception | None:
        """Gives an event to its machine, and then those that its effects bring about: in their order, each when all effects of
        the one before are done, or an older effect would undo what a newer one said. What a peer's message raised, if it did."""
        todo, failure = deque([event]), None
        while todo:
            event = todo.popleft()
            if self._is_gone(event):
                continue
            if isinstance(event, paxos_events.Event):
                todo.extend(await self._tell_quorum(event))
                continue
            try:
                self._tell_leader(event, todo)
            except LocalError:
                raise
            except Exception as error:
                if not isinstance(event, leader_events.Received):
                    raise
                failure = error
        return failure

    def _tell_leader(self, event: leader_events.Event, following: deque[Any]) -> None:
        for effect in self.leader.handle(event, self._clock.steady()):
            match effect:
                case leader_events.Fetch(peer, part):
                    self._payloads.fetch((peer,), part, peer, self.leader.round)
                case leader_events.StoreList(parts):
                    self._payloads.keep(parts, self.leader.round)
                case leader_events.AnnounceShare(round, share):
                    self._news.add(round, share)
                case leader_events.MakePlan(question):
                    self._planning.ask(question)
                case leader_events.Judge(case):
                    self._judging.ask(case)
                case leader_events.Propose(commit):
                    following.append(paxos_events.Proposed(access.dated(commit, self._clock.wall())))
                case leader_events.Send(peers, message, first):
                    if first and isinstance(message, ChainReconfig):
                        self._emit(extend(events.ChainReconfigured, message))
                    self._sessions.post(peers, message)
                case leader_events.Done(round):
                    self._finish(round)
                case _:
                    self._emit(told.of_round(effect))

    async def _tell_quorum(self, event: paxos_events.Event) -> list[leader_events.Event | paxos_events.Event]:
        following: list[leader_events.Event | paxos_events.Event] = []
        if isinstance(event, paxos_events.Proposed):
            ours = self.quorum.of_ours(event.commit)
            await asyncio.to_thread(lambda: ours.digest)  # it is kept there, and long work for many replicas
            event = paxos_events.Proposed(ours)
        for effect in self.quorum.handle(event, self._clock.steady()):
            match effect:
                case paxos_events.Save(vote):
                    await asyncio.to_thread(self.archive.save_vote, vote)
                case paxos_events.Send(peer, message):
                    if peer in self._links.to:
                        self._links.to[peer].post(encoding.encode(message))
                case paxos_events.SendLog(peer, after):
                    if peer in self._links.to:
                        self._send_log(self._links.to[peer], after)
                case paxos_events.Fetch(holders, part):
                    self._payloads.fetch(holders, part, holders[-1], self.leader.round)
                case paxos_events.FetchList(holders, share):
                    self._payloads.fetch_list(holders, share, self.leader.round)
                case paxos_events.Judge(peer, commit):
                    self._fairness.ask(peer, commit)
                case paxos_events.Refused() | paxos_events.Skipped():
                    self._emit(told.against(effect))
                case paxos_events.Append(record):
                    await asyncio.to_thread(self.archive.append, record)
                    following.append(paxos_events.Appended(record))
                case paxos_events.Decided(record):
                    following.append(leader_events.Decided(record.commit))
                    self._forget(await self._payloads.settle(record.commit))
                    self._decided(record)
                    await self._operators.follow(self._links)
                case paxos_events.Leads(leads):
                    self._emit(events.Leads(leads=leads))
                    following.append(leader_events.Lead(leads))
                case paxos_events.Stalled(missing):
                    self._stall(missing)
        return following

    def _decided(self, record: Record) -> None:
        if record.commit.plan is not None:
            self._directory.planned(record.commit.plan)
        self._emit(extend(events.Commit, record.commit))
        for warning in told.found(self.leader.standing.audits, record.commit):
            self._emit(warning)
        self._fairness.decided(record.commit)
        self._stays.begin(self._ready)
        self._sessions.post_all(self.archive.records[record.commit.round])
        self._payloads.complete([record.commit])

    def _finish(self, round: int) -> None:
        self._emit(told.finished(self.manifest.model, round, self.leader.attestations.majority(round)))
        self._finished = Finished(round=round)
        self._sessions.post_all(encoding.encode(self._finished))

    def _stall(self, missing: tuple[str, ...]) -> None:
        self._stalled = bool(missing)
        if missing and not self._operators.is_named:
            return  # it waits for something else, and says so (bootstrap/operators.py)
        self._emit(told.stalled(len(self.quorum.members), missing, self.quorum.round))

    # --- payloads

    def _forget(self, gone: set[str]) -> None:
        """These are in the archive no more: an offer of them has to be fetched again. Before any other event is looked at."""
        self.leader.offers.held -= gone
        self.quorum.acceptor.held -= gone

    def _is_gone(self, event: object) -> bool:
        """Whether what has come went again before the machines hear that it came."""
        match event:
            case paxos_events.Held(name) | paxos_events.Listed(name) | leader_events.Held(name):
                return not self.archive.blobs.has(name)
        return False

    def _held(self, digest: str) -> None:
        """A payload is in the archive: the machines hear of it."""
        self._events.put(paxos_events.Held(digest))
        self._events.put(leader_events.Held(digest))

    def _listed(self, root: str, parts: tuple[Part, ...]) -> None:
        """The same of a list of parts."""
        self._events.put(paxos_events.Listed(root, parts))
        self._events.put(leader_events.Held(root))

    def _tell_offered(self, offered: Offered) -> None:
        peers = told.in_turn(self._sessions.open, self._ready)
        self._sessions.post((p for p in peers if not self._sessions.open[p].is_crowded), offered)

    def _refused(self, peer: str, withdraw: Withdraw) -> None:
        self._events.put(leader_events.Received(peer, withdraw))
