"""`potluck export`: releases the model of a run, as a folder with a model card, and to the hub."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from peer.cli import hub, running
from peer.cli.log import Log, room_for
from peer.cli.model import Checkpoints, Choice, Replayed, Round, checkpoints_in, opened, own_model, replay_of
from peer.cli.options import require_license, with_options
from peer.net import processes
from peer.net.address import host_of, is_public
from peer.net.disk import Disk
from peer.node.open_run import NobodyThere, parse_run, run_in
from peer.ui.model_card import UNKNOWN, Card, History
from peer.ui.progress import Progress
from peer.ui.text import clean, size, typed
from protocol.errors import LocalError, UsageError
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest
from protocol.run.short_line import join_line


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """The options of `potluck export`."""

    where: Log = None
    out: Annotated[Path | None, typer.Option(help="Folder for the model; must not exist yet.")] = None
    round: Round = None
    checkpoint: Checkpoints = None
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Write model.gguf, too, for llama.cpp and what is built on it.")
    ] = False
    license: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The model's licence, for its card, such as apache-2.0 (default: the manifest's)."
        ),
    ] = ""
    push: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Upload the folder to this repository of the Hugging Face hub."),
    ] = None


async def _export(options: ExportOptions) -> None:
    from peer.log import gguf_file

    require_license(options.license)
    if options.push is not None:
        hub.require(options.push)
    if options.gguf:
        gguf_file.require_library()
    choice = Choice.typed(options.where, options.round, options.checkpoint)
    with Progress() as progress:
        folder = choice.exported
        lines = await _write(choice, options, progress) if folder is None else _complete(folder, options, progress)
    out = options.out if folder is None else folder
    assert out is not None
    for line in lines:
        print(line, flush=True)
    if options.push is not None:
        print(f"on the hub: {await _push(out, options.push)}")
        return
    print(f"use it: potluck sample {typed(out)} --interactive, or in Python")
    print(f"    transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})")
    print(f"publish it: look through {out / 'README.md'}, then potluck export {typed(out)} --push OWNER/NAME")


command = with_options(ExportOptions, lambda options, _: running.run(_export(options), interrupted=1))


# --- a new folder


async def _write(choice: Choice, options: ExportOptions, progress: Progress) -> list[str]:
    """Writes the folder. Returns what it is, as text. Raises UsageError, LocalError, RemoteError."""
    from peer.log import export

    out = options.out
    if out is None:
        raise UsageError("--out: is missing; give a folder for the model, which must not exist yet")
    if out.exists():
        raise UsageError(f"--out {out}: is there already; choose another folder")
    found, history = await _found(choice, options, progress)
    manifest, spec = found.manifest, found.manifest.model
    digest = layout.state_digest(spec, found.state.digests)
    card = Card(
        manifest=manifest,
        round=found.state.round,
        state=digest,
        is_checked=found.is_checked,
        address=public_line(manifest, choice.where) if history is None or history.is_open else "",
        licence=options.license or manifest.license or UNKNOWN,
        history=history,
    )
    _show_writing(progress, spec, options.gguf, lambda: _bytes_in(export.part_of(out)))
    disk = Disk()
    await asyncio.to_thread(export.write, manifest, found.state, found.tokenizer, out, disk, card.files(), options.gguf)
    unchecked = "as a peer's checkpoint has it; no log has confirmed it"
    by = "as the log gives it" if found.is_checked else unchecked
    unknown = "" if options.license or manifest.license else " (--license names the licence)"
    names = ", ".join(f"{name} ({size(disk.stat(out / name)[0])})" for name in disk.names(out))
    return [
        f"{out}: the model of {clean(manifest.name)} after round {found.state.round}, state {digest[:12]}…, {by}",
        f"files: {names}{unknown}",
    ]


async def _found(choice: Choice, options: ExportOptions, progress: Progress) -> tuple[Replayed, History | None]:
    """The model by the log, and what that tells of it. From a full replica's folder whose run has no node any more: its
    own checkpoint, and nothing else. Raises UsageError, LocalError, RemoteError."""
    own = [] if choice.checkpoints else checkpoints_in(Path(choice.where))
    try:
        if not own or run_in(Path(choice.where)) is not None:
            async with opened(choice, progress) as (manifest, source):
                tokenizer, history = await source.tokenizer(manifest), History(manifest, choice.round)
                _require_gguf(options, manifest.model, tokenizer)
                found = await replay_of(choice, manifest, source, tokenizer, progress, history.add)
                for peer, said in (await source.said_names(manifest.run_id)).items():
                    history.names.learn(peer, said)
                return found, history
    except NobodyThere as error:
        if not own:
            raise
        progress.clear()
        print(f"potluck: note: {error}; what follows is this peer's own checkpoint", file=sys.stderr)
    found = await own_model(choice, progress)
    _require_gguf(options, found.manifest.model, found.tokenizer)
    for shard, arrays in found.state.theta.items():
        found.state.digests[shard] = await asyncio.to_thread(layout.shard_digest, arrays)
    return found, None


def _require_gguf(options: ExportOptions, spec: ModelSpec, tokenizer: bytes) -> None:
    from peer.log import gguf_file

    if options.gguf:
        gguf_file.check(spec, tokenizer)


def public_line(manifest: Manifest, where: str) -> str:
    """The run's line, without an invitation, if it may be published: of an open run, on the internet; else empty."""
    if not manifest.admission.is_open:
        return ""
    known = (*manifest.hints.bootstrap, *(parse_run(where).bootstrap if "/p2p/" in where else ()))
    public = next((address for address in known if is_public(host_of(address)) or address.startswith("/dns")), None)
    return "" if public is None else join_line(manifest.name, public, manifest.run_id)


# --- one that is there


def _complete(folder: Path, options: ExportOptions, progress: Progress) -> list[str]:
    """Adds what is asked for to a folder of `potluck export`. Returns that as text. Raises UsageError."""
    from peer.log import export, gguf_file

    if options.out is not None or options.round is not None or options.checkpoint or options.license:
        raise UsageError(f"model {folder}: is an export already; give it with --gguf or --push alone")
    if not options.gguf and options.push is None:
        raise UsageError(f"model {folder}: is an export already; give --gguf or --push, or a run")
    if not options.gguf:
        return []
    disk = Disk()
    progress.begin("reading the model")
    found = export.read(folder, disk, room_for)
    progress.begin("writing the model")
    export.add_gguf(folder, found, disk)
    return [f"{folder / gguf_file.GGUF}: {size(disk.stat(folder / gguf_file.GGUF)[0])}"]


def _show_writing(progress: Progress, spec: ModelSpec, with_gguf: bool, written: Callable[[], int]) -> None:
    total = 4 * layout.total_parameters(spec) * (1 + with_gguf)
    progress.begin(f"writing {size(total)}", total, written)


def _bytes_in(folder: Path) -> int:
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder))
    except OSError:  # it is not there yet, or not any more
        return 0


# --- the hub


async def _push(folder: Path, repo: str) -> str:
    """Uploads the folder in a process of its own, which Ctrl-C ends at once. Returns the commit's address. Raises
    LocalError; then the repository has no new file."""
    quiet = {} if sys.stderr.isatty() else {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", hub.__name__, str(folder), repo),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"HF_HUB_VERBOSITY": "error"} | quiet,
    )
    try:
        out, _ = await process.communicate()
    except asyncio.CancelledError:
        processes.send_signal(process, signal.SIGKILL)
        await process.wait()
        raise
    said = clean(out.decode(errors="replace").strip() or f"it ended with exit code {process.returncode}", 400)
    if process.returncode:
        again = typed("potluck", "export", folder, "--push", repo)
        raise LocalError(f"--push {repo}: {said}; {folder} is whole, type {again} to try again")
    return said
