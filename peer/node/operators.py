"""Whom a peer takes for the run's operators: whom the newest commit that counts names (protocol/ledger/board.py). As long as the log is not here,
those whom a node names whom it began with are tried, too; nothing else follows from their word.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from peer.net.address import peers_of
from peer.net.network import Network
from peer.net.node_calls import ask_operators
from peer.node.sessions import Sessions
from protocol.errors import RemoteError
from protocol.ledger import access, board
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit
from protocol.wire.decree import Board, Motions

FIND_SECONDS = 5.0
"""That nodes may take to say who operates the run; one that we began with may be gone for good."""
LOST_SECONDS = 10.0
"""After which a peer without a session asks again."""


class Operators:
    """Of one peer. `dialled`: the nodes that it began with. `head()`: the newest commit that counts, None before the first."""

    def __init__(
        self,
        manifest: Manifest,
        network: Network,
        sessions: Sessions,
        bootstrap: Sequence[str],
        head: Callable[[], Commit | None],
    ) -> None:
        self.dialled = peers_of(bootstrap)
        self._manifest = manifest
        self._transport = network.transport
        self._directory = network.directory
        self._sessions = sessions
        self._head = head
        self._hint: Motions | None = None
        self._followed: tuple[Commit | None, Motions | None] | None = None

    async def find(self) -> None:
        """Asks those that we began with, and those that we know."""
        known = dict.fromkeys((*self.dialled, *self._directory.operators))
        await asyncio.gather(*(self._ask(node) for node in known if node != self._transport.peer_id))
        self.follow(self._head())

    async def _ask(self, node: str) -> None:
        with contextlib.suppress(RemoteError, TimeoutError):
            async with asyncio.timeout(FIND_SECONDS):
                await self._directory.reach(node)
                found = await ask_operators(self._transport, node)
            if self._hint is None or found.number > self._hint.number:
                self._hint = found

    def follow(self, head: Commit | None) -> None:
        """This commit is the newest one that counts. It is told with each event of a round."""
        if self._followed is not None and self._followed[0] is head and self._followed[1] is self._hint:
            return
        self._followed = head, self._hint
        known, hint = board.of(self._manifest, head), self._hint
        others: tuple[str, ...] = ()
        if hint is not None and access.decrees_after(head) < hint.number:
            others = (*self.dialled, *hint.board.names)
            known = Board(operators=(*known.operators, *hint.board.operators), quorum=known.quorum)
        self._directory.follow(known, others)
        self._sessions.follow()

    async def look(self) -> None:
        """Asks again where all sessions are lost. Never returns."""
        while True:
            await asyncio.sleep(LOST_SECONDS)
            if not self._sessions.is_open:
                await self.find()
