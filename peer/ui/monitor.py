"""Event sources for screens: `Monitor` watches a run without taking part, `Replay` plays a recording.

A monitor reads the log of commits and the peers' announcements, and trusts neither. A peer announces itself every few
seconds, so that the reported steps are a sample. `news_age` is the age of the last answer of a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from peer import events
from peer.events import Event, Sink
from peer.log import reader
from peer.net import node_calls
from peer.net.address import best_first, is_circuit, peers_of
from peer.net.base import Clock, Transport
from peer.net.directory import Contacts, announcements
from peer.net.node_calls import RosterReader
from peer.ui.text import number
from protocol.errors import RemoteError, UsageError, os_errors
from protocol.identity import short_peer
from protocol.ledger import board, history, schedule
from protocol.ledger.history import BadCommit
from protocol.run import short_line
from protocol.run.manifest import Manifest
from protocol.wire import encoding, logfile
from protocol.wire.announcement import Announcement
from protocol.wire.commit import Record, is_decided
from protocol.wire.schema import extend

POLL_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 5.0
PEERS_A_POLL = 25
"""With N times as many peers, announcements are read every Nth poll: verifying them is a monitor's main cost."""
MOST_POLLS = 60
COMPARE_POLLS = 10
"""Interval of comparing the newest commit with another operator's, in polls."""
COMPARE_SECONDS = 2.0
NEWS = ("phase", "round", "step", "loss", "bytes_sent", "bytes_written", "refused", "chain")
ROUND_SECONDS = 0.25


class BadLog(RemoteError):
    """A bootstrap node sent an invalid log."""


@dataclass(slots=True)
class Monitor:
    """Reports a run's events. Keeps the newest commit only: a long log of many peers would not fit into memory."""

    manifest: Manifest
    transport: Transport
    poll_seconds: float = POLL_SECONDS
    bootstrap: tuple[str, ...] = ()
    """Known addresses of the run."""
    clock: Clock = field(default_factory=Clock)
    head: Record | None = None
    """The newest commit."""
    peers: dict[str, Announcement] = field(default_factory=dict)
    """The newest announcement of every present peer."""
    _contacts: Contacts = field(init=False)
    _roster: RosterReader = field(init=False)
    _heard: tuple[float, float] = field(init=False)
    _answers: dict[str, bool] = field(default_factory=dict)  # by node: whether the last call succeeded
    _polls: int = 0
    _announcements_due: int = 0  # the poll that reads them
    _members: tuple[str, ...] = ()
    _forked: bool = False

    def __post_init__(self) -> None:
        self._contacts = Contacts(self.manifest, self.transport, self.bootstrap)
        self._roster = RosterReader(self.transport, self.manifest.run_id)
        self._hear()  # the run was just found

    @property
    def news_age(self) -> float | None:
        """Seconds since a node last answered, by the larger of two clocks; None when the run is over."""
        steady, wall = self._heard
        return None if self.finished else max(self.clock.steady() - steady, self.clock.wall() - wall)

    def _hear(self) -> None:
        self._heard = self.clock.steady(), self.clock.wall()

    async def follow(self, sink: Sink) -> None:
        """Polls until the run is over. Reports an error as a warning, once until a poll succeeds."""
        warned, longer = set[str](), self.poll_seconds
        while True:
            pause = self.poll_seconds
            try:
                await self.poll(sink)
                warned.clear()
                longer = self.poll_seconds
            except RemoteError as error:
                pause, longer = longer, min(2 * longer, LONGEST_PAUSE_SECONDS)
                if str(error) not in warned:
                    warned.add(str(error))
                    sink(Event(time.time(), "monitor", events.Warning(text=str(error))))
            if self.finished:
                return
            await asyncio.sleep(pause)

    async def poll(self, sink: Sink) -> None:
        """Reads the log and the announcements. Raises RemoteError, LocalError."""
        while (page := await self._next_page())[1]:
            self._take_page(*page, sink)
        if self._polls >= self._announcements_due or self.finished:
            await self._read_announcements(sink)
            self._announcements_due = self._polls + min(max(1, len(self.peers) // PEERS_A_POLL), MOST_POLLS)
        self._polls += 1
        if self._polls % COMPARE_POLLS == 0 and self.head is not None and not self._forked:
            others = self.nodes
            await self._compare(self.head, others[self._polls // COMPARE_POLLS % len(others)], sink)
        if self.head is not None and self.finished:
            last = self.head.commit
            sink(Event(last.time, "bootstrap", events.RunFinished(round=last.round, state_digest=None)))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes to ask: those of `bootstrap` and the operators'."""
        return tuple(dict.fromkeys((*peers_of(self.bootstrap), *self._contacts.operators)))

    @property
    def join_line(self) -> str:
        """What others give to `potluck join`, for a node's best address, as typed or as announced."""
        announced = (a for node in self._contacts.operators if node in self.peers for a in self.peers[node].addresses)
        found = best_first(a for a in (*self.bootstrap, *announced) if not is_circuit(a))
        return short_line.join_line(self.manifest.name, found[0], self.manifest.run_id) if found else ""

    @property
    def finished(self) -> bool:
        """Whether the last round is committed."""
        return self.head is not None and schedule.is_over(self.manifest, self.head.commit)

    async def _next_page(self) -> tuple[str, list[bytes]]:
        """A node, in turns, and the next records of its log. Raises RemoteError if none answers."""
        after = -1 if self.head is None else self.head.commit.round
        answered, failed = dict[str, list[bytes]](), list[RemoteError]()

        async def ask(node: str) -> bool:
            self._answers[node] = False
            try:
                answered[node] = await self._contacts.call(
                    node, lambda transport, peer: node_calls.log_page(transport, peer, after)
                )
            except RemoteError as error:
                failed.append(error)
            self._answers[node] = node in answered
            return node in answered

        nodes = self.nodes
        first = self._polls % len(nodes)
        turned = (*nodes[first:], *nodes[:first])
        await node_calls.ask_in_turn(sorted(turned, key=lambda node: not self._answers.get(node, True)), ask)
        if not answered:
            raise failed[0]
        self._hear()
        return next(iter(answered.items()))

    def _take_page(self, node: str, records: list[bytes], sink: Sink) -> None:
        for raw in records:
            before = None if self.head is None else self.head.commit
            self._members = self.manifest.first_members if before is None else before.members
            try:
                self.head = history.follow(self.manifest, before, raw)
            except BadCommit as error:
                self._answers[node] = False
                round = 0 if before is None else before.round + 1
                where = f"log of {short_peer(node)}: the commit of round {round}"
                raise BadLog(node, f"{where} {error}; ask another bootstrap node") from None
            self._contacts.follow(board.of(self.manifest, self.head.commit))
            for event in round_events(self.head):
                sink(event)

    async def _compare(self, head: Record, node: str, sink: Sink) -> None:
        """Reports a fork if `node` has another decided commit of the newest round."""
        commit = head.commit
        try:
            async with asyncio.timeout(COMPARE_SECONDS):
                found = await self._contacts.call(
                    node, lambda transport, peer: node_calls.log_page(transport, peer, commit.round - 1)
                )
            other = encoding.decode_record(found[0], node) if found else head
        except (RemoteError, TimeoutError):
            return
        self._answers[node] = True
        same = (other.commit.run, other.commit.round) == (commit.run, commit.round)
        if same and other.commit.digest != commit.digest and is_decided(other, self._members):
            self._forked = True
            sink(Event(time.time(), "monitor", events.Forked(round=commit.round)))

    async def _current_announcements(self) -> dict[str, Announcement]:
        """The newest announcements by a bootstrap node, completed for other nodes from the DHT; without a node, by the
        DHT. Raises RemoteError if neither answers."""
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

    async def _read_announcements(self, sink: Sink) -> None:
        now = time.time()
        found = await self._current_announcements()
        for peer in sorted(set(self.peers) - set(found)):
            del self.peers[peer]
            sink(Event(now, "bootstrap", events.Gone(peer=peer)))
        for peer, new in sorted(found.items()):
            old = self.peers.get(peer)
            if old is not None and new.serial < old.serial:
                continue
            self.peers[peer] = new
            if new.refused > (old.refused if old is not None else 0):
                times = number(new.refused, "time")
                text = f"{short_peer(peer)} has refused {times} to answer who asks too much; its own log says whom"
                sink(Event(now, "monitor", events.Warning(text=text)))
            if old is None or old.name != new.name:
                sink(Event(now, "bootstrap", extend(events.Ready, new)))
            if old is None or any(getattr(old, name) != getattr(new, name) for name in NEWS):
                sink(Event(now, peer, extend(events.Announced, new)))


def round_events(record: Record) -> Iterator[Event]:
    """The events of a decided round: its commit, and the roles in its plan."""
    commit = record.commit
    yield Event(commit.time, "bootstrap", extend(events.Commit, commit, voters=tuple(sorted(record.votes))))
    if (plan := commit.plan) is not None:
        for replica in plan.replicas:
            for stage in replica.stages:
                yield Event(commit.time, stage.peer, events.role(plan, replica.number, stage))


class Replay:
    """Reports a recording: a process's output with `--json`, or a bootstrap node's log. Raises UsageError."""

    def __init__(self, manifest: Manifest, file: Path) -> None:
        if not file.is_file():
            raise UsageError(f"--replay {file}: no such file; give a file of events or a bootstrap node's log")
        self._manifest, self._file = manifest, file

    @property
    def news_age(self) -> None:
        """A recording has none."""

    @property
    def join_line(self) -> str:
        """A recording has none."""
        return ""

    async def poll(self, sink: Sink) -> None:
        """Reports everything at once. Raises UsageError if there is nothing."""
        found = False
        async for event in self._events():
            found = True
            sink(event)
        if not found:
            raise UsageError(f"--replay {self._file}: has no events; give what a process printed with --json, or a log")

    async def follow(self, sink: Sink) -> None:
        """Reports round by round."""
        async for event in self._events():
            sink(event)
            if isinstance(event.body, events.Commit):
                await asyncio.sleep(ROUND_SECONDS)

    async def _events(self) -> AsyncIterator[Event]:
        if self._file.name == logfile.LOG:
            async for record in reader.checked(self._manifest, reader.Folder(self._file.parent)):
                for event in round_events(record):
                    yield event
            return
        with (
            os_errors(f"--replay {self._file}", "give a file that can be read"),
            open(self._file, encoding="utf-8", errors="replace") as lines,
        ):
            for line in lines:
                if (parsed := events.from_json(line)) is not None:
                    yield parsed
