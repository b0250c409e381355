"""Fetches payloads, and the lists that name them, into a bootstrap node's archive.

They are checked within all their bounds and stored before they count as held. When a round is decided, what was
offered to it and is not committed is removed, and then what lies before the states that are kept, once both are stored
(protocol/ledger/retention.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bootstrap.archive import Archive
from peer import events
from peer.net.base import Transport, TransportLost
from peer.net.blobs import NO_ROUND, Fetcher
from peer.net.blobs.holders import Holders
from peer.net.directory import Directory
from peer.net.rate_limits import Rate, TokenBucket
from protocol.codec import sparse
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.ledger import part_lists, retention
from protocol.ledger.part_lists import Parts
from protocol.quorum import paxos_events
from protocol.round import comparing, leader_events
from protocol.round.comparing import Notes
from protocol.wire.commit import Aggregate, Commit, Part, Share
from protocol.wire.session import Withdraw

RETRY_SECONDS = 2.0
WARNINGS = Rate(1.0, 50.0)
"""Warnings about failed fetches, whose number other peers decide."""
SWEPT_ROUNDS = 64
"""Newest rounds of which a start removes what is not committed: a crash may have left it."""
_FOR_GOOD = 2**31
"""In place of a round: for a blob that the log names."""


@dataclass(eq=False)
class Payloads:
    """`put` gets events for the node's machines: what is held now, and withdrawals of invalid payloads."""

    transport: Transport
    archive: Archive
    directory: Directory
    emit: events.Emit
    put: Callable[[leader_events.Event | paxos_events.Event], None]

    def __post_init__(self) -> None:
        self._manifest = self.archive.manifest
        self.notes = Notes(lock=threading.Lock())
        """What was found in payloads that are judged soon."""
        self._fetching: dict[str, dict[str, tuple[Sequence[str], Part, int]]] = {}
        """By blob: who else offers it, with holders and the round, while it is fetched for the first."""
        self._wanted: dict[str, int] = {}  # by blob that is or was lately being fetched: the newest round it is for
        self._decided = -1
        self._incomplete = set[int]()  # rounds of which not all payloads are known to be here, as theirs
        self._warnings = TokenBucket(*WARNINGS)
        self._tasks: set[asyncio.Task[None]] = set()
        holders = Holders(self._warn)
        self.fetcher = Fetcher(
            self.transport, self.archive.blobs, reach=self.directory.reach, sync=True, holders=holders
        )

    def complete(self, rounds: range) -> None:
        """Starts fetching what the commits of these rounds name and the archive lacks, as long as it is kept."""
        self._incomplete.update(rounds)
        self._spawn(self._complete(rounds))

    async def fetch_state(self, shard: str, digest: str) -> None:
        """Fetches a state of a shard from the other operators' nodes. Raises RemoteError, UsageError."""
        size, nodes = self._manifest.state_bytes(shard), self._asked(())
        with self._busy(digest):
            await self.fetcher.fetch(digest, size, nodes, round=NO_ROUND)

    def fetch(self, holders: Sequence[str], part: Part, sender: str, round: int) -> None:
        """Starts fetching a payload of `sender`'s offer to `round`, from `holders` or the other operators' nodes."""
        self._want(part.digest, round)
        self._spawn(self._fetch(holders, part, sender, round))

    def fetch_list(self, holders: Sequence[str], share: Share, round: int) -> None:
        """Starts fetching a share's list of parts, or reading it if it is here."""
        self._want(share.root, round)
        self._spawn(self._fetch_list(holders, share, round))

    def keep(self, parts: Parts, round: int) -> None:
        """Starts storing the list of an offer to `round`."""
        self._want(part_lists.root_of(parts), round)
        self._spawn(self._keep(parts, round))

    async def settle(self, commit: Commit) -> set[str]:
        """Removes what was offered to a decided round and not committed, abandoned fetches, and what is not kept.

        Called before anything is offered to the next round, which may name what is removed. Returns the names of the
        removed blobs. Removes nothing of the round while a list of its commit is missing.
        """
        return await self._settle(commit) | await asyncio.to_thread(self._prune, commit.round)

    async def _settle(self, commit: Commit) -> set[str]:
        committed = await asyncio.to_thread(self._names, commit)
        if committed is None:
            return set()
        self.notes.settle(committed)
        self._decided = max(self._decided, commit.round)
        late = {name for name, round in self._wanted.items() if round <= commit.round and name not in committed}
        for name in late:
            self.fetcher.give_up(name)
        kept = {name for name, round in self._wanted.items() if round > commit.round}
        gone = await asyncio.to_thread(self.archive.blobs.settle, commit.round, committed | kept)
        for name in late:
            if self.archive.blobs.round_of(name) == commit.round:  # it was whole a moment before it was given up
                self.archive.blobs.remove(name)
                gone.add(name)
        self._wanted = {n: r for n, r in self._wanted.items() if r > commit.round or n in self._fetching}
        # nothing is awaited before, or another fetch might have begun
        self.archive.blobs.drop_parts({*self.fetcher.running, *self._fetching} - late)
        return gone

    async def sweep(self, commits: Sequence[Commit]) -> set[str]:
        """Does `settle` for the newest of these commits, before anything is offered."""
        return set().union(*[await self._settle(commit) for commit in commits[-SWEPT_ROUNDS:]])

    def _prune(self, round: int) -> set[str]:
        """Removes payloads and states that are not kept after the commit of `round`. Returns the names."""
        archive, blobs = self.archive, self.archive.blobs
        begin, kept = archive.states.begin, archive.states.kept
        states = {digest for each in kept for digest in archive.states.digests[each].values()}
        old, former = blobs.older(begin), blobs.of_no_round() - states
        if not begin or not (old or former) or any(archive.lacks(each) for each in kept):
            return set()
        needed = {name for name, wanted in self._wanted.items() if wanted > round}
        for each in {round, *self._incomplete}:  # they may name again what an earlier round named
            named = self._names(archive.commits[each]) if self._is_kept(each) else set()
            if named is None:
                return set()
            needed |= named
        gone = former.union(*[names for each in old if (names := each - needed)][: retention.PRUNED_ROUNDS])
        for name in gone:
            blobs.remove(name)
        return gone

    def _names(self, commit: Commit) -> set[str] | None:
        """Returns all names in a commit, None while a list of it is missing."""
        names = {aggregate.digest for aggregate in commit.aggregates}
        for share in commit.shares:
            raw = self.archive.blobs.get(share.root)
            if raw is None:
                return None
            names |= {share.root, *(part.digest for part in part_lists.unpack(raw))}
        return names

    def _is_late(self, name: str) -> bool:
        """Returns whether a blob came after its round was decided without it; then it is removed."""
        round = self._wanted.get(name, _FOR_GOOD)
        if round > self._decided or self.archive.blobs.round_of(name) != round:
            return False
        self.archive.blobs.remove(name)
        return True

    @contextlib.contextmanager
    def _busy(self, name: str) -> Iterator[None]:
        self._fetching[name] = {}
        try:
            yield
        finally:
            for sender, (holders, part, round) in self._fetching.pop(name, {}).items():
                if not self.archive.blobs.has(name) and self._wanted.get(name, -1) > self._decided:
                    self.fetch(holders, part, sender, round)

    def _want(self, name: str, round: int) -> None:
        self._wanted[name] = max(round, self._wanted.get(name, -1))

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.fetcher.aclose()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _complete(self, rounds: range) -> None:
        for round in rounds:
            if self._is_kept(round):
                for share in self.archive.commits[round].shares:
                    await self._complete_share(share, round)
                for aggregate in self.archive.commits[round].aggregates:
                    await self._complete_aggregate(aggregate, round)
            self._incomplete.discard(round)

    async def _complete_share(self, share: Share, round: int) -> None:
        holders = (*self._nodes(), share.peer)  # its maker may have left
        parts: Parts | None = None
        self._want(share.root, _FOR_GOOD)
        while self._is_kept(round) and (parts := await self._list_of(holders, share, round)) is None:
            await asyncio.sleep(RETRY_SECONDS)
        self._wanted.pop(share.root, None)
        for part in parts or ():
            self._want(part.digest, _FOR_GOOD)
            while self._is_kept(round) and not self.archive.blobs.has(part.digest):
                await self._fetch(holders, part, share.peer, round)
                await asyncio.sleep(0 if self.archive.blobs.has(part.digest) else RETRY_SECONDS)
            self._wanted.pop(part.digest, None)
        for name in (share.root, *(part.digest for part in parts or ())):
            if -1 < self.archive.blobs.round_of(name) < round:  # an earlier round named it, too
                await asyncio.to_thread(self.archive.blobs.renew, name, round)

    async def _complete_aggregate(self, aggregate: Aggregate, round: int) -> None:
        name = aggregate.digest
        self._want(name, _FOR_GOOD)
        while self._is_kept(round) and not self.archive.blobs.has(name):
            try:
                with self._busy(name):
                    await self.fetcher.fetch(name, aggregate.size, self._asked(()), round=round)
            except RemoteError as error:
                self._warn(f"aggregate of {aggregate.shard} of round {round - 1}: {error}")
                await asyncio.sleep(RETRY_SECONDS)
        self._wanted.pop(name, None)
        if -1 < self.archive.blobs.round_of(name) < round:
            await asyncio.to_thread(self.archive.blobs.renew, name, round)

    def _is_kept(self, round: int) -> bool:
        return round > self.archive.states.begin

    async def _keep(self, parts: Parts, round: int) -> None:
        with self._busy(root := part_lists.root_of(parts)):
            await asyncio.to_thread(self.archive.blobs.put, part_lists.pack(parts), round)
        self._report_list(root, parts)

    async def _fetch_list(self, holders: Sequence[str], share: Share, round: int) -> None:
        if share.root in self._fetching:
            return
        with self._busy(share.root):
            parts = await self._list_of(holders, share, round)
        if parts is not None:
            self._report_list(share.root, parts)

    def _report_list(self, root: str, parts: Parts) -> None:
        if not self._is_late(root):
            self.put(paxos_events.Listed(root, parts))
            self.put(leader_events.Held(root))

    async def _list_of(self, holders: Sequence[str], share: Share, round: int) -> Parts | None:
        """Returns a share's list, None if it cannot be had now."""
        if not part_lists.may_be_fetched(self._manifest, share):
            return None
        try:
            asked = self._asked(holders)
            check = part_lists.unpack
            await self.fetcher.fetch(share.root, share.listed, asked, round=round, check=check, owner=share.peer)
            raw = await asyncio.to_thread(self.archive.blobs.get, share.root)
            return None if raw is None else part_lists.unpack(raw)
        except (RemoteError, part_lists.BadList) as error:
            self._warn(f"list of parts of {short_peer(share.peer)}: {error}")
            return None

    async def _fetch(self, holders: Sequence[str], part: Part, sender: str, round: int) -> None:
        if (others := self._fetching.get(part.digest)) is not None:  # the first to name it need not have it
            others[sender] = holders, part, round
            self.fetcher.also_from(part.digest, holders)
            return

        def check(data: bytes) -> None:
            found = comparing.examine(self._manifest, part.shard, data)
            if not comparing.is_true(part.norm, found.norm):
                raise sparse.PayloadError(f"its norm is {found.norm:.6g}, not {part.norm:.6g}")
            if round >= self._decided:
                self.notes.keep(sender, part, found)

        try:
            asked = self._asked(holders)
            with self._busy(part.digest):
                await self.fetcher.fetch(part.digest, part.size, asked, round=round, check=check, owner=sender)
            if not self._is_late(part.digest):
                self.put(paxos_events.Held(part.digest))
                self.put(leader_events.Held(part.digest))
        except sparse.PayloadError as error:
            withdraw = Withdraw(round=round, reason=f"payload of {part.shard}: {error}")
            self.put(leader_events.Received(sender, withdraw))
        except RemoteError as error:
            self._warn(str(error))

    def _asked(self, holders: Sequence[str]) -> list[str]:
        return [peer for peer in dict.fromkeys((*holders, *self._nodes())) if peer != self.transport.peer_id]

    def _nodes(self) -> list[str]:
        """Returns the operators' nodes, then those of former operators: they may have alone what was committed."""
        return [*self.directory.operators, *sorted({*self.archive.named, *self._manifest.operators})]

    def _warn(self, text: str) -> None:
        if self._warnings.take(asyncio.get_running_loop().time()):
            self.emit(events.Warning(text=text))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            with contextlib.suppress(TransportLost):  # the node itself ends for it
                await work

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
