"""How payloads, and the lists that name them, come into a bootstrap node's archive: fetched, checked within all their bounds, stored, and
only then held."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from bootstrap.archive import Archive
from peer import events
from peer.net.base import Transport
from peer.net.blobs import Fetcher
from peer.net.directory import Directory
from protocol.codec import sparse
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.rounds import part_lists
from protocol.rounds.part_lists import Parts
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit, Part, Share
from protocol.wire.session import Withdraw

RETRY_SECONDS = 2.0


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
        self._emit = emit
        self._held = held
        self._listed = listed
        self._refused = refused
        self._fetching: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.fetcher = Fetcher(transport, archive.blobs, reach=directory.reach, warn=self._warn, sync=True)

    def complete(self, commits: Iterable[Commit]) -> None:
        """Begins to get what the commits name and the archive lacks, until it has it."""
        self._spawn(self._complete(list(commits)))

    def fetch(self, holders: Sequence[str], part: Part, sender: str, round: int) -> None:
        """Begins to get a payload of `sender`'s offer to `round` from one of `holders` or another operator's node."""
        self._spawn(self._fetch(holders, part, sender, round))

    def fetch_list(self, holders: Sequence[str], share: Share, round: int) -> None:
        """Begins to get the list of parts of a share, of a commit of `round` or offered to it, as `fetch` does; or to read it, if it is here."""
        self._spawn(self._fetch_list(holders, share, round))

    def keep(self, parts: Parts, round: int) -> None:
        """Begins to store the list of an offer to `round`."""
        self._spawn(self._keep(parts, round))

    async def aclose(self) -> None:
        """Ends what is under way."""
        for task in self._tasks:
            task.cancel()
        await self.fetcher.aclose()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _complete(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            for share in commit.shares:
                while (parts := await self._list_of((share.peer,), share, commit.round)) is None:
                    await asyncio.sleep(RETRY_SECONDS)
                for part in parts:
                    while not self._archive.blobs.has(part.digest):
                        await self._fetch((share.peer,), part, share.peer, commit.round)
                        await asyncio.sleep(0 if self._archive.blobs.has(part.digest) else RETRY_SECONDS)

    async def _keep(self, parts: Parts, round: int) -> None:
        root = await asyncio.to_thread(self._archive.blobs.put, part_lists.pack(parts), round)
        self._listed(root, parts)

    async def _fetch_list(self, holders: Sequence[str], share: Share, round: int) -> None:
        if share.root in self._fetching:
            return
        self._fetching.add(share.root)
        try:
            parts = await self._list_of(holders, share, round)
        finally:
            self._fetching.discard(share.root)
        if parts is not None:
            self._listed(share.root, parts)

    async def _list_of(self, holders: Sequence[str], share: Share, round: int) -> Parts | None:
        """A share's list, once it is here; None where it cannot be had now."""
        if not part_lists.may_be_fetched(self._manifest, share):
            return None
        try:
            await self.fetcher.fetch(share.root, share.listed, self._asked(holders), round=round, check=_check_list)
            raw = await asyncio.to_thread(self._archive.blobs.get, share.root)
            return None if raw is None else part_lists.unpack(raw)
        except (RemoteError, part_lists.BadList) as error:
            self._warn(f"list of parts of {short_peer(share.peer)}: {error}")
            return None

    async def _fetch(self, holders: Sequence[str], part: Part, sender: str, round: int) -> None:
        if part.digest in self._fetching:
            return
        self._fetching.add(part.digest)
        shapes = layout.shapes(self._manifest.model, part.shard)

        def check(data: bytes) -> None:
            sparse.decode(self._manifest.outer.codec, shapes, data)

        try:
            await self.fetcher.fetch(part.digest, part.size, self._asked(holders), round=round, check=check)
            self._held(part.digest)
        except sparse.PayloadError as error:
            self._refused(sender, Withdraw(round=round, reason=f"payload of {part.shard}: {error}"))
        except RemoteError as error:
            self._warn(str(error))
        finally:
            self._fetching.discard(part.digest)

    def _asked(self, holders: Sequence[str]) -> list[str]:
        asked = dict.fromkeys((*holders, *self._manifest.operators))
        return [peer for peer in asked if peer != self._transport.peer_id]

    def _warn(self, text: str) -> None:
        self._emit(events.Warning(text=text))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _check_list(raw: bytes) -> None:
    part_lists.unpack(raw)
