"""`potluck log`: the log of a run, from a bootstrap node's folder or over the network."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peer.cli import running
from peer.cli.options import Dir, group
from peer.config import cache_folder
from peer.log import reader
from peer.net import keyfile
from peer.net.blobs import BlobStore
from peer.net.disk import Disk
from peer.node.open_run import KEY, Door, here, manifest_of, parse_run, run_in, start_transport
from peer.ui import log_text
from peer.ui.contributors import contributors, own_lines, table_lines
from peer.ui.names import Names
from protocol.errors import UsageError
from protocol.ledger import schedule
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest
from protocol.wire import logfile
from protocol.wire.schema import plain

if TYPE_CHECKING:
    from peer.log.reader import Source
    from protocol.codec.topk import Empty

app = group()

Log = Annotated[
    str | None,
    typer.Argument(
        metavar="DIR|RUN",
        help="A bootstrap node's folder; or a manifest file or one-line address, as for join (default: the run of the peer or node in this"
        " folder).",
        show_default=False,
    ),
]


@app.command("show", epilog="Example: potluck log show demo-run/bootstrap")
def show(
    where: Log = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per round.")] = False,
) -> None:
    """Show a run's rounds: who contributed with what weight, bytes, norm and loss, who was left out and why."""

    running.run(_show(where, json), interrupted=1)


@app.command("verify", epilog="Example: potluck log verify demo-run/bootstrap")
def verify(
    where: Log = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Replay from a peer's folder checkpoint-…, not from the start; all commits are still checked."
        ),
    ] = None,
) -> None:
    """Verify a run's log: every commit, and the model replayed from its payloads against what the peers attested.

    One line per problem. Exit code 0: all is well; 1: it is not; 2: bad usage or input.
    """

    running.run(_verify(where, checkpoint), interrupted=1)


@app.command(epilog="Example: potluck log credits demo-run/bootstrap")
def credits(
    where: Log = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per contributor (docs/events.md).")
    ] = False,
) -> None:
    """Show who has contributed what, as the log says: tokens, share of the run, rounds, and what was left out."""

    running.run(_credits(where, json), interrupted=1)


def me(where: Log = None, dir: Dir = Path("potluck-peer")) -> None:
    """See how much of a run is yours: tokens, share, rank, rounds, and what was left out and why."""

    running.run(_me(where, dir))


@contextlib.asynccontextmanager
async def log_of(typed: str | None) -> AsyncIterator[tuple[Manifest | None, Source]]:
    """The manifest (None for a log without commits) and the log that DIR or RUN names. Raises UsageError, RemoteError."""
    import tempfile

    text = here() if typed is None else typed
    if os.path.isdir(text) and ((Path(text) / logfile.LOG).is_file() or run_in(Path(text)) is None):
        folder = reader.Folder(Path(text))
        yield await folder.manifest(), folder
        return
    run = parse_run(text)
    with tempfile.TemporaryDirectory(prefix="potluck-log-") as name:
        transport = await start_transport(Path(name), Door(host="127.0.0.1"), run.run_id)
        try:
            manifest = await manifest_of(run, transport)
            nodes = list(dict.fromkeys([*run.dialled, *manifest.operators]))
            source = reader.Remote(transport, nodes, BlobStore(Path(name) / "blobs"))
            try:
                yield manifest, source
            finally:
                await source.aclose()
        finally:
            await transport.aclose()


def _note(text: str) -> None:
    print(f"potluck: note: {text}", file=sys.stderr)


def _say(text: str) -> None:
    print(text, flush=True)


async def _show(text: str | None, json: bool) -> None:
    """`potluck log show`."""
    import json as jsons

    async with log_of(text) as (manifest, source):
        if manifest is None:
            _note(f"log {source.name}: has no rounds yet")
        elif json:
            await log_text.show_json(manifest, source, lambda fields: _say(jsons.dumps(fields)), _note)
        else:
            await log_text.show(manifest, source, _say, _note)


async def _verify(text: str | None, checkpoint: Path | None) -> None:
    """`potluck log verify`."""

    async with log_of(text) as (manifest, source):
        if manifest is None:
            _note(f"log {source.name}: has no rounds yet")
        else:
            await log_text.verify(manifest, source, checkpoint, _say, _note, room_for(manifest.model))


async def _credits(text: str | None, json: bool) -> None:
    """`potluck log credits`."""
    import json as jsons

    async with log_of(text) as (manifest, source):
        if manifest is None:
            _note(f"log {source.name}: has no rounds yet")
            return
        credits, standing, _ = await log_text.credits_of(manifest, source, _note)
        names = await _names(manifest, source)
    found = contributors(credits, names, standing)
    for line in map(jsons.dumps, map(plain, found)) if json else table_lines(found, credits.round):
        _say(line)


async def _names(manifest: Manifest, source: Source) -> Names:
    """How the peers that are there are called; a name is not in the log."""
    names = Names()
    for peer, said in (await source.said_names(manifest.run_id)).items():
        names.learn(peer, said)
    return names


async def _me(where: str | None, folder: Path) -> None:
    """`potluck me`."""
    key = folder / KEY
    if not key.is_file():
        raise UsageError(f"--dir {folder}: has no key of a peer; give the folder with which you joined")
    peer = keyfile.load_or_create(key).peer_id
    async with log_of(here(folder) if where is None else where) as (manifest, source):
        if manifest is None:
            raise UsageError(f"log {source.name}: has no rounds yet; ask again when the run has begun")
        credits, standing, head = await log_text.credits_of(manifest, source, _note)
        names = await _names(manifest, source)
    rounds = schedule.last_round(manifest, head)
    for line in own_lines(contributors(credits, names, standing), peer, credits.round, rounds, names):
        _say(line)
    kept_out = standing.access.why_not(peer)
    if kept_out is not None:
        _say(f"you may not take part now: {kept_out}; an operator lets you in: potluck run admit RUN {peer}")


def room_for(spec: ModelSpec) -> Empty:
    """Makes the arrays of a model's state: in memory, or in files of the cache folder where that is not enough for the model and for
    the next state of a shard."""
    from peer.training import device
    from protocol.codec.topk import in_memory

    shards = [layout.shard_bytes(spec, shard) for shard in layout.shard_names(spec)]
    if sum(shards) + max(shards) <= device.memory_budget("cpu"):
        return in_memory
    disk, folder = Disk(), cache_folder()
    disk.make_folder(folder)
    return functools.partial(disk.arrays, folder)
