"""Reads the log of a run from a bootstrap node's folder, without a lock, or over the network."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from peer.net.base import Transport
from peer.net.blobs import BlobStore, Fetcher
from peer.net.blobs.fetching import fetch_named
from peer.net.node_calls import RosterReader, log_page
from protocol.errors import LocalError, RemoteError, UsageError, os_errors, shown
from protocol.identity import short_peer
from protocol.ledger import history
from protocol.ledger.history import BadCommit
from protocol.run import manifest as manifests
from protocol.run.manifest import Manifest
from protocol.wire import encoding, endpoints, logfile
from protocol.wire.commit import Commit, Record

T = TypeVar("T")


class BadPayload(Exception):
    """A payload that a commit names is missing or wrong; the text says why."""


async def checked(manifest: Manifest, source: Source) -> AsyncGenerator[Record, None]:
    """The records of a log, each checked against the one before.

    Raises LocalError at the first invalid one, and what the source raises.
    """
    before: Commit | None = None
    try:
        async for raw in source.records():
            record = history.follow(manifest, before, raw)
            yield record
            before = record.commit
    except BadCommit as error:
        round = 0 if before is None else before.round + 1
        raise LocalError(f"log {source.name}: round {round}: the commit {error}; compare with another node's") from None


class Folder:
    """The folder of a bootstrap node. Raises UsageError if it has no log.

    name: for messages.
    note: receives what a reader should know about the log.
    """

    def __init__(self, folder: Path, note: Callable[[str], None] = lambda text: None) -> None:
        self.name = str(folder / logfile.LOG)
        self._folder, self._note = folder, note
        self._torn = -1
        """Where the record begins of which a note was made."""
        if not (folder / logfile.LOG).is_file():
            raise UsageError(f"directory {folder}: has no log; give the folder (--dir) of a bootstrap node, or RUN")

    async def records(self) -> AsyncGenerator[bytes, None]:
        """Every record, oldest first. Raises BadCommit for an unreadable one, UsageError."""
        path, end = self._folder / logfile.LOG, 0
        try:
            with os_errors(f"log {path}", "give a folder that can be read"), open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                for at, raw in logfile.records(file, path):
                    end = logfile.end_of(at, raw)
                    yield raw
                if end < size and end != self._torn:
                    self._torn = end
                    self._note(
                        f"after byte {end} there is a record that is not whole: a crash cut it off, or it is being"
                        " written"
                    )
        except logfile.Damaged as error:
            raise BadCommit(f"cannot be read: its record at byte {error.at} is damaged") from None

    async def payload(self, digest: str, size: int) -> bytes:
        """The blob with this digest. Raises BadPayload."""
        try:
            return await asyncio.to_thread((self._folder / "blobs" / _hex(digest)).read_bytes)
        except OSError as error:
            raise BadPayload(f"not in {self._folder / 'blobs'} ({error.strerror})") from None

    async def tokenizer(self, manifest: Manifest) -> bytes:
        """The JSON file of the run's tokenizer. Raises UsageError."""
        path = self._folder / "tokenizer.json"
        with os_errors(f"tokenizer {path}", "start the bootstrap node of this folder once"):
            return _checked(await asyncio.to_thread(path.read_bytes), manifest, str(path))

    async def said_names(self, run: str) -> dict[str, str]:
        """Names that present peers announce, by peer id; raw, may be empty. A folder has none."""
        return {}

    async def manifest(self) -> Manifest | None:
        """The run's manifest, None for an empty log. Raises UsageError."""
        try:
            async with contextlib.aclosing(self.records()) as log:
                raw = await anext(log, None)
            if raw is None:
                return None
            run = encoding.decode_record(raw, "the log").commit.run
        except (BadCommit, RemoteError) as error:
            raise LocalError(f"log {self.name}: round 0: the commit {error}; compare with another node's") from None
        path = self._folder / logfile.MANIFEST
        with contextlib.suppress(OSError):
            manifest = manifests.from_bytes(await asyncio.to_thread(path.read_bytes), str(path))
            if manifest.run_id == run:
                return manifest
        raise UsageError(
            f"directory {self._folder}: {path.name} is not the manifest of run {shown(run[:12])}…; start its bootstrap"
            " node once, or ask the node over the network"
        )


def _checked(tokenizer: bytes, manifest: Manifest, name: str) -> bytes:
    found = hashlib.sha256(tokenizer).hexdigest()
    if found != manifest.tokenizer.digest:
        raise UsageError(
            f"tokenizer {name}: is another one than the run's; start the bootstrap node with the run's own"
        )
    return tokenizer


def _hex(text: str) -> str:
    """`text` if it can be a blob's name: a remote one may be a path out of the folder."""
    return text if len(text) == 64 and set(text) <= set("0123456789abcdef") else "none"


class Remote:
    """The bootstrap nodes of a run, with the methods of Folder; the first that answers is used.

    All methods raise RemoteError if none answers. Payloads pass through `store`.
    """

    def __init__(self, transport: Transport, nodes: Sequence[str], store: BlobStore) -> None:
        self.name = f"of {', '.join(map(short_peer, nodes))}"
        self._transport = transport
        self._nodes = nodes
        self._store = store
        self._fetcher = Fetcher(transport, store)

    async def records(self) -> AsyncGenerator[bytes, None]:
        known = 0

        async def ask(node: str) -> list[bytes]:
            return await log_page(self._transport, node, known - 1)

        while found := await self._any(ask):
            for raw in found:
                known += 1
                yield raw

    async def _any(self, ask: Callable[[str], Awaitable[T]]) -> T:
        """The first answer of a node. Raises the last one's RemoteError."""
        *others, last = self._nodes
        for node in others:
            with contextlib.suppress(RemoteError):
                return await ask(node)
        return await ask(last)

    async def payload(self, digest: str, size: int) -> bytes:
        await self._fetcher.fetch(digest, size, self._nodes)
        data = await asyncio.to_thread(self._store.get, digest)
        self._store.remove(digest)
        if data is None:
            raise BadPayload("its file was removed while it was read")
        return data

    async def tokenizer(self, manifest: Manifest) -> bytes:
        async def fetch(node: str) -> bytes:
            raw = await fetch_named(self._transport, node, endpoints.TOKENIZER_NAME, limit=endpoints.MAX_TOKENIZER)
            return _checked(raw, manifest, f"of {short_peer(node)}")

        return await self._any(fetch)

    async def said_names(self, run: str) -> dict[str, str]:
        roster = RosterReader(self._transport, run)
        with contextlib.suppress(RemoteError):
            await roster.refresh(self._nodes)
        return {peer: found.name for peer, found in roster.known.items()}

    async def aclose(self) -> None:
        """Cancels fetches under way."""
        await self._fetcher.aclose()


Source = Folder | Remote
