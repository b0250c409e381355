"""The monitor's views as tables: replicas and chains, rounds, contributors, health and the user's own peer."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import JustifyMethod, RenderableType
from rich.panel import Panel
from rich.text import Text

from peer.ui.contributors import contributors, own_lines
from peer.ui.lines import MARKS
from peer.ui.run_view import LEGEND, WAITS, PeerView
from peer.ui.screen import LEVEL_STYLES, busy_share, panel, plain_table
from peer.ui.state import State
from peer.ui.text import blocks, called, clock, count, duration, number, rate, size
from protocol.ledger.credits import Credits

Row = tuple[Text | str, ...]
SCROLLING = "arrows scroll"
_REACHED = {
    "direct": "reached directly", "mapped": "reached through an open port of the router",
    "private": "behind a router, reached by a relay or by hole punching",
    "unknown": "not known yet how they are reached",
}  # fmt: skip
_ROLES = {"full": "a full replica", "spare": "a spare", "joining": "joining a replica", "waiting": "waiting for a plan"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a view."""

    name: str
    least: int = 0
    """Width of a screen, in characters, that shows it."""
    left: bool = False
    """Left-aligned."""
    wide: bool = False
    """Takes the remaining width."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """The content of a view."""

    title: str
    columns: tuple[Column, ...]
    rows: Sequence[Row]
    legend: str = ""
    """Meaning of marks."""


def sheet(view: str, state: State) -> Sheet:
    """The sheet of a view but `me`."""
    made = {"chains": _chains, "rounds": _rounds, "credits": _contributors, "health": _health}[view]
    return _dated(made(state), state)


def _dated(made: Sheet, state: State) -> Sheet:
    """Adds the age to the title if no node answers."""
    if not state.silent or state.news_age_seconds is None:
        return made
    return dataclasses.replace(made, title=f"{made.title} · no news for {duration(state.news_age_seconds)}")


def mine(state: State, credits: Credits, peer: str | None) -> Sheet:
    """The view of the user's own peer, if there is one."""
    if peer is None:
        rows: list[Row] = [("you have no peer in this folder (--dir names another folder)",)]
        if state.about.join_line:
            rows.append(("",))
            rows += [(line,) for line in ("to take part with this machine:", f"potluck join {state.about.join_line}")]
        elif not state.about.is_open:
            rows.append(("this run is by invitation: one of its operators can give you a line to join",))
        return Sheet("me", (Column("", left=True, wide=True),), rows)
    now = next((p for p in state.peers if p.peer == peer), None)
    when = f"at {clock(state.heard)}" if state.silent and state.heard is not None else "now"
    is_so = "was" if state.silent else "is"
    if now is None or not now.here:
        rows = [(f"your peer {is_so} not there {when}",)]
    else:
        does = f"a stage with {blocks(now.first, now.last)}" if now.role == "stage" else _ROLES.get(now.role, now.role)
        step = f"step {now.step} of {now.steps}" if _steps(now) else ""
        loss = "" if now.loss is None else f"loss {now.loss:.3f} nats per token"
        rows = [(f"your peer {is_so} {does} {when}: {now.phase}",), (", ".join(filter(None, (step, loss))),)]
        rows = [row for row in rows if row[0]]
    names = {known.peer: known.name for known in state.peers}
    rows += [(line,) for line in own_lines(contributors(credits, names), peer, credits.round, state.rounds, names)]
    return _dated(Sheet("me", (Column("", left=True, wide=True),), rows), state)


def draw(shown: Sheet, width: int, height: int, pattern: str, skip: int, *, ascii_only: bool) -> tuple[Panel, int]:
    """A panel of exactly `width` x `height` characters with the rows that match `pattern`; and `skip`, limited."""
    rows = [row for row in shown.rows if _has(row, pattern)] if pattern else list(shown.rows)
    headed = any(column.name for column in shown.columns)
    if not headed:  # sentences
        rows = list(_wrapped(rows, width - 3 - 2 * len(shown.columns)))
    space = max(1, height - 2 - headed)
    skip = max(0, min(skip, len(rows) - space))
    seen = rows[skip : skip + space]
    between = 2 if headed and width >= 130 else 1
    table = plain_table(between, expand=True, show_header=headed)
    places = [i for i, column in enumerate(shown.columns) if width >= column.least]
    for column in (shown.columns[i] for i in places):
        justify: JustifyMethod = "left" if column.left else "right"
        table.add_column(
            column.name, justify=justify, no_wrap=True, ratio=1 if column.wide else None, overflow="ellipsis"
        )
    for row in seen:
        table.add_row(*(_cell(row[i]) for i in places))
    title = f" {shown.title} "
    if len(rows) > len(seen) or pattern:
        title += f"· {skip + 1 if seen else 0}-{skip + len(seen)} of {len(rows)} "
    legend = " · ".join(filter(None, (shown.legend, SCROLLING if len(rows) > len(seen) else "")))
    body: RenderableType = (
        table if rows else Text("nobody has that" if pattern else "nothing yet", style="bright_black")
    )
    drawn = panel(title.strip(), body, width, height, ascii_only, legend)
    return drawn, skip


def _wrapped(rows: Sequence[Row], width: int) -> Iterator[Row]:
    """Wraps the last cell, a sentence, into further rows."""
    for *marks, said in rows:
        first, *others = textwrap.wrap(str(said), max(width, 1)) or [""]
        yield (*marks, first)
        yield from ((*("" for _ in marks), line) for line in others)


def _cell(value: Text | str) -> Text:
    return value if isinstance(value, Text) else Text(value)


def _has(row: Row, pattern: str) -> bool:
    return any(pattern.casefold() in str(cell).casefold() for cell in row)


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def _chains(state: State) -> Sheet:
    """A row for each peer, under its replica."""
    replicas = {r.replica: r for r in state.replicas}
    members: dict[int | None, dict[int, str]] = defaultdict(lambda: defaultdict(lambda: "?"))
    for p in state.peers:
        members[p.replica][p.position] = p.name
    rows: list[Row] = []
    for p in state.peers:
        replica = replicas.get(p.replica) if p.replica is not None else None
        slowest = replica.bottleneck if replica is not None else None
        mark = WAITS[slowest.what] if slowest is not None and slowest.position == p.position else ""
        waits = slowest.brief(members[p.replica]) if slowest is not None and mark else ""
        does = blocks(p.first, p.last) if p.role == "stage" else p.role
        rows.append((
            replica.name if replica is not None and replica.chain else "",
            Text(p.name, style="bold" if p.here else "strike"),
            does,
            p.phase,
            busy_share(p, mark),
            f"{p.step}/{p.steps}" if _steps(p) else "-",
            _number(p.loss) if replica is not None else "-",
            p.device or "-",
            size(p.memory_bytes) if p.memory_bytes else "-",
            rate(p.up_bps) if p.up_bps else "-",
            p.reachable or "-",
            Text(f"{mark} {waits}", style=LEVEL_STYLES["warning"]) if mark else "",
        ))  # fmt: skip
    columns = (
        Column("chain", left=True), Column("peer", left=True), Column("does", left=True),
        Column("phase", 70, left=True), Column("busy"), Column("step"), Column("loss"),
        Column("device", 150, left=True), Column("memory", 150), Column("uplink", 150),
        Column("reached", 150, left=True), Column("slowest", 108, left=True, wide=True),
    )  # fmt: skip
    full = sum(not r.chain for r in state.replicas)
    return Sheet(
        f"replicas and chains: {full} full, {count(range(state.replicas_total - full), 'chain')}",
        columns,
        rows,
        LEGEND if any(r.bottleneck for r in state.replicas) else "",
    )


def _steps(p: PeerView) -> bool:
    return p.replica is not None and p.phase != "finished"


def _rounds(state: State) -> Sheet:
    rows: list[Row] = []
    for r in state.recent:
        without = [f"{x.replica}: {x.reason}" for x in r.left_out if not x.probation]
        more, new = r.left_out_total - len(without), ", ".join(x.replica for x in r.left_out if x.probation)
        without += ([f"{more} more"] if more else []) + ([f"new: {new}"] if new else [])
        level = "warning" if r.left_out_total else "info"
        rows.append((
            str(r.round),
            clock(r.time),
            "-" if r.seconds is None else duration(r.seconds),
            str(r.replicas),
            f"{r.tokens:,}",
            _number(r.tokens_per_second, ",.0f"),
            _number(r.loss),
            _number(r.held_out),
            size(r.bytes),
            Text("; ".join(without), style=LEVEL_STYLES[level]),
        ))  # fmt: skip
    columns = (
        Column("round"), Column("decided", 90), Column("took"), Column("replicas"), Column("tokens", 70),
        Column("tokens/s", 90), Column("loss"), Column("held out", 90), Column("payloads", 130),
        Column("left out", left=True, wide=True),
    )  # fmt: skip
    return Sheet(f"rounds: the newest {len(rows)}" if rows else "rounds", columns, rows)


def _contributors(state: State) -> Sheet:
    rows: list[Row] = [
        (
            str(c.rank), Text(c.name, style="bold"), f"{c.tokens:,}", f"{c.share:.1%}", f"{c.rounds:,}",
            f"{c.streak:,}", f"{c.probation:,}", f"{c.left_out:,}", c.reason,
        )
        for c in state.contributors
    ]  # fmt: skip
    columns = (
        Column(""), Column("peer", left=True), Column("tokens"), Column("share", 70), Column("rounds"),
        Column("in a row", 76), Column("probation"), Column("left out"),
        Column("the last time because", 90, left=True, wide=True),
    )  # fmt: skip
    total = state.contributors_total
    shown = count(range(total), "contributor") if total == len(rows) else f"the first {len(rows)} of {total:,}"
    legend = "probation: rounds that are kept, to count later" if any(c.probation for c in state.contributors) else ""
    return Sheet(f"credits: {shown}, {state.tokens:,} tokens", columns, rows, legend)


def _health(state: State) -> Sheet:
    rows: list[Row] = [(Text(MARKS[level], style=LEVEL_STYLES[level]), text) for level, text in _checks(state)]
    return Sheet("health", (Column("", left=True), Column("", left=True, wide=True)), rows)


def _checks(state: State) -> Iterator[tuple[str, str]]:
    health, there = state.health, "there"
    here = sum(o.here for o in health.operators)
    enough = "good" if here >= health.votes_needed else "error"
    if state.silent and state.heard is not None and state.news_age_seconds is not None:
        enough, there = "warning", f"there at {clock(state.heard)}"
        text = f"no bootstrap node has answered for {duration(state.news_age_seconds)}"
        yield "error", f"{text}; what follows is of {clock(state.heard)}"
    nodes, votes = count(health.operators, "bootstrap node"), number(health.votes_needed, "vote")
    yield enough, f"{here} of {nodes} {there}; a round needs {votes}"
    for o in health.operators:
        facts = (
            there if o.here else f"not {there}",
            "leads" if o.leads else "",
            "voted for the newest round" if o.voted else "",
        )
        yield "info" if o.here and not state.silent else "warning", f"{o.name}: {', '.join(filter(None, facts))}"
    for fork in health.forks:
        yield "error", fork
    if not health.forks:
        yield "good", "every round has one result, the same from all nodes"
    names = {p.peer: p.name for p in state.peers} | {o.peer: o.name for o in health.operators}
    if (compared := health.compared) is None:
        yield "info", "the peers' models are not compared yet"
    elif not compared.wrong:
        yield "good", f"all peers have the same model, bit by bit, after round {compared.round}"
    else:
        for d in compared.wrong:
            yield "error", f"{called(d.peer, names)} has a different model: {d.shard} after round {compared.round}"
    for how, n in health.reachable.items():
        if n:
            yield "info", f"{number(n, 'peer')}: {_REACHED[how]}"
    for node, x in health.relays.items():
        text = f"{called(node, names)} relays {x.circuits} streams at {x.bps / 1e6:.1f} Mb/s"
        yield "info", f"{text}; {size(x.bytes)} since the start, {x.refused} refused"
    yield "info", f"updates left out so far, those of newcomers aside: {health.left_out_total:,}"
    yield "info", f"peers refused by a bootstrap node for asking too much: {number(health.refused_total, 'time')}"
