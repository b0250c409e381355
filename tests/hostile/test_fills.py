"""No stranger fills a disk, or the DHT."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
from hivemind.proto import dht_pb2

from bootstrap.archive import Archive
from peer.net import p2p
from peer.net.dht import MOST_KEYS, MOST_RECORDS, Storage
from peer.net.directory import TTL_SECONDS
from peer.net.guests import CALLS
from protocol.codec import blob_hash
from protocol.identity import Identity
from protocol.ledger import part_lists
from protocol.run import layout
from protocol.wire import encoding, endpoints, framing
from protocol.wire.announcement import Announcement
from protocol.wire.commit import Part
from tests.hostile.ground import SOON, Enemy, Ground, Trainee, identity

pytestmark = pytest.mark.slow


class Waster(Trainee):
    """It offers payload after payload to every round, all in order but for one that no peer has, so that its replica is
    never complete."""

    offered_bytes = 0

    def updates(self, round: int) -> Iterator[tuple[Part, ...]]:
        made = self.ground.manifest
        for number in range(2):
            parts = []
            for shard in self.shards:
                draw = np.random.default_rng([1000 * round + number, *shard.encode()])
                arrays = [draw.standard_normal(shape).astype(np.float32) for shape in layout.shapes(made.model, shard)]
                parts.append(self.part(shard, arrays))
                self.offered_bytes += parts[-1].size
            missing = blob_hash.name_of(f"no peer has this {round} {number}".encode())
            yield tuple(replace(p, digest=missing) if p.shard == "head" else p for p in parts)


def named(archive: Archive) -> set[str]:
    """Everything that the log names."""
    names: set[str] = set()
    for commit in archive.commits:
        for share in commit.shares:
            raw = archive.blobs.get(share.root)
            assert raw is not None
            names |= {share.root, *(part.digest for part in part_lists.unpack(raw))}
    return names


async def test_what_was_offered_and_not_committed_goes_with_its_round(tmp_path: Path) -> None:
    """At the node, and at every peer that fetched it ahead of time."""

    async with Ground(tmp_path) as ground:
        (a, _) = await ground.join("a", "b")
        await ground.goes_on(2)
        enemy = await ground.enemy()
        waster = Waster(ground, enemy)

        def came() -> set[str]:
            return set(waster.store) & set(ground.archive.blobs)

        async with waster.training():
            await ground.until(lambda: len(came()) >= 6)
            first = came()
            await ground.until(lambda: not first & set(ground.archive.blobs))
            await ground.goes_on(3)
        head = ground.head
        await ground.until(lambda: ground.head > head + 1)
        await ground.until(lambda: not came() and not set(waster.store) & set(a.storage.blobs))
        assert waster.offered_bytes > 10 * min(blob.size for name in waster.store if (blob := waster.store.find(name)))
        await ground.stop("a")
        await ground.stop("b")
    archive = Archive(tmp_path / "bootstrap", ground.manifest)
    assert {n for n in archive.blobs if archive.blobs.round_of(n) < ground.head} <= named(archive), (
        "and nothing else went"
    )
    archive.close()


# --- the DHT


def announced(who: Identity, run_id: str, serial: int, **said: Any) -> bytes:
    return encoding.seal(who, Announcement(run=run_id, peer=who.peer_id, serial=serial, **said))


async def store(enemy: Enemy, victim: p2p.P2PTransport, records: list[tuple[str, bytes, float]]) -> list[bool]:
    """A store request of hivemind's to one node: (subkey, value, expiry)."""
    key = endpoints.announcements_key(enemy.manifest.run_id)
    request = dht_pb2.StoreRequest(
        keys=[DHTID.generate(key).to_bytes()] * len(records),
        subkeys=[framing.pack_message(subkey) for subkey, _, _ in records],
        values=[framing.pack_message([key, value]) for _, value, _ in records],
        expiration_time=[expiry for _, _, expiry in records],
        in_cache=[False] * len(records),
    )
    answer = await enemy.transport.daemon.p2p.call_protobuf_handler(
        PeerID.from_base58(victim.peer_id), "DHTProtocol.rpc_store", request, dht_pb2.StoreResponse
    )
    return list(answer.store_ok)


async def test_an_old_announcement_cannot_be_stored_again(tmp_path: Path) -> None:
    async with Ground(tmp_path) as ground:
        enemy = await ground.enemy()
        victim, boot = identity("victim"), ground.daemons.started[ground.boot.peer_id]
        now, run_id = time.time(), ground.manifest.run_id
        old, new = (
            announced(victim, run_id, int(1000 * (now - age)), addresses=(f"/ip4/127.0.0.1/tcp/{4000 + age}",))
            for age in (60, 0)
        )
        latest = now - 60 + TTL_SECONDS
        assert await store(enemy, boot, [(victim.peer_id, old, latest + 30)]) == [False], "later than it was made for"
        assert await store(enemy, boot, [(victim.peer_id, old, latest)]) == [True]
        assert await store(enemy, boot, [(victim.peer_id, new, now + TTL_SECONDS)]) == [True], "its own newer one wins"
        assert await store(enemy, boot, [(victim.peer_id, old, latest)]) == [False]
        assert (await boot.get(endpoints.announcements_key(run_id)))[victim.peer_id] == new
        ancient = announced(victim, run_id, int(1000 * (now - 3600)))
        assert await store(enemy, boot, [(victim.peer_id, ancient, now + 100)]) == [False]


async def test_strangers_fill_the_dht_and_whoever_is_planned_is_found_all_the_same(tmp_path: Path) -> None:
    """740 fresh keys took all of its space. Now planned peers come first, and later strangers have a chance, too."""

    async with Ground(tmp_path) as ground:
        await ground.join("a", "b")
        await ground.goes_on(2)
        enemy = await ground.enemy()
        boot = ground.daemons.started[ground.boot.peer_id]
        run_id, now = ground.manifest.run_id, time.time()
        strangers = [Identity(i.to_bytes(32, "big")) for i in range(1, MOST_RECORDS + 200)]
        records = [
            (s.peer_id, announced(s, run_id, int(1000 * now), device="d" * 40), now + TTL_SECONDS) for s in strangers
        ]
        kept = 0
        for at in range(0, len(records), MOST_KEYS):
            kept += sum(await store(enemy, boot, records[at : at + MOST_KEYS]))
        assert kept > MOST_RECORDS - 10, "there is space for strangers as long as nobody needs it"
        key = endpoints.announcements_key(run_id)
        found = await boot.get(key)
        assert len(found) <= MOST_RECORDS
        members = [identity(name) for name in ("a", "b")]
        fresh = [(m.peer_id, announced(m, run_id, int(1000 * now) + 5000), now + 5 + TTL_SECONDS) for m in members]
        assert await store(enemy, boot, fresh) == [True, True]
        found = await boot.get(key)
        assert {m.peer_id for m in members} | set(ground.manifest.operators) <= set(found)
        assert len(found) <= MOST_RECORDS
        await ground.goes_on()


def test_among_strangers_it_is_chance_that_decides() -> None:
    """Of three times as many as fit, each node keeps other ones: some of the first and some of the last."""
    stores, key, expires = [Storage(set()) for _ in range(2)], DHTID.generate("key"), time.time() + 100
    names = [f"stranger {i}" for i in range(3 * MOST_RECORDS)]
    for one in stores:
        for name in names:
            one.store_subkey(key, name, b"value", expires)
    kept = [set(one.get(key).value.data) for one in stores]
    assert [len(some) for some in kept] == [MOST_RECORDS] * 2
    assert all(some & set(names[:MOST_RECORDS]) and some & set(names[-MOST_RECORDS:]) for some in kept)
    assert kept[0] != kept[1]
    preferred = {"known"}
    full = Storage(preferred)
    for name in (*names, "known"):
        full.store_subkey(key, name, b"value", expires)
    assert "known" in full.get(key).value.data


async def test_one_request_does_not_keep_a_node_busy(tmp_path: Path) -> None:
    """Looking for the neighbours of 100,000 keys held a node's loop up for half a minute."""

    async with Ground(tmp_path) as ground:
        await ground.join("a", "b")
        await ground.goes_on(2)
        enemy, boot = await ground.enemy(), ground.boot
        keys = [DHTID.generate(i).to_bytes() for i in range(100)]
        for many in (MOST_KEYS + 1, 100_000):
            request = dht_pb2.FindRequest(keys=keys * (many // 100 + 1))
            with pytest.raises(P2PHandlerError, match=r"too many (keys|requests)"):
                async with asyncio.timeout(SOON):
                    await enemy.transport.daemon.p2p.call_protobuf_handler(
                        PeerID.from_base58(boot.peer_id), "DHTProtocol.rpc_find", request, dht_pb2.FindResponse
                    )
            await ground.goes_on()


async def test_whoever_asks_the_dht_again_and_again_is_refused(tmp_path: Path) -> None:
    async with Ground(tmp_path) as ground:
        await ground.join("a", "b")
        await ground.goes_on(2)
        enemy, boot = await ground.enemy(), ground.boot
        request = dht_pb2.FindRequest(keys=[DHTID.generate("x").to_bytes()])

        async def ask() -> None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(SOON):
                    await enemy.transport.daemon.p2p.call_protobuf_handler(
                        PeerID.from_base58(boot.peer_id), "DHTProtocol.rpc_find", request, dht_pb2.FindResponse
                    )

        for _ in range(int(CALLS.burst) // 50):
            await asyncio.gather(*(ask() for _ in range(50)))
        assert not ground.refusals(enemy), "each request counts once"
        for _ in range(40):
            await asyncio.gather(*(ask() for _ in range(50)))
            if ground.refusals(enemy):
                break
        assert ground.refusals(enemy) == ["asks the DHT too often"]
        await ground.goes_on()
