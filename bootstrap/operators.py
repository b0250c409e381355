"""Whom a node takes for the run's operators: its own log says it (protocol/ledger/board.py). Where the log is old, nobody whom it names may be
there any more, or this node may not be named yet. Then it asks whomever it can reach for what came since, checks that, and from then on
talks to whom the newest commit names. Nothing else is taken from there: its log grows by what those say.

A node that the run's operators have dismissed ends once enough of those who decide now have the commit that says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from bootstrap.archive import Archive
from bootstrap.links import Links
from peer.net.address import peers_of
from peer.net.asking import page
from peer.net.base import Transport
from peer.net.directory import Directory
from protocol.errors import RemoteError
from protocol.ledger import board, history
from protocol.ledger.history import BadCommit
from protocol.quorum.paxos import Quorum
from protocol.wire import encoding
from protocol.wire.commit import Commit, votes_needed

LOOK_SECONDS = 2.0
"""Between two looks whether anybody has to be asked."""
ASK_SECONDS = 30.0
"""In which somebody has shown what it has; the rest is asked for the next time."""
LINGER_SECONDS = 5.0
"""After which a dismissed node ends: the command that dismissed it asks it whether that is decided."""
MAX_KNOCKING = 8
"""Of those who want to say something and are not known, so many are asked."""


class Dismissed(Exception):
    """This node operates the run no more, and those who do know it."""


class Operators:
    """Of one node. `quorum()`: its machine. `tell(text)`: the operator is told something, once. `others`: addresses to begin with."""

    def __init__(
        self,
        directory: Directory,
        transport: Transport,
        archive: Archive,
        others: Sequence[str],
        quorum: Callable[[], Quorum],
        tell: Callable[[str], None],
    ) -> None:
        self._manifest = manifest = archive.manifest
        self._peer = peer = transport.peer_id
        self._transport = transport
        self._directory = directory
        self._archive = archive
        self._others = peers_of(others)
        self._quorum = quorum
        self._tell = tell
        self._hint: Commit | None = None
        self._following = asyncio.Lock()
        self._knocking: dict[str, None] = {}
        self._was_named = peer in manifest.operators or peer in archive.named
        self._told = False

    def knocks(self, node: str) -> None:
        """Somebody whom our log does not name wants to say something: it may know more."""
        self._knocking[node] = None
        while len(self._knocking) > MAX_KNOCKING:
            del self._knocking[next(iter(self._knocking))]

    @property
    def head(self) -> Commit | None:
        """The newest commit that is known: of our log, or of what others have shown."""
        head = self._quorum().head
        own = -1 if head is None else head.round
        return self._hint if self._hint is not None and self._hint.round > own else head

    @property
    def is_named(self) -> bool:
        """Whether this node operates the run, as far as is known."""
        return self._peer in board.operators(self._manifest, self.head)

    async def follow(self, links: Links) -> None:
        """Whom we talk to from now on."""
        async with self._following:  # who looks later knows more, and has the last word
            quorum, head = self._quorum(), self.head
            known = board.of(self._manifest, head)
            self._directory.follow(known)
            names = {*quorum.reached, *board.operators(self._manifest, head)} - {self._peer}
            self._was_named = self._was_named or self._peer in quorum.operators
            await links.follow(names if self.is_named or self._was_named else ())

    async def watch(self, links: Links) -> None:
        """Asks others where that is needed. Raises Dismissed."""
        while True:
            quorum = self._quorum()
            if not self.is_named and self._was_named:
                await self._ask_all(links)
                if not self.is_named:
                    await self._leave()
            else:
                lost = not self.is_named or quorum.leadership.has_stalled
                if lost or self._knocking:
                    await self._ask_all(links, lost)
            if not self.is_named and not self._was_named and not self._told:
                self._told = True
                self._tell(
                    f"{self._peer} is no operator of it; this node waits until the operators appoint it: potluck run appoint"
                )
            await asyncio.sleep(LOOK_SECONDS)

    async def _ask_all(self, links: Links, lost: bool = True) -> None:
        """Asks those who knocked, and where this node is `lost`, all whom it knows besides."""
        known = (*self._others, *board.of(self._manifest, self.head).names) if lost else ()
        here = [name for name in self._knocking if name not in known]
        self._knocking.clear()
        names = [name for name in (*dict.fromkeys(known), *here) if name != self._peer]
        await asyncio.gather(*(self._ask(name, name in known, links) for name in names))

    async def _ask(self, node: str, dial: bool, links: Links) -> None:
        """What `node` has after what is known, and whom that names: who answers nothing, or slowly, delays nobody's news. Nobody is looked
        for since he knocked: he is connected to us."""
        before = self.head
        try:
            async with asyncio.timeout(ASK_SECONDS):
                if dial:
                    await self._directory.reach(node)
                while await self._read(node):
                    pass
        except (RemoteError, TimeoutError):
            self._directory.lost(node)
        if self.head is not before:
            await self.follow(links)

    async def _read(self, node: str) -> bool:
        """Takes what `node` sends at once; whether there was something. Raises RemoteError."""
        head = self.head
        found = await page(self._transport, node, -1 if head is None else head.round)
        for raw in found:
            try:
                head = history.follow(self._manifest, head, raw).commit
            except BadCommit:
                return False
            await asyncio.sleep(0)
        known = self.head
        if head is not None and (known is None or head.round > known.round):
            self._hint = head
        return bool(found)

    async def _leave(self) -> None:
        """Ends this node once enough of those who decide now have the commit that dismissed it, which nobody else may have yet."""
        head = self._quorum().head
        if head is None:
            return
        members = board.members_after(self._manifest, head)
        have = 0
        for node in members:
            try:
                await self._directory.reach(node)
                for raw in await page(self._transport, node, head.round - 1):
                    have += encoding.decode_record(raw, node).commit.digest == head.digest
                    break
            except RemoteError:
                self._directory.lost(node)
        if have >= votes_needed(len(members)):
            await asyncio.sleep(LINGER_SECONDS)
            raise Dismissed
