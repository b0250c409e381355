"""A bootstrap node: connects sessions, votes, DHT records and payloads to the leader's and the quorum's state machines.

One task (`_pump`) owns both machines; stream handlers only queue events for it. A vote is on disk before it is sent, a
commit before any peer hears of it. Every operator's node hears every peer, so that any of them can lead.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from bootstrap.archive import Archive
from bootstrap.background_jobs import AggregateMaker, LatestJob, ProposalChecker, require
from bootstrap.calls import AnnouncementTable, DecreeHandler, LogAndRosterHandler
from bootstrap.payloads import Payloads
from bootstrap.sessions import (
    OUTBOX,
    AdmissionControl,
    Dismissed,
    OfferAnnouncer,
    Operators,
    Said,
    Session,
    Sessions,
    unexpected,
)
from bootstrap.states import StateKeeper, StoreState
from peer import events
from peer.net.bandwidth import BandwidthServer
from peer.net.base import Clock, Transport
from peer.net.blobs import NODE_COPIES, BlobServer
from peer.net.directory import Directory
from peer.net.latency import Latency
from peer.net.rate_limits import TokenBucket
from peer.net.reach import DialBackServer
from peer.net.relay import RelayServer
from protocol import identity as identities
from protocol.errors import LocalError, RemoteError, shown
from protocol.identity import Identity, short_peer
from protocol.ledger import access, aggregation, claims, ranges
from protocol.planning import partition
from protocol.planning.partition import Candidate
from protocol.quorum import paxos_events
from protocol.quorum.paxos import Quorum
from protocol.quorum.paxos_events import Refused, Skipped
from protocol.round import fairness, leader_events, offers, presence
from protocol.round.accusations import Accusation
from protocol.round.judging import JudgingJob
from protocol.round.leader import Leader
from protocol.round.leader_events import Moved, Question, Report, Resting
from protocol.run import layout
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import NODE_DEVICE, Announcement
from protocol.wire.ballot import Accept, Pledge, Prepare, Promise, Reject, Vote
from protocol.wire.claims import Evaluation, Score
from protocol.wire.commit import Commit, Record
from protocol.wire.decree import Motion
from protocol.wire.encoding import Message, MessageHead, RecordHead
from protocol.wire.plan import Plan
from protocol.wire.schema import extend
from protocol.wire.session import (
    Aggregated,
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

log = logging.getLogger("potluck.node")
T = TypeVar("T")


@dataclass(slots=True)
class QueuedEvent(Generic[T]):
    """An event; `done` is resolved once it is handled, where its submitter waits for that."""

    event: T
    done: asyncio.Future[None] | None = None

    def finish(self, error: Exception | None = None) -> None:
        """Marks the event as handled, or as failed with `error`."""
        waits = self.done is not None and not self.done.done()
        if error is not None and not waits:
            log.error("a message could not be dealt with, and its sender is gone", exc_info=error)
        elif self.done is not None and waits:
            self.done.set_result(None) if error is None else self.done.set_exception(error)


class EventQueue(Generic[T]):
    """A node's events in order of arrival.

    A handler that submits a peer's message waits up to `patience` seconds until it is handled, so each peer has at
    most one event queued. What a machine raises for it is raised in that handler and ends that stream only.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._queue: asyncio.Queue[QueuedEvent[T]] = asyncio.Queue()
        self.get = self._queue.get

    def put(self, event: T) -> None:
        """Queues an event of this node itself."""
        self._queue.put_nowait(QueuedEvent(event))

    async def submit(self, event: T) -> None:
        """Queues a remote event and waits until it is handled. Raises what the handling raised."""
        done = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(QueuedEvent(event, done))
        if (await asyncio.wait({done}, timeout=self._patience))[0]:
            done.result()
        else:
            done.cancel()


POLL_SECONDS = 1.0
RELAY_REPORT_SECONDS = 60.0
PLAN_RETRY_SECONDS, JUDGE_RETRY_SECONDS = 5.0, 1.0
"""Pause before a failed plan or scoring is tried again, for example until a missing payload has arrived."""
ANNOUNCEMENTS_PER_SECOND, ANNOUNCEMENT_BURST = 200.0, 1000.0
"""Rate limit of all announcements together, except for the first one of each session."""


class Work(NamedTuple):
    """The computations of a node; called on threads.

    plan: a plan
    digest: of a shard after a round by the log, None where that is not cheap
    store_state: see bootstrap/states.py
    """

    plan: Callable[[Question], Plan | None] = Question.answer
    digest: Callable[[str, int], str | None] = lambda shard, round: None
    store_state: StoreState = lambda shard, after, round, is_over: None


WORK = Work()
"""What every node has: plans without a relay's limit, no digests, and no states, so that its archive keeps all."""


class BootstrapNode:
    """See the module's docstring.

    initial_peers: known addresses of other bootstrap nodes of the run
    auditors: peers whose evaluations this node trusts above all others
    """

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        archive: Archive,
        emit: events.Emit,
        initial_peers: Sequence[str] = (),
        clock: Clock | None = None,
        auditors: frozenset[str] = frozenset(),
        work: Work = WORK,
    ) -> None:
        self.manifest = manifest = archive.manifest
        self.archive = archive
        self._identity = identity
        self._transport = transport
        self._emit = emit
        self._clock = clock = clock or Clock()
        own, held, now = identity.peer_id, list(archive.blobs), clock.steady()
        self.leader = Leader(manifest, archive.commits, held, now, auditors)
        self.quorum = quorum = Quorum(
            manifest, own, archive.commits, archive.vote, held, identity.sign, identities.verify, now
        )
        addresses = tuple(transport.addresses)
        announcement = Announcement(
            run=manifest.run_id, peer=own, addresses=addresses, device=NODE_DEVICE, phase="serving"
        )
        self._directory = Directory(
            manifest, identity, transport, initial_peers, announcement, clock, self._say_addresses
        )
        transport.guests.follow(self._refused)
        self._events = EventQueue[leader_events.Event | paxos_events.Event](manifest.timing.heartbeat)
        self.operators = Operators(
            self._directory, transport, archive, initial_peers, quorum, self._on_vote, self._tell_operator
        )
        self._offers = OfferAnnouncer(self._send_offered, lambda: len(self._sessions.open))
        self.roster = AnnouncementTable(manifest.run_id, int(1000 * clock.wall()))
        self._announcements = TokenBucket(ANNOUNCEMENTS_PER_SECOND, ANNOUNCEMENT_BURST)
        self._ready: dict[str, Candidate] = {}
        self._stays = presence.PresenceRecord()
        self._latency = Latency(transport, clock, self._directory.placed, random.Random(own))
        self._payloads = Payloads(transport, archive, self._directory, emit, self._events.put)
        self._states = StateKeeper(archive, self._payloads, work.store_state, self._tell_operator)
        known, read = self._payloads.notes.known, require(archive.blobs.get)
        self._planning = LatestJob[Question, leader_events.Planned](
            "planner",
            lambda question: leader_events.Planned(question, work.plan(question)),
            self._events.put,
            retry_seconds=PLAN_RETRY_SECONDS,
            failed=lambda question: leader_events.Planned(question, None),
        )
        self._judging = LatestJob[JudgingJob, leader_events.JudgingDone](
            "judge",
            lambda case: leader_events.JudgingDone(case, case.answer(read, known)),
            self._events.put,
            retry_seconds=JUDGE_RETRY_SECONDS,
        )
        self._recomputing = LatestJob[leader_events.Recompute, leader_events.Recomputed](
            "recompute", lambda asked: asked.answer(work.digest), self._events.put, retry_seconds=JUDGE_RETRY_SECONDS
        )
        maker = AggregateMaker(manifest, archive.blobs)
        self._aggregating = LatestJob[Commit, Aggregated](
            "aggregates", maker.make, self._aggregated, retry_seconds=JUDGE_RETRY_SECONDS
        )
        self._newest: Aggregated | None = None
        self._finished: Finished | None = None
        self._stalled = False
        admission_control = AdmissionControl(self.leader, self._events.submit, clock)
        self._sessions = Sessions(manifest, clock, self._on_message, self._opened, transport, admission_control)
        self.decrees = DecreeHandler(
            self.leader,
            self._events.submit,
            self.operators.broadcast,
            lambda: quorum.leadership.present,
            self._tell_operator,
        )
        self._proposals = ProposalChecker(
            self.leader, quorum, clock, self._events.put, archive.blobs.get, known, work.digest, maker.make
        )

    async def serve(self, relay_bps: int = 0) -> None:
        """Runs the node, and a relay of at most `relay_bps` bits a second for its peers, until it is cancelled.

        Raises UsageError when the disk refuses.
        """
        self._say_addresses(self._transport.addresses)
        if not relay_bps:
            return await self.run()
        relay = RelayServer(self._transport, relay_bps, self.has_session)
        await relay.serve()
        reporting = asyncio.create_task(self._report_relay(relay))
        try:
            await self.run()
        finally:
            reporting.cancel()
            relay.close()

    async def run(self) -> None:
        """Serves until it is cancelled, or the operators dismiss this node. Raises UsageError when the disk refuses."""
        transport, archive, named = self._transport, self.archive, {endpoints.MANIFEST_NAME: self.manifest.to_bytes()}
        await self.operators.follow()
        await transport.serve(endpoints.SESSION, self._sessions.serve)
        await self.operators.serve()
        await LogAndRosterHandler(archive, self.roster).serve(transport)
        await self.decrees.serve(transport)
        await self._latency.serve()
        await BandwidthServer(self._clock).serve(transport)
        await DialBackServer(transport, self._clock).serve()
        if archive.tokenizer is not None:
            named[endpoints.TOKENIZER_NAME] = archive.tokenizer
        await self._serve_blobs(named)
        if archive.commits:
            self._emit(extend(events.Commit, archive.commits[-1]))
            self._make_aggregates(archive.commits[-1])
        self._forget(await self._payloads.sweep(archive.commits))
        self._payloads.complete(range(archive.states.begin + 1, len(archive.commits)))
        own = transport.peer_id
        tasks = (
            self._pump(),
            self._watch(),
            self._planning.run(),
            self._judging.run(),
            self._recomputing.run(),
            self._aggregating.run(),
            self._states.run(),
            self._proposals.run(),
            self._directory.announce(lambda sealed: self.roster.add(own, sealed)),
            self._directory.publish(),
            self._directory.watch(),
            self._offers.run(),
            self._latency.run(lambda: tuple(self._sessions.open)),
            self.operators.run(),
            self.operators.watch(),
        )
        try:
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    group.create_task(task)
        except* Dismissed:
            self._tell_operator(
                "the operators dismissed this one, and others decide now; it ends, as potluck log show says why"
            )
        finally:
            await self._payloads.aclose()

    async def _serve_blobs(self, named: dict[str, bytes]) -> None:
        """Serves payloads, the run's text, and the files in `named`."""
        text, coming = self.archive.text, self._payloads.fetcher.coming
        if text is not None:
            named[endpoints.CORPUS_NAME] = text.index
        blobs = BlobServer(self.archive.blobs, coming=coming, named=named, copies=NODE_COPIES)
        if text is not None:
            text.warn = lambda line: self._emit(events.Warning(text=line))
            blobs.add_text(text, self.has_session)
        await blobs.serve(self._transport)

    def has_session(self, peer: str) -> bool:
        return peer in self._sessions.open

    # --- what the operator reads

    def _tell_operator(self, text: str) -> None:
        self._emit(events.Warning(text=f"run {shown(self.manifest.name)}: {text}"))

    def _say_addresses(self, addresses: Sequence[str]) -> None:
        self._emit(events.listening(self.manifest, addresses))

    def _refused(self, refused: events.Refused) -> None:
        """Reports a refused peer, and counts it in this node's announcement for those who monitor the run."""
        self._emit(refused)
        self._directory.update(refused=self._directory.announcement.refused + 1)

    async def _report_relay(self, relay: RelayServer) -> None:
        passed, refused = 0, 0
        while True:
            await asyncio.sleep(RELAY_REPORT_SECONDS)
            # further refusals alone are not worth a line each time
            if relay.passed == passed and (refused or not relay.refused):
                continue
            bps = 8 * (relay.passed - passed) / RELAY_REPORT_SECONDS
            passed, refused = relay.passed, relay.refused
            self._emit(events.Relayed(circuits=relay.circuits, bytes=passed, refused=refused, bps=bps))

    # --- the other operators' nodes

    async def _on_vote(self, node: str, message: Said) -> None:
        match message:
            case Record() | RecordHead():
                await self._events.submit(paxos_events.Learned(node, message))
            case Prepare() | Promise() | Accept() | Pledge() | Vote() | Reject() | Heartbeat() | MessageHead():
                await self._events.submit(paxos_events.Heard(node, message))
            case LogRequest(after=after):
                if node in self.operators.links:
                    self._send_log(self.operators.links[node], after)
            case Evaluation():
                await self._events.submit(leader_events.Received(node, message))
            case Motion():
                # a node that knows other members is not cut off for what it forwards
                with contextlib.suppress(RemoteError):
                    await self.decrees.receive(message)
            case _:
                raise unexpected(node, "votes", message)

    # --- the peers

    def _opened(self, session: Session) -> None:
        """Sends the newest record, so that the peer knows how far it has to read, and the end of the run, if any."""
        if self.archive.records:
            session.post(self.archive.records[-1])
        if self.quorum.leadership.turn:
            session.post(encoding.encode(self._beat()))
        self._send_newest(session, len(self.archive.commits) - 1)

    def _send_newest(self, session: Session, after: int) -> None:
        """Sends the end of the run, and the aggregates of round `after`, if there are any; repeated with every answer
        about the log, as a full outbox drops them."""
        if self._newest is not None and self._newest.round == after:
            session.post(encoding.encode(self._newest))
        if self._finished is not None:
            session.post(encoding.encode(self._finished))

    async def _on_message(self, peer: str, session: Session, message: Message) -> None:
        if isinstance(message, Leave):
            session.leaves = True
            self._lost(peer)
            await self._events.submit(leader_events.Gone(peer, leaves=True))
            return
        if isinstance(message, Announced):
            if not session.leaves and session.may_announce(self._announcements, self._clock.steady()):
                announcement = self.roster.add(peer, message.sealed)
                if announcement is not None:
                    self._directory.learn([announcement])
                    self._announced(peer, announcement)
            return
        if not session.leaves and peer not in self._ready and peer in self._directory.known:
            self._announced(peer, self._directory.known[peer])  # it was absent and is back, in the same session
        match message:
            case Attest():
                if not offers.is_sound_attestation(self.manifest, message):
                    raise RemoteError(peer, f"session of {short_peer(peer)}: attests what is no shard; it was closed")
                is_recent = abs(message.round - self.leader.round + 1) <= 2
                if is_recent and session.may_tell(message.round, self._clock.steady()):
                    self._emit(events.Attest(peer=peer, round=message.round, digests=message.digests))
                await self._events.submit(leader_events.Received(peer, message))
            case Evaluation() if peer in self.leader.witnesses.auditors:
                said = claims.signed(self._identity, self.leader.state.due.of, message)
                self.operators.broadcast(said)
                await self._events.submit(leader_events.Received(self._identity.peer_id, said))
            case Offer() | Withdraw() | ChainFailure() | ChainReconfig() | Evaluation() | Score():
                await self._events.submit(leader_events.Received(peer, message))
            case LogRequest(after=after):
                self._send_log(session, after)
                self._send_newest(session, after)
            case Heartbeat():
                session.post(encoding.encode(self._beat()))
            case _:
                raise unexpected(peer, "session", message)

    def _beat(self) -> Heartbeat:
        """A sign of life for peers, which says in which turn this node is."""
        phase = "stalled" if self._stalled else "leading" if self.quorum.leads else "following"
        return Heartbeat(phase=phase, round=self.quorum.round, turn=self.quorum.leadership.turn)

    def _send_log(self, session: Session, after: int) -> None:
        session.post_records(itertools.islice(self.archive.since(after), OUTBOX // 2), self._clock.steady())

    async def _watch(self) -> None:
        """Turns silence into events, every POLL_SECONDS."""
        while True:
            now, heard, timing = self._clock.steady(), self._sessions.heard, self.manifest.timing
            for peer in presence.gone(self._ready, heard, timing, now):
                self._lost(peer)
                if peer not in self._sessions.open:
                    self._directory.lost(peer)
                self._events.put(leader_events.Gone(peer))
            self._sessions.forget(self._ready)
            known, present = self._directory.known, (self._ready, self._sessions.open, self.operators.links)
            for peer in [p for p in known if not any(p in some for some in present)]:
                self._directory.lost(peer)
            await self._sessions.dismiss()
            absent = presence.absent(self._ready, self._sessions.open, heard, timing, now)
            for peer in absent:
                self._stays.lost(peer)
            self._events.put(leader_events.Tick(absent, self.quorum.leadership.present))
            self._events.put(paxos_events.Tick(not self.quorum.leads and fairness.is_due(self.leader, now)))
            await asyncio.sleep(POLL_SECONDS)

    def _lost(self, peer: str) -> None:
        if self._ready.pop(peer, None) is not None:
            self._stays.lost(peer)
            self.roster.remove(peer)
            self._emit(events.Gone(peer=peer))

    def _announced(self, peer: str, announcement: Announcement) -> None:
        """Takes a connected peer's announcement: it is a candidate for plans."""
        stays = round(self._stays.of(peer), 2)
        where = ranges.range_of(self._transport.seen_at(peer))
        candidate = dataclasses.replace(partition.candidate(announcement), presence=stays, range=where)
        known = self._ready.get(peer)
        if known != candidate:
            self._ready[peer] = candidate
            self._events.put(leader_events.Ready(candidate))
            # what is measured again and again is no news
            same = {name: getattr(known, name) for name in ("speed_flops", "coordinates", "presence") if known}
            if known != dataclasses.replace(candidate, **same):
                self._emit(extend(events.Ready, announcement))

    def _send_offered(self, offered: Offered) -> None:
        """Sends it to strong uplinks first, since the first to ask for a payload pass it on to the others."""
        peers = list(self._sessions.open)
        random.shuffle(peers)
        peers.sort(key=lambda p: -self._ready[p].up_bps if p in self._ready else 0)
        self._sessions.post((p for p in peers if not self._sessions.open[p].is_crowded), offered)

    # --- the machines

    async def _pump(self) -> None:
        await self._directory.connect()
        while True:
            entry = await self._events.get()
            entry.finish(await self._process(entry.event))

    async def _process(self, event: leader_events.Event | paxos_events.Event) -> Exception | None:
        """Gives an event to its machine, then the events that follow from its effects, in order.

        Each waits until all effects of the one before are carried out; otherwise an older effect would undo a newer
        one. Returns what a peer's message raised.
        """
        todo, failure = deque([event]), None
        while todo:
            event = todo.popleft()
            if self._is_outdated(event):
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
                    self._offers.add(round, share)
                case leader_events.MakePlan(question):
                    self._planning.ask(question)
                case leader_events.Judge(case):
                    self._judging.ask(case)
                case leader_events.Recompute():
                    self._recomputing.ask(effect)
                case leader_events.Propose(commit):
                    following.append(paxos_events.Proposed(access.dated(commit, self._clock.wall())))
                case leader_events.Send(peers, message, first):
                    if first and isinstance(message, ChainReconfig):
                        self._emit(extend(events.ChainReconfigured, message))
                    self._sessions.post(peers, message)
                case leader_events.Done(round):
                    self._finish(round)
                case _:
                    self._emit(_leader_event(effect))

    async def _tell_quorum(self, event: paxos_events.Event) -> list[leader_events.Event | paxos_events.Event]:
        following: list[leader_events.Event | paxos_events.Event] = []
        links = self.operators.links
        if isinstance(event, paxos_events.Proposed):
            ours = self.quorum.of_ours(event.commit)
            await asyncio.to_thread(lambda: ours.digest)  # cached; takes long for many replicas
            event = paxos_events.Proposed(ours)
        before = self.quorum.round, self.quorum.leadership.turn
        effects = self.quorum.handle(event, self._clock.steady())
        if self.quorum.leadership.turn and (self.quorum.round, self.quorum.leadership.turn) != before:
            self._sessions.post_all(encoding.encode(self._beat()))
        for effect in effects:
            match effect:
                case paxos_events.Save(vote):
                    await asyncio.to_thread(self.archive.save_vote, vote)
                case paxos_events.Send(peer, message):
                    if peer in links:
                        links[peer].post(encoding.encode(message))
                case paxos_events.SendLog(peer, after):
                    if peer in links:
                        self._send_log(links[peer], after)
                case paxos_events.Fetch(holders, part):
                    self._payloads.fetch(holders, part, holders[-1], self.leader.round)
                case paxos_events.FetchList(holders, share):
                    self._payloads.fetch_list(holders, share, self.leader.round)
                case paxos_events.Judge(peer, commit):
                    self._proposals.ask(peer, commit)
                case paxos_events.Refused() | paxos_events.Skipped():
                    self._emit(_deposed_leader(effect))
                case paxos_events.Append(record):
                    await asyncio.to_thread(self.archive.append, record)
                    following.append(paxos_events.Appended(record))
                case paxos_events.Decided(record):
                    following.append(leader_events.Decided(record.commit))
                    self._forget(await self._payloads.settle(record.commit))
                    self._decided(record)
                    await self.operators.follow()
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
        self._proposals.decided(record.commit)
        self._stays.begin(self._ready)
        self._sessions.post_all(self.archive.records[record.commit.round])
        self._payloads.complete(range(record.commit.round, record.commit.round + 1))
        self._states.news.set()
        self._make_aggregates(record.commit)

    def _make_aggregates(self, commit: Commit) -> None:
        if aggregation.is_aggregated(self.manifest, commit):
            self._aggregating.ask(commit)

    def _aggregated(self, made: Aggregated) -> None:
        """The aggregates of a round are here: peers may fetch them, and the next commit names them."""
        self._newest = made
        self._sessions.post_all(encoding.encode(made))
        self._events.put(leader_events.AggregatesMade(made))

    def _finish(self, round: int) -> None:
        final, model = self.leader.attestations.majority(round), self.manifest.model
        whole = set(layout.shard_names(model)) <= set(final)
        digest = layout.state_digest(model, final) if whole else None
        self._emit(events.RunFinished(round=round, state_digest=digest))
        self._finished = Finished(round=round)
        self._sessions.post_all(encoding.encode(self._finished))

    def _stall(self, missing: tuple[str, ...]) -> None:
        """Reports that too few members of the quorum give signs of life or, where none is `missing`, enough again."""
        self._stalled = bool(missing)
        members, round = len(self.quorum.members), self.quorum.round
        if not missing:
            text = f"quorum: enough of the {members} bootstrap nodes are back; round {round} goes on"
        elif self.operators.is_named:
            names = ", ".join(short_peer(m) for m in missing)
            text = (
                f"quorum: {members - len(missing)} of {members} bootstrap nodes give signs of life (none: {names});"
                f" round {round} waits, start one of them again"
            )
        else:
            return  # a node that is not appointed waits for that, and says so (bootstrap/sessions.py)
        self._emit(events.Warning(text=text))

    # --- payloads

    def _forget(self, gone: set[str]) -> None:
        """Has blobs that left the archive fetched again when they are offered again."""
        self.leader.offers.held -= gone
        self.quorum.acceptor.held -= gone

    def _is_outdated(self, event: object) -> bool:
        """Returns whether the event reports a blob that has left the archive since."""
        match event:
            case paxos_events.Held(name) | paxos_events.Listed(name) | leader_events.Held(name):
                return not self.archive.blobs.has(name)
        return False


def _deposed_leader(effect: Refused | Skipped) -> events.Unfair | events.Warning:
    """The event for a node that another one replaces as leader: its proposal was refused, or its round stood still."""
    who = f"node {short_peer(effect.peer)}"
    if isinstance(effect, Skipped):
        return events.Warning(text=f"{who}: it leads and does not decide round {effect.round}; another node leads")
    if effect.unfair.accuses:
        return events.Unfair(peer=effect.peer, round=effect.round, reason=effect.unfair.reason)
    return events.Warning(
        text=f"{who}: its commit of round {effect.round} {effect.unfair.reason}; another node leads this round"
    )


def _leader_event(
    effect: Report | Moved | Resting | Accusation,
) -> events.Diverged | events.Moved | events.Warning | events.Quarrel:
    """The event for an effect of the leader's machine that only informs."""
    match effect:
        case Report(round, peer, shard, refuted):
            return events.Diverged(peer=peer, round=round, shard=shard, refuted=refuted)
        case Moved(round, replica, before, after, reason):
            was, now = before.blocks, after.blocks
            return events.Moved(round=round, replica=replica, peers=after.peers, before=was, after=now, reason=reason)
        case Resting(peer, until, scored):
            what = "it is planned again and again and brings nothing that counts"
            what = "its work does not make the model better, as those found who scored it" if scored else what
            return events.Warning(text=f"peer {short_peer(peer)}: {what}; it is in no plan up to round {until}")
        case Accusation(accuser, accused, reason, out):
            return events.Quarrel(accuser=accuser, accused=accused, reason=reason, out=out)
