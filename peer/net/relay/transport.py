"""A transport that reaches peers through relays where it cannot reach them itself, and is reached through them.

A relayed stream behaves as any other; where a direct way is found, also later, new streams take it. Relays are asked at
once, and the one through which the peer answers first is kept for it. A relay that failed is asked last for a while.

A relay passes sealed records between peers that are connected to it (docs/adr/0022-sealed-relays.md). The bytes a
second of all circuits are bounded, and shared in turn among the peers that asked for them. A record is read when the
one before has been sent, so nothing is kept.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

from peer.net.base import Ended, Handler, NotServed, Stream, Timeout, Traffic, Transport, Unreachable, cancel, log, now
from peer.net.guests import Limits
from peer.net.rate_limits import Cooldown
from peer.net.relay.channel import CHANGED, GONE, KEEP_ALIVE, LATE, Channel, KeepAlive, RelayFault
from peer.net.stream import Endpoint, FrameStream
from peer.net.uplink import Uplink
from protocol.errors import RemoteError
from protocol.identity import Identity, short_peer
from protocol.wire import endpoints, framing, relaying
from protocol.wire.encoding import MessageError
from protocol.wire.framing import FrameError
from protocol.wire.noise import KEY, Cipher, Handshake, NoiseError
from protocol.wire.relaying import ABSENT, FULL, HERE, MAX_ASK, MAX_HELLO, MAX_RECORD

RACED = 3
"""Relays that are asked at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayTimeouts:
    """Seconds.

    soon, again: before a direct way is tried again, at first and at most; twice as long each time
    changed, silent, gone: a relay is avoided for so long after it changed something, was silent or late, or broke off
    """

    direct: float = 2.0  # a direct way has so long before relays are asked too
    offer: float = 5.0  # a relay and the peer behind it have so long to answer
    kept: float = 600.0  # the quickest relay is asked first for so long
    next: float = 1.0  # after which others are asked besides it
    soon: float = 5.0
    again: float = 60.0
    changed: float = 600.0
    silent: float = 60.0
    gone: float = 10.0


RELAY_TIMEOUTS = RelayTimeouts()


def handshake(*, initiator: bool, relay: str) -> Handshake:
    """Starts one side of a handshake, with fresh keys."""
    static, fresh = os.urandom(KEY), os.urandom(KEY)
    return Handshake(initiator=initiator, static=static, fresh=fresh, prologue=relaying.prologue(relay))


Offer = tuple[Stream, Handshake]
"""A relayed stream to a peer that has proved its identity and waits for ours, and our side of the handshake."""


@dataclass(eq=False)
class Relays:
    """Opens channels to peers through `relays`, over `transport`. `own`: our identity."""

    own: Identity
    transport: Transport
    relays: Callable[[], Sequence[str]]
    _: KW_ONLY
    patience: RelayTimeouts = RELAY_TIMEOUTS
    signs: KeepAlive = KEEP_ALIVE

    def __post_init__(self) -> None:
        self._kept: dict[str, tuple[str, float]] = {}  # the quickest relay to a peer, and until when
        self._avoided = Cooldown(0.0)
        self._choosing: dict[str, asyncio.Lock] = {}

    def kept(self, peer: str) -> str | None:
        """The relay through which `peer` is reached, if it is known."""
        relay, until = self._kept.get(peer, ("", 0.0))
        return relay if now() < until else None

    def is_avoided(self, relay: str) -> bool:
        return self._avoided.is_resting(relay, now())

    async def reach(self, peer: str) -> None:
        """Finds a way to `peer`. Raises RemoteError."""
        stream, _ = await self._offer(peer)
        await stream.close()

    async def open(self, peer: str, name: str) -> Channel:
        """Opens a channel to `peer`, for `name`. Raises RemoteError."""
        stream, shake = await self._offer(peer)
        try:
            await stream.send(shake.write(relaying.pack_hello(self.own, shake.own_static, name)))
        except BaseException:
            await stream.close()
            raise
        return Channel(stream, shake.ciphers, peer, name, fault=self.blame, asks=True, signs=self.signs)

    def blame(self, fault: RelayFault) -> None:
        """Avoids a relay at fault for a while."""
        if fault.what == LATE and not self.is_avoided(fault.relay):
            log.warning("relay %s: %s; others are preferred for a while", short_peer(fault.relay), LATE)
        if self._kept.get(fault.peer, ("", 0.0))[0] == fault.relay:
            del self._kept[fault.peer]
        seconds = {CHANGED: self.patience.changed, GONE: self.patience.gone}.get(fault.what, self.patience.silent)
        self._avoided.begin(fault.relay, now(), seconds)

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
        others = [r for r in self.relays() if r != first and r != self.own.peer_id]
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
                seconds = self.patience.next if groups else None
                done, _ = await asyncio.wait(asked, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if won is None and task.exception() is None:
                        won, relay = task.result(), asked.pop(task)
                        self._kept[peer] = relay, now() + self.patience.kept
                    elif isinstance(error := task.exception(), RemoteError):
                        failures.append(str(error))
                        del asked[task]
                    elif error is not None:
                        raise error
        finally:
            for task in asked:
                task.cancel()
            for other in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(other, tuple):
                    await other[0].close()
        if won is None:
            why = "; ".join(failures) or "there is none"
            raise Unreachable(peer, f"peer {short_peer(peer)}: no relay leads to it: {why}")
        return won

    async def _ask(self, relay: str, peer: str) -> Offer:
        """An offer through `relay`. Raises RemoteError."""
        try:
            async with asyncio.timeout(self.patience.offer):
                stream = await self.transport.open(relay, endpoints.RELAY, timeout=self.patience.offer)
                try:
                    return await self._shake(stream, relay, peer)
                except BaseException:
                    await stream.close()
                    raise
        except TimeoutError:
            text = f"relay {short_peer(relay)}: no answer within {self.patience.offer:g} s"
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
        return stream, shake


MOST_ACCEPTED = 256
"""Streams through relays that others have open to us."""
MOST_OF_A_PEER = 96
"""Of those, of one peer: the pipes of two chains are 32."""
HANDSHAKE_SECONDS = 10.0


class Inside(Traffic):
    """Counts frames of relayed streams under their names only: in total they are counted as what carries them."""

    def __init__(self, outside: Traffic) -> None:
        super().__init__(sent=outside.sent, received=outside.received)


class RelayedTransport:
    """See the module's docstring and peer.net.base.Transport. Made by `begin`.

    relays: returns the peers that relay, which are themselves reached over `direct`
    """

    def __init__(
        self,
        direct: Transport,
        own: Identity,
        relays: Callable[[], Sequence[str]],
        *,
        patience: RelayTimeouts = RELAY_TIMEOUTS,
        signs: KeepAlive = KEEP_ALIVE,
    ) -> None:
        self.peer_id = direct.peer_id
        self.traffic = direct.traffic
        self.lost = direct.lost
        self.relays = Relays(own, direct, relays, patience=patience, signs=signs)
        self._direct = direct
        self.look, self.seen_at, self.disconnect = direct.look, direct.seen_at, direct.disconnect
        self.store, self.prefer, self.get = direct.store, direct.prefer, direct.get
        self._own = own
        self._names = relays
        self._patience = patience
        self._signs = signs
        self._handlers: dict[str, Handler] = {}
        self._behind: dict[
            str, tuple[tuple[str, ...], float, int]
        ] = {}  # behind relays: addresses, when dialled, how often
        self.guests = direct.guests
        self.guests.relays = relays
        self._inside = Endpoint(Limits(of_a_peer=MOST_OF_A_PEER))
        self._inside.guests.follow(self.guests.tell)
        self._inside.traffic = Inside(direct.traffic)
        self._channels: set[Channel] = set()
        self._accepted = 0

    @classmethod
    async def begin(cls, direct: Transport, own: Identity, relays: Sequence[str]) -> RelayedTransport:
        """One through which others can reach us too. Raises TransportLost."""
        made = cls(direct, own, lambda: relays)
        await made.accept()
        return made

    async def accept(self) -> None:
        await self._direct.serve(endpoints.RELAYED, self._answer)

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._direct.addresses

    def is_behind(self, peer: str) -> bool:
        return peer in self._behind

    # --- streams

    async def serve(self, name: str, handler: Handler) -> None:
        self._handlers[name] = handler
        await self._direct.serve(name, handler)

    async def open(self, peer: str, name: str, *, timeout: float) -> Stream:
        why: RemoteError | None = None
        try:
            async with asyncio.timeout(timeout):
                if peer not in self._behind:
                    patience = min(timeout, self._patience.direct) if self._may_relay(peer) else timeout
                    try:  # a connection whose other end, or what led to it, has died is silent for long
                        return await self._direct.open(peer, name, timeout=patience)
                    except NotServed:
                        raise  # it is reached: no relay helps
                    except (Unreachable, Timeout) as error:
                        if not self._may_relay(peer):
                            raise
                        why = error
                else:
                    self._dial_again(peer)
                try:
                    return self._stream(await self.relays.open(peer, name), peer, name)
                except Unreachable as error:
                    raise Unreachable(peer, f"{why}; {error}" if why else str(error)) from None
        except TimeoutError:
            raise why or Timeout(
                peer, f"peer {short_peer(peer)}: no answer through relays within {timeout:g} s; try again"
            ) from None

    def _stream(self, channel: Channel, peer: str, name: str) -> FrameStream:
        self._channels = {c for c in self._channels if not c.is_closed}
        self._channels.add(channel)
        return self._inside.stream(peer, name, channel.reader, channel, channel.abort)

    def _may_relay(self, peer: str) -> bool:
        names = self._names()
        return peer != self.peer_id and peer not in names and bool(names)

    async def _answer(self, stream: Stream) -> None:
        relay = stream.remote
        if relay not in self._names():
            raise RemoteError(relay, f"relayed stream: {short_peer(relay)} is no relay of this run; it was closed")
        if self._accepted >= MOST_ACCEPTED:
            raise RemoteError(relay, f"relayed streams: {MOST_ACCEPTED} at once; it was closed")
        self._accepted += 1
        try:
            shake = handshake(initiator=False, relay=relay)
            try:
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    shake.read(await stream.recv(MAX_HELLO))
                    await stream.send(shake.write(relaying.pack_hello(self._own, shake.own_static)))
                    hello = relaying.hello_of(shake.read(await stream.recv(MAX_HELLO)), shake.their_static)
            except (FrameError, NoiseError, TimeoutError):
                raise RemoteError(
                    relay, f"relayed stream of {short_peer(relay)}: no handshake; it was closed"
                ) from None
            await self._serve(stream, shake.ciphers, hello)
        finally:
            self._accepted -= 1

    async def _serve(self, carrier: Stream, ciphers: tuple[Cipher, Cipher], hello: relaying.Hello) -> None:
        blame = self.relays.blame
        channel = Channel(carrier, ciphers, hello.peer, hello.name, fault=blame, asks=False, signs=self._signs)
        try:
            handler = self._handlers.get(hello.name)
            if handler is not None:
                await self._inside.run(handler, self._stream(channel, hello.peer, hello.name))
        finally:
            channel.close()
            await channel.wait_closed()

    # --- connections and the DHT

    async def connect(self, addresses: Sequence[str], *, timeout: float) -> None:
        peers = {address.rpartition("/p2p/")[2] for address in addresses}
        peer = peers.pop() if len(peers) == 1 else ""
        if not peer or not self._may_relay(peer):
            return await self._direct.connect(addresses, timeout=timeout)
        direct = self._dial(peer, addresses, timeout)
        wait = 0.0 if peer in self._behind else self._patience.direct
        done, _ = await asyncio.wait({direct}, timeout=wait)
        if done and not isinstance(direct.exception(), RemoteError):
            return direct.result()
        through = asyncio.create_task(self.relays.reach(peer))
        try:
            async with asyncio.timeout(timeout):
                await self._either(peer, tuple(addresses), direct, through)
        except TimeoutError:
            raise Timeout(peer, f"peer {short_peer(peer)}: not reached within {timeout:g} s; try again") from None
        finally:
            await cancel(through)

    async def _either(
        self, peer: str, addresses: tuple[str, ...], direct: asyncio.Task[None], through: asyncio.Task[None]
    ) -> None:
        """Returns when one of the two has reached `peer`. Raises RemoteError when both have failed."""
        left = {direct, through}
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            if direct in done and direct.exception() is None:
                return
            if through in done and through.exception() is None:
                self._behind[peer] = addresses, now(), 0
                if direct.done() and direct.exception() is None:
                    del self._behind[peer]
                return
        self._behind.pop(peer, None)
        why = [task.exception() for task in (direct, through)]
        for error in why:
            if error is not None and not isinstance(error, RemoteError):
                raise error
        raise Unreachable(peer, "; ".join(map(str, why)))

    def _dial(self, peer: str, addresses: Sequence[str], timeout: float) -> asyncio.Task[None]:
        """Tries the direct way, in the background; once it is found, new streams take it."""

        def dialled(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is None:
                self._behind.pop(peer, None)

        task = asyncio.create_task(self._direct.connect(addresses, timeout=timeout))
        self._inside.own(task)
        task.add_done_callback(dialled)
        return task

    def _dial_again(self, peer: str) -> None:
        addresses, when, times = self._behind[peer]
        time = now()
        if time - when > min(self._patience.again, self._patience.soon * 2**times):
            self._behind[peer] = addresses, time, times + 1
            self._dial(peer, addresses, 10.0)

    def doubt(self, peer: str) -> None:
        """Does nothing: streams through a relay have signs of life of their own (peer/net/relay/channel.py)."""
        if peer not in self._behind:
            self._direct.doubt(peer)

    async def aclose(self) -> None:
        await self._inside.shut()
        await asyncio.gather(*(channel.wait_closed() for channel in self._channels))
        await self._direct.aclose()


# --- the relay

RECORD_COST = 1024
"""Bytes that a record counts besides its own: many small ones cost the relay more than they carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """Limits of a relay; times in seconds.

    circuits, of_a_peer: circuits at once, in all and that one peer has asked for
    """

    circuits: int = 256
    of_a_peer: int = 64
    ask: float = 10.0  # until a peer says whom it asks for
    open: float = 4.0  # until that one answers
    idle: float = 120.0  # a circuit without records ends after so long
    stalled: float = 30.0  # one whose receiver does not read ends after so long


RELAY_LIMITS = RelayLimits()


class RelayServer:
    """Relays `bps` bits a second at most, between peers for which `is_here` is true."""

    def __init__(
        self, transport: Transport, bps: int, is_here: Callable[[str], bool], *, limits: RelayLimits = RELAY_LIMITS
    ) -> None:
        self.passed = 0
        """Bytes of records, both ways, since the start."""
        self.refused = 0
        """Asks that were answered with no, since the start."""
        self._transport = transport
        self._uplink = Uplink(bps)
        self._is_here = is_here
        self._limits = limits
        self._of: Counter[str] = Counter()

    @property
    def circuits(self) -> int:
        return self._of.total()

    async def serve(self) -> None:
        await self._transport.serve(endpoints.RELAY, self._serve)

    def close(self) -> None:
        self._uplink.close()

    async def _serve(self, stream: Stream) -> None:
        asker = stream.remote
        try:
            peer = relaying.ask_of(await stream.recv(MAX_ASK, timeout=self._limits.ask))
        except framing.FrameError as error:
            raise MessageError(asker, f"relay for {short_peer(asker)}: {error}; it was closed") from None
        if asker == peer or not self._is_here(asker) or not self._is_here(peer):
            return await self._refuse(stream, ABSENT)
        if self.circuits >= self._limits.circuits or self._of[asker] >= self._limits.of_a_peer:
            return await self._refuse(stream, FULL)
        self._of[asker] += 1
        try:
            await self._relay(stream, peer)
        finally:
            self._of[asker] -= 1
            if not self._of[asker]:
                del self._of[asker]

    async def _refuse(self, stream: Stream, state: str) -> None:
        self.refused += 1
        await stream.send(relaying.pack_answer(state))

    async def _relay(self, stream: Stream, peer: str) -> None:
        try:
            onward = await self._transport.open(peer, endpoints.RELAYED, timeout=self._limits.open)
        except RemoteError:
            return await self._refuse(stream, ABSENT)
        try:
            await stream.send(relaying.pack_answer(HERE))
            await self._splice(stream, onward)
        finally:
            await onward.close()

    async def _splice(self, stream: Stream, onward: Stream) -> None:
        idle = self._limits.idle
        try:
            async with asyncio.timeout(idle) as end:

                def lives() -> None:
                    end.reschedule(asyncio.get_running_loop().time() + idle)

                ways = ((stream, onward), (onward, stream))
                pumps = [asyncio.create_task(self._pump(a, b, stream.remote, lives)) for a, b in ways]
                try:
                    await asyncio.gather(*pumps)
                finally:
                    await cancel(*pumps)
        except TimeoutError:
            text = f"circuit of {short_peer(stream.remote)}: nothing came for {idle:g} s; it was closed"
            raise Timeout(stream.remote, text) from None

    async def _pump(self, source: Stream, target: Stream, asker: str, lives: Callable[[], None]) -> None:
        try:
            while True:
                record = await source.recv(MAX_RECORD)
                lives()
                await self._uplink.turn(asker, len(record) + RECORD_COST)
                await target.send(record, timeout=self._limits.stalled)
                self.passed += len(record)
        except Ended:
            await target.finish()
