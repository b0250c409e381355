"""What peers give each other by name: payloads of rounds and shards of states. Serves ours, fetches others'.

A payload is fetched as soon as the leading node says that it was offered, from its sender or the archive or whom these name
(peer/net/blobs/serving.py), so that it is here when the round is committed. What is kept and for how long:

    payloads committed after our newest checkpoint, of our shards     never evicted: a restart needs them
    fetched shards of a state, until our next checkpoint              never evicted: a restart goes on with them
    payloads of our own offer, until it is decided                    never evicted: they may go back into the error feedback
    offered, but not committed                                        removed when the round is applied
    all others                                                        kept for whoever asks, oldest rounds go first
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from peer import events
from peer.net.base import CallHandler, Transport, call, serve_calls
from peer.net.blobs import NO_ROUND, BlobServer, Fetcher
from peer.net.uplink import Uplink
from peer.state import tensor_file
from peer.state.storage import Storage
from protocol.errors import PotluckError, RemoteError
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire import endpoints, framing
from protocol.wire.commit import Commit, Part

RETRY_SECONDS = 1.0
ASKED = 64
"""Peers that are asked for their states."""
ASK_SECONDS = 10.0
ANSWER_BYTES = 64 * 1024
AHEAD = 4
"""Rounds whose payloads are fetched ahead while earlier ones are applied."""


class Exchange:
    """One per daemon. It serves the payloads and checkpoints in `storage`, in turns of `uplink`. `reach(peer)` connects to a peer,
    `peers()` are those who may have states."""

    def __init__(
        self,
        manifest: Manifest,
        transport: Transport,
        storage: Storage,
        emit: events.Emit,
        *,
        reach: Callable[[str], Awaitable[None]],
        peers: Callable[[], Awaitable[Sequence[str]]],
        uplink: Uplink,
    ) -> None:
        self.manifest = manifest
        self.store = store = storage.blobs
        self._transport = transport
        self._emit = emit
        self._fetcher = Fetcher(transport, store, reach=reach, warn=self._warn)
        self._server = BlobServer(
            store, others=storage.find, coming=self._fetcher.coming, uplink=uplink, warn=self._warn
        )
        self._reach = reach
        self._peers = peers
        self._storage = storage
        self._prefetches: dict[asyncio.Task[None], tuple[int, str]] = {}
        self._useless: set[str] = set()  # payloads on their way that were not committed
        self._over_limit = False

    async def serve(self) -> None:
        """Lets others ask."""
        await self._server.serve(self._transport)

        async def states(remote: str, request: bytes) -> bytes:
            return framing.pack_message([[round, list(shards)] for round, shards in self._storage.states().items()])

        await serve_calls(self._transport, endpoints.STATES, states, limit=1024)

    async def aclose(self) -> None:
        """Ends what is under way; what came so far stays on disk."""
        for task in self._prefetches:
            task.cancel()
        await self._fetcher.aclose()
        self._server.uplink.close()
        await asyncio.gather(*self._prefetches, return_exceptions=True)

    # --- payloads

    def prefetch(self, round: int, sender: str, part: Part) -> None:
        """Begins to fetch a payload of `sender`'s offer to `round` that may be committed soon, if there is space. A failure is for
        `payloads` to make good."""
        if self.store.has(part.digest) or not self.store.make_space(part.size):
            return

        async def work() -> None:
            with contextlib.suppress(PotluckError):  # a full disk, or a lost network, shows again where it matters
                await self._fetch(part, sender, round)
            if part.digest in self._useless:
                self._useless.discard(part.digest)
                self.store.remove(part.digest)

        task = asyncio.create_task(work())
        self._prefetches[task] = (round, part.digest)
        task.add_done_callback(self._prefetches.pop)

    async def payloads(self, commit: Commit, shards: Sequence[str], log: Mapping[int, Commit]) -> dict[str, bytes]:
        """Every payload of these shards that `commit` names, by its digest; what cannot be had is tried again until it is.
        Those of the next rounds, as far as they are in the `log`, begin to come too."""

        def named(commit: Commit) -> list[tuple[Part, str]]:
            return [(part, sender) for shard in shards for _, part, sender in commit.payloads(shard)]

        round, items = commit.round, named(commit)
        self.store.protected.update(part.digest for part, _ in items)  # until it is said again what is needed
        for later in range(round + 1, round + 1 + AHEAD):
            for part, sender in named(log[later]) if later in log else ():
                self.prefetch(later, sender, part)
        found: dict[str, bytes] = {}

        async def one(part: Part, sender: str) -> None:
            while (data := await asyncio.to_thread(self.store.get, part.digest)) is None:
                try:
                    await self._fetch(part, sender, round)
                except RemoteError as error:
                    self._warn(str(error))
                    await asyncio.sleep(RETRY_SECONDS)
            found[part.digest] = data

        tasks = [asyncio.create_task(one(part, sender)) for part, sender in items]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return found

    async def _fetch(self, part: Part, sender: str, round: int) -> None:
        """From its sender or an archive: about half of the peers ask the sender first."""
        holders = [sender, *self.manifest.operators]
        if sum((self._transport.peer_id + part.digest).encode()) % 2:
            holders.append(holders.pop(0))
        await self._fetcher.fetch(part.digest, part.size, holders, round=round)

    # --- between two peers

    async def ask(self, peer: str, name: str, request: bytes, limit: int) -> bytes:
        """A call to another peer. Raises RemoteError."""
        await self._reach(peer)
        return await call(self._transport, peer, name, request, timeout=ASK_SECONDS, limit=limit)

    async def answer(self, name: str, handler: CallHandler, limit: int) -> None:
        """Answers such calls."""
        await serve_calls(self._transport, name, handler, limit=limit)

    async def fetch(self, name: str, size: int, holder: str) -> None:
        """Brings a blob of one other peer into the store, from where it may be evicted. Raises RemoteError, UsageError."""
        await self._fetcher.fetch(name, size, [holder])

    async def take(self, name: str, size: int, holder: str) -> bytes:
        """A blob of one other peer, which is not kept. Raises RemoteError, UsageError."""
        await self.fetch(name, size, holder)
        data = await asyncio.to_thread(self.store.get, name)
        self.drop(name)
        if data is None:
            raise RemoteError(holder, f"blob {name[:12]}: it was removed while it was read; it is tried again")
        return data

    def keep(self, data: bytes) -> str:
        """Serves `data` as a blob, as long as there is space; its name. Raises UsageError."""
        return self.store.put(data, sync=False)

    def drop(self, name: str) -> None:
        """Forgets such a blob, unless it is needed as a payload too."""
        if name not in self.store.protected:
            self.store.remove(name)

    # --- states

    async def holders(self) -> dict[tuple[int, str], list[str]]:
        """(round, shard) -> the peers that say they serve it. Who does not answer in time is left out."""
        found: dict[tuple[int, str], list[str]] = {}
        try:
            peers = [p for p in await self._peers() if p != self._transport.peer_id]
        except RemoteError:
            return found

        async def ask(peer: str) -> None:
            with contextlib.suppress(RemoteError, framing.FrameError, TimeoutError):
                async with asyncio.timeout(ASK_SECONDS):
                    await self._reach(peer)
                    raw = await call(
                        self._transport, peer, endpoints.STATES, b"", timeout=ASK_SECONDS, limit=ANSWER_BYTES
                    )
                for state in framing.unpack_message(raw):
                    match state:
                        case [int(round), list(shards)]:
                            for shard in shards:
                                if isinstance(shard, str):
                                    found.setdefault((round, shard), []).append(peer)

        async with asyncio.TaskGroup() as group:
            for peer in random.sample(peers, min(ASKED, len(peers))):
                group.create_task(ask(peer))
        return found

    async def shard(self, round: int, shard: str, digest: str, holders: Sequence[str]) -> list[NDArray[np.float32]]:
        """The tensors of a shard after `round`, from those who serve it. They stay in the store, so that a restart need not
        fetch them again, until `drop_states`. Raises RemoteError."""
        spec = self.manifest.model
        order = random.sample(holders, len(holders))
        await self._fetcher.fetch(digest, layout.shard_bytes(spec, shard), order, round=NO_ROUND)
        arrays = self._storage.empty(layout.shapes(spec, shard))
        if not await asyncio.to_thread(self._read, digest, arrays):
            raise RemoteError(
                "", f"{shard} of round {round}: its file was removed while it was read; it is tried again"
            )
        return arrays

    def _read(self, digest: str, arrays: Sequence[NDArray[np.float32]]) -> bool:
        """Reads a shard in the store into `arrays`, some of it at a time. False, and it is removed, where it is not that shard."""
        blob = self.store.find(digest)
        try:
            if blob is not None:
                with blob.disk.open(blob.path) as file:
                    tensor_file.fill(file, arrays)
        except (FileNotFoundError, tensor_file.Damaged):
            blob = None
        if blob is None or layout.shard_digest(arrays) != digest:
            self.store.remove(digest)
            return False
        return True

    def drop_states(self, log: Mapping[int, Commit]) -> None:
        """There is a checkpoint now: fetched shards, and begun ones, are not needed any more."""
        self.store.drop_parts(self._fetcher.running)
        for digest in {d for commit in log.values() for d in commit.digests.values() if self.store.has(d)}:
            self.store.remove(digest)

    # --- what is kept

    def settle(self, commit: Commit, needed: Collection[str]) -> None:
        """After `commit` was applied: `needed` must not be evicted, what it does not name of its round is of no use."""
        self.store.protected = set(needed)
        committed = {p.digest for c in commit.contributions for s in c.shares for p in s.parts}
        self.store.settle(commit.round, committed)
        coming = {digest for round, digest in list(self._prefetches.values()) if round <= commit.round}
        self._useless |= coming - committed
        fits = self.store.make_space(0)
        if not fits and not self._over_limit:
            self._warn(
                f"directory {self.store.folder}: {self.store.used / 1e6:.1f} MB of payloads are needed since the last"
                f" checkpoint, the limit is {(self.store.limit or 0) / 1e6:.1f} MB; they are kept, nothing is fetched ahead"
                " of time until the next one; allow more with --store-limit"
            )
        self._over_limit = not fits

    def _warn(self, text: str) -> None:
        self._emit(events.Warning(text=text))
