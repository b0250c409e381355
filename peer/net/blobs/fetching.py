"""Fetching blobs: by name, in ranges, from several holders at once, resumable, each range checked by itself.

A large blob is asked of several holders, the fastest and nearest first by what was measured; each of them is kept busy with
just as many ranges as its link holds and takes the next missing one, so a fast holder carries more. A range whose digest is
wrong costs its holder our trust for a while, and that range is asked of another; so does a holder that is gone or silent.
What came is on disk (peer/net/blobs/store.py): a fetch that was interrupted, by whatever, goes on where it was. A small blob
comes as a whole, with the answer, over a stream that is kept for the next one.

A holder may itself be getting the blob, and lets others wait for it. Peers that wait for each other in a circle would wait in
vain; so one may wait for another only if that one surely leads to somebody who has the blob (it is being served; or it was
named, as one that is, by somebody of whom the same is sure), or comes after it in an order that differs from blob to blob.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from peer.net.base import Closed, Stream, Timeout, Transport, Unreachable, answer
from peer.net.blobs.gate import Gate
from peer.net.blobs.holders import Absent, Corrupt, Holders, Speed, rank
from peer.net.blobs.idle import IdleStreams
from peer.net.blobs.jobs import OVERDUE_SECONDS, WAIT_SECONDS, Asked, Job
from peer.net.blobs.named import answer_of
from peer.net.blobs.store import LEAVES, BlobStore, Place
from protocol.codec import blob_hash
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import endpoints, framing

PARALLEL = 4
"""Holders that one blob is fetched from at once."""
PARALLEL_BYTES = 1 << 20
"""One holder more for every so many missing bytes."""


class Source(Protocol):
    """A holder that is no peer."""

    async def read(self, place: Place) -> bytes:
        """A range of a blob, or its leaves, unchecked. Raises RemoteError."""


class Fetcher:
    """Fetches into `store`. `sources`: holders that are no peers, by the names under which they stand among holders. `holders` remembers who served well. `reach(peer)` is awaited before a holder is asked, `lost(peer)` called when it is gone; `warn` hears of
    holders that cannot be trusted. `timeout`: seconds of silence after which a holder counts as gone. `sync`: whether what came survives a loss of
    power; without it, it is fetched again."""

    def __init__(
        self,
        transport: Transport,
        store: BlobStore,
        *,
        reach: Callable[[str], Awaitable[None]] | None = None,
        lost: Callable[[str], None] = lambda peer: None,
        warn: Callable[[str], None] = lambda text: None,
        timeout: float = 20.0,
        sync: bool = False,
        holders: Holders | None = None,
        sources: Mapping[str, Source] | None = None,
    ) -> None:
        """Long because a downloader is told where it is and where else to ask."""
        self._sync = sync
        self._transport = transport
        self._store = store
        self._reach = reach
        self._lost = lost
        self._timeout = timeout
        self._gate = Gate()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._begun: dict[str, Job] = {}
        self._closing: set[asyncio.Task[list[str]]] = set()
        self._idle = IdleStreams()
        self._holders = holders or Holders(warn)
        self._sources = sources or {}

    def coming(self, name: str, peer: str, named_by: str) -> tuple[asyncio.Task[None], bool] | None:
        """The fetch of this blob that is under way, if `peer`, whom the holder `named_by` sends, may wait for it (see the
        module's docstring), and whether it surely leads to somebody who has the blob."""
        job = self._begun.get(name)
        if job is None:
            return None
        sure = job.served or named_by in job.asking
        ahead = rank(name, peer) < rank(name, self._transport.peer_id)
        return (self._running[name], sure) if sure or ahead else None

    @property
    def running(self) -> tuple[str, ...]:
        """The names of all blobs that are being fetched."""
        return tuple(self._running)

    @property
    def came(self) -> int:
        """Bytes that are here of large blobs that are being fetched."""
        return sum(job.came for job in self._begun.values())

    async def fetch(
        self,
        name: str,
        size: int,
        holders: Sequence[str],
        *,
        round: int = 0,
        check: Callable[[bytes], None] | None = None,
        all_asked: asyncio.Event | None = None,
        streams: int = 1,
        owner: str = "",
        place: Place | None = None,
    ) -> None:
        """Returns when the blob of exactly `size` bytes is in the store, as one of `round`'s; `check` sees it before and may
        refuse it by raising. `all_asked` is set when every range was asked for once: the line will soon be free. `streams`: that one holder is asked over, at most, where
        there are too few others. `owner`: who offered the blob (default: the first holder; see gate.py). `place`: where a blob of one range lies in a larger one, for holders that know it by that; the name of leaves is that of their blob and LEAVES. Whoever asks for a blob that is on its way waits for that fetch, which goes on when they are
        cancelled. Raises RemoteError naming the last holder to fail, UsageError where the disk refuses.

        Long because each of these is of one fetch.
        """
        if self._store.has(name):
            return
        if not blob_hash.is_name(name.removesuffix(LEAVES) if place is not None else name):  # it would be a path
            raise RemoteError("nobody", "blob: its name is not 64 hexadecimal digits; nothing is fetched")
        if not 0 <= size <= blob_hash.MAX_BLOB_BYTES:
            raise RemoteError(
                "nobody", f"blob {name[:12]}: {size} bytes; at most {blob_hash.MAX_BLOB_BYTES} are fetched"
            )
        task = self._running.get(name)
        if task is None:
            self._running[name] = task = asyncio.create_task(
                self._fetch(
                    name,
                    size,
                    holders,
                    round,
                    check,
                    all_asked or asyncio.Event(),
                    streams,
                    owner or next(iter(holders), ""),
                    place,
                )
            )
            task.add_done_callback(lambda task: self._ended(name, task))
        await asyncio.shield(task)

    def give_up(self, name: str) -> None:
        """Nobody needs this blob any more."""
        if name in self._running:
            self._running[name].cancel()

    async def aclose(self) -> None:
        """Ends every fetch; what came so far stays on disk."""
        tasks = [*self._running.values(), *self._closing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._gate.close()
        await self._idle.aclose()

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        del self._running[name]
        self._begun.pop(name, None)
        if not task.cancelled():
            task.exception()  # it is told to those who wait, if there are any

    # --- one blob

    async def _fetch(
        self,
        name: str,
        size: int,
        holders: Sequence[str],
        round: int,
        check: Callable[[bytes], None] | None,
        all_asked: asyncio.Event,
        streams: int,
        owner: str,
        place: Place | None,
    ) -> None:
        """Long because it has what `fetch` has."""

        async def turn() -> None:
            job = self._begun.get(name)
            if job is None:
                part = await asyncio.to_thread(self._store.part, name, size) if size > blob_hash.WHOLE_BYTES else None
                missing = sorted(part.missing) if part is not None else [0]
                self._begun[name] = job = Job(name, size, part, deque(missing), place, all_asked=all_asked)
                if part is not None and part.leaves is not None:
                    job.known.set()
                if not missing:
                    job.done.set()
            if not job.done.is_set():
                await self._gather(job, holders, streams)

        await self._gate.run(owner, turn, lambda: self._begun[name].received if name in self._begun else 0)
        job = self._begun[name]
        if job.part is not None:
            await asyncio.to_thread(job.part.finish, round, check, sync=self._sync)
        else:
            assert job.data is not None
            if check is not None:
                await asyncio.to_thread(check, job.data)
            await asyncio.to_thread(self._store.put, job.data, round, name=name, sync=self._sync)

    async def _gather(self, job: Job, holders: Sequence[str], streams: int) -> None:
        """Asks holders, and whomever they name, until nothing is missing."""
        asked = {self._transport.peer_id}
        insisted: set[str] = set()
        waiting, busy, more = self._holders.order(holders, job.size), deque[str](), deque[str]()
        workers: dict[asyncio.Task[list[str]], Asked] = {}
        parallel = min(PARALLEL, 1 + len(job.todo) * blob_hash.RANGE_BYTES // PARALLEL_BYTES)
        last: RemoteError | None = None
        done, known = asyncio.create_task(job.done.wait()), asyncio.create_task(job.known.wait())
        clock = asyncio.get_running_loop().time
        try:
            while not job.done.is_set():
                # one holder tells the digests of the ranges, or gives a small blob; another is asked when it takes its time
                now = clock()
                room = (parallel if job.known.is_set() else 1) + sum(a.is_late(now) for a in workers.values())
                while len(workers) < room:
                    again = False  # over one more stream
                    if waiting:
                        peer, known_to = waiting.popleft(), asked
                        more.extend([peer] * (streams - 1) if peer not in asked else ())
                    elif more and job.known.is_set():
                        peer, known_to, again = more.popleft(), set[str](), True
                    elif busy and all(a.is_silent(now) for a in workers.values()):
                        peer, known_to = busy.popleft(), insisted
                    else:
                        break
                    if peer in known_to or self._holders.is_avoided(peer):
                        continue
                    holder = Asked(peer, now, answered=again)
                    known_to.add(peer)
                    workers[asyncio.create_task(self._work(job, holder, known_to is insisted))] = holder
                if not workers:
                    raise last or RemoteError(
                        "nobody", f"blob {job.name[:12]}: no holder that can be trusted is known; it is tried again"
                    )
                events = {done, *workers} if job.known.is_set() else {done, known, *workers}
                patience = min(a.changes_in(now) for a in workers.values())
                ended, _ = await asyncio.wait(
                    events,
                    timeout=None if patience == math.inf else patience,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for holder in workers.values():
                    if not holder.answered and holder.is_silent(clock()):
                        self._holders.silent(holder.peer)
                for task in [t for t in workers if t in ended]:
                    peer = workers.pop(task).peer
                    try:
                        others = task.result()
                    except RemoteError as error:
                        # what a holder says tells more than another's silence
                        if last is None or not isinstance(error, Unreachable):
                            last = error
                        more = deque(p for p in more if p != peer)
                        self._holders.failed(peer, error)
                        if isinstance(error, Unreachable | Closed | Timeout):
                            self._lost(peer)
                        continue
                    if others:
                        busy.append(peer)
                        told = [p for p in others if p not in asked and not self._holders.breaks_promises(p)]
                        told = list(self._holders.order(told, job.size))
                        waiting = deque([*told, *waiting] if job.place is not None else [*waiting, *told])
        finally:
            done.cancel()
            known.cancel()
            for worker, holder in workers.items():
                if holder.answered and holder.is_late(clock()):  # it let us wait, and others were quicker
                    self._holders.broke_promise(holder.peer)
                if holder.mine or not job.done.is_set():
                    worker.cancel()
                self._closing.add(worker)
                worker.add_done_callback(functools.partial(self._closed, holder.peer))
            await asyncio.gather(done, known, return_exceptions=True)

    def _closed(self, peer: str, task: asyncio.Task[list[str]]) -> None:
        self._closing.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), RemoteError):
            self._holders.failed(peer, error)

    async def _work(self, job: Job, holder: Asked, insist: bool) -> list[str]:
        """Takes ranges from one holder until none is missing. Returns the peers that it names instead. Raises RemoteError,
        UsageError."""
        peer, mine = holder.peer, holder.mine
        if peer in self._sources:
            return await self._read(job, holder)
        what = f"blob {job.name[:12]}: peer {short_peer(peer)}"
        stream: Stream | None = None
        usable = False
        job.asking.add(peer)
        try:
            if self._reach is not None:
                await self._reach(peer)
            leaves = job.part is not None and not job.known.is_set()
            request = {
                "blob": job.name,
                "size": job.size,
                "leaves": leaves,
                "whole": job.part is None,
                "insist": insist,
                "named_by": job.named_by.get(peer, ""),
            }
            if job.place is not None:
                request |= {
                    "blob": job.name.removesuffix(LEAVES),
                    "in": [job.place.name, job.place.size, job.place.index],
                }
            stream, reply = await self._begin(peer, framing.pack_message(request))
            holder.answered = True
            self._holders.answered(peer)
            if job.part is None:
                job.ask(mine, 0)
            waited = False
            until = asyncio.get_running_loop().time() + WAIT_SECONDS + OVERDUE_SECONDS
            while (said := answer_of(reply, what)).get("state") == "wait":
                if asyncio.get_running_loop().time() > until:
                    self._holders.broke_promise(peer)
                    raise RemoteError(peer, f"{what} promised it for {WAIT_SECONDS:g} s; another is asked")
                waited, reply = True, await self._answer(stream, 4096)
            usable = job.part is None and said.get("state") in ("busy", "absent")
            if said.get("state") == "busy":
                others = [p for p in _names(said.get("ask")) if p != self._transport.peer_id]
                if said.get("sure") is True:
                    job.named_by.update(dict.fromkeys(others, peer))
                return others or [peer]
            if said.get("state") != "here":
                raise Absent(peer, f"{what} does not have it; another is asked")
            job.served = holder.gives = True
            job.streams[stream] = stream.received
            self._holders.gave(peer)
            speed = self._holders.speed(peer)
            if leaves:
                assert job.part is not None
                digests = await self._answer(stream, blob_hash.LEAF_BYTES * blob_hash.count(job.size))
                if not job.known.is_set():
                    if not await asyncio.to_thread(job.part.learn, digests):
                        raise Corrupt(peer, f"{what} sent digests that are not those of the blob")
                    job.todo = deque(i for i in job.todo if i in job.part.missing)
                    job.known.set()
                    if not job.part.missing:
                        job.done.set()
            await self._take(stream, job, peer, mine, speed, what, waited)
            usable = job.part is None and not mine
            if not usable:
                await stream.finish()
            return []
        except framing.FrameError as error:
            raise RemoteError(peer, f"{what}: {error}") from None
        finally:
            job.asking.discard(peer)
            job.give_back(mine)
            job.over(stream)
            if stream is not None and usable:
                await self._idle.keep(stream)
            elif stream is not None:
                await stream.close()

    async def _read(self, job: Job, holder: Asked) -> list[str]:
        """Takes a small blob from a source."""
        assert job.place is not None
        data = await self._sources[holder.peer].read(job.place)
        if len(data) != job.size or not await job.keep(0, data):
            raise Corrupt(holder.peer, f"{holder.peer}: sent wrong bytes of blob {job.name[:12]}")
        self._holders.gave(holder.peer)
        job.done.set()
        return []

    async def _begin(self, peer: str, ask: bytes) -> tuple[Stream, bytes]:
        """A stream to a holder, and its first answer."""
        while True:
            kept = self._idle.take(peer)
            stream = kept or await self._transport.open(peer, endpoints.BLOB, timeout=self._timeout)
            try:
                await stream.send(ask)
                return stream, await self._answer(stream, 4096)
            except BaseException as error:
                await stream.close()
                if kept is None or not isinstance(error, Closed):
                    raise
            self._lost(peer)  # it may be elsewhere now
            if self._reach is not None:
                await self._reach(peer)

    async def _answer(self, stream: Stream, limit: int) -> bytes:
        return await answer(stream, self._transport.doubt, limit, timeout=self._timeout)

    async def _take(
        self, stream: Stream, job: Job, peer: str, mine: deque[int], speed: Speed, what: str, waited: bool
    ) -> None:
        """Asks for ranges ahead of time, and takes them as they come. `waited`: the holder had to get the blob first, so how long it took
        to answer says nothing of its link."""
        clock = asyncio.get_running_loop().time
        arrived, measured = clock(), waited
        while not job.done.is_set():
            while len(mine) < speed.depth and (index := job.next(mine, speed)) is not None:
                job.ask(mine, index)
                await stream.send(framing.pack_message({"range": index}))
            if not mine:  # others may give ranges back, or be late
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(OVERDUE_SECONDS / 2):
                        await job.changed.wait()
                continue
            index = mine[0]
            begin, end = (0, job.size) if job.part is None else blob_hash.span(job.size, index)
            data = await self._answer(stream, blob_hash.WHOLE_BYTES)
            now = clock()
            if not measured:
                measured = True
                speed.answered(now - job.asked.get(index, arrived))
            speed.arrived(now - max(arrived, job.asked.get(index, arrived)), len(data))
            arrived = now
            if len(data) != end - begin or not await job.keep(index, data):
                raise Corrupt(peer, f"{what} sent wrong bytes for range {index}")
            mine.popleft()
            job.asked.pop(index, None)
            if job.part is None or not job.part.missing:
                job.done.set()
                job.wake()


def _names(peers: object) -> list[str]:
    return [p for p in peers if isinstance(p, str)][:16] if isinstance(peers, list) else []
