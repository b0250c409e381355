"""The run's log at a peer: read from the bootstrap nodes, and folded into the run's state.

The log is read in pages, the next one while one is checked on a thread (protocol/ledger/history.py). Each page is asked
of a node that was not asked yet, then of the quickest one.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from peer import events
from peer.net.base import cancel
from peer.net.network import Network
from peer.net.node_calls import log_page
from protocol.errors import RemoteError
from protocol.ledger import history, rules, run_state
from protocol.ledger.credits import Credits
from protocol.ledger.history import Stretch, Tip
from protocol.round import member_events
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit

PAGE_SECONDS = 30.0
"""For a page of a MiB on a slow line."""
PROGRESS_SECONDS = 2.0
AT_ONCE_ROUNDS = 128
"""The most rounds that are folded in one step of the event loop. A longer log is folded in pieces of PIECE_ROUNDS."""
PIECE_ROUNDS = 4
"""Of 16 replicas: about 10 ms of one core."""
PAUSE_SECONDS = 0.1
REPORTED = 3


class LogReader:
    """Reads the log for the member machine."""

    def __init__(self, manifest: Manifest, network: Network) -> None:
        self._manifest = manifest
        self._network = network
        self._bytes_per_second: dict[str, float] = {}  # of each node's last page; 0 where there was none
        self._task: asyncio.Task[None] | None = None

    def begin(self, tip: Tip, put: Callable[[member_events.Event], None], newest: Callable[[], int]) -> None:
        """Reads the log after `tip`, and ends with LogRead.

        put: hands events to the machine.
        newest: gives the newest round that the machine has heard of.
        """
        self._task = asyncio.create_task(self._read(tip, put, newest))

    async def aclose(self) -> None:
        await cancel(self._task)

    async def _read(self, tip: Tip, put: Callable[[member_events.Event], None], newest: Callable[[], int]) -> None:
        now, emit = self._network.clock.steady, self._network.emit
        began = reported = now()
        first = tip.round

        def report(newest: int) -> None:
            seconds = round(now() - began, 3)
            emit(events.ReadingLog(round=tip.round, newest=max(newest, tip.round), after=first, seconds=seconds))

        coming = asyncio.create_task(self._page(tip.round, newest))
        try:
            while (found := await coming) is not None:
                node, raws = found
                coming = asyncio.create_task(self._page(tip.round + len(raws), newest))
                came = await asyncio.to_thread(_checked, self._manifest, tip, raws, node)
                tip = came[-1].tip
                put(member_events.LogCame(came))
                if now() - reported >= PROGRESS_SECONDS:
                    reported = now()
                    report(newest())
            if reported > began:
                report(tip.round)
        except RemoteError as error:
            emit(events.Warning(text=str(error)))
        finally:
            await cancel(coming)
            put(member_events.LogRead())

    async def _page(self, after: int, newest: Callable[[], int]) -> tuple[str, list[bytes]] | None:
        """A node, and its records after this round; None where no node has any. Raises RemoteError where none
        answers."""
        failure: RemoteError | None = None
        answered, now, rates = False, self._network.clock.steady, self._bytes_per_second
        for node in sorted(self._network.directory.operators, key=lambda node: -rates.get(node, math.inf)):
            began = now()
            try:
                await self._network.directory.reach(node)
                raws = await log_page(self._network.transport, node, after, PAGE_SECONDS)
            except RemoteError as error:
                rates[node], failure = 0.0, error
                continue
            if raws:
                rates[node] = sum(map(len, raws)) / max(1e-3, now() - began)
                return node, raws
            answered = True
            if newest() <= after:
                return None
        if failure is not None and not answered:
            raise failure
        return None


def _checked(manifest: Manifest, tip: Tip, raws: Sequence[bytes], node: str) -> tuple[Stretch, ...]:
    return tuple(history.read(manifest, tip, raws, node))


class Follower:
    """Folds the log of one peer, and reports every commit that breaks a rule: `potluck log verify` finds the same."""

    def __init__(self, manifest: Manifest, emit: events.Emit) -> None:
        self.state = run_state.begin(manifest)
        """The state after the commits that are folded; older than the log while a long log is folded in pieces."""
        self.credits = Credits(manifest.model.n_layers)
        """The credits after the same commits."""
        self._emit = emit
        self._task: asyncio.Task[None] | None = None

    def follow(self, log: Mapping[int, Commit]) -> None:
        """Folds what is new in `log`, which has every round from 0 on."""
        if self._task is not None and not self._task.done():
            return
        if len(log) - self.state.round > AT_ONCE_ROUNDS:
            self._task = asyncio.create_task(self._catch_up(log))
        else:
            self._fold(log, len(log))

    async def aclose(self) -> None:
        await cancel(self._task)

    async def _catch_up(self, log: Mapping[int, Commit]) -> None:
        while self.state.round < len(log):
            self._fold(log, min(len(log), self.state.round + PIECE_ROUNDS))
            await asyncio.sleep(PAUSE_SECONDS)

    def _fold(self, log: Mapping[int, Commit], end: int) -> None:
        for round in range(self.state.round, end):
            for violation in itertools.islice(rules.check(self.state, log[round]), REPORTED):
                self._emit(events.Violation(round=round, rule=violation.rule, reason=violation.reason))
            self.state = self.state.apply(log[round])
            self.credits.add(log[round])
