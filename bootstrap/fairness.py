"""What one node has against commits that others propose: judges them beside the loop, one after the other, and tells the operator.

What the judging goes by is taken when the question comes (protocol/round/fairness.py), and a plan takes time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from bootstrap.latest_job import Lacking, wanted
from peer.net.clock import Clock
from protocol.quorum.paxos_events import Judged, Objection
from protocol.round import fairness
from protocol.round.fairness import DoubtRecord, NodeView
from protocol.round.judging import Lookup
from protocol.round.leader import Leader
from protocol.wire.commit import Commit

log = logging.getLogger("potluck.fairness")


class Fairness:
    """`put` takes the answers; `leader` is the node's own machine; `read`: payloads and lists of parts by their names, None for what is
    not here; `known`: what was found in payloads (protocol/round/comparing.py); `alive` says which members of the quorum give
    signs of life, and which operators."""

    def __init__(
        self,
        leader: Leader,
        clock: Clock,
        put: Callable[[Judged], None],
        read: Callable[[str], bytes | None],
        known: Lookup,
        alive: Callable[[], tuple[frozenset[str], frozenset[str]]],
    ) -> None:
        self._leader = leader
        self._clock = clock
        self._put = put
        self._read = wanted(read)
        self._known = known
        self._alive = alive
        self._since = clock.steady()
        self._doubts = DoubtRecord()
        self._questions: asyncio.Queue[tuple[str, NodeView, Commit]] = asyncio.Queue()

    def ask(self, peer: str, commit: Commit) -> None:
        """Whether this node could have proposed what `peer` proposes, from what it has seen up to now."""
        now = self._clock.steady()
        settled = now - self._since >= self._leader.manifest.timing.gone_after
        sight = fairness.view_of(self._leader, self._clock.wall(), now, settled, *self._alive())
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

    def _judge(self, sight: NodeView, commit: Commit) -> Objection | None:
        found = fairness.lie_in(sight, commit)
        if found is not None:
            return found
        try:
            found = fairness.wrong_verdict_in(sight, commit, self._read, self._known)
            if found is not None:
                return found
        except Lacking as error:
            log.info("the verdicts of round %d cannot be checked: %s", commit.round, error)
        except Exception:
            log.exception("the verdicts of round %d cannot be checked", commit.round)
            return Objection("cannot be judged", False)
        try:
            return fairness.doubt_in(sight, commit)
        except Exception:  # a planner that cannot bear what peers announce ends no node, and is no reason to accuse one
            log.exception("a plan could not be compared with this node's own")
            return None
