"""The live screen of `potluck demo` and `potluck monitor`, drawn from events only (peer/ui/run_state.py).

Colour-blind readers can tell the colours apart, dark and light terminals show them, and nothing is said by colour alone.
`NO_COLOR` is honoured, and an output that is not UTF-8 gets plain ASCII. A frame is exactly as wide and high as asked, from about 60 x 12 characters
on; one of fewer than 20 lines has no curve.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, TextIO, cast

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from peer.events import Event
from peer.ui.held_out import Found
from peer.ui.lines import MARKS, Lines, ascii, printer
from peer.ui.names import END, LONGEST, Names
from peer.ui.plot import ORANGE, SKY, chart
from peer.ui.run_state import PeerView, View
from peer.ui.text import clean, clock, duration, rate, size, times
from peer.ui.utilization import percent
from protocol.run.manifest import Manifest

__all__ = ["Plain", "Screen", "View", "render"]

BLUE, GREEN, RED = "#0072B2", "#009E73", "#DC3545"
LEVEL_STYLES = {"info": "", "good": GREEN, "warning": ORANGE, "error": f"bold {RED}"}
MANY_FACTS, LONGEST_WRITTEN = 12, 120
"""Lines that the facts need before there is one for what the model writes, and so many characters of it."""
WIDEST_NAME = LONGEST + 1 + END
LABEL = 13
"""Characters of a line of the figures beside the curve that its label, the border and the space between take."""
_WAITS = {"computing": "◄", "forward": "→", "backward": "←"}
"""How the table of peers marks what a chain waits for."""
_LEAST_PLOT = 8
"""Lines that the curve keeps when the tables need space; beside many peers it has a third."""


def render(view: View, width: int, height: int, *, ascii_only: bool = False) -> RenderableType:
    """One frame of exactly `width` x `height` characters."""
    notes = 0 if height < 14 else 5 if height < 30 else 8
    plot = busy = 0
    rows = height - 2 - notes
    if height >= 20:
        rows = max(4, min(len(view.peers) + 3, rows - max(_LEAST_PLOT, rows // 3)))
        busy = _busy_rows(view, height - 2 - notes - rows - _LEAST_PLOT)
        plot = min(20, height - 2 - notes - rows - busy)
        notes = height - 2 - rows - busy - plot
    parts: list[RenderableType] = [_title(view, width), _bar(view, width)]
    if plot:
        facts = min(46, max(38, width * 2 // 5))
        grid = Table.grid(padding=0)
        grid.add_column(width=width - facts)
        grid.add_column(width=facts)
        grid.add_row(
            _curve(view, width - facts, plot, ascii_only),
            _panel("run", _facts(view, plot - 2, facts - LABEL), facts, plot, ascii_only),
        )
        parts.append(grid)
    parts.append(_panel("peers", _peers(view, width - 4, rows - 3), width, rows, ascii_only))
    if busy:
        parts.append(_panel("chains", _chains(view, width - 4, busy - 3), width, busy, ascii_only))
    if notes:
        parts.append(_panel("messages", _notes(view, width - 4, notes - 2), width, notes, ascii_only))
    frame = Group(*parts)
    return Plain(frame) if ascii_only else frame


def _busy_rows(view: View, free: int) -> int:
    """Lines of the panel of chains: none if nothing is known of them, or too few would fit."""
    members = sum(len(c.members) for c in view.chains)
    return min(members + 3, free) if members and free >= 5 else 0


class Plain:
    """Draws `inner` in ASCII characters only."""

    def __init__(self, inner: RenderableType) -> None:
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self.inner, options):
            yield Segment(text if control else ascii(text), style, control)


def _panel(title: str, body: RenderableType, width: int, height: int, ascii_only: bool) -> Panel:
    return Panel(
        body,
        title=Text(f" {title} ", style="bold"),
        title_align="left",
        box=box.ASCII if ascii_only else box.ROUNDED,
        border_style="bright_black",
        width=width,
        height=height,
        padding=(0, 1),
    )


def _title(view: View, width: int) -> Text:
    manifest = view.manifest
    left = Text.assemble(
        (" potluck ", f"bold reverse {SKY}"),
        (f" {manifest.name}", "bold"),
        (f" · run {manifest.run_id[:8]}", "bright_black"),
    )
    if view.finished:
        text = f"finished {view.rounds} rounds"
    elif view.round == 0:
        here = sum(p.here for p in view.peers.values())
        text = f"gathering peers, {here} of {manifest.start_peers}"
    else:
        text = f"round {min(view.round, view.rounds)} of {view.rounds}"
    if view.eta is not None:
        text += f" · {duration(view.eta)} left"
    elif view.began is not None and view.finished:
        text += f" in {duration(view.now - view.began)}"
    left.truncate(max(0, width - len(text) - 2), overflow="ellipsis")
    return Text.assemble(left, " " * max(1, width - left.cell_len - len(text) - 1), (text, "bold"), no_wrap=True)


def _bar(view: View, width: int) -> Text:
    label = f" {view.progress * 100:3.0f} % "
    free = width - len(label) - 1
    filled = view.progress * free
    whole = int(filled)
    part = " ▏▎▍▌▋▊▉"[int((filled - whole) * 8)].strip()
    return Text.assemble(
        " ",
        ("█" * whole + part, SKY),
        ("░" * (free - whole - len(part)), "bright_black"),
        label,
        no_wrap=True,
    )


def _curve(view: View, width: int, height: int, ascii_only: bool) -> Panel:
    marks = sorted((float(r), min(view.highest, x)) for r, x in view.committed.items())
    curve = view.curve or marks
    lines = chart(curve, marks, width - 4, height - 2, ascii_only=ascii_only, x_label="rounds")
    return _panel("loss, nats per token", Group(*lines), width, height, ascii_only)


def _facts(view: View, rows: int, width: int) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="bright_black", no_wrap=True, min_width=8)
    table.add_column(overflow="ellipsis" if rows < 10 else "fold", no_wrap=rows < 10)
    full = sum(not r.is_chain for r in view.replicas)
    chains = len(view.replicas) - full
    spares = sum(p.role == "spare" and p.here for p in view.peers.values())
    counted = f"{full} full, {chains} chain" + (f", {spares} spare" if spares else "")
    table.add_row("replicas", counted if len(counted) <= width else counted.replace(" full,", " +"))
    table.add_row("loss", _loss(view))
    measured = view.held_out.newest
    if measured is not None:
        table.add_row("held out", _held_out(measured))
        if measured.sample and rows > MANY_FACTS:
            table.add_row("it writes", Text(clean(measured.sample, LONGEST_WRITTEN)))
    table.add_row("digests", _digests(view))
    traffic = view.traffic
    if traffic is None:
        table.add_row("sent", Text("-", style="bright_black"))
    elif measured is not None and rows < 8:  # there is no line for more
        table.add_row("sent", f"{size(traffic[0])}, {size(traffic[1])} in fp32")
    else:
        sent, dense = traffic
        table.add_row("sent", Text.assemble((size(sent), "bold"), " in a round"))
        more = (f"  {times(dense / sent)} as much", f"bold {GREEN}") if dense > sent else ""
        table.add_row("in fp32", Text.assemble(size(dense), more))
    for who, reason in view.left_out[: max(1, rows // 4)]:
        table.add_row("left out", Text(f"! {who}: {reason}", style=ORANGE))
    if not view.left_out:
        table.add_row("left out", f"nobody ({view.left_out_total} so far)" if view.left_out_total else "nobody so far")
    return table


def _loss(view: View) -> Text:
    rounds = sorted(view.committed)
    if not rounds:
        return Text("-", style="bright_black")
    text = Text(f"{view.committed[rounds[-1]]:.3f}", style="bold")
    if len(rounds) > 1:
        text.append(f"  from {view.committed[rounds[0]]:.3f}", style="not bold bright_black")
    return text


def _held_out(found: Found) -> Text:
    return Text.assemble((f"{min(found.loss, 99.0):.3f}", "bold"), f"  {min(found.bits_per_byte, 99.0):.3f} bits/byte")


def _digests(view: View) -> Text:
    if view.finished and view.state_digest:
        return Text(f"✓ equal · {view.state_digest[:10]}", style=GREEN)
    found = view.compared
    if found is None or (found.peers is None and not found.wrong):
        if found is None or found.round < 1:
            return Text("not yet compared", style="bright_black")
        return Text(f"✓ none differs, round {found.round}", style=GREEN)
    if not found.wrong:
        return Text(f"✓ equal, round {found.round} ({found.peers})", style=GREEN)
    peer, shard = found.wrong[0]
    more = f" (+{len(found.wrong) - 1})" if len(found.wrong) > 1 else ""
    return Text(f"✗ {view.name(peer)} differs in {shard}{more}", style=f"bold {RED}")


def _peers(view: View, width: int, rows: int) -> Table:
    wide = width >= 112
    marks = {c.members[c.bottleneck.position].peer: _WAITS[c.bottleneck.what] for c in view.chains}
    busy = any(p.activity for p in view.peers.values())
    table = Table(box=None, padding=(0, 1, 0, 0), expand=True, header_style="bright_black", show_edge=False)
    table.add_column("peer", no_wrap=True, max_width=WIDEST_NAME)
    table.add_column("does", no_wrap=True, ratio=1)
    if wide:
        table.add_column("device", no_wrap=True)
        table.add_column("memory", justify="right", no_wrap=True)
        table.add_column("uplink", justify="right", no_wrap=True)
    table.add_column("phase", no_wrap=True, min_width=8)
    if busy:
        table.add_column("busy", justify="right", no_wrap=True, min_width=6)
    table.add_column("step", justify="right", no_wrap=True, min_width=5)
    table.add_column("loss", justify="right", no_wrap=True, min_width=5)
    table.add_column("sent", justify="right", no_wrap=True, min_width=7)
    if wide or not busy:
        table.add_column("fp32/sent" if wide else "saves", justify="right", no_wrap=True, min_width=5)
    listed = view.listed()
    shown = listed if len(listed) <= rows else listed[: max(0, rows - 1)]
    for p in shown:
        cells: list[RenderableType] = [Text(p.name, style="bold" if p.here else "strike"), _place(view, p, width >= 88)]
        if wide:
            cells += [
                p.device or "-",
                size(p.memory_bytes) if p.memory_bytes else "-",
                rate(p.up_bps) if p.up_bps else "-",
            ]
        style = {"training": SKY, "gone": RED, "withdrew": ORANGE, "offered": GREEN, "finished": GREEN}.get(p.phase, "")
        trains = p.replica is not None
        cells.append(Text(p.phase, style=style))
        if busy:
            cells.append(_share(p, marks.get(p.peer, "")))
        cells += [
            f"{p.step}/{p.steps}" if trains else "-",
            f"{p.loss:.3f}" if trains and p.loss is not None else "-",
            size(p.sent_bytes) if p.sent_bytes is not None else "-",
        ]
        if wide or not busy:
            cells.append(times(p.dense_bytes / p.sent_bytes) if p.sent_bytes and p.dense_bytes else "-")
        table.add_row(*cells)
    if len(shown) < len(listed):
        table.add_row(f"+{len(listed) - len(shown)} more", style="bright_black")
    if not listed:
        table.add_row(Text("nobody yet", style="bright_black"))
    return table


def _chains(view: View, width: int, rows: int) -> Table:
    """What each stage of each chain did in its last inner step, forward (→) and backward (←), and what its chain waits
    for."""
    table = Table(box=None, padding=(0, 1, 0, 0), expand=True, header_style="bright_black", show_edge=False)
    table.add_column("chain", no_wrap=True)
    table.add_column("peer", no_wrap=True, max_width=WIDEST_NAME)
    columns = ["busy", "waits →", "waits ←", "sends →", "sends ←", *(("depth", "queue") if width >= 88 else ())]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("slowest", no_wrap=True, ratio=1)
    listed = [(c, i, p) for c in view.chains for i, p in enumerate(c.members)]
    for chain, position, p in listed[:rows]:
        a = p.activity
        cells = ["-"] * len(columns)
        if a is not None:
            cells = [percent(a.busy), percent(a.wait_forward), percent(a.wait_backward)]
            cells += [size(a.forward_bytes), size(a.backward_bytes), str(a.depth), str(a.queued)]
            cells = cells[: len(columns)]
        mark = Text(f"◄ {chain.slowest}", style=ORANGE) if position == chain.bottleneck.position else ""
        table.add_row(chain.name if position == 0 else "", Text(p.name, style="bold"), *cells, mark)
    return table


class _Fitting:
    """The longer text where it has room, else the shorter one."""

    def __init__(self, longer: Text, shorter: Text) -> None:
        self._longer, self._shorter = longer, shorter

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._longer if self._longer.cell_len <= options.max_width else self._shorter


def _place(view: View, p: PeerView, wide: bool) -> RenderableType:
    mark, style = {"full": ("●", BLUE), "stage": ("●", ORANGE)}.get(p.role, ("○", "bright_black"))
    longer, shorter = (Text.assemble((mark, style), f" {view.place(p, x)}", no_wrap=True) for x in (False, True))
    return _Fitting(longer, shorter) if wide else shorter


def _share(p: PeerView, mark: str) -> Text:
    """Of the time that a stage computes, marked if its chain waits for that or for what comes to it."""
    a = p.activity
    if a is None:
        return Text("-")
    return Text(percent(a.busy) + (mark or " "), style=ORANGE if mark else "")


def _notes(view: View, width: int, rows: int) -> Group:
    def lines() -> Iterable[Text]:
        for note in list(view.notes)[-rows:]:
            mark = (f"{MARKS[note.level]} ", LEVEL_STYLES[note.level])
            text = Text.assemble((f"{clock(note.time)} ", "bright_black"), mark, note.text, no_wrap=True)
            text.truncate(width, overflow="ellipsis")
            yield text

    return Group(*lines())


class _Seldom(Live):
    """Draws where there is `news`: to draw costs more than all else that a screen does."""

    def __init__(self, news: Callable[[], bool], **how: Any) -> None:
        self._has_news = news
        super().__init__(**how)

    def refresh(self) -> None:
        if self._has_news():
            super().refresh()


class Screen:
    """Shows a run while events arrive: `with Screen(manifest) as screen: … screen.feed(event)`. Any thread may feed.

    On a terminal the screen is redrawn a few times a second, and its last frame stays. Elsewhere lines are printed
    instead, few of them (peer/ui/lines.py).
    """

    refresh_per_second = 4.0

    def __init__(
        self, manifest: Manifest, names: Mapping[str, str] | None = None, console: Console | None = None
    ) -> None:
        self.view = View(manifest, Names(names))
        self.console = console or Console()
        self._print = printer(Lines(names), cast(TextIO, self.console.file))
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._news = True
        self._size = self.console.size

    def feed(self, event: Event) -> None:
        """A Sink."""
        with self._lock:
            self._take(event)
        if self._live is None:
            self._print(event)

    def frame(self, height: int | None = None) -> RenderableType:
        """The present frame, as large as the terminal."""
        with self._lock:
            width, full = self.console.size
            return self._drawn(width, height or full)

    def _take(self, event: Event) -> None:
        self._news = True
        self.view.feed(event)

    def _has_news(self) -> bool:
        """Whether the screen looks otherwise than when this was asked last."""
        with self._lock:
            news, self._news = self._news or self.console.size != self._size, False
            self._size = self.console.size
            return news

    def _drawn(self, width: int, height: int) -> RenderableType:
        return render(self.view, width, height, ascii_only=self.console.options.ascii_only)

    def __enter__(self) -> Screen:
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = _Seldom(
                self._has_news,
                get_renderable=self.frame,
                console=self.console,
                screen=True,
                refresh_per_second=self.refresh_per_second,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
            self.console.print(self.frame(min(self.console.size.height, 16 + len(self.view.peers))))
