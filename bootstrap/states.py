"""Makes the states that a bootstrap node's archive keeps (protocol/ledger/retention.py).

A node computes a state from the one before and the payloads since, shard by shard, and trusts no other: it is stored if
it has the digests of the log, and until then the archive keeps all that it is made of. A node that was away while the
others removed those payloads takes the older state from them, by its digests;
so does one whose folder lacks the weights that the run begins with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from bootstrap.archive import Archive
from bootstrap.payloads import Payloads
from protocol.errors import RemoteError

RETRY_SECONDS = 10.0
StoreState = Callable[[str, int, int, Callable[[], bool]], bool | None]
"""(shard, after, round, is_over): computes a state from the stored one of round `after`, and stores it, unless the node
ends (peer/log/recompute.py); called on threads."""


@dataclass(eq=False)
class StateKeeper:
    """tell: gives the operator a line."""

    archive: Archive
    payloads: Payloads
    store_state: StoreState
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        self.news = asyncio.Event()
        """Set when a round is decided."""
        self._wrong = -1  # the newest round of which this node computes other bits than the log says
        self._told = -1  # the newest round of which a state could not be fetched
        self._is_over = False

    async def run(self) -> None:
        """Never returns. Raises UsageError where the disk refuses."""
        self.news.set()
        try:
            while True:
                await self.news.wait()
                self.news.clear()
                for round in self.archive.states.kept:
                    if round > self._wrong:
                        await self._make(round)
        finally:
            self._is_over = True

    async def _make(self, round: int) -> None:
        """Makes what is missing of a state, as far as that can be had now."""
        for shard in self.archive.lacks(round):
            after, is_right = self.archive.newest_state(round - 1), None
            if round:
                is_right = await asyncio.to_thread(self.store_state, shard, after, round, lambda: self._is_over)
            if is_right is False:
                self._wrong = round
                return self.tell(
                    f"state of {shard} after round {round}: the log leads to other bits than its digests say; all"
                    " payloads are kept, check this machine's memory and disk, and compare with the other operators"
                )
            if is_right is None and not await self._fetched(shard, round):
                return

    async def _fetched(self, shard: str, round: int) -> bool:
        """Fetches a shard whose payloads may be gone. Returns whether it is here now."""
        if round != self.archive.states.begin:
            return False  # its payloads are on their way
        try:
            await self.payloads.fetch_state(shard, self.archive.states.digests[round][shard])
        except RemoteError as error:
            if self._told < round:
                self._told = round
                self.tell(f"state of {shard} after round {round}: {error}; the other operators are asked again")
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self.news.set)
            return False
        return True
