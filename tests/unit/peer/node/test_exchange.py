"""Payloads between whole peers: fetched when they are offered, kept as long as they are needed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from peer.net.base import Clock
from protocol.ledger import part_lists
from protocol.round.leader_events import Received
from protocol.wire import endpoints
from protocol.wire.session import Offer, Offered, Withdraw
from tests.support import tiny
from tests.support.volunteers import Swarm, Volunteer, manifest


def payloads(swarm: Swarm, round: int, *without: str) -> set[str]:
    """The names of the payloads that a round committed, and of their lists, but for those of some peers."""
    commit = swarm.archive.commits[round]
    shares = [s for s in commit.shares if s.peer not in without]
    return {name for s in shares for name in (s.root, *(p.digest for p in part_lists.unpack(data(swarm, s.root))))}


def data(swarm: Swarm, name: str) -> bytes:
    found = swarm.archive.blobs.get(name)
    assert found is not None
    return found


def names(offer: Offer) -> set[str]:
    """Its list of parts, and its payloads."""
    return {part_lists.root_of(offer.parts), *(part.digest for part in offer.parts)}


async def with_one_that_trains_on(swarm: Swarm) -> tuple[Volunteer, list[Volunteer], asyncio.Event]:
    """Three peers, of which two have offered, and one trains until the event is set."""
    release = asyncio.Event()
    slow = swarm.start("slow")

    async def hold(peer: str, round: int) -> None:
        if peer == slow.id:
            await release.wait()

    swarm.hold = hold
    fast = [swarm.start(name) for name in ("a", "b")]
    await swarm.until(lambda: all(p.rounds and p.rounds.offer for p in fast))
    return slow, fast, release


async def test_a_payload_is_fetched_when_no_offer_is_admitted_any_more(tmp_path: Path) -> None:
    async with Swarm(tmp_path, manifest(start_peers=3, rounds=2)) as swarm:
        slow, fast, release = await with_one_that_trains_on(swarm)
        offered = [names(p.rounds.offer) for p in fast]
        await swarm.until(lambda: all(here <= swarm.leader.offers.held for here in offered))
        assert not (offered[0] | offered[1]) & set(slow.storage.blobs), "it has not offered yet"
        assert not offered[0] & set(fast[1].storage.blobs)
        release.set()
        await swarm.round(2)
        for peer in fast:
            assert max(e.fields["seconds"]["fetch"] for e in peer.events if e.kind == "round") < 5.0
        for peer in (slow, *fast):
            size = swarm.archive.commits[1].shares[0].size
            assert peer.transport.traffic.sent[endpoints.BLOB] < 2 * 2 * 2.5 * size, (
                "it sent each payload twice at most"
            )


async def test_what_is_not_committed_is_dropped_and_what_is_needed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 3 is decided without `late`, whose offer the leader has; `tight` may keep next to nothing."""
    async with Swarm(tmp_path, manifest(start_peers=3, rounds=5)) as swarm:
        free, release = asyncio.Event(), asyncio.Event()
        tight, roomy, late = swarm.start("tight", limit=1), swarm.start("roomy"), swarm.start("late")

        async def hold(peer: str, round: int) -> None:
            if round == 3 and peer != late.id:
                await free.wait()
            if round == 4 and peer == roomy.id:
                await release.wait()

        swarm.hold = hold
        await swarm.until(lambda: late.rounds is not None and late.rounds.member.applied == 2)
        assert payloads(swarm, 1) | payloads(swarm, 2) <= set(roomy.storage.blobs)
        await swarm.until(lambda: tight.rounds.member.applied == 2)
        assert payloads(swarm, 2) <= set(tight.storage.blobs)
        assert not payloads(swarm, 1, tight.id) & set(tight.storage.blobs), "oldest first"
        warned = [t for t in tight.texts() if "--store-limit" in t]
        assert len(warned) == 1
        await swarm.until(lambda: late.rounds.offer is not None and late.rounds.offer.round == 3)
        own = names(late.rounds.offer)
        await swarm.until(lambda: own <= swarm.leader.offers.held)
        gives_up = Received(late.id, Withdraw(round=3, reason="the test says so"))
        assert swarm.leader.handle(gives_up, Clock().steady()) == [], "the others still train"
        free.set()
        await swarm.until(lambda: roomy.rounds.member.applied == 3 and late.rounds.member.applied == 3)
        assert not own & payloads(swarm, 3)
        assert not own & set(roomy.storage.blobs)
        assert own <= set(late.storage.blobs), "a restart would have to give it back"
        await swarm.until(lambda: late.rounds.offer.round == 4)
        release.set()
        await swarm.round(4)
        assert own <= set(late.storage.blobs), "its feedback on disk does not know of it yet"


async def test_a_list_that_is_lost_or_damaged_after_it_came_is_fetched_again(tmp_path: Path) -> None:
    """Before the commit comes, files of one list and of payloads are deleted, and another list is overwritten."""
    async with Swarm(tmp_path, manifest(start_peers=3, rounds=2)) as swarm:
        slow, fast, release = await with_one_that_trains_on(swarm)
        offers = [p.rounds.offer for p in fast]
        here = names(offers[0]) | names(offers[1])
        for peer, offer in zip(fast, offers, strict=True):
            offered = Offered(round=1, shares=(part_lists.share_of(peer.id, offer.parts),))
            slow.rounds.prefetch(tiny.OPERATOR.peer_id, offered)
        await swarm.until(lambda: here <= set(slow.storage.blobs))
        lost, damaged = (part_lists.root_of(offer.parts) for offer in offers)
        for name in (lost, offers[1].parts[0].digest):
            slow.storage.blobs.remove(name)
        (slow.storage.blobs.folder / damaged).write_bytes(b"not a list")
        release.set()
        await swarm.round(2)
        await swarm.until(lambda: slow.rounds.member.applied == 2)
        assert {lost, offers[1].parts[0].digest} <= set(slow.storage.blobs), "they came again"
        digests = {shard: slow.rounds.outer.digest(shard) for shard in slow.rounds.outer.theta}
        assert digests == {shard: fast[0].rounds.outer.digest(shard) for shard in digests}
        assert digests
