"""Watches a run without taking part: reads the log of commits and the announcements, and tells them as events.

Nobody is believed. Every commit must have the votes of a majority and follow the one before it
(protocol/rounds/validation.py), and every announcement must be signed by its peer. A peer announces itself every few
seconds only, so the steps that it tells are a sample.
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
from peer.net import asking, directory
from peer.net.base import Transport
from peer.net.roster import RosterReader
from peer.ui.snapshot import Snapshot, snapshot
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.rounds import board, schedule, validation
from protocol.rounds.validation import BadCommit
from protocol.run.manifest import Manifest
from protocol.wire import encoding
from protocol.wire.announcement import Announcement
from protocol.wire.commit import Commit, Record, is_decided, voted_twice
from protocol.wire.plan import Plan
from protocol.wire.schema import plain

POLL_SECONDS = 1.0
PEERS_A_POLL = 25
"""Announcements cost most of what a monitor takes, since each has to be verified. In a swarm of more peers they are read less often."""
MOST_POLLS = 60
"""Between two looks at the announcements, however many peers there are."""
COMPARE_POLLS = 10
"""So often another operator's newest commit is compared with ours."""


class BadLog(RemoteError):
    """A bootstrap node sent a log that cannot be believed."""


@dataclass(slots=True)
class Monitor:
    """`dialled`: nodes that answered when the run was looked for; `head`: the newest commit of the log; `peers`: the newest announcement of everyone who is there. The commits before are told and
    not kept: a long run of many peers would take all memory."""

    manifest: Manifest
    transport: Transport
    poll_seconds: float = POLL_SECONDS
    dialled: tuple[str, ...] = ()
    head: Record | None = None
    peers: dict[str, Announcement] = field(default_factory=dict)
    _roster: RosterReader = field(init=False)
    _polls: int = 0
    _look_at: int = 0  # the poll that reads the announcements
    _members: tuple[str, ...] = ()
    _forked: bool = False

    def __post_init__(self) -> None:
        self._roster = RosterReader(self.transport, self.manifest.run_id)

    async def follow(self, sink: Sink) -> None:
        """Polls and tells until the run is over. What is wrong is a warning, told once until all is well again."""
        warned: set[str] = set()
        while True:
            try:
                await self.poll(sink)
                warned.clear()
            except RemoteError as error:
                if str(error) not in warned:
                    warned.add(str(error))
                    sink(Event(time.time(), "monitor", events.Warning(text=str(error))))
            if self.finished:
                return
            await asyncio.sleep(self.poll_seconds)

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
        """Whom we ask: the node that we began with, and who operates the run."""
        head = None if self.head is None else self.head.commit
        return tuple(dict.fromkeys((*self.dialled, *board.operators(self.manifest, head))))

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
        """Takes the records that the log has and we had not, from the first bootstrap node that answers, checked."""
        *others, last = self.nodes
        for node in others:
            with contextlib.suppress(RemoteError):
                return await self._read_log(node, take)
        await self._read_log(last, take)

    async def _read_log(self, node: str, take: Callable[[Record], None]) -> None:
        while records := await asking.page(self.transport, node, -1 if self.head is None else self.head.commit.round):
            for raw in records:
                before = None if self.head is None else self.head.commit
                self._members = self.manifest.first_members if before is None else before.members
                try:
                    self.head = validation.follow(self.manifest, before, raw)
                except BadCommit as error:
                    round = 0 if before is None else before.round + 1
                    where = f"log of {short_peer(node)}: the commit of round {round}"
                    raise BadLog(node, f"{where} {error}; ask another bootstrap node") from None
                take(self.head)

    async def _compare(self, head: Record, node: str, sink: Sink) -> None:
        """Tells whether `node` has another decided commit of the newest round: then the run is forked."""
        commit = head.commit
        try:
            found = await asking.page(self.transport, node, commit.round - 1)
            other = encoding.decode_record(found[0], node) if found else head
        except RemoteError:
            return
        same = (other.commit.run, other.commit.round) == (commit.run, commit.round)
        if same and other.commit.digest != commit.digest and is_decided(other, self._members):
            self._forked = True
            liars = tuple(proof.peer for proof in voted_twice(head, other))
            sink(Event(time.time(), "monitor", events.Forked(round=commit.round, liars=liars)))

    async def _everybody(self) -> dict[str, Announcement]:
        """The newest announcement of everyone whom a bootstrap node knows, and of the other nodes; without one, of those in the DHT.
        Raises RemoteError where neither answers."""
        try:
            await self._roster.refresh(self.nodes)
        except RemoteError:
            return await directory.announcements(self.transport, self.manifest.run_id)
        found = dict(self._roster.known)
        operators = board.operators(self.manifest, None if self.head is None else self.head.commit)
        if not set(operators) <= set(found):
            with contextlib.suppress(RemoteError):
                stored = await directory.announcements(self.transport, self.manifest.run_id)
                found.update({p: a for p, a in stored.items() if p in operators and p not in found})
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
