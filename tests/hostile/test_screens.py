"""Whatever peers say of themselves, the screens bear it."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from peer import events
from peer.events import Body, Event
from peer.ui.lines import Lines
from peer.ui.run_view import RunView
from peer.ui.screen import chart, render
from peer.ui.text import clock
from protocol.errors import RemoteError
from protocol.ledger import history
from protocol.run.manifest import Manifest
from protocol.wire import encoding, framing
from protocol.wire.commit import Commit, Contribution, Record, Share
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec, Work
from protocol.wire.schema import packed
from tests.hostile.ground import identity
from tests.support import tiny
from tests.support.watched import decided, made, says

HONEST, ENEMY = identity("honest").peer_id, identity("enemy").peer_id
EXTREMES = (0.0, 1e6, 1e308, -1e308, float("inf"), float("-inf"), float("nan"), -1.0)
M = tiny.manifest()
WIDTH, HEIGHT = 110, 36


def plan(round: int) -> Plan:
    return Plan(
        round=round,
        replicas=tuple(
            ReplicaSpec(number=i, stages=(StageSpec(peer=peer, first=0, last=4),), work=Work(steps=4, micro_batches=2))
            for i, peer in enumerate((HONEST, ENEMY))
        ),
        next_number=2,
    )


def commit(round: int, loss: float | None = 2.0, time: float = 1.7e9) -> events.Commit:
    contributions = [made(i, said, peer) for i, (peer, said) in enumerate(((HONEST, 2.0), (ENEMY, loss)))]
    return decided(round, *contributions, plan=plan(round + 1))


def announced(loss: float | None, round: int = 1, step: int = 1) -> events.Announced:
    return says("training", round, step, loss, bytes_sent=2**63, bytes_received=2**63)


def drawn(view: RunView) -> list[str]:
    console = Console(file=io.StringIO(), width=WIDTH, height=HEIGHT, force_terminal=True, color_system=None)
    console.print(render(view, WIDTH, HEIGHT), end="")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().split("\n")[:HEIGHT]


def fed(*bodies: tuple[str, Body]) -> RunView:
    view = RunView(M)
    view.feed(Event(1.7e9, "bootstrap", commit(0)))
    for source, body in bodies:
        view.feed(Event(1.7e9, source, body))
    return view


@pytest.mark.parametrize("loss", EXTREMES)
def test_a_loss_that_cannot_be_neither_ends_a_screen_nor_hides_the_others(loss: float) -> None:
    said = [
        (HONEST, announced(2.5)),
        (ENEMY, announced(loss)),
        ("bootstrap", commit(1, loss)),
        (HONEST, announced(2.0, 2)),
    ]
    view = fed(*said)
    lines = drawn(view)
    assert all(len(line.rstrip("\r")) <= WIDTH for line in lines)
    assert max(y for _, y in view.curve) <= view.highest
    for source, body in said:
        for line in Lines().of(Event(1.7e9, source, body)):
            assert "\n" not in line


@pytest.mark.parametrize("number", [0, 2**31 - 2, 2**53])
def test_rounds_and_steps_that_cannot_be_are_not_on_the_curve(number: int) -> None:
    view = fed((ENEMY, announced(3.0, number, number)), (HONEST, announced(2.0)))
    drawn(view)
    assert [x <= M.rounds for x, _ in view.curve] == [True]


def test_a_stranger_who_is_not_planned_is_not_on_the_curve() -> None:
    view = fed((identity("stranger").peer_id, announced(9.0)), (HONEST, announced(2.0)))
    assert [y for _, y in view.curve] == [2.0]


@pytest.mark.parametrize("when", [*EXTREMES, 2.0**63])
def test_a_time_that_cannot_be_is_shown_as_some_time(when: float) -> None:
    assert len(clock(when)) == len("12:34:56")
    assert Lines().of(Event(when, "bootstrap", commit(1)))


@pytest.mark.parametrize("y", EXTREMES)
@pytest.mark.parametrize("x", [1.0, 1e308, float("nan")])
def test_a_chart_of_anything_has_its_width(x: float, y: float) -> None:
    points = [(0.5, 2.0), (x, y)]
    for lines in (chart(points, [], 60, 12), chart([], points, 60, 12), chart([(x, y)], [], 60, 12)):
        assert len(lines) == 12
        assert all(line.cell_len <= 60 for line in lines)


def record(of: Manifest, **changes: object) -> bytes:
    """The record of round 0, with its operator's vote, whatever its fields say."""
    share = Share(peer=HONEST, root="0" * 64, size=8, norm=1.0, listed=8)
    made = Contribution(replica=0, tokens=8, steps=1, loss=2.0, shares=(share,))
    whole = Commit(
        run=of.run_id, round=0, parent=of.run_id, time=1.7e9, contributions=(made,), left_out=(), diverged=(),
        digests={}, plan=None, leader=tiny.OPERATOR.peer_id, members=(tiny.OPERATOR.peer_id,),
    )  # fmt: skip
    voted: Record = tiny.record(whole)
    return framing.pack_message({"c": {**packed(whole), **changes}, "n": 0, "v": voted.votes})


@pytest.mark.parametrize(
    "changes",
    [
        *({"time": time} for time in (1e308, -1.0, float("inf"), float("nan"))),
        *({"contributions": [[0, 8, 1, loss, []]]} for loss in (1e308, -1.0, float("inf"), float("nan"))),
        {"contributions": [[0, 2**64 - 1, 2**64 - 1, 2.0, []]]},
        {"left_out": [[0, "r" * 5000]]},
        {"digests": {"s" * 17: b"0" * 32}},
    ],
)
def test_a_log_with_what_cannot_be_is_refused_in_one_line(changes: dict[str, object]) -> None:
    """By `log show`, `log verify`, `monitor`, peers and nodes: they read records with one decoder."""
    assert history.follow(M, None, record(M)).commit.round == 0
    with pytest.raises(history.BadCommit) as refused:
        history.follow(M, None, record(M, **changes))
    assert str(refused.value).isprintable()
    with pytest.raises(RemoteError):
        encoding.decode_record(record(M, **changes), "p")


def test_events_with_numbers_that_are_none_are_no_events() -> None:
    line = json.dumps(
        {
            "at": 1.0,
            "source": HONEST,
            "event": "step",
            "round": 1,
            "step": 1,
            "loss": 2.0,
            "tokens": 1,
            "seconds": 1.0,
        }
    )
    assert events.from_json(line) is not None
    assert events.from_json(line.replace("2.0", "Infinity")) is None
