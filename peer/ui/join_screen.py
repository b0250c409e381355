"""The live screen of `potluck join`: what this machine does now, what of the run is its work, and what comes of it.

Drawn from the peer's own events. A frame has exactly the requested size, 60 x 12 characters or more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import date, datetime

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from peer import events
from peer.events import Event
from peer.ui.lines import MARKS, Lines, on_probation
from peer.ui.screen import GRAY, GREEN, LEVEL_STYLES, LiveScreen, Plain, bar, brand, chart, panel, title_line
from peer.ui.text import Names, blocks, called, clean, cleaned, duration, number, percent, size

NOTES = 200
ROUNDS = 4096
"""Losses that the curve shows, at most."""
STEPS = 16
"""Steps whose speed is shown."""
LABEL = 11
PROMPT = 24
"""Characters of the text before the model's words."""
SAMPLE_ROWS = 2
"""Lines of both, at most."""


class JoinScreen(LiveScreen):
    """Shows the peer `me` while its events arrive: `with JoinScreen(me) as screen: ... screen.feed(event)`.

    On an output that is no terminal, and after the screen has ended, the events' lines are printed instead.
    name: that the peer announces.
    """

    def __init__(
        self, me: str, name: str = "", console: Console | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(Lines(own=True), console)
        self._clock, names = clock, Names()
        names.learn(me, name)
        self._who = f"you are {called(me, names)}"
        self._notes: deque[tuple[str, str]] = deque(maxlen=NOTES)
        self._own = Lines(own=True)
        self._found: events.Found | None = None
        self._role: events.Role | None = None
        self._done: events.Round | None = None
        self._steps: deque[events.Step] = deque(maxlen=STEPS)
        self._losses: deque[tuple[float, float]] = deque(maxlen=ROUNDS)
        self._sample = ""
        self._now, self._then, self._since = "looks for the run", "a node of the run says what it trains", clock()
        self._goes_on = True
        self._applied = 0
        self._today: tuple[date, int, int] | None = None
        self._began = self._looked = clock()

    def _take(self, event: Event) -> None:
        event = cleaned(event)
        self._notes.extend(said for said in self._own.said(event) if said.level in ("warning", "error"))
        match event.body:
            case events.Found() as found:
                self._found = found
                self._does("finds out how others reach this machine")
            case events.ReadingLog(round=round, newest=newest):
                self._does(f"reads the log: round {round:,} of {newest:,}")
            case events.Fetching(came=came, bytes=whole, done=False):
                self._does(f"fetches the model: {size(came)} of {size(max(came, whole))}")
            case events.Waiting(round=round, seconds=seconds):
                self._does(f"is ready; round {round} begins in about {duration(seconds)}")
            case events.Role() as role:
                self._role = role
                self._steps.clear()
                self._does(_trains(role))
            case events.Step() as step:
                self._steps.append(step)
            case events.Offered(round=round, bytes=sent):
                self._does(f"sends its update of round {round} ({size(sent)})")
            case events.Withdrew(round=round):
                self._does(f"sits out round {round}")
            case events.Round() as done:
                self._applies(event.time, done)
            case events.Paused(reason=reason):
                self._steps.clear()
                self._does(f"pauses: {reason}")
            case events.Resumed():
                self._does("comes back to the run")
            case events.Leaving(seconds=seconds):
                self._role = None
                self._does(f"hands its last work over, in {seconds:g} s at most", "Ctrl-C once more ends at once")
            case events.Finished(round=round):
                self._role, self._goes_on = None, False
                self._does("has the finished model", f"the run is over after round {round}")

    def _does(self, text: str, then: str = "") -> None:
        if not then and self._found is not None:
            then = f"{self._found.parameters / 1e6:,.1f}M parameters; a round takes"
            then += f" {duration(self._found.round_seconds)} of training"
        self._now, self._then, self._since = text, then, self._clock()

    def _applies(self, time: float, done: events.Round) -> None:
        day = datetime.fromtimestamp(time).date()
        if self._today is None or day != self._today[0]:
            before = self._done if self._today is not None else None
            self._today = (day, before.bytes_sent if before else 0, before.bytes_received if before else 0)
        if self._done is not None and done.bytes_sent < self._done.bytes_sent:  # it has started again, after a pause
            day, sent, received = self._today
            self._today = (day, sent - self._done.bytes_sent, received - self._done.bytes_received)
        self._done = done
        if not done.holds or not done.round:
            return
        self._applied += 1
        if done.loss is not None:
            self._losses.append((done.round, done.loss))
        self._sample = next((found.sample for found in done.evaluations if found.sample), self._sample)
        self._does(f"has applied round {done.round}; the next one begins")

    def __exit__(self, *error: object) -> None:
        with self._lock:
            if self._goes_on and self._done is not None:
                self._role = None
                self._does("has left the run", "the same command brings it back")
            self._goes_on = False
        super().__exit__(*error)

    # --- a frame

    def has_news(self) -> bool:
        """As the base class, and once a second: figures change by time alone."""
        now = self._clock()
        if not super().has_news() and 0.0 <= now - self._looked < 1.0:
            return False
        self._looked = now
        return True

    @property
    def _last_height(self) -> int:
        return 18

    def _drawn(self, width: int, height: int) -> RenderableType:
        ascii_only = self.console.options.ascii_only
        top: list[RenderableType] = [self._title(width), panel(*self._step(width - 4), width, 4, ascii_only)]
        rows = height - 5
        notes = min(max(3, len(self._told(width - 4, height)) + 2), 3 + (rows - 11) // 4) if rows >= 12 else 0
        middle = rows - notes
        facts = self._facts()
        if width >= 76 and self._losses:
            left = min(62, max(50, width // 2))
            plot = panel(
                "loss of the model", Group(*self._curve(width - left - 4, middle - 2)), width - left, middle, ascii_only
            )
            row = Table.grid(padding=0)
            row.add_row(panel("your part", facts, left, middle, ascii_only), plot)
            body: list[RenderableType] = [row]
        else:
            body = [panel("your part", facts, width, middle, ascii_only)]
        if notes:
            told = self._told(width - 4, notes - 2) or [Text("nothing is wrong", style=GRAY)]
            body.append(panel("news", Group(*told), width, notes, ascii_only))
        frame = Group(*top, *body)
        return Plain(frame) if ascii_only else frame

    def _title(self, width: int) -> Text:
        name = clean(self._found.name) if self._found is not None else ""
        left = brand(name).append(f" · {self._who}", style=GRAY)
        right = ""
        if self._done is not None and self._done.rounds:
            right = f"round {min(self._done.round + 1, self._done.rounds):,} of {self._done.rounds:,}"
        return title_line(left, right, width)

    def _step(self, width: int) -> tuple[str, RenderableType]:
        """The title and two lines: what it does now, and how far the round's steps are."""
        now = Text(self._now, no_wrap=True)
        if self._goes_on:
            now.append(f", for {duration(self._clock() - self._since)}", style=GRAY)
        now.truncate(width, overflow="ellipsis")
        role, steps = self._role, self._steps
        if role is None or not steps or steps[-1].round != role.round:
            return "this machine", Group(now, Text(self._then, style=GRAY, no_wrap=True, overflow="ellipsis"))
        last, seconds = steps[-1], sum(step.seconds for step in steps)
        label = f" step {last.step} of {max(role.steps, last.step)}"
        if seconds > 0:
            label += f" · {sum(step.tokens for step in steps) / seconds:,.0f} tokens/s"
        if last.loss is not None:
            label += f" · loss {last.loss:.3f}"
        if width >= 100 and role.steps > last.step:
            label += f" · {duration(seconds / len(steps) * (role.steps - last.step))} left"
        free = max(4, width - len(label))
        done = Text.assemble(bar(last.step / max(1, role.steps, last.step), free), label, no_wrap=True)
        done.truncate(width, overflow="ellipsis")
        return "this machine", Group(now, done)

    def _facts(self) -> Table:
        """The least important ones last, as a small screen shows the first."""
        table = Table.grid(padding=(0, 1))
        table.add_column(style=GRAY, no_wrap=True, min_width=LABEL)
        table.add_column(overflow="fold")
        done, leaves = self._done, "; Ctrl-C leaves" if self._goes_on else ""
        if done is None or not done.holds:
            table.add_row("so far", Text("your first round is ahead"))
            if self._found is not None and self._found.probation:
                first = number(self._found.probation, "round")
                table.add_row("probation", Text(f"for {first} your work is checked and kept; then it counts"))
            table.add_row("running", f"{duration(self._clock() - self._began)}{leaves}")
            return table
        mine = f"{done.own_tokens:,} of {done.tokens:,} tokens yours"
        if done.probation:
            mine = on_probation(done.probation)
        elif not done.own_tokens_so_far:
            mine = "without you yet"
        table.add_row(f"round {done.round:,}", Text(mine, style=GREEN if done.own_tokens else ""))
        if done.rank:
            share = percent(done.own_tokens_so_far / max(1, done.tokens_so_far))
            of = f"rank {done.rank:,} of {done.contributors:,}"
            table.add_row("in all", Text.assemble((f"{done.own_tokens_so_far:,}", "bold"), f" tokens, {share}, {of}"))
        so_far = f"{done.tokens_so_far:,}" if done.tokens_so_far < 1e7 else f"{done.tokens_so_far / 1e6:,.1f}M"
        if self._losses:
            (_, begun), (_, last) = self._losses[0], self._losses[-1]
            more = f"  from {begun:.3f}" if len(self._losses) > 1 else ""
            table.add_row("loss", Text.assemble((f"{last:.3f}", "bold"), (more, GRAY)))
        table.add_row("the swarm", f"work of {number(done.peers, 'peer')}, {so_far} tokens")
        table.add_row("running", f"{duration(self._clock() - self._began)}, {number(self._applied, 'round')}{leaves}")
        _, sent, received = self._today or (None, 0, 0)
        table.add_row("today", f"{size(done.bytes_sent - sent)} up, {size(done.bytes_received - received)} down")
        return table

    def _curve(self, width: int, height: int) -> list[Text]:
        points = list(self._losses)
        return chart(points, points, width, height, ascii_only=self.console.options.ascii_only, x_label="rounds")

    def _told(self, width: int, rows: int) -> list[Text]:
        """The model's newest words, and behind them as many of the newest warnings as there is space for."""
        found = list[Text]()
        for level, text in reversed(self._notes):
            note = Text.assemble((f"{MARKS[level]} ", LEVEL_STYLES[level]), text).wrap(self.console, width)
            space = rows - bool(self._sample) - len(found)
            if found and len(note) > space:
                break
            found = _cut([*note], width, space) + found
        if not self._sample:
            return found
        before, _, after = self._sample.rpartition(" ⇒ ")
        prompt = f"… {before[-PROMPT:].partition(' ')[2]} ⇒ " if before else ""
        written = Text.assemble(("it writes ", GRAY), (prompt, GRAY), after).wrap(self.console, width)
        return _cut([*written], width, min(SAMPLE_ROWS, rows - len(found))) + found


def _cut(lines: list[Text], width: int, rows: int) -> list[Text]:
    """So many of the lines at most; where there are more, … ends the last one."""
    if len(lines) > rows > 0:
        lines[rows - 1].rstrip()
        lines[rows - 1].truncate(width - 1)
        lines[rows - 1].append("…")
    return lines[:rows]


def _trains(role: events.Role) -> str:
    if role.role == "full":
        return f"trains the whole model in round {role.round:,}"
    part = f"{blocks(role.first, role.last)}, stage {role.position + 1} of {role.stages}"
    return f"trains {part}, in round {role.round:,}"
