"""`potluck monitor`: shows a run or a recording on a terminal, as JSON, to browsers and to Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from peer.cli import running
from peer.cli.options import with_options
from peer.events import Event
from peer.log import reader
from peer.net import keyfile
from peer.node.open_run import KEY, here, parse_run, read_manifest
from peer.ui import metrics, web
from peer.ui.monitor import Monitor, Replay
from peer.ui.monitor_screen import MonitorScreen
from peer.ui.run_view import SILENT_SECONDS
from peer.ui.state import to_json
from protocol.errors import UsageError
from protocol.run.manifest import Manifest

CHANGE_SECONDS = 1.0


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
    metrics: Annotated[
        str | None, typer.Option(metavar="[HOST:]PORT", help="Serve the main figures to Prometheus, under /metrics.")
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
    with contextlib.suppress(asyncio.CancelledError):
        async with _opened(options) as (manifest, source):
            if options.once:
                await _once(options, manifest, source)
            else:
                await _watch(options, manifest, source, where)


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


async def _once(options: WatchOptions, manifest: Manifest, source: EventSource) -> None:
    screen = MonitorScreen(manifest, news_age=lambda: source.news_age, join_line=lambda: source.join_line)
    await source.poll(screen.take)
    if options.json:
        print(to_json(screen.state()))
    else:
        screen.console.print(screen.frame(screen.console.size.height - 1))  # the prompt takes a line


async def _watch(
    options: WatchOptions, manifest: Manifest, source: EventSource, where: dict[str, tuple[str, int]]
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
        for server in _servers(screen, where):
            stack.enter_context(server)
            for path, what in ("", "the page"), ("metrics", "figures for Prometheus"):
                if f"/{path}" in server.paths:
                    screen.say(f"{what}: {server.url}{path}")
        if not options.json:
            stack.enter_context(screen)
        work = asyncio.ensure_future(_print_changes(source, screen) if options.json else source.follow(screen.feed))
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


def _servers(screen: MonitorScreen, where: dict[str, tuple[str, int]]) -> list[web.Server]:
    """A server for each address. where: addresses by option. Raises UsageError if an address cannot be used."""
    paths: dict[tuple[str, int], web.Paths] = {}
    if "--web" in where:
        paths[where["--web"]] = web.site(screen.state, screen.version)
    if "--metrics" in where:
        figures = web.CachedAnswer(metrics.KIND, lambda: metrics.exposition(screen.state()), screen.version)
        paths[where["--metrics"]] = {**paths.get(where["--metrics"], {}), "/metrics": figures}
    return [web.Server(address, served) for address, served in paths.items()]


async def _print_changes(source: EventSource, screen: MonitorScreen) -> None:
    """Prints the state after changes, once in CHANGE_SECONDS at most; once in SILENT_SECONDS while no node answers."""
    changed, silence = False, 0.0

    def take(event: Event) -> None:
        nonlocal changed
        changed = True
        screen.take(event)

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
