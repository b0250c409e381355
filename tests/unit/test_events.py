"""Events are what their types say: as JSON, where they are sent, where they are shown, and in docs/events.md."""

from __future__ import annotations

import ast
import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bootstrap
import peer
from peer import events
from peer.events import Body, Emitter, Event, from_json
from peer.ui.lines import describe, describe_own
from peer.ui.logged import LoggedRound, logged
from peer.ui.run_state import PeerView, View
from peer.ui.snapshot import Snapshot, snapshot
from protocol.ledger import invitations, part_lists
from protocol.wire.announcement import Announcement
from protocol.wire.audit import Audit
from protocol.wire.commit import Commit, Contribution, Diverged, LeftOut, Part
from protocol.wire.decree import Decree, Enacted, Limits, Operator, Schedule
from protocol.wire.evaluation import Evaluation
from protocol.wire.plan import Plan, Seat, Work
from protocol.wire.score import Mark, Score
from tests import tiny
from tests.docs import events as document
from tests.unit.test_monitor import ALICE, BOB, CAROL, MANIFEST, REPORT, announcement, commits
from tests.unit.test_tui import NAMES, PEERS, Story, ready

KINDS = list(events.KINDS.values())
NOT_SHOWN = {
    events.Leads: "who of several bootstrap nodes leads: the tests of their failures read it",
    events.Recovered: "from which state a newcomer replayed: a screen shows the round that it reached",
}
"""Kinds that are in the JSON lines only, and why."""


def example(hint: Any, name: str = "") -> Any:
    """A value of a field: of a model with four blocks and a plan with a chain."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return example(inner[0], name)
    if origin is tuple:
        return (example(inner[0], name),)
    if origin is dict:
        return {"embed": example(inner[1], name)}
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{f.name: example(hints[f.name], f.name) for f in dataclasses.fields(hint)})  # type: ignore[operator]
    if hint is str:
        return {"peer": PEERS[1], "role": "full", "how": "direct"}.get(name, "text")
    return {int: {"first": 0, "last": 2}.get(name, 1), float: 0.5, bool: True}[hint]


@pytest.mark.parametrize("kind", KINDS, ids=events.kind_of)
def test_every_kind_survives_json(kind: type[Body]) -> None:
    event = Event(2.5, "somebody", example(kind))
    line = event.to_json()
    assert from_json(line) == event
    data = json.loads(line)
    assert set(data) == {"time", "source", "event", *(f.name for f in dataclasses.fields(kind))}
    assert from_json(json.dumps({**data, "new": 1})) == event, "a field that is not known is passed over"


@pytest.mark.parametrize("kind", KINDS, ids=events.kind_of)
def test_an_event_has_the_fields_of_its_type_and_no_others(kind: type[Body]) -> None:
    fields = {f.name: getattr(example(kind), f.name) for f in dataclasses.fields(kind)}
    with pytest.raises(TypeError, match="unexpected keyword"):
        kind(**fields, another=1)
    data = json.loads(Event(1.0, "somebody", kind(**fields)).to_json())
    for name in fields:
        assert from_json(json.dumps({**data, name: object.__name__ if not isinstance(data[name], str) else 1})) is None
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING:
            assert from_json(json.dumps({k: v for k, v in data.items() if k != field.name})) is None


@pytest.mark.parametrize(
    "line",
    ["", "junk", "[]", "{}", "null", '{"event": "gone"}', '{"time": 1, "source": "x", "event": "unknown", "peer": "y"}',
     '{"time": "soon", "source": "x", "event": "gone", "peer": "y"}', '{"time": 1, "source": "x", "event": [], "peer": "y"}'],
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


def sources() -> Iterator[tuple[Path, ast.Call, type[Body]]]:
    """Every place in the product where an event is made: `events.Kind(…)`."""
    by_name = {kind.__name__: kind for kind in KINDS}
    for package in (peer, bootstrap):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            tree = ast.parse(path.read_text())
            patterns = {id(node.cls) for node in ast.walk(tree) if isinstance(node, ast.MatchClass)}
            for node in ast.walk(tree):
                match node:
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name(id="events"), attr=name) | ast.Name(id=name) as call
                    ):
                        if name in by_name and id(call) not in patterns and _is_events(tree, call, path):
                            yield path, node, by_name[name]


def _is_events(tree: ast.Module, call: ast.expr, path: Path) -> bool:
    """Whether a call means the type of events: others have the same names."""
    return isinstance(call, ast.Attribute) or path.parent.name == "events"


def test_events_are_made_with_the_fields_of_their_types() -> None:
    for path, call, kind in sources():
        given = {keyword.arg for keyword in call.keywords}
        known = {f.name: f.default is dataclasses.MISSING for f in dataclasses.fields(kind)}
        needed = {name for name, required in known.items() if required}
        assert not call.args, f"{path}:{call.lineno}: {kind.__name__} takes its fields by name"
        assert needed <= given <= set(known), f"{path}:{call.lineno}: {kind.__name__} has the fields {', '.join(known)}"


def test_every_kind_is_sent_by_somebody() -> None:
    assert {kind for _, _, kind in sources()} == set(KINDS)


# --- where they go


def state(view: View) -> str:
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
    names = [f.name for f in dataclasses.fields(fresh) if not f.name.startswith("_")]
    return {name for name in names if getattr(value, name) != getattr(fresh, name)}


def test_every_field_of_the_screen_has_a_source() -> None:
    story, found, of_peers = Story(), set[str](), set[str]()
    acts = [
        story.begin,
        lambda: story.tell("bootstrap", events.Attest(peer=PEERS[0], round=0, digests={})),
        lambda: story.tell(PEERS[3], events.Role(round=1, role="stage", replica=2, first=1, last=2, rank=4, position=1, stages=3)),
        lambda: story.chain(PEERS[3], 1.0),
        lambda: story.round(1, 2.5, left_out=(LeftOut(replica=2, reason="late"),)),
        lambda: story.tell("bootstrap", events.Gone(peer=PEERS[5])),
        story.finish,
    ]  # fmt: skip
    for act in acts:
        act()
        found |= changed(story.view, View(tiny.manifest()))
        for p in story.view.peers.values():
            of_peers |= changed(p, PeerView(p.peer, p.name))
    assert found | {"manifest", "news_age"} == {f.name for f in dataclasses.fields(View) if not f.name.startswith("_")}
    assert of_peers | {"peer", "name"} == {f.name for f in dataclasses.fields(PeerView)}


def values(value: Any) -> Iterator[tuple[str, Any]]:
    """(class.field, value) of a dataclass and all that it is made of."""
    if dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            yield f"{type(value).__name__}.{f.name}", getattr(value, f.name)
            yield from values(getattr(value, f.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from values(item)


def reached(hint: Any) -> set[type]:
    """The dataclasses that a type is made of."""
    found = set[type]().union(*(reached(inner) for inner in typing.get_args(hint)))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        found |= {hint}.union(*(reached(part) for part in typing.get_type_hints(hint).values()))
    return found


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
AUDITS = (Audit(peer=BOB.peer_id, round=1, replica=1, agreement=4.5, signature=b"s"),)
EVALUATIONS = (
    Evaluation(
        peer=BOB.peer_id, round=1, sequences=4, loss=2.0, bits_per_byte=1.0, signature=bytes(64), sample="a ⇒ b"
    ),
)


def test_every_field_of_the_monitors_json_has_a_source() -> None:
    first, second, last = commits()
    wrong = (Diverged(peer=BOB.peer_id, shard="embed"),)
    assert second.plan is not None
    spare = dataclasses.replace(second, plan=everything(second.plan))
    said: dict[str, Announcement] = {
        CAROL.peer_id: announcement(
            CAROL, addresses=("/ip4/1.2.3.4",), reachable="direct", name="carol", down_bps=8, speed_flops=9, refused=1, phase="training", round=2, step=3, loss=1.5,
            bytes_sent=10, bytes_received=11, bytes_written=12, chain=dataclasses.replace(REPORT, counts=(4_000, 5, 7, 2), gradients=(2.0, 3.0, 4.0)),
        ),
        ALICE.peer_id: announcement(ALICE),
    }  # fmt: skip
    made = dataclasses.replace(last.contributions[0], replica=1)
    tried = tuple(dataclasses.replace(x, peers=(BOB.peer_id,), probation=True) for x in last.left_out)
    newest = dataclasses.replace(
        last, diverged=wrong, contributions=(made,), evaluations=EVALUATIONS, audits=AUDITS, left_out=tried
    )
    log = [first, spare, newest]
    over, before = snapshot(MANIFEST, log, said, 5.0), snapshot(MANIFEST, log[:-1], said, 5.0)
    every_field_has_a_value(Snapshot, (over, before))


def test_every_field_of_the_logs_json_has_a_source() -> None:
    _, second, last = commits()
    assert second.plan is not None
    plan = everything(second.plan)
    wrong, digests = (Diverged(peer=BOB.peer_id, shard="embed"),), {"embed": "0" * 64}
    made = dataclasses.replace(last.contributions[0], replica=1)
    decree = Enacted(
        decree=Decree(
            run="0" * 64,
            number=1,
            action="ban",
            subject=BOB.peer_id,
            reason="noise",
            schedule=Schedule(
                rounds=2,
                total_steps=3,
                limits=Limits(probation=4, share=0.5, range_sessions=6, range_share=0.75),
            ),
            operators=(Operator(peer=BOB.peer_id, places=("/ip4/1.2.3.4/tcp/1",)),),
            quorum=4,
        ),
        signatures={},
    )
    commit = dataclasses.replace(last, contributions=(made,), diverged=wrong, digests=digests, plan=plan, decree=decree)
    tried = tuple(dataclasses.replace(x, peers=(BOB.peer_id,), probation=True) for x in last.left_out)
    commit = dataclasses.replace(commit, evaluations=EVALUATIONS, scores=SCORES, audits=AUDITS, left_out=tried)
    ticket = invitations.issue(tiny.OPERATOR, bytes(32), commit.run, expires=9, count=2, reason="friends")
    commit = dataclasses.replace(commit, joined=(ticket.joined(BOB.peer_id),))
    record = dataclasses.replace(tiny.record(commit), ballot=3)
    every_field_has_a_value(LoggedRound, logged(record, plan))
    for unknown in (None, dataclasses.replace(plan, replicas=())):
        found = logged(record, unknown)
        assert [(x.kind, x.rank) for x in (*found.contributions, *found.left_out)] == [("unplanned", None)] * 2


def every_field_has_a_value(cls: type, told: object) -> None:
    found: dict[str, list[Any]] = {}
    for name, value in values(told):
        found.setdefault(name, []).append(value)
    nothing = (None, 0, "", (), {})
    assert [name for name, seen in found.items() if all(value in nothing for value in seen)] == []
    assert set(found) == {f"{part.__name__}.{f.name}" for part in reached(cls) for f in dataclasses.fields(part)}


def test_a_commit_is_told_with_what_its_shares_add_up_to() -> None:
    shares = tuple(
        part_lists.share_of(who, tuple(Part(shard=s, digest="0" * 64, size=size, norm=1.0) for s, size in sizes))
        for who, sizes in (("a", (("embed", 3), ("block.0", 4))), ("b", (("head", 5),)))
    )
    made = Contribution(replica=1, tokens=64, steps=4, loss=2.0, shares=shares)
    left = LeftOut(replica=0, reason="late")
    commit: Commit = dataclasses.replace(commits()[1], contributions=(made,), left_out=(left,))
    told = events.commit_of(commit)
    assert told.contributions == (
        events.Contribution(replica=1, tokens=64, steps=4, loss=2.0, bytes=12, peers=("a", "b")),
    )
    assert (told.round, told.left_out, told.plan) == (1, (left,), commit.plan)


def test_an_announcement_repeats_a_chains_step() -> None:
    seen = events.BoundaryMeans(rms=0.5, largest=2.0, refused=3, sampled=1, frames=8)
    step = dataclasses.replace(example(events.Chain), seconds=2.0, busy_s=0.1234, activations=seen, gradients=None)
    load = events.announced_load(events.chain_report(step))
    assert (load.seconds, load.busy_s, load.gradients) == (2.0, 0.123, None)
    assert load.activations == events.Means(rms=0.5, largest=2.0, refused=3)
    assert (load.forward_bytes, load.backward_bytes, load.depth, load.queued) == (1, 1, 1, 1)


def test_what_a_peer_offers_is_told_as_it_announces_it() -> None:
    said = announcement(ALICE, memory_bytes=1, up_bps=2, down_bps=3, speed_flops=4, device="mps")
    assert events.ready(said) == dataclasses.replace(
        ready(ALICE.peer_id), memory_bytes=1, up_bps=2, down_bps=3, speed_flops=4, device="mps"
    )


def test_the_document_is_what_the_types_say() -> None:
    assert document.documentation() == document.PATH.read_text(encoding="utf-8"), "python -m tests.docs.events"
