"""The members of a run: finding them, connecting to them, and our own announcement.

Announcements do not travel through the daemon. A peer sends its own to the bootstrap nodes, in its sessions, and asks
them for those of other peers. The DHT has the announcements of the bootstrap nodes and of about SAMPLE peers only: a
fallback for peers that have lost the nodes, whose cost does not grow with the swarm.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from peer.net import greeting, node_calls
from peer.net.address import is_circuit
from peer.net.base import MAX_TTL, Clock, Transport, Validate, cancel, until, wait_for_event
from protocol.errors import RemoteError
from protocol.identity import Identity, short_peer
from protocol.run.manifest import Manifest
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import MOST_LOOKED_UP, Announcement
from protocol.wire.decree import Board
from protocol.wire.plan import Plan

T = TypeVar("T")

DIAL_SECONDS = 10.0
FIRST_SECONDS = 3.0
"""DIAL_SECONDS of a peer without an announcement, which is looked for then."""
FIND_SECONDS = 5.0
"""Longest search for the announcement of a peer that did not answer; then it is dialled again."""
SEEK_SECONDS, SEEK_LONGEST_SECONDS = 1.0, 15.0
"""Interval of the searches for a silent node, and for how long they are repeated."""


async def announcements(transport: Transport, run: str) -> dict[str, Announcement]:
    """Returns the signed announcements for `run` in the DHT, by peer id. Raises RemoteError."""
    records = await transport.get(endpoints.announcements_key(run))
    found = {subkey: encoding.unseal_announcement(record, subkey, run) for subkey, record in records.items()}
    return {peer: announcement for peer, announcement in found.items() if announcement is not None}


class Contacts:
    """Finds and connects to the members of a run, for peers, nodes, and observers that announce nothing.

    bootstrap: addresses to begin with
    crowd: known number of the run's peers
    """

    def __init__(self, manifest: Manifest, transport: Transport, bootstrap: Sequence[str]) -> None:
        self.manifest = manifest
        self.known: dict[str, Announcement] = {}
        self.crowd = manifest.start_peers
        self.operators = manifest.operators
        """The nodes that are known to operate the run."""
        self._transport = transport
        self._bootstrap = tuple(bootstrap)
        self._reached: set[str] = set()
        self._silent: dict[str, float] = {}  # since when a node that was asked is silent, in seconds of the loop
        self._dialled: dict[str, asyncio.Event] = {}
        """Set when a peer that is dialled is found to be elsewhere."""
        self._wanted: dict[str, None] = {}
        self._asking = asyncio.Lock()
        self._planned: tuple[str, ...] = ()
        self._places: tuple[str, ...] = ()
        transport.prefer(manifest.operators)

    def planned(self, plan: Plan) -> None:
        """Notes the run's newest plan, whose peers' records are kept before others."""
        self.crowd = plan.count
        self._planned = tuple(plan.peers)
        self._transport.prefer((*self.operators, *self._planned))

    def follow(self, board: Board, others: Iterable[str] = ()) -> None:
        """Notes the nodes that operate the run now, and `others` that count as operators."""
        operators = tuple(dict.fromkeys((*board.names, *others)))
        self._places = tuple(
            a.removesuffix(f"/p2p/{o.peer}").rstrip("/") + f"/p2p/{o.peer}" for o in board.operators for a in o.places
        )
        if operators != self.operators:
            self.operators = operators
            self._transport.prefer((*self.operators, *self._planned))

    async def peers(self) -> list[str]:
        """Returns a random sample of the announced peers. Raises RemoteError."""
        for node in self.nodes():
            with contextlib.suppress(RemoteError):
                found = await node_calls.look_up_peers(
                    self._transport, self.manifest.run_id, node, sample=MOST_LOOKED_UP
                )
                self.learn(found.values())
                return list(found)
        found = await announcements(self._transport, self.manifest.run_id)
        self.learn(found.values())
        return list(found)

    def learn(self, found: Iterable[Announcement]) -> None:
        """Remembers announcements that are newer than the known ones; a peer that has moved is dialled again."""
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
        """Connects to `peer`, unless we are connected, at its known addresses or those that it announces by now.

        Raises RemoteError.
        """
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
        """Connects to `peer`; if it is found to be elsewhere meanwhile, there. Raises RemoteError."""
        while self.addresses(peer):
            elsewhere = self._dialled[peer] = asyncio.Event()
            try:
                dialled = await until(elsewhere.wait(), self._connect(peer, seconds))
            finally:
                self._dialled.pop(peer, None)
            if dialled is not None:
                dialled.result()
                self._reached.add(peer)
                return
        raise RemoteError(peer, f"peer {short_peer(peer)}: no announcement is found; it is tried again")

    async def _connect(self, peer: str, seconds: float) -> None:
        """Connects to `peer` where its word is enough for that. Raises RemoteError."""
        addresses = [*self._given(peer), *await self._dialable(self._addresses_told(peer))]
        if not addresses and self._transport.seen_at(peer):
            return  # it is connected to us
        if not addresses:
            raise RemoteError(peer, f"peer {short_peer(peer)}: announces no address on the internet or in this network")
        await self._transport.connect(addresses, timeout=seconds)

    async def call(self, node: str, ask: Callable[[Transport, str], Awaitable[T]]) -> T:
        """Connects to a node, and returns what `ask` gets from it, for observers that announce nothing.

        A silent node is looked for, as it or we may have moved, and then asked again. Raises RemoteError.
        """
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
            await cancel(seeking)

    async def _seek(self, node: str, silent: asyncio.Event) -> None:
        """Looks for a node that has not answered at once, until cancelled or after SEEK_LONGEST_SECONDS.

        Has its connection checked, and learns the nodes' announcements. Raises TransportLost.
        """
        await asyncio.sleep(node_calls.NEXT_SECONDS)
        silent.set()
        await self._transport.look()
        if node in self._reached:  # or the daemon would dial it
            self._transport.doubt(node)
        now = asyncio.get_running_loop().time
        until = self._silent.setdefault(node, now()) + SEEK_LONGEST_SECONDS
        while now() < until:
            with contextlib.suppress(RemoteError):
                found = await announcements(self._transport, self.manifest.run_id)
                self.learn(found[name] for name in self.operators if name in found)
            await asyncio.sleep(SEEK_SECONDS)

    def addresses(self, peer: str) -> list[str]:
        """Returns the known addresses of `peer`: those that we began with, and announced ones."""
        return [*self._given(peer), *self._addresses_told(peer)]

    def _given(self, peer: str) -> list[str]:
        return [address for address in self._bootstrap if address.endswith(f"/p2p/{peer}")]

    def _addresses_told(self, peer: str) -> list[str]:
        """Its addresses by the log and by its own word."""
        announced = self.known[peer].addresses if peer in self.known else ()
        return [*(a for a in self._places if a.endswith(f"/p2p/{peer}")), *announced]

    async def _dialable(self, told: Iterable[str]) -> list[str]:
        return await greeting.dialable(told, self._transport.addresses, self._bootstrap)

    async def _find(self, peer: str) -> None:
        """Looks for the announcement of `peer`, together with others that are wanted meanwhile. Raises RemoteError."""
        self._wanted[peer] = None
        async with self._asking:
            if peer not in self._wanted:
                return  # the caller before us has asked for it too
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
        """Asks one node after the other, as not every one knows a new peer yet. Raises TransportLost."""

        async def ask(node: str) -> bool:
            with contextlib.suppress(RemoteError):
                missing = [name for name in wanted if name not in self.known]
                found = await node_calls.look_up_peers(self._transport, self.manifest.run_id, node, missing)
                self.learn(found[name] for name in missing if name in found)
            return all(name in self.known for name in wanted)

        await node_calls.ask_in_turn(self.nodes(), ask)

    def nodes(self) -> list[str]:
        """The bootstrap nodes, in any order."""
        others = [node for node in self.operators if node != self._transport.peer_id]
        random.shuffle(others)
        return others

    @property
    def reached(self) -> Sequence[str]:
        return tuple(self._reached)

    def lost(self, peer: str) -> None:
        """Forgets how `peer` was reached, as it may come back elsewhere."""
        self._reached.discard(peer)
        self.known.pop(peer, None)

    async def connect(self) -> None:
        """Connects to any of the addresses that we began with; callers that need one try again."""
        known = (*self._bootstrap, *await self._dialable(self._places))
        others = [a for a in dict.fromkeys(known) if not a.endswith(f"/p2p/{self._transport.peer_id}")]
        if others:
            with contextlib.suppress(RemoteError):
                await self._transport.connect(others, timeout=DIAL_SECONDS)


TTL_SECONDS = 300.0
"""Of a record in the DHT, which is renewed after a third: each store costs its keepers a reading of all records."""
PUBLISH_SECONDS = 5.0
"""Least time between two announcements of a peer; longer in a large swarm, see TOGETHER."""
TOGETHER = 100.0
"""Most announcements a second of all peers together."""
REPEAT_SECONDS = 60.0
"""An unchanged announcement is repeated after so long, as one may have been dropped."""
LOOK_SECONDS = 2.0
"""Interval of the checks of our own addresses; the daemon itself looks every five seconds."""
CIRCUITS = 4
"""Most announced addresses through libp2p's relays: they carry signals only, and a record is short."""
DIALS = 32
SAMPLE = 32
"""Approximate number of peers in the DHT: each store makes the five keepers of the key send all of it, 10 kB/s."""


class Directory(Contacts):
    """Contacts, and our own announcement.

    sealed: our newest announcement as others get it; empty before the first
    moved: called with our addresses when they have changed, relays aside
    """

    def __init__(
        self,
        manifest: Manifest,
        identity: Identity,
        transport: Transport,
        bootstrap: Sequence[str],
        announcement: Announcement,
        clock: Clock | None = None,
        moved: Callable[[Sequence[str]], None] = lambda addresses: None,
    ) -> None:
        super().__init__(manifest, transport, bootstrap)
        self.announcement = announcement
        self.sealed = b""
        self._said: Announcement | None = None
        self._serial = 0
        self._identity = identity
        self._clock = clock or Clock()
        self._moved = moved
        self._found: tuple[str, ...] = ()
        self._listed = frozenset(a for a in transport.addresses if not is_circuit(a))
        self._direct = self._where(circuits=False)
        self._elsewhere, self._told = asyncio.Event(), asyncio.Event()
        """Set when others reach us elsewhere than announced, and when that has been announced."""
        self._place = int.from_bytes(hashlib.sha256(identity.peer_id.encode()).digest()[:8]) / 2**64

    def update(self, **fields: object) -> None:
        """Changes fields of the next announcement."""
        self.announcement = dataclasses.replace(self.announcement, **fields)  # type: ignore[arg-type]

    def placed(self, coordinates: tuple[float, ...]) -> None:
        """Announces our network coordinates (protocol/planning/coordinates.py)."""
        self.update(coordinates=coordinates)

    # --- our announcement

    @property
    def pace(self) -> float:
        """Least seconds between two of our announcements."""
        return max(PUBLISH_SECONDS, self.crowd / TOGETHER)

    @property
    def is_sampled(self) -> bool:
        """Whether our announcement is in the DHT."""
        return self._identity.peer_id in self.operators or self._place * max(self.crowd, SAMPLE) < SAMPLE

    async def announce(self, tell: Callable[[bytes], object]) -> None:
        """Seals our announcement and calls `tell` whenever it changed, and every REPEAT_SECONDS. Never returns.

        Where others no longer find us at the announced addresses, that is told at once.
        """
        said_at, serial = float("-inf"), 0
        while True:
            elsewhere, quiet = self._elsewhere.is_set(), self._clock.steady() - said_at
            self._elsewhere.clear()
            if (
                elsewhere
                or (self.announcement != self._said and quiet >= self.pace)
                or quiet >= max(REPEAT_SECONDS, self.pace)
            ):
                self._said, said_at = self.announcement, self._clock.steady()
                serial = max(serial + 1, int(1000 * self._clock.wall()))  # the time of day may go back
                self._serial = serial
                self.sealed = encoding.seal(self._identity, dataclasses.replace(self._said, serial=serial))
                tell(self.sealed)
                if elsewhere:
                    self._told.set()
            await wait_for_event(self._elsewhere, PUBLISH_SECONDS)

    async def publish(self) -> None:
        """Keeps our announcement in the DHT, if we are sampled; fields besides the addresses may be old there.

        Never returns; `announce` runs besides. Raises TransportLost.
        """
        stored_at, stored = float("-inf"), tuple[str, ...]()
        while True:
            self._told.clear()
            quiet, said = self._clock.steady() - stored_at, self._said
            if said is not None and self.is_sampled and (quiet > TTL_SECONDS / 3 or said.addresses != stored):
                with contextlib.suppress(RemoteError):
                    key = endpoints.announcements_key(self.manifest.run_id)
                    ttl = min(self._serial / 1000 + TTL_SECONDS - self._clock.wall(), MAX_TTL)
                    if await self._transport.store(key, self._transport.peer_id, self.sealed, ttl=max(ttl, 1.0)):
                        stored_at, stored = self._clock.steady(), said.addresses
            await wait_for_event(self._told, PUBLISH_SECONDS)

    def found(self, addresses: Sequence[str]) -> None:
        """Adds addresses at which others reach us and which the transport may not know."""
        self._found = tuple(addresses)
        self._direct = self._where(circuits=False)
        self.update(addresses=self._where())

    def _where(self, *, circuits: bool = True) -> tuple[str, ...]:
        listed = self._transport.addresses
        through = [address for address in listed if is_circuit(address)][: CIRCUITS if circuits else 0]
        return tuple(dict.fromkeys([*(a for a in listed if not is_circuit(a)), *self._found, *through]))

    async def watch(self) -> None:
        """Announces changes of our addresses, and dials known peers again, as they may not find us.

        Never returns. Raises TransportLost.
        """
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if not await self._transport.look():
                continue
            listed, self._listed = self._listed, frozenset(a for a in self._transport.addresses if not is_circuit(a))
            if listed - self._listed:  # what others found is of the old addresses
                self._found = ()
            self.update(addresses=self._where())
            before, self._direct = self._direct, self._where(circuits=False)
            if set(self._direct) != set(before):
                self._elsewhere.set()
                self._moved(self._direct)
                self._reached.clear()
                gate = asyncio.Semaphore(DIALS)
                await asyncio.gather(*(self._dial_gated(peer, gate) for peer in list(self.known)))

    async def _dial_gated(self, peer: str, gate: asyncio.Semaphore) -> None:
        async with gate:
            with contextlib.suppress(RemoteError):  # it finds us by our announcement
                await self.reach(peer)


def latest_expiry(run: str) -> Callable[[bytes], float]:
    """Returns a function that gives the latest expiry of a record, by the signed time of its announcement."""

    def latest(value: bytes) -> float:
        found = encoding.unseal_announcement(value, None, run)
        return 0.0 if found is None else found.serial / 1000 + TTL_SECONDS + 1.0

    return latest


def valid_record(run: str) -> Validate:
    """Returns a check that a DHT record is an announcement for `run`, signed by the peer of its subkey."""

    def valid(key: str, subkey: str, value: bytes) -> bool:
        return key == endpoints.announcements_key(run) and encoding.unseal_announcement(value, subkey, run) is not None

    return valid
