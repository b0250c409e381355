"""Starts a peer's network: connects to the run and finds out how others reach this machine (peer/net/reach.py).

Behind a router that lets no connection in, it starts again with the relays that libp2p needs for hole punching
(docs/adr/0023-dial-back.md), which the daemon must know from its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from peer.net import greeting, node_calls, reach
from peer.net.address import host_of, is_circuit, is_loopback, is_public
from peer.net.base import Transport
from peer.net.directory import announcements
from peer.net.reach import Reachability
from peer.node.open_run import Door, Run, start_transport
from protocol.errors import RemoteError
from protocol.run.manifest import Manifest
from protocol.wire.announcement import Announcement

RELAYS = 6
"""Public peers that relay our signals, at most."""
ASKED = 16
"""Announced peers among which relays are sought."""
CONNECT_SECONDS = 5.0
MAPPED_SECONDS = 8.0
"""After the start, for a router to map a port by UPnP or NAT-PMP."""
LOOK_SECONDS = 0.5
SIGNALS_SECONDS = 5.0
"""For relays to accept us."""
REMEMBERED_SECONDS = 86_400.0
"""For which "no connection comes in" is believed without waiting for the router again."""
_MARK = "private"


async def _nothing(transport: Transport) -> None:
    """Does nothing."""


@dataclass(frozen=True, slots=True)
class NetworkStart:
    """The start of one peer's network.

    begin: (folder, door, run) starts a transport.
    meanwhile: runs while the router may still map a port; the transport may be closed afterwards.
    """

    run: Run
    folder: Path
    door: Door
    begin: Callable[[Path, Door, str], Awaitable[Transport]] = start_transport
    meanwhile: Callable[[Transport], Awaitable[None]] = _nothing

    async def start(self) -> Transport:
        """A transport without relays. Raises UsageError."""
        return await self.begin(self.folder, self.door, self.run.run_id)

    async def find_reach(self, transport: Transport, manifest: Manifest) -> tuple[Transport, Reachability | None]:
        """Finds out how others reach us over a new transport with a connection to the run. Returns the transport to use
        from now on, and the finding; None for a machine that listens only to itself. Raises RemoteError, LocalError."""
        if ipaddress.ip_address(self.door.host).is_loopback:
            return transport, None
        until = asyncio.get_running_loop().time() + MAPPED_SECONDS
        public = await self._public(transport, manifest)
        found = await self._find(transport, manifest, public, until)
        relays = tuple(public[peer] for peer in list(public)[:RELAYS])
        mark = self.folder / _MARK
        if found.how in ("direct", "mapped"):
            mark.unlink(missing_ok=True)
        if found.how == "private" and found.asked:
            mark.write_bytes(b"")
        if found.how != "private" or self.door.announce or not relays:
            return transport, found
        await transport.aclose()
        again = await self.begin(self.folder, replace(self.door, relays=relays), self.run.run_id)
        try:
            await _connect(again, relays)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SIGNALS_SECONDS):
                    while not any(map(is_circuit, again.addresses)):
                        await asyncio.sleep(LOOK_SECONDS)
                        await again.look()
        except BaseException:
            await again.aclose()
            raise
        return again, found

    async def _find(
        self, transport: Transport, manifest: Manifest, public: dict[str, str], until: float
    ) -> Reachability:
        if self._is_remembered():
            await self.meanwhile(transport)
            return Reachability(how="private")

        async def others() -> AsyncIterator[str]:
            for peer in sorted(public, key=lambda peer: peer not in manifest.operators):
                yield peer

        async def reached(peer: str) -> None:
            """Connected already."""

        around = reach.ReachContext(
            transport=transport,
            others=others,
            reach=reached,
            addresses=lambda peer: [public[peer]],
            announced=self.door.announce,
        )
        found = await reach.check_reachability(around)
        if found.how == "private" and not self.door.announce:
            await self.meanwhile(transport)
        while found.how == "private" and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(LOOK_SECONDS)
            if await transport.look():
                found = await reach.check_reachability(around)
        return found

    def _is_remembered(self) -> bool:
        """Returns whether no connection came in at the last start."""
        try:
            return time.time() - (self.folder / _MARK).stat().st_mtime < REMEMBERED_SECONDS and not self.door.announce
        except OSError:
            return False

    async def _public(self, transport: Transport, manifest: Manifest) -> dict[str, str]:
        """Addresses of nodes, then of other public peers, to which there is a connection now."""
        begun, own = self.run.bootstrap, transport.addresses
        hinted = await greeting.dialable(manifest.hints.bootstrap, own, begun)
        known = {address.rpartition("/p2p/")[2]: [address] for address in (*begun, *hinted)}
        found: dict[str, Announcement] = {}
        for node in manifest.operators:
            with contextlib.suppress(RemoteError):
                found = await node_calls.look_up_peers(
                    transport, manifest.run_id, node, manifest.operators, sample=ASKED
                )
                break
        if not set(manifest.operators) <= {*known, *found}:  # a node does not hear the others
            with contextlib.suppress(RemoteError):
                found |= await announcements(transport, manifest.run_id)
        for peer, said in found.items():
            if peer in manifest.operators or said.reachable in ("direct", "mapped"):
                told = await greeting.dialable(said.addresses, own, begun)
                known.setdefault(peer, []).extend(told)
        others = [peer for peer in known if peer not in manifest.operators and peer != transport.peer_id]
        chosen = [*(peer for peer in manifest.operators if peer in known), *others][:ASKED]
        best = {peer: address for peer in chosen if (address := _best(known[peer]))}
        connected = await _connect(transport, tuple(best.values()))
        return {peer: address for peer, address in best.items() if address in connected}


def _best(addresses: list[str]) -> str:
    """The address for strangers; empty without one."""
    ours = [a for a in addresses if not is_circuit(a) and not is_loopback(host_of(a))]
    return next((a for a in ours if is_public(host_of(a))), next(iter(ours), ""))


async def _connect(transport: Transport, addresses: tuple[str, ...]) -> list[str]:
    """The addresses that were reached."""
    tasks = {a: asyncio.create_task(transport.connect([a], timeout=CONNECT_SECONDS)) for a in addresses}
    done = await asyncio.gather(*tasks.values(), return_exceptions=True)
    for error in done:
        if error is not None and not isinstance(error, RemoteError):
            raise error
    return [address for address, error in zip(tasks, done, strict=True) if error is None]
