"""How payloads, and the lists that name them, come into a bootstrap node's archive: fetched, checked within all their bounds, stored, and
only then held. What was offered to a round and is not committed goes when the round is decided."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from bootstrap.archive import Archive
from peer import events
from peer.net.base import Transport
from peer.net.blobs import Fetcher
from peer.net.directory import Directory
from peer.net.token_bucket import TokenBucket
from protocol.codec import sparse
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.ledger import part_lists
from protocol.ledger.part_lists import Parts
from protocol.round import comparing
from protocol.round.comparing import Notes
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit, Part, Share
from protocol.wire.session import Withdraw

RETRY_SECONDS = 2.0
WARNINGS = (1.0, 50.0)
"""That are told in a second, and at once: others decide how often a fetch fails."""
SWEPT_ROUNDS = 64
"""Of the newest rounds what is not committed is looked for at the start: a crash may have left it."""
_FOR_GOOD = 2**31
"""The round for which something is wanted that the log names."""


class Payloads:
    """`held(digest)` is called when a payload is here, `listed(root, parts)` when a list of parts is, `refused(peer, withdraw)` when
    something is no payload: that takes its sender out of the round."""

    def __init__(
        self,
        manifest: Manifest,
        transport: Transport,
        archive: Archive,
        directory: Directory,
        emit: events.Emit,
        held: Callable[[str], None],
        listed: Callable[[str, Parts], None],
        refused: Callable[[str, Withdraw], None],
    ) -> None:
        self._manifest = manifest
        self._transport = transport
        self._archive = archive
        self._directory = directory
        self._emit = emit
        self._held = held
        self._listed = listed
        self._refused = refused
        self.notes = Notes(lock=threading.Lock())
        """What is in payloads that are judged soon."""
        self._fetching: set[str] = set()
        self._wanted: dict[str, int] = {}  # the newest round that what is under way, or was lately, is for
        self._decided = -1
        self._warnings = TokenBucket(*WARNINGS)
        self._tasks: set[asyncio.Task[None]] = set()
        self.fetcher = Fetcher(transport, archive.blobs, reach=directory.reach, warn=self._warn, sync=True)

    def complete(self, commits: Iterable[Commit]) -> None:
        """Begins to get what the commits name and the archive lacks, until it has it."""
        self._spawn(self._complete(commits))

    def fetch(self, holders: Sequence[str], part: Part, sender: str, round: int) -> None:
        """Begins to get a payload of `sender`'s offer to `round` from one of `holders` or another operator's node."""
        self._want(part.digest, round)
        self._spawn(self._fetch(holders, part, sender, round))

    def fetch_list(self, holders: Sequence[str], share: Share, round: int) -> None:
        """Begins to get the list of parts of a share, of a commit of `round` or offered to it, as `fetch` does; or to read it, if it is here."""
        self._want(share.root, round)
        self._spawn(self._fetch_list(holders, share, round))

    def keep(self, parts: Parts, round: int) -> None:
        """Begins to store the list of an offer to `round`."""
        self._want(part_lists.root_of(parts), round)
        self._spawn(self._keep(parts, round))

    async def settle(self, commit: Commit) -> set[str]:
        """The commit's round is decided: what was offered to it and is not in it goes, and so do fetches of it, and what other fetches began
        and nobody goes on with. The names of what is gone; where a list of the commit is not here yet, nothing is."""
        committed = await asyncio.to_thread(self._names, commit)
        if committed is None:
            return set()
        self.notes.settle(committed)
        self._decided = max(self._decided, commit.round)
        late = {name for name, round in self._wanted.items() if round <= commit.round and name not in committed}
        for name in late:
            self.fetcher.give_up(name)
        kept = {name for name, round in self._wanted.items() if round > commit.round}
        gone = await asyncio.to_thread(self._archive.blobs.settle, commit.round, committed | kept)
        for name in late:
            if self._archive.blobs.round_of(name) == commit.round:  # it was whole a moment before it was given up
                self._archive.blobs.remove(name)
                gone.add(name)
        self._wanted = {n: r for n, r in self._wanted.items() if r > commit.round or n in self._fetching}
        self._archive.blobs.drop_parts(
            {*self.fetcher.running, *self._fetching} - late
        )  # at once, or one might just have begun
        return gone

    async def sweep(self, commits: Sequence[Commit]) -> set[str]:
        """Before anything is offered: as `settle`, for the newest of these commits."""
        return set().union(*[await self.settle(commit) for commit in commits[-SWEPT_ROUNDS:]])

    def _names(self, commit: Commit) -> set[str] | None:
        """Everything that a commit names, None where a list is not here."""
        names: set[str] = set()
        for share in commit.shares:
            raw = self._archive.blobs.get(share.root)
            if raw is None:
                return None
            names |= {share.root, *(part.digest for part in part_lists.unpack(raw))}
        return names

    def _is_late(self, name: str) -> bool:
        """Whether what has just come is for a round that was decided without it; then it is not kept."""
        round = self._wanted.get(name, _FOR_GOOD)
        if round > self._decided or self._archive.blobs.round_of(name) != round:
            return False
        self._archive.blobs.remove(name)
        return True

    def _want(self, name: str, round: int) -> None:
        self._wanted[name] = max(round, self._wanted.get(name, -1))

    async def aclose(self) -> None:
        """Ends what is under way."""
        for task in self._tasks:
            task.cancel()
        await self.fetcher.aclose()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _complete(self, commits: Iterable[Commit]) -> None:
        for commit in commits:
            for share in commit.shares:
                self._want(share.root, _FOR_GOOD)
                while (parts := await self._list_of((share.peer,), share, commit.round)) is None:
                    await asyncio.sleep(RETRY_SECONDS)
                self._wanted.pop(share.root, None)
                for part in parts:
                    self._want(part.digest, _FOR_GOOD)
                    while not self._archive.blobs.has(part.digest):
                        await self._fetch((share.peer,), part, share.peer, commit.round)
                        await asyncio.sleep(0 if self._archive.blobs.has(part.digest) else RETRY_SECONDS)
                    self._wanted.pop(part.digest, None)

    async def _keep(self, parts: Parts, round: int) -> None:
        self._fetching.add(root := part_lists.root_of(parts))
        try:
            await asyncio.to_thread(self._archive.blobs.put, part_lists.pack(parts), round)
        finally:
            self._fetching.discard(root)
        if not self._is_late(root):
            self._listed(root, parts)

    async def _fetch_list(self, holders: Sequence[str], share: Share, round: int) -> None:
        if share.root in self._fetching:
            return
        self._fetching.add(share.root)
        try:
            parts = await self._list_of(holders, share, round)
        finally:
            self._fetching.discard(share.root)
        if parts is not None and not self._is_late(share.root):
            self._listed(share.root, parts)

    async def _list_of(self, holders: Sequence[str], share: Share, round: int) -> Parts | None:
        """A share's list, once it is here; None where it cannot be had now."""
        if not part_lists.may_be_fetched(self._manifest, share):
            return None
        try:
            asked = self._asked(holders)
            await self.fetcher.fetch(share.root, share.listed, asked, round=round, check=_check_list, owner=share.peer)
            raw = await asyncio.to_thread(self._archive.blobs.get, share.root)
            return None if raw is None else part_lists.unpack(raw)
        except (RemoteError, part_lists.BadList) as error:
            self._warn(f"list of parts of {short_peer(share.peer)}: {error}")
            return None

    async def _fetch(self, holders: Sequence[str], part: Part, sender: str, round: int) -> None:
        if part.digest in self._fetching:
            return
        self._fetching.add(part.digest)

        def check(data: bytes) -> None:
            found = comparing.examine(self._manifest, part.shard, data)
            if not comparing.is_true(part.norm, found.norm):
                raise sparse.PayloadError(f"its norm is {found.norm:.6g}, not {part.norm:.6g}")
            if round >= self._decided:
                self.notes.keep(sender, part, found)

        try:
            asked = self._asked(holders)
            await self.fetcher.fetch(part.digest, part.size, asked, round=round, check=check, owner=sender)
            if not self._is_late(part.digest):
                self._held(part.digest)
        except sparse.PayloadError as error:
            self._refused(sender, Withdraw(round=round, reason=f"payload of {part.shard}: {error}"))
        except RemoteError as error:
            self._warn(str(error))
        finally:
            self._fetching.discard(part.digest)

    def _asked(self, holders: Sequence[str]) -> list[str]:
        asked = dict.fromkeys((*holders, *self._directory.operators))
        return [peer for peer in asked if peer != self._transport.peer_id]

    def _warn(self, text: str) -> None:
        if self._warnings.take(asyncio.get_running_loop().time()):
            self._emit(events.Warning(text=text))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _check_list(raw: bytes) -> None:
    part_lists.unpack(raw)
