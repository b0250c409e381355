"""Logs of many rounds, as a run's one node would have written them: signed, each commit after the one before it, with a
plan and the work of as many replicas as are wanted. No payload of theirs exists: a peer that starts with the
last state needs none, and they are too large for a start with the first one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from protocol.identity import Identity
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire import encoding, logfile
from protocol.wire.commit import Commit, Contribution, Record, Share, body_of
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec, Work


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _plan(manifest: Manifest, round: int, peers: tuple[str, ...], numbers: int) -> Plan:
    work = Work(slot=round * len(peers), steps=manifest.train.inner_steps, micro_batches=manifest.train.micro_batches)
    stages = [(StageSpec(peer=peer, first=0, last=manifest.model.n_layers),) for peer in peers]
    replicas = tuple(ReplicaSpec(number=i, stages=s, work=work) for i, s in enumerate(stages))
    return Plan(round=round, replicas=replicas, next_number=numbers)


def _contributions(manifest: Manifest, round: int, peers: tuple[str, ...]) -> tuple[Contribution, ...]:
    train, size = manifest.train, 4 * layout.total_parameters(manifest.model)
    tokens = train.tokens(train.inner_steps, train.micro_batches)
    return tuple(
        Contribution(
            replica=i,
            tokens=tokens,
            steps=train.inner_steps,
            loss=4.0,
            shares=(Share(peer=peer, root=_digest(f"{round} {i}"), size=size, norm=1.0, listed=300),),
        )
        for i, peer in enumerate(peers)
    )


def commits(manifest: Manifest, rounds: int, peers: tuple[str, ...]) -> Iterator[Commit]:
    """Those of the rounds 0 to `rounds`, in which all of `peers` train; the last one plans the first of them alone."""
    parent, shards = manifest.run_id, layout.shard_names(manifest.model)
    for round in range(rounds + 1):
        commit = Commit(
            run=manifest.run_id, round=round, parent=parent, time=1.7e9 + 0.5 * round,
            contributions=_contributions(manifest, round, peers) if round else (), left_out=(), diverged=(),
            digests={shard: _digest(f"{shard} after {round - 1}") for shard in shards} if round > 1 else {},
            plan=_plan(manifest, round + 1, peers[:1] if round == rounds else peers, len(peers)),
            leader=manifest.operators[0], members=manifest.first_members,
        )  # fmt: skip
        yield commit
        parent = commit.digest


def records(log: Iterator[Commit], *signers: Identity) -> Iterator[Record]:
    """The commits with the votes of these."""
    for commit in log:
        body = body_of(commit, 0)
        yield Record(commit=commit, ballot=0, votes={key.peer_id: key.sign(body) for key in signers})


def write(folder: Path, manifest: Manifest, log: Iterator[Record]) -> None:
    """What a node has in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / logfile.MANIFEST).write_bytes(manifest.to_bytes())
    with open(folder / logfile.LOG, "wb") as file:
        for record in log:
            file.write(logfile.pack(encoding.encode_record(record)))
