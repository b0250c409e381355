"""How a stream through a relay is opened: which relay, and the handshake with the peer behind it.

Relays are asked at once, and the one through which the peer has proved first that it is there is kept for it: the quickest, as things
are. What a relay did wrong is remembered: it is asked last for a while, so that a lone one is still used.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peer.net.base import Stream, Timeout, Transport, Unreachable, log
from peer.net.cooldown import Cooldown
from peer.net.relay.channel import CHANGED, GONE, LATE, SIGNS, Channel, RelayFault, Signs
from protocol.errors import RemoteError
from protocol.identity import Identity, short_peer
from protocol.wire import endpoints, relaying
from protocol.wire.framing import FrameError
from protocol.wire.noise import KEY, Handshake, NoiseError
from protocol.wire.relaying import HERE, MAX_ASK, MAX_HELLO

RACED = 3
"""Relays that are asked at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds. `direct`: that a direct way has before relays are asked too; `offer`: that one relay and the peer behind it may take to answer;
    `kept`: that a relay which was the quickest is asked first; `next`: after which others are asked besides it; `soon`, `again`: before a
    direct way is tried again, at first and at most, each time twice as long; `changed`, `silent`, `gone`: that a relay is avoided which changed something, passed nothing on or late, or broke off
    (which may have been the peer behind it)."""

    direct: float = 2.0
    offer: float = 5.0
    kept: float = 600.0
    next: float = 1.0
    soon: float = 5.0
    again: float = 60.0
    changed: float = 600.0
    silent: float = 60.0
    gone: float = 10.0


PATIENCE = Patience()


def handshake(*, initiator: bool, relay: str) -> Handshake:
    """One side's, with keys that nobody uses again."""
    static, fresh = os.urandom(KEY), os.urandom(KEY)
    return Handshake(initiator=initiator, static=static, fresh=fresh, prologue=relaying.prologue(relay))


@dataclass(frozen=True, slots=True)
class Offer:
    """A relay has led to a peer, who has proved who it is and waits to hear who we are and what we want."""

    stream: Stream
    shake: Handshake


class Relays:
    """A peer's way to others through `relays`, over `transport`. `own`: who we are."""

    def __init__(
        self,
        own: Identity,
        transport: Transport,
        relays: Callable[[], Sequence[str]],
        *,
        patience: Patience = PATIENCE,
        signs: Signs = SIGNS,
    ) -> None:
        self._own = own
        self._transport = transport
        self._relays = relays
        self._patience = patience
        self._signs = signs
        self._kept: dict[str, tuple[str, float]] = {}  # the quickest relay to a peer, and until when
        self._avoided = Cooldown(0.0)
        self._choosing: dict[str, asyncio.Lock] = {}

    def kept(self, peer: str) -> str | None:
        """The relay through which `peer` is reached, if it is known."""
        relay, until = self._kept.get(peer, ("", 0.0))
        return relay if self._now() < until else None

    def is_avoided(self, relay: str) -> bool:
        """Whether it is asked last."""
        return self._avoided.is_resting(relay, self._now())

    async def reach(self, peer: str) -> None:
        """Finds a way to `peer`. Raises RemoteError."""
        offer = await self._offer(peer)
        await offer.stream.close()

    async def open(self, peer: str, name: str) -> Channel:
        """The end of a stream to `peer`, for `name`. Raises RemoteError."""
        offer = await self._offer(peer)
        try:
            await offer.stream.send(offer.shake.write(relaying.pack_hello(self._own, offer.shake.own_static, name)))
        except BaseException:
            await offer.stream.close()
            raise
        ciphers = offer.shake.ciphers
        return Channel(offer.stream, ciphers, peer, name, fault=self.blame, asks=True, signs=self._signs)

    def blame(self, fault: RelayFault) -> None:
        """A relayed stream is over because of its relay, or should have taken another."""
        if fault.what == LATE and not self.is_avoided(fault.relay):
            log.warning("relay %s: %s; others are preferred for a while", short_peer(fault.relay), LATE)
        if self._kept.get(fault.peer, ("", 0.0))[0] == fault.relay:
            del self._kept[fault.peer]
        seconds = {CHANGED: self._patience.changed, GONE: self._patience.gone}.get(fault.what, self._patience.silent)
        self._avoided.begin(fault.relay, self._now(), seconds)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _offer(self, peer: str) -> Offer:
        relay = self.kept(peer)
        if relay is not None and not self.is_avoided(relay):
            return await self._race(peer, relay)
        async with self._choosing.setdefault(peer, asyncio.Lock()):
            relay = self.kept(peer)
            if relay is None or self.is_avoided(relay):
                return await self._race(peer)
        return await self._race(peer, relay)

    def _groups(self, first: str | None) -> list[list[str]]:
        """The relays in the order in which they are asked; those of a group at once."""
        others = [r for r in self._relays() if r != first and r != self._own.peer_id]
        groups = [[first]] if first is not None else []
        for avoided in (False, True):
            some = [relay for relay in others if self.is_avoided(relay) == avoided]
            groups += [some[at : at + RACED] for at in range(0, len(some), RACED)]
        return groups

    async def _race(self, peer: str, first: str | None = None) -> Offer:
        """The first offer; the next group is asked when one has failed, or takes long. Raises RemoteError."""
        groups = [[r for r in group if r != peer] for group in self._groups(first)]
        asked: dict[asyncio.Task[Offer], str] = {}
        failures: list[str] = []
        won: Offer | None = None
        try:
            while won is None and (groups or asked):
                for relay in groups.pop(0) if groups else ():
                    asked[asyncio.create_task(self._ask(relay, peer))] = relay
                if not asked:
                    continue
                seconds = self._patience.next if groups else None
                done, _ = await asyncio.wait(asked, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if won is None and task.exception() is None:
                        won, relay = task.result(), asked.pop(task)
                        self._kept[peer] = relay, self._now() + self._patience.kept
                    elif isinstance(error := task.exception(), RemoteError):
                        failures.append(str(error))
                        del asked[task]
                    elif error is not None:
                        raise error
        finally:
            for task in asked:
                task.cancel()
            for other in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(other, Offer):
                    await other.stream.close()
        if won is None:
            why = "; ".join(failures) or "there is none"
            raise Unreachable(peer, f"peer {short_peer(peer)}: no relay leads to it: {why}")
        return won

    async def _ask(self, relay: str, peer: str) -> Offer:
        """An offer through `relay`. Raises RemoteError."""
        try:
            async with asyncio.timeout(self._patience.offer):
                stream = await self._transport.open(relay, endpoints.RELAY, timeout=self._patience.offer)
                try:
                    return await self._shake(stream, relay, peer)
                except BaseException:
                    await stream.close()
                    raise
        except TimeoutError:
            text = f"relay {short_peer(relay)}: no answer within {self._patience.offer:g} s"
            raise Timeout(peer, text) from None

    async def _shake(self, stream: Stream, relay: str, peer: str) -> Offer:
        shake = handshake(initiator=True, relay=relay)
        await stream.send(relaying.pack_ask(peer))
        await stream.send(shake.write(b""))
        try:
            answer = relaying.answer_of(await stream.recv(MAX_ASK))
            if answer != HERE:
                raise Unreachable(peer, f"relay {short_peer(relay)}: {relaying.ANSWERS[answer]}")
            hello = relaying.hello_of(shake.read(await stream.recv(MAX_HELLO)), shake.their_static)
            if hello.peer != peer:
                raise FrameError("relayed stream: another peer")
        except (FrameError, NoiseError):
            fault = RelayFault(peer, relay, "to be opened", CHANGED)
            self.blame(fault)
            raise fault from None
        return Offer(stream, shake)
