"""A bootstrap node as a process: pumps sessions, votes, DHT records and payloads through the leader's and the quorum's machines.

One task owns both machines (`_pump`); handlers of streams only put events into its queue. A payload is fetched, checked within
all its bounds, stored, and only then counts as held. A vote is on disk before it is sent, a commit before anybody hears of it.
Every operator's node hears every peer, so that any of them can lead.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from bootstrap.archive import Archive
from peer import events
from peer.events import Emitter
from peer.net.base import REQUEST_SECONDS, Stream, Transport, serve_calls
from peer.net.blobs import NODE_COPIES, BlobServer, Fetcher
from peer.net.directory import Directory
from protocol import identity as identities
from protocol.codec import sparse
from protocol.errors import RemoteError
from protocol.identity import Identity
from protocol.planning.partition import Candidate
from protocol.rounds import leader, paxos
from protocol.rounds.leader import Leader
from protocol.rounds.paxos import Quorum
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import VERSION, Announcement
from protocol.wire.ballot import Accept, Prepare, Promise, Reject, Vote
from protocol.wire.commit import Commit, Part, Record
from protocol.wire.encoding import Message
from protocol.wire.session import (
    Attest,
    ChainFailure,
    ChainReconfig,
    Finished,
    Heartbeat,
    Hello,
    LogRequest,
    Offer,
    Offered,
    Withdraw,
)

POLL_SECONDS = 1.0
DHT_SECONDS = 3.0
RETRY_SECONDS = 2.0
OUTBOX = 1024


@dataclass(slots=True)
class _Session:
    """One peer's open stream; `outbox` is drained by the session's own task."""

    heard: float
    outbox: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(OUTBOX))


class Node:
    """See the module's docstring. `initial_peers`: addresses of other bootstrap nodes of the run, as far as known."""

    def __init__(
        self,
        manifest: Manifest,
        identity: Identity,
        transport: Transport,
        archive: Archive,
        emit: Emitter,
        initial_peers: Sequence[str] = (),
    ) -> None:
        self.manifest = manifest
        self.archive = archive
        self._transport = transport
        self._emit = emit
        self._directory = Directory(
            manifest,
            identity,
            transport,
            initial_peers,
            Announcement(
                run=manifest.run_id,
                peer=identity.peer_id,
                addresses=tuple(transport.addresses),
                device="bootstrap",
                phase="serving",
            ),
        )
        self._events: asyncio.Queue[leader.Event | paxos.Event] = asyncio.Queue()
        self._sessions: dict[str, _Session] = {}
        self._links: dict[str, asyncio.Queue[bytes]] = {
            o: asyncio.Queue(OUTBOX) for o in manifest.operators if o != identity.peer_id
        }
        self._last_heard: dict[str, float] = {}
        self._ready: dict[str, Candidate] = {}
        self._fetching: set[str] = set()
        self._fetcher = Fetcher(
            transport,
            archive.blobs,
            reach=self._directory.reach,
            warn=lambda text: emit(events.Warning(text=text)),
            sync=True,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: Finished | None = None
        self._stalled = False
        held, now = list(archive.blobs), time.time()
        head = archive.commits[-1] if archive.commits else None
        self._leader = Leader(manifest, archive.commits, held, now)
        self._quorum = Quorum(
            manifest, identity.peer_id, head, archive.vote, held, identity.sign, identities.verify, now
        )

    async def run(self) -> None:
        """Serves until it is cancelled. Raises UsageError when the disk refuses."""
        await self._transport.serve(endpoints.SESSION, self._session)
        await self._transport.serve(endpoints.QUORUM, self._vote_stream)
        await serve_calls(self._transport, endpoints.LOG, self._log)
        named = {endpoints.MANIFEST_NAME: self.manifest.to_bytes()}
        if self.archive.tokenizer is not None:
            named[endpoints.TOKENIZER_NAME] = self.archive.tokenizer
        blobs = BlobServer(self.archive.blobs, coming=self._fetcher.coming, named=named, copies=NODE_COPIES)
        await blobs.serve(self._transport)
        for commit in self.archive.commits[-1:]:
            self._emit_commit(commit)
        self._spawn(self._complete(self.archive.commits))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump())
                group.create_task(self._watch())
                group.create_task(self._directory.announce())
                for operator in self._links:
                    group.create_task(self._link(operator))
        finally:
            for task in self._tasks:
                task.cancel()
            await self._fetcher.aclose()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- the other operators' nodes

    async def _link(self, operator: str) -> None:
        """Keeps a stream to another node open and sends what is queued for it; what could not be sent is made again."""
        queue = self._links[operator]
        while True:
            try:
                await self._directory.reach(operator)
                stream = await self._transport.open(operator, endpoints.QUORUM, timeout=10.0)
                try:
                    while not queue.empty():
                        queue.get_nowait()
                    while True:
                        await stream.send(await queue.get())
                finally:
                    await stream.close()
            except RemoteError:
                self._directory.lost(operator)
                await self._directory.connect()
            await asyncio.sleep(RETRY_SECONDS)

    async def _vote_stream(self, stream: Stream) -> None:
        node = stream.remote
        if node not in self._links:
            raise RemoteError(node, f"peer {node[-8:]}: not an operator of this run; it has no vote")
        while True:
            message = encoding.decode_any(bytes(await stream.recv()), node)
            match message:
                case Record():
                    self._events.put_nowait(paxos.Learned(node, message))
                case Prepare() | Promise() | Accept() | Vote() | Reject() | Heartbeat():
                    self._events.put_nowait(paxos.Heard(node, message))
                case LogRequest(after=after):
                    self._send_log(self._links[node], after)
                case _:
                    raise encoding.MessageError(node, f"votes of {node[-8:]}: unexpected {type(message).__name__}")

    # --- the peers

    async def _log(self, remote: str, request: bytes) -> bytes:
        ask = encoding.expect(LogRequest, encoding.decode(request, remote), remote)
        return self.archive.after(ask.after)

    async def _session(self, stream: Stream) -> None:
        peer = stream.remote
        hello = encoding.expect(Hello, encoding.decode(await stream.recv(timeout=REQUEST_SECONDS), peer), peer)
        if hello.run != self.manifest.run_id or hello.version != VERSION:
            raise RemoteError(peer, f"run {hello.run[:12]} version {hello.version} is not served here; check RUN")
        session = _Session(time.time())
        self._sessions[peer] = session
        sender = asyncio.create_task(self._send(stream, session))
        try:
            if self._finished is not None:
                self._post(session.outbox, encoding.encode(self._finished))
            while True:
                message = encoding.decode(await stream.recv(), peer)
                session.heard = self._last_heard[peer] = time.time()
                self._hear(peer, session, message)
        finally:
            sender.cancel()
            if self._sessions.get(peer) is session:
                del self._sessions[peer]
            await asyncio.gather(sender, return_exceptions=True)

    def _hear(self, peer: str, session: _Session, message: Message) -> None:
        match message:
            case Offer() | Attest() | Withdraw() | ChainFailure() | ChainReconfig():
                if isinstance(message, Attest):
                    self._emit(events.Attest(peer=peer, round=message.round, digests=message.digests))
                self._events.put_nowait(leader.Received(peer, message))
            case LogRequest(after=after):
                self._send_log(session.outbox, after)
            case Heartbeat():
                phase = "stalled" if self._stalled else "leading" if self._quorum.leads else "following"
                self._post(session.outbox, encoding.encode(Heartbeat(phase=phase, round=self._leader.round)))
            case _:
                raise encoding.MessageError(peer, f"session of {peer[-8:]}: unexpected {type(message).__name__}")

    async def _send(self, stream: Stream, session: _Session) -> None:
        while True:
            await stream.send(await session.outbox.get())

    def _post(self, outbox: asyncio.Queue[bytes], raw: bytes) -> None:
        """To somebody who does not read, messages are dropped; what matters is asked for or sent again."""
        with contextlib.suppress(asyncio.QueueFull):
            outbox.put_nowait(raw)

    def _send_log(self, outbox: asyncio.Queue[bytes], after: int) -> None:
        for raw in self.archive.records[max(after + 1, 0) :][: OUTBOX // 2]:
            self._post(outbox, raw)

    async def _watch(self) -> None:
        """BackwardFirstScheduler announcements and silences into events."""
        read_at = float("-inf")
        while True:
            if time.monotonic() - read_at >= DHT_SECONDS:
                read_at = time.monotonic()
                with contextlib.suppress(RemoteError):
                    await self._directory.refresh()
            now = time.time()
            for peer, announcement in self._directory.known.items():
                a, known = announcement, self._ready.get(peer)
                candidate = Candidate(
                    peer=a.peer,
                    memory_bytes=a.memory_bytes,
                    up_bps=a.up_bps,
                    down_bps=a.down_bps,
                    speed_flops=a.speed_flops,
                )
                if peer not in self._sessions or known == candidate:
                    continue
                self._ready[peer] = candidate
                self._events.put_nowait(leader.Ready(candidate))
                if known is None or known != dataclasses.replace(candidate, speed_flops=known.speed_flops):
                    self._emit(events.ready(announcement))
            for peer in list(self._ready):
                if now - self._last_heard.get(peer, now) > self.manifest.timing.gone_after:
                    del self._ready[peer]
                    self._directory.lost(peer)
                    self._events.put_nowait(leader.Gone(peer))
                    self._emit(events.Gone(peer=peer))
            closed = (p for p in self._ready if p not in self._sessions)
            patience = leader.ABSENT_BEATS * self.manifest.timing.heartbeat
            absent = frozenset(p for p in closed if now - self._last_heard.get(p, now) > patience)
            self._events.put_nowait(leader.Tick(absent))
            self._events.put_nowait(paxos.Tick())
            await asyncio.sleep(POLL_SECONDS)

    # --- the machines

    async def _pump(self) -> None:
        await self._directory.connect()
        while True:
            await self._tell(await self._events.get())

    async def _tell(self, event: leader.Event | paxos.Event) -> None:
        """Gives an event to its machine, and then those that its effects bring about: in their order, each when all effects of
        the one before are done, or an older effect would undo what a newer one said."""
        todo = deque([event])
        while todo:
            event = todo.popleft()
            if isinstance(event, paxos.Event):
                todo.extend(await self._tell_quorum(event))
            else:
                todo.extend(self._tell_leader(event))

    def _tell_leader(self, event: leader.Event) -> list[paxos.Event]:
        following: list[paxos.Event] = []
        for effect in self._leader.handle(event, time.time()):
            match effect:
                case leader.Fetch(peer, part):
                    self._spawn(self._fetch((peer,), part, peer))
                case leader.Propose(commit):
                    following.append(paxos.Proposed(commit))
                case leader.Send(peers, reconfig, first):
                    if first:
                        self._emit(events.chain_reconfigured(reconfig))
                    for peer in (p for p in peers if p in self._sessions):
                        self._post(self._sessions[peer].outbox, encoding.encode(reconfig))
                case leader.Report(round, peer, shard):
                    self._emit(events.Diverged(peer=peer, round=round, shard=shard))
                case leader.Moved(round, replica, before, after, reason):
                    self._emit(
                        events.Moved(
                            round=round,
                            replica=replica,
                            peers=after.peers,
                            before=before.blocks,
                            after=after.blocks,
                            reason=reason,
                        )
                    )
                case leader.Done(round):
                    self._finish(round)
        return following

    async def _tell_quorum(self, event: paxos.Event) -> list[leader.Event | paxos.Event]:
        following: list[leader.Event | paxos.Event] = []
        for effect in self._quorum.handle(event, time.time()):
            match effect:
                case paxos.Save(vote):
                    await asyncio.to_thread(self.archive.save_vote, vote)
                case paxos.Send(peer, message):
                    self._post(self._links[peer], encoding.encode(message))
                case paxos.SendLog(peer, after):
                    self._send_log(self._links[peer], after)
                case paxos.Fetch(holders, part):
                    self._spawn(self._fetch(holders, part, holders[-1]))
                case paxos.Append(record):
                    await asyncio.to_thread(self.archive.append, record)
                    following.append(paxos.Appended(record))
                case paxos.Decided(record):
                    following.append(leader.Decided(record.commit))
                    self._decided(record)
                case paxos.Leads(leads):
                    self._emit(events.Leads(leads=leads))
                    following.append(leader.Lead(leads))
                case paxos.Stalled(missing):
                    self._stall(missing)
        return following

    def _decided(self, record: Record) -> None:
        self._emit_commit(record.commit)
        raw = self.archive.records[record.commit.round]
        for session in self._sessions.values():
            self._post(session.outbox, raw)
        self._spawn(self._complete([record.commit]))

    def _finish(self, round: int) -> None:
        final = self._leader.majority(round)
        whole = set(layout.shard_names(self.manifest.model)) <= set(final)
        digest = layout.state_digest(self.manifest.model, final) if whole else None
        self._emit(events.RunFinished(round=round, state_digest=digest))
        self._finished = Finished(round=round)
        for session in self._sessions.values():
            self._post(session.outbox, encoding.encode(self._finished))

    def _stall(self, missing: tuple[str, ...]) -> None:
        self._stalled = bool(missing)
        size = len(self._quorum.members)
        if missing:
            names = ", ".join(f"…{m[-8:]}" for m in missing)
            text = (
                f"quorum: {size - len(missing)} of {size} bootstrap nodes give signs of life (none: {names});"
                f" round {self._quorum.round} waits, start one of them again"
            )
        else:
            text = f"quorum: enough of the {size} bootstrap nodes are back; round {self._quorum.round} goes on"
        self._emit(events.Warning(text=text))

    # --- payloads

    async def _complete(self, commits: Sequence[Commit]) -> None:
        """Gets what the commits name and the archive lacks, until it has it."""
        for commit in commits:
            for share in (s for c in commit.contributions for s in c.shares):
                for part in share.parts:
                    while not self.archive.blobs.has(part.digest):
                        await self._fetch((share.peer,), part, share.peer)
                        await asyncio.sleep(0 if self.archive.blobs.has(part.digest) else RETRY_SECONDS)

    async def _fetch(self, holders: Sequence[str], part: Part, sender: str) -> None:
        """From one of `holders` or another operator's node; a payload that is none takes its sender out of the round."""
        if part.digest in self._fetching:
            return
        self._fetching.add(part.digest)
        round = self._leader.round
        shapes = layout.shapes(self.manifest.model, part.shard)

        def check(data: bytes) -> None:
            sparse.decode(self.manifest.outer.codec, shapes, data)

        try:
            asked = [h for h in dict.fromkeys((*holders, *self._links)) if h != self._transport.peer_id]
            await self._fetcher.fetch(part.digest, part.size, asked, round=round, check=check)
            self._events.put_nowait(leader.Held(part.digest))
            self._events.put_nowait(paxos.Held(part.digest))
            self._tell_offered(Offered(round=round, peer=sender, part=part))
        except sparse.PayloadError as error:
            refused = Withdraw(round=round, reason=f"payload of {part.shard}: {error}")
            self._events.put_nowait(leader.Received(sender, refused))
        except RemoteError as error:
            self._emit(events.Warning(text=str(error)))
        finally:
            self._fetching.discard(part.digest)

    def _tell_offered(self, offered: Offered) -> None:
        """To everybody, strong uplinks first: who asks first passes the payload on to the others."""
        peers = list(self._sessions)
        random.shuffle(peers)
        peers.sort(key=lambda p: -self._ready[p].up_bps if p in self._ready else 0)
        raw = encoding.encode(offered)
        for peer in peers:
            if self._sessions[peer].outbox.qsize() < OUTBOX // 2:  # commits must find space
                self._post(self._sessions[peer].outbox, raw)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _emit_commit(self, commit: Commit) -> None:
        self._emit(events.commit_of(commit))
