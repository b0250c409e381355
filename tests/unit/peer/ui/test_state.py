"""A monitor's state as plain data: golden fields, hostile texts and numbers, and a bounded size."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from typing import Any

import pytest

from peer import events
from peer.events import Event
from peer.ui import metrics
from peer.ui.run_view import RunView
from peer.ui.state import MOST_PEERS, MOST_POINTS, MOST_SAMPLES, State, state, thinned, to_json
from protocol.wire.claims import Evaluation
from protocol.wire.commit import Diverged, LeftOut
from protocol.wire.decree import CLOSE, OPEN, Decree, Enacted
from tests.docs import metrics as document
from tests.support import tiny
from tests.support.events import every_field_has_a_value
from tests.support.state import EXTREMES, HOSTILE, watched
from tests.support.watched import BEGAN, ROUND_SECONDS, MadeUp, peer_id, says

NOW = BEGAN + 1e6
LOG_ONLY = {f"Contributor.{name}" for name in ("scored", "gain", "edge", "rests")}
"""What only `potluck log credits` tells of a contributor."""


def test_the_state_of_a_small_run() -> None:
    made = MadeUp(5)
    found: dict[str, Any] = json.loads(to_json(state(watched(made, 20), NOW)))
    ids = made.ids
    assert (found["run"], found["round"], found["rounds"], found["finished"]) == (made.manifest.run_id, 21, 1000, False)
    assert found["progress"] == pytest.approx((20 + 0.75) / 1000)
    assert found["tokens"] == 18 * 2 * 2048 + 2 * 2048
    assert found["tokens_per_second"] == pytest.approx(9 * 2048 / (5 * ROUND_SECONDS), rel=1e-4)
    assert found["loss"] == pytest.approx(3 + 5 * math.exp(-20 / 80), rel=1e-5)
    assert [p["peer"] for p in found["peers"]] == ids, "bootstrap nodes are in the health only"
    assert [(p["role"], p["replica"], p["first"], p["last"]) for p in found["peers"]] == [
        ("full", 0, 0, 4), ("stage", 1, 0, 1), ("stage", 1, 1, 2), ("stage", 1, 2, 4), ("spare", None, 0, 0)
    ]  # fmt: skip
    assert [(r["replica"], r["name"], r["chain"]) for r in found["replicas"]] == [
        (0, ids[0][-8:], False), (1, "chain 0", True)
    ]  # fmt: skip
    assert found["replicas"][1]["waits"].startswith("link ")
    assert found["replicas"][1]["bottleneck"] == {"position": 1, "what": "forward", "share": 0.45}
    assert found["replicas"][0]["bottleneck"] is None
    assert [len(found[f"{name}_by_round"]) for name in ("loss", "speed", "seconds", "left_out")] == [20, 20, 20, 20]
    assert found["speed_by_round"][8:10] == [[9, 34.133333], [10, 68.266667]]
    assert found["left_out_by_round"][8:10] == [[9, 1.0], [10, 0.0]]
    newest, before = found["recent"][:2]
    assert (newest["round"], newest["seconds"], newest["replicas"], newest["left_out"]) == (20, ROUND_SECONDS, 2, [])
    assert before["left_out"] == [
        {"replica": "chain 0", "reason": "its offer came too late", "probation": False, "peers": ids[1:4]}
    ]
    assert sum(c["tokens"] for c in found["contributors"]) == found["tokens"]
    first = found["contributors"][0]
    assert [first[name] for name in ("peer", "rounds", "streak", "left_out")] == [ids[0], 20, 20, 0]
    (node,) = found["health"]["operators"]
    assert (node["here"], node["leads"], node["voted"], found["health"]["votes_needed"]) == (True, True, True, 1)
    assert found["health"]["reachable"] == {"direct": 2, "mapped": 1, "private": 1, "unknown": 1}
    assert found["messages"][0]["text"].startswith("round 20: 2 replicas")
    assert "/ip4" not in json.dumps(found), "no addresses of volunteers"


def test_every_field_of_the_state_has_a_source() -> None:
    made = MadeUp(5, rounds=10)
    one = watched(made, 9)
    one.manifest = dataclasses.replace(one.manifest, license="mit")
    commit = made.commit(10).body
    assert isinstance(commit, events.Commit)
    left = tuple(LeftOut(replica=n, reason="late") for n in range(4))
    left += (LeftOut(replica=9, reason="new here", judged="0" * 64, peers=(made.ids[4],), probation=True),)
    wrong = (Diverged(peer=made.ids[2], shard="block.0", refuted=True),)
    measured = Evaluation(
        peer=made.ids[0], round=9, sequences=64, loss=4.0, bits_per_byte=1.5, signature=b"s", sample="once ⇒ upon"
    )
    for source, body in (
        ("bootstrap", dataclasses.replace(commit, left_out=left, diverged=wrong, evaluations=(measured,))),
        ("bootstrap", events.Forked(round=3)),
        (made.manifest.operators[0], events.Relayed(circuits=3, bytes=10, bps=5.0, refused=1)),
        ("bootstrap", events.Refused(peer=made.ids[4], address="", reason="says too much", seconds=60.0)),
        ("bootstrap", events.Gone(peer=made.ids[4])),
        ("bootstrap", events.RunFinished(round=10, state_digest=None)),
    ):
        one.feed(Event(BEGAN + 10 * ROUND_SECONDS, source, body))
    old = watched(made, 3)
    data = dataclasses.replace(old.manifest.data, mirrors=("hf://datasets/a/b",))
    old.manifest = dataclasses.replace(old.manifest, data=data)
    for peer in made.ids[:2]:
        old.feed(Event(BEGAN, "bootstrap", events.Attest(peer=peer, round=3, digests={"embed": "0" * 64})))
    old.news_age, old.join_line = 40.0, "/ip4/203.0.113.5/tcp/1/p2p/a#b"
    told = (state(watched(made, 3), NOW), state(old, NOW), state(one, NOW))
    every_field_has_a_value(State, told, but=LOG_ONLY)


@pytest.mark.parametrize("peers", [500, 1000])
def test_its_size_is_bounded_however_many_peers_there_are(peers: int) -> None:
    one = watched(MadeUp(peers), 2)
    text = to_json(state(one, NOW))
    assert len(text) < 400_000
    assert len(gzip.compress(text.encode(), 5)) < 80_000
    found = json.loads(text)
    assert found["peers_total"] == peers
    assert len(found["peers"]) == min(peers, MOST_PEERS)


def test_charts_of_long_runs_have_a_few_hundred_points() -> None:
    made = MadeUp(1, rounds=100_000)
    one = RunView(made.manifest)
    for round in range(4101):
        one.feed(made.commit(round))
    found = state(one, NOW)
    for chart in (found.loss_by_round, found.speed_by_round, found.seconds_by_round, found.left_out_by_round):
        assert MOST_POINTS / 2 < len(chart) <= MOST_POINTS
        assert chart[-1][0] == 4100
        assert list(chart) == sorted(chart)
    assert len(one.rounds) <= 4000
    assert found.tokens == sum(2048 for round in range(1, 4101) if round % 10 != 9)


def test_thinned_points_are_means() -> None:
    assert thinned([(1, 2.0), (2, 4.0), (3, 6.0), (4, 9.0)], 2) == ((2, 3.0), (4, 7.5))
    assert thinned([(1, 2.0)], 2) == ((1, 2.0),)


@pytest.mark.parametrize("value", EXTREMES)
def test_numbers_that_cannot_be_are_no_json_that_browsers_refuse(value: float) -> None:
    made = MadeUp(5)
    one = watched(made, 2)
    said = says("training", 3, 4, value, bytes_sent=2**63)
    for event in (
        Event(BEGAN + 200, made.ids[0], said),
        Event(value, "bootstrap", made.commit(3, value).body),
        made.commit(4, value),
        Event(value, made.manifest.operators[0], events.Relayed(circuits=1, bytes=1, bps=value, refused=0)),
    ):
        one.feed(event)
    text = to_json(state(one, NOW))
    json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert "nan" not in metrics.exposition(state(one, NOW)).lower()


def test_texts_of_enemies_are_short_and_harmless() -> None:
    made = MadeUp(5)
    one = watched(made, 2)
    commit = made.commit(3).body
    assert isinstance(commit, events.Commit)
    for source, body in (
        (HOSTILE, events.Withdrew(round=3, reason=HOSTILE)),
        (made.ids[0], says(HOSTILE, 3, 1)),
        ("bootstrap", dataclasses.replace(commit, left_out=(LeftOut(replica=1, reason=HOSTILE),))),
        ("bootstrap", events.Warning(text=HOSTILE)),
        ("bootstrap", events.Ready(run="run", peer=HOSTILE, memory_bytes=1, device=HOSTILE, name=HOSTILE)),
    ):  # fmt: skip
        one.feed(Event(BEGAN + 200, source, body))

    def check(value: Any) -> None:
        if isinstance(value, str):
            assert value.isprintable()
            assert len(value) <= 401
        elif isinstance(value, dict):
            for item in value.values():
                check(item)
        elif isinstance(value, list):
            for item in value:
                check(item)

    check(json.loads(to_json(state(one, NOW))))


def decreed(action: str) -> Enacted:
    return Enacted(decree=Decree(run="run", number=0, action=action), signatures={})


def test_who_may_not_take_part_is_given_no_line() -> None:
    """The newest decree counts."""
    made, line = MadeUp(5), "/ip4/203.0.113.5/tcp/1/p2p/a#b"
    one = watched(made, 1)
    one.join_line = line
    shown = []
    for round, action in ((2, CLOSE), (3, OPEN)):
        shown.append((state(one, NOW).about.is_open, state(one, NOW).about.join_line))
        event = made.commit(round)
        assert isinstance(event.body, events.Commit)
        one.feed(dataclasses.replace(event, body=dataclasses.replace(event.body, decree=decreed(action))))
        shown.append((state(one, NOW).about.is_open, state(one, NOW).about.join_line))
    assert shown == [(True, line), (False, ""), (False, ""), (True, line)]


def test_the_models_sentences_are_from_the_whole_run_the_newest_first() -> None:
    one = RunView(tiny.manifest())
    for round in range(1, 41):
        said = Evaluation(
            peer="a", round=round, sequences=1, loss=4.0, bits_per_byte=1.0, signature=b"", sample=str(round)
        )
        one.held_out.add([said])
    found = [x.round for x in state(one, NOW).samples]
    assert len(found) == MOST_SAMPLES
    assert (found[0], found[-1]) == (40, 1)
    assert found == sorted(set(found), reverse=True)


def test_the_document_of_the_metrics_is_todays() -> None:
    assert document.PATH.read_text(encoding="utf-8") == document.documentation()


def test_before_anything_happened() -> None:
    found = json.loads(to_json(state(RunView(tiny.manifest()), NOW)))
    assert (found["round"], found["loss"], found["peers"], found["recent"]) == (0, None, [], [])
    assert found["health"]["operators"][0]["here"] is False


def test_refusals_of_the_operators_nodes_are_counted_across_their_restarts() -> None:
    """Not those of peers, who may say what they like."""
    one = watched(MadeUp(5), 2)
    node, peer = one.manifest.operators[0], one.listed()[0].peer

    def told(source: str, refused: int) -> None:
        body = says("", 0, 0, refused=refused)
        one.feed(Event(NOW, source, body))

    for refused in (0, 3, 3, 8, 2):
        told(node, refused)
    told(peer, 10**9)
    shown = state(one, NOW)
    assert shown.health.refused_total == 8 + 2
    assert f'potluck_refused_total{{run="{one.manifest.run_id[:12]}"}} 10\n' in metrics.exposition(shown)
    one.feed(Event(NOW, "bootstrap", events.Refused(peer=peer, address="", reason="says too much", seconds=60.0)))
    assert state(one, NOW).health.refused_total == 11, "a node's own recording"


def test_metrics_are_what_prometheus_reads() -> None:
    text = metrics.exposition(state(watched(MadeUp(5), 20), NOW))
    run = MadeUp(5).manifest.run_id[:12]
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values[f'potluck_round{{run="{run}"}}'] == "21"
    assert values[f'potluck_peers{{run="{run}",role="stage"}}'] == "3"
    assert values[f'potluck_tokens_total{{run="{run}"}}'] == str(38 * 2048)
    assert text.endswith("\n")
    for line in text.splitlines():
        assert line.startswith(("# HELP potluck_", "# TYPE potluck_", "potluck_"))
    assert peer_id(0) not in text, "no series for each peer: there may be thousands"
