"""The pictures of the documents, and of every screen: from a real run that a real monitor watches, and from a recorded
one of 500 peers.

    python -m tests.docs.pictures docs/images --all pictures    # `make pictures`; nine minutes; needs Chromium
    python -m tests.docs.pictures --volunteer pictures          # a volunteer's first minutes alone

It runs the demo, watches it as `potluck monitor` does, and draws what that knew when most of the rounds were over. Into
the first folder go the pictures that documents show; with `--all` each view at each size, light and dark, as a picture
and as text, and the web page on a phone and on a desk; also of a monitor that has heard nothing yet, and of a run that
is over. A volunteer's first minutes, on terminals and on the page, are of a second real run (tests/docs/volunteer.py).
The recording (tests/docs/recording.py) stays there:

    potluck monitor pictures/many.toml --replay pictures/many.jsonl

What a page logs as an error, and what is wider than its window, is printed, and the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.terminal_theme import DIMMED_MONOKAI, TerminalTheme

from peer.events import Event
from peer.node.open_run import Door, manifest_of, parse_run, read_manifest, spelled_out, start_transport
from peer.ui import web
from peer.ui.monitor import Monitor, Replay
from peer.ui.monitor_screen import VIEWS, Browsing, MonitorScreen, draw
from peer.ui.run_view import RunView
from peer.ui.screen import render
from protocol.run import short_line
from protocol.run.manifest import Manifest
from protocol.run.short_line import ShortLine
from tests.docs import recording, volunteer
from tests.docs.browser import Browser
from tests.support import tiny
from tests.support.watched import MadeUp

MOMENT = 0.715
"""The share of the run after which pictures are taken: half of one of the demo's thirty rounds is over."""
LAST = 60
"""Round of what is made up."""
SIZES = ((60, 20), (80, 24), (120, 40), (200, 60))
"""Characters."""
DEMO, SHOWN = (122, 36), (110, 26)
"""Those of the documents' pictures: of the demo, and of a monitor's view."""
WINDOWS = {"phone": (360, 780), "desk": (1440, 900)}
"""Pixels."""
NODE = f"/ip4/203.0.113.5/tcp/31330/p2p/{tiny.OPERATOR.peer_id}"
"""Where one joins, on pages: an address of documents, for the demo's is of one machine only."""
READY = "document.querySelector('#cards section') !== null && (code.hidden || code.naturalWidth > 0)"
"""The page has its figures and, where anybody may join, the QR code."""
FONT = 'ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace'
LIGHT = TerminalTheme(
    (255, 255, 255),
    (36, 36, 36),
    [(36, 36, 36), (190, 30, 30), (20, 110, 40), (140, 95, 0),
     (20, 70, 180), (130, 40, 140), (0, 110, 120), (90, 90, 90)],
    [(110, 110, 110), (210, 40, 40), (30, 130, 50), (160, 110, 0),
     (40, 90, 200), (150, 60, 160), (0, 125, 135), (20, 20, 20)],
)  # fmt: skip
"""A terminal with dark letters on white."""


def svg(drawn: RenderableType, width: int, height: int, title: str, *, dark: bool = True) -> str:
    """What a terminal of this size shows, as an SVG that needs no font and no file from elsewhere."""
    console = _console(width, height)
    console.print(drawn)
    theme = DIMMED_MONOKAI if dark else LIGHT
    picture = console.export_svg(title=title, unique_id="screen", theme=theme if title != "potluck demo" else None)
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    return re.sub(r"font-family: [^;]+;", f"font-family: {FONT};", picture)


def _console(width: int, height: int) -> Console:
    file = io.StringIO()
    return Console(record=True, file=file, width=width, height=height, force_terminal=True, color_system="truecolor")


LAST_NEWS = 10.0
"""Seconds after the demo's end in which its monitor has seen that."""


def view_of(watched: RunView, view: str, width: int, height: int) -> RenderableType:
    """One view of a monitor as a terminal of this size shows it."""
    first = watched.credits.table()
    return draw(watched, Browsing(view=view), width, height, me=first[0].peer if first else None)


def watched(folder: Path) -> tuple[Manifest, list[Event]]:
    """Runs the demo in `folder`; the run, and all that a monitor hears of it, which sees its end."""
    command = [sys.executable, "-m", "peer.cli", "demo", "--no-screen", "--out", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        return asyncio.run(_watch(_join_line(process), process))
    finally:
        process.terminate()
        process.communicate()


async def _watch(line: ShortLine, demo: subprocess.Popen[str]) -> tuple[Manifest, list[Event]]:
    run, told = parse_run(await spelled_out(line, [])), list[Event]()
    with tempfile.TemporaryDirectory(prefix="potluck-pictures-") as name:
        transport = await start_transport(Path(name), Door(host="127.0.0.1"), run.run_id)
        try:
            manifest = await manifest_of(run, transport)
            following = asyncio.create_task(Monitor(manifest, transport, bootstrap=run.bootstrap).follow(told.append))
            ended = asyncio.create_task(asyncio.to_thread(demo.wait))
            await asyncio.wait({following, ended}, return_when="FIRST_COMPLETED")
            await asyncio.wait_for(following, LAST_NEWS)
            return manifest, told
        except TimeoutError:
            raise SystemExit(
                "pictures: the demo was over before the monitor saw the end; try on a quiet machine"
            ) from None
        finally:
            await transport.aclose()


def _join_line(process: subprocess.Popen[str]) -> ShortLine:
    assert process.stdout is not None
    for said in process.stdout:
        found = re.search(r"potluck join (\S+)", said)
        if found and (line := short_line.parse(found[1])) is not None:
            return line
    raise SystemExit("pictures: the demo ended before it could be joined")


def at(moment: float, manifest: Manifest, told: Sequence[Event]) -> MonitorScreen:
    """What a monitor knows that has heard this, at this share of the run."""
    screen = MonitorScreen(
        manifest,
        Console(file=io.StringIO()),
        join_line=lambda: short_line.join_line(manifest.name, NODE, manifest.run_id),
    )
    for event in told:
        screen.take(event)
        if screen.view.progress >= moment:
            break
    return screen


async def recorded(folder: Path) -> MonitorScreen:
    """What a monitor knows that plays a recording of a run of 500 peers, which is made in `folder`."""
    manifest, file = await recording.record(folder)
    return await replayed(manifest, file)


async def replayed(path: Path, file: Path) -> MonitorScreen:
    """What a monitor knows at the end of a recording. `path`: the run's manifest."""
    manifest = read_manifest(path)
    screen = MonitorScreen(manifest, Console(file=io.StringIO()))
    await Replay(manifest, file).poll(screen.take)
    return screen


def made_up(peers: int) -> MonitorScreen:
    """What a monitor knows of a run of `peers` peers after its 60th round."""
    made = MadeUp(peers)
    screen = MonitorScreen(made.manifest, Console(file=io.StringIO()))
    for event in made.all(LAST):
        screen.take(event)
    return screen


@contextlib.contextmanager
def served(screen: MonitorScreen, sample: Callable[[str], web.Answer] | None = None) -> Iterator[str]:
    """The address of the web page of a monitor that knows this. sample: as of web.site."""
    with web.Server(("127.0.0.1", 0), web.site(screen.state, lambda: screen.changes, sample)) as server:
        yield server.url


def of_documents(screen: MonitorScreen, many: MonitorScreen, folder: Path, browser: Browser) -> None:
    """Those that README and guides show."""
    (folder / "demo.svg").write_text(svg(render(screen.view, *DEMO), *DEMO, "potluck demo"), encoding="utf-8")
    chains = view_of(screen.view, "chains", *SHOWN)
    (folder / "monitor.svg").write_text(svg(chains, *SHOWN, "potluck monitor"), encoding="utf-8")
    crowd = view_of(many.view, "run", *DEMO)
    (folder / "many.svg").write_text(svg(crowd, *DEMO, "potluck monitor"), encoding="utf-8")
    with served(screen) as url:
        for name, (width, height) in WINDOWS.items():
            browser.picture(url, folder / f"web-{name}.png", width, height, dark=name == "phone", ready=READY)


def of_a_volunteer(folder: Path, browser: Browser) -> None:
    """The screen of `potluck join` at each size, another one's own terminal, and the page: the first minutes, and the
    ends."""

    def page(name: str, url: str) -> None:
        pages(url, f"join-{name}", folder, browser)

    for story in volunteer.record(folder / "volunteer", page):
        for width, height in SIZES:
            pictured(story.shown(width, height), width, height, "potluck join", folder / f"join-{story.name}", browser)
        at = folder / f"terminal-{story.name}"
        pictured(story.terminal, *volunteer.TERMINAL, "potluck join", at, browser)


def pictured(drawn: RenderableType, width: int, height: int, title: str, path: Path, browser: Browser) -> None:
    """What a terminal shows, as text and as pictures, light and dark; their names begin with `path`."""
    console, begins = _console(width, height), f"{path.name}-{width}x{height}"
    console.print(drawn)
    path.with_name(f"{begins}.txt").write_text(console.export_text(), encoding="utf-8")
    for dark in (True, False):
        shade = path.with_name(f"{begins}-{'dark' if dark else 'light'}")
        picture = shade.with_suffix(".svg")
        picture.write_text(svg(drawn, width, height, title, dark=dark), encoding="utf-8")
        size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture.read_text(encoding="utf-8"))
        pixels = (int(float(size[1])) + 1, int(float(size[2])) + 1)
        browser.picture(picture.resolve().as_uri(), shade.with_suffix(".png"), *pixels, dark=dark)
        picture.unlink()


def everything(screen: MonitorScreen, name: str, folder: Path, browser: Browser, views: Sequence[str] = VIEWS) -> None:
    """Each of the views at each size, and the web page; their names begin with `name`."""
    for view in views:
        for width, height in SIZES:
            drawn = view_of(screen.view, view, width, height)
            pictured(drawn, width, height, "potluck monitor", folder / f"{name}-{view}", browser)
    with served(screen) as url:
        pages(url, name, folder, browser)


def pages(url: str, name: str, folder: Path, browser: Browser) -> None:
    """The web page at `url` in each window, light and dark."""
    for window, (width, height) in WINDOWS.items():
        for dark in (True, False):
            to = folder / f"{name}-web-{window}-{'dark' if dark else 'light'}.png"
            browser.picture(url, to, width, height, dark=dark, ready=READY, whole=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--all", type=Path)
    parser.add_argument("--volunteer", type=Path)
    typed = parser.parse_args(arguments)
    with Browser() as browser:
        if typed.folder is not None:
            of_runs(typed.folder, typed.all, browser)
        if (folder := typed.volunteer or typed.all) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            of_a_volunteer(folder, browser)
        for fault in browser.faults:
            print(fault)
        return 1 if browser.faults else 0


def of_runs(documents: Path, all_of_them: Path | None, browser: Browser) -> None:
    """The pictures of the documents; into `all_of_them` each view at each size."""
    with tempfile.TemporaryDirectory(prefix="potluck-pictures-") as name:
        manifest, told = watched(Path(name) / "demo-run")
        screen = at(MOMENT, manifest, told)
        documents.mkdir(parents=True, exist_ok=True)
        kept = all_of_them or Path(name)
        kept.mkdir(parents=True, exist_ok=True)
        many = asyncio.run(recorded(kept))
        of_documents(screen, many, documents, browser)
        if all_of_them is not None:
            everything(screen, "five", all_of_them, browser)
            everything(many, "many", all_of_them, browser)
            everything(MonitorScreen(tiny.manifest()), "begin", all_of_them, browser, VIEWS[:1])
            everything(at(2.0, manifest, told), "over", all_of_them, browser, VIEWS[:1])


if __name__ == "__main__":
    sys.exit(main())
