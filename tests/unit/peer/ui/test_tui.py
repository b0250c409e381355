"""The screen: what it says after a run's events, at several sizes, without a terminal."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from peer import events
from peer.cli.join import Tally
from peer.events import Event
from peer.ui.lines import Lines, printer
from peer.ui.run_view import RunView
from peer.ui.screen import Screen, chart, render
from peer.ui.text import duration, size
from protocol.identity import short_peer
from protocol.wire.commit import LeftOut
from protocol.wire.plan import Work
from tests.support import tiny
from tests.support.tui import NAMES, PEERS, PLAN, Story, ready
from tests.support.watched import BEGAN, MadeUp, decided, made, says

SIZES = ((80, 24), (120, 40), (200, 60))


def draw(view: RunView, width: int, height: int, ascii_only: bool = False) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), record=True, legacy_windows=False)
    console.print(render(view, width, height, ascii_only=ascii_only))
    return console.export_text().rstrip("\n").split("\n")


def text(view: RunView, width: int = 120, height: int = 40) -> str:
    return "\n".join(draw(view, width, height))


def test_who_does_what() -> None:
    story = Story().begin()
    story.round(1, 2.5)
    wide, narrow = text(story.view), text(story.view, 80, 24)
    for place in ("chain 0 · stage 2/3 · block 1", "chain 0 · stage 3/3 · blocks 2-3", "spare", "20 Mb/s", "64.0 MB"):
        assert place in wide
    assert "chain 0 · 3/3 · blocks 2-3" in narrow
    for shown in ("full-0", "2 full, 1 chain, 1 spare", "round 2 of 5", "4/4", "2.500"):
        assert shown in wide
        assert shown in narrow
    assert "20 %" in wide


def test_names_default_to_the_end_of_the_id() -> None:
    assert PEERS[0][-8:] in text(Story(None).begin().view)


def test_bytes_against_fp32() -> None:
    story = Story().begin()
    story.round(1, 2.5)
    assert story.view.peers[PEERS[0]].sent_bytes is None, "it has measured its line with some of it"
    story.round(2, 2.4)
    full, middle = story.view.peers[PEERS[0]], story.view.peers[PEERS[3]]
    spec = tiny.manifest().model
    block = 2 * 8 + 4 * 8 * 8 + 3 * 8 * 16
    assert full.sent_bytes == 400
    assert full.dense_bytes == 4 * (4 * block + 2 * spec.vocab_size * 8 + 8)
    assert middle.dense_bytes == 4 * (block + 2 * 64 * 8)
    sent, dense, _ = story.view.traffic or (0, 0, 0)
    assert sent == 5 * 400
    assert f"{dense / sent:.0f}× as much" in text(story.view)


def test_who_joins_late_is_not_counted_from_the_start() -> None:
    story = Story().begin()
    story.applied(PEERS[0], 3, 9_000_000)
    assert story.view.peers[PEERS[0]].sent_bytes is None
    story.applied(PEERS[0], 4, 9_000_700)
    assert story.view.peers[PEERS[0]].sent_bytes == 700


def announced(sent: int, round: int, phase: str = "waiting") -> events.Announced:
    return says(phase, round, 4, bytes_sent=sent)


def test_rounds_that_are_shorter_than_announcements_are_frequent_are_not_added_up() -> None:
    story = Story().begin()
    story.tell(PEERS[0], announced(1_000, 1))
    assert story.view.peers[PEERS[0]].sent_bytes is None
    story.tell(PEERS[0], announced(3_700, 4))
    full = story.view.peers[PEERS[0]]
    assert full.sent_bytes == 900
    assert story.view.traffic == (900, full.dense_bytes, 0)
    story.tell(PEERS[0], announced(3_900, 4, "training"))
    story.tell(PEERS[0], announced(3_900, 4))  # what it still sends for round 4 belongs to what comes after
    assert full.sent_bytes == 900
    story.tell(PEERS[0], announced(5_500, 6))
    assert full.sent_bytes == 900
    story.tell(PEERS[0], announced(600, 7))  # it was started again
    assert full.sent_bytes == 600


def test_who_was_left_out_and_why() -> None:
    story = Story().begin()
    story.round(1, 2.5, left_out=(LeftOut(replica=2, reason=f"peer {short_peer(PEERS[3])}: gone"),))
    story.tell("bootstrap", events.Gone(peer=PEERS[3]))
    shown = text(story.view)
    assert "! chain 0: b: gone" in shown
    assert "round 1 without chain 0: b: gone" in shown
    assert "b is gone" in shown
    story.round(2, 2.4)
    assert "nobody now, 1 so far" in text(story.view)


def test_digests() -> None:
    story = Story().begin()
    assert "not compared yet" in text(story.view)
    story.round(1, 2.5)
    story.attest(1)
    assert "✓ all 3 equal, round 1" in text(story.view)
    story.attest(2, wrong=PEERS[1])
    story.tell("bootstrap", events.Diverged(peer=PEERS[1], round=2, shard="block.0"))
    shown = text(story.view)
    assert "✗ full-1 differs in block.0" in shown
    assert "full-1 has other bits in block.0 after round 2" in shown


def test_the_end() -> None:
    story = Story().begin()
    for number in range(1, 6):
        story.round(number, 3 - number / 10)
    for peer in PEERS[2:5]:
        story.chain(peer, 1.9)
    assert "95 %" in text(story.view)
    story.finish()
    story.tell(PEERS[0], announced(9_000, 5, "training"))  # one that has not heard of it yet
    story.chain(PEERS[2], 1.9)
    shown = text(story.view)
    assert "finished 5 rounds in" in shown
    steps = [line.split("finished")[1].split()[0] for line in shown.splitlines() if "20 Mb/s" in line]
    assert steps == ["-"] * 6, "nobody is at a step of a run that is over"
    assert "95 %" not in shown, "nobody is busy any more"
    assert "training" not in shown
    assert "100 %" in shown
    assert "✓ all equal · ababababab" in shown
    assert story.view.eta is None


def test_time_left_follows_the_pace() -> None:
    story = Story().begin()
    story.round(1, 2.5)
    story.round(2, 2.4)
    commits = [e.time for e in story.events if isinstance(e.body, events.Commit)]
    seconds_per_microbatch = (commits[-1] - commits[0]) / 2
    assert story.view.eta == pytest.approx(seconds_per_microbatch * 3 - (story.events[-1].time - commits[-1]))


def test_the_curve_is_the_mean_over_replicas() -> None:
    story = Story().begin()
    story.step(PEERS[0], 1, 1, 3.0)
    story.step(PEERS[1], 1, 1, 2.0)
    story.step(PEERS[2], 1, 1, None)
    assert story.view.curve == [(0.25, 2.5)]


def test_the_curve_has_a_slow_replicas_steps_where_they_are_in_the_round() -> None:
    """It does two steps where the others do four."""
    story = Story()
    slow = PLAN.replaced(dataclasses.replace(PLAN.replica(1), work=Work(steps=2, micro_batches=2)))
    story.tell("bootstrap", decided(0, plan=slow))
    story.step(PEERS[0], 1, 1, 8.0)
    story.step(PEERS[1], 1, 1, 4.0)
    story.step(PEERS[0], 1, 2, 6.0)
    assert story.view.curve == [(0.25, 8.0), (0.5, 5.0)]
    story.step(PEERS[1], 1, 2, 4.0)
    assert story.view.curve[-1] == (1.0, 4.0)
    assert "2/4" in text(story.view)
    assert "2/2" in text(story.view)


def test_a_replica_is_known_by_its_number_wherever_it_is_in_the_plan() -> None:
    story = Story()
    late = dataclasses.replace(PLAN, replicas=(PLAN.replica(2), dataclasses.replace(PLAN.replica(0), number=9)))
    story.tell("bootstrap", decided(4, plan=late))
    assert [story.view.replica_name(n) for n in (2, 9, 0)] == ["chain 0", "full-0", "replica 0"]
    assert [p.peer for p in story.view.listed()][:4] == [*PEERS[2:5], PEERS[0]]


def test_who_fetches_what_it_will_train_is_joining() -> None:
    story = Story()
    forming = dataclasses.replace(PLAN, replicas=PLAN.replicas[:2], forming=(PLAN.replica(2),), forming_since=(1,))
    story.tell("bootstrap", decided(0, plan=forming))
    assert {p.peer: p.role for p in story.view.peers.values()} == {
        **dict.fromkeys(PEERS[:2], "full"), **dict.fromkeys(PEERS[2:5], "joining"), PEERS[5]: "spare"
    }  # fmt: skip


def test_a_chain_shows_how_busy_it_is_and_what_it_waits_for() -> None:
    story = Story().begin()
    before = text(story.view)
    for peer, busy in zip(PEERS[2:5], (0.9, 1.86, 1.0), strict=True):
        story.chain(peer, busy)
    wide, narrow = draw(story.view, 120, 40), draw(story.view, 80, 24)
    row = next(x for x in wide if "◄ b computes 93 %" in x)
    assert row.split()[1:12] == ["b", "93", "%", "5", "%", "15", "%", "12.3", "kB", "4.5", "kB"]
    assert "chains" not in before
    assert "45 %" in next(x for x in wide if "chain 0 " in x and "a " in x and "stage" not in x)
    assert "93 %◄" in next(x for x in narrow if "2/3" in x)
    assert "50 % " in next(x for x in narrow if "3/3" in x)
    assert "spare" in next(x for x in narrow if "%" not in x and "spare" in x)
    assert [len(x) for x in (wide, narrow)] == [40, 24]
    assert max(map(len, narrow)) <= 80


def test_what_a_chain_waits_for_is_said_in_fewer_words_where_there_is_no_room_for_more() -> None:
    names = dict(zip(PEERS, ("full-0", "full-1", *(f"lab-gpu-0{n}·Lcm{n}" for n in range(3)), "spare"), strict=True))
    story = Story(names).begin()
    for peer in PEERS[2:5]:
        story.chain(peer, 1.0, forward_link_s=1.9)
    said = "→ link lab-gpu-00·Lcm0 → lab-gpu-01·Lcm1 is busy 95 %"
    shown = {140: said, 120: "→ link from lab-gpu-00·Lcm0 95 %", 80: "→ 95 %"}
    for width, slowest in shown.items():
        (row,) = (x for x in draw(story.view, width, 50) if slowest in x and "/3" not in x)
        assert row.removesuffix("│").rstrip().endswith(slowest), "whole"
        assert "◄ its chain waits for it; → ← for the link to it" in text(story.view, width, 50), "what the marks mean"
    assert "its chain waits" not in text(Story().begin().view), "there are none"


def test_who_is_there_is_counted_above_the_table_without_those_who_only_host() -> None:
    story = Story()
    node = dataclasses.replace(ready("node"), device="bootstrap")
    story.tell("bootstrap", node)
    assert "gathering peers, 0 of 2" in text(story.view)
    story.begin()
    story.tell("bootstrap", events.Gone(peer=PEERS[5]))
    assert "peers: 5 there, 1 gone, 1 bootstrap node" in text(story.view)


def test_the_dots_of_the_curve_are_explained_where_there_are_any() -> None:
    story = Story().begin()
    assert "a round begins" not in text(story.view)
    story.round(1, 2.5)
    assert "loss, nats per token · ●: a round begins" in text(story.view)


def test_a_busy_link_is_the_bottleneck() -> None:
    story = Story().begin()
    for peer in PEERS[2:5]:
        story.chain(peer, 1.0, forward_link_s=1.9, backward_link_s=1.8)
    assert story.view.chains[0].slowest == "link a → b is busy 95 %"
    assert "50 %→" in next(x for x in draw(story.view, 80, 24) if "2/3" in x)
    story.chain(PEERS[3], 1.0, backward_link_s=1.98)
    assert "50 %←" in next(x for x in draw(story.view, 80, 24) if "2/3" in x)
    assert story.view.chains[0].slowest == "link c → b is busy 99 %"
    assert "link c > b is busy 99 %" in "\n".join(draw(story.view, 120, 40, ascii_only=True))
    story.chain(PEERS[4], 2.0)
    assert story.view.chains[0].slowest == "c computes 100 %"


def test_the_ends_of_a_chain_have_no_link_beyond() -> None:
    story = Story().begin()
    story.chain(PEERS[2], 1.0, forward_link_s=2.0)
    story.chain(PEERS[4], 0.5, backward_link_s=2.0)
    assert story.view.chains[0].slowest == "a computes 50 %"


def test_what_was_measured_in_another_place_is_forgotten() -> None:
    story = Story().begin()
    story.chain(PEERS[3], 1.0)
    (chain,) = story.view.chains
    assert [p.chain is not None for p in chain.members] == [False, True, False]
    elsewhere = events.Role(round=2, role="stage", replica=2, first=0, last=2, position=0, stages=2)
    story.tell(PEERS[3], elsewhere)
    assert story.view.chains == []
    story.chain(PEERS[3], 1.0)
    assert len(story.view.chains) == 1
    story.tell("bootstrap", events.Gone(peer=PEERS[3]))
    assert story.view.chains == []


def test_more_peers_than_rows() -> None:
    story = Story(None)
    for i in range(40):
        story.tell("bootstrap", ready(f"peer-{i:08}"))
    lines = draw(story.view, 80, 24)
    assert len(lines) == 24
    assert sum("○ waiting" in x for x in lines) == 7
    assert any("and 33 more" in x for x in lines)


@pytest.mark.parametrize("height", [14, 22, 23, 24])
def test_all_peers_of_a_demo_are_there_in_a_small_terminal(height: int) -> None:
    """Also where a line of it is taken for keys, or for the prompt: messages give way first, but for one."""
    story = Story().begin()
    story.round(1, 2.5)
    lines = draw(story.view, 80, height)
    assert len(lines) == height
    for name in NAMES.values():
        assert any(name in x and "20" not in x for x in lines), lines
    assert any("✓ round 1: " in x for x in lines)
    assert not any(" more" in x for x in lines)


def printed(story: Story) -> list[str]:
    """What a screen without a terminal prints of a story, without the times."""
    out = io.StringIO()
    with Screen(tiny.manifest(), NAMES, Console(file=out, width=80)) as screen:
        for event in story.events:
            screen.feed(event)
    assert screen.view.losses == story.view.losses
    return [line.partition(" ")[2] for line in out.getvalue().splitlines()]


def test_without_a_terminal_there_is_a_line_a_round_and_what_is_rare() -> None:
    story = Story().begin()
    for peer, busy in zip(PEERS[2:5], (0.9, 1.86, 1.0), strict=True):
        story.chain(peer, busy)
    story.round(1, 2.5)
    story.attest(1)
    chain = events.ChainReconfigured(
        round=2, replica=2, generation=1, peers=(PEERS[2], PEERS[5], PEERS[4]), steps=0, reason="b is silent"
    )
    story.tell("bootstrap", chain)
    story.tell(PEERS[2], dataclasses.replace(chain, reason=""))
    story.tell(PEERS[2], events.ChainFailed(round=2, generation=0, peer=PEERS[3], reason="silent"))
    story.round(2, 2.4, left_out=(LeftOut(replica=1, reason="no offer after 60 s"),))
    before, after = (1, 1, 2), (1, 2, 1)
    moved = events.Moved(round=3, replica=2, peers=chain.peers, before=before, after=after, reason="c is slow")
    story.tell("bootstrap", moved)
    story.tell("bootstrap", events.Gone(peer=PEERS[3]))
    story.tell("bootstrap", events.Warning(text="file x: damaged; remove it"))
    story.finish()
    lines = printed(story)
    assert lines == [
        *(f"· {name} is ready: cpu, 64.0 MB" for name in NAMES.values()),
        "✓ first plan: 3 replicas",
        "✓ round 1: 3 replicas, loss 2.500",
        "! round 2: replica 2 goes on as a > spare > c: b is silent",
        "✓ round 2: 3 replicas, loss 2.400",
        "! round 2 without replica 1: no offer after 60 s",
        "· replica 2: c is slow",
        "! b is gone",
        "! file x: damaged; remove it",
        "✓ run finished; state abababababab…",
    ]
    assert max(map(len, lines)) <= 90


def test_who_joins_is_told_what_is_fetched_how_fast_and_when_its_work_begins_and_counts() -> None:
    story, lines, out = Story(None), Lines(own=True), io.StringIO()
    me = PEERS[0]
    fetching = events.Fetching(round=30, came=50_000_000, bytes=200_000_000, seconds=5.0, done=False)
    found = events.Found(run="ab" * 32, name="x", parameters=48_900_000, round_seconds=90.0)
    own = events.Round(
        round=31, seconds={}, bytes_sent=1, bytes_received=2, boundary_forward_bytes=0, boundary_backward_bytes=0,
        boundary_tokens=0, own_tokens=65_472, tokens=300_000, loss=4.0,
    )  # fmt: skip
    for body in (
        found,
        dataclasses.replace(own, round=29, holds=False, own_tokens=0),
        dataclasses.replace(fetching, came=0, seconds=0.0),
        fetching,
        dataclasses.replace(fetching, came=200_000_000, seconds=20.0, done=True),
        events.Waiting(round=31, seconds=42.4),
        own,
    ):
        story.tell(me, body)
    for event in story.events:
        printer(lines, out)(event)
    assert [line.partition(" ")[2] for line in out.getvalue().splitlines()] == [
        "· run abababababab… x: 48.9M parameters, rounds of 1:30 min; finding out how others reach this machine",
        "· fetching the model of round 30: 0 B of 200 MB",
        "· fetching the model of round 30: 50.0 MB of 200 MB (80 Mb/s), about 15 s left",
        "✓ the model of round 30 is fetched: 200 MB in 20.0 s (80 Mb/s)",
        "· ready: round 31, the first for this machine, begins in about 42 s",
        "✓ round 31 is applied: 65,472 of 300,000 tokens were yours; "
        "1 B sent, 2 B received and 0 B written to disk since the start",
    ]


def test_a_peer_prints_a_line_a_round_and_what_it_trains_when_that_changes() -> None:
    story, lines, out = Story(None), Lines(own=True), io.StringIO()
    started = events.Started(peer=PEERS[0], pid=1, device="cpu", memory_bytes=8_000_000_000, rss_bytes=1)
    full = events.Role(round=1, role="full", replica=1, first=0, last=4, position=0, stages=1)
    story.tell(PEERS[0], started)
    for number in (1, 2):
        story.tell(PEERS[0], dataclasses.replace(full, round=number))
        story.step(PEERS[0], number, 1, 2.5)
        story.applied(PEERS[0], number, 1_200_000)
    part = events.Role(round=3, role="stage", replica=1, first=1, last=3, position=1, stages=3)
    story.tell(PEERS[0], part)
    story.chain(PEERS[0], 1.0)
    story.tell(PEERS[0], events.ChainFailed(round=3, generation=0, peer=PEERS[1], reason="it is silent"))
    chain = events.ChainReconfigured(round=3, replica=1, generation=1, peers=(PEERS[0], PEERS[2]), steps=0)
    story.tell(PEERS[0], chain)
    story.tell(PEERS[0], dataclasses.replace(chain, peers=(), generation=2))
    story.tell(PEERS[0], dataclasses.replace(chain, steps=3, generation=2))
    story.tell(PEERS[0], events.Withdrew(round=3, reason="too late"))
    story.tell(PEERS[0], dataclasses.replace(part, round=4, first=0, last=1, position=0))
    story.tell(PEERS[0], events.Finished(round=4, digests={}))
    for event in story.events:
        printer(lines, out)(event)
    me, other, third = map(short_peer, PEERS[:3])
    assert [line.partition(" ")[2] for line in out.getvalue().splitlines()] == [
        f"· {me} is here: cpu, 8.0 GB",
        "· round 1: this machine trains the whole model",
        "✓ round 1 is applied; 1.2 MB sent, 0 B received and 0 B written to disk since the start",
        "✓ round 2 is applied; 1.2 MB sent, 0 B received and 0 B written to disk since the start",
        "· round 3: this machine trains blocks 1-2, stage 2 of 3 of a chain",
        f"! round 3: the chain fails at {other}: it is silent",
        f"· round 3: replica 1 goes on as {me} > {third}",
        "· round 3: replica 1 ends",
        "· round 3: replica 1 offers 3 inner steps",
        "! this machine sits out round 3: too late",
        "· round 4: this machine trains block 0, stage 1 of 3 of a chain",
        "✓ the run is over after round 4",
    ]


def test_who_leaves_is_thanked_with_what_was_given_and_told_how_to_get_the_model() -> None:
    lines, tally = Lines(own=True), Tally(lambda event: None, Path("my peer"))
    done = events.Round(
        round=0, seconds={}, bytes_sent=1, bytes_received=2, boundary_forward_bytes=0, boundary_backward_bytes=0,
        boundary_tokens=0, tokens=1_000, loss=8.0,
    )  # fmt: skip

    def said() -> list[str]:
        return [line[9:] for line in lines.of(Event(0.0, PEERS[0], tally.sum(7260.0)))]

    for round, holds, own, loss in ((0, True, 0, 9.0), (3, False, 0, 8.5), (4, True, 0, None)):
        body = dataclasses.replace(done, round=round, holds=holds, own_tokens=own, loss=loss)
        assert said() == [], "who has applied nothing has taken no part"
        tally.take(Event(0.0, PEERS[0], body))
    model = "· to use the model: potluck sample 'my peer' --interactive, or potluck export 'my peer' --out model"
    assert said() == ["✓ thank you: you took part in 1 round in 2:01 h; none of their tokens were yours yet", model]
    for round, own, loss in ((5, 250, 7.25), (6, 500, 6.0), (7, 0, None)):
        tally.take(Event(0.0, PEERS[0], dataclasses.replace(done, round=round, own_tokens=own, loss=loss)))
    assert said() == [
        "✓ thank you: you took part in 4 rounds in 2:01 h; 750 of their 4,000 tokens were yours (18.8%); the model's"
        " loss went from 7.250 to 6.000",
        model,
    ]


def test_an_output_that_is_not_utf_8_gets_ascii() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="latin-1")
    printer(Lines(), out)(Event(0.0, "bootstrap", events.Warning(text="名 → ×")))
    assert raw.getvalue().partition(b" ")[2] == b"! ? > x\n"


def test_on_a_terminal_the_last_frame_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=24, legacy_windows=False)
    with Screen(tiny.manifest(), NAMES, console) as screen:
        for event in Story().begin().events:
            screen.feed(event)
    shown = out.getvalue()
    after = shown.rpartition("\x1b[?1049l")[2]
    assert "potluck" in after
    assert "round 1 of 5" in after
    assert "\x1b[38;" not in shown


def test_chart_joins_points_and_labels_axes() -> None:
    points = [(x / 10, 3 + math.exp(-x / 10)) for x in range(1, 51)]
    for ascii_only in (False, True):
        rows = [t.plain for t in chart(points, [(2.0, 3.2)], 40, 10, ascii_only=ascii_only, x_label="rounds")]
        assert len(rows) == 10
        assert rows[0].startswith("  3.90")
        assert "3.01" in rows[7]
        assert rows[-1].split() == ["0", "rounds", "5"]
        assert sum(row.count("o" if ascii_only else "●") for row in rows[:8]) == 1
    columns = {i for row in rows[:8] for i, c in enumerate(row[8:]) if c in "*o"}
    assert columns == set(range(min(columns), max(columns) + 1))
    assert all(len(t.plain) <= 40 for t in chart([], [], 40, 10))
    assert len(chart([(1.0, 2.0)], [], 40, 10)) == 10


def test_amounts() -> None:
    assert [size(n) for n in (0, 999, 1000, 123_456, 99_950, 5e9, 2e13)] == [
        "0 B", "999 B", "1.0 kB", "123 kB", "100 kB", "5.0 GB", "20.0 TB",
    ]  # fmt: skip
    assert [duration(s) for s in (5, 125, 7260, 200_000)] == ["5 s", "2:05 min", "2:01 h", "2.3 days"]
    assert [duration(s) for s in (59.7, 359.6, 3599.7)] == ["1:00 min", "6:00 min", "1:00 h"], (
        "no minute has 60 seconds"
    )


def test_a_newcomer_is_told_of_its_probation_when_it_joins_and_after_each_round_of_it() -> None:
    lines = Lines(own=True)
    found = events.Found(run="ab" * 32, name="x", parameters=48_900_000, round_seconds=90.0, probation=3)
    why = "peer abc: new here; its work is kept, and counts after 2 more rounds"
    own = events.Round(
        round=31, seconds={}, bytes_sent=1, bytes_received=2, boundary_forward_bytes=0, boundary_backward_bytes=0,
        boundary_tokens=0, probation=why,
    )  # fmt: skip
    said = [line[9:] for body in (found, own) for line in lines.of(Event(0.0, PEERS[0], body))]
    assert said[1] == (
        "· you begin on probation: in the first 3 rounds your work is checked and kept, and counts from then on"
    )
    assert said[-1] == "· round 31: your work is good and is kept; as you are new, it counts after 2 more rounds"
    assert not any(
        "probation" in line
        for line in Lines(own=True).of(Event(0.0, PEERS[0], dataclasses.replace(found, probation=0)))
    )


def test_a_round_in_which_work_counts_less_says_so() -> None:
    light = dataclasses.replace(made(1, 2.5, PEERS[1]), weight=0.25)
    said = [line[9:] for line in Lines().of(Event(0.0, "bootstrap", decided(4, light, plan=None)))]
    why = "its update copies another one, opposes the others, or agrees little with them"
    assert said[1:] == [f"! round 4 counts replica 1 with 25% of its weight: {why}"]


def test_a_replica_on_probation_is_no_warning() -> None:
    tried = LeftOut(replica=2, reason="peer b: new here", judged="0" * 64, peers=(PEERS[3],), probation=True)
    commit = decided(4, left_out=(tried, LeftOut(replica=3, reason="late")), plan=None)
    said = [line[9:] for line in Lines().of(Event(0.0, "bootstrap", commit))]
    assert said[1:] == ["· round 4: replica 2: peer b: new here", "! round 4 without replica 3: late"]


def run_of(rounds: int, **ready: Any) -> RunView:
    """A small run. `ready`: what each peer says of itself."""
    view = RunView(MadeUp(5).manifest)
    for event in MadeUp(5).all(rounds):
        if isinstance(event.body, events.Ready):
            event = dataclasses.replace(event, body=dataclasses.replace(event.body, **ready))
        view.feed(event)
    return view


@pytest.mark.parametrize(("width", "height"), [(80, 24), (104, 30), (110, 30), (120, 40), (122, 36), (200, 60)])
def test_nothing_of_a_small_run_is_cut(width: int, height: int) -> None:
    """With a line's rate, a computed share and a sent sum as wide as they come; long names cut nothing, either."""
    shown = text(run_of(20, up_bps=20_200_000), width, height)
    assert "blocks 2-3" in shown
    assert "…" not in shown, shown
    named = text(run_of(2, name="old laptop-7"), width, 40)
    peers = named.partition(" peers: ")[2].partition(" chains ")[0].partition(" messages ")[0]
    assert "old laptop-7·" in peers
    assert "…" not in peers, peers
    assert len(set(re.findall(r"chain 0 · (stage )?\d/3( · block)?", peers))) == 1, "all rows are of one kind"


def test_newcomers_are_shown_calmly_and_are_not_left_out() -> None:
    story, why = (
        Story().begin(),
        f"peer {short_peer(PEERS[1])}: new here; its work is kept, and counts after this round",
    )
    new = LeftOut(replica=1, reason=why, judged="0" * 64, peers=(PEERS[1],), probation=True)
    story.round(1, 2.5, left_out=(new,))
    shown = text(story.view)
    assert "newcomer full-1" in shown
    assert "nobody so far" in shown
    assert "· round 1: full-1: new here; its work is kept, and counts after this round" in shown
    assert (story.view.left_out_total, story.view.rounds[-1].left_out_total) == (0, 0)
    story.round(
        2,
        2.4,
        left_out=(new, dataclasses.replace(new, replica=0, peers=(PEERS[0],)), LeftOut(replica=2, reason="late")),
    )
    shown = text(story.view)
    assert "! chain 0: late" in shown
    assert "newcomer 2, whose work is kept" in shown
    assert story.view.left_out_total == 1


@pytest.mark.parametrize("peers", [2, 5, 100])
@pytest.mark.parametrize(("width", "height"), [(60, 12), (60, 19), (60, 20), (80, 24), (120, 40), (200, 60)])
def test_every_screen_has_the_loss_and_whole_titles(peers: int, width: int, height: int) -> None:
    view, made = RunView(MadeUp(peers).manifest), MadeUp(peers)
    frames = [draw(view, width, height)]
    for event in made.all(20):
        view.feed(event)
    frames.append(draw(view, width, height))
    assert f"{made.loss(20):.3f}" in "\n".join(frames[-1])
    for lines in frames:
        assert (len(lines), max(map(len, lines)) <= width) == (height, True)
        assert "…" not in lines[0]
        titles = [title for line in lines if line.startswith("╭") for title in re.findall(r"╭.*?╮", line)]
        assert all(re.search(r"  ─*╮", title) for title in titles), "no title is cut"


def test_a_large_screen_has_a_large_curve() -> None:
    heights = [next(i for i, line in enumerate(draw(run_of(4), *size)) if " rounds " in line) for size in SIZES]
    assert heights == sorted(set(heights))
    assert heights[-1] >= 20


def test_the_labels_of_an_axis_differ() -> None:
    for low, high in ((8.369, 8.371), (8.3701, 8.3723), (2.0, 9.0), (10.001, 10.009), (5.0, 5.0)):
        rows = [row.plain for row in chart([(0.0, low), (2.0, high)], [], 40, 12)]
        labels = [row.split()[0] for row in rows if "┤" in row]
        assert len(set(labels)) == len(labels) == 3, labels


def test_the_time_left_does_not_count_waiting() -> None:
    """A round that waited for peers says nothing of the others, and while nobody trains nothing is known."""
    made = MadeUp(5, rounds=100)
    view = RunView(made.manifest)
    for event in made.begin():
        view.feed(event)
    assert view.eta is None
    for round, when in ((1, 3600.0), (2, 3660.0), (3, 3720.0)):
        view.feed(dataclasses.replace(made.commit(round), time=BEGAN + when))
    assert view.eta == 97 * 60
    for peer in made.ids:
        view.feed(Event(BEGAN + 3720.0, "bootstrap", events.Gone(peer=peer)))
    assert view.eta is None


def test_a_rounds_loss_stands_where_the_round_began() -> None:
    """The log has the loss of its first step."""
    lines = draw(run_of(4), 120, 40)
    curve = lines[: next(i for i, line in enumerate(lines) if " rounds " in line)]
    axis = next(line.index("┤") for line in curve if "┤" in line)
    assert min(line.index("●") for line in curve if "●" in line) == axis + 1


def test_who_left_after_the_plan_was_made_does_not_train() -> None:
    made, view = MadeUp(5), run_of(0)
    peer, plan = made.ids[0], made.plan(1)
    view.feed(Event(0.0, "bootstrap", events.Gone(peer=peer)))
    view.feed(Event(0.0, peer, events.role(plan, plan.replicas[0].number, plan.replicas[0].stages[0])))
    assert (view.peers[peer].here, view.peers[peer].phase) == (False, "gone")
