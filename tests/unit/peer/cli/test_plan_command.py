"""`potluck plan`: lists of peers, changes, runs, and what is said of them."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from peer.cli import plan as command
from peer.ui.text import size
from protocol.errors import UsageError
from protocol.ledger import aggregation
from protocol.planning import partition
from protocol.run import manifest as manifests
from protocol.wire.announcement import NODE_DEVICE, Announcement
from tests.support import monitor as watched
from tests.support import plans, tiny

PEERS = """manifest = "run.toml"

[[peers]]
name = "big"
memory = "40GB"
up = "50Mbps"
down = "250Mbps"
speed = "60TFLOPS"

[[peers]]
name = "small"
count = 4
memory = "6GB"
up = "20Mbps"
speed = "10TFLOPS"
coordinates = [5, 1.5]
presence = 0.9
reachable = "private"

[[peers]]
memory = "1GB"
"""


def _said(folder: Path, text: str = PEERS, *what_if: str, figures: bool = False) -> list[str]:
    (folder / "run.toml").write_text(manifests.to_toml(plans.manifest_of("0.5B")))
    (folder / "peers.toml").write_text(text)
    return planned(str(folder / "peers.toml"), *what_if, figures=figures)


def planned(text: str | None, *what_if: str, figures: bool) -> list[str]:
    async def lines() -> list[str]:
        return [line async for line in command.lines(text, what_if, figures)]

    return asyncio.run(lines())


def _rate(line: str) -> float:
    return float(line.rpartition(": ")[2].split()[0].replace(",", ""))


def test_a_list_of_peers_is_planned_and_explained(tmp_path: Path) -> None:
    said = _said(tmp_path)
    assert "6 peers, " in said[0]
    assert _rate(said[0]) > 0
    text = "\n".join(said)
    for name in ("big", "small-1", "small-2", "small-3", "small-4"):
        assert text.count(f" {name}") >= 1
    assert "limit: " in text
    assert any(line.startswith("  spare  p3: its memory holds no stage: the smallest needs ") for line in said)


def test_a_plan_says_from_how_many_replicas_on_nodes_add_up_the_updates(tmp_path: Path) -> None:
    assert not any("add up" in line for line in _said(tmp_path))
    made = plans.manifest_of("0.5B")
    made = dataclasses.replace(made, outer=dataclasses.replace(made.outer, aggregate_topk=256))
    (tmp_path / "run.toml").write_text(manifests.to_toml(made))
    said = planned(str(tmp_path / "peers.toml"), figures=False)
    fetches = size(aggregation.largest_aggregate(made))
    first = f"from {aggregation.least_replicas(made)} replicas on the nodes add up the updates"
    assert f"{first}, and each peer fetches {fetches} a round at most" in said


def test_a_plan_says_whether_the_swarm_pays_beside_its_fastest_machine(tmp_path: Path) -> None:
    big, small = PEERS.split("[[peers]]")[1:3]
    said = _said(tmp_path)
    ratio = float(said[1].split()[0])
    full = next(_rate(line.partition(" tokens")[0]) for line in said if " full: " in line)
    assert said[1] == f"  {said[1].split()[0]} times as many as big alone would train"
    assert ratio == pytest.approx(_rate(said[0]) / full, rel=0.02)
    two = _said(
        tmp_path, PEERS.replace(big, f"{big.rstrip()}\ncount = 2\n\n").replace(small, small.replace("6GB", "1GB"))
    )
    assert float(two[1].split()[0]) == pytest.approx(2.0, rel=0.02)
    lone = _said(tmp_path, PEERS.replace(small, small.replace("6GB", "1GB")))
    assert lone[1].endswith("alone would train: this swarm does not pay")
    assert _said(tmp_path, PEERS.replace("40GB", "6GB"))[1] == "  no machine could train the model alone"


def test_devices_of_a_peer_add_up_where_they_hold_the_whole_model(tmp_path: Path) -> None:
    """A peer with three devices is one that is three times as fast, where each holds the model or all do together; one
    whose devices are too small has one."""
    big, small = PEERS.split("[[peers]]")[1:3]
    three = _said(tmp_path, PEERS.replace(big, f"{big.rstrip()}\ndevices = 3\n\n"))
    assert three == _said(tmp_path, PEERS.replace(big, big.replace("60TFLOPS", "180TFLOPS")))
    assert three != _said(tmp_path)
    together = _said(tmp_path, PEERS.replace(small, f"{small.rstrip()}\ndevices = 3\n\n"))
    assert sum("its 3 devices hold the whole model together" in line for line in together) == 4
    tiny_ones = small.replace("6GB", "1GB")
    short = _said(tmp_path, PEERS.replace(small, f"{tiny_ones.rstrip()}\ndevices = 3\n\n"))
    assert short == _said(tmp_path, PEERS.replace(small, tiny_ones))
    for wrong in ("devices = 0", "devices = 65", 'devices = "2"'):
        with pytest.raises(UsageError, match=r"peer 1: devices must be a whole number in 1\.\.64"):
            _said(tmp_path, PEERS.replace(big, f"{big.rstrip()}\n{wrong}\n\n"))
    with pytest.raises(UsageError, match=r"peer 3: devices must be .* beside the speed of one of them"):
        _said(tmp_path, PEERS + "devices = 2\n")


def test_what_if_says_what_changes(tmp_path: Path) -> None:
    more = _said(tmp_path, PEERS, "+3:40GB,50Mbps,250Mbps,60TFLOPS")
    assert more[0].startswith("what if: ")
    before, after = (
        float(part.split()[0].replace(",", "")) for part in more[0].removeprefix("what if: ").split("become ")
    )
    assert after > 2 * before
    assert _rate(more[1]) == after
    less = _said(tmp_path, PEERS, "-big", "-p3")
    assert "4 peers" in less[1]
    assert not any(" big" in line for line in less)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("+x:1GB,1M,1M,1T", "not understood"),
        ("+2:1GB,1M,1M", "not understood"),
        ("big", "not understood"),
        ("-nobody", "none that is known ends so"),
        ("-", "not understood"),
        ("+1:1GB,1M,1M,fast", 'speed "fast"'),
        ("+0:1GB,1M,1M,1T", "count must be"),
        ("+1:much,1M,1M,1T", "size"),
    ],
)
def test_changes_that_make_no_sense_are_refused(tmp_path: Path, change: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        _said(tmp_path, PEERS, change)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('memory = "1GB"', "", "has no memory"),
        ('memory = "1GB"', 'memory = "1GB"\nsize = 3', "peer 3: knows only"),
        ("presence = 0.9", "presence = 9", "presence must be"),
        ("[5, 1.5]", '["near"]', "coordinates must be"),
        ('"private"', '"hidden"', "reachable must be"),
        ('name = "small"', 'name = "big"\n', ""),
        ("count = 4", "count = 0", "count must be"),
        ('manifest = "run.toml"', "", "must have manifest"),
        ('manifest = "run.toml"', "manifest = ", "not TOML"),
        ('manifest = "run.toml"', 'manifest = "none.toml"', "none.toml"),
        ("count = 4", "", ""),
    ],
)
def test_lists_that_make_no_sense_are_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    if not said:
        assert _said(tmp_path, PEERS.replace(old, new))
        return
    with pytest.raises(UsageError, match=said):
        _said(tmp_path, PEERS.replace(old, new))


def test_two_peers_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the same name"):
        _said(tmp_path, PEERS.replace('"small"\ncount = 4', '"big"'))


def test_the_figures_come_without_a_run() -> None:
    said = planned(None, figures=True)
    assert any(line.split()[-8:] == ["15.5", "%", "97.8", "%", "99.6", "%", "99.8", "%"] for line in said)
    assert [line for line in said if "billion tokens" in line]
    with pytest.raises(UsageError, match=r"^RUN: is missing"):
        planned(None, figures=False)


async def test_a_run_is_planned_from_what_is_announced_and_its_newest_plan() -> None:
    async with watched.watching() as (node, monitor, _):
        node.log = watched.records(watched.commits()[:2])
        await node.announce(watched.ALICE, memory_bytes=10**6, speed_flops=123)
        await node.announce(watched.BOB, device=NODE_DEVICE)  # who only hosts is no spare
        known = await command.known_by(monitor)
    assert [(c.peer, c.memory_bytes, c.speed_flops) for c in known.candidates] == [(watched.ALICE.peer_id, 10**6, 123)]
    assert known.replicas == watched.plan(2).replicas


def test_a_peer_is_told_how_much_more_the_run_trains_with_it() -> None:
    """A second machine like the first one doubles it; the first one is told of no run without it."""
    whole = tiny.full_memory(tiny.manifest())
    own = Announcement(run="r", peer="me", memory_bytes=whole, speed_flops=10**12, up_bps=10**9)
    other = partition.candidate(dataclasses.replace(own, peer="other"))
    known = command.Known(manifest=tiny.manifest(), candidates=(other,))
    (role, _) = command.part_lines(known, own)
    assert role.endswith(" million a day; with it the run trains 100% more")
    (alone, _) = command.part_lines(dataclasses.replace(known, candidates=()), own)
    assert alone.endswith(" million a day")
