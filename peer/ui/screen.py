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
from peer.ui import tables
from peer.ui.lines import MARKS, Lines, ascii, printer
from peer.ui.names import Names
from peer.ui.plot import ORANGE, SKY, chart, shows_marks
from peer.ui.run_state import Found, View
from peer.ui.tables import GREEN, RED
from peer.ui.text import clock, duration, number, readable, size, times
from peer.ui.utilization import LEGEND
from protocol.run.manifest import Manifest
from protocol.wire.announcement import NODE_DEVICE

__all__ = ["Plain", "Screen", "View", "render"]

LEVEL_STYLES = {"info": "", "good": GREEN, "warning": ORANGE, "error": f"bold {RED}"}
MANY_FACTS, LONGEST_WRITTEN = 12, 120
"""Lines that the facts need before there is one for what the model writes, and so many characters of it."""
LABEL = 13
"""Characters of a line of the figures beside the curve that its label, the border and the space between take."""
_LEAST_NOTES = 3
_LEAST_PLOT = 8
"""Lines that the curve keeps when the tables need space; beside many peers it has a third."""


def render(view: View, width: int, height: int, *, ascii_only: bool = False) -> RenderableType:
    """One frame of exactly `width` x `height` characters."""
    notes = _note_rows(view, height)
    plot = busy = 0
    rows = height - 2 - notes
    if height >= 20:
        rows = max(4, min(len(view.peers) + 3, _table_rows(height, notes)))
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
    legend = LEGEND if view.chains else ""
    parts.append(_panel(_there(view), tables.peers(view, width - 4, rows - 3), width, rows, ascii_only, legend))
    if busy:
        parts.append(_panel("chains", tables.chains(view, width - 4, busy - 3), width, busy, ascii_only))
    if notes:
        parts.append(_panel("messages", _notes(view, width - 4, notes - 2), width, notes, ascii_only))
    frame = Group(*parts)
    return Plain(frame) if ascii_only else frame


def _note_rows(view: View, height: int) -> int:
    """Lines of the panel of messages, which gives way to the table of peers, but for one message."""
    most = 0 if height < 14 else 5 if height < 30 else 8
    enough = (n for n in range(most, _LEAST_NOTES, -1) if _table_rows(height, n) >= len(view.peers) + 3)
    return next(enough, min(most, _LEAST_NOTES))


def _table_rows(height: int, notes: int) -> int:
    """The most lines that the table of peers may have beside so many of messages."""
    free = height - 2 - notes
    return free if height < 20 else free - max(_LEAST_PLOT, free // 3)


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


def _here(view: View) -> int:
    """How many peers are there; bootstrap nodes are none."""
    return sum(p.here and p.device != NODE_DEVICE for p in view.peers.values())


def _there(view: View) -> str:
    """The title of the table of peers: how many rows it would need."""
    nodes = sum(p.device == NODE_DEVICE for p in view.peers.values())
    here = _here(view)
    gone = len(view.peers) - nodes - here
    there = f"{here:,} there"
    if view.is_silent and view.news_age is not None:
        there += f" {duration(view.news_age)} ago"
    counts = there, f"{gone:,} gone" if gone else "", number(nodes, "bootstrap node") if nodes else ""
    return f"peers: {', '.join(filter(None, counts))}"


def _panel(title: str, body: RenderableType, width: int, height: int, ascii_only: bool, legend: str = "") -> Panel:
    return Panel(
        body,
        title=Text(f" {title} ", style="bold"),
        title_align="left",
        subtitle=Text(f" {legend} ", style="bright_black") if legend else None,
        subtitle_align="left",
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
        text = f"finished {number(view.rounds, 'round')}"
    elif view.round == 0:
        text = f"gathering peers, {_here(view)} of {manifest.start_peers}"
    else:
        text = f"round {min(view.round, view.rounds):,} of {view.rounds:,}"
    if view.is_silent and view.news_age is not None:
        text += f" · no news for {duration(view.news_age)}"
    elif view.eta is not None:
        text += f" · {duration(view.eta)} left"
    elif view.began is not None and view.finished:
        text += f" in {duration(view.now - view.began)}"
    left.truncate(max(0, width - len(text) - 2), overflow="ellipsis")
    style = LEVEL_STYLES["error"] if view.is_silent else "bold"
    return Text.assemble(left, " " * max(1, width - left.cell_len - len(text) - 1), (text, style), no_wrap=True)


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
    # a commit's loss is that of the first inner step: of the state that the round before has left
    marks = sorted((r - 1.0, min(view.highest, x)) for r, x in view.committed.items())
    curve = view.curve or marks
    lines = chart(curve, marks, width - 4, height - 2, ascii_only=ascii_only, x_label="rounds")
    dots = " · ●: a round begins" if shows_marks(curve, marks, width - 4) else ""
    return _panel(f"loss, nats per token{dots}", Group(*lines), width, height, ascii_only)


def _facts(view: View, rows: int, width: int) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="bright_black", no_wrap=True, min_width=8)
    table.add_column(overflow="ellipsis" if rows < 10 else "fold", no_wrap=rows < 10)
    full = sum(not r.is_chain for r in view.replicas)
    chains = len(view.replicas) - full
    spares = sum(p.role == "spare" and p.here for p in view.peers.values())
    counted = f"{full} full, {number(chains, 'chain')}"
    whole = counted + (f", {number(spares, 'spare')}" if spares else "")
    table.add_row("replicas", whole if len(whole) <= width else counted)
    table.add_row("loss", _loss(view))
    measured = view.held_out.newest
    if measured is not None:
        table.add_row("held out", _held_out(measured))
        if measured.sample and rows > MANY_FACTS:
            table.add_row("it writes", Text(readable(measured.sample, {}, LONGEST_WRITTEN)))
    table.add_row("digests", _digests(view))
    traffic = view.traffic
    if traffic is None:
        table.add_row("sent", Text("-", style="bright_black"))
    elif measured is not None and rows < 8:  # there is no line for more
        table.add_row("sent", f"{size(traffic[0])}, {size(traffic[1])} in fp32")
    else:
        sent, dense, written = traffic
        disk = f", {size(written)} to disk" if written else ""
        table.add_row("sent", Text.assemble((size(sent), "bold"), f" in a round{disk}"))
        more = (f"  {times(dense / sent)} as much", f"bold {GREEN}") if dense > sent else ""
        table.add_row("in fp32", Text.assemble(size(dense), more))
    for x in view.left_out[: max(1, rows // 4)]:
        table.add_row("left out", Text(f"! {x.replica}: {x.reason}", style=ORANGE))
    if not view.left_out:
        table.add_row(
            "left out", f"nobody now, {view.left_out_total:,} so far" if view.left_out_total else "nobody so far"
        )
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
    first = found.wrong[0]
    more = f" (+{len(found.wrong) - 1})" if len(found.wrong) > 1 else ""
    return Text(f"✗ {view.name(first.peer)} differs in {first.shard}{more}", style=f"bold {RED}")


def _notes(view: View, width: int, rows: int) -> Group:
    def lines() -> Iterable[Text]:
        if not view.notes:
            yield Text("nothing yet", style="bright_black")
        for note in list(view.notes)[-rows:]:
            mark = (f"{MARKS[note.level]} ", LEVEL_STYLES[note.level])
            text = Text.assemble((f"{clock(note.time)} ", "bright_black"), mark, note.text, no_wrap=True)
            text.truncate(width, overflow="ellipsis")
            yield text

    return Group(*lines())


class _Seldom(Live):
    """Draws where there is `news`: to draw costs more than all else that a screen does."""

    def __init__(self, news: Callable[[], bool], **how: Any) -> None:
        self.has_news = news
        super().__init__(**how)

    def refresh(self) -> None:
        if self.has_news():
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

    def has_news(self) -> bool:
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
                self.has_news,
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
            self.console.print(self.frame(min(self.console.size.height - 1, 18 + len(self.view.peers))))
