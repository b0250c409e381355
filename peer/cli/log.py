"""`potluck log` and `potluck me`: the log of a run, from a bootstrap node's folder or over the network."""

from __future__ import annotations

import contextlib
import functools
import json as jsons
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peer.cli import running
from peer.cli.options import Dir, coroutine, group
from peer.config import cache_folder
from peer.log import reader
from peer.net import keyfile
from peer.net.blobs import BlobStore
from peer.net.disk import Disk
from peer.node.open_run import KEY, here, parse_run, run_in
from peer.ui.contributors import contributors, own_lines, table_lines
from peer.ui.lines import decreed
from peer.ui.progress import Progress
from peer.ui.text import Names, clean, cleaned, count, number, readable, size
from protocol.errors import LocalError, UsageError
from protocol.identity import short_peer
from protocol.ledger import part_lists, schedule, standing
from protocol.ledger.credits import Credits
from protocol.ledger.standing import Standing
from protocol.planning import partition
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest
from protocol.wire import logfile
from protocol.wire.commit import Commit, Record
from protocol.wire.plan import Plan
from protocol.wire.schema import plain

if TYPE_CHECKING:
    from peer.log.reader import Source
    from peer.log.replay import ArchiveExtent, Problem, State
    from protocol.codec.topk import Empty

app = group()

Log = Annotated[
    str | None,
    typer.Argument(
        metavar="DIR|RUN",
        help="A bootstrap node's folder; or a manifest file or line, as for join (default: the run of the"
        " peer or node in this folder).",
    ),
]


@app.command("show", epilog="Example: potluck log show demo-run/bootstrap")
@coroutine
async def show(
    where: Log = None, json: Annotated[bool, typer.Option("--json", help="Print one JSON object per round.")] = False
) -> None:
    """Show a run's rounds: who contributed with what weight, bytes, norm and loss, who was left out and why."""
    async with log_of(where) as (manifest, source):
        if manifest is None:
            return _note(f"log {source.name}: has no rounds yet")
        async for line in json_lines(manifest, source) if json else lines(manifest, source):
            print(line, flush=True)


@app.command("verify", epilog="Example: potluck log verify demo-run/bootstrap")
@coroutine
async def verify(
    where: Log = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Replay from a peer's folder checkpoint-…, not from the start; all commits are still checked."
        ),
    ] = None,
) -> None:
    """Verify a run's log: every commit, and the model replayed from its payloads against what the peers attested.

    It is replayed from the oldest state whose later payloads the archive still has. One line per problem. Exit code 0:
    all is well; 1: it is not; 2: bad usage or input.
    """
    from peer.log import replay

    with Progress() as progress:
        progress.begin("looking for the log")

        def report(problem: Problem) -> None:
            progress.clear()
            print(clean(str(problem), 400), flush=True)

        async with log_of(where, progress.clear) as (manifest, source):
            if manifest is None:
                progress.clear()
                return _note(f"log {source.name}: has no rounds yet")
            empty, start, last = room_for(manifest.model), None, None
            if checkpoint is not None:
                start = replay.start_from(manifest, checkpoint, empty)
            else:
                known = await extent_of(manifest, source, progress)
                start, last = await replay.archived_state(manifest, source, known, empty), known.head
            told = following(progress, start, last)
            done = await replay.verify(manifest, source.records(), source.payload, report, start, empty, follow=told)
            if done.problems and start is not None:
                begin = (await replay.extent(manifest, source)).begin
                if begin > start.round:
                    progress.clear()
                    _note(f"the run went on, and its archive now begins after round {begin}: verify again")
    head = done.head.round if done.head else -1
    if checkpoint is not None and start is not None and start.round >= head:
        raise UsageError(
            f"checkpoint {checkpoint}: is of round {start.round}, the log ends at round {head}; give an older one"
        )
    print(
        f"run {manifest.run_id[:12]} {clean(manifest.name)}: {count(range(head + 1), 'commit')},"
        f" {count(range(done.contributions), 'contribution')}; replayed {count(range(done.payloads), 'payload')}"
        f" ({size(done.payload_bytes)}) from round {start.round if start else 0} on"
    )
    if manifest.initial_state:
        first = layout.state_digest(manifest.model, manifest.initial_digests)
        print(f"the run begins with the weights that its manifest names: state {first}")
    if checkpoint is None and start is not None and start.round:
        print(
            f"up to round {start.round} only the commits were checked: the archive begins with the state after that"
            " round, which has the log's digests"
        )
    print(f"{done.agreed} of {done.attested} digests that peers attested are those of the replay")
    if head >= 0 and set(layout.shard_names(manifest.model)) <= set(done.digests):
        print(f"state after round {head}: {layout.state_digest(manifest.model, done.digests)}")
    if done.problems:
        raise LocalError(
            f"log {source.name}: {count(done.problems, 'problem')}; compare with another node's before you build on it"
        )


@app.command(epilog="Example: potluck log credits demo-run/bootstrap")
@coroutine
async def credits(
    where: Log = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per contributor (docs/events.md).")
    ] = False,
) -> None:
    """Show who has contributed what, as the log says: tokens, share of the run, rounds, and what was left out."""
    with Progress() as progress:
        progress.begin("reading the log")
        async with log_of(where, progress.clear) as (manifest, source):
            if manifest is None:
                progress.clear()
                return _note(f"log {source.name}: has no rounds yet")
            credits, standing, _, names = await credits_of(manifest, source)
    found = contributors(credits, names, standing)
    for line in map(jsons.dumps, map(plain, found)) if json else table_lines(found, credits.round):
        print(line)


@coroutine
async def me(where: Log = None, dir: Dir = Path("potluck-peer")) -> None:
    key = dir / KEY
    if not key.is_file():
        raise UsageError(f"--dir {dir}: has no key of a peer; give the folder with which you joined")
    peer = keyfile.load_or_create(key).peer_id
    with Progress() as progress:
        progress.begin("reading the log")
        async with log_of(here(dir) if where is None else where, progress.clear) as (manifest, source):
            if manifest is None:
                raise UsageError(f"log {source.name}: has no rounds yet; ask again when the run has begun")
            credits, standing, head, names = await credits_of(manifest, source)
    rounds = schedule.last_round(manifest, head)
    for line in own_lines(contributors(credits, names, standing), peer, credits.round, rounds, names):
        print(line)
    refusal = standing.access.why_not(peer)
    if refusal is not None:
        print(f"you may not take part now: {refusal}; an operator lets you in: potluck run admit RUN {peer}")


# --- where a log is


@contextlib.asynccontextmanager
async def log_of(
    typed: str | None, before_note: Callable[[], None] = lambda: None
) -> AsyncIterator[tuple[Manifest | None, Source]]:
    """The manifest (None for an empty log) and the log that DIR or RUN names. Raises UsageError, RemoteError."""
    text = here() if typed is None else typed
    if os.path.isdir(text) and ((Path(text) / logfile.LOG).is_file() or run_in(Path(text)) is None):

        def note(text: str) -> None:
            before_note()
            _note(text)

        folder = reader.Folder(Path(text), note)
        yield await folder.manifest(), folder
        return
    run = parse_run(text)
    async with running.visiting(run) as (manifest, transport, temporary):
        nodes = list(dict.fromkeys([*run.dialled, *manifest.operators]))
        source = reader.Remote(transport, nodes, BlobStore(temporary / "blobs"))
        try:
            yield manifest, source
        finally:
            await source.aclose()


def _note(text: str) -> None:
    print(f"potluck: note: {text}", file=sys.stderr)


async def extent_of(manifest: Manifest, source: Source, progress: Progress) -> ArchiveExtent:
    """Reads the log once, with its progress. Raises what `source` raises."""
    from peer.log import replay

    progress.begin("reading the log")
    return await replay.extent(manifest, source)


def following(progress: Progress, start: State | None, last: int | None) -> Callable[[Commit], None]:
    """Begins to show the replay from `start` to the round `last` (None: unknown). Returns what has to receive its
    commits."""
    first = now = start.round if start is not None else 0

    def follow(commit: Commit) -> None:
        nonlocal now
        now = max(first, commit.round)

    if last is None:
        progress.begin("replaying the log")
    else:
        progress.begin(f"replaying {number(last - first, 'round')}", last - first, lambda: now - first)
    return follow


async def credits_of(manifest: Manifest, source: Source) -> tuple[Credits, Standing, Commit | None, Names]:
    """Credits and reputations by the log, the newest commit, and names of the peers that are present; the log has none.
    Raises LocalError, and what `source` raises."""
    credits, now, head, names = Credits(manifest.model.n_layers), standing.of(manifest), None, Names()
    async for record in reader.checked(manifest, source):
        credits.add(head := record.commit)
        now = now.after(head)
    for peer, said in (await source.said_names(manifest.run_id)).items():
        names.learn(peer, said)
    return credits, now, head, names


def room_for(spec: ModelSpec) -> Empty:
    """Allocates a model's state in memory, or in files of the cache folder if memory is too small for it."""
    from peer.training import device
    from protocol.codec.topk import in_memory

    shards = [layout.shard_bytes(spec, shard) for shard in layout.shard_names(spec)]
    if sum(shards) + max(shards) <= device.memory_budget("cpu"):
        return in_memory
    disk, folder = Disk(), cache_folder()
    disk.make_folder(folder)
    return functools.partial(disk.arrays, folder)


# --- rounds as text


async def lines(manifest: Manifest, source: Source) -> AsyncIterator[str]:
    """A log's rounds as text. Raises LocalError at an invalid commit, and what `source` raises."""
    yield f"run {manifest.run_id[:12]} {clean(manifest.name)}: log {source.name}"
    plan: Plan | None = None
    async for record in reader.checked(manifest, source):
        for line in round_lines(record, plan, schedule.last_round(manifest, record.commit)):
            yield line
        plan = record.commit.plan


async def json_lines(manifest: Manifest, source: Source) -> AsyncIterator[str]:
    """A log's records as JSON, with their commits' digests. Raises like `lines`."""
    async for record in reader.checked(manifest, source):
        yield jsons.dumps({"digest": record.commit.digest, **plain(record)})


def round_lines(record: Record, plan: Plan | None, rounds: int) -> list[str]:
    """A record as text. plan: of its round; rounds: of the run."""
    record = cleaned(record)
    commit, total = record.commit, sum(c.tokens * c.weight for c in record.commit.contributions)
    lines = [_title(record, plan)]
    for c in commit.contributions:
        own, norm = "-" if c.loss is None else f"{c.loss:.3f}", part_lists.total(share.norm for share in c.shares)
        weight = c.tokens * c.weight / total
        lines.append(
            f"  {_name(plan, c.replica):<13} weight {weight:.3f}  loss {own:>6}  steps {c.steps:<3}"
            f" {size(c.size):>8}  norm {norm:<6.3g}  {_peers(c.peers)}"
            + (f"  counts as {c.standing:.0%}" if c.standing < 1 else "")
        )
    for left in commit.left_out:
        what = "kept" if left.probation else "left out"
        spec = plan.find(left.replica) if plan is not None else None
        peers = left.peers or (spec.peers if spec is not None else ())
        lines.append(f"  {_name(plan, left.replica):<13} {what}: {readable(left.reason, {})}  {_peers(peers)}")
    for d in commit.diverged:
        than = ": the log gives other bits" if d.refuted else ""
        lines.append(f"  {'diverged':<13} {_peers((d.peer,))} in {d.shard} after round {commit.round - 1}{than}")
    for x in commit.evaluations:
        figures = f"loss {x.loss:.3f}, {x.bits_per_byte:.3f} bits per byte, {count(range(x.sequences), 'sequence')}"
        lines.append(f"  {'held out':<13} {figures}, after round {x.round}  {_peers((x.peer,))}")
        if x.sample:
            lines.append(f"  {'it writes':<13} {x.sample}")
    for said in commit.scores:
        for mark in said.marks:
            figures = f"{mark.assigned:+.5f} on its own text, {mark.other:+.5f} on other"
            lines.append(
                f"  {'scored':<13} replica {mark.replica} of round {said.round}: {figures}  {_peers((said.peer,))}"
            )
    if commit.decree is not None:
        lines.append(f"  {'decree':<13} {decreed(commit.decree.decree, {})}")
    for guest in commit.joined:
        why = f": {guest.invitation.reason}" if guest.invitation.reason else ""
        by = f"by {_peers((guest.operator,))}, invitation {_peers((guest.invitation.key,))}"
        lines.append(f"  {'invited':<13} {_peers((guest.peer,))} {by}{why}")
    if commit.plan is not None and (plan is None or _members(commit.plan) != _members(plan)):
        lines += _plan_lines(commit.plan, plan)
    elif commit.plan is None and commit.round < rounds:
        lines.append(f"  {'plan':<13} none: nobody was there to train the next round")
    return lines


def _title(record: Record, plan: Plan | None) -> str:
    commit = record.commit
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(max(commit.time, 0.0), 2.0**32)))
    title = f"round {commit.round}  {when}"
    if commit.round:
        loss = commit.loss
        title += f"  {len(commit.contributions)} of {count(plan.replicas if plan else (), 'replica')}"
        title += f"  loss {loss:.3f}" if loss is not None else ""
        title += f"  {size(sum(c.size for c in commit.contributions))}"
    if len(commit.members) > 1:
        title += f"  {len(record.votes)} votes, led by {short_peer(commit.leader)}"
    return title


def _plan_lines(plan: Plan, before: Plan | None) -> list[str]:
    """The next round's `plan`, and the blocks that move since the plan `before`."""
    chains = [r for r in plan.replicas if r.is_chain]
    lengths = f" of {', '.join(str(len(r.stages)) for r in chains)}" if chains else ""
    lines = [
        f"  {'plan':<13} {len(plan.replicas) - len(chains)} full, {count(chains, 'chain')}{lengths},"
        f" {count(plan.spares, 'spare')}" + (f", {len(plan.forming)} forming" if plan.forming else "")
    ]
    for replica, old, new in partition.moves(before, plan):
        shapes = " become ".join(" > ".join(map(str, chain.blocks)) for chain in (old, new))
        lines.append(f"  {f'{replica} moved':<13} blocks {shapes}  {_peers(new.peers)}")
    return lines


def _members(plan: Plan) -> tuple[object, ...]:
    places = [(r.number, r.stages) for r in (*plan.replicas, *plan.forming)]
    return places, len(plan.forming), plan.spares


def _name(plan: Plan | None, number: int) -> str:
    """A replica's number and its kind in the round's plan."""
    spec = plan.find(number) if plan is not None else None
    if spec is None:
        return f"{number} unplanned"
    return f"{number} chain" if spec.is_chain else f"{number} full"


def _peers(peers: Sequence[str]) -> str:
    return " > ".join(map(short_peer, peers))
