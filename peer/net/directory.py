"""Who is where: a node's announcement in the DHT, and everybody else's.

An announcement does not travel through the daemon: `Directory` writes ours and reads the others'.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence

from peer.net.base import Transport, Validate
from peer.net.clock import Clock
from protocol.errors import RemoteError
from protocol.identity import Identity, short_peer
from protocol.run.manifest import Manifest
from protocol.wire import endpoints, sealed
from protocol.wire.announcement import Announcement

TTL_SECONDS = 60.0
PUBLISH_SECONDS = 5.0


async def announcements(transport: Transport, run: str) -> dict[str, Announcement]:
    """What everybody announces for `run`, by peer id; each is signed by its peer. Raises RemoteError."""
    records = await transport.get(endpoints.announcements_key(run))
    found = {subkey: sealed.unseal_announcement(record, subkey, run) for subkey, record in records.items()}
    return {peer: announcement for peer, announcement in found.items() if announcement is not None}


class Directory:
    """Who is where: our announcement and everybody else's. `bootstrap`: addresses to begin with."""

    def __init__(
        self,
        manifest: Manifest,
        identity: Identity,
        transport: Transport,
        bootstrap: Sequence[str],
        announcement: Announcement,
        clock: Clock | None = None,
    ) -> None:
        self.manifest = manifest
        self.announcement = announcement
        self.known: dict[str, Announcement] = {}
        self._identity = identity
        self._transport = transport
        self._bootstrap = tuple(bootstrap)
        self._reached: set[str] = set()
        self._clock = clock or Clock()

    def update(self, **fields: object) -> None:
        """Changes what the next announcement says."""
        self.announcement = dataclasses.replace(self.announcement, **fields)  # type: ignore[arg-type]

    async def announce(self) -> None:
        """Publishes the announcement, and again whenever it changed or a third of its life is over. Never returns."""
        published: Announcement | None = None
        published_at = float("-inf")
        while True:
            due = self._clock.steady() - published_at > TTL_SECONDS / 3
            if self.announcement != published or due:
                published, published_at = self.announcement, self._clock.steady()
                serial = int(1000 * self._clock.wall())
                record = sealed.seal(self._identity, dataclasses.replace(published, serial=serial))
                with contextlib.suppress(RemoteError):
                    key = endpoints.announcements_key(self.manifest.run_id)
                    await self._transport.store(key, self._transport.peer_id, record, ttl=TTL_SECONDS)
            await asyncio.sleep(PUBLISH_SECONDS)

    async def peers(self) -> list[str]:
        """Who is announced. Raises RemoteError."""
        await self.refresh()
        return list(self.known)

    async def refresh(self) -> None:
        """Reads the others' announcements. Raises RemoteError."""
        self.known.update(await announcements(self._transport, self.manifest.run_id))

    async def reach(self, peer: str) -> None:
        """Connects to `peer`, once, at the addresses it announced or that we began with. Raises RemoteError."""
        if peer in self._reached:
            return
        addresses = [a for a in self._bootstrap if a.endswith(f"/p2p/{peer}")]
        if peer not in self.known and not addresses:
            await self.refresh()
        if peer in self.known:
            addresses += self.known[peer].addresses
        if not addresses:
            raise RemoteError(peer, f"peer {short_peer(peer)}: no announcement in the DHT; it is tried again")
        await self._transport.connect(addresses, timeout=10.0)
        self._reached.add(peer)

    def lost(self, peer: str) -> None:
        """Forgets how `peer` was reached: it may come back elsewhere."""
        self._reached.discard(peer)
        self.known.pop(peer, None)

    async def connect(self) -> None:
        """Connects to any of the addresses that we began with, if there are any; failures are tried again by whoever needs it."""
        others = [a for a in self._bootstrap if not a.endswith(f"/p2p/{self._transport.peer_id}")]
        if others:
            with contextlib.suppress(RemoteError):
                await self._transport.connect(others, timeout=10.0)


def valid_record(run: str) -> Validate:
    """Whether a DHT record is an announcement for `run` signed by the peer whose subkey it has. Nothing else is kept."""

    def valid(key: str, subkey: str, value: bytes) -> bool:
        return key == endpoints.announcements_key(run) and sealed.unseal_announcement(value, subkey, run) is not None

    return valid
