"""The screen: what it says after a run's events, at several sizes, without a terminal."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from peer.events import Event
from peer.ui.plot import chart
from peer.ui.screen import Screen, View, line, render
from peer.ui.text import clean, duration, size
from protocol.identity import Identity
from tests import tiny

PEERS = [Identity(bytes([i] * 32)).peer_id for i in range(1, 7)]
NAMES = dict(zip(PEERS, ("full-0", "full-1", "a", "b", "c", "spare"), strict=True))
PLAN = {
    "replicas": [
        {"rank": 0, "stages": [{"peer": PEERS[0], "first": 0, "last": 4}]},
        {"rank": 0, "stages": [{"peer": PEERS[1], "first": 0, "last": 4}]},
        {
            "rank": 4,
            "stages": [
                {"peer": PEERS[2], "first": 0, "last": 1},
                {"peer": PEERS[3], "first": 1, "last": 2},
                {"peer": PEERS[4], "first": 2, "last": 4},
            ],
        },
    ],
    "spares": [PEERS[5]],
}


class Story:
    """Feeds events of a made-up run of 2 full replicas, a chain of 3, and a spare; one second apart."""

    def __init__(self, names: dict[str, str] | None = NAMES) -> None:
        self.events: list[Event] = []
        self.view = View(tiny.manifest(), names or {})
        self.sent = dict.fromkeys(PEERS, 100)

    def tell(self, source: str, kind: str, **fields: Any) -> None:
        event = Event(1_700_000_000.0 + len(self.events), source, kind, fields)
        self.events.append(event)
        self.view.feed(event)

    def begin(self) -> Story:
        for peer in PEERS:
            self.tell("bootstrap", "ready", peer=peer, memory_bytes=64_000_000, up_bps=20_000_000, device="cpu")
        self.commit(0, [])
        return self

    def commit(self, number: int, losses: list[float], left_out: list[dict[str, Any]] | None = None) -> None:
        contributions = [
            {"replica": i, "tokens": 64, "steps": 4, "loss": x, "bytes": 100, "peers": []} for i, x in enumerate(losses)
        ]
        self.tell(
            "bootstrap",
            "commit",
            round=number,
            contributions=contributions,
            left_out=left_out or [],
            diverged=[],
            plan=PLAN,
        )

    def round(self, number: int, loss: float, **commit: Any) -> None:
        for step in range(1, 5):
            for peer in PEERS[:5]:
                self.tell(peer, "step", round=number, step=step, loss=loss, tokens=16, seconds=0.1)
        self.commit(number, [loss, loss, loss], **commit)
        for peer in PEERS[:5]:
            self.sent[peer] += 400
            self.tell(
                peer,
                "round",
                round=number,
                seconds={},
                bytes_sent=self.sent[peer],
                bytes_received=0,
                boundary_forward_bytes=1,
                boundary_backward_bytes=1,
                boundary_tokens=64 if peer in PEERS[2:5] else 0,
            )

    def chain(self, peer: str, busy: float, **changes: Any) -> None:
        """`busy`: seconds of a step of 2 s that `peer` computes."""
        values: dict[str, Any] = {
            "round": 1, "step": 1, "seconds": 2.0, "busy_s": busy, "wait_forward_s": 0.1, "wait_backward_s": 0.3,
            "forward_link_s": 0.5, "backward_link_s": 0.2, "forward_bytes": 12_300, "backward_bytes": 4_500, "depth": 7,
            "queued": 3, "activations": {"rms": 1.0, "largest": 2.0, "refused": 0}, "gradients": None,
        }  # fmt: skip
        self.tell(peer, "chain", **{**values, **changes})

    def attest(self, number: int, wrong: str | None = None) -> None:
        for peer in PEERS[:3]:
            digest = "bad" if peer == wrong else "good"
            self.tell("bootstrap", "attest", peer=peer, round=number, digests={"embed": "same", "block.0": digest})


def draw(view: View, width: int, height: int, ascii_only: bool = False) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), record=True, legacy_windows=False)
    console.print(render(view, width, height, ascii_only=ascii_only))
    return console.export_text().rstrip("\n").split("\n")


def text(view: View, width: int = 120, height: int = 40) -> str:
    return "\n".join(draw(view, width, height))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (60, 16), (100, 30), (80, 50), (200, 60)])
@pytest.mark.parametrize("rounds", [0, 2])
def test_a_frame_fills_the_screen_and_no_more(width: int, height: int, rounds: int) -> None:
    story = Story()
    if rounds:
        story.begin()
    for number in range(1, rounds + 1):
        story.round(number, 3.0 - number / 10)
    lines = draw(story.view, width, height)
    assert len(lines) == height
    assert max(map(len, lines)) <= width


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
    assert story.view.peers[PEERS[0]].sent_bytes == 500
    story.round(2, 2.4)
    full, middle = story.view.peers[PEERS[0]], story.view.peers[PEERS[3]]
    spec = tiny.manifest().model
    block = 2 * 8 + 4 * 8 * 8 + 3 * 8 * 16
    assert full.sent_bytes == 400
    assert full.dense_bytes == 4 * (4 * block + 2 * spec.vocab_size * 8 + 8)
    assert middle.dense_bytes == 4 * (block + 2 * 64 * 8)
    sent, dense = story.view.traffic or (0, 0)
    assert sent == 5 * 400
    assert f"{dense / sent:.0f}× as much" in text(story.view)


def test_who_joins_late_is_not_counted_from_the_start() -> None:
    story = Story().begin()
    story.tell(PEERS[0], "round", round=3, seconds={}, bytes_sent=9_000_000, bytes_received=0)
    assert story.view.peers[PEERS[0]].sent_bytes is None
    story.tell(PEERS[0], "round", round=4, seconds={}, bytes_sent=9_000_700, bytes_received=0)
    assert story.view.peers[PEERS[0]].sent_bytes == 700


def test_who_was_left_out_and_why() -> None:
    story = Story().begin()
    story.round(1, 2.5, left_out=[{"replica": 2, "reason": f"peer {PEERS[3][-8:]}: gone"}])
    story.tell("bootstrap", "gone", peer=PEERS[3])
    shown = text(story.view)
    assert "! chain 0: b: gone" in shown
    assert "without replica 2 (b: gone)" in shown
    assert "b is gone" in shown
    story.round(2, 2.4)
    assert "nobody (1 so far)" in text(story.view)


def test_digests() -> None:
    story = Story().begin()
    assert "not yet compared" in text(story.view)
    story.round(1, 2.5)
    story.attest(1)
    assert "✓ equal, round 1 (3)" in text(story.view)
    story.attest(2, wrong=PEERS[1])
    story.tell("bootstrap", "diverged", peer=PEERS[1], round=2, shard="block.0")
    shown = text(story.view)
    assert "✗ full-1 differs in block.0" in shown
    assert "full-1 has other bits in block.0 after round 2" in shown


def test_the_end() -> None:
    story = Story().begin()
    for number in range(1, 6):
        story.round(number, 3 - number / 10)
    story.tell("bootstrap", "finished", round=5, state_digest="ab" * 32)
    shown = text(story.view)
    assert "finished 5 rounds in" in shown
    assert "100 %" in shown
    assert "✓ equal · ababababab" in shown
    assert story.view.eta is None


def test_time_left_follows_the_pace() -> None:
    story = Story().begin()
    story.round(1, 2.5)
    story.round(2, 2.4)
    commits = [e.time for e in story.events if e.kind == "commit"]
    seconds_per_microbatch = (commits[-1] - commits[0]) / 2
    assert story.view.eta == pytest.approx(seconds_per_microbatch * 3 - (story.events[-1].time - commits[-1]))


def test_the_curve_is_the_mean_over_replicas() -> None:
    story = Story().begin()
    story.tell(PEERS[0], "step", round=1, step=1, loss=3.0, tokens=1, seconds=1)
    story.tell(PEERS[1], "step", round=1, step=1, loss=2.0, tokens=1, seconds=1)
    story.tell(PEERS[2], "step", round=1, step=1, loss=None, tokens=1, seconds=1)
    assert story.view.curve == [(0.25, 2.5)]


def test_ascii_and_hostile_text() -> None:
    story = Story(None).begin()
    story.round(1, 2.5)
    story.tell(PEERS[0], "withdrew", round=2, reason="\x1b[31mred\x07\n名前 ‮x")
    plain = draw(story.view, 80, 24, ascii_only=True)
    assert "\n".join(plain).isascii()
    assert len(plain) == 24
    for frame in ("\n".join(plain), text(story.view)):
        assert not set(frame) & {"\x1b", "\x07", "‮"}
    assert clean("a\nb" + "x" * 300, 10) == "a bxxxxxxx…"


def test_malformed_events_are_passed_over() -> None:
    story = Story().begin()
    before = text(story.view)
    for kind in ("commit", "ready", "role", "step", "round", "attest", "unknown", "gone", "listening", "peer", "chain"):
        story.tell("somebody", kind)
    assert line(story.events[-1]) is None
    assert len(story.view.notes) == len(Story().begin().view.notes)
    assert len(text(story.view).split("\n")) == len(before.split("\n"))


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
    assert [p.activity is not None for p in chain.members] == [False, True, False]
    story.tell(PEERS[3], "role", round=2, role="stage", replica=2, first=0, last=2, rank=4, position=0, stages=2)
    assert story.view.chains == []
    story.chain(PEERS[3], 1.0)
    assert len(story.view.chains) == 1
    story.tell("bootstrap", "gone", peer=PEERS[3])
    assert story.view.chains == []


def test_more_peers_than_rows() -> None:
    story = Story(None)
    for i in range(40):
        story.tell("bootstrap", "ready", peer=f"peer-{i:08}", memory_bytes=1, up_bps=1, device="cpu")
    lines = draw(story.view, 80, 24)
    assert len(lines) == 24
    assert any("more" in x for x in lines)


def test_without_a_terminal_it_prints_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    story = Story().begin()
    story.round(1, 2.5)
    with Screen(tiny.manifest(), NAMES, Console(file=out, width=80)) as screen:
        for event in story.events:
            screen.feed(event)
    lines = out.getvalue().splitlines()
    assert len(lines) == 8
    assert "full-0 is ready: cpu, 64.0 MB" in lines[0]
    assert lines[-1].endswith("round 1: 3 replicas, loss 2.500")
    assert screen.view.committed == {1: 2.5}


def test_a_peer_tells_of_its_own_rounds() -> None:
    def told(kind: str, **fields: Any) -> str | None:
        found = line(Event(1_700_000_000.0, PEERS[0], kind, fields), own=True)
        return None if found is None else found.split(" ", 2)[2]

    name, part = PEERS[0][-8:], {"replica": 1, "rank": 8, "stages": 3}
    assert (
        told("started", peer=PEERS[0], pid=1, device="cpu", memory_bytes=8e9, rss_bytes=1)
        == f"{name} is here: cpu, 8.0 GB"
    )
    assert told("role", round=4, role="full", first=0, last=4) == "round 4: trains as a full replica"
    assert told("role", round=4, role="stage", first=1, last=3, position=1, **part) == (
        "round 4: trains blocks 1-2, stage 2 of 3 of a chain"
    )
    assert told("role", round=4, role="stage", first=0, last=1, position=0, **part) == (
        "round 4: trains block 0, stage 1 of 3 of a chain"
    )
    assert told("round", round=4, bytes_sent=1_200_000, bytes_received=5) == (
        "round 4 is applied; 1.2 MB sent and 5 B received since the start"
    )
    assert told("finished", round=8, digests={}) == "the run is over after round 8"
    assert told("warning", text="hot") == "hot"
    for kind in ("started", "role", "round", "finished", "step"):
        assert told(kind) is None


def test_without_a_terminal_a_line_for_each_chain_follows_the_commit() -> None:
    out = io.StringIO()
    story = Story().begin()
    for peer, busy in zip(PEERS[2:4], (0.9, 1.86), strict=True):
        story.chain(peer, busy)
    story.round(1, 2.5)
    with Screen(tiny.manifest(), NAMES, Console(file=out, width=80)) as screen:
        for event in story.events:
            screen.feed(event)
    lines = out.getvalue().splitlines()
    assert "round 1: 3 replicas" in lines[-2]
    assert lines[-1].endswith(
        "· chain 0: a computes 45 %, waits 5 % forward 15 % backward, sends 12.3 kB forward 4.5 kB backward a step, queue 3 of 7;"
        " b computes 93 %, waits 5 % forward 15 % backward, sends 12.3 kB forward 4.5 kB backward a step, queue 3 of 7;"
        " slowest: b computes 93 %"
    )


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
