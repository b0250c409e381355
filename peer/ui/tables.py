"""The tables of the live screen: who is there, and how busy the members of chains are."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from peer.ui.names import END, LONGEST
from peer.ui.plot import ORANGE, SKY
from peer.ui.run_state import ChainView, PeerView, View
from peer.ui.text import rate, size, times
from peer.ui.utilization import WAITS, percent

BLUE, GREEN, RED = "#0072B2", "#009E73", "#DC3545"
WIDEST_NAME = LONGEST + 1 + END
WIDEST = 132
"""Characters of a row of the table of peers: the eye loses a longer one."""


def peers(view: View, width: int, rows: int) -> Table:
    """Of everybody, at most so many rows below the heading; the last one says how many more there are."""
    wide = width >= 112
    marks = {c.members[c.bottleneck.position].peer: WAITS[c.bottleneck.what] for c in view.chains}
    busy = any(p.chain for p in view.peers.values())
    table = Table(
        width=min(width, WIDEST), box=None, padding=(0, 1, 0, 0), header_style="bright_black", show_edge=False
    )
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
    places = [[_place(view, p, words) for p in shown] for words in ((3, 2, 1) if width >= 88 else (2, 1))]
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
            cells.append(_share(p, marks.get(p.peer, "")))
        cells += [
            f"{p.step}/{p.steps}" if trains and p.phase != "finished" else "-",
            f"{p.loss:.3f}" if trains and p.loss is not None else "-",
            size(p.sent_bytes) if p.sent_bytes is not None else "-",
        ]
        if wide or not busy:
            cells.append(times(p.dense_bytes / p.sent_bytes) if p.sent_bytes and p.dense_bytes else "-")
        table.add_row(*cells)
    if len(shown) < len(listed):
        table.add_row(f"and {len(listed) - len(shown)} more", style="bright_black")
    if not listed:
        table.add_row(Text("nobody yet", style="bright_black"))
    return table


def chains(view: View, width: int, rows: int) -> Table:
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
        table.add_row(f"and {len(listed) - len(shown)} more", style="bright_black")
    return table


def _slowest(chain: ChainView) -> list[Text]:
    """What the chain waits for, in ever fewer words."""
    found, names = chain.bottleneck, [p.name for p in chain.members]
    said = found.text(names), found.brief(names), percent(found.share)
    return [Text(f"{WAITS[found.what]} {text}", style=ORANGE, no_wrap=True) for text in said]


class _Fitting:
    """The first of the texts, each with the length of the longest one of its kind in the column, whose kind has room; else the last."""

    def __init__(self, texts: list[tuple[Text, int]]) -> None:
        self._texts = texts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield next((text for text, most in self._texts if most <= options.max_width), self._texts[-1][0])


def _place(view: View, p: PeerView, words: int) -> Text:
    mark, style = {"full": ("●", BLUE), "stage": ("●", ORANGE)}.get(p.role, ("○", "bright_black"))
    return Text.assemble((mark, style), f" {view.place(p, words)}", no_wrap=True)


def _share(p: PeerView, mark: str) -> Text:
    """Of the time that a stage computes, marked if its chain waits for that or for what comes to it."""
    if p.busy is None:
        return Text("-")
    return Text(percent(p.busy) + (mark or " "), style=ORANGE if mark else "")
