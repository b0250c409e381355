"""A run that begins with weights: θ(0) is fetched by the manifest's digests, and nothing else is taken for it."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bootstrap.archive import Archive
from peer.cli.bootstrap import check_initial_state
from peer.log import reader, replay
from peer.log.recompute import Recomputer
from peer.net.blobs import BlobStore
from protocol.errors import UsageError
from protocol.run import layout
from protocol.run.manifest import Manifest
from tests.support import tiny
from tests.support.chains import random_theta
from tests.support.recovery import SHARDS, Rounds, is_right, planned, to
from tests.support.volunteers import MODEL, Swarm, manifest

THETA = random_theta(MODEL)
DIGESTS = {shard: layout.shard_digest(THETA[shard]) for shard in SHARDS}


def run(**changes: Any) -> Manifest:
    return manifest(**{"rounds": 100, "initial_state": tuple(DIGESTS.values()), **changes})


def store(blobs: BlobStore, *shards: str) -> None:
    """Puts these shards of θ(0) there, or all."""
    for shard in shards or SHARDS:
        blobs.put_of_no_round(layout.shard_pieces(THETA[shard]), DIGESTS[shard])


def node_folder(folder: Path) -> Path:
    """The folder of a swarm's node, with θ(0)."""
    store(BlobStore(folder / "bootstrap" / "blobs"))
    return folder / "bootstrap"


async def test_peers_with_empty_folders_begin_with_the_weights_that_the_manifest_names(tmp_path: Path) -> None:
    """The log can be verified, disputes can be settled, and a newcomer needs no θ(0) later."""
    node = node_folder(tmp_path)
    async with Swarm(tmp_path, run(checkpoint_rounds=2)) as swarm:
        rounds = Rounds(swarm)
        peers = [swarm.start(name) for name in ("a", "b")]
        await to(swarm, rounds, 1)
        for peer in peers:
            assert peer.bases == dict.fromkeys(SHARDS, 0)
            assert peer.received > 0.75 * sum(layout.shard_bytes(MODEL, shard) for shard in SHARDS), "compressed"
        await to(swarm, rounds, 4)
        assert swarm.archive.commits[1].digests == DIGESTS, "what they attested"
        for peer in peers:
            await is_right(swarm, peer)
            assert not set(DIGESTS.values()) & set(peer.storage.blobs), "a checkpoint took its place"
        made = Recomputer(
            swarm.manifest, swarm.archive.commits, swarm.archive.blobs.get, newest_state=swarm.archive.newest_state
        )
        for shard in SHARDS:
            assert made.digest(shard, 0) == DIGESTS[shard]
            assert made.digest(shard, 3) == swarm.archive.commits[4].digests[shard]
        newcomer = swarm.start("newcomer")
        await planned(swarm, rounds, newcomer)
        await is_right(swarm, newcomer)
        problems, digests = await verified(swarm.manifest, node)
        assert problems == []
        assert set(digests) == set(SHARDS)
    (node / "blobs" / DIGESTS["head"]).write_bytes(b"0" * layout.shard_bytes(MODEL, "head"))
    problems, _ = await verified(swarm.manifest, node)
    assert problems == ["round 0: the state to replay from is not in the archive, or is damaged"]


async def verified(manifest: Manifest, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The problems in a node's log, and the digests of the last state."""
    log = reader.Folder(folder)
    start = await replay.archived_state(manifest, log, await replay.extent(manifest, log))
    done = await replay.verify(manifest, log.records(), log.payload, lambda problem: None, start)
    return [str(problem) for problem in done.problems], done.digests


async def test_a_damaged_state_is_not_begun_with(tmp_path: Path) -> None:
    """Peers wait for the right bytes."""
    node = node_folder(tmp_path)
    path = node / "blobs" / DIGESTS["embed"]
    right = path.read_bytes()
    path.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    async with Swarm(tmp_path, run()) as swarm:
        peers = [swarm.start(name) for name in ("a", "b")]
        await swarm.until(lambda: all(any(DIGESTS["embed"][:12] in text for text in p.texts()) for p in peers))
        assert not any(peer.rounds.outer.theta for peer in peers)
        assert swarm.archive.lacks(0) == ["embed"], "it is not served any more"
        store(swarm.archive.blobs, "embed")
        await swarm.round(2)
        for peer in peers:
            assert peer.bases == dict.fromkeys(SHARDS, 0)
            await is_right(swarm, peer)


@pytest.mark.parametrize("damage", ["missing", "damaged"])
async def test_a_node_without_the_weights_does_not_start_unless_it_knows_who_has_them(
    damage: str, tmp_path: Path
) -> None:
    node = node_folder(tmp_path)
    with contextlib.closing(Archive(node, run())) as archive:
        await check_initial_state(archive, has_others=False)
        path = node / "blobs" / DIGESTS["block.1"]
        if damage == "damaged":
            path.write_bytes(path.read_bytes()[:-4] + b"0000")
        else:
            archive.blobs.remove(DIGESTS["block.1"])
        with pytest.raises(UsageError, match=r"are missing or damaged \(block.1\); give --dir") as caught:
            await check_initial_state(archive, has_others=False)
        assert "\n" not in str(caught.value)
        await check_initial_state(archive, has_others=True)
        assert not path.exists()
    with contextlib.closing(Archive(tmp_path / "seed", tiny.manifest())) as archive:
        await check_initial_state(archive, has_others=False)


async def test_members_of_a_chain_fetch_their_own_parts_of_the_weights(tmp_path: Path) -> None:
    """Of a model whose blocks write a part of the residual stream."""
    model = dataclasses.replace(MODEL, residual_width=16)
    theta, shards = random_theta(model), layout.shard_names(model)
    first = {shard: layout.shard_digest(theta[shard]) for shard in shards}
    blobs = BlobStore(tmp_path / "bootstrap" / "blobs")
    for shard in shards:
        blobs.put_of_no_round(layout.shard_pieces(theta[shard]), first[shard])
    made = run(model=model, initial_state=tuple(first.values()))
    async with Swarm(tmp_path, made) as swarm:
        peers = [swarm.start(name, memory=tiny.third_memory(made) * 3 // 2) for name in ("a", "b")]
        await swarm.round(3)
        (replica,) = swarm.archive.commits[0].plan.replicas
        assert replica.is_chain
        held = [set(peer.rounds.outer.theta) for peer in peers]
        assert held[0] | held[1] == set(shards)
        assert held[0] & held[1] == {"anchor"}
        assert swarm.archive.commits[1].digests == first
        for peer, own in zip(peers, held, strict=True):
            assert peer.bases == dict.fromkeys(own, 0)
            await is_right(swarm, peer, own)
