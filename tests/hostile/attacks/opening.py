"""Attacks with streams and connections."""

from __future__ import annotations

import asyncio
import contextlib
import random

from peer.net.base import Stream
from protocol.errors import RemoteError
from protocol.wire import calls, endpoints, relaying
from protocol.wire.calls import PipeHello
from tests.hostile.attacks.attacker import AT_ONCE, Attack, Attacker
from tests.hostile.ground import SOON

NAMES = sorted(v for v in vars(endpoints).values() if isinstance(v, str) and v.startswith("potluck/"))
MANY = (
    "has 256 streams open and opens more",
    "has 64 streams open and says nothing",
    *(f"opens {name} again and again" for name in NAMES),
)
NOTHING = (*MANY, "opens streams, says nothing, and closes them")
NONSENSE = (*NOTHING, *(f"says what has no place in {name}" for name in NAMES))
LIBP2P_PING = "/ipfs/ping/1.0.0"


async def hoarded(enemy: Attacker) -> None:
    """streams to a chain's member, opened and kept"""
    kept: list[Stream] = []

    async def one() -> None:
        kept.append(await enemy.open(enemy.victim, endpoints.PIPE))

    await enemy.over_and_over(one, AT_ONCE)


async def opened(enemy: Attacker) -> None:
    """streams to a chain's member, opened and closed"""

    async def one() -> None:
        await (await enemy.open(enemy.victim, endpoints.PIPE)).close()

    await enemy.over_and_over(one, AT_ONCE)


async def silent(enemy: Attacker) -> None:
    """streams under every name, to the node and the peer, on which nothing is said"""
    kept: list[Stream] = []
    rng = random.Random(0)

    async def one() -> None:
        kept.append(await enemy.open(rng.choice((enemy.node, enemy.victim)), rng.choice(NAMES)))

    await enemy.over_and_over(one, AT_ONCE)


async def garbage(enemy: Attacker) -> None:
    """random bytes under every name, to the node and the peer"""
    rng = random.Random(0)

    async def one() -> None:
        stream = await enemy.open(rng.choice((enemy.node, enemy.victim)), rng.choice(NAMES))
        try:
            for _ in range(10):
                await stream.send(rng.randbytes(rng.randrange(10_000)))
        finally:
            await stream.close()

    await enemy.over_and_over(one, 4)


async def unserved(enemy: Attacker) -> None:
    """streams under names that nobody serves"""

    async def one() -> None:
        await (await enemy.open(enemy.victim, "potluck/nothing/1")).close()

    await enemy.over_and_over(one, AT_ONCE)


async def pipes(enemy: Attacker) -> None:
    """pipes of chains that are not, begun in order, 16 stripes each"""

    async def one() -> None:
        number = enemy.done.times
        hello = PipeHello(round=number // 16 % 1000, generation=0, replica=0, stripe=number % 16)
        stream = await enemy.open(enemy.victim, endpoints.PIPE)
        try:
            await stream.send(calls.write(hello))
            with contextlib.suppress(RemoteError):
                await stream.recv(timeout=5.0)
        finally:
            await stream.close()

    await enemy.over_and_over(one, 4 * AT_ONCE)


async def relayed(enemy: Attacker) -> None:
    """streams that seem to come through a relay, from one that is none"""

    async def one() -> None:
        stream = await enemy.open(enemy.victim, endpoints.RELAYED)
        try:
            await stream.send(bytes(100))
        finally:
            await stream.close()

    await enemy.over_and_over(one, AT_ONCE)


async def circuits(enemy: Attacker) -> None:
    """circuits of the node's relay to nobody, and to a peer that it never talks to"""

    async def one() -> None:
        stream = await enemy.open(enemy.node, endpoints.RELAY)
        try:
            to = enemy.victim if enemy.done.times % 2 else "12D3KooW" + "x" * 44
            await stream.send(relaying.pack_ask(to))
            await stream.send(bytes(relaying.MAX_HELLO))
            with contextlib.suppress(RemoteError):
                await stream.recv(timeout=1.0)
        finally:
            await stream.close()

    await enemy.over_and_over(one, AT_ONCE)


async def crowd_opens(enemy: Attacker) -> None:
    """many identities at one address, each opens streams to a chain's member"""

    async def one(me: Attacker) -> None:
        async def open_one() -> None:
            await (await me.open(me.victim, endpoints.PIPE)).close()

        await me.over_and_over(open_one, 4)

    await asyncio.gather(*(one(me) for me in (enemy, *enemy.others)))


async def redials(enemy: Attacker) -> None:
    """connections to a peer, made and ended again"""

    async def one() -> None:
        await enemy.transport.daemon.disconnect(enemy.victim)
        await enemy.transport.daemon.answers(enemy.victim, 5.0)

    await enemy.over_and_over(one)


async def unused(enemy: Attacker) -> None:
    """TCP connections to the node, opened and never used"""
    kept: list[asyncio.StreamWriter] = []
    host, port = place(enemy.addresses)

    async def one() -> None:
        if len(kept) >= 500:
            kept.pop(0).transport.abort()
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), SOON)
        kept.append(writer)

    await enemy.over_and_over(one, 2)


async def no_handshakes(enemy: Attacker) -> None:
    """TCP connections to the node that begin with random bytes"""
    rng = random.Random(0)
    host, port = place(enemy.addresses)

    async def one() -> None:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), SOON)
        try:
            writer.write(b"\x13/multistream/1.0.0\n" + rng.randbytes(1000))
            await asyncio.wait_for(reader.read(100), 1.0)
            await asyncio.wait_for(reader.read(), 1.0)
        finally:
            writer.transport.abort()

    await enemy.over_and_over(one, AT_ONCE)


async def daemon_pings(enemy: Attacker) -> None:
    """libp2p's own pings, which the daemon answers by itself"""

    async def one() -> None:
        reader, writer = await enemy.raw(enemy.victim, LIBP2P_PING)
        try:
            while True:
                writer.write(bytes(32))
                await reader.readexactly(32)
                enemy.done.times += 1
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    await enemy.over_and_over(one, AT_ONCE)


def place(addresses: tuple[str, ...]) -> tuple[str, int]:
    """Host and port of the first one."""
    parts = addresses[0].split("/")
    return parts[2], int(parts[4])


ATTACKS = (
    Attack(work=hoarded, told=MANY),
    Attack(work=opened, told=NOTHING),
    Attack(work=silent, told=MANY),
    Attack(work=garbage, told=NONSENSE),
    Attack(work=unserved),
    Attack(work=pipes),
    Attack(work=relayed),
    Attack(work=circuits),
    Attack(work=crowd_opens, told=NOTHING, identities=4),
    Attack(work=redials),
    Attack(work=unused),
    Attack(work=no_handshakes),
    Attack(work=daemon_pings),
)
