"""No stranger stops rounds: who floods, promises or hoards is slowed down, then refused, and the operator is told."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootstrap.sessions import OUTBOX, RECORDS, Session
from peer.events import Event
from peer.net.base import Stream
from peer.net.guests import LIMITS
from peer.ui.monitor import Monitor
from protocol.codec import blob_hash
from protocol.errors import RemoteError
from protocol.run import layout
from protocol.wire import encoding, endpoints, framing
from protocol.wire.commit import Part
from protocol.wire.session import Attest, Heartbeat
from tests.hostile.ground import SOON, Ground, Trainee, ended, until_it_breaks
from tests.support.volunteers import Volunteer

pytestmark = pytest.mark.slow


async def test_a_flood_of_small_messages_is_read_slowly_and_then_refused(tmp_path: Path) -> None:
    async with Ground(tmp_path) as ground:
        (a, _) = await ground.join("a", "b")
        await ground.goes_on(2)
        enemy = await ground.enemy()
        beat = encoding.encode(Heartbeat(phase="x", round=1))

        async def flood() -> None:
            """Until it is refused; a session may also end because it is read so slowly."""
            while not ground.refusals(enemy):
                with contextlib.suppress(RemoteError):
                    send = (await enemy.session()).send
                    await until_it_breaks(lambda i, send=send: send(beat), 10**9)

        flooding = asyncio.create_task(flood())
        while not flooding.done():
            await ground.goes_on(2)
        assert ground.refusals(enemy) == ["says too much in its session"]
        with contextlib.suppress(RemoteError):
            await ended(await enemy.session())
        await ground.goes_on()
        assert not ground.machine.has_session(enemy.id)
        monitor, told = Monitor(ground.manifest, a.transport, bootstrap=ground.boot.addresses), list[Event]()
        while not any("has refused" in str(e.fields.get("text")) for e in told):
            await monitor.poll(told.append)
            await ground.goes_on(1)


async def test_a_flood_of_large_attestations_is_no_use_either(tmp_path: Path) -> None:
    async with Ground(tmp_path) as ground:
        await ground.join("a", "b")
        await ground.goes_on(2)
        enemy = await ground.enemy()
        session = await enemy.session()
        names = layout.shard_names(ground.manifest.model)

        async def attest(i: int) -> None:
            digest = hashlib.sha256(i.to_bytes(8)).hexdigest()
            await enemy.say(session, Attest(round=ground.head, digests=dict.fromkeys(names, digest)))

        flooding = asyncio.create_task(until_it_breaks(attest, 10**9))
        while not flooding.done():
            await ground.goes_on(2)
        assert "says too much in its session" in ground.refusals(enemy)
        assert max(len(raw) for raw in ground.archive.records) < 20_000


def test_requests_for_the_log_are_answered_within_bounds() -> None:
    """Each asks for hundreds of records; what waits for a peer that does not read is bounded, too."""
    session, records = Session(), [b"record"] * (OUTBOX // 2)
    for _ in range(10):
        session.post_records(records, 0.0)
    assert session.outbox.qsize() == OUTBOX
    sent = OUTBOX
    for _ in range(20):
        while not session.outbox.empty():
            session.outbox.get_nowait()
        session.post_records(records, 0.0)
        sent += session.outbox.qsize()
    assert sent <= RECORDS.burst
    session.post_records(records, 0.1)
    assert session.outbox.qsize() == RECORDS.per_second / 10


async def test_a_second_session_ends_the_first(tmp_path: Path) -> None:
    """No peer speaks in several sessions at once, or what each may say would be worth nothing."""

    async with Ground(tmp_path) as ground:
        await ground.join("a")
        enemy = await ground.enemy()
        first = await enemy.session()
        await ground.until(
            lambda: ground.machine.has_session(enemy.id)
        )  # streams may be served in another order than they came
        await enemy.session()
        await ended(first)
        assert ground.machine.has_session(enemy.id)


async def test_whoever_hoards_streams_is_refused(tmp_path: Path) -> None:
    """At a peer, a chain's member perhaps: opened again and again, and kept."""

    async def hoards(ground: Ground, victim: Volunteer, name: str) -> None:
        enemy = await ground.enemy(f"enemy of {name}")
        target = ground.boot if name == endpoints.SESSION else victim.transport
        await enemy.transport.connect(target.addresses, timeout=SOON)
        kept: list[Stream] = []

        async def hoard(i: int) -> None:
            with contextlib.suppress(RemoteError):
                kept.append(await enemy.open(target.peer_id, name))

        told = ground.events if target is ground.boot else victim.events
        for _ in range(20):
            await asyncio.gather(*(hoard(i) for i in range(50)))
            assert target.guests.of(enemy.id) <= LIMITS.silent
            if ground.refusals(enemy, told):
                break
        (why,) = ground.refusals(enemy, told)
        assert why == f"has {LIMITS.silent} streams open and says nothing"
        await ground.until(lambda: target.guests.of(enemy.id) == 0)

    async with Ground(tmp_path) as ground:
        (victim, _) = await ground.join("a", "b")
        await ground.goes_on(2)
        for name in (endpoints.PIPE, endpoints.SESSION, endpoints.STATES):
            await hoards(ground, victim, name)
        await ground.goes_on()


class Promiser(Trainee):
    """It offers other payloads again and again that never come, and promises each that is asked for."""

    is_modest = False
    asked = 0

    async def serve(self) -> None:
        await self.enemy.transport.serve(endpoints.BLOB, self._promise)

    async def _promise(self, stream: Stream) -> None:
        await stream.recv(1024)
        self.asked += 1
        while True:
            await stream.send(framing.pack_message({"state": "wait", "ask": [], "sure": True}))
            await asyncio.sleep(0.5)

    def updates(self, round: int) -> Iterator[tuple[Part, ...]]:
        names = {s: blob_hash.name_of(f"{s} {round} {self.asked}".encode()) for s in self.shards}
        yield tuple(Part(shard=s, digest=name, size=200, norm=1.0) for s, name in names.items())


async def test_payloads_that_are_promised_and_never_come_hold_up_nobody(tmp_path: Path) -> None:
    """However many: each round sixteen other offers of four payloads each, for which the node is told to wait."""

    async with Ground(tmp_path) as ground:
        await ground.join("a", "b")
        await ground.goes_on(2)
        enemy = await ground.enemy()
        liar = Promiser(ground, enemy)
        async with liar.training():
            await ground.until(lambda: len(liar.offered) >= 2 and liar.asked > 0)
            await ground.goes_on(4)
        parts = list((ground.folder / "bootstrap" / "blobs" / "parts").iterdir())
        assert len(parts) < 200, "what was begun is dropped with its round"
        assert all(enemy.id not in {s.peer for s in c.shares} for c in ground.archive.commits)
