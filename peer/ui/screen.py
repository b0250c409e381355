"""The live screen of `potluck demo` and `potluck monitor`, drawn from events (peer/ui/run_view.py).

No information is in colour alone. `NO_COLOR` is honoured, and an output that is not UTF-8 gets plain ASCII. A frame has
exactly the requested size, 60 x 12 characters or more; one of fewer than 16 lines has no panel of the run.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TextIO, cast

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from peer.events import Event
from peer.ui.lines import MARKS, Lines, ascii, printer
from peer.ui.run_view import LEGEND, WAITS, ChainView, HeldOutView, PeerView, RunView
from peer.ui.text import ID_END, LONGEST_NAME, Names, clock, duration, number, percent, rate, readable, size, times
from protocol.run.manifest import Manifest
from protocol.wire.announcement import NODE_DEVICE

Point = tuple[float, float]
SKY, ORANGE, BLUE, GREEN, RED = "#2E93D0", "#C07A00", "#0072B2", "#009E73", "#DC3545"
GRAY = "bright_black"
LEVEL_STYLES = {"info": "", "good": GREEN, "warning": ORANGE, "error": f"bold {RED}"}
SAMPLE_ROWS = 12
"""Lines of facts above and below the model's sample, which has the lines that are left."""
FACT_LABEL_WIDTH = 13
"""Characters of a fact's label, the border and the space between."""
LEAST_NOTES = 3
LEAST_FACTS, LEAST_PLOT = 5, 8
"""Lines of the panel of the run without and with the curve if the tables need space; with many peers it has a third,
and with chains a quarter at least."""
NAME_WIDTH = LONGEST_NAME + 1 + ID_END
PEERS_WIDTH = 132
"""Widest row of the table of peers that the eye can follow."""
TICK_WIDTH = 6
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a Braille character, by row and column."""


class _Live(Live):
    """Draws only if there is `news`, since drawing is a screen's most expensive work."""

    def __init__(self, news: Callable[[], bool], **how: Any) -> None:
        self.has_news = news
        super().__init__(**how)

    def refresh(self) -> None:
        if self.has_news():
            super().refresh()


class LiveScreen:
    """Shows something while events arrive: `with screen: ... screen.feed(event)`. Any thread may feed.

    On a terminal the screen is redrawn a few times a second, and its last frame stays. Elsewhere, and before and after
    that, a few lines are printed instead (peer/ui/lines.py).
    """

    refresh_per_second = 4.0

    def __init__(self, lines: Lines, console: Console | None = None) -> None:
        self.console = console or Console()
        self._print = printer(lines, cast(TextIO, self.console.file))
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._news = True
        self._size = self.console.size

    def feed(self, event: Event) -> None:
        """A Sink."""
        with self._lock:
            self._news = True
            self._take(event)
        if self._live is None:
            self._print(event)

    def frame(self, height: int | None = None) -> RenderableType:
        """The present frame, of the terminal's size."""
        with self._lock:
            width, full = self.console.size
            return self._drawn(width, height or full)

    def has_news(self) -> bool:
        """Returns whether the screen has changed since the last call."""
        with self._lock:
            news, self._news = self._news or self.console.size != self._size, False
            self._size = self.console.size
            return news

    def _take(self, event: Event) -> None:
        raise NotImplementedError

    def _drawn(self, width: int, height: int) -> RenderableType:
        raise NotImplementedError

    @property
    def _last_height(self) -> int:
        """Most lines of the frame that stays."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = _Live(
                self.has_news,
                get_renderable=self.frame,
                console=self.console,
                screen=True,
                refresh_per_second=self.refresh_per_second,
                transient=True,
            )
            self._live.start(refresh=True)  # what ends at once was seen, too
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
            self.console.print(self.frame(min(self.console.size.height - 1, self._last_height)))


class Screen(LiveScreen):
    """Shows a run: `with Screen(manifest) as screen: ... screen.feed(event)`."""

    def __init__(
        self, manifest: Manifest, names: Mapping[str, str] | None = None, console: Console | None = None
    ) -> None:
        super().__init__(Lines(names), console)
        self.view = RunView(manifest, Names(names))

    def _take(self, event: Event) -> None:
        self.view.feed(event)

    def _drawn(self, width: int, height: int) -> RenderableType:
        return render(self.view, width, height, ascii_only=self.console.options.ascii_only)

    @property
    def _last_height(self) -> int:
        return 18 + len(self.view.peers)


# --- a frame


def render(view: RunView, width: int, height: int, *, ascii_only: bool = False) -> RenderableType:
    """A frame of exactly `width` x `height` characters."""
    notes = _note_rows(view, height)
    plot = busy = 0
    rows = height - 2 - notes
    if _least_plot(height):
        rows = max(4, min(len(view.peers) + 3, _table_rows(height, notes)))
        busy = _busy_rows(view, height - 2 - notes - rows - max(LEAST_PLOT, height // 4))
        plot = height - 2 - notes - rows - busy
    parts: list[RenderableType] = [_title(view, width), _bar(view, width, with_loss=not plot)]
    if 0 < plot < LEAST_PLOT - 1:
        parts.append(panel("run", _facts(view, plot - 2, width - FACT_LABEL_WIDTH), width, plot, ascii_only))
    elif plot:
        facts = min(46, max(34 if width < 70 else 38, width * 2 // 5))
        grid = Table.grid(padding=0)
        grid.add_column(width=width - facts)
        grid.add_column(width=facts)
        grid.add_row(
            _curve(view, width - facts, plot, ascii_only),
            panel("run", _facts(view, plot - 2, facts - FACT_LABEL_WIDTH), facts, plot, ascii_only),
        )
        parts.append(grid)
    legend = LEGEND if view.chains else ""
    parts.append(panel(_there(view), peers_table(view, width - 4, rows - 3), width, rows, ascii_only, legend))
    if busy:
        parts.append(panel("chains", chains_table(view, width - 4, busy - 3), width, busy, ascii_only))
    if notes:
        parts.append(panel("messages", _notes(view, width - 4, notes - 2), width, notes, ascii_only))
    frame = Group(*parts)
    return Plain(frame) if ascii_only else frame


def _note_rows(view: RunView, height: int) -> int:
    """Lines of the panel of messages; the table of peers may take all but LEAST_NOTES."""
    most = 0 if height < 14 else 5 if height < 30 else 8 if height < 50 else 12
    enough = (n for n in range(most, LEAST_NOTES, -1) if _table_rows(height, n) >= len(view.peers) + 3)
    return next(enough, min(most, LEAST_NOTES))


def _table_rows(height: int, notes: int) -> int:
    """Most lines of the table of peers, given `notes` lines of messages."""
    free, least = height - 2 - notes, _least_plot(height)
    return free - max(least, free // 3) if least else free


def _least_plot(height: int) -> int:
    """Least lines of the panel of the run; 0 if there is no space for it."""
    return 0 if height < 16 else LEAST_FACTS if height < 20 else LEAST_PLOT


def _busy_rows(view: RunView, free: int) -> int:
    """Lines of the panel of chains; none without known chains or without space."""
    members = sum(len(c.members) for c in view.chains)
    return min(members + 3, free) if members and free >= 5 else 0


class Plain:
    """Draws `inner` in ASCII."""

    def __init__(self, inner: RenderableType) -> None:
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self.inner, options):
            yield Segment(text if control else ascii(text), style, control)


def _here(view: RunView) -> int:
    return sum(p.here and p.device != NODE_DEVICE for p in view.peers.values())


def _there(view: RunView) -> str:
    nodes = sum(p.device == NODE_DEVICE for p in view.peers.values())
    here = _here(view)
    gone = len(view.peers) - nodes - here
    there = f"{here:,} there"
    if view.is_silent and view.news_age is not None:
        there += f" {duration(view.news_age)} ago"
    counts = there, f"{gone:,} gone" if gone else "", number(nodes, "bootstrap node") if nodes else ""
    return f"peers: {', '.join(filter(None, counts))}"


def panel(title: str, body: RenderableType, width: int, height: int, ascii_only: bool, legend: str = "") -> Panel:
    """A panel of exactly `width` x `height` characters."""
    return Panel(
        body,
        title=Text(f" {title} ", style="bold"),
        title_align="left",
        subtitle=Text(f" {legend} ", style=GRAY) if legend else None,
        subtitle_align="left",
        box=box.ASCII if ascii_only else box.ROUNDED,
        border_style=GRAY,
        width=width,
        height=height,
        padding=(0, 1),
    )


def _title(view: RunView, width: int) -> Text:
    manifest = view.manifest
    if view.finished:
        text = f"finished {number(view.last_round, 'round')}"
    elif view.round == 0:
        text = f"gathering peers, {_here(view)} of {manifest.start_peers}"
    else:
        text = f"round {min(view.round, view.last_round):,} of {view.last_round:,}"
    if view.is_silent and view.news_age is not None:
        text += f" · no news for {duration(view.news_age)}"
    elif view.eta is not None:
        text += f" · {duration(view.eta)} left"
    elif view.began is not None and view.finished:
        text += f" in {duration(view.now - view.began)}"
    left = brand(manifest.name)
    if left.cell_len + len(text) + 20 <= width:
        left.append(f" · run {manifest.run_id[:8]}", style=GRAY)
    return title_line(left, text, width, LEVEL_STYLES["error"] if view.is_silent else "bold")


def brand(name: str) -> Text:
    """The program, and the run's name, which begins a title."""
    return Text.assemble((" potluck ", f"bold reverse {SKY}"), (f" {name}" if name else "", "bold"))


def title_line(left: Text, right: str, width: int, style: str = "bold") -> Text:
    """A line of `width` characters that ends with `right`; `left` is cut where there is no space for it."""
    left.truncate(max(0, width - len(right) - 2), overflow="ellipsis")
    return Text.assemble(left, " " * max(1, width - left.cell_len - len(right) - 1), (right, style), no_wrap=True)


def _bar(view: RunView, width: int, *, with_loss: bool) -> Text:
    label = f" {view.progress * 100:3.0f} % "
    if with_loss and view.losses:
        label += f"· loss {view.losses[-1][1]:.3f} "
    return Text.assemble(" ", bar(view.progress, width - len(label) - 1), label, no_wrap=True)


def bar(share: float, width: int) -> Text:
    """A bar of `width` characters, filled by `share`, 0 to 1."""
    filled = share * width
    whole = int(filled)
    part = " ▏▎▍▌▋▊▉"[int((filled - whole) * 8)].strip()
    return Text.assemble(("█" * whole + part, SKY), ("░" * (width - whole - len(part)), GRAY))


def _curve(view: RunView, width: int, height: int, ascii_only: bool) -> Panel:
    marks = [(r - 1.0, loss) for r, loss in view.losses]  # a commit's loss is that of its first inner step
    curve = view.curve or marks
    lines = chart(curve, marks, width - 4, height - 2, ascii_only=ascii_only, x_label="rounds")
    dots = " · ●: a round begins" if shows_marks(curve, marks, width - 4) else ""
    titles = (f"loss, nats per token{dots}", f"loss{dots}", "loss, nats per token", "loss")
    title = next((title for title in titles if len(title) <= width - 8), titles[-1])
    return panel(title, Group(*lines), width, height, ascii_only)


def _facts(view: RunView, rows: int, width: int) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(style=GRAY, no_wrap=True, min_width=8)
    table.add_column(overflow="ellipsis" if rows < 10 else "fold", no_wrap=rows < 10)
    full = sum(not r.is_chain for r in view.replicas)
    chains = len(view.replicas) - full
    spares = sum(p.role == "spare" and p.here for p in view.peers.values())
    counted = f"{full} full, {number(chains, 'chain')}"
    whole = counted + (f", {number(spares, 'spare')}" if spares else "")
    table.add_row("loss", _loss(view))
    measured = view.held_out.newest
    if measured is not None:
        table.add_row("held out", _held_out(measured))
        if measured.sample and rows > SAMPLE_ROWS:
            table.add_row("it writes", Text(readable(measured.sample, {}, (rows - SAMPLE_ROWS + 2) * (width - 4))))
    table.add_row("replicas", whole if len(whole) <= width else counted)
    table.add_row("copies", _digests(view))
    left_out = [view.named(x) for x in view.left_out]
    without = [x for x in left_out if not x.probation]
    for x in without[: max(1, rows // 4)]:
        table.add_row("left out", Text(f"! {x.replica}: {x.reason}", style=ORANGE))
    if new := [x.replica for x in left_out if x.probation]:
        table.add_row("newcomer", Text(new[0] if len(new) == 1 else f"{len(new)}, whose work is kept"))
    if not without:
        table.add_row(
            "left out", f"nobody now, {view.left_out_total:,} so far" if view.left_out_total else "nobody so far"
        )
    traffic = view.traffic
    if traffic is None:
        table.add_row("sent", Text("-", style=GRAY))
    elif measured is not None and rows < 8:  # there is no line for more
        table.add_row("sent", f"{size(traffic[0])}, {size(traffic[1])} in fp32")
    else:
        sent, dense, written = traffic
        disk = f" in a round, {size(written)} to disk"
        if not written or len(size(sent) + disk) > width:
            disk = " in a round"
        table.add_row("sent", Text.assemble((size(sent), "bold"), disk))
        more = (f"  {times(dense / sent)} as much", f"bold {GREEN}") if dense > sent else ""
        table.add_row("in fp32", Text.assemble(size(dense), more))
    return table


def _loss(view: RunView) -> Text:
    losses = view.losses
    if not losses:
        return Text("-", style=GRAY)
    text = Text(f"{losses[-1][1]:.3f}", style="bold")
    if len(losses) > 1:
        text.append(f"  from {losses[0][1]:.3f}", style="not bold bright_black")
    return text


def _held_out(found: HeldOutView) -> Text:
    return Text.assemble((f"{min(found.loss, 99.0):.3f}", "bold"), f"  {min(found.bits_per_byte, 99.0):.3f} bits/byte")


def _digests(view: RunView) -> Text:
    if view.finished and view.state_digest:
        return Text(f"✓ all equal · {view.state_digest[:10]}", style=GREEN)
    found = view.compared
    if found is None or (found.peers is None and not found.wrong):
        if found is None or found.round < 1:
            return Text("not compared yet", style=GRAY)
        return Text(f"✓ all equal, round {found.round}", style=GREEN)
    if not found.wrong:
        return Text(f"✓ all {found.peers} equal, round {found.round}", style=GREEN)
    first = found.wrong[0]
    more = f" (+{len(found.wrong) - 1})" if len(found.wrong) > 1 else ""
    return Text(f"✗ {view.name(first.peer)} differs in {first.shard}{more}", style=f"bold {RED}")


def _notes(view: RunView, width: int, rows: int) -> Group:
    def lines() -> Iterable[Text]:
        if not view.notes:
            yield Text("nothing yet", style=GRAY)
        for note in list(view.notes)[-rows:]:
            mark = (f"{MARKS[note.level]} ", LEVEL_STYLES[note.level])
            text = Text.assemble((f"{clock(note.time)} ", GRAY), mark, note.text, no_wrap=True)
            text.truncate(width, overflow="ellipsis")
            yield text

    return Group(*lines())


# --- tables


def plain_table(gap: int = 1, **how: Any) -> Table:
    """A table without lines; `gap` spaces between columns."""
    return Table(box=None, padding=(0, gap, 0, 0), header_style=GRAY, show_edge=False, **how)


def peers_table(view: RunView, width: int, rows: int) -> Table:
    """The table of peers with at most `rows` rows below the heading; the last one counts the others."""
    wide = width >= 112
    marks = {c.members[c.bottleneck.position].peer: WAITS[c.bottleneck.what] for c in view.chains}
    busy = any(p.chain for p in view.peers.values())
    table = plain_table(width=min(width, PEERS_WIDTH))
    table.add_column("peer", no_wrap=True, max_width=NAME_WIDTH)
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
    roomy = width >= 64
    if roomy:
        table.add_column("sent", justify="right", no_wrap=True, min_width=7)
    if wide or (roomy and not busy):
        table.add_column("fp32/sent" if wide else "saves", justify="right", no_wrap=True, min_width=5)
    listed = view.listed()
    shown = listed if len(listed) <= rows else listed[: max(0, rows - 1)]
    places = [[_place(view, p, words) for p in shown] for words in ((3, 2, 1, 0) if width >= 88 else (2, 1, 0))]
    longest = [max((text.cell_len for text in texts), default=0) for texts in places]
    for row, p in enumerate(shown):
        place = _Fitting([(texts[row], most) for texts, most in zip(places, longest, strict=True)])
        cells: list[RenderableType] = [Text(p.name, style="bold" if p.here else "strike"), place]
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
            cells.append(busy_share(p, marks.get(p.peer, "")))
        cells += [
            f"{p.step}/{p.steps}" if trains and p.phase != "finished" else "-",
            f"{p.loss:.3f}" if trains and p.loss is not None else "-",
        ]
        if roomy:
            cells.append(size(p.sent_bytes) if p.sent_bytes is not None else "-")
        if wide or (roomy and not busy):
            cells.append(times(p.dense_bytes / p.sent_bytes) if p.sent_bytes and p.dense_bytes else "-")
        table.add_row(*cells)
    if len(shown) < len(listed):
        table.add_row(f"and {len(listed) - len(shown)} more", style=GRAY)
    if not listed:
        table.add_row(Text("nobody yet", style=GRAY))
    return table


def chains_table(view: RunView, width: int, rows: int) -> Table:
    """The table of chains: each stage's last inner step, forward (→) and backward (←), and the bottleneck."""
    table = plain_table(expand=True)
    table.add_column("chain", no_wrap=True)
    table.add_column("peer", no_wrap=True, max_width=NAME_WIDTH)
    columns = ["busy", "waits →", "waits ←", "sends →", "sends ←", *(("depth", "queue") if width >= 88 else ())]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("slowest", no_wrap=True, ratio=1)
    listed = [(c, i, p) for c in view.chains for i, p in enumerate(c.members)]
    shown = listed if len(listed) <= rows else listed[: max(0, rows - 1)]
    said = {chain.name: _slowest(chain) for chain, _, _ in shown}
    longest = [max(text.cell_len for text in texts) for texts in zip(*said.values(), strict=True)]
    for chain, position, p in shown:
        a = p.chain
        cells = ["-"] * len(columns)
        if a is not None:
            cells = [percent(a.share(seconds)) for seconds in (a.busy_s, a.wait_forward_s, a.wait_backward_s)]
            cells += [size(a.forward_bytes), size(a.backward_bytes), str(a.depth), str(a.queued)]
            cells = cells[: len(columns)]
        mark: RenderableType = ""
        if position == chain.bottleneck.position:
            mark = _Fitting(list(zip(said[chain.name], longest, strict=True)))
        table.add_row(chain.name if position == 0 else "", Text(p.name, style="bold"), *cells, mark)
    if len(shown) < len(listed):
        table.add_row(f"and {len(listed) - len(shown)} more", style=GRAY)
    return table


def _slowest(chain: ChainView) -> list[Text]:
    """A chain's bottleneck in ever fewer words."""
    found, names = chain.bottleneck, [p.name for p in chain.members]
    said = found.text(names), found.brief(names), percent(found.share)
    return [Text(f"{WAITS[found.what]} {text}", style=ORANGE, no_wrap=True) for text in said]


class _Fitting:
    """Draws the first text that fits the column, else the last. Texts come with the longest length of their kind."""

    def __init__(self, texts: list[tuple[Text, int]]) -> None:
        self._texts = texts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield next((text for text, most in self._texts if most <= options.max_width), self._texts[-1][0])


def _place(view: RunView, p: PeerView, words: int) -> Text:
    mark, style = {"full": ("●", BLUE), "stage": ("●", ORANGE)}.get(p.role, ("○", GRAY))
    return Text.assemble((mark, style), f" {view.place(p, words)}", no_wrap=True)


def busy_share(p: PeerView, mark: str) -> Text:
    """A stage's share of computing, with the mark of a bottleneck."""
    if p.busy is None:
        return Text("-")
    return Text(percent(p.busy) + (mark or " "), style=ORANGE if mark else "")


# --- the loss curve


def shows_marks(line: Sequence[Point], marks: Sequence[Point], width: int) -> bool:
    """Returns whether a chart of this width has space for all marks side by side."""
    return bool(marks) and (not line or len(marks) <= (width - TICK_WIDTH - 2) // 3)


def chart(
    line: Sequence[Point],
    marks: Sequence[Point],
    width: int,
    height: int,
    *,
    ascii_only: bool = False,
    x_label: str = "",
) -> list[Text]:
    """A line chart of `height` lines of `width` characters, with `marks` on top and labelled axes.

    A character cell has two by four dots in Braille, or is one dot in ASCII. Points are (x, y), sorted by x; a column
    shows the mean of its points of `line`.
    """
    plot_width, plot_height = width - TICK_WIDTH - 2, height - 2
    line, marks = ([point for point in some if all(abs(value) < 1e15 for value in point)] for some in (line, marks))
    points = [*line, *marks]
    if not points or plot_width < 4 or plot_height < 1:
        return [Text("waiting for the first step" if not points and n == height // 2 else "") for n in range(height)]
    left, right = math.floor(min(x for x, _ in points)), math.ceil(max(x for x, _ in points))
    low, high = min(y for _, y in points), max(y for _, y in points)
    right = right if right > left else left + 1
    if high - low < 1e-3:
        low, high = low - 0.05, high + 0.05
    across, down = (1, 1) if ascii_only else (2, 4)

    def column(x: float, columns: int) -> int:
        return min(columns - 1, int((x - left) / (right - left) * columns))

    def row(y: float, rows: int) -> int:
        return min(rows - 1, max(0, int((high - y) / (high - low) * rows)))

    cells: dict[tuple[int, int], int] = {}
    for dot_x, dot_y in _joined(line, lambda x: column(x, plot_width * across), lambda y: row(y, plot_height * down)):
        cell = (dot_y // down, dot_x // across)
        cells[cell] = cells.get(cell, 0) | (1 if ascii_only else DOTS[dot_y % 4][dot_x % 2])
    marked = {(row(y, plot_height), column(x, plot_width)) for x, y in marks}
    if not shows_marks(line, marks, width):
        marked = set()
    ticks = {0: high, plot_height - 1: low}
    if plot_height >= 5:
        ticks[plot_height // 2] = high - (high - low) * (plot_height // 2 + 0.5) / plot_height
    digits = next((n for n in (2, 3) if len({f"{tick:.{n}f}" for tick in ticks.values()}) == len(ticks)), 4)
    out = []
    for y in range(plot_height):
        text = Text(_tick(ticks[y], digits) if y in ticks else " " * (TICK_WIDTH + 1), style=GRAY)
        text.append(("+" if ascii_only else "┤") if y in ticks else ("|" if ascii_only else "│"), style=GRAY)
        for x in range(plot_width):
            if (y, x) in marked:
                text.append("o" if ascii_only else "●", style=f"bold {ORANGE}")
            elif (y, x) in cells:
                text.append("*" if ascii_only else chr(0x2800 + cells[y, x]), style=SKY)
            else:
                text.append(" ")
        out.append(text)
    corner, dash = ("+", "-") if ascii_only else ("└", "─")
    out.append(Text(" " * (TICK_WIDTH + 1) + corner + dash * plot_width, style=GRAY))
    start, end = str(left), str(right)
    middle = x_label.center(max(0, plot_width - len(start) - len(end)))
    out.append(Text(" " * (TICK_WIDTH + 2) + start + middle[: plot_width - len(start) - len(end)] + end, style=GRAY))
    return out


def _tick(value: float, digits: int) -> str:
    """The label of a tick, of constant width."""
    shown = f"{value:{TICK_WIDTH}.{digits}f}"
    return (shown if len(shown) <= TICK_WIDTH else f"{value:{TICK_WIDTH}.0e}") + " "


def _joined(
    line: Sequence[Point], column: Callable[[float], int], row: Callable[[float], int]
) -> list[tuple[int, int]]:
    """The dots of the polyline through the means of the dot columns."""
    sums: dict[int, list[float]] = {}
    for x, y in line:
        sums.setdefault(column(x), []).append(y)
    dots: list[tuple[int, int]] = []
    for x in sorted(sums):
        y = row(sum(sums[x]) / len(sums[x]))
        if dots:
            x0, y0 = dots[-1]
            steps = max(abs(x - x0), abs(y - y0))
            dots += [(x0 + (x - x0) * i // steps, y0 + (y - y0) * i // steps) for i in range(1, steps)]
        dots.append((x, y))
    return dots
