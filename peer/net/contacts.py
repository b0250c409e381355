"""How the members of a run are found and connected to, again and again: by peers, nodes, and watchers, who announce nothing themselves.

A node is asked for the announcement of somebody, the DHT where none answers (peer/net/directory.py says what is where). Where a peer was lost,
it is dialled again at the addresses that we began with and at those that it announces by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from peer.net import asking, roster
from peer.net.base import Transport
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.run.manifest import Manifest
from protocol.wire import endpoints, sealed
from protocol.wire.announcement import Announcement
from protocol.wire.decree import Board
from protocol.wire.plan import Plan
from protocol.wire.roster import MOST_LOOKED_UP

T = TypeVar("T")

DIAL_SECONDS = 10.0
"""That a peer has to answer when it is dialled."""
FIRST_SECONDS = 3.0
"""The same where its announcement is not known: after these it is looked for, since it may be elsewhere."""
FIND_SECONDS = 5.0
"""That the search for a peer has that is not where it was; then it is dialled there again."""
SEEK_SECONDS, SEEK_LONGEST = 1.0, 15.0
"""Between two searches for a node that is silent, while its answer is waited for; and how long it is looked for so often. Each search has the daemon
dial whoever may know of it, and after each failed dial libp2p leaves an address alone for longer: where our own line is dead, that is
everybody's."""


async def announcements(transport: Transport, run: str) -> dict[str, Announcement]:
    """What everybody announces for `run`, by peer id; each is signed by its peer. Raises RemoteError."""
    records = await transport.get(endpoints.announcements_key(run))
    found = {subkey: sealed.unseal_announcement(record, subkey, run) for subkey, record in records.items()}
    return {peer: announcement for peer, announcement in found.items() if announcement is not None}


class Contacts:
    """The members of a run as somebody finds them. `bootstrap`: addresses to begin with. `crowd`: how many peers the run has, as far as we
    know."""

    def __init__(self, manifest: Manifest, transport: Transport, bootstrap: Sequence[str]) -> None:
        self.manifest = manifest
        self.known: dict[str, Announcement] = {}
        self.crowd = manifest.start_peers
        self.operators = manifest.operators
        """Who operates the run, as far as we know."""
        self._transport = transport
        self._bootstrap = tuple(bootstrap)
        self._reached: set[str] = set()
        self._silent: dict[str, float] = {}  # since when a node is that was asked, in seconds of the loop
        self._dialled: dict[str, asyncio.Event] = {}
        """Set when a peer that is dialled is found to be elsewhere."""
        self._wanted: dict[str, None] = {}
        self._asking = asyncio.Lock()
        self._planned: tuple[str, ...] = ()
        self._places: tuple[str, ...] = ()
        transport.prefer(manifest.operators)

    def planned(self, plan: Plan) -> None:
        """The run goes on with these: their announcements are kept before those of strangers."""
        self.crowd = plan.count
        self._planned = tuple(plan.peers)
        self._transport.prefer((*self.operators, *self._planned))

    def follow(self, board: Board, others: Iterable[str] = ()) -> None:
        """These operate the run now; `others`: who is taken for an operator besides."""
        operators = tuple(dict.fromkeys((*board.names, *others)))
        self._places = tuple(f"{_without(a, o.peer)}/p2p/{o.peer}" for o in board.operators for a in o.places)
        if operators != self.operators:
            self.operators = operators
            self._transport.prefer((*self.operators, *self._planned))

    async def peers(self) -> list[str]:
        """Some of those who are announced, by chance. Raises RemoteError."""
        for node in self.nodes():
            with contextlib.suppress(RemoteError):
                found = await roster.look_up(self._transport, self.manifest.run_id, node, sample=MOST_LOOKED_UP)
                self.learn(found.values())
                return list(found)
        found = await announcements(self._transport, self.manifest.run_id)
        self.learn(found.values())
        return list(found)

    def learn(self, found: Iterable[Announcement]) -> None:
        """Remembers announcements; one that is older than what we know changes nothing. Who is elsewhere now is dialled there."""
        for announcement in found:
            known = self.known.get(announcement.peer)
            if known is not None and known.serial >= announcement.serial:
                continue
            if known is not None and known.addresses != announcement.addresses:
                self._reached.discard(announcement.peer)
            before = self.addresses(announcement.peer)
            self.known[announcement.peer] = announcement
            if announcement.peer in self._dialled and not set(before).issuperset(announcement.addresses):
                self._dialled[announcement.peer].set()

    async def reach(self, peer: str) -> None:
        """Connects to `peer`, once, at the addresses it announced or that we began with; where it is at none of these, at those that it
        announces by now. Raises RemoteError."""
        if peer in self._reached:
            return
        was_known, dialled = peer in self.known, self.addresses(peer)
        try:
            await self._dial(peer, DIAL_SECONDS if was_known else FIRST_SECONDS)
        except RemoteError:
            if was_known and self.addresses(peer) == dialled:
                raise
            if peer not in self.known:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FIND_SECONDS if dialled else None):
                        await self._find(peer)
            if not self.addresses(peer):
                raise
            await self._dial(peer, DIAL_SECONDS)

    async def _dial(self, peer: str, seconds: float) -> None:
        """Connects to it; where it is found to be elsewhere meanwhile, there."""
        while addresses := self.addresses(peer):
            elsewhere = self._dialled[peer] = asyncio.Event()
            dialling = asyncio.ensure_future(self._transport.connect(addresses, timeout=seconds))
            found = asyncio.ensure_future(elsewhere.wait())
            try:
                await asyncio.wait({dialling, found}, return_when=asyncio.FIRST_COMPLETED)
                if dialling.done():
                    dialling.result()
                    self._reached.add(peer)
                    return
            finally:
                self._dialled.pop(peer, None)
                dialling.cancel()
                found.cancel()
                await asyncio.gather(dialling, found, return_exceptions=True)
        raise RemoteError(peer, f"peer {short_peer(peer)}: no announcement is found; it is tried again")

    async def call(self, node: str, ask: Callable[[Transport, str], Awaitable[T]]) -> T:
        """What a node answers, to somebody who announces nothing; it is reached before that, and again where it was lost. While it is silent, it is
        looked for: it, or we, may be elsewhere by now, and then it is asked again. Raises RemoteError."""
        silent = asyncio.Event()
        seeking = asyncio.create_task(self._seek(node, silent))
        try:
            await self.reach(node)
            try:
                answer = await ask(self._transport, node)
            except RemoteError:
                if not silent.is_set():
                    raise
                self._reached.discard(node)
                await self.reach(node)
                answer = await ask(self._transport, node)
            self._silent.pop(node, None)
            return answer
        except RemoteError:
            self.lost(node)
            raise
        finally:
            seeking.cancel()
            await asyncio.gather(seeking, return_exceptions=True)

    async def _seek(self, node: str, silent: asyncio.Event) -> None:
        """Begins when the node has not answered at once: ends a connection on which nobody answers any more, and learns the node's
        announcements, until it is cancelled or that has been tried for long. Raises TransportLost."""
        await asyncio.sleep(asking.NEXT_SECONDS)
        silent.set()
        await self._transport.look()
        if node in self._reached:  # or the daemon would dial it
            self._transport.doubt(node)
        now = asyncio.get_running_loop().time
        until = self._silent.setdefault(node, now()) + SEEK_LONGEST
        while now() < until:
            with contextlib.suppress(RemoteError):
                found = await announcements(self._transport, self.manifest.run_id)
                self.learn(found[name] for name in self.operators if name in found)
            await asyncio.sleep(SEEK_SECONDS)

    def addresses(self, peer: str) -> list[str]:
        """Those that `peer` announced, as far as we know, or that we began with."""
        announced = self.known[peer].addresses if peer in self.known else ()
        known = dict.fromkeys((*self._bootstrap, *self._places))
        return [*(a for a in known if a.endswith(f"/p2p/{peer}")), *announced]

    async def _find(self, peer: str) -> None:
        """Learns the announcement of `peer`, if anybody has it; those who want others meanwhile ask together. Raises RemoteError."""
        self._wanted[peer] = None
        async with self._asking:
            if peer not in self._wanted:
                return  # whoever asked before us has asked for it too
            wanted = [peer, *(p for p in self._wanted if p != peer)][:MOST_LOOKED_UP]
            for name in wanted:
                del self._wanted[name]
            if not set(wanted) <= set(self.operators):
                await self._ask_nodes(wanted)
                if all(name in self.known for name in wanted):
                    return
            found = await announcements(self._transport, self.manifest.run_id)
            self.learn(found[name] for name in wanted if name in found)

    async def _ask_nodes(self, wanted: Sequence[str]) -> None:
        """Asks one node after the other, since a peer that has come lately has not told every node yet. Raises TransportLost."""

        async def ask(node: str) -> bool:
            with contextlib.suppress(RemoteError):
                missing = [name for name in wanted if name not in self.known]
                found = await roster.look_up(self._transport, self.manifest.run_id, node, missing)
                self.learn(found[name] for name in missing if name in found)
            return all(name in self.known for name in wanted)

        await asking.in_turn(self.nodes(), ask)

    def nodes(self) -> list[str]:
        """The bootstrap nodes, in any order."""
        others = [node for node in self.operators if node != self._transport.peer_id]
        random.shuffle(others)
        return others

    @property
    def reached(self) -> Sequence[str]:
        """Those to whom we have connected."""
        return tuple(self._reached)

    def lost(self, peer: str) -> None:
        """Forgets how `peer` was reached: it may come back elsewhere."""
        self._reached.discard(peer)
        self.known.pop(peer, None)

    async def connect(self) -> None:
        """Connects to any of the addresses that we began with, if there are any; failures are tried again by whoever needs it."""
        others = [
            a
            for a in dict.fromkeys((*self._bootstrap, *self._places))
            if not a.endswith(f"/p2p/{self._transport.peer_id}")
        ]
        if others:
            with contextlib.suppress(RemoteError):
                await self._transport.connect(others, timeout=DIAL_SECONDS)


def _without(address: str, peer: str) -> str:
    """An address without the id of its peer at its end."""
    return address.removesuffix(f"/p2p/{peer}").rstrip("/")
