"""A peer leaves and comes back by itself, by `--hours`, on battery and on a metered connection: a real process with a
clock, power supplies and a NetworkManager that files set."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import pytest

from peer.cli.main import main
from peer.events import Event
from tests.faults.processes import Swarm
from tests.faults.roles import NODE
from tests.faults.told_time import set_wall
from tests.support import tiny
from tests.support.roles import make_manifest

HALF_AN_HOUR = 1800.0


def shown(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%H:%M")


def test_it_trains_in_its_hours_and_leaves_and_comes_back_without_a_hand(tmp_path: Path) -> None:
    inside = time.time()
    outside, hours = inside + 2 * HALF_AN_HOUR, (inside - HALF_AN_HOUR, inside + HALF_AN_HOUR)
    with Swarm(tmp_path / "run", make_manifest(start_peers=1), tiny.OPERATORS[:1]) as swarm:
        swarm.start_node(NODE)
        swarm.module = "tests.faults.told_time"
        for name in ("a", "b"):
            swarm.options[name] = ["--hours", "-".join(map(shown, hours))]
            set_wall(swarm.folder / name, inside)
        folder = swarm.folder / "b"
        swarm.start("a")
        set_wall(folder, outside)
        swarm.start("b")

        def tells(kind: str, after: int) -> Event:
            return swarm.wait("b", lambda e: e.kind == kind, kind, after=after)

        def rounds_with(peers: set[str]) -> None:
            seen = swarm.events(NODE)
            head = max((e.fields["round"] for e in seen if e.kind == "commit"), default=0)

            def has_them(event: Event) -> bool:
                if event.kind != "commit" or event.fields["round"] <= head:
                    return False
                return {
                    p for c in event.fields["contributions"] if c["tokens"] for p in (s["peer"] for s in c["shares"])
                } == peers

            swarm.wait(NODE, has_them, f"a round of {peers}", after=len(seen))

        paused = tells("paused", 0)
        assert paused.fields["reason"] == f"outside of its hours, {shown(hours[0])}-{shown(hours[1])}"
        assert [e.kind for e in swarm.events("b")] == ["paused"], "it has not even looked for the run"
        peer = {name: swarm.started(name) for name in "a"}
        rounds_with({peer["a"]})

        for _ in range(2):
            told = len(swarm.events("b"))
            set_wall(folder, inside)
            tells("resumed", told)
            peer["b"] = tells("started", told).fields["peer"]
            rounds_with({peer["a"], peer["b"]})
            told, heard = len(swarm.events("b")), len(swarm.events(NODE))
            set_wall(folder, outside)
            tells("paused", told)
            tells("leaving", told)
            swarm.wait(NODE, lambda e: e.kind == "gone" and e.fields["peer"] == peer["b"], "its leaving", after=heard)
            rounds_with({peer["a"]})

        swarm.running["b"].terminate()
        assert swarm.ended("b") == 0, "also in a pause"
        for name in list(swarm.running):
            swarm.kill(name)
        swarm.check()


def test_it_pauses_on_battery_and_on_a_metered_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line, bin = tmp_path / "line", tmp_path / "bin"
    bin.mkdir()
    (bin / "nmcli").write_text(f"#!/bin/sh\ncat {line}\n")
    (bin / "nmcli").chmod(0o755)
    monkeypatch.setenv("PATH", str(bin), prepend=":")
    line.write_text(connected("no (guessed)"))
    with Swarm(
        tmp_path / "run", make_manifest(start_peers=1), tiny.OPERATORS[:1], module="tests.faults.told_time"
    ) as swarm:
        folder = swarm.folder / "a"
        set_wall(folder, time.time())
        supply(folder / "supplies", "BAT0", type="Battery", status="Charging")
        supply(folder / "supplies", "AC", type="Mains", online="1")
        swarm.roams = {"a"}
        swarm.module = "peer.cli"
        swarm.start_node(NODE)
        swarm.module = "tests.faults.told_time"
        swarm.start("a")
        swarm.committed(NODE, 1)

        def tells(kind: str, after: int) -> Event:
            return swarm.wait("a", lambda e: e.kind == kind, kind, after=after)

        def unplug() -> None:
            supply(folder / "supplies", "BAT0", type="Battery", status="Discharging")
            supply(folder / "supplies", "AC", type="Mains", online="0")

        def plug_in() -> None:
            supply(folder / "supplies", "AC", type="Mains", online="1")

        for leave, come_back, reason in (
            (unplug, plug_in, "until plugged in (--on-battery goes on)"),
            (
                lambda: line.write_text(connected("yes")),
                lambda: line.write_text(connected("no")),
                "a metered line (--on-metered goes on)",
            ),
        ):
            told, heard = len(swarm.events("a")), len(swarm.events(NODE))
            leave()
            assert tells("paused", told).fields["reason"] == reason
            swarm.wait(NODE, lambda e: e.kind == "gone", "its leaving", after=heard)
            heard = len(swarm.events(NODE))
            come_back()
            tells("resumed", told)
            swarm.wait(NODE, lambda e: e.kind == "commit" and bool(e.fields["contributions"]), "a round", after=heard)
        swarm.running["a"].terminate()
        assert swarm.ended("a") == 0


def supply(folder: Path, name: str, **files: str) -> None:
    """Writes a power supply as Linux shows it."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / name / file).write_text(content + "\n")


def connected(metered: str) -> str:
    """What nmcli prints of a machine with a wireless connection."""
    return (
        f"GENERAL.METERED:{metered}\nIP4.GATEWAY:192.168.1.1\nIP6.GATEWAY:\n\n"
        "GENERAL.METERED:unknown\nIP4.GATEWAY:\nIP6.GATEWAY:\n"
    )


def test_hours_that_are_none_are_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{tiny.OPERATOR.peer_id}#{'0' * 64}"
    with pytest.raises(SystemExit) as ended:
        main(["join", address, "--dir", str(tmp_path / "peer"), "--hours", "8-8"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "potluck: --hours 8-8: begins when it ends; leave it out to train always\n"
