"""What a volunteer sees while the peer joins, trains, pauses and leaves, at several sizes."""

from __future__ import annotations

import re

import pytest

from peer import events
from protocol.wire.claims import Evaluation
from tests.support.joined import ME, Seen, applied, found, story, trains

SIZES = [(60, 12), (60, 20), (80, 24), (120, 40), (200, 60)]


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
        "Shakespeare", "round 13 of 200", "trains the whole model for round 13, for 14 s", "step 7 of 15",
        "1,024 tokens/s", "2,000 of 31,000 tokens yours", "24,000 tokens, 6 %, rank 3 of 14", "12 peers",
        "3.880  from 3.990",
    ):  # fmt: skip
        assert shown in said, shown


def test_what_comes_before_the_first_round_is_said() -> None:
    seen = Seen()
    assert "is on its way to the run" in seen.text()
    seen.tell(found())
    assert "finds out how others reach this machine" in seen.text()
    assert "your first round is ahead" in seen.text()
    assert "your work is judged for 8 rounds, kept, and counts afterwards" in seen.text()
    seen.tell(events.Fetching(round=4, came=12_000_000, bytes=28_000_000, seconds=4.0, done=False))
    assert "fetches the model: 12.0 MB of 28.0 MB" in seen.text()
    seen.tell(events.Waiting(round=5, seconds=20.0))
    assert "is ready: round 5 begins in about 20 s" in seen.text()


def test_a_newcomers_work_is_kept_and_nothing_is_yellow() -> None:
    seen = Seen(60, 20).tell(found())
    trains(seen, 1).tell(applied(1, 0, probation="is on probation, and counts from round 9 on"))
    assert "round 1 your work is good and is kept; as you are new, it counts from round 9 on" in seen.text()
    assert "tokens yours" not in seen.text()
    assert "!" not in seen.text()
    assert "rank" not in seen.text()


def test_warnings_and_the_newest_sentence_are_shown() -> None:
    seen = story()
    said = Evaluation(peer=ME, round=12, loss=3.9, bits_per_byte=1.8, sequences=8, sample="Our allies", signature=b"")
    seen.tell(applied(13, evaluations=(said,))).tell(events.Warning(text="the disk is slow"))
    assert "it writes Our allies" in seen.text()
    assert "! the disk is slow" in seen.text()
    seen.tell(applied(14))
    assert "it writes Our allies" in seen.text(), "until there is a newer one"


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
    assert "hands over what it has learned, in 20 s at most" in seen.text()
    seen.tell(events.Finished(round=200, digests={}))
    assert "the run is over after round 200" in seen.text()


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
