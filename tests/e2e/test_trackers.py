"""`potluck monitor --csv --tensorboard --wandb` of a real run: it is killed and started again in the midst of it, and
afterwards the tools' own libraries read what the log says."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peer.ui.metrics import COLUMNS
from protocol.run.manifest import EvaluationSpec
from tests.faults.processes import DEADLINE, Swarm
from tests.faults.roles import NODE
from tests.support import potluck, tiny
from tests.support.roles import make_manifest

OPTIONAL = ("tensorboard", "wandb")
Rows = dict[int, dict[str, float]]
"""Figures by round and column, and `time`."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """What the monitors left in `folder`, and the log's `rows`."""

    folder: Path
    run: str
    rows: Rows


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """Of a run that had rounds before the first monitor, and whose second one went on where that was killed."""
    folder = tmp_path_factory.mktemp("trackers")
    made = dataclasses.replace(make_manifest(start_peers=1), evaluation=EvaluationSpec(every=2, sequences=4))
    with Swarm(folder / "run", made, tiny.OPERATORS[:1], {"a": 10**9}, module="tests.faults.paced") as swarm:
        swarm.start_all("a")
        before = swarm.wait(NODE, lambda e: e.kind == "commit" and bool(e.fields["evaluations"]), "a held-out loss")
        seen = before.fields["round"]
        for rounds, ends in ((seen + 1, subprocess.Popen.kill), (seen + 4, subprocess.Popen.terminate)):
            with monitor(swarm.addresses[0], folder) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if json.loads(line)["round"] > rounds:
                        break
                ends(process)
            assert process.returncode == (0 if ends is subprocess.Popen.terminate else -9)
        for name in list(swarm.running):
            swarm.kill(name)
        log = potluck.run("log", "show", swarm.folder / NODE, "--json", text=True, timeout=DEADLINE, check=True).stdout
    return Kept(folder, made.run_id[:12], of_log([json.loads(line)["commit"] for line in log.splitlines()]))


def monitor(address: str, folder: Path) -> potluck.Popen:
    """All trackers whose packages are here."""
    words = ["monitor", address, "--json", "--csv", folder / "rounds.csv"]
    for package, where in zip(OPTIONAL, (folder / "tensorboard", "a project"), strict=True):
        if importlib.util.find_spec(package) is not None:
            words += [f"--{package}", where]
    told = os.environ | {"WANDB_MODE": "offline", "WANDB_DIR": str(folder)}
    return potluck.Popen(*words, stdout=subprocess.PIPE, text=True, env=told)


def of_log(commits: list[dict[str, Any]]) -> Rows:
    """The figures of the rounds, worked out from the commits alone."""
    found: Rows = {}
    tokens, before, told = 0, commits[0]["time"], dict[int, list[dict[str, Any]]]()
    for commit in commits[1:]:
        given = commit["contributions"]
        new, seconds = sum(c["tokens"] for c in given), commit["time"] - before
        tokens, before = tokens + new, commit["time"]
        row = found[commit["round"]] = {
            "time": commit["time"], "tokens_total": tokens, "round_tokens": new, "round_seconds": seconds,
            "round_tokens_per_second": new / seconds, "round_replicas": len(given),
            "round_payload_bytes": sum(share["size"] for c in given for share in c["shares"]),
            "round_left_out": sum(not left["probation"] for left in commit["left_out"]),
        }  # fmt: skip
        if known := [c for c in given if c["loss"] is not None]:
            row["loss"] = sum(c["loss"] * c["tokens"] for c in known) / sum(c["tokens"] for c in known)
        if evaluations := commit["evaluations"]:
            row["held_out_round"] = at = evaluations[0]["round"]
            told.setdefault(at, []).extend(evaluations)
            for name in ("loss", "bits_per_byte"):
                row[f"held_out_{name}"] = statistics.median(x[name] for x in told[at])
    return found


def are_those_of_the_log(found: Rows, kept: Kept, rel: float = 0.0) -> None:
    assert len(found) >= 5
    assert sorted(found) == list(range(1, len(found) + 1)), "also those of before the first monitor"
    for round, row in found.items():
        assert row == pytest.approx(kept.rows[round], rel=rel, abs=0.0), round
    assert {column for row in found.values() for column in row} - {"time"} == set(COLUMNS)


def test_a_csv_file_has_the_rounds_of_the_log(kept: Kept) -> None:
    with open(kept.folder / "rounds.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line.pop("run") for line in lines} == {kept.run}
    rounds = [int(line.pop("round")) for line in lines]
    rows = [{name: float(figure) for name, figure in line.items() if figure} for line in lines]
    are_those_of_the_log(dict(zip(rounds, rows, strict=True)), kept)
    assert len(set(rounds)) == len(rounds)


def test_tensorboard_has_the_rounds_of_the_log(kept: Kept) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = (kept.folder / "tensorboard").iterdir()
    read = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    found: Rows = {}
    for tag in read.Tags()["scalars"]:
        scalars = read.Scalars(tag)
        assert len({scalar.step for scalar in scalars}) == len(scalars)
        for scalar in scalars:
            row = found.setdefault(scalar.step, {"time": scalar.wall_time})
            assert row["time"] == scalar.wall_time == kept.rows[scalar.step]["time"]
            row[tag] = scalar.value
    are_those_of_the_log(found, kept, rel=2.0**-24)


def test_wandb_has_the_rounds_of_the_log(kept: Kept) -> None:
    pytest.importorskip("wandb", reason="the package wandb is not installed")
    *_, newest = sorted((kept.folder / "wandb").glob(f"offline-run-*-{kept.run}/run-{kept.run}.wandb"))
    read = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(newest)]
    told = subprocess.run(read, capture_output=True, text=True, timeout=DEADLINE, check=True).stdout
    records = [json.loads(line) for line in told.splitlines()]
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    steps = [item["_step"] for item in items]
    rows = [{c: x for c, x in item.items() if c in COLUMNS} | {"time": item["_timestamp"]} for item in items]
    found = dict(zip(steps, rows, strict=True))
    are_those_of_the_log(found, kept)
    assert steps == sorted(set(steps))
