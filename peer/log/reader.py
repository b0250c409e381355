"""`potluck log`: the log of a run, read from a bootstrap node's folder or over the network, shown and verified.

A folder is only read: no lock is taken, nothing is changed or removed, a node may be writing there. Its manifest lies beside
the log, and its digest is the run's id; so a folder has all that its verification needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bootstrap import archive
from peer.events import commit_fields
from peer.log import replay
from peer.log.replay import BadPayload, Problem, State
from peer.net.base import Transport, call, short
from peer.net.blobs import BlobStore, Fetcher
from peer.state.storage import read_theta
from peer.ui.text import clean, count, mean_loss, readable, size
from protocol.errors import LocalError, RemoteError, UsageError
from protocol.planning import planner
from protocol.rounds import validation
from protocol.rounds.validation import BadCommit
from protocol.run import layout
from protocol.run import manifest as manifests
from protocol.run.manifest import Manifest
from protocol.wire import encoding, endpoints, framing
from protocol.wire.commit import Commit, Record
from protocol.wire.plan import Plan, ReplicaSpec
from protocol.wire.schema import plain
from protocol.wire.session import Ask

CALL_SECONDS = 20.0


class Source(Protocol):
    """Where a log is read. `name` is how messages name it."""

    name: str

    def records(self, note: Callable[[str], None]) -> AsyncGenerator[bytes, None]:
        """Every record, oldest first; `note` hears what a reader should know. Raises BadCommit where a record cannot be
        read, UsageError, RemoteError, LocalError."""
        ...

    async def payload(self, digest: str, size: int) -> bytes:
        """What is kept under that name. Raises BadPayload, RemoteError."""
        ...


class Folder:
    """The folder of a bootstrap node. Raises UsageError where there is no log."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder / "log")
        self._folder = folder
        if not (folder / "log").is_file():
            raise UsageError(f"directory {folder}: has no log; give the folder (--dir) of a bootstrap node, or RUN")

    async def records(self, note: Callable[[str], None]) -> AsyncGenerator[bytes, None]:
        path, end = self._folder / "log", 0
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                for at, raw in archive.records(file, path):
                    end = at + archive.HEAD_BYTES + len(raw)
                    yield raw
                if end < size:
                    note(
                        f"after byte {end} there is a record that is not whole: a crash cut it off, or it is being written"
                    )
        except archive.Damaged as error:
            raise BadCommit(f"cannot be read: its record at byte {error.at} is damaged") from None
        except OSError as error:
            raise UsageError(f"log {path}: {error.strerror}; give a folder that can be read") from None

    async def payload(self, digest: str, size: int) -> bytes:
        try:
            return await asyncio.to_thread((self._folder / "blobs" / _hex(digest)).read_bytes)
        except OSError as error:
            raise BadPayload(f"not in {self._folder / 'blobs'} ({error.strerror})") from None

    async def manifest(self) -> Manifest | None:
        """The run's manifest, None for an empty log. Raises UsageError."""
        try:
            async with contextlib.aclosing(self.records(lambda text: None)) as log:
                raw = await anext(log, None)
            if raw is None:
                return None
            run = encoding.decode_record(raw, "the log").commit.run
        except (BadCommit, RemoteError) as error:
            raise LocalError(f"log {self.name}: round 0: the commit {error}; compare with another node's") from None
        path = self._folder / archive.MANIFEST
        with contextlib.suppress(OSError):
            manifest = manifests.from_bytes(await asyncio.to_thread(path.read_bytes), str(path))
            if manifest.run_id == run:
                return manifest
        raise UsageError(
            f"directory {self._folder}: {path.name} is not the manifest of run {clean(run, 12)}; start its bootstrap node"
            " once, or ask the node over the network"
        )


def _hex(text: str) -> str:
    """`text` if it can be the name of a blob: a stranger's may lead out of the folder."""
    return text if len(text) == 64 and set(text) <= set("0123456789abcdef") else "none"


class Remote:
    """The bootstrap nodes of a run, whichever answers. Payloads pass through `store`."""

    def __init__(self, transport: Transport, nodes: Sequence[str], store: BlobStore) -> None:
        self.name = f"of {', '.join(map(short, nodes))}"
        self._transport = transport
        self._nodes = nodes
        self._store = store
        self._fetcher = Fetcher(transport, store)

    async def records(self, note: Callable[[str], None]) -> AsyncGenerator[bytes, None]:
        known = 0
        while page := await self._page(known - 1):
            for raw in page:
                known += 1
                yield raw

    async def _page(self, after: int) -> list[bytes]:
        failure: RemoteError | None = None
        for node in self._nodes:
            try:
                ask = encoding.encode(Ask(after=after))
                page = framing.unpack_message(
                    await call(self._transport, node, endpoints.LOG, ask, timeout=CALL_SECONDS)
                )
            except RemoteError as error:
                failure = error
            except framing.FrameError as error:
                failure = RemoteError(node, f"log of {short(node)}: {error}; ask another bootstrap node")
            else:
                if isinstance(page, list) and all(isinstance(raw, bytes) for raw in page):
                    return page
                failure = RemoteError(node, f"log of {short(node)}: not a list of commits; ask another bootstrap node")
        assert failure is not None
        raise failure

    async def payload(self, digest: str, size: int) -> bytes:
        await self._fetcher.fetch(digest, size, self._nodes)
        data = await asyncio.to_thread(self._store.get, digest)
        self._store.remove(digest)
        if data is None:
            raise BadPayload("its file was removed while it was read")
        return data

    async def aclose(self) -> None:
        """Ends what is under way."""
        await self._fetcher.aclose()


# --- show


async def show(manifest: Manifest, source: Source, out: Callable[[str], None], note: Callable[[str], None]) -> None:
    """Tells the rounds as a person wants them. Raises what `source` raises, LocalError at a commit that is not to be believed."""
    out(f"run {manifest.run_id[:12]} {clean(manifest.name)}: log {source.name}")
    plan: Plan | None = None
    async for record in _believed(manifest, source, note):
        for line in round_lines(record, plan, manifest.rounds):
            out(line)
        plan = record.commit.plan


async def show_json(
    manifest: Manifest, source: Source, out: Callable[[dict[str, Any]], None], note: Callable[[str], None]
) -> None:
    """Tells one map per round. Raises like `show`."""
    plan: Plan | None = None
    async for record in _believed(manifest, source, note):
        out(round_fields(record, plan))
        plan = record.commit.plan


async def _believed(manifest: Manifest, source: Source, note: Callable[[str], None]) -> AsyncIterator[Record]:
    before: Commit | None = None
    try:
        async for raw in source.records(note):
            record = validation.follow(manifest, before, raw)
            yield record
            before = record.commit
    except BadCommit as error:
        round = 0 if before is None else before.round + 1
        raise LocalError(f"log {source.name}: round {round}: the commit {error}; compare with another node's") from None


def round_fields(record: Record, plan: Plan | None) -> dict[str, Any]:
    """A record as plain data; `plan` is that of its round. Adds to a `commit` event (peer/events.py) the digests, who proposed,
    voted and votes next, and who the replicas were: kind, k, peers, weight in the mean, and norm of the whole update."""
    commit = record.commit
    fields = commit_fields(commit)
    total = sum(c.tokens for c in commit.contributions)
    for shown, made in zip(fields["contributions"], commit.contributions, strict=True):
        norm = math.sqrt(math.fsum(part.norm**2 for share in made.shares for part in share.parts))
        shown |= {"weight": made.tokens / total, "norm": norm, **_replica(plan, made.replica), "peers": shown["peers"]}
    for shown in fields["left_out"]:
        shown |= _replica(plan, shown["replica"])
    head = {"run": commit.run, "time": commit.time, "digest": commit.digest, "parent": commit.parent}
    decided = {"leader": commit.leader, "ballot": record.ballot, "voters": sorted(record.votes)}
    return {**head, **decided, **fields, "digests": plain(commit.digests), "members": list(commit.members)}


def _replica(plan: Plan | None, index: int) -> dict[str, Any]:
    if plan is None or not 0 <= index < len(plan.replicas):
        return {"kind": "unplanned", "k": None, "peers": []}
    spec = plan.replicas[index]
    return {"kind": _kind(spec), "k": spec.k, "peers": list(spec.peers)}


def _kind(spec: ReplicaSpec) -> str:
    return "full" if len(spec.stages) == 1 else "chain"


def round_lines(record: Record, plan: Plan | None, rounds: int) -> list[str]:
    """A record of a run of `rounds` rounds in a few lines; `plan` is that of its round."""
    commit, fields = record.commit, round_fields(record, plan)
    made, left = fields["contributions"], fields["left_out"]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(max(commit.time, 0.0), 2.0**32)))
    title = f"round {commit.round}  {when}"
    if commit.round:
        loss = mean_loss(made)
        title += f"  {len(made)} of {count(plan.replicas if plan else (), 'replica')}"
        title += f"  loss {loss:.3f}" if loss is not None else ""
        title += f"  {size(sum(c['bytes'] for c in made))}"
    if len(commit.members) > 1:
        title += f"  {len(record.votes)} votes, led by {short(commit.leader)}"
    lines = [title]
    for c in made:
        own = "-" if c["loss"] is None else f"{c['loss']:.3f}"
        lines.append(
            f"  {_name(c):<13} weight {c['weight']:.3f}  loss {own:>6}  steps {c['steps']:<3} {size(c['bytes']):>8}"
            f"  norm {c['norm']:<6.3g}  {_peers(c)}"
        )
    for c in left:
        lines.append(f"  {_name(c):<13} left out: {readable(c['reason'], {})}  {_peers(c)}")
    for d in fields["diverged"]:
        lines.append(f"  diverged      {short(clean(d['peer']))} in {clean(d['shard'])} after round {commit.round - 1}")
    if commit.plan is not None and (plan is None or _who(commit.plan) != _who(plan)):
        chains = [r for r in commit.plan.replicas if _kind(r) == "chain"]
        full = len(commit.plan.replicas) - len(chains)
        lengths = f" of {', '.join(str(len(r.stages)) for r in chains)}" if chains else ""
        lines.append(
            f"  {'plan':<13} {full} full, {len(chains)} chain{'' if len(chains) == 1 else 's'}{lengths},"
            f" {count(commit.plan.spares, 'spare')}"
        )
        for replica, before, after in planner.moves(plan, commit.plan):
            shapes = (" > ".join(map(str, chain.blocks)) for chain in (before, after))
            lines.append(
                f"  {f'{replica} moved':<13} blocks {' become '.join(shapes)}  {_peers({'peers': after.peers})}"
            )
    elif commit.plan is None and commit.round < rounds:
        lines.append(f"  {'plan':<13} none: nobody was there to train the next round")
    return lines


def _who(plan: Plan) -> tuple[object, ...]:
    return plan.replicas, plan.spares


def _name(replica: dict[str, Any]) -> str:
    return f"{replica['replica']} {replica['kind']}" + (f" k {replica['k']}" if replica["kind"] == "chain" else "")


def _peers(replica: dict[str, Any]) -> str:
    return " > ".join(short(clean(peer)) for peer in replica["peers"])


# --- verify


def start_from(manifest: Manifest, folder: Path) -> State:
    """The state in a peer's checkpoint. Raises UsageError where it is not one of the run's model."""
    round, theta = read_theta(folder)
    names = layout.shard_names(manifest.model)
    for shard, arrays in theta.items():
        fits = shard in names and tuple(a.shape for a in arrays) == layout.shapes(manifest.model, shard)
        if not fits or any(a.dtype != np.float32 for a in arrays):
            raise UsageError(f"checkpoint {folder}: {clean(shard)} is not of the run's model; give one of this run")
    return State(round, theta, {})


async def verify(
    manifest: Manifest, source: Source, checkpoint: Path | None, out: Callable[[str], None], note: Callable[[str], None]
) -> None:
    """Says all that is wrong with a log, and what it proves. Raises LocalError when something is wrong."""
    start = start_from(manifest, checkpoint) if checkpoint else None

    def report(problem: Problem) -> None:
        out(clean(str(problem), 400))

    done = await replay.verify(manifest, source.records(note), source.payload, report, start)
    head = done.head.round if done.head else -1
    if start is not None and start.round >= head:
        raise UsageError(
            f"checkpoint {checkpoint}: is of round {start.round}, the log ends at round {head}; give an older one"
        )
    out(
        f"run {manifest.run_id[:12]} {clean(manifest.name)}: {count(range(head + 1), 'commit')},"
        f" {count(range(done.contributions), 'contribution')}; replayed {count(range(done.payloads), 'payload')}"
        f" ({size(done.payload_bytes)}) from round {start.round if start else 0} on"
    )
    out(f"{done.agreed} of {done.attested} attested digests of shards are what the replay gives")
    names = layout.shard_names(manifest.model)
    if head >= 0 and set(names) <= set(done.digests):
        out(f"state after round {head}: {layout.state_digest(manifest.model, done.digests)}")
    if done.problems:
        raise LocalError(
            f"log {source.name}: {count(done.problems, 'problem')}; compare with another node's before you build on it"
        )
