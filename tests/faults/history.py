"""A run with a past: the log of a chain's rounds, and what its members kept. Nothing was trained: every round has the
same noise.

After enough rounds the payloads are more bytes than the state, so a newcomer fetches a checkpoint, as in any run
that is not young.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from bootstrap.archive import Archive
from peer.state.outer_optimizer import Outer
from peer.state.storage import Checkpoint, Storage
from protocol.codec import sparse
from protocol.identity import Identity
from protocol.ledger import part_lists
from protocol.planning import memory
from protocol.planning.allotment import NEW, allot
from protocol.run import init, layout
from protocol.wire.commit import Commit, Contribution, Part, Share
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from tests.faults.processes import Swarm
from tests.support import tiny

SCALE = 1e-6
"""Of the noise: the model stays as it was."""


def identity(name: str) -> Identity:
    """Of a peer of this name."""
    return Identity(hashlib.sha256(name.encode()).digest())


def write(
    swarm: Swarm, rounds: int, chain: Mapping[str, tuple[int, int]], whole: Sequence[str], young: Sequence[str]
) -> None:
    """Rounds of a chain, {name: its blocks first <= i < last}, in the only node's folder, a plan for one more,
    and a checkpoint of the last state with each member; with those named in `whole` one of all shards. They and the
    `young`, who have nothing else, have the tokenizer."""
    run = swarm.manifest
    spec, shards = run.model, layout.shard_names(run.model)
    outer = Outer(spec, run.outer.codec, run.outer.beta, run.outer.eta)
    outer.theta = {shard: init.initial_shard(spec, run.seed_bytes, shard) for shard in shards}
    rng = np.random.default_rng(0)
    noise = {s: [SCALE * rng.standard_normal(x, dtype=np.float32) for x in layout.shapes(spec, s)] for s in shards}
    payloads = {shard: sparse.encode(run.outer.codec, noise[shard]) for shard in shards}
    stages = tuple(StageSpec(peer=identity(n).peer_id, first=a, last=b) for n, (a, b) in chain.items())
    archive = Archive(swarm.folder / swarm.nodes[0], run)
    shares = tuple(_share(swarm, archive, outer, stage, payloads) for stage in stages)
    plan: Plan | None = None
    parent = run.run_id
    for round in range(rounds + 1):
        done = (_contribution(swarm, shares),) if round else ()
        replicas = plan.replicas if plan is not None else [ReplicaSpec(number=NEW, stages=stages)]
        plan = allot(run, round + 1, replicas, (), {}, plan)
        commit = Commit(
            run=run.run_id, round=round, parent=parent, time=0.0, contributions=done, left_out=(), diverged=(),
            digests={}, plan=plan, leader=tiny.OPERATOR.peer_id, members=run.operators,
        )  # fmt: skip
        archive.append(tiny.record(commit))
        parent = commit.digest
        for shard in shards:
            outer.apply(shard, [(1.0, payloads[shard])] if round else [])
    archive.close()
    held = {name: memory.stage_shards(run, *blocks) for name, blocks in chain.items()}
    for name, kept in {**held, **dict.fromkeys(whole, shards), **dict.fromkeys(young, ())}.items():
        storage = Storage(swarm.folder / name)
        (storage.folder / "identity.key").write_bytes(identity(name).libp2p_bytes())
        theta = {shard: outer.theta[shard] for shard in kept}
        if theta:
            storage.save_checkpoint(Checkpoint(rounds, theta, {}), {shard: outer.digest(shard) for shard in kept})
        storage.close()


def _share(swarm: Swarm, archive: Archive, outer: Outer, stage: StageSpec, payloads: Mapping[str, bytes]) -> Share:
    """A member's parts, kept in the archive."""
    parts = tuple(
        Part(
            shard=shard,
            digest=archive.blobs.put(payloads[shard], 1),
            size=len(payloads[shard]),
            norm=outer.norm(shard, payloads[shard]),
        )
        for shard in memory.stage_shards(swarm.manifest, stage.first, stage.last)
    )
    archive.blobs.put(part_lists.pack(parts), 1)
    return part_lists.share_of(stage.peer, parts)


def _contribution(swarm: Swarm, shares: tuple[Share, ...]) -> Contribution:
    train = swarm.manifest.train
    return Contribution(replica=0, tokens=train.tokens(1, train.micro_batches), steps=1, loss=None, shares=shares)
