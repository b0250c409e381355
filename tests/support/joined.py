"""What a volunteer's peer tells of itself, made up: events of a newcomer, and the screen that shows them."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console

from peer import events
from peer.events import Body, Event
from peer.ui.join_screen import JoinScreen
from tests.support.tui import PEERS

ME = PEERS[0]
NOON = 1_700_000_000.0


class Seen:
    """A screen of this size, and a clock that moves with the events."""

    def __init__(self, width: int = 80, height: int = 24, encoding: str = "utf-8") -> None:
        self.time = NOON
        self.out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        console = Console(
            width=width, height=height, file=self.out, force_terminal=True, legacy_windows=False, _environ={}
        )
        self.screen = JoinScreen(ME, console, clock=lambda: self.time)

    def tell(self, body: Body, seconds: float = 1.0) -> Seen:
        self.time += seconds
        self.screen.feed(Event(self.time, ME, body))
        return self

    def lines(self) -> list[str]:
        width, height = self.screen.console.size
        console = Console(width=width, height=height, file=io.StringIO(), record=True, legacy_windows=False)
        console.print(self.screen.frame())
        return console.export_text().rstrip("\n").split("\n")

    def text(self) -> str:
        return " ".join("\n".join(self.lines()).replace("│", " ").split())


def applied(round: int, own: int = 2000, **changes: object) -> events.Round:
    values = {
        "seconds": {}, "bytes_sent": 1_000_000 * round, "bytes_received": 5_000_000 * round,
        "boundary_forward_bytes": 0, "boundary_backward_bytes": 0, "boundary_tokens": 0, "rounds": 200, "peers": 12,
        "own_tokens": own, "tokens": 31_000, "own_tokens_so_far": own * round, "tokens_so_far": 31_000 * round,
        "rank": 3 if own else 0, "contributors": 14, "loss": 4.0 - 0.01 * round,
    }  # fmt: skip
    return events.Round(round=round, **{**values, **changes})  # type: ignore[arg-type]


def found() -> events.Found:
    return events.Found(run="ab" * 32, name="Shakespeare", parameters=6_800_000, round_seconds=30.0, probation=8)


def trains(seen: Seen, round: int, steps: int = 7) -> Seen:
    seen.tell(events.Role(round=round, role="full", replica=3, first=0, last=4, position=0, stages=1, steps=15))
    for step in range(1, steps + 1):
        seen.tell(events.Step(round=round, step=step, loss=3.5, tokens=2048, seconds=2.0), 2.0)
    return seen


def moments(width: int = 80, height: int = 24) -> Iterator[tuple[str, JoinScreen]]:
    """A volunteer's first minutes, and the ends that there are: each with its name."""
    seen = Seen(width, height).tell(found(), 5.0)
    yield "second-5", seen.screen
    seen.tell(events.Fetching(round=0, came=12_000_000, bytes=28_000_000, seconds=4.0, done=False), 13.0)
    seen.time += 2.0
    yield "second-20", seen.screen
    seen.tell(events.Waiting(round=1, seconds=28.0), 12.0)
    trains(seen, 1, 12)
    yield "second-60", seen.screen
    yield "on-probation", story(width, height, rounds=5).screen
    seen = story(width, height)
    yield "counted", seen.screen
    seen.tell(events.Leaving(seconds=20.0))
    yield "leaving", seen.screen
    seen = story(width, height)
    yield "over", seen.tell(events.Finished(round=13, digests={})).screen


def story(width: int = 80, height: int = 24, encoding: str = "utf-8", rounds: int = 12) -> Seen:
    """A newcomer's first rounds, in the middle of the next one."""
    seen = Seen(width, height, encoding).tell(found())
    for round in range(1, rounds + 1):
        probation = "is on probation, and counts from round 9 on" if round < 9 else ""
        trains(seen, round, 15).tell(applied(round, 0 if probation else 2000, probation=probation))
    return trains(seen, rounds + 1)
