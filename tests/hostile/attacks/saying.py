"""Attacks in sessions with a node."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time

from peer.net.base import serve_calls
from protocol.codec import blob_hash
from protocol.errors import RemoteError
from protocol.identity import Identity
from protocol.planning import memory
from protocol.run import layout
from protocol.wire import decree, encoding, endpoints, framing
from protocol.wire.announcement import VERSION, Announcement
from protocol.wire.claims import Evaluation
from protocol.wire.commit import Part
from protocol.wire.session import (
    Announced,
    Attest,
    ChainFailure,
    ChainReconfig,
    Heartbeat,
    Hello,
    LogRequest,
    Offer,
    TakeSeat,
    Withdraw,
)
from tests.hostile.attacks.attacker import AT_ONCE, Attack, Attacker
from tests.support import false_states, tiny
from tests.support.liars import Liar

TURN_SECONDS = 2.5
"""For which each of several identities is there: some rounds."""
FLOODS = ("says too much in its session",)
NONSENSE = (f"says what has no place in {endpoints.SESSION}",)
STRANGE = (
    "shows a log that leads nowhere",
    f"says what has no place in {endpoints.QUORUM}",
    f"opens {endpoints.QUORUM} again and again",
)
AGAIN = (
    "has 256 streams open and opens more",
    "has 64 streams open and says nothing",
    f"opens {endpoints.SESSION} again and again",
)


async def heartbeats(enemy: Attacker) -> None:
    """small messages in a session, as fast as they go"""
    beat = encoding.encode(Heartbeat(phase="x", round=1))
    await enemy.in_sessions(lambda number: beat)


async def attestations(enemy: Attacker) -> None:
    """attestations of all shards, other digests each time"""
    names = layout.shard_names(enemy.manifest.model)

    def message(number: int) -> Attest:
        return Attest(round=number % 100, digests=dict.fromkeys(names, digest(number)))

    await enemy.says(message)


async def flips(enemy: Attacker) -> None:
    """attestations of one round that say this and that in turn"""
    names = layout.shard_names(enemy.manifest.model)
    await enemy.says(lambda number: Attest(round=3, digests=dict.fromkeys(names, digest(number % 2))))


async def announcements(enemy: Attacker) -> None:
    """announcements, each newer than the one before"""
    await enemy.in_sessions(lambda number: encoding.encode(Announced(sealed=enemy.sealed(serial=number + 2))))


async def others_announcements(enemy: Attacker) -> None:
    """announcements of peers that are made up, in the session of one"""
    made_up = [Identity(number.to_bytes(32, "big")) for number in range(1, 65)]

    def message(number: int) -> Announced:
        who = made_up[number % len(made_up)]
        said = Announcement(run=enemy.manifest.run_id, peer=who.peer_id, serial=number + 1)
        return Announced(sealed=encoding.seal(who, said))

    await enemy.says(message)


async def log_requests(enemy: Attacker) -> None:
    """requests for the whole log in a session"""
    await enemy.says(lambda number: LogRequest(after=-1))


async def withdrawals(enemy: Attacker) -> None:
    """withdrawals from rounds that are and that are not"""
    await enemy.says(lambda number: Withdraw(round=number % 10_000, reason="r" * 200))


async def chain_failures(enemy: Attacker) -> None:
    """failures of chains, each names an honest peer"""
    await enemy.says(
        lambda number: ChainFailure(
            round=number % 10_000, replica=number % 4, generation=number % 32, peer=enemy.victim, reason="r" * 200
        )
    )


async def reconfigurations(enemy: Attacker) -> None:
    """chains that nobody has, with the enemy as their only member"""
    await enemy.says(
        lambda number: ChainReconfig(
            round=number % 10_000, replica=number % 4, generation=number, peers=(enemy.id,), steps=1, reason="r" * 200
        )
    )


async def offers(enemy: Attacker) -> None:
    """offers whose lists and payloads nobody has"""
    shards = memory.stage_shards(enemy.manifest, 0, enemy.manifest.model.n_layers)

    def message(number: int) -> Offer:
        parts = tuple(
            Part(shard=s, digest=blob_hash.name_of(f"{s} {number}".encode()), size=200, norm=1.0) for s in shards
        )
        return Offer(round=number % 1000, replica=number % 3, parts=parts, tokens=8, steps=1, loss=1.0)

    await enemy.says(message)


async def seats(enemy: Attacker) -> None:
    """what only a node says: seats to take"""
    await enemy.says(lambda number: TakeSeat(round=number % 1000, replica=number % 3, seconds=1.0))


async def evaluations(enemy: Attacker) -> None:
    """held-out losses of rounds that nobody asked it to measure"""

    def message(number: int) -> Evaluation:
        return Evaluation(
            peer=enemy.id,
            round=number % 1000,
            sequences=8,
            loss=1.0,
            bits_per_byte=1.0,
            signature=bytes(64),
            sample="s" * 300,
        )

    await enemy.says(message)


async def sessions(enemy: Attacker) -> None:
    """sessions, begun as they should be, and closed"""

    async def one() -> None:
        await (await enemy.session()).close()

    await enemy.over_and_over(one, 4)


async def half_open(enemy: Attacker) -> None:
    """sessions that never say who is there"""

    async def one() -> None:
        stream = await enemy.open(enemy.node, endpoints.SESSION)
        enemy.done.times += 1
        with contextlib.suppress(RemoteError):
            await stream.recv()

    await enemy.over_and_over(one, 4 * AT_ONCE)


async def unread(enemy: Attacker) -> None:
    """sessions that ask for the log and read nothing"""

    async def one() -> None:
        session = await enemy.session()
        for _ in range(1000):
            await enemy.say(session, LogRequest(after=-1))
            enemy.done.times += 1
            await asyncio.sleep(0.01)

    await enemy.over_and_over(one)


async def dripping(enemy: Attacker) -> None:
    """first words of sessions that come byte by byte"""

    async def one() -> None:
        _, writer = await enemy.raw(enemy.node, endpoints.SESSION)
        try:
            writer.write((1000).to_bytes(4, "big"))
            for _ in range(1000):
                writer.write(b"x")
                await writer.drain()
                enemy.done.times += 1
                await asyncio.sleep(0.02)
        finally:
            writer.close()

    await enemy.over_and_over(one, 2 * AT_ONCE)


async def invitations(enemy: Attacker) -> None:
    """invitations that no operator has signed, shown again and again"""
    guest = Identity(bytes(31) + b"\x05")
    invited = decree.Invitation(
        run=enemy.manifest.run_id, key=guest.peer_id, expires=int(time.time()) + 10**6, count=1000
    )
    joining = decree.Joined(
        invitation=invited,
        operator=enemy.manifest.operators[0],
        signature=bytes(64),
        peer=enemy.id,
        proof=bytes(64),
    )
    hello = encoding.encode(Hello(run=enemy.manifest.run_id, version=VERSION, joining=joining))

    async def one() -> None:
        stream = await enemy.open(enemy.node, endpoints.SESSION)
        try:
            await stream.send(hello)
            await stream.recv(timeout=1.0)
        finally:
            await stream.close()

    await enemy.over_and_over(one, AT_ONCE)


async def crowd(enemy: Attacker) -> None:
    """many identities at one address, each with a session in which it says as much as it may"""
    names = layout.shard_names(enemy.manifest.model)

    async def one(me: Attacker) -> None:
        await me.says(lambda number: Attest(round=number % 100, digests=dict.fromkeys(names, digest(number))))

    await asyncio.gather(*(one(me) for me in (enemy, *enemy.others)))


async def crowd_announces(enemy: Attacker) -> None:
    """many identities at one address, each announces itself anew with each heartbeat"""

    async def one(me: Attacker) -> None:
        async def talk() -> None:
            session, serial = await me.session(), 1
            while True:
                serial += 1
                await me.say(session, Announced(sealed=me.sealed(serial=serial)))
                await me.say(session, Heartbeat(phase="x", round=1))
                me.done.times += 2
                await asyncio.sleep(me.manifest.timing.heartbeat)

        await me.over_and_over(talk)

    await asyncio.gather(*(one(me) for me in (enemy, *enemy.others)))


async def stuffed(enemy: Attacker) -> None:
    """heartbeats of 60 kB, whose unknown field has 60,000 values"""
    beat = framing.unpack_message(encoding.encode(Heartbeat(phase="x", round=1)))
    raw = framing.pack_message({**beat, "~": [0] * 60_000})
    await asyncio.gather(*(me.in_sessions(lambda number: raw) for me in (enemy, *enemy.others)))


async def nameless(enemy: Attacker) -> None:
    """chains of thousands of members without a name"""
    said = ChainReconfig(round=1, replica=0, generation=1, peers=("",) * 4000, steps=0, reason="")
    raw = encoding.encode(said)
    await asyncio.gather(*(me.in_sessions(lambda number: raw) for me in (enemy, *enemy.others)))


async def knocking(enemy: Attacker) -> None:
    """records of 300,000 values on the operators' stream, and for whoever calls for the log"""
    head = tiny.record(tiny.commit(enemy.manifest), enemy.identity)
    said = framing.unpack_message(encoding.encode_record(head))
    said["c"]["contributions"] = [[0] * 15] * 18_750
    raw = framing.pack_message(said)

    async def one(me: Attacker) -> None:
        async def page(peer: str, request: bytes) -> bytes:
            me.done.times += 1
            return framing.pack_message([raw])

        async def knock() -> None:
            stream = await me.open(me.node, endpoints.QUORUM)
            try:
                await me.say(stream, Heartbeat(phase="x", round=1))
                await stream.recv(timeout=3.0)
                while True:
                    await stream.send(raw)
                    me.done.times += 1
            finally:
                await stream.close()

        await serve_calls(me.transport, endpoints.LOG, page)
        await me.over_and_over(knock)

    await asyncio.gather(*(one(me) for me in (enemy, *enemy.others)))


async def planned(enemy: Attacker) -> None:
    """a peer that is planned, attests a false state and offers other replicas' work"""
    liar = Liar(
        enemy.manifest, enemy.identity, enemy.transport, enemy.addresses, false_states.DIGESTS, random.Random(0)
    )

    async def count() -> None:
        while True:
            enemy.done.times = liar.said
            await asyncio.sleep(0.1)

    await asyncio.gather(liar.run(), count())


async def planned_in_turn(enemy: Attacker) -> None:
    """new identities, one after the other, each planned once, that bring nothing"""

    async def count(liar: Liar, before: int) -> None:
        while True:
            enemy.done.times = before + liar.said
            await asyncio.sleep(0.1)

    for me in (enemy, *enemy.others):
        liar = Liar(me.manifest, me.identity, me.transport, me.addresses, false_states.DIGESTS, random.Random(0))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TURN_SECONDS):
                await asyncio.gather(liar.run(), count(liar, enemy.done.times))
    await asyncio.Event().wait()


def digest(number: int) -> str:
    """One that no peer has."""
    return hashlib.sha256(number.to_bytes(8)).hexdigest()


ATTACKS = (
    Attack(work=heartbeats, told=FLOODS, slowly=True),
    Attack(work=attestations, told=FLOODS, slowly=True),
    Attack(work=flips, told=FLOODS, slowly=True),
    Attack(work=announcements, told=FLOODS, slowly=True),
    Attack(work=others_announcements),
    Attack(work=log_requests, told=FLOODS, slowly=True),
    Attack(work=withdrawals, told=FLOODS, slowly=True),
    Attack(work=chain_failures, told=FLOODS, slowly=True),
    Attack(work=reconfigurations, told=FLOODS, slowly=True),
    Attack(work=offers, told=FLOODS, slowly=True),
    Attack(work=seats),
    Attack(work=evaluations, told=FLOODS, slowly=True),
    Attack(work=sessions, told=AGAIN),
    Attack(work=half_open),
    Attack(work=unread),
    Attack(work=dripping),
    Attack(work=invitations),
    Attack(work=crowd, identities=4),
    Attack(work=crowd_announces, identities=4),
    Attack(work=stuffed, told=NONSENSE, identities=8),
    Attack(work=nameless, told=NONSENSE, identities=8),
    Attack(work=knocking, told=STRANGE, identities=8),
    Attack(work=planned, spell=30.0),
    Attack(work=planned_in_turn, identities=12, spell=30.0),
)
