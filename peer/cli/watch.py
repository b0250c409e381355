"""`potluck monitor`: shows a run or a recording on a terminal, as JSON, to browsers, to Prometheus and to trackers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs

import typer

from peer.cli import running
from peer.cli.options import with_options
from peer.events import Event, Sink
from peer.log import reader
from peer.net import keyfile, processes
from peer.node.open_run import KEY, here, parse_run, read_manifest
from peer.ui import metrics, trackers, web
from peer.ui.monitor import Monitor, Replay
from peer.ui.monitor_screen import MonitorScreen
from peer.ui.run_view import SILENT_SECONDS
from peer.ui.state import to_json
from peer.ui.text import clean, harmless
from peer.ui.trackers import Tracker, with_rounds
from protocol.errors import UsageError
from protocol.run.manifest import Manifest

CHANGE_SECONDS = 1.0
JSON = "application/json"
SAMPLE_CHARACTERS, SAMPLE_TOKENS, SAMPLE_SECONDS = 500, 80, 60.0
"""The most of a visitor's text, of its continuation, and of the time for it."""
SAMPLE_SHARE = 1 / 4
"""Of the time the machine writes for visitors at most, however many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """The options of `potluck monitor`."""

    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A manifest file, or the line that a bootstrap node prints (default: the run of the peer"
            " or node in this folder).",
        ),
    ] = None
    once: Annotated[bool, typer.Option("--once", help="Print one picture and leave.")] = False
    json: Annotated[
        bool, typer.Option("--json", help="Print the state as a line of JSON at every change; with --once, one line.")
    ] = False
    web: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT", help="Serve a page with charts to browsers (default: of this machine only)."
        ),
    ] = None
    sample: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --web: let visitors of the page have texts continued, on this machine, one at a time; DIR as for"
            " potluck sample.",
        ),
    ] = None
    metrics: Annotated[
        str | None, typer.Option(metavar="[HOST:]PORT", help="Serve the main figures to Prometheus, under /metrics.")
    ] = None
    csv: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a row for each round, from the first on; go on with a file of before."
        ),
    ] = None
    tensorboard: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the rounds for TensorBoard, into the run's folder in DIR, likewise."),
    ] = None
    wandb: Annotated[
        str | None,
        typer.Option(
            metavar="PROJECT",
            help="Log the rounds to a project of Weights & Biases, likewise; with WANDB_MODE=offline into ./wandb.",
        ),
    ] = None
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Show a recorded run: a file of events, or a bootstrap node's log; RUN is its manifest.",
        ),
    ] = None
    dir: Annotated[Path, typer.Option("--dir", help="Your peer's folder, for the view of your own part.")] = Path(
        "potluck-peer"
    )


command = with_options(WatchOptions, lambda options, _: running.run(_monitor(options)))


EventSource = Monitor | Replay


async def _monitor(options: WatchOptions) -> None:
    if options.once and (options.web or options.metrics):
        raise UsageError("--once: leaves at once; give it without --web and --metrics")
    where = {
        option: web.read_where(text, option)
        for option, text in (("--web", options.web), ("--metrics", options.metrics))
        if text is not None
    }
    if options.sample is not None and (options.web is None or not options.sample.is_dir()):
        reason = (
            "is of the page; give it with --web" if options.web is None else "no such folder; give a peer's or node's"
        )
        raise UsageError(f"--sample {options.sample}: {reason}")
    for package, given in (("tensorboard", options.tensorboard), ("wandb", options.wandb)):
        if given is not None:
            trackers.require(package)
    with contextlib.suppress(asyncio.CancelledError):
        async with _opened(options) as (manifest, source):
            with _trackers(options, manifest) as kept:
                if options.once:
                    await _once(options, manifest, source, kept)
                else:
                    await _watch(options, manifest, source, where, kept)


@contextlib.asynccontextmanager
async def _opened(options: WatchOptions) -> AsyncIterator[tuple[Manifest, EventSource]]:
    """The run or the recording, and its manifest. Raises UsageError, RemoteError."""
    text = here(options.dir) if options.run is None else options.run
    if options.replay is not None:
        path = Path(text)
        manifest = await reader.Folder(path).manifest() if path.is_dir() else read_manifest(path)
        if manifest is None:
            raise UsageError(f"log in {path}: has no rounds yet; give the run's manifest")
        yield manifest, Replay(manifest, options.replay)
        return
    run = parse_run(text)
    async with running.visiting(run, sparing=True) as (manifest, transport, _):
        yield manifest, Monitor(manifest, transport, bootstrap=run.bootstrap)


@contextlib.contextmanager
def _trackers(options: WatchOptions, manifest: Manifest) -> Iterator[Sequence[Tracker]]:
    """The chosen ones, until the end of the block. Raises UsageError."""
    kept: list[Tracker] = []
    try:
        if options.csv is not None:
            kept.append(trackers.Csv(options.csv, manifest))
        if options.tensorboard is not None:
            kept.append(trackers.TensorBoard(options.tensorboard, manifest))
        if options.wandb is not None:
            kept.append(trackers.Wandb(options.wandb, manifest))
        yield kept
    finally:
        for tracker in kept:
            tracker.close()


async def _once(options: WatchOptions, manifest: Manifest, source: EventSource, kept: Sequence[Tracker]) -> None:
    screen = MonitorScreen(manifest, news_age=lambda: source.news_age, join_line=lambda: source.join_line)
    await source.poll(with_rounds(screen.take, screen.view, kept))
    if options.json:
        print(to_json(screen.state()))
    else:
        screen.console.print(screen.frame(screen.console.size.height - 1))  # the prompt takes a line


async def _watch(
    options: WatchOptions,
    manifest: Manifest,
    source: EventSource,
    where: dict[str, tuple[str, int]],
    kept: Sequence[Tracker],
) -> None:
    enough, loop = asyncio.Event(), asyncio.get_running_loop()

    def leave() -> None:
        loop.call_soon_threadsafe(enough.set)

    key = options.dir / KEY
    me = keyfile.load_or_create(key).peer_id if key.is_file() else None
    screen = MonitorScreen(
        manifest, leave=leave, me=me, news_age=lambda: source.news_age, join_line=lambda: source.join_line
    )
    with contextlib.ExitStack() as stack:
        for server in _servers(screen, where, options.sample):
            stack.enter_context(server)
            for path, what in ("", "the page"), ("metrics", "figures for Prometheus"):
                if f"/{path}" in server.paths:
                    screen.say(f"{what}: {server.url}{path}")
        if not options.json:
            stack.enter_context(screen)
        sink = with_rounds(screen.take if options.json else screen.feed, screen.view, kept)
        work = asyncio.ensure_future(_print_changes(source, screen, sink) if options.json else source.follow(sink))
        left = asyncio.ensure_future(enough.wait())
        try:
            await asyncio.wait([work, left], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                if where or (options.replay is not None and screen.browsing is not None):
                    await left
        finally:
            work.cancel()
            left.cancel()


def _servers(screen: MonitorScreen, where: dict[str, tuple[str, int]], folder: Path | None) -> list[web.Server]:
    """A server for each address. where: addresses by option; folder: of `--sample`. Raises UsageError if an address
    cannot be used."""
    paths: dict[tuple[str, int], web.Paths] = {}
    if "--web" in where:
        sample = None if folder is None else Sampler(folder, screen.say)
        paths[where["--web"]] = web.site(screen.state, screen.version, sample)
    if "--metrics" in where:
        figures = web.CachedAnswer(metrics.KIND, lambda: metrics.exposition(screen.state()), screen.version)
        paths[where["--metrics"]] = {**paths.get(where["--metrics"], {}), "/metrics": figures}
    return [web.Server(address, served) for address, served in paths.items()]


class Sampler:
    """Continues a visitor's text by `potluck sample`: one text at a time, in at most SAMPLE_SHARE of the time, by the
    newest model in `folder`. tell: takes what `potluck sample` says when it fails."""

    def __init__(self, folder: Path, tell: Callable[[str, str], None]) -> None:
        self._folder, self._tell = folder, tell
        self._lock, self._free_at = threading.Lock(), 0.0

    def __call__(self, query: str) -> web.Answer:
        text = parse_qs(query, errors="replace").get("text", [""])[0][:SAMPLE_CHARACTERS].replace("\0", "")
        if not self._lock.acquire(blocking=False):
            return _refused("It writes for another visitor just now; try again in a moment.")
        try:
            began = time.monotonic()
            if began < self._free_at:
                return _refused(f"It rests for {math.ceil(self._free_at - began)} s; try again then.")
            written = self._continued(text)
            ended = time.monotonic()
            self._free_at = ended + (ended - began) * (1 / SAMPLE_SHARE - 1)
        finally:
            self._lock.release()
        if written is None:
            return _refused("The model cannot write just now; try again later.")
        return web.answer(JSON, json.dumps({"written": written.removeprefix(harmless(text)).rstrip("\n")}))

    def _continued(self, text: str) -> str | None:
        command = [*processes.own_group_command(), sys.executable, "-m", "peer.cli", "sample", str(self._folder)]
        try:
            done = subprocess.run(
                [*command, f"--prompt={text}", f"--tokens={SAMPLE_TOKENS}"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=SAMPLE_SECONDS,
                encoding="utf-8",
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            self._tell(f"--sample {self._folder}: a text took over {SAMPLE_SECONDS:.0f} s", "warning")
            return None
        if done.returncode:
            self._tell(f"--sample {self._folder}: {clean(done.stderr.strip().rpartition(chr(10))[2])}", "warning")
            return None
        return done.stdout


def _refused(reason: str) -> web.Answer:
    return web.answer(JSON, json.dumps({"refused": reason}), status=503)


async def _print_changes(source: EventSource, screen: MonitorScreen, sink: Sink) -> None:
    """Prints the state after changes, once in CHANGE_SECONDS at most; once in SILENT_SECONDS while no node answers.

    sink: feeds the screen.
    """
    changed, silence = False, 0.0

    def take(event: Event) -> None:
        nonlocal changed
        changed = True
        sink(event)

    work = asyncio.ensure_future(source.follow(take))
    try:
        while not work.done():
            await asyncio.wait([work], timeout=CHANGE_SECONDS)
            _, silent = screen.version()
            over = silence if silent is None else silent >= silence + SILENT_SECONDS
            if changed or over:
                changed, silence = False, silent or 0.0
                print(to_json(screen.state()), flush=True)
        work.result()
    finally:
        work.cancel()
