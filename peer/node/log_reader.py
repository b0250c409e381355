"""Reads the log of the run from the bootstrap nodes, as far as they have it: in pages, the next one on its way while one is looked at.

A newcomer does so once, and who has lost commits, from where it is. It is a call of its own, and not the session, which carries what is decided
meanwhile. What a page says is checked on a thread (protocol/ledger/history.py). Each page is asked of a node that has not been asked yet, and then
of the one that was quickest the last time: so none of them decides alone how long it takes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from peer import events
from peer.net.asking import page
from peer.net.network import Network
from protocol.errors import RemoteError
from protocol.ledger import history
from protocol.ledger.history import Stretch, Tip
from protocol.round import member_events
from protocol.run.manifest import Manifest

PAGE_SECONDS = 30.0
"""That a page of a MiB may take on a slow line."""
PROGRESS_SECONDS = 2.0
"""How often it is told how far it is."""


class LogReader:
    """One per peer. `put` hands what came to the machine; `newest()`: the newest round of which it has heard."""

    def __init__(
        self,
        manifest: Manifest,
        network: Network,
    ) -> None:
        self._manifest = manifest
        self._transport = network.transport
        self._directory = network.directory
        self._emit = network.emit
        self._clock = network.clock
        self._rates: dict[str, float] = {}
        """Bytes a second of each node's last page; 0 where there was none."""
        self._task: asyncio.Task[None] | None = None

    def begin(self, tip: Tip, put: Callable[[member_events.Event], None], newest: Callable[[], int]) -> None:
        """Reads what comes after `tip`, and ends with LogRead."""
        self._task = asyncio.create_task(self._read(tip, put, newest))

    async def aclose(self) -> None:
        """Ends what is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self, tip: Tip, put: Callable[[member_events.Event], None], newest: Callable[[], int]) -> None:
        began = told = self._clock.steady()
        first = tip.round
        coming = asyncio.create_task(self._page(tip.round, newest))
        try:
            while (found := await coming) is not None:
                node, raws = found
                coming = asyncio.create_task(self._page(tip.round + len(raws), newest))
                came = await asyncio.to_thread(self._checked, tip, raws, node)
                tip = came[-1].tip
                put(member_events.LogCame(came))
                now = self._clock.steady()
                if now - told >= PROGRESS_SECONDS:
                    told = now
                    self._emit(self._told(tip, newest(), first, now - began))
            if told > began:
                self._emit(self._told(tip, tip.round, first, self._clock.steady() - began))
        except RemoteError as error:
            self._emit(events.Warning(text=str(error)))
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
            put(member_events.LogRead())

    def _told(self, tip: Tip, newest: int, first: int, seconds: float) -> events.ReadingLog:
        return events.ReadingLog(round=tip.round, newest=max(newest, tip.round), after=first, seconds=round(seconds, 3))

    def _checked(self, tip: Tip, raws: Sequence[bytes], node: str) -> tuple[Stretch, ...]:
        return tuple(history.read(self._manifest, tip, raws, node))

    async def _page(self, after: int, newest: Callable[[], int]) -> tuple[str, list[bytes]] | None:
        """Some records after this round, and who sent them; None where no node has any. Raises RemoteError where none answers."""
        failure: RemoteError | None = None
        answered = False
        for node in sorted(self._directory.operators, key=lambda node: -self._rates.get(node, math.inf)):
            began = self._clock.steady()
            try:
                await self._directory.reach(node)
                raws = await page(self._transport, node, after, PAGE_SECONDS)
            except RemoteError as error:
                self._rates[node] = 0.0
                failure = error
                continue
            if raws:
                self._rates[node] = sum(map(len, raws)) / max(1e-3, self._clock.steady() - began)
                return node, raws
            answered = True
            if newest() <= after:
                return None
        if failure is not None and not answered:
            raise failure
        return None
