"""Fetching blobs by name: in ranges, from several holders at once, resumable, each range checked by itself.

A large blob is asked of several holders, the fastest by past measurements first. Each takes the next missing range, so
a fast holder carries more. A holder that sends a range with a wrong digest is not asked for a while, one that is silent
is asked last. The ranges are on disk (store.py), so an interrupted fetch resumes. A small blob comes as a whole, over a
stream that is kept for the next one.

A holder may itself be fetching the blob, and lets others wait for it. To avoid circles a peer waits for another only
while that one surely leads to a holder, or if it comes after it in an order that differs from blob to blob.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from peer.net import compression
from peer.net.base import Closed, Stream, Timeout, Transport, Unreachable, answer, cancel, now, until, wait_for_event
from peer.net.blobs.holders import OVERDUE_SECONDS, PATIENCE, WAIT_SECONDS, Absent, Corrupt, Holders, Speed, rank
from peer.net.blobs.store import LEAVES, BlobStore, Part, Place
from protocol.codec import blob_hash
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import endpoints, framing

# --- gate

PLACES = 64
OF_AN_OWNER = 16
"""Places that one owner has at most."""
STALLED_SECONDS = 3.0
"""After this time without a byte, which may be a wait for a turn on a busy line, another fetch begins, too."""
STALLED_PLACES = 64
"""Most fetches that run for that reason, in addition to PLACES."""
TURN_SECONDS = 30.0
"""After so long a fetch gives way to others."""
LOOK_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _Turn:
    """A fetch that has a place: its owner, its start, and since when it has had `came` bytes."""

    owner: str
    began: float
    progress: Callable[[], int]
    came: int
    moved: float
    stalled: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Gate:
    """`places` for fetches that move, and `stalled_places` in addition; `of_an_owner` at most for each owner."""

    def __init__(
        self, places: int = PLACES, of_an_owner: int = OF_AN_OWNER, stalled_places: int = STALLED_PLACES
    ) -> None:
        self._places, self._stalled_places = places, stalled_places
        self._of_an_owner = of_an_owner
        self._turns: set[_Turn] = set()
        self._of: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._looking: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def run(self, owner: str, work: Callable[[], Coroutine[Any, Any, None]], progress: Callable[[], int]) -> None:
        """Does `work` in one or more turns: it is cancelled when others get the place, and started again.

        progress: returns the bytes that have come
        """
        while True:
            await self._enter(owner)
            now = asyncio.get_running_loop().time()
            turn = _Turn(owner, now, progress, progress(), now)
            self._turns.add(turn)
            try:
                done = await until(turn.over.wait(), work())
            finally:
                self._turns.discard(turn)
                self._leave(owner)
            if done is not None:
                return done.result()

    async def _enter(self, owner: str) -> None:
        if self._has_place() and self._of[owner] < self._of_an_owner and owner not in self._waiting:
            self._of[owner] += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(place)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave(owner)
            else:
                self._forget(owner, place)
            raise

    def _has_place(self) -> bool:
        stalled = sum(turn.stalled for turn in self._turns)
        return self._of.total() < self._places + min(stalled, self._stalled_places)

    def _forget(self, owner: str, place: asyncio.Future[None]) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._waiting[owner].remove(place)
            if not self._waiting[owner]:
                del self._waiting[owner]

    def _leave(self, owner: str) -> None:
        self._of[owner] -= 1
        if not self._of[owner]:
            del self._of[owner]
        self._grant()

    def _grant(self) -> None:
        """Gives free places to the owners with the fewest, in turn."""
        while self._has_place():
            may = [owner for owner in self._waiting if self._of[owner] < self._of_an_owner]
            if not may:
                return
            owner = min(may, key=self._of.__getitem__)
            queue = self._waiting.pop(owner)
            place = queue.popleft()
            if queue:
                self._waiting[owner] = queue  # at the end
            if not place.done():
                self._of[owner] += 1
                place.set_result(None)

    async def _look(self) -> None:
        """While owners wait: looks which turns stall, and ends those that were long."""
        while self._waiting:
            await asyncio.sleep(LOOK_SECONDS)
            now = asyncio.get_running_loop().time()
            long: list[_Turn] = []
            for turn in self._turns:
                came = turn.progress()
                if came != turn.came:
                    turn.came, turn.moved = came, now
                turn.stalled = now - turn.moved >= STALLED_SECONDS
                if now - turn.began >= TURN_SECONDS:
                    long.append(turn)
            self._grant()
            long.sort(key=lambda turn: (-self._of[turn.owner], turn.began))
            for turn in long[: len(self._waiting)]:
                turn.over.set()

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()


# --- fetching

MAX_IDLE_STREAMS = 128
"""To all peers together; the one that was used longest ago is closed first."""
IDLE_SECONDS = 240.0
MAX_HOLDERS = 4
BYTES_PER_HOLDER = 1 << 20
MAX_ANSWER_BYTES = 4096


def answer_of(raw: bytes, what: str) -> dict[str, object]:
    """Decodes a holder's answer; `what` names it in errors. Raises FrameError."""
    answer = framing.unpack_message(raw)
    if not isinstance(answer, dict):
        raise framing.FrameError(f"{what} sent no answer")
    return answer


async def fetch_named(transport: Transport, peer: str, name: str, *, limit: int, timeout: float = 20.0) -> bytes:
    """Fetches a file that `peer` serves by name, such as the manifest: `limit` bytes at most, unchecked.

    Raises RemoteError.
    """
    what = f"{name} from {short_peer(peer)}"
    stream = await transport.open(peer, endpoints.BLOB, timeout=timeout)
    try:
        await stream.send(framing.pack_message({"named": name}))
        size = answer_of(await stream.recv(1024, timeout=timeout), what).get("size")
        if not isinstance(size, int) or size < 0:
            raise RemoteError(peer, f"{what}: it does not have it; ask another node")
        if size > limit:
            raise RemoteError(peer, f"{what}: {size} bytes; at most {limit} are taken")
        data = bytearray()
        while len(data) < size:
            piece = await stream.recv(blob_hash.RANGE_BYTES, timeout=timeout)
            if not piece or len(data) + len(piece) > size:
                raise RemoteError(peer, f"{what}: it sent another number of bytes than it said; ask another node")
            data += piece
        await stream.finish()
        return bytes(data)
    except framing.FrameError as error:
        raise RemoteError(peer, f"{what}: {error}; ask another node") from None
    finally:
        await stream.close()


class IdleStreams:
    """Open streams that wait for their next use. A stream that was closed meanwhile raises Closed when it is used."""

    def __init__(self, most: int = MAX_IDLE_STREAMS) -> None:
        self._most = most
        self._since: OrderedDict[Stream, float] = OrderedDict()

    def take(self, peer: str) -> Stream | None:
        """Returns the stream to `peer` that was used last."""
        stream = next((s for s in reversed(self._since) if s.remote == peer), None)
        if stream is None or now() - self._since[stream] >= IDLE_SECONDS:
            return None
        del self._since[stream]
        return stream

    async def keep(self, stream: Stream) -> None:
        """Keeps a stream for later, and closes those that are too old or too many."""
        self._since[stream] = now()
        expired: list[Stream] = []
        while self._since:  # nothing is awaited here, as others use the streams meanwhile
            oldest, since = next(iter(self._since.items()))
            if len(self._since) <= self._most and now() - since < IDLE_SECONDS:
                break
            del self._since[oldest]
            expired.append(oldest)
        await asyncio.gather(*(old.close() for old in expired))

    async def aclose(self) -> None:
        while self._since:
            await self._since.popitem(last=False)[0].close()


@dataclass(slots=True)
class Asked:
    """A holder that was asked for a blob."""

    peer: str
    since: float  # when, in steady seconds
    patience: float = OVERDUE_SECONDS  # seconds within which holders usually answer
    mine: deque[int] = field(default_factory=deque)  # the ranges it was asked for and has not sent
    answered: bool = False  # whether it has said anything
    gives: bool = False  # whether it has the blob, so that the blob is on its way to us

    def is_late(self, now: float) -> bool:
        """Returns whether another holder is asked besides."""
        return not self.gives and now >= self.since + self.patience

    def is_silent(self, now: float) -> bool:
        """Returns whether nothing more can be expected of it."""
        return not self.gives and now >= self._silent_at

    def changes_in(self, now: float) -> float:
        """Seconds until it counts as late or silent; infinite if that does not change."""
        at = [] if self.gives else [self.since + self.patience, self._silent_at]
        return min((time - now for time in at if time > now), default=math.inf)

    @property
    def _silent_at(self) -> float:
        return self.since + (WAIT_SECONDS if self.answered else self.patience)


@dataclass(frozen=True, slots=True)
class Coming:
    """A blob that is on its way here, for which another peer may wait.

    fetch: done when it is here
    is_sure: whether it surely leads to somebody who has it
    lead: cancelled when it does not any more, and the other one should wait no longer; None: it does not depend on that
    """

    fetch: asyncio.Future[None]
    is_sure: bool
    lead: asyncio.Future[None] | None


@dataclass(slots=True)
class Job:
    """The fetch of one blob. For `place`, `check`, `streams` and `all_asked` see `Fetcher.fetch`.

    todo: ranges that no holder was asked for; of a small blob the one piece that it comes in
    known: set when the digests of all ranges are known; never for a small blob
    changed: set now and then, when a waiting holder should look for ranges again
    asking: holders that were asked and have not ended; done where one has it, cancelled where one will not give it
    reading: streams on which it comes, with the bytes received on each before
    """

    name: str
    size: int
    holders: list[str] = field(default_factory=list)
    place: Place | None = None
    round: int = 0
    check: Callable[[bytes], object] | None = None
    streams: int = 1
    all_asked: asyncio.Event = field(default_factory=asyncio.Event)
    begun: bool = False  # whether it has had a turn of the gate
    part: Part | None = None  # what is here of a large blob
    todo: deque[int] = field(default_factory=lambda: deque([0]))
    asked: dict[int, float] = field(default_factory=dict)  # when the others were asked for
    data: bytes | None = None  # a small blob, once it is here
    asking: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    served: bool = False  # whether one of them has the blob
    named_by: dict[str, str] = field(default_factory=dict)  # peers that a holder surely named, with that holder
    waiting: deque[str] = field(default_factory=deque)  # holders that were not asked yet
    known: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    reading: dict[Stream, int] = field(default_factory=dict)
    read: int = 0  # bytes that came on other streams

    def resume(self, part: Part) -> None:
        """Takes over the ranges of a large blob that are on disk."""
        self.part, self.todo = part, deque(sorted(part.missing))
        if part.leaves is not None:
            self.known.set()
        if not part.missing:
            self.done.set()

    @property
    def received(self) -> int:
        """Bytes that holders have sent."""
        return self.read + sum(stream.received - before for stream, before in self.reading.items())

    def over(self, stream: Stream | None) -> None:
        """Stops counting the bytes of a stream."""
        if stream in self.reading:
            self.read += stream.received - self.reading.pop(stream)

    @property
    def came(self) -> int:
        """Bytes of a large blob that are here, to a range."""
        return max(0, self.size - blob_hash.RANGE_BYTES * len(self.part.missing)) if self.part is not None else 0

    def is_missing(self, index: int) -> bool:
        return self.data is None if self.part is None else index in self.part.missing

    def give_back(self, indices: Sequence[int]) -> None:
        """Has other holders asked for ranges that a holder does not send."""
        for index in indices:
            if self.asked.pop(index, None) is not None and self.is_missing(index):
                self.todo.appendleft(index)
        self.wake()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def next(self, mine: deque[int], speed: Speed) -> int | None:
        """Returns the next range to ask of a holder that still owes us `mine`: one not asked for yet, or a late one."""
        while self.todo:
            index = self.todo.popleft()
            if self.is_missing(index):
                return index
        self.all_asked.set()
        if mine or not self.asked:
            return None
        index, since = min(self.asked.items(), key=lambda item: item[1])
        late = now() - since - PATIENCE * speed.expected(blob_hash.RANGE_BYTES)
        return index if late > OVERDUE_SECONDS else None

    def ask(self, mine: deque[int], index: int) -> None:
        """Notes that a holder is asked for a range."""
        self.asked[index] = now()
        with contextlib.suppress(ValueError):
            self.todo.remove(index)
        mine.append(index)

    async def keep(self, index: int, data: bytes) -> bool:
        """Stores a range. Returns whether it is right. Raises UsageError where the disk refuses."""
        if not self.is_missing(index):
            return True  # another holder was quicker
        if self.part is not None:
            return await asyncio.to_thread(self.part.write, index, data)
        if self.place is not None and self.place.index < 0:
            is_right = blob_hash.root(self.place.size, data) == self.place.name
        else:
            is_right = blob_hash.name_of(data) == self.name
        self.data = data if is_right else None
        return is_right


class Source(Protocol):
    """A holder that is no peer."""

    async def read(self, place: Place) -> bytes:
        """Returns a range of a blob, or its leaves, unchecked. Raises RemoteError."""


@dataclass(eq=False)
class Fetcher:
    """Fetches blobs into `store`.

    reach: awaited before a holder is asked
    lost: called when a holder is gone
    timeout: seconds of silence after which a holder counts as gone
    sync: whether fetched blobs survive a loss of power
    holders: what is known of holders
    sources: holders that are no peers, by their names among holders
    """

    transport: Transport
    store: BlobStore
    _: KW_ONLY
    reach: Callable[[str], Awaitable[None]] | None = None
    lost: Callable[[str], None] = lambda peer: None
    timeout: float = 20.0
    sync: bool = False
    holders: Holders = field(default_factory=Holders)
    sources: Mapping[str, Source] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._gate = Gate()
        self._jobs: dict[str, tuple[Job, asyncio.Task[None]]] = {}
        self._closing: set[asyncio.Task[list[str]]] = set()
        self._idle = IdleStreams()

    def coming(self, name: str, peer: str, named_by: str) -> Coming | None:
        """The running fetch of a blob, if `peer`, sent here by the holder `named_by`, may wait for it."""
        job, task = self._jobs.get(name, (None, None))
        if job is None or task is None or not job.begun:
            return None
        lead = None if job.served else job.asking.get(named_by)
        is_sure = job.served or (lead is not None and not lead.cancelled())
        if rank(name, peer) < rank(name, self.transport.peer_id):
            return Coming(task, is_sure, None)
        return Coming(task, True, lead) if is_sure else None

    @property
    def running(self) -> tuple[str, ...]:
        """The names of all blobs that are being fetched."""
        return tuple(self._jobs)

    @property
    def came(self) -> int:
        """Bytes that are here of large blobs that are being fetched."""
        return sum(job.came for job, _ in self._jobs.values())

    async def fetch(
        self,
        name: str,
        size: int,
        holders: Sequence[str],
        *,
        round: int = 0,
        check: Callable[[bytes], object] | None = None,
        all_asked: asyncio.Event | None = None,
        streams: int = 1,
        owner: str = "",
        place: Place | None = None,
    ) -> None:
        """Returns when the blob of `size` bytes is in the store. Callers for the same name share one fetch.

        Long because each option is of one fetch:
        round: that the blob is stored for
        check: sees the blob before it is stored, and may refuse it by raising
        all_asked: set when every range was asked for once, so that the link will soon be free
        streams: most streams to one holder, where there are too few others
        owner: the peer that offered the blob, for the gate (default: the first holder)
        place: where a blob of one range lies in a larger one, for holders that know it by that; leaves are named by
            their blob's name and LEAVES

        Raises RemoteError naming the last holder to fail, UsageError where the disk refuses.
        """
        if self.store.has(name):
            return
        if not blob_hash.is_name(name.removesuffix(LEAVES) if place is not None else name):  # it becomes a path
            raise RemoteError("nobody", "blob: its name is not 64 hexadecimal digits; nothing is fetched")
        if not 0 <= size <= blob_hash.MAX_BLOB_BYTES:
            raise RemoteError(
                "nobody", f"blob {name[:12]}: {size} bytes; at most {blob_hash.MAX_BLOB_BYTES} are fetched"
            )
        _, task = self._jobs.get(name, (None, None))
        if task is None:
            job = Job(name, size, list(holders), place, round, check, streams, all_asked or asyncio.Event())
            task = asyncio.create_task(self._fetch(job, owner or next(iter(holders), "")))
            self._jobs[name] = job, task
            task.add_done_callback(lambda task: self._ended(name, task))
        await asyncio.shield(task)

    def also_from(self, name: str, holders: Iterable[str]) -> None:
        """Has the running fetch of a blob ask these holders, too, once those that were asked are late."""
        if name in self._jobs:
            job, _ = self._jobs[name]
            fresh = [peer for peer in holders if peer not in job.holders]
            job.holders += fresh
            job.waiting += fresh

    def give_up(self, name: str) -> None:
        """Cancels the fetch of a blob."""
        if name in self._jobs:
            self._jobs[name][1].cancel()

    async def aclose(self) -> None:
        """Ends every fetch; what came so far stays on disk."""
        await cancel(*(task for _, task in self._jobs.values()), *self._closing)
        self._gate.close()
        await self._idle.aclose()

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        del self._jobs[name]
        if not task.cancelled():
            task.exception()  # retrieved; callers that wait get it too

    # --- one blob

    async def _fetch(self, job: Job, owner: str) -> None:
        async def turn() -> None:
            if not job.begun:
                if job.size > blob_hash.WHOLE_BYTES:
                    job.resume(await asyncio.to_thread(self.store.part, job.name, job.size))
                job.begun = True
            if not job.done.is_set():
                await self._gather(job)

        await self._gate.run(owner, turn, lambda: job.received)
        if job.part is not None:
            await asyncio.to_thread(job.part.finish, job.round, job.check, sync=self.sync)
        else:
            assert job.data is not None
            if job.check is not None:
                await asyncio.to_thread(job.check, job.data)
            await asyncio.to_thread(self.store.put, job.data, job.round, name=job.name, sync=self.sync)

    async def _gather(self, job: Job) -> None:
        """Asks holders, and the peers that they name, until nothing is missing."""
        asked = {self.transport.peer_id}
        insisted: set[str] = set()
        busy, more, job.waiting = deque[str](), deque[str](), self.holders.order(job.holders, job.size)
        workers: dict[asyncio.Task[list[str]], Asked] = {}
        parallel = min(MAX_HOLDERS, 1 + len(job.todo) * blob_hash.RANGE_BYTES // BYTES_PER_HOLDER)
        last: RemoteError | None = None
        done, known = asyncio.create_task(job.done.wait()), asyncio.create_task(job.known.wait())
        try:
            while not job.done.is_set():
                # one holder sends the digests of the ranges, or a small blob; another is asked when it is late
                time = now()
                room = (parallel if job.known.is_set() else 1) + sum(a.is_late(time) for a in workers.values())
                while len(workers) < room:
                    again = False  # over one more stream
                    if job.waiting:
                        peer, known_to = job.waiting.popleft(), asked
                        more.extend([peer] * (job.streams - 1) if peer not in asked else ())
                    elif more and job.known.is_set():
                        peer, known_to, again = more.popleft(), set[str](), True
                    elif busy and all(a.is_silent(time) for a in workers.values()):
                        peer, known_to = busy.popleft(), insisted
                    else:
                        break
                    if peer in known_to or self.holders.is_avoided(peer):
                        continue
                    holder = Asked(peer, time, self.holders.patience(), answered=again)
                    known_to.add(peer)
                    workers[asyncio.create_task(self._work(job, holder, known_to is insisted))] = holder
                if not workers:
                    raise last or RemoteError(
                        "nobody", f"blob {job.name[:12]}: no holder that can be trusted is known; it is tried again"
                    )
                events = {done, *workers} if job.known.is_set() else {done, known, *workers}
                patience = min(a.changes_in(time) for a in workers.values())
                timeout = None if patience == math.inf else patience
                ended, _ = await asyncio.wait(events, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                for holder in workers.values():
                    if not holder.answered and holder.is_silent(now()):
                        self.holders.silent(holder.peer)
                for task in [t for t in workers if t in ended]:
                    peer = workers.pop(task).peer
                    try:
                        others = task.result()
                    except RemoteError as error:
                        if last is None or not isinstance(error, Unreachable):  # which tells less than an answer
                            last = error
                        more = deque(p for p in more if p != peer)
                        self.holders.failed(peer, error)
                        if isinstance(error, Unreachable | Closed | Timeout):
                            self.lost(peer)
                        continue
                    if others:
                        busy.append(peer)
                        named = [p for p in others if p not in asked and not self.holders.breaks_promises(p)]
                        named = list(self.holders.order(named, job.size))
                        rest = job.waiting
                        job.waiting = deque([*named, *rest] if job.place is not None else [*rest, *named])
        finally:
            done.cancel()
            known.cancel()
            for worker, holder in workers.items():
                if holder.answered and holder.is_late(now()):  # it let us wait, and others were quicker
                    self.holders.broke_promise(holder.peer)
                if holder.mine or not job.done.is_set():
                    worker.cancel()
                self._closing.add(worker)
                worker.add_done_callback(functools.partial(self._closed, holder.peer))
            await asyncio.gather(done, known, return_exceptions=True)

    def _closed(self, peer: str, task: asyncio.Task[list[str]]) -> None:
        self._closing.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), RemoteError):
            self.holders.failed(peer, error)

    async def _work(self, job: Job, holder: Asked, insist: bool) -> list[str]:
        """Takes ranges from one holder until none is missing. Returns the peers that it names instead.

        Raises RemoteError, UsageError.
        """
        peer, mine = holder.peer, holder.mine
        if peer in self.sources:
            return await self._read(job, holder)
        what = f"blob {job.name[:12]}: peer {short_peer(peer)}"
        stream: Stream | None = None
        usable = False
        lead = job.asking.setdefault(peer, asyncio.get_running_loop().create_future())
        try:
            if self.reach is not None:
                await self.reach(peer)
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
                place = [job.place.name, job.place.size, job.place.index]
                request |= {"blob": job.name.removesuffix(LEAVES), "in": place}
            stream, reply = await self._begin(peer, framing.pack_message(request))
            holder.answered = True
            self.holders.answered(peer)
            if job.part is None:
                job.ask(mine, 0)
            waited = False
            until = now() + WAIT_SECONDS + OVERDUE_SECONDS
            while (said := answer_of(reply, what)).get("state") == "wait":
                if now() > until:
                    self.holders.broke_promise(peer)
                    raise RemoteError(peer, f"{what} promised it for {WAIT_SECONDS:g} s; another is asked")
                waited, reply = True, await self._answer(stream, MAX_ANSWER_BYTES)
            usable = job.part is None and said.get("state") in ("busy", "absent")
            if said.get("state") == "busy":
                others = [p for p in _names(said.get("ask")) if p != self.transport.peer_id]
                if said.get("sure") is True:
                    job.named_by.update(dict.fromkeys(others, peer))
                return others or [peer]
            if said.get("state") != "here":
                raise Absent(peer, f"{what} does not have it; another is asked")
            job.served = holder.gives = True
            if not lead.done():
                lead.set_result(None)
            job.reading[stream] = stream.received
            self.holders.gave(peer)
            if leaves:
                await self._learn(
                    job, peer, await self._answer(stream, blob_hash.LEAF_BYTES * blob_hash.count(job.size)), what
                )
            await self._take(stream, job, holder, what, waited)
            usable = job.part is None and not mine
            if not usable:
                await stream.finish()
            return []
        except framing.FrameError as error:
            raise RemoteError(peer, f"{what}: {error}") from None
        finally:
            job.asking.pop(peer, None)
            lead.cancel()
            job.give_back(mine)
            job.over(stream)
            if stream is not None and usable:
                await self._idle.keep(stream)
            elif stream is not None:
                await stream.close()

    async def _learn(self, job: Job, peer: str, digests: bytes, what: str) -> None:
        """Takes the digests of a large blob's ranges, unless another holder sent them meanwhile."""
        assert job.part is not None
        if job.known.is_set():
            return
        if not await asyncio.to_thread(job.part.learn, digests):
            raise Corrupt(peer, f"{what} sent digests that are not those of the blob")
        job.todo = deque(i for i in job.todo if i in job.part.missing)
        job.known.set()
        if not job.part.missing:
            job.done.set()

    async def _read(self, job: Job, holder: Asked) -> list[str]:
        assert job.place is not None
        data = await self.sources[holder.peer].read(job.place)
        if len(data) != job.size or not await job.keep(0, data):
            raise Corrupt(holder.peer, f"{holder.peer}: sent wrong bytes of blob {job.name[:12]}")
        self.holders.gave(holder.peer)
        job.done.set()
        return []

    async def _begin(self, peer: str, ask: bytes) -> tuple[Stream, bytes]:
        """Opens a stream to a holder, or takes an idle one. Returns it and the first answer."""
        while True:
            kept = self._idle.take(peer)
            stream = kept or await self.transport.open(peer, endpoints.BLOB, timeout=self.timeout)
            try:
                began = now()
                await stream.send(ask)
                reply = await self._answer(stream, MAX_ANSWER_BYTES)
                self.holders.replied(now() - began)
                return stream, reply
            except BaseException as error:
                await stream.close()
                if kept is None or not isinstance(error, Closed):
                    raise
            self.lost(peer)  # it may have moved
            if self.reach is not None:
                await self.reach(peer)

    async def _answer(self, stream: Stream, limit: int) -> bytes:
        return await answer(stream, self.transport.doubt, limit, timeout=self.timeout)

    async def _take(self, stream: Stream, job: Job, holder: Asked, what: str, waited: bool) -> None:
        """Asks for ranges ahead of time, and takes them as they come.

        waited: whether the holder had to fetch the blob first; then its first answer says nothing of its link
        """
        mine, speed = holder.mine, self.holders.speed(holder.peer)
        arrived, measured = now(), waited
        while not job.done.is_set():
            while len(mine) < speed.depth and (index := job.next(mine, speed)) is not None:
                job.ask(mine, index)
                await stream.send(framing.pack_message({"range": index}))
            if not mine:  # others may give ranges back, or be late
                await wait_for_event(job.changed, OVERDUE_SECONDS / 2)
                continue
            index = mine[0]
            begin, end = (0, job.size) if job.part is None else blob_hash.span(job.size, index)
            packed = await self._answer(stream, blob_hash.WHOLE_BYTES + 1)
            time = now()
            if not measured:
                measured = True
                speed.answered(time - job.asked.get(index, arrived))
            speed.arrived(time - max(arrived, job.asked.get(index, arrived)), len(packed))
            arrived = time
            try:
                data = compression.unpack(packed, end - begin)
            except compression.Malformed as error:
                raise Corrupt(holder.peer, f"{what} sent for range {index}: {error}") from None
            if len(data) != end - begin or not await job.keep(index, data):
                raise Corrupt(holder.peer, f"{what} sent wrong bytes for range {index}")
            mine.popleft()
            job.asked.pop(index, None)
            if job.part is None or not job.part.missing:
                job.done.set()
                job.wake()


def _names(peers: object) -> list[str]:
    return [p for p in peers if isinstance(p, str)][:16] if isinstance(peers, list) else []
