"""The log of a run, read from a bootstrap node's folder or over the network, and verified.

A folder is only read: no lock is taken, nothing is changed or removed, a node may be writing there. Its manifest lies beside
the log, and its digest is the run's id; so a folder has all that its verification needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Protocol

from peer.net.base import Transport
from peer.net.blobs import BlobStore, Fetcher
from peer.net.blobs.fetching import fetch_named
from peer.net.node_calls import RosterReader, log_page
from protocol.errors import LocalError, RemoteError, UsageError, shown
from protocol.identity import short_peer
from protocol.ledger.history import BadCommit
from protocol.run import manifest as manifests
from protocol.run.manifest import Manifest
from protocol.wire import encoding, endpoints, logfile

CALL_SECONDS = 20.0
MAX_TOKENIZER = 64 * 1024 * 1024
"""Bytes."""


class BadPayload(Exception):
    """A payload that a commit names cannot be had, or is not what the commit says; the text is why."""


class Source(Protocol):
    """Where a log is read. `name` is how messages name it."""

    name: str

    def records(self, note: Callable[[str], None]) -> AsyncGenerator[bytes, None]:
        """Every record, oldest first; `note` hears what a reader should know. Raises BadCommit where a record cannot be
        read, UsageError, RemoteError, LocalError."""
        ...

    async def payload(self, digest: str, size: int) -> bytes:
        """What is kept under that name. Raises BadPayload, RemoteError."""
        ...

    async def tokenizer(self, manifest: Manifest) -> bytes:
        """The JSON file of the run's tokenizer. Raises UsageError, RemoteError."""
        ...

    async def said_names(self, run: str) -> dict[str, str]:
        """What the peers that are there now call themselves, by their ids, as they say it, empty where they have no name; nothing where no node can be
        asked."""
        ...


class Folder:
    """The folder of a bootstrap node. Raises UsageError where there is no log."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder / logfile.LOG)
        self._folder = folder
        if not (folder / logfile.LOG).is_file():
            raise UsageError(f"directory {folder}: has no log; give the folder (--dir) of a bootstrap node, or RUN")

    async def records(self, note: Callable[[str], None]) -> AsyncGenerator[bytes, None]:
        path, end = self._folder / logfile.LOG, 0
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                for at, raw in logfile.records(file, path):
                    end = logfile.end_of(at, raw)
                    yield raw
                if end < size:
                    note(
                        f"after byte {end} there is a record that is not whole: a crash cut it off, or it is being written"
                    )
        except logfile.Damaged as error:
            raise BadCommit(f"cannot be read: its record at byte {error.at} is damaged") from None
        except OSError as error:
            raise UsageError(f"log {path}: {error.strerror}; give a folder that can be read") from None

    async def payload(self, digest: str, size: int) -> bytes:
        try:
            return await asyncio.to_thread((self._folder / "blobs" / _hex(digest)).read_bytes)
        except OSError as error:
            raise BadPayload(f"not in {self._folder / 'blobs'} ({error.strerror})") from None

    async def tokenizer(self, manifest: Manifest) -> bytes:
        path = self._folder / "tokenizer.json"
        try:
            return _checked(await asyncio.to_thread(path.read_bytes), manifest, str(path))
        except OSError as error:
            raise UsageError(
                f"tokenizer {path}: {error.strerror}; start the bootstrap node of this folder once"
            ) from None

    async def said_names(self, run: str) -> dict[str, str]:
        return {}

    async def manifest(self) -> Manifest | None:
        """The run's manifest, None for an empty log. Raises UsageError."""
        try:
            async with contextlib.aclosing(self.records(lambda text: None)) as log:
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
            f"directory {self._folder}: {path.name} is not the manifest of run {shown(run[:12])}…; start its bootstrap node"
            " once, or ask the node over the network"
        )


def _checked(tokenizer: bytes, manifest: Manifest, name: str) -> bytes:
    found = hashlib.sha256(tokenizer).hexdigest()
    if found != manifest.tokenizer.digest:
        raise UsageError(
            f"tokenizer {name}: is another one than the run's; start the bootstrap node with the run's own"
        )
    return tokenizer


def _hex(text: str) -> str:
    """`text` if it can be the name of a blob: a stranger's may lead out of the folder."""
    return text if len(text) == 64 and set(text) <= set("0123456789abcdef") else "none"


class Remote:
    """The bootstrap nodes of a run, whichever answers. Payloads pass through `store`."""

    def __init__(self, transport: Transport, nodes: Sequence[str], store: BlobStore) -> None:
        self.name = f"of {', '.join(map(short_peer, nodes))}"
        self._transport = transport
        self._nodes = nodes
        self._store = store
        self._fetcher = Fetcher(transport, store)

    async def records(self, note: Callable[[str], None]) -> AsyncGenerator[bytes, None]:
        known = 0
        while found := await self._page(known - 1):
            for raw in found:
                known += 1
                yield raw

    async def _page(self, after: int) -> list[bytes]:
        *others, last = self._nodes
        for node in others:
            with contextlib.suppress(RemoteError):
                return await log_page(self._transport, node, after)
        return await log_page(self._transport, last, after)

    async def payload(self, digest: str, size: int) -> bytes:
        await self._fetcher.fetch(digest, size, self._nodes)
        data = await asyncio.to_thread(self._store.get, digest)
        self._store.remove(digest)
        if data is None:
            raise BadPayload("its file was removed while it was read")
        return data

    async def tokenizer(self, manifest: Manifest) -> bytes:
        *others, last = self._nodes
        for node in others:
            with contextlib.suppress(RemoteError):
                return await self._tokenizer_of(node, manifest)
        return await self._tokenizer_of(last, manifest)

    async def said_names(self, run: str) -> dict[str, str]:
        roster = RosterReader(self._transport, run)
        with contextlib.suppress(RemoteError):
            await roster.refresh(self._nodes)
        return {peer: found.name for peer, found in roster.known.items()}

    async def _tokenizer_of(self, node: str, manifest: Manifest) -> bytes:
        raw = await fetch_named(self._transport, node, endpoints.TOKENIZER_NAME, limit=MAX_TOKENIZER)
        return _checked(raw, manifest, f"of {short_peer(node)}")

    async def aclose(self) -> None:
        """Ends what is under way."""
        await self._fetcher.aclose()
