"""A recorded run, told again: the events that a process printed with `--json`, or the log of a bootstrap node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from peer import events
from peer.events import Event, Sink
from peer.log import reader
from peer.ui import monitor
from protocol.errors import UsageError
from protocol.ledger import history
from protocol.ledger.history import BadCommit
from protocol.run.manifest import Manifest
from protocol.wire import logfile
from protocol.wire.commit import Commit

ROUND_SECONDS = 0.25
"""How long a round is shown."""


class Replay:
    """Tells what is in `file`, as a Monitor tells a run that goes on. Raises UsageError where nothing is."""

    def __init__(self, manifest: Manifest, file: Path) -> None:
        if not file.is_file():
            raise UsageError(f"--replay {file}: no such file; give a file of events or a bootstrap node's log")
        self._manifest = manifest
        self._file = file

    @property
    def news_age(self) -> None:
        """A recording does not get older."""

    async def poll(self, sink: Sink) -> None:
        """Everything at once."""
        found = False
        async for event in self._events():
            found = True
            sink(event)
        if not found:
            raise UsageError(f"--replay {self._file}: has no events; give what a process printed with --json, or a log")

    async def follow(self, sink: Sink) -> None:
        """Round by round."""

        async for event in self._events():
            sink(event)
            if isinstance(event.body, events.Commit):
                await asyncio.sleep(ROUND_SECONDS)

    async def _events(self) -> AsyncIterator[Event]:
        if self._file.name == logfile.LOG:
            async for event in self._logged():
                yield event
            return
        try:
            with open(self._file, encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if (told := events.from_json(line)) is not None:
                        yield told
        except OSError as error:
            raise UsageError(f"--replay {self._file}: {error.strerror}; give a file that can be read") from None

    async def _logged(self) -> AsyncIterator[Event]:
        before: Commit | None = None
        try:
            async for raw in reader.Folder(self._file.parent).records(lambda note: None):
                record = history.follow(self._manifest, before, raw)
                before = record.commit
                for event in monitor.told(record):
                    yield event
        except BadCommit as error:
            round = 0 if before is None else before.round + 1
            raise UsageError(f"--replay {self._file}: round {round}: the commit {error}; give RUN's own log") from None
