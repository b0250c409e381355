"""Which shares of offers may be fetched, told to everybody who has a session, in batches.

One message takes as long to post and to send as there are sessions. So after each there is a pause in proportion to them: what comes
meanwhile goes with the next one, and telling takes the same share of this node's time however many peers and payloads there are. In
a small swarm the pause is shorter than a round trip.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from protocol.wire.commit import Share
from protocol.wire.session import Offered

PAUSE_SECONDS = 0.005
"""For each session; to send one message to one takes about 50 microseconds."""
MOST_SHARES = 4096
"""Of one message."""


class News:
    """`tell` sends a message to everybody, `sessions` says how many those are."""

    def __init__(self, tell: Callable[[Offered], None], sessions: Callable[[], int]) -> None:
        self._tell = tell
        self._sessions = sessions
        self._waiting: deque[tuple[int, Share]] = deque()
        self._something = asyncio.Event()

    def add(self, round: int, share: Share) -> None:
        """All of this share, which was offered to `round`, is here."""
        self._waiting.append((round, share))
        self._something.set()

    async def run(self) -> None:
        """Tells what is added. Never returns."""
        while True:
            await self._something.wait()
            self._something.clear()
            for message in self._messages():
                self._tell(message)
                await asyncio.sleep(PAUSE_SECONDS * self._sessions())

    def _messages(self) -> list[Offered]:
        rounds: dict[int, list[Share]] = {}
        for _ in range(min(MOST_SHARES, len(self._waiting))):
            round, share = self._waiting.popleft()
            rounds.setdefault(round, []).append(share)
        if self._waiting:
            self._something.set()
        return [Offered(round=round, shares=tuple(shares)) for round, shares in rounds.items()]
