"""Background jobs on a thread of their own, of which only the newest counts: it makes those before it useless.

What takes long in a job is numpy's, and between its steps the interpreter gives way: while a plan for 10,000 peers is made the loop is held
up for some hundredths of a second at most (docs/results/planner.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from peer.net.base import Clock
from protocol.quorum.paxos_events import Judged
from protocol.quorum.unfair import Unfair
from protocol.round import fairness
from protocol.round.fairness import Doubts, Sight
from protocol.round.judging import Known
from protocol.round.leader import Leader
from protocol.wire.commit import Commit

log = logging.getLogger("potluck.jobs")
Job = TypeVar("Job")
Answer = TypeVar("Answer")


class Lacking(Exception):
    """Something that a job is about is not here yet."""


def wanted(read: Callable[[str], bytes | None]) -> Callable[[str], bytes]:
    """`read`, but raises Lacking for what is not here."""

    def found(name: str) -> bytes:
        data = read(name)
        if data is None:
            raise Lacking(f"{name} is not here")
        return data

    return found


class LatestJob(Generic[Job, Answer]):
    """Runs the newest job. `work` does a job, and `put` takes its answer.

    `pause`: seconds after a job that failed, which is then done again if there is no newer one.
    `failed`: what is answered instead (default: it is done again).
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Job], Answer],
        put: Callable[[Answer], None],
        *,
        pause: float,
        failed: Callable[[Job], Answer] | None = None,
    ) -> None:
        self._name = name
        self._work = work
        self._put = put
        self._pause = pause
        self._failed = failed
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()

    def ask(self, job: Job) -> None:
        """Queues a job in place of those that wait; the one that runs goes on."""
        while not self._jobs.empty():
            self._jobs.get_nowait()
        self._jobs.put_nowait(job)

    async def run(self) -> None:
        """Until it is cancelled; the thread ends after the job that it is at."""
        worker, loop = ThreadPoolExecutor(1, self._name), asyncio.get_running_loop()
        try:
            while True:
                job = await self._jobs.get()
                try:
                    answer = await loop.run_in_executor(worker, self._work, job)
                except Exception as error:  # whatever peers announce or offer ends no node
                    level = logging.INFO if isinstance(error, Lacking) else logging.ERROR
                    log.log(level, "%s: %s", self._name, error, exc_info=level == logging.ERROR)
                    await asyncio.sleep(self._pause)
                    if self._failed is not None:
                        self._put(self._failed(job))
                    elif self._jobs.empty():
                        self._jobs.put_nowait(job)
                else:
                    self._put(answer)
        finally:
            worker.shutdown(wait=False)


log = logging.getLogger("potluck.fairness")


class Fairness:
    """`put` takes the answers; `leader` is the node's own machine; `read`: payloads and lists of parts by their names, None for what is
    not here; `known`: what was found in payloads (protocol/round/notes.py); `alive` says which members of the quorum give
    signs of life, and which operators."""

    def __init__(
        self,
        leader: Leader,
        clock: Clock,
        put: Callable[[Judged], None],
        read: Callable[[str], bytes | None],
        known: Known,
        alive: Callable[[], tuple[frozenset[str], frozenset[str]]],
    ) -> None:
        self._leader = leader
        self._clock = clock
        self._put = put
        self._read = wanted(read)
        self._known = known
        self._alive = alive
        self._since = clock.steady()
        self._doubts = Doubts()
        self._questions: asyncio.Queue[tuple[str, Sight, Commit]] = asyncio.Queue()

    def ask(self, peer: str, commit: Commit) -> None:
        """Whether this node could have proposed what `peer` proposes, from what it has seen up to now."""
        now = self._clock.steady()
        settled = now - self._since >= self._leader.manifest.timing.gone_after
        sight = fairness.sight_of(self._leader, self._clock.wall(), now, settled, *self._alive())
        self._questions.put_nowait((peer, sight, commit))

    def decided(self, commit: Commit) -> None:
        """This commit is its round's: nothing is wrong with it."""
        self._doubts.decided(commit.leader)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            peer, sight, commit = await self._questions.get()
            if commit.round != self._leader.round:
                continue
            found = await asyncio.to_thread(self._judge, sight, commit)
            head = sight.state.head
            members = len(head.members if head is not None else sight.manifest.first_members)
            self._put(Judged(commit.digest, self._doubts.weigh(peer, commit.round, found, members)))

    def _judge(self, sight: Sight, commit: Commit) -> Unfair | None:
        found = fairness.lie_in(sight, commit)
        if found is not None:
            return found
        try:
            found = fairness.unjust_in(sight, commit, self._read, self._known)
            if found is not None:
                return found
        except Lacking as error:
            log.info("the verdicts of round %d cannot be checked: %s", commit.round, error)
        except Exception:
            log.exception("the verdicts of round %d cannot be checked", commit.round)
            return Unfair("cannot be judged", False)
        try:
            return fairness.doubt_in(sight, commit)
        except Exception:  # a planner that cannot bear what peers announce ends no node, and is no reason to accuse one
            log.exception("a plan could not be compared with this node's own")
            return None
