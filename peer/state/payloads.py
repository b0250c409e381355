"""What peers give each other by name: payloads of rounds and shards of states. Serves ours, fetches others'.

Lists of parts come first (protocol/ledger/part_lists.py), then the parts of our shards, as soon as a node announces the
offer. What is kept and for how long:

    payloads committed after our newest checkpoint, of our shards     never evicted: a restart needs them
    the lists of parts that name them                                 as long as the payloads
    fetched shards of a state, until our next checkpoint              never evicted: a restart goes on with them
    payloads of our own offer, until it is decided                    never evicted: they may go back into the feedback
    offered, but not committed                                        removed when the round is applied
    all others                                                        kept for other peers, oldest rounds go first
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from peer.net.base import CallHandler, Closed, Timeout, Unreachable, all_of, call, serve_calls
from peer.net.blobs import NO_ROUND, BlobServer, BlobStore, Fetcher, Text
from peer.net.blobs.holders import Holders
from peer.net.network import Network
from peer.net.rate_limits import TokenBucket
from peer.state import tensor_file
from peer.state.storage import Storage
from protocol.codec.formats import Codec
from protocol.errors import PotluckError, RemoteError
from protocol.ledger import aggregation, part_lists, retention
from protocol.ledger.part_lists import Parts
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire import calls, endpoints
from protocol.wire.calls import HeldState
from protocol.wire.commit import Aggregate, Commit, Contribution, Part, Share
from protocol.wire.session import Aggregated

RETRY_SECONDS = 1.0
WARNINGS = (1.0, 50.0)
"""A second, and at once: others decide how often a fetch fails."""
STATES_PEERS = 64
STATES_OF_A_PEER = 4
"""The newest states that a peer is believed to have; none keeps more checkpoints than peer/state/storage.py does."""
ASK_SECONDS = 10.0
ANSWER_BYTES = 64 * 1024
STATE_STREAMS = 2
"""To a holder of a state: libp2p lets 256 KiB be under way in one (peer/net/stream.py), 40 Mb/s over 50 ms."""
ROUNDS_AHEAD = 4
"""Rounds whose payloads are fetched ahead while earlier ones are applied."""
MOST_PARTS = 1 << 17
"""Parts in memory, about 30 MB; the least recently used lists are read again when they are needed."""
T = TypeVar("T")


class PayloadsGone(Exception):
    """Payloads that the archives need not keep any more could not be fetched; a newer state leads on."""


class CommitsWait(Exception):
    """Payloads could not be fetched, and commits came meanwhile: they are learned before it is tried again."""


class PartLists(Mapping[str, Parts]):
    """The lists of parts in the store: root -> parts. Lists that are evicted there, or damaged, are missing.
    Thread-safe."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._recent: OrderedDict[str, Parts] = OrderedDict()
        self._parts = 0

    def __getitem__(self, root: str) -> Parts:
        with self._lock:
            if not self._store.has(root):
                raise KeyError(root)
            if root in self._recent:
                self._recent.move_to_end(root)
                return self._recent[root]
            raw = self._store.get(root)
            try:
                found = part_lists.unpack(raw) if raw is not None else None
            except part_lists.BadList:
                found = None
            if found is None:
                raise KeyError(root)
            self._recent[root] = found
            self._parts += len(found)
            while self._parts > MOST_PARTS and len(self._recent) > 1:
                _, old = self._recent.popitem(last=False)
                self._parts -= len(old)
            return found

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._recent))

    def __len__(self) -> int:
        return len(self._recent)


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit applies: shard -> (weight, payload) in commit order, or the aggregate of these; the names of what
    was fetched; and the codec."""

    by_shard: dict[str, list[tuple[float, bytes]]]
    names: set[str]
    codec: Codec


class Exchange:
    """Serves the payloads and checkpoints in `storage`, and fetches others'. `fetches_states`: whether it asks for
    their states, and takes aggregates that nodes name; else it computes them from all updates."""

    def __init__(self, manifest: Manifest, storage: Storage, network: Network, *, fetches_states: bool = True) -> None:
        self.manifest = manifest
        self.store = store = storage.blobs
        self._network = network
        directory = network.directory
        self._fetcher = Fetcher(
            network.transport, store, reach=directory.reach, lost=directory.lost, holders=Holders(self._complain)
        )
        self._server = BlobServer(
            store, others=storage.find, coming=self._fetcher.coming, uplink=network.uplink, warn=network.warn
        )
        self._fetches_states = fetches_states
        self._storage = storage
        self.lists = PartLists(store)
        self._named = aggregation.Named(manifest)
        self._news = asyncio.Event()
        self._prefetches: dict[asyncio.Task[None], tuple[int, str]] = {}
        self._useless: set[str] = set()  # payloads on their way that were not committed
        self._over_limit = False
        self._warnings = TokenBucket(*WARNINGS)

    async def serve(self, text: Text | None = None) -> None:
        """Begins to serve, `text` too."""
        if text is not None:
            self._server.add_text(text)
        await self._server.serve(self._network.transport)

        async def states(remote: str, request: bytes) -> bytes:
            held = [HeldState(round=r, shards=tuple(s)) for r, s in self._storage.states().items()]
            return calls.write(calls.States(held=tuple(held[-calls.MOST_STATES :])))

        await serve_calls(self._network.transport, endpoints.STATES, states, limit=1024)

    async def aclose(self) -> None:
        for task in self._prefetches:
            task.cancel()
        await self._fetcher.aclose()
        self._server.uplink.close()
        await asyncio.gather(*self._prefetches, return_exceptions=True)

    # --- payloads

    def prefetch(self, round: int, share: Share, shards: Collection[str]) -> None:
        """Begins to fetch the parts of these shards of a share that may be committed to `round` soon, if there is
        space. `payloads` makes up for failures."""
        if share.root in self.lists:
            self._prefetch_parts(round, share, shards)
        elif part_lists.may_be_fetched(self.manifest, share) and self.store.make_space(share.listed):

            async def work() -> None:
                await self._fetch_list(share, round)
                if share.root not in self._useless:
                    self._prefetch_parts(round, share, shards)

            self._begin(round, share.root, work)

    def prefetch_commit(self, commit: Commit, shards: Collection[str]) -> None:
        """Begins to fetch the parts of these shards in a commit, unless their aggregates are applied."""
        if not aggregation.is_aggregated(self.manifest, commit):
            for share in commit.shares:
                self.prefetch(commit.round, share, shards)

    def _prefetch_parts(self, round: int, share: Share, shards: Collection[str]) -> None:
        for part in self.lists.get(share.root, ()):
            wanted = part.shard in shards and retention.fits(self.manifest, part)
            if wanted and not self.store.has(part.digest) and self.store.make_space(part.size):
                self._begin(round, part.digest, functools.partial(self._fetch, part, share.peer, round))

    def _begin(self, round: int, name: str, fetch: Callable[[], Awaitable[None]]) -> None:

        async def work() -> None:
            with contextlib.suppress(PotluckError):  # a full disk, or a lost network, shows again where it matters
                await fetch()
            if name in self._useless:
                self._useless.discard(name)
                self.store.release(name)

        task = asyncio.create_task(work())
        self._prefetches[task] = (round, name)
        task.add_done_callback(self._prefetches.pop)

    async def payloads(
        self, commit: Commit, shards: Sequence[str], log: Mapping[int, Commit], failed: Callable[[int], None]
    ) -> Committed:
        """The payloads of these shards that `commit` names; retries until it has them. Also begins to fetch those of
        the next rounds in the `log`.

        failed: called when something of a round could not be fetched; what it raises is raised
        """
        codec = self.manifest.outer.codec
        if not shards:
            return Committed({}, set(), codec)
        round = commit.round
        for later in range(round + 1, round + 1 + ROUNDS_AHEAD):
            if later in log:
                self.prefetch_commit(log[later], shards)
        lost = functools.partial(failed, round)
        if self._fetches_states and aggregation.is_aggregated(self.manifest, commit):
            if aggregates := await self._aggregates_of(commit, log, lost):
                return await self._aggregated(round, [x for x in aggregates if x.shard in shards], lost)
            self._complain(f"aggregates of round {round}: no node names them; they are computed here from all updates")
        self.store.protected.update(share.root for share in commit.shares)  # until `settle`
        lists = await all_of(self._list_of(share, round, lost) for share in commit.shares)
        known = dict(lists)
        items = [item for shard in shards for item in commit.payloads(shard, known)]
        self.store.protected.update(part.digest for _, part, _ in items)
        found = dict(await all_of(self._payload(part, sender, round, lost) for _, part, sender in items))
        by_shard: dict[str, list[tuple[float, bytes]]] = {shard: [] for shard in shards}
        for weight, part, _ in items:
            by_shard[part.shard].append((weight, found[part.digest]))
        for shard, theirs in by_shard.items():
            codec, by_shard[shard] = await asyncio.to_thread(aggregation.applied, self.manifest, commit, shard, theirs)
        return Committed(by_shard, {*known, *found}, codec)

    # --- aggregates

    def named(self, node: str, said: Aggregated) -> None:
        """Takes the aggregates that a node names."""
        self._named.add(node, said)
        self._news.set()

    async def _aggregates_of(
        self, commit: Commit, log: Mapping[int, Commit], lost: Callable[[], None]
    ) -> tuple[Aggregate, ...]:
        """The aggregates of a commit, as soon as they are named; none if that takes longer than a round."""
        clock = self._network.clock
        until = clock.steady() + self.manifest.timing.round_deadline
        while not (found := self._named.of(commit, log)) and clock.steady() < until:
            lost()
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS):
                    await self._news.wait()
        return found

    async def _aggregated(self, round: int, aggregates: Sequence[Aggregate], lost: Callable[[], None]) -> Committed:
        self.store.protected.update(each.digest for each in aggregates)

        async def one(each: Aggregate) -> tuple[str, list[tuple[float, bytes]]]:
            fetch = functools.partial(self._fetch_aggregate, each, round)
            read = functools.partial(self.store.get, each.digest)
            return each.shard, [(1.0, await self._until_here(read, fetch, lost))]

        by_shard = dict(await all_of(map(one, aggregates)))
        return Committed(by_shard, {each.digest for each in aggregates}, self.manifest.outer.aggregate_codec)

    async def _fetch_aggregate(self, each: Aggregate, round: int) -> None:
        """Fetches it from the nodes, or from peers that they name, as a blob of the round whose commit names it."""
        nodes = self.archives()
        await self._fetcher.fetch(each.digest, each.size, random.sample(nodes, len(nodes)), round=round + 1)

    async def _list_of(self, share: Share, round: int, lost: Callable[[], None]) -> tuple[str, Parts]:
        fetch = functools.partial(self._fetch_list, share, round)
        return share.root, await self._until_here(functools.partial(self.lists.get, share.root), fetch, lost)

    async def _payload(self, part: Part, sender: str, round: int, lost: Callable[[], None]) -> tuple[str, bytes]:
        fetch = functools.partial(self._fetch, part, sender, round)
        return part.digest, await self._until_here(functools.partial(self.store.get, part.digest), fetch, lost)

    async def _until_here(
        self, read: Callable[[], T | None], fetch: Callable[[], Awaitable[None]], lost: Callable[[], None]
    ) -> T:
        found = await asyncio.to_thread(read)
        while found is None:
            try:
                await fetch()
            except RemoteError as error:
                lost()
                self._complain(str(error))
            found = await asyncio.to_thread(read)
            if found is None:
                await asyncio.sleep(RETRY_SECONDS)
        return found

    async def bring(self, commit: Commit, contribution: Contribution) -> None:
        """Fetches the payloads of one contribution that are not here. Raises RemoteError."""
        for share in contribution.shares:
            if share.root not in self.lists:
                await self._fetch_list(share, commit.round)
            for part in self.lists.get(share.root, ()):
                if not self.store.has(part.digest) and retention.fits(self.manifest, part):
                    await self._fetch(part, share.peer, commit.round)

    async def _fetch_list(self, share: Share, round: int) -> None:
        if not part_lists.may_be_fetched(self.manifest, share):
            raise RemoteError(
                share.peer, f"list of parts of round {round}: {share.listed} bytes; no list can be so long"
            )
        await self._fetch_blob(share.root, share.listed, share.peer, round, part_lists.unpack)

    async def _fetch(self, part: Part, sender: str, round: int) -> None:
        await self._fetch_blob(part.digest, part.size, sender, round)

    async def _fetch_blob(
        self, name: str, size: int, sender: str, round: int, check: Callable[[bytes], object] | None = None
    ) -> None:
        """From its sender or an archive; about half of the peers ask the sender first."""
        holders = [sender, *self._network.directory.operators]
        if sum((self._network.transport.peer_id + name).encode()) % 2:
            holders.append(holders.pop(0))
        await self._fetcher.fetch(name, size, holders, round=round, check=check, owner=sender)

    # --- between two peers

    async def ask(self, peer: str, name: str, request: bytes, limit: int) -> bytes:
        """A call to another peer. Raises RemoteError."""
        await self._network.directory.reach(peer)
        try:
            return await call(self._network.transport, peer, name, request, timeout=ASK_SECONDS, limit=limit)
        except (Unreachable, Closed, Timeout):
            self._network.directory.lost(peer)  # it may be elsewhere now
            raise

    async def answer(self, name: str, handler: CallHandler, limit: int) -> None:
        """Answers calls of this name."""
        await serve_calls(self._network.transport, name, handler, limit=limit)

    async def fetch(self, name: str, size: int, holder: str) -> None:
        """Brings a blob of one peer into the store, where it may be evicted. Raises RemoteError, UsageError."""
        await self._fetcher.fetch(name, size, [holder])

    async def take(self, name: str, size: int, holder: str) -> bytes:
        """A blob of one peer, without keeping it. Raises RemoteError, UsageError."""
        was_here = self.store.has(name)
        await self.fetch(name, size, holder)
        data = await asyncio.to_thread(self.store.get, name)
        if not was_here:
            self.drop(name)
        if data is None:
            raise RemoteError(holder, f"blob {name[:12]}: it was removed while it was read; it is tried again")
        return data

    def keep(self, data: bytes) -> str:
        """Serves `data` as a blob, as long as there is space; its name. Raises UsageError."""
        return self.store.put(data, sync=False)

    def drop(self, name: str) -> None:
        """Removes a blob, unless it is needed as a payload too."""
        self.store.release(name)

    # --- states

    async def holders(self) -> dict[tuple[int, str], list[str]]:
        """(round, shard) -> the peers that serve it, as far as they answer in time."""
        found: dict[tuple[int, str], list[str]] = {}
        if not self._fetches_states:
            return found
        try:
            peers = [p for p in await self._network.directory.peers() if p != self._network.transport.peer_id]
        except RemoteError:
            return found

        async def ask(peer: str) -> None:
            with contextlib.suppress(RemoteError, TimeoutError):
                async with asyncio.timeout(ASK_SECONDS):
                    raw = await self.ask(peer, endpoints.STATES, b"", ANSWER_BYTES)
                held = calls.read(calls.States, raw, peer, "states").held
                for state in sorted(held, key=lambda state: state.round)[-STATES_OF_A_PEER:]:
                    for shard in state.shards:
                        found.setdefault((state.round, shard), []).append(peer)

        async with asyncio.TaskGroup() as group:
            for peer in random.sample(peers, min(STATES_PEERS, len(peers))):
                group.create_task(ask(peer))
        return found

    def archives(self) -> list[str]:
        """The operators' nodes, which serve the states that archives keep."""
        return list(self._network.directory.operators)

    @property
    def fetches_states(self) -> bool:
        """Whether states of other peers count."""
        return self._fetches_states

    @property
    def coming(self) -> int:
        """Bytes of unfinished blobs."""
        return self._fetcher.came

    async def fetch_shard(self, shard: str, digest: str, holders: Sequence[str], all_asked: asyncio.Event) -> None:
        """Brings a state of a shard into the store from `holders`. It stays there until `drop_states`, for a restart.
        `all_asked`: as for `Fetcher.fetch`. Raises RemoteError."""
        order, size = random.sample(holders, len(holders)), self.manifest.state_bytes(shard)
        await self._fetcher.fetch(digest, size, order, round=NO_ROUND, all_asked=all_asked, streams=STATE_STREAMS)

    async def read_shard(self, round: int, shard: str, digest: str) -> list[NDArray[np.float32]]:
        """The tensors of a fetched shard. Raises RemoteError."""
        arrays = self._storage.empty(self.manifest.state_shapes(shard))
        if not await asyncio.to_thread(self._read, digest, arrays):
            raise RemoteError(
                "", f"{shard} of round {round}: its file was removed while it was read; it is tried again"
            )
        return arrays

    def _read(self, digest: str, arrays: Sequence[NDArray[np.float32]]) -> bool:
        """Reads a shard in the store into `arrays`, piece by piece. Where it is damaged, removes it and returns
        False."""
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

    def drop_states(self) -> None:
        """Removes fetched and unfinished shards: there is a checkpoint now."""
        self.store.drop_parts(self._fetcher.running)
        for digest in self.store.of_no_round():
            self.store.remove(digest)

    # --- what is kept

    def settle(self, commit: Commit, needed: Collection[str]) -> None:
        """`commit` is applied: keeps the blobs in `needed`, and removes those of its round that it does not name."""
        self.store.protected = set(needed)
        every = frozenset(layout.shard_names(self.manifest.model))
        committed = {part.digest for part, _ in part_lists.named(commit, self.lists, every)}
        committed |= {share.root for share in commit.shares} | {each.digest for each in commit.aggregates}
        self.store.settle(commit.round, committed)
        coming = {digest for round, digest in list(self._prefetches.values()) if round <= commit.round}
        self._useless |= coming - committed
        fits = self.store.make_space(0)
        if not fits and not self._over_limit:
            self._network.warn(
                f"directory {self.store.folder}: {self.store.used / 1e6:.1f} MB of payloads are needed since the last"
                f" checkpoint, the limit is {(self.store.limit or 0) / 1e6:.1f} MB; they are kept, nothing is fetched"
                " ahead of time until the next one; allow more with --store-limit"
            )
        self._over_limit = not fits

    def _complain(self, text: str) -> None:
        """As `Network.warn`, with a limited rate."""
        if self._warnings.take(asyncio.get_running_loop().time()):
            self._network.warn(text)
