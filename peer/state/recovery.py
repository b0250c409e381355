"""The way into any state: for a newcomer, a peer that comes back, a shard that is new here, and one whose bits are wrong.

    θ(round) of a shard  =  θ(r) for some r < round  +  the committed payloads of the rounds r+1 … round

θ(r) is taken from where it costs the fewest bytes of network: our own checkpoints, those of others, or the seed (r = 0). A state of a
checkpoint counts only if it has the digest that commit r+1 carries: the majority's.

States come one shard after the other, so that little is lost by a kill; meanwhile those that are here are read, and their payloads come
and are applied.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from peer import events
from peer.state.outer_optimizer import Outer
from peer.state.payloads import Exchange
from peer.state.storage import Storage
from protocol.errors import RemoteError
from protocol.ledger.history import NEWEST, Commits
from protocol.run import init, layout
from protocol.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Base:
    """A state to start from. `cost`: bytes to fetch until the wanted round; `holders`: None where it is here already, or follows from the
    seed."""

    cost: int
    round: int
    digest: str
    holders: tuple[str, ...] | None


NEAR = NEWEST - 1
"""Rounds back from the newest of which each is looked at: a run has more than a start should take the time to look through."""
PREFETCHED = 16
"""Rounds whose payloads come while the state does."""
AGAIN = 8.0
"""Times a shard's own bytes that may be fetched to compute it again."""
PROGRESS_SECONDS = 5.0
"""How often it is told how far it is."""


class _Progress:
    """How far the building of some shards is. `bytes`: that are to come; `came`: those of what is whole."""

    def __init__(self, bytes: int) -> None:
        self.bytes = bytes
        self.came = 0.0
        self._began = asyncio.get_running_loop().time()

    def told(self, round: int, coming: int, *, done: bool = False) -> events.Fetching:
        """What is told of it; `coming`: bytes that are here of what is not whole."""
        seconds = asyncio.get_running_loop().time() - self._began
        came = self.bytes if done else min(self.bytes, int(self.came) + coming)
        return events.Fetching(round=round, came=came, bytes=self.bytes, seconds=seconds, done=done)


class Recovery:
    """Builds shards in `outer.theta`. `log`: the commits that count, by round."""

    def __init__(
        self,
        manifest: Manifest,
        outer: Outer,
        storage: Storage,
        exchange: Exchange,
        log: Commits,
        emit: events.Emit,
    ) -> None:
        self.manifest = manifest
        self.outer = outer
        self._storage = storage
        self._exchange = exchange
        self._log = log
        self._emit = emit

    async def build(self, shards: Sequence[str], round: int) -> None:
        """Makes `outer.theta` hold `shards` after `round`, all of them at once. Tries until it has them."""
        if shards:
            self.outer.theta.update((await self.beside(shards, round)).theta)

    async def beside(self, shards: Sequence[str], round: int) -> Outer:
        """An `Outer` of its own that holds `shards` after `round`; ours is as it was. Tries until it has them."""
        return await self._build(await self._find_bases(shards, round), round)

    async def again(
        self, shard: str, round: int, ours: Mapping[int, Mapping[str, str]]
    ) -> list[NDArray[np.float32]] | None:
        """What the log gives of a shard after `round`, from the seed, or from a state on which we and the log agreed: `ours`, {round: {shard:
        digest}}, are digests that we computed. None where that takes over AGAIN times the shard's bytes."""
        found = self.bases(shard, round, await self._exchange.holders())
        found = [base for base in found if base.round == 0 or ours.get(base.round, {}).get(shard) == base.digest]
        if found[0].cost > AGAIN * layout.shard_bytes(self.manifest.model, shard):
            return None
        return (await self._build({shard: found}, round)).theta[shard]

    async def _build(self, found: Mapping[str, Sequence[Base]], round: int) -> Outer:
        """An `Outer` that holds the shards of `found` after `round`, each from one of its bases, the first that can be had."""
        outer, shards = self.outer, tuple(found)
        beside = Outer(
            outer.spec, outer.codec, float(outer.beta), float(outer.eta), threads=outer.threads, empty=outer.empty
        )
        progress = _Progress(sum(found[shard][0].cost for shard in shards))
        async with self._telling(round, progress):
            bases = await self._take_bases(beside, found, round, progress)
            behind = [shard for shard in shards if bases[shard] < round]
            for r in range(min((bases[shard] for shard in behind), default=round) + 1, round + 1):
                await self.advance(beside, [s for s in behind if bases[s] < r], r)
                progress.came += sum(found[s][0].cost / (round - bases[s]) for s in behind if bases[s] < r)
        return beside

    async def advance(self, beside: Outer, shards: Sequence[str], round: int) -> None:
        """Applies the commit of `round` to `shards` of `beside`, which are at the state before it."""
        payloads = await self._exchange.payloads(self._log[round], shards, self._log)
        for shard in shards:
            await asyncio.to_thread(beside.apply, shard, payloads.by_shard[shard])
        self._storage.blobs.protected.difference_update(payloads.names)  # until it is said again what is needed

    @contextlib.asynccontextmanager
    async def _telling(self, round: int, progress: _Progress) -> AsyncIterator[None]:
        """Tells now and then how far it is, and at the end, if anything was fetched."""

        async def tell() -> None:
            while True:
                await asyncio.sleep(PROGRESS_SECONDS)
                self._emit(progress.told(round, self._exchange.coming))

        telling = asyncio.create_task(tell()) if progress.bytes else None
        try:
            yield
        finally:
            if telling is not None:
                telling.cancel()
        if telling is not None:
            self._emit(progress.told(round, 0, done=True))

    def is_long(self, shards: Sequence[str], applied: int, round: int) -> bool:
        """Whether the payloads from `applied` to `round` are more bytes than the shards themselves."""
        replay = sum(self.replay_bytes(shard, applied, round) for shard in shards)
        return replay > sum(layout.shard_bytes(self.manifest.model, shard) for shard in shards)

    async def is_shorter(self, shards: Sequence[str], applied: int, round: int) -> bool:
        """Whether to fetch a later state of these shards, which are held after `applied`, takes fewer bytes than to replay."""
        holders = await self._exchange.holders()
        replay = sum(self.replay_bytes(shard, applied, round) for shard in shards)
        return sum(self.bases(shard, round, holders)[0].cost for shard in shards) < replay

    def replay_bytes(self, shard: str, after: int, round: int) -> int:
        """Bytes of payloads to fetch from state `after` to `round`; of a share whose list of parts is not here, and of one of long ago, about
        as many as the shard has of the model."""
        store, lists, near = self._storage.blobs, self._exchange.lists, max(after, round - NEAR)
        spec = self.manifest.model
        portion = layout.parameters(spec, shard) / layout.total_parameters(spec)
        found = portion * self._log.bytes_of(after, near)
        for share in (share for r in range(near + 1, round + 1) for share in self._log[r].shares):
            parts = lists.get(share.root)
            if parts is None:
                found += portion * share.size
            else:
                found += sum(p.size for p in parts if p.shard == shard and not store.has(p.digest))
        return int(found)

    def bases(self, shard: str, round: int, holders: Mapping[tuple[int, str], Sequence[str]]) -> list[Base]:
        """The states to start from for `shard` after `round`, the cheapest first."""
        found = [Base(self.replay_bytes(shard, 0, round), 0, "", None)]
        own, store = self._storage.states(), self._storage.blobs
        offered = {r for r, name in holders if name == shard}
        for r in sorted(r for r in {*own, *offered, *range(round - NEAR, round + 1)} if 0 < r <= round):
            digest = self._log[r + 1].digests.get(shard) if r + 1 in self._log else None
            others = holders.get((r, shard), ())
            if digest is None:
                continue
            if own.get(r, {}).get(shard) == digest:
                found.append(Base(self.replay_bytes(shard, r, round), r, digest, None))
            elif others or store.has(digest):
                size = 0 if store.has(digest) else layout.shard_bytes(self.manifest.model, shard)
                found.append(Base(self.replay_bytes(shard, r, round) + size, r, digest, tuple(others)))
        return sorted(found, key=lambda base: (base.cost, -base.round))

    async def _find_bases(self, shards: Sequence[str], round: int) -> dict[str, list[Base]]:
        """`bases` of each shard."""
        spec = self.manifest.model
        ask = any(2 * self.bases(shard, round, {})[0].cost > layout.shard_bytes(spec, shard) for shard in shards)
        holders = await self._exchange.holders() if ask else {}
        return {shard: self.bases(shard, round, holders) for shard in shards}

    async def _take_bases(
        self, beside: Outer, found: Mapping[str, Sequence[Base]], round: int, progress: _Progress
    ) -> dict[str, int]:
        """Puts a state of each shard into `beside.theta`; its round. Those that were fetched are at `round` already."""
        line, taken = asyncio.Lock(), dict[str, int]()

        async def take(shard: str) -> tuple[str, int]:
            bases, failed = found[shard], set[str]()
            while True:
                base = next(base for base in bases if base.digest not in failed)  # the seed does not fail
                if base.holders is not None:
                    self._prefetch(shard, base.round, round)
                arrays = await self._load(shard, base, line)
                if arrays is not None:
                    beside.theta[shard] = arrays
                    taken[shard] = base.round
                    if base.holders is None:
                        return shard, base.round
                    progress.came += layout.shard_bytes(self.manifest.model, shard)
                    if await self._replay(beside, shard, base.round, round):
                        progress.came += max(0, base.cost - layout.shard_bytes(self.manifest.model, shard))
                        return shard, round
                failed.add(base.digest)
                bases = self.bases(shard, round, await self._exchange.holders())  # who had it may have a newer one now

        tasks = [asyncio.create_task(take(shard)) for shard in found]
        try:
            reached = dict(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._emit(events.Recovered(round=round, bases={shard: taken[shard] for shard in found}))
        return reached

    async def _replay(self, beside: Outer, shard: str, after: int, round: int) -> bool:
        """Applies the rounds after `after`. Whether that gives what the newest commit says of the state before it; if not, a false state
        was in the log, and offered."""
        for r in range(after + 1, round + 1):
            await self.advance(beside, [shard], r)
            said = self._log[round].digests.get(shard) if r == round - 1 else None
            if said is not None and said != await asyncio.to_thread(beside.digest, shard):
                text = f"state of {shard} after round {after}: the log leads from it to other bits than the run had after round {r}"
                self._emit(events.Warning(text=f"{text}; another one is taken"))
                return False
        return True

    def _prefetch(self, shard: str, after: int, round: int) -> None:
        """Begins to fetch the payloads of the first rounds that will be applied to a state which comes."""
        for r in range(after + 1, min(after + PREFETCHED, round) + 1):
            for share in self._log[r].shares:
                self._exchange.prefetch(r, share, [shard])

    async def _load(self, shard: str, base: Base, line: asyncio.Lock) -> list[NDArray[np.float32]] | None:
        """The shard's tensors at `base`, or None where they cannot be had. `line` is for whoever computes one, or has something to ask
        for: so the next one begins to come before the last one is here, and the line is not idle between."""
        try:
            async with line:
                if base.round == 0:
                    return await asyncio.to_thread(self._initial, shard)
                if base.holders is None:
                    return await asyncio.to_thread(self._storage.load_shard, base.round, shard, base.digest)
                asked = asyncio.Event()
                coming = asyncio.create_task(self._exchange.fetch_shard(shard, base.digest, base.holders, asked))
                coming.add_done_callback(lambda _: asked.set())
                try:
                    await asked.wait()
                except asyncio.CancelledError:
                    coming.cancel()
                    raise
            await coming
            return await self._exchange.read_shard(base.round, shard, base.digest)
        except RemoteError as error:
            self._emit(events.Warning(text=str(error)))
            return None

    def _initial(self, shard: str) -> list[NDArray[np.float32]]:
        """The shard of θ(0)."""
        spec, seed = self.manifest.model, self.manifest.seed_bytes
        return init.initial_shard(spec, seed, shard, empty=self.outer.empty, run=self.outer.run)
