"""What a volunteer sees while the peer joins, trains, pauses and leaves, at several sizes."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.text import Text

from peer import events
from peer.events import Body, Event
from peer.ui.join_screen import JoinScreen
from protocol.identity import short_peer
from protocol.wire.claims import Evaluation
from tests.support.tui import PEERS

SIZES = [(60, 12), (60, 20), (80, 24), (120, 40), (200, 60)]
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
        self.screen = JoinScreen(ME, "Ada", console, clock=lambda: self.time)

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


def story(width: int = 80, height: int = 24, encoding: str = "utf-8") -> Seen:
    """A newcomer's first rounds, in the middle of the next one."""
    seen = Seen(width, height, encoding).tell(found())
    for round in range(1, 13):
        probation = "is on probation, and counts from round 9 on" if round < 9 else ""
        trains(seen, round, 15).tell(applied(round, 0 if probation else 2000, probation=probation))
    return trains(seen, 13)


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("when", ["nothing", "found", "middle", "warned"])
def test_a_frame_has_the_terminals_size_at_all_times(width: int, height: int, encoding: str, when: str) -> None:
    seen = Seen(width, height, encoding) if when in ("nothing", "found") else story(width, height, encoding)
    if when == "found":
        seen.tell(found())
    if when == "warned":
        for number in range(40):
            seen.tell(events.Warning(text=f"trouble {number} {'x' * 300}"))
    lines = seen.lines()
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if line.endswith("─") or "…╮" in line], "no title is cut"


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_volunteer_sees_his_step_his_part_and_what_comes_of_it(width: int, height: int) -> None:
    said = "\n".join(story(width, height).lines())
    for shown in (
        "Shakespeare", "round 13 of 200", "trains the whole model in round 13, for 14 s", "step 7 of 15",
        "1,024 tokens/s", "2,000 of 31,000 tokens yours", "24,000 tokens, 6 %, rank 3 of 14", "12 peers",
        "3.880  from 3.990",
    ):  # fmt: skip
        assert shown in said, shown


def test_what_comes_before_the_first_round_is_said() -> None:
    seen = Seen()
    assert "looks for the run" in seen.text()
    seen.tell(found())
    assert "finds out how others reach this machine" in seen.text()
    assert "your first round is ahead" in seen.text()
    assert "probation for 8 rounds your work is checked and kept; then it counts" in seen.text()
    seen.tell(events.Fetching(round=4, came=12_000_000, bytes=28_000_000, seconds=4.0, done=False))
    assert "fetches the model: 12.0 MB of 28.0 MB" in seen.text()
    seen.tell(events.Waiting(round=5, seconds=20.0))
    assert "is ready; round 5 begins in about 20 s" in seen.text()


def test_a_newcomers_work_is_kept_and_nothing_is_yellow() -> None:
    seen = Seen(60, 20).tell(found())
    trains(seen, 1).tell(applied(1, 0, probation="is on probation, and counts from round 9 on"))
    assert "round 1 your work is good and is kept; as you are new, it counts from round 9 on" in seen.text()
    assert "tokens yours" not in seen.text()
    assert "!" not in seen.text()
    assert "rank" not in seen.text()


def test_warnings_and_the_newest_sentence_are_shown() -> None:
    seen = story()
    sample = "Fellow citizens of the Senate and House of Representatives ⇒ I have the honor to report"
    said = Evaluation(peer=ME, round=12, loss=3.9, bits_per_byte=1.8, sequences=8, sample=sample, signature=b"")
    seen.tell(applied(13, evaluations=(said,))).tell(events.Warning(text="the disk is slow"))
    assert "it writes … of Representatives ⇒ I have the honor to report" in seen.text()
    assert "! the disk is slow" in seen.text()
    seen.tell(applied(14))
    assert "I have the honor to report" in seen.text(), "until there is a newer one"


@pytest.mark.parametrize(("width", "height"), SIZES[2:])
def test_a_warning_is_shown_whole(width: int, height: int) -> None:
    seen = story(width, height)
    for text in (
        "the disk is slow",
        "nobody who tried got through; " + "see where that port of the router leads, " * 3,
    ):
        seen.tell(events.Warning(text=text.strip()))
    assert text.strip() in seen.text(), "the newest one"


def test_a_peer_says_this_machine_of_itself() -> None:
    seen = story(120, 40).tell(events.Withdrew(round=13, reason=f"peer {short_peer(ME)}: gone"))
    assert "! this machine sits out round 13: this machine: gone" in seen.text()
    assert f"you are Ada·{ME[-4:]}" in seen.text()


def test_bytes_are_those_of_today() -> None:
    seen = story()
    assert "today 12.0 MB up, 60.0 MB down" in seen.text()
    seen.tell(applied(13), 86_400.0)
    assert "today 1.0 MB up, 5.0 MB down" in seen.text()
    seen.tell(applied(14, bytes_sent=3_000_000, bytes_received=0))
    assert "today 4.0 MB up" in seen.text(), "a pause begins the process's counters anew"


def test_the_clock_alone_is_news_once_a_second() -> None:
    seen = story()
    assert seen.screen.has_news()
    assert not seen.screen.has_news()
    seen.time += 1.5
    assert seen.screen.has_news()
    assert not seen.screen.has_news()


def test_pauses_and_the_end_are_said() -> None:
    seen = story().tell(events.Paused(reason="outside of its hours, 22-7"))
    assert "pauses: outside of its hours, 22-7" in seen.text()
    assert "step 7" not in seen.text(), "of a round that is given up"
    seen.tell(events.Resumed()).tell(events.Leaving(seconds=20.0))
    assert "hands its last work over, in 20 s at most" in seen.text()
    assert "Ctrl-C once more ends at once" in seen.text()
    seen.tell(events.Finished(round=200, digests={}))
    assert "has the finished model" in seen.text()
    assert "the run is over after round 200" in seen.text()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (events.Leaving(seconds=20.0), "has left the run │ │ the same command brings it back"),
        (events.Finished(round=13, digests={}), "has the finished model │ │ the run is over after round 13"),
    ],
    ids=["left", "over"],
)
def test_what_stays_on_the_terminal_says_how_it_ended(body: Body, told: str) -> None:
    seen = story()
    with seen.screen:
        seen.tell(body)
    seen.out.flush()
    left = seen.out.buffer.getvalue().decode().rpartition("\x1b[?1049l")[2]  # type: ignore[attr-defined]
    said = " ".join(Text.from_ansi(left).plain.split())
    assert told in said
    assert "2,000 of 31,000 tokens yours" in said
    assert "Ctrl-C" not in said
    assert "step" not in said


def test_what_others_write_cannot_reach_the_terminal() -> None:
    seen = Seen().tell(found()).tell(events.Warning(text="\x1b[2J\u202eboo"))
    assert not re.search("[\x1b\u202e]", "".join(seen.lines()))


def test_lines_are_printed_before_and_after_the_screen() -> None:
    seen = Seen()
    seen.tell(events.Warning(text="before"))
    with seen.screen:
        seen.tell(events.Warning(text="while"))
    seen.tell(events.Warning(text="after"))
    seen.out.flush()
    raw = seen.out.buffer.getvalue().decode()  # type: ignore[attr-defined]
    shown, hidden = raw.index("\x1b[?1049h"), raw.index("\x1b[?1049l")
    assert raw.index("! before\n") < shown < hidden < raw.index("! after\n")
    assert "! while\n" not in raw


def test_a_terminal_without_utf_8_gets_ascii() -> None:
    seen = story(80, 24, "ascii")
    with seen.screen:
        seen.tell(events.Warning(text="“quoted”"))
    seen.out.flush()
    assert "step 7 of 15" in seen.out.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
