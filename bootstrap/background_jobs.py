"""Background jobs of a bootstrap node: plans and scoring on a thread, and the checks of other nodes' proposals."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import Generic, TypeVar

from peer.net.base import Clock
from peer.net.blobs import BlobStore
from protocol.ledger import aggregation
from protocol.ledger.part_lists import Lists
from protocol.quorum.paxos import Quorum
from protocol.quorum.paxos_events import Judged, Objection
from protocol.round import fairness
from protocol.round.fairness import DoubtRecord, NodeView
from protocol.round.judging import Lookup
from protocol.round.leader import Leader
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.commit import Aggregate, Commit
from protocol.wire.session import Aggregated

log = logging.getLogger("potluck.jobs")
fairness_log = logging.getLogger("potluck.fairness")
Job = TypeVar("Job")
Answer = TypeVar("Answer")


class Missing(Exception):
    """A payload or list that a job needs has not arrived yet."""


def require(read: Callable[[str], bytes | None]) -> Callable[[str], bytes]:
    """Returns a `read` that raises Missing in place of returning None."""

    def found(name: str) -> bytes:
        data = read(name)
        if data is None:
            raise Missing(f"{name} is not here")
        return data

    return found


@dataclass(eq=False)
class LatestJob(Generic[Job, Answer]):
    """Runs the newest job on a thread; a newer job replaces one that waits.

    work: does a job
    put: takes its answer
    retry_seconds: pause after a job that failed, before it is tried again if there is no newer one
    failed: the answer for a failed job, in place of another try
    """

    name: str
    work: Callable[[Job], Answer]
    put: Callable[[Answer], None]
    _: KW_ONLY
    retry_seconds: float
    failed: Callable[[Job], Answer] | None = None

    def __post_init__(self) -> None:
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()

    def ask(self, job: Job) -> None:
        """Queues a job in place of those that wait; the one that runs goes on."""
        while not self._jobs.empty():
            self._jobs.get_nowait()
        self._jobs.put_nowait(job)

    async def run(self) -> None:
        """Never returns. When it is cancelled, the thread ends after its current job."""
        worker, loop = ThreadPoolExecutor(1, self.name), asyncio.get_running_loop()
        try:
            while True:
                job = await self._jobs.get()
                try:
                    answer = await loop.run_in_executor(worker, self.work, job)
                except Exception as error:  # whatever peers announce or offer ends no node
                    level = logging.INFO if isinstance(error, Missing) else logging.ERROR
                    log.log(level, "%s: %s", self.name, error, exc_info=level == logging.ERROR)
                    await asyncio.sleep(self.retry_seconds)
                    if self.failed is not None:
                        self.put(self.failed(job))
                    elif self._jobs.empty():
                        self._jobs.put_nowait(job)
                else:
                    self.put(answer)
        finally:
            worker.shutdown(wait=False)


@dataclass(eq=False)
class AggregateMaker:
    """Makes the aggregates of the newest round that has them. Used from several threads.

    blobs: holds the round's payloads, and gets the aggregates, as blobs of the next round, whose commit names them
    """

    manifest: Manifest
    blobs: BlobStore

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._read = require(self.blobs.get)
        self._made: tuple[str, Aggregated] | None = None

    def make(self, commit: Commit) -> Aggregated:
        """Returns the aggregates of a commit's updates, which are stored. Raises Missing, UsageError."""
        with self._lock:
            if self._made is None or self._made[0] != commit.digest:
                shards, lists = layout.shard_names(self.manifest.model), aggregation.lists_of(commit, self._read)
                made = tuple(self._one(commit, shard, lists) for shard in shards)
                self._made = commit.digest, Aggregated(round=commit.round, aggregates=made)
            return self._made[1]

    def _one(self, commit: Commit, shard: str, lists: Lists) -> Aggregate:
        found = aggregation.contributions(commit, shard, lists, self._read)
        payload = aggregation.aggregate(self.manifest, shard, found)
        name = self.blobs.put(payload, commit.round + 1)
        return Aggregate(shard=shard, digest=name, size=len(payload))


@dataclass(eq=False)
class ProposalChecker:
    """Checks the commits that other nodes propose, one after the other (protocol/round/fairness.py).

    leader: this node's own machine; what it knows when a proposal arrives is what the proposal is checked against
    put: takes the answers
    read: gives payloads and lists of parts by name, None for those that are not here
    known: what was found in payloads (protocol/round/comparing.py)
    compute: as in BootstrapNode
    aggregates: makes those of a commit
    """

    leader: Leader
    quorum: Quorum
    clock: Clock
    put: Callable[[Judged], None]
    read: Callable[[str], bytes | None]
    known: Lookup
    compute: Callable[[str, int], str | None]
    aggregates: Callable[[Commit], Aggregated]

    def __post_init__(self) -> None:
        self._read = require(self.read)
        self._since = self.clock.steady()
        self._doubts = DoubtRecord()
        self._questions: asyncio.Queue[tuple[str, NodeView, Commit]] = asyncio.Queue()

    def ask(self, peer: str, commit: Commit) -> None:
        """Queues the question whether this node could have proposed what `peer` proposes."""
        now, quorum = self.clock.steady(), self.quorum
        settled = now - self._since >= self.leader.manifest.timing.gone_after
        present = quorum.leadership.present
        sight = fairness.view_of(self.leader, self.clock.wall(), now, settled, quorum.living, present)
        self._questions.put_nowait((peer, sight, commit))

    def decided(self, commit: Commit) -> None:
        """Drops the doubts about the leader of a commit that was decided."""
        self._doubts.decided(commit.leader)

    async def run(self) -> None:
        """Never returns."""
        while True:
            peer, sight, commit = await self._questions.get()
            if commit.round != self.leader.round:
                continue
            found = await asyncio.to_thread(self._judge, sight, commit)
            head = sight.state.head
            members = len(head.members if head is not None else sight.manifest.first_members)
            self.put(Judged(commit.digest, self._doubts.weigh(peer, commit.round, found, members)))

    def wrong_aggregates(self, sight: NodeView, commit: Commit) -> Objection | None:
        """Returns the objection to a commit's aggregates: a doubt where this node cannot make them."""
        try:
            return fairness.wrong_aggregates_in(sight, commit, lambda of: self.aggregates(of).aggregates)
        except Exception as error:  # a payload may be missing, or a disk full
            fairness_log.warning("the aggregates in round %d cannot be checked: %s", commit.round, error)
            return Objection("names aggregates that this node cannot make", False) if sight.settled else None

    def _judge(self, sight: NodeView, commit: Commit) -> Objection | None:
        if (lie := fairness.lie_in(sight, commit)) is not None:
            return lie
        try:
            if (unjust := fairness.wrong_verdict_in(sight, commit, self._read, self.known)) is not None:
                return unjust
        except Missing as error:
            fairness_log.info("the verdicts of round %d cannot be checked: %s", commit.round, error)
        except Exception:
            fairness_log.exception("the verdicts of round %d cannot be checked", commit.round)
            return Objection("cannot be judged", False)
        if (wrong := fairness.wrong_refutation_in(sight, commit, self.compute)) is not None:
            return wrong
        if (wrong := self.wrong_aggregates(sight, commit)) is not None:
            return wrong
        try:
            return fairness.doubt_in(sight, commit)
        except Exception:  # announcements that the planner cannot bear end no node, and are no reason to accuse one
            fairness_log.exception("a plan could not be compared with this node's own")
            return None
