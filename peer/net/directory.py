"""Who is where: a node's own announcement, and those of others as far as it has them (peer/net/contacts.py).

An announcement does not travel through the daemon: `Directory` tells ours and reads the others'. A peer tells it to the bootstrap nodes, in
its sessions, and asks them for the announcement of whomever it needs. In the DHT are the announcements of the bootstrap nodes and of
about SAMPLE peers only: a way for those who have lost the nodes, whose cost does not grow with the swarm.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Sequence

from peer.net import roster
from peer.net.address import is_circuit
from peer.net.base import MAX_TTL, Transport, Validate
from peer.net.clock import Clock
from peer.net.contacts import Contacts
from protocol.errors import RemoteError
from protocol.identity import Identity
from protocol.run.manifest import Manifest
from protocol.wire import endpoints, sealed
from protocol.wire.announcement import Announcement

TTL_SECONDS = 300.0
"""Of a record in the DHT; it is stored again after a third of it. To store one costs everybody who keeps it a reading of all."""
PUBLISH_SECONDS = 5.0
"""Between two announcements of a peer, at least; in a large swarm more, see TOGETHER."""
TOGETHER = 100.0
"""Announcements that all peers together make in a second, at most."""
REPEAT_SECONDS = 60.0
"""After which an announcement is told again although nothing changed: one may have been dropped."""
LOOK_SECONDS = 2.0
"""How often we ask the daemon whether our own addresses have changed; it looks every five seconds."""
CIRCUITS = 4
"""Addresses through libp2p's relays that are told, at most: they carry signals only, and a record is short."""
DIALS = 32
"""Peers that are dialled at once when they have."""
SAMPLE = 32
"""Peers that are in the DHT, about. Each store makes each of the five who keep the key send all of it: 10 kB a second."""


class Directory(Contacts):
    """Who is where: our announcement and everybody else's. `sealed`: our newest announcement as others get it; empty before the first.
    `moved(addresses)` is called when others reach us elsewhere than before, relays aside."""

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
        """Set when others reach us elsewhere than we have said, and when that has been said."""
        self._place = int.from_bytes(hashlib.sha256(identity.peer_id.encode()).digest()[:8]) / 2**64

    def update(self, **fields: object) -> None:
        """Changes what the next announcement says."""
        self.announcement = dataclasses.replace(self.announcement, **fields)  # type: ignore[arg-type]

    def placed(self, coordinates: tuple[float, ...]) -> None:
        """We are there (protocol/planning/coordinates.py)."""
        self.update(coordinates=coordinates)

    # --- what we say

    @property
    def pace(self) -> float:
        """Seconds between two of our announcements, at least."""
        return max(PUBLISH_SECONDS, self.crowd / TOGETHER)

    @property
    def is_sampled(self) -> bool:
        """Whether our announcement is in the DHT."""
        return self._identity.peer_id in self.operators or self._place * max(self.crowd, SAMPLE) < SAMPLE

    async def announce(self, tell: Callable[[bytes], None]) -> None:
        """Seals the announcement and has it told whenever it changed, and again now and then; at once where others do not find us any more at
        what we said. Never returns."""
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
                self.sealed = sealed.seal(self._identity, dataclasses.replace(self._said, serial=serial))
                tell(self.sealed)
                if elsewhere:
                    self._told.set()
            await _set(self._elsewhere, PUBLISH_SECONDS)

    async def publish(self) -> None:
        """Keeps an announcement in the DHT, if we are one of those whose is; `announce` is begun before. What it says besides addresses
        gets old there. Never returns. Raises TransportLost."""
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
            await _set(self._told, PUBLISH_SECONDS)

    def found(self, addresses: Sequence[str]) -> None:
        """Others get through to us at these too, which the transport may not know of."""
        self._found = tuple(addresses)
        self._direct = self._where(circuits=False)
        self.update(addresses=self._where())

    def _where(self, *, circuits: bool = True) -> tuple[str, ...]:
        """Where others may try to reach us."""
        listed = self._transport.addresses
        through = [address for address in listed if is_circuit(address)][: CIRCUITS if circuits else 0]
        return tuple(dict.fromkeys([*(a for a in listed if not is_circuit(a)), *self._found, *through]))

    async def watch(self) -> None:
        """Notices when our own addresses have changed: the next announcement says so, and whomever we know is dialled again, because
        they may not find us. Never returns. Raises TransportLost."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if not await self._transport.look():
                continue
            listed, self._listed = self._listed, frozenset(a for a in self._transport.addresses if not is_circuit(a))
            if listed - self._listed:  # what others found was of the addresses before; they are asked again
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


async def _set(event: asyncio.Event, seconds: float) -> None:
    """Returns when the event is set, and after so many seconds at the latest."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def latest_expiry(run: str) -> Callable[[bytes], float]:
    """Until when a record of `run` may be kept: it follows from when its announcement was made, which is signed. So nobody can store an
    old one again that outlives the newer ones."""

    def latest(value: bytes) -> float:
        found = roster.believed(value, run)
        return 0.0 if found is None else found.serial / 1000 + TTL_SECONDS + 1.0

    return latest


def valid_record(run: str) -> Validate:
    """Whether a DHT record is an announcement for `run` signed by the peer whose subkey it has. Nothing else is kept."""

    def valid(key: str, subkey: str, value: bytes) -> bool:
        return key == endpoints.announcements_key(run) and sealed.unseal_announcement(value, subkey, run) is not None

    return valid
