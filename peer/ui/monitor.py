"""Watches a run without taking part: reads the log of commits and the announcements, and tells them as events.

Nobody is believed. Every commit must have enough votes and follow the one before it
(protocol/ledger/validation.py), and every announcement must be signed by its peer. A peer announces itself every few
seconds only, so the steps that it tells are a sample.

A node that is lost is looked for and dialled again as peers do it (peer/net/contacts.py). What is known is as old as the last answer
of a node, `news_age`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from peer import events
from peer.events import Event, Sink
from peer.net import asking
from peer.net.address import peers_of
from peer.net.base import Transport
from peer.net.clock import Clock
from peer.net.contacts import Contacts, announcements
from peer.net.roster import RosterReader
from peer.ui.snapshot import Snapshot, snapshot
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.ledger import board, schedule, validation
from protocol.ledger.validation import BadCommit
from protocol.run.manifest import Manifest
from protocol.wire import encoding
from protocol.wire.announcement import Announcement
from protocol.wire.commit import Commit, Record, is_decided
from protocol.wire.plan import Plan
from protocol.wire.schema import plain

POLL_SECONDS = 1.0
LONGEST_PAUSE = 5.0
"""Seconds between two looks where nobody answers, at most."""
PEERS_A_POLL = 25
"""Announcements cost most of what a monitor takes, since each has to be verified. In a swarm of more peers they are read less often."""
MOST_POLLS = 60
"""Between two looks at the announcements, however many peers there are."""
COMPARE_POLLS = 10
"""So often another operator's newest commit is compared with ours."""
COMPARE_SECONDS = 2.0
"""That it has to show it; the log waits for it."""


class BadLog(RemoteError):
    """A bootstrap node sent a log that cannot be believed."""


@dataclass(slots=True)
class Monitor:
    """`bootstrap`: addresses where the run was found; `head`: the newest commit of the log; `peers`: the newest announcement of everyone who is
    there. The commits before are told and not kept: a long run of many peers would take all memory."""

    manifest: Manifest
    transport: Transport
    poll_seconds: float = POLL_SECONDS
    bootstrap: tuple[str, ...] = ()
    clock: Clock = field(default_factory=Clock)
    head: Record | None = None
    peers: dict[str, Announcement] = field(default_factory=dict)
    _contacts: Contacts = field(init=False)
    _roster: RosterReader = field(init=False)
    _heard: tuple[float, float] = field(init=False)
    _answers: dict[str, bool] = field(default_factory=dict)  # whether a node did when it was asked last
    _polls: int = 0
    _look_at: int = 0  # the poll that reads the announcements
    _members: tuple[str, ...] = ()
    _forked: bool = False

    def __post_init__(self) -> None:
        self._contacts = Contacts(self.manifest, self.transport, self.bootstrap)
        self._roster = RosterReader(self.transport, self.manifest.run_id)
        self._hear()  # whoever made it was just answered

    @property
    def news_age(self) -> float | None:
        """Seconds since a node last answered; None when the run is over, since nothing newer will come. While a machine sleeps its steady clock
        may stand still, and the time of day goes on."""
        steady, wall = self._heard
        return None if self.finished else max(self.clock.steady() - steady, self.clock.wall() - wall)

    def _hear(self) -> None:
        self._heard = self.clock.steady(), self.clock.wall()

    async def follow(self, sink: Sink) -> None:
        """Polls and tells until the run is over. What is wrong is a warning, told once until all is well again."""
        warned, longer = set[str](), self.poll_seconds
        while True:
            pause = self.poll_seconds
            try:
                await self.poll(sink)
                warned.clear()
                longer = self.poll_seconds
            except RemoteError as error:
                pause, longer = longer, min(2 * longer, LONGEST_PAUSE)
                if str(error) not in warned:
                    warned.add(str(error))
                    sink(Event(time.time(), "monitor", events.Warning(text=str(error))))
            if self.finished:
                return
            await asyncio.sleep(pause)

    async def poll(self, sink: Sink) -> None:
        """One look at the log and at the announcements. Raises RemoteError, LocalError."""

        def tell(record: Record) -> None:
            for event in told(record):
                sink(event)

        await self._read(tell)
        if self._polls >= self._look_at or self.finished:
            await self._announcements(sink)
            self._look_at = self._polls + min(max(1, len(self.peers) // PEERS_A_POLL), MOST_POLLS)
        self._polls += 1
        if self._polls % COMPARE_POLLS == 0 and self.head is not None and not self._forked:
            others = self.nodes
            await self._compare(self.head, others[self._polls // COMPARE_POLLS % len(others)], sink)
        if self.head is not None and self.finished:
            last = self.head.commit
            sink(Event(last.time, "bootstrap", events.RunFinished(round=last.round, state_digest=None)))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Whom we ask: the nodes that we began with, and who operates the run."""
        return tuple(dict.fromkeys((*peers_of(self.bootstrap), *self._contacts.operators)))

    @property
    def finished(self) -> bool:
        """Whether the last round is committed."""
        return self.head is not None and schedule.is_over(self.manifest, self.head.commit)

    async def snapshot(self) -> Snapshot:
        """The run as of now, with the whole log, which is read anew. Raises RemoteError, LocalError."""
        commits: list[Commit] = []
        self.head = None
        await self._read(lambda record: commits.append(record.commit))
        await self._announcements(lambda event: None)
        return snapshot(self.manifest, commits, self.peers, time.time())

    async def snapshot_json(self) -> str:
        """`snapshot` as JSON text."""
        return json.dumps(plain(await self.snapshot()), indent=1)

    async def _read(self, take: Callable[[Record], None]) -> None:
        """Takes the records that the log has and we had not, checked, from any bootstrap node. Raises RemoteError where none answers."""
        while (found := await self._next_page())[1]:
            self._take_page(*found, take)

    async def _next_page(self) -> tuple[str, list[bytes]]:
        """A node, and what its log has after what we have. Those that answered last time are asked before the others, in turn, so that none
        that is cut off from the rest, or that lies, is the only one to be heard."""
        after, answered, failed = (
            -1 if self.head is None else self.head.commit.round,
            dict[str, list[bytes]](),
            list[RemoteError](),
        )

        async def ask(node: str) -> bool:
            self._answers[node] = False
            try:
                answered[node] = await self._contacts.call(
                    node, lambda transport, peer: asking.page(transport, peer, after)
                )
            except RemoteError as error:
                failed.append(error)
            self._answers[node] = node in answered
            return node in answered

        nodes = self.nodes
        first = self._polls % len(nodes)
        turned = (*nodes[first:], *nodes[:first])
        await asking.in_turn(sorted(turned, key=lambda node: not self._answers.get(node, True)), ask)
        if not answered:
            raise failed[0]
        self._hear()
        return next(iter(answered.items()))

    def _take_page(self, node: str, records: list[bytes], take: Callable[[Record], None]) -> None:
        for raw in records:
            before = None if self.head is None else self.head.commit
            self._members = self.manifest.first_members if before is None else before.members
            try:
                self.head = validation.follow(self.manifest, before, raw)
            except BadCommit as error:
                self._answers[node] = False
                round = 0 if before is None else before.round + 1
                where = f"log of {short_peer(node)}: the commit of round {round}"
                raise BadLog(node, f"{where} {error}; ask another bootstrap node") from None
            self._contacts.follow(board.of(self.manifest, self.head.commit))
            take(self.head)

    async def _compare(self, head: Record, node: str, sink: Sink) -> None:
        """Tells whether `node` has another decided commit of the newest round: then the run is forked."""
        commit = head.commit
        try:
            async with asyncio.timeout(COMPARE_SECONDS):
                found = await self._contacts.call(
                    node, lambda transport, peer: asking.page(transport, peer, commit.round - 1)
                )
            other = encoding.decode_record(found[0], node) if found else head
        except (RemoteError, TimeoutError):
            return
        self._answers[node] = True
        same = (other.commit.run, other.commit.round) == (commit.run, commit.round)
        if same and other.commit.digest != commit.digest and is_decided(other, self._members):
            self._forked = True
            sink(Event(time.time(), "monitor", events.Forked(round=commit.round)))

    async def _everybody(self) -> dict[str, Announcement]:
        """The newest announcement of everyone whom a bootstrap node knows, and of the other nodes; without one, of those in the DHT.
        Raises RemoteError where neither answers."""
        try:
            await self._roster.refresh(sorted(self.nodes, key=lambda node: not self._answers.get(node, True)))
        except RemoteError:
            found = await announcements(self.transport, self.manifest.run_id)
        else:
            found = dict(self._roster.known)
            if not set(self._contacts.operators) <= set(found):
                with contextlib.suppress(RemoteError):
                    stored = await announcements(self.transport, self.manifest.run_id)
                    found.update({p: a for p, a in stored.items() if p in self._contacts.operators and p not in found})
        self._contacts.learn(found[node] for node in self._contacts.operators if node in found)
        return found

    async def _announcements(self, sink: Sink) -> None:
        now = time.time()
        found = await self._everybody()
        for peer in sorted(set(self.peers) - set(found)):
            del self.peers[peer]
            sink(Event(now, "bootstrap", events.Gone(peer=peer)))
        for peer, new in sorted(found.items()):
            old = self.peers.get(peer)
            if old is not None and new.serial < old.serial:
                continue
            self.peers[peer] = new
            if new.refused > (old.refused if old is not None else 0):
                who = f"peer {short_peer(peer)}: it has refused {new.refused} times somebody who used too much of it"
                text = f"{who}; its own events say whom"
                sink(Event(now, "monitor", events.Warning(text=text)))
            if old is None or old.name != new.name:
                sink(Event(now, "bootstrap", events.ready(new)))
            news = _news(old, new)
            if news is not None:
                sink(Event(now, peer, news))


def _news(old: Announcement | None, new: Announcement) -> events.Announced | None:
    """What an announcement says that the one before it did not."""
    load = events.announced_load(new.chain) if new.chain is not None else None
    if old is not None and old.chain == new.chain:
        load = None
    names = ("phase", "round", "step", "loss", "bytes_sent", "bytes_written", "refused")
    if old is not None and load is None and all(getattr(old, name) == getattr(new, name) for name in names):
        return None
    return events.Announced(
        phase=new.phase,
        round=new.round,
        step=new.step,
        loss=new.loss,
        bytes_sent=new.bytes_sent,
        bytes_received=new.bytes_received,
        bytes_written=new.bytes_written,
        load=load,
        refused=new.refused,
    )


def told(record: Record) -> Iterator[Event]:
    """A decided round, and what its plan has everybody do."""
    commit = record.commit
    yield Event(commit.time, "bootstrap", events.commit_of(commit, sorted(record.votes)))
    if commit.decree is not None:
        yield Event(commit.time, "bootstrap", events.decreed(commit.round, commit.decree))
    if commit.evaluations:
        yield Event(commit.time, "bootstrap", events.evaluated(commit))
    for joined in commit.joined:
        yield Event(commit.time, "bootstrap", events.invited(commit.round, joined))
    for peer, role in _roles(commit.plan):
        yield Event(commit.time, peer, role)


def _roles(plan: Plan | None) -> list[tuple[str, events.Role]]:
    """What the members of a plan's replicas begin to train."""
    if plan is None:
        return []
    return [
        (stage.peer, events.role(plan, replica.number, stage)) for replica in plan.replicas for stage in replica.stages
    ]
