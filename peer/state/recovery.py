"""Builds any state: of a newcomer, a peer that comes back, a shard that is new here, and one whose bits are wrong.

    θ(round) of a shard  =  θ(r) for some r < round  +  the committed payloads of the rounds r+1 … round

θ(r) is taken from where it costs the fewest bytes of network: our own checkpoints, those of others, or the seed (r =
0), and of the archives. A state counts only with the digest of the majority in commit r+1, or of the manifest, where
that names θ(0). The archives keep two, and
the payloads since the older one (protocol/ledger/retention.py): bases before it come last. `WarmUp` builds the missing
shards of a later role beside training, and applies each commit to them too, until they are taken over.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from peer import events
from peer.net.base import all_of, cancel
from peer.state.outer_optimizer import Outer
from peer.state.payloads import RETRY_SECONDS, CommitsWait, Committed, Exchange, PayloadsGone
from peer.state.storage import Shards, Storage
from protocol.errors import RemoteError
from protocol.ledger import aggregation
from protocol.ledger.history import NEWEST, Commits
from protocol.ledger.retention import StateRounds
from protocol.run import init, layout
from protocol.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Base:
    """A state to start from.

    cost: bytes to fetch until the wanted round.
    digest: empty where it follows from the seed.
    holders: peers that serve it; None where it is here, or follows from the seed.
    """

    cost: int
    round: int
    digest: str
    holders: tuple[str, ...] | None


NEAR_ROUNDS = NEWEST - 1
PREFETCHED_ROUNDS = 16
AGAIN_COST = 8.0
"""The most bytes for a shard that is computed again, in units of its own bytes."""
PROGRESS_SECONDS = 5.0


class _Progress:
    """Of building some shards: `bytes` to fetch, of which `came` are applied."""

    def __init__(self, bytes: int) -> None:
        self.bytes = bytes
        self.came = 0.0
        self._began = asyncio.get_running_loop().time()

    def event(self, round: int, coming: int, *, done: bool = False) -> events.Fetching:
        """The report; `coming`: bytes of unfinished blobs."""
        seconds = asyncio.get_running_loop().time() - self._began
        came = self.bytes if done else min(self.bytes, int(self.came) + coming)
        return events.Fetching(round=round, came=came, bytes=self.bytes, seconds=seconds, done=done)


@dataclass(eq=False)
class Recovery:
    """Builds shards in `outer.theta`.

    log: the commits that count, by round
    waits: returns whether commits wait to be learned; then a failed fetch raises CommitsWait
    """

    manifest: Manifest
    outer: Outer
    storage: Storage
    exchange: Exchange
    log: Commits
    emit: events.Emit
    waits: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._states = StateRounds(self.manifest)
        self._followed = 0

    @property
    def archived(self) -> tuple[int, ...]:
        """The rounds of the states that the archives keep by the log as it is known here, the older one first."""
        for round in range(self._followed, len(self.log)):
            self._states.follow_packed(
                self.log.bytes_of(round - 1, round), functools.partial(self.log.__getitem__, round)
            )
        self._followed = len(self.log)
        return self._states.kept

    async def payloads(self, round: int, shards: Sequence[str]) -> Committed:
        """The payloads of these shards that the commit of `round` names. Raises PayloadsGone, CommitsWait."""
        return await self.exchange.payloads(self.log[round], shards, self.log, self._failed)

    def _failed(self, round: int) -> None:
        """Something of a round could not be fetched. Raises PayloadsGone, CommitsWait."""
        if round <= self.archived[0]:
            raise PayloadsGone
        if self.waits():
            raise CommitsWait

    async def build(self, shards: Sequence[str], round: int) -> None:
        """Puts `shards` after `round` into `outer.theta`, all of them at once. Tries until it has them. Raises
        PayloadsGone when the archives keep nothing that leads there any more; CommitsWait."""
        if shards:
            self.outer.theta.update((await self.build_copy(shards, round)).theta)

    async def build_copy(self, shards: Sequence[str], round: int) -> Outer:
        """Another `Outer` that holds `shards` after `round`. Tries until it has them. Raises as `build`."""
        failed = set[tuple[str, int]]()
        while True:
            with contextlib.suppress(PayloadsGone):
                return await self._build(await self._find_bases(shards, round), round, failed)
            if round < self.archived[0]:
                raise PayloadsGone

    async def again(
        self, shard: str, round: int, ours: Mapping[int, Mapping[str, str]]
    ) -> list[NDArray[np.float32]] | None:
        """A shard after `round` from θ(0), or from a state on which we and the log agreed. None where that costs
        more than AGAIN_COST.

        ours: {round: {shard: digest}} that we computed.
        """
        found = self.bases(shard, round, await self.exchange.holders())
        found = [base for base in found if base.round == 0 or ours.get(base.round, {}).get(shard) == base.digest]
        if found[0].cost > AGAIN_COST * self.manifest.state_bytes(shard):
            return None
        with contextlib.suppress(PayloadsGone, CommitsWait):
            return (await self._build({shard: found}, round, set())).theta[shard]
        return None

    async def _build(self, found: Mapping[str, Sequence[Base]], round: int, failed: set[tuple[str, int]]) -> Outer:
        """Another `Outer` with the shards of `found` after `round`, each from the first of its bases that can be had.
        Raises PayloadsGone.

        failed: shards and rounds of bases that led nowhere; those found out are added
        """
        shards = tuple(found)
        target = Outer.of(self.manifest, self.outer.threads, self.outer.empty)
        progress = _Progress(sum(found[shard][0].cost for shard in shards))
        async with self._reporting(round, progress):
            bases = await self._take_bases(target, found, round, progress, failed)
            behind = [shard for shard in shards if bases[shard] < round]
            for r in range(min((bases[shard] for shard in behind), default=round) + 1, round + 1):
                try:
                    await self.advance(target, [s for s in behind if bases[s] < r], r)
                except PayloadsGone:
                    failed.update((s, bases[s]) for s in behind if bases[s] < r)
                    raise
                progress.came += sum(found[s][0].cost / (round - bases[s]) for s in behind if bases[s] < r)
        return target

    async def advance(self, target: Outer, shards: Sequence[str], round: int) -> None:
        """Applies the commit of `round` to `shards` of `target`, which are at the state before it. Raises
        PayloadsGone."""
        payloads = await self.payloads(round, shards)
        for shard in shards:
            await asyncio.to_thread(target.apply, shard, payloads.by_shard[shard], codec=payloads.codec)
        self.storage.blobs.protected.difference_update(payloads.names)  # until `protected` is set again

    @contextlib.asynccontextmanager
    async def _reporting(self, round: int, progress: _Progress) -> AsyncIterator[None]:
        """Reports the progress periodically and at the end, if anything is fetched."""

        async def tell() -> None:
            while True:
                await asyncio.sleep(PROGRESS_SECONDS)
                self.emit(progress.event(round, self.exchange.coming))

        telling = asyncio.create_task(tell()) if progress.bytes else None
        try:
            yield
        finally:
            if telling is not None:
                telling.cancel()
        if telling is not None:
            self.emit(progress.event(round, 0, done=True))

    def is_long(self, shards: Sequence[str], applied: int, round: int) -> bool:
        """Returns whether the payloads from `applied` to `round` are more bytes than the shards themselves."""
        replay = sum(self.replay_bytes(shard, applied, round) for shard in shards)
        return replay > sum(map(self.manifest.state_bytes, shards))

    async def is_shorter(self, shards: Sequence[str], applied: int, round: int) -> bool:
        """Returns whether a later state of these shards, which are held after `applied`, costs fewer bytes than their
        replay."""
        holders = await self.exchange.holders()
        replay = sum(self.replay_bytes(shard, applied, round) for shard in shards)
        return sum(self.bases(shard, round, holders)[0].cost for shard in shards) < replay

    def replay_bytes(self, shard: str, after: int, round: int) -> int:
        """Bytes of payloads to fetch from state `after` to `round`; estimated by the shard's part of the model for
        shares without a list of parts here, and for old ones."""
        store, lists, near = self.storage.blobs, self.exchange.lists, max(after, round - NEAR_ROUNDS)
        spec = self.manifest.model
        portion = layout.parameters(spec, shard) / layout.total_parameters(spec)
        found = portion * min(self.log.bytes_of(after, near), (near - after) * aggregation.most_fetched(self.manifest))
        for r in range(near + 1, round + 1):
            if aggregation.is_aggregated(self.manifest, self.log[r]):
                found += aggregation.largest_part(self.manifest, shard)
                continue
            for share in self.log[r].shares:
                parts = lists.get(share.root)
                if parts is None:
                    found += portion * share.size
                else:
                    found += sum(p.size for p in parts if p.shard == shard and not store.has(p.digest))
        return int(found)

    def bases(self, shard: str, round: int, holders: Mapping[tuple[int, str], Sequence[str]]) -> list[Base]:
        """The states to start from for `shard` after `round`: the cheapest first, then those from which some payloads
        are not kept."""
        found = list[Base]()
        own, store = self.storage.states(), self.storage.blobs
        offered = {r for r, name in holders if name == shard}
        # an auditor, which trusts no other peer, goes on from where the archives begin
        kept = self.archived if self.exchange.fetches_states else self.archived[:1]
        near = range(round - NEAR_ROUNDS, round + 1)
        for r in sorted(r for r in {0, *own, *offered, *kept, *near} if 0 <= r <= round):
            digest = self._said(shard, r)
            others = holders.get((r, shard), ()) or (self.exchange.archives() if not r or r in kept else ())
            if digest is None:
                if not r:
                    found.append(Base(self.replay_bytes(shard, 0, round), 0, "", None))
                continue
            if own.get(r, {}).get(shard) == digest:
                found.append(Base(self.replay_bytes(shard, r, round), r, digest, None))
            elif others or store.has(digest):
                size = 0 if store.has(digest) else self.manifest.state_bytes(shard)
                found.append(Base(self.replay_bytes(shard, r, round) + size, r, digest, tuple(others)))
        return sorted(found, key=lambda base: (base.round < self.archived[0], base.cost, -base.round))

    def _said(self, shard: str, round: int) -> str | None:
        """The digest of a shard after `round`, by the manifest or the log; None if they do not say it."""
        if round == 0:
            return self.manifest.initial_digests.get(shard)
        return self.log[round + 1].digests.get(shard) if round + 1 in self.log else None

    async def _find_bases(self, shards: Sequence[str], round: int) -> dict[str, list[Base]]:
        ask = any(2 * self.bases(shard, round, {})[0].cost > self.manifest.state_bytes(shard) for shard in shards)
        holders = await self.exchange.holders() if ask else {}
        return {shard: self.bases(shard, round, holders) for shard in shards}

    async def _take_bases(
        self,
        target: Outer,
        found: Mapping[str, Sequence[Base]],
        round: int,
        progress: _Progress,
        failed: set[tuple[str, int]],
    ) -> dict[str, int]:
        """Puts a state of each shard into `target.theta`. Returns its round: `round` for those that were fetched.
        Raises PayloadsGone."""
        line, taken = asyncio.Lock(), dict[str, int]()

        async def take(shard: str) -> tuple[str, int]:
            bases = found[shard]
            while True:
                base = next((base for base in bases if (shard, base.round) not in failed), None)
                if base is None:  # even θ(0) led nowhere
                    self._failed(round + 1)
                    failed.difference_update({(shard, each.round) for each in bases})
                    await asyncio.sleep(RETRY_SECONDS)
                    bases = self.bases(shard, round, await self.exchange.holders())
                    continue
                if base.holders is not None:
                    self._prefetch(shard, base.round, round)
                arrays = await self._load(shard, base, line)
                if arrays is not None:
                    target.theta[shard] = arrays
                    taken[shard] = base.round
                    if base.holders is None:
                        return shard, base.round
                    progress.came += self.manifest.state_bytes(shard)
                    if await self._replay(target, shard, base.round, round):
                        progress.came += max(0, base.cost - self.manifest.state_bytes(shard))
                        return shard, round
                failed.add((shard, base.round))
                bases = self.bases(shard, round, await self.exchange.holders())  # a holder may have a newer one now

        reached = dict(await all_of(map(take, found)))
        self.emit(events.Recovered(round=round, bases={shard: taken[shard] for shard in found}))
        return reached

    async def _replay(self, target: Outer, shard: str, after: int, round: int) -> bool:
        """Applies the rounds after `after`. False if payloads are gone, or if the result is not the state before the
        newest commit: the base was false, in the log and at its holders."""
        for r in range(after + 1, round + 1):
            try:
                await self.advance(target, [shard], r)
            except PayloadsGone:
                return False
            said = self.log[round].digests.get(shard) if r == round - 1 else None
            if said is not None and said != await asyncio.to_thread(target.digest, shard):
                text = f"state of {shard} after round {after}: the log leads from it to other bits than the run had"
                self.emit(events.Warning(text=f"{text} after round {r}; another one is taken"))
                return False
        return True

    def _prefetch(self, shard: str, after: int, round: int) -> None:
        """Begins to fetch the payloads of the first rounds after a state that is being fetched."""
        for r in range(after + 1, min(after + PREFETCHED_ROUNDS, round) + 1):
            self.exchange.prefetch_commit(self.log[r], [shard])

    async def _load(self, shard: str, base: Base, line: asyncio.Lock) -> list[NDArray[np.float32]] | None:
        """The shard's tensors at `base`; None where they cannot be had. `line` is held while a shard is computed, or
        until its last bytes are requested: then the next one begins, and the network does not idle between."""
        try:
            async with line:
                if not base.digest:
                    return await asyncio.to_thread(self._initial, shard)
                if base.holders is None:
                    return await asyncio.to_thread(self.storage.load_shard, base.round, shard, base.digest)
                asked = asyncio.Event()
                coming = asyncio.create_task(self.exchange.fetch_shard(shard, base.digest, base.holders, asked))
                coming.add_done_callback(lambda _: asked.set())
                try:
                    await asked.wait()
                except asyncio.CancelledError:
                    coming.cancel()
                    raise
            await coming
            return await self.exchange.read_shard(base.round, shard, base.digest)
        except RemoteError as error:
            self.emit(events.Warning(text=str(error)))
            return None

    def _initial(self, shard: str) -> list[NDArray[np.float32]]:
        return init.initial_state(self.manifest, shard, empty=self.outer.empty, run=self.outer.run)


class WarmUp:
    """Builds the shards of a later role.

    shards: under way; empty once they are taken.
    applied: gives the round of the peer's state.
    ready: called when `take` may have a result.
    """

    def __init__(self, recovery: Recovery, applied: Callable[[], int], ready: Callable[[], None]) -> None:
        self.shards: tuple[str, ...] = ()
        self._recovery = recovery
        self._applied = applied
        self._ready = ready
        self._round = -1
        self._built: Shards | None = None
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def want(self, shards: Sequence[str]) -> None:
        """Builds these shards, instead of others; fetched blobs of those stay on disk."""
        if set(shards) != set(self.shards):
            await self.aclose()
            self.shards = tuple(shards)
            if shards:
                self._task = asyncio.create_task(self._work(self.shards))

    def take(self) -> Shards | None:
        """The shards, once, if they stand at the peer's state. Raises what the work raised."""
        if self._task is not None and self._task.done():
            self._task.result()
        if self._built is None:
            return None
        if self._round < self._applied():
            self._news.set()  # it follows first
            return None
        built, self._built, self.shards = self._built, None, ()
        self._news.set()  # it ends
        return built

    async def aclose(self) -> None:
        task, self._task, self._built, self.shards = self._task, None, None, ()
        await cancel(task)

    async def _work(self, shards: tuple[str, ...]) -> None:
        try:
            while self.shards:
                try:
                    return await self._follow(shards)
                except PayloadsGone:  # the peer's own state is as far behind, and a newer one takes its place
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._ready()

    async def _follow(self, shards: tuple[str, ...]) -> None:
        """Builds the shards, and keeps them at the peer's state until they are taken. Raises PayloadsGone."""
        self._round = self._applied()
        target = await self._recovery.build_copy(shards, self._round)
        while self.shards:
            while self._round < self._applied():
                self._built = None
                await self._recovery.advance(target, shards, self._round + 1)
                self._round += 1
            self._built = target.theta
            self._news.clear()
            self._ready()
            await self._news.wait()
