"""How a peer opens the run's text: its index, by its digest, and all that fetches the rest."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

from peer.corpus import text
from peer.corpus.cache import TextStore
from peer.corpus.fetched import FetchedText
from peer.corpus.mirrors import Mirror, Mirrors
from peer.corpus.origins import Origins
from peer.corpus.range_fetcher import PATIENCE, Patience
from peer.net.blobs import Fetcher, fetch_named
from peer.net.disk import Disk
from peer.net.network import Network
from protocol.codec import blob_hash
from protocol.errors import RemoteError, UsageError
from protocol.identity import short_peer
from protocol.run import corpus
from protocol.run.corpus import CorpusIndex
from protocol.run.manifest import Manifest
from protocol.wire import endpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What it takes to fetch text."""

    network: Network
    folder: Path
    """For what is kept."""
    limit: int
    """Bytes of it, at most."""
    disk: Disk
    patience: Patience = PATIENCE
    mirrors: Mirrors | None = None
    """The client of the manifest's mirrors, which is closed with the text; None: the usual one."""

    @property
    def nodes(self) -> list[str]:
        """The operators' nodes now, without ourselves."""
        return [node for node in self.network.directory.operators if node != self.network.transport.peer_id]


async def open_text(manifest: Manifest, access: Access) -> FetchedText:
    """The run's text. Raises RemoteError where nobody has its index, UsageError."""
    network, directory = access.network, access.network.directory
    mirrors = access.mirrors or Mirrors()
    try:
        places = mirrors.all(manifest.data.mirrors)
        await asyncio.to_thread(access.disk.make_folder, access.folder)
        index = await _index(manifest, access, places)
        text.check(index, manifest)
        store = await asyncio.to_thread(TextStore, access.folder, access.limit, access.disk, network.warn)
    except BaseException:
        await mirrors.aclose()
        raise
    sources = {mirror.name: mirror for mirror in places}
    origins = Origins(lambda: access.nodes, list(sources), network.warn)
    fetcher = Fetcher(
        network.transport,
        store,
        reach=directory.reach,
        lost=directory.lost,
        timeout=access.patience.silence,
        holders=origins,
        sources=sources,
    )
    closes = (mirrors.aclose,)
    return FetchedText(index, manifest.seed_bytes, store, fetcher, origins, network.emit, access.patience, closes)


async def _index(manifest: Manifest, access: Access, mirrors: list[Mirror]) -> CorpusIndex:
    """The corpus's index: from our disk, a bootstrap node or a mirror. Raises RemoteError."""
    digest, path = manifest.data.corpus, access.folder / corpus.INDEX
    try:
        raw = await asyncio.to_thread(access.disk.read, path)
    except OSError:
        raw = b""
    if blob_hash.name_of(raw) != digest:
        raw = await _fetch_index(digest, access, mirrors)
        with contextlib.suppress(UsageError):  # a full disk shows again where it matters
            await asyncio.to_thread(access.disk.write, path, raw)
    return corpus.from_bytes(raw, f"{digest[:12]}…")


async def _fetch_index(digest: str, access: Access, mirrors: list[Mirror]) -> bytes:
    failures: list[str] = []
    places: list[str | Mirror] = [*access.nodes, *mirrors]
    for place in places:
        name = place.name if isinstance(place, Mirror) else short_peer(place)
        try:
            if isinstance(place, Mirror):
                raw = await place.whole(corpus.INDEX, corpus.MAX_INDEX)
            else:
                await access.network.directory.reach(place)
                raw = await fetch_named(access.network.transport, place, endpoints.CORPUS_NAME, limit=corpus.MAX_INDEX)
        except RemoteError as error:
            failures.append(str(error))
            continue
        if blob_hash.name_of(raw) == digest:
            return raw
        failures.append(f"index from {name}: not that of the run's corpus")
        access.network.warn(f"text: {failures[-1]}; others are asked")
    why = failures[-1] if failures else "nobody is asked"
    raise RemoteError(
        "nobody",
        f"text: nobody gives the index of the run's corpus ({why}); tell the operator, or name its folder with --corpus",
    )
