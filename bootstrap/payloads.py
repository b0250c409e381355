"""How payloads come into a bootstrap node's archive: fetched, checked within all their bounds, stored, and only then held."""

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
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit, Part
from protocol.wire.session import Withdraw

RETRY_SECONDS = 2.0


class Payloads:
    """`held(round, sender, part)` is called when a payload is here that was not, `refused(peer, withdraw)` when one is no payload: that takes its
    sender out of the round."""

    def __init__(
        self,
        manifest: Manifest,
        transport: Transport,
        archive: Archive,
        directory: Directory,
        emit: events.Emit,
        held: Callable[[int, str, Part], None],
        refused: Callable[[str, Withdraw], None],
    ) -> None:
        self._manifest = manifest
        self._transport = transport
        self._archive = archive
        self._emit = emit
        self._held = held
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

    async def aclose(self) -> None:
        """Ends what is under way."""
        for task in self._tasks:
            task.cancel()
        await self.fetcher.aclose()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _complete(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            for share in (s for c in commit.contributions for s in c.shares):
                for part in share.parts:
                    while not self._archive.blobs.has(part.digest):
                        await self._fetch((share.peer,), part, share.peer, commit.round)
                        await asyncio.sleep(0 if self._archive.blobs.has(part.digest) else RETRY_SECONDS)

    async def _fetch(self, holders: Sequence[str], part: Part, sender: str, round: int) -> None:
        if part.digest in self._fetching:
            return
        self._fetching.add(part.digest)
        shapes = layout.shapes(self._manifest.model, part.shard)

        def check(data: bytes) -> None:
            sparse.decode(self._manifest.outer.codec, shapes, data)

        try:
            asked = dict.fromkeys((*holders, *self._manifest.operators))
            others = [peer for peer in asked if peer != self._transport.peer_id]
            await self.fetcher.fetch(part.digest, part.size, others, round=round, check=check)
            self._held(round, sender, part)
        except sparse.PayloadError as error:
            self._refused(sender, Withdraw(round=round, reason=f"payload of {part.shard}: {error}"))
        except RemoteError as error:
            self._warn(str(error))
        finally:
            self._fetching.discard(part.digest)

    def _warn(self, text: str) -> None:
        self._emit(events.Warning(text=text))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
