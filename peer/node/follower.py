"""The run's state at a peer: the log folded once, and each commit checked against the rules (protocol/ledger/rules.py)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping

from peer import events
from protocol.ledger import rules, run_state
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit

AT_ONCE_ROUNDS = 128
"""The most rounds that are folded in one step of the event loop. A longer log is folded in pieces of PIECE_ROUNDS."""
PIECE_ROUNDS = 4
"""Of 16 replicas: about 10 ms of one core."""
PAUSE_SECONDS = 0.1
"""Between two pieces."""
REPORTED = 3
"""Violations of one commit that are reported."""


class Follower:
    """Folds the log of one peer, and reports every commit that breaks a rule: `potluck log verify` finds the same."""

    def __init__(self, manifest: Manifest, emit: events.Emit) -> None:
        self.state = run_state.begin(manifest)
        """The state after the commits that are folded; older than the log while a long log is folded in pieces."""
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
        """Ends the folding of a long log."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _catch_up(self, log: Mapping[int, Commit]) -> None:
        while self.state.round < len(log):
            self._fold(log, min(len(log), self.state.round + PIECE_ROUNDS))
            await asyncio.sleep(PAUSE_SECONDS)

    def _fold(self, log: Mapping[int, Commit], end: int) -> None:
        for round in range(self.state.round, end):
            commit = log[round]
            for violation in itertools.islice(rules.check(self.state, commit), REPORTED):
                self._emit(events.Violation(round=round, rule=violation.rule, reason=violation.reason))
            self.state = self.state.apply(commit)
