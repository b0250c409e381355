"""Events are what their types say: as JSON, where they are sent, where they are shown, and in docs/events.md."""

from __future__ import annotations

import ast
import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest

import bootstrap
import peer
from peer import events
from peer.events import Body, Emitter, Event, from_json
from peer.ui.lines import describe, describe_own
from peer.ui.run_view import PeerView, RunView
from protocol.ledger import access
from protocol.wire.announcement import AXES
from protocol.wire.claims import Evaluation, Mark, Score
from protocol.wire.commit import Aggregate, Diverged, LeftOut, Record
from protocol.wire.decree import CLOSE, Board, Decree, Enacted, Limits, Operator, Schedule
from protocol.wire.plan import Plan, Seat, Work
from protocol.wire.schema import Digest
from tests.docs import events as document
from tests.support import tiny
from tests.support.events import every_field_has_a_value, public
from tests.support.monitor import BOB, commits
from tests.support.tui import NAMES, PEERS, Story
from tests.support.watched import decided

KINDS = list(events.KINDS.values())
BOARD = Board(operators=tuple(Operator(peer=peer) for peer in PEERS[:4]), quorum=4)
CLOSED = Enacted(decree=Decree(run="run", number=0, action=CLOSE), signatures={})
NOT_SHOWN = {
    events.Leads: "who of several bootstrap nodes leads: the tests of their failures read it",
    events.Recovered: "from which state a newcomer replayed: a screen shows the round that it reached",
}
"""Kinds that are in the JSON lines only, and why."""


def example(hint: Any, name: str = "") -> Any:
    """A value of a field: of a model with four blocks and a plan with a chain."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return "0" * 64 if hint == Digest else example(inner[0], name)
    if origin in (types.UnionType, typing.Union):
        return example(inner[0], name)
    if origin is tuple:
        return (example(inner[0], name),) * (AXES if name == "coordinates" else 1)
    if origin is dict:
        return {"embed": example(inner[1], name)}
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        return hint(**{f.name: example(hints[f.name], f.name) for f in dataclasses.fields(hint)})  # type: ignore[operator]
    if hint is str:
        return {"peer": PEERS[1], "role": "full", "how": "direct", "reachable": "direct"}.get(name, "text")
    return {int: {"first": 0, "last": 2}.get(name, 1), float: 0.5, bool: True, bytes: b"bytes"}[hint]


@pytest.mark.parametrize("kind", KINDS, ids=events.kind_of)
def test_every_kind_survives_json(kind: type[Body]) -> None:
    event = Event(2.5, "somebody", example(kind))
    line = event.to_json()
    assert from_json(line) == event
    data = json.loads(line)
    assert set(data) == {"at", "source", "event", *(f.name for f in dataclasses.fields(kind))}
    assert from_json(json.dumps({**data, "new": 1})) == event, "a field that is not known is passed over"


@pytest.mark.parametrize("kind", KINDS, ids=events.kind_of)
def test_an_event_has_the_fields_of_its_type_and_no_others(kind: type[Body]) -> None:
    fields = {f.name: getattr(example(kind), f.name) for f in dataclasses.fields(kind)}
    data = json.loads(Event(1.0, "somebody", kind(**fields)).to_json())
    for name in fields:
        assert from_json(json.dumps({**data, name: object.__name__ if not isinstance(data[name], str) else 1})) is None
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING:
            assert from_json(json.dumps({k: v for k, v in data.items() if k != field.name})) is None


@pytest.mark.parametrize(
    "line",
    ["", "junk", "[]", "{}", "null", '{"event": "gone"}', '{"at": 1, "source": "x", "event": "unknown", "peer": "y"}',
     '{"at": "soon", "source": "x", "event": "gone", "peer": "y"}',
     '{"at": 1, "source": "x", "event": [], "peer": "y"}'],
)  # fmt: skip
def test_what_is_no_event_is_none(line: str) -> None:
    assert from_json(line) is None


def test_an_emitter_adds_its_name_and_the_time() -> None:
    told: list[Event] = []
    Emitter("me", told.append)(events.Warning(text="hot"))
    (event,) = told
    assert (event.source, event.body, event.kind) == ("me", events.Warning(text="hot"), "warning")
    assert event.time > 1.7e9


# --- where they come from


def made() -> Iterator[type[Body]]:
    """The arguments of each event that the product makes: `events.Kind(…)`, or `extend(events.Kind, message)`."""
    by_name = {kind.__name__: kind for kind in KINDS}
    for package in (peer, bootstrap):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            tree = ast.parse(path.read_text())
            patterns = {id(node.cls) for node in ast.walk(tree) if isinstance(node, ast.MatchClass)}
            for node in ast.walk(tree):
                match node:
                    case ast.Call(
                        func=ast.Name(id="extend"), args=[ast.Attribute(value=ast.Name(id="events"), attr=name), _]
                    ):
                        yield by_name[name]
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name(id="events"), attr=name) | ast.Name(id=name) as call
                    ):
                        if (
                            name in by_name
                            and id(call) not in patterns
                            and (isinstance(call, ast.Attribute) or path.name == "events.py")
                        ):
                            yield by_name[name]


def test_every_kind_is_sent_by_somebody() -> None:
    assert set(made()) == set(KINDS)


# --- where they go


def state(view: RunView) -> str:
    return repr([getattr(view, f.name) for f in dataclasses.fields(view) if f.name not in ("now", "began", "notes")])


@pytest.mark.parametrize("kind", KINDS, ids=events.kind_of)
def test_every_kind_is_shown_or_has_a_reason_not_to_be(kind: type[Body]) -> None:
    story = Story().begin()
    story.round(1, 2.5)
    story.attest(1)
    before, event = state(story.view), Event(story.events[-1].time, PEERS[0], example(kind))
    if kind is events.Commit:
        event = dataclasses.replace(event, body=dataclasses.replace(example(kind), round=2))
    story.tell(event.source, event.body)
    shown = state(story.view) != before or describe(event, NAMES) != [] or describe_own(event, NAMES) != []
    assert shown == (kind not in NOT_SHOWN)


def changed(value: Any, fresh: Any) -> set[str]:
    """The public fields in which `value` is no longer as it begins."""
    return {f.name for f in public(fresh) if getattr(value, f.name) != getattr(fresh, f.name)}


def test_every_field_of_the_screen_has_a_source() -> None:
    story, found, of_peers = Story(), set[str](), set[str]()
    middle = events.Role(round=1, role="stage", replica=2, first=1, last=2, position=1, stages=3)
    acts = [
        story.begin,
        lambda: story.tell("bootstrap", events.Attest(peer=PEERS[0], round=0, digests={})),
        lambda: story.tell(PEERS[3], middle),
        lambda: story.chain(PEERS[3], 1.0),
        lambda: story.round(1, 2.5, left_out=(LeftOut(replica=2, reason="late"),)),
        lambda: story.round(2, 2.5),
        lambda: story.tell("bootstrap", events.Gone(peer=PEERS[5])),
        lambda: story.tell("bootstrap", events.Relayed(circuits=1, bytes=1, bps=1.0, refused=0)),
        lambda: story.tell("bootstrap", events.Refused(peer=PEERS[5], address="", reason="floods", seconds=1.0)),
        lambda: story.tell("bootstrap", events.Forked(round=1)),
        lambda: story.tell("bootstrap", decided(3, plan=None, leader=PEERS[0], voters=(PEERS[0],), board=BOARD)),
        lambda: story.tell("bootstrap", decided(4, plan=None, decree=CLOSED)),
        story.finish,
    ]  # fmt: skip
    for act in acts:
        act()
        found |= changed(story.view, RunView(tiny.manifest()))
        for p in story.view.peers.values():
            of_peers |= changed(p, PeerView(p.peer, p.name))
    assert found | {"manifest", "news_age", "join_line"} == {f.name for f in public(RunView)}
    assert of_peers | {"peer", "name"} == {f.name for f in public(PeerView)}


def everything(plan: Plan) -> Plan:
    """A plan in which no field is empty."""
    first, *others = plan.replicas
    ahead = dataclasses.replace(first, following=Work(slot=90))
    forming = dataclasses.replace(others[0], number=-1)
    return dataclasses.replace(
        plan,
        replicas=(ahead, *others),
        forming=(forming,),
        forming_since=(3,),
        seats=(Seat(number=9, work=Work(slot=7)),),
        next_slot=4,
        spares=(PEERS[5],),
    )


SCORES = (Score(peer=BOB.peer_id, round=1, marks=(Mark(replica=1, assigned=0.5, other=0.25),), signature=b"s"),)
EVALUATIONS = (
    Evaluation(
        peer=BOB.peer_id, round=1, sequences=4, loss=2.0, bits_per_byte=1.0, signature=bytes(64), sample="a ⇒ b"
    ),
)


def test_every_field_of_the_logs_json_has_a_source() -> None:
    """Of every message that it is made of, no field is in vain."""
    _, second, last = commits()
    assert second.plan is not None
    schedule = Schedule(
        rounds=2, total_steps=3, limits=Limits(probation=4, share=0.5, range_sessions=6, range_share=0.75)
    )
    operators = (Operator(peer=BOB.peer_id, places=("/ip4/1.2.3.4/tcp/1",)),)
    decree = Decree(
        run="0" * 64,
        number=1,
        action="ban",
        subject=BOB.peer_id,
        reason="noise",
        schedule=schedule,
        operators=operators,
        quorum=4,
    )
    tried = tuple(dataclasses.replace(x, peers=(BOB.peer_id,), probation=True, faults="1") for x in last.left_out)
    ticket = access.issue(tiny.OPERATOR, bytes(32), last.run, expires=9, count=2, reason="friends")
    commit = dataclasses.replace(
        last,
        contributions=(dataclasses.replace(last.contributions[0], replica=1, weight=0.5),),
        left_out=tried,
        diverged=(Diverged(peer=BOB.peer_id, shard="embed", refuted=True),),
        digests={"embed": "0" * 64},
        plan=everything(second.plan),
        decrees=1,
        decree=Enacted(decree=decree, signatures={BOB.peer_id: b"s"}),
        evaluations=EVALUATIONS,
        joined=(ticket.joined(BOB.peer_id),),
        schedule=schedule,
        scores=SCORES,
        board=Board(operators=operators, quorum=1),
        idle=1,
        aggregates=(Aggregate(shard="embed", digest="0" * 64, size=9),),
    )
    every_field_has_a_value(Record, dataclasses.replace(tiny.record(commit), ballot=3))


def test_the_document_is_what_the_types_say() -> None:
    assert document.documentation() == document.PATH.read_text(encoding="utf-8"), "python -m tests.docs.events"
