"""Measures the share of uneven machines' work that reaches commits: real processes with paces of 1 : 2 : 4 : 8.

    python -m tests.benchmarks.uneven                                  # loopback
    python -m tests.benchmarks.uneven --netlab PATH/netlab.sh          # behind emulated 20/100 Mb/s links, 40 ms
    python -m tests.benchmarks.uneven --change                         # 30 % of the peers change their pace threefold
    python -m tests.benchmarks.uneven --churn                          # joins, leaves and kills, one a MINUTE
    python -m tests.benchmarks.uneven --barrier                        # rounds that wait for the slowest

There are eight replicas: six peers that hold the whole model, and two chains of three. Machines are emulated
(tests/faults/paced.py): a micro-batch takes as long as its pace says, however fast this machine is. All else is real.

Efficiency is the committed tokens a second, from the first commit that counts to the last, over those that all replicas
could train without waits: a full replica by its own pace, a chain by the best prediction for its members
(protocol/planning/pipeline_model.py, with the best blocks and no transfers). A machine that is away could not train.
`predicted` is the figure of `potluck plan` after the warm rounds, which includes the chains' transfers.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protocol.planning import partition, pipeline_model
from protocol.planning.pipeline_model import LinkCost, StageCost
from protocol.run.manifest import Manifest, OuterSpec, TimingSpec, TrainSpec
from tests.benchmarks import averaging
from tests.e2e import swarms
from tests.faults import paced
from tests.faults.processes import Swarm
from tests.support import tiny
from tests.support.lab import Place, lab

NODE = "node-0"
UNIT = 0.05
"""Seconds of a micro-batch on the fastest machine."""
FULL = {f"full-{i}": pace for i, pace in enumerate((1, 2, 4, 8, 2, 4))}
WEAK = {f"weak-{i}": pace for i, pace in enumerate((1, 1, 2, 4, 8, 4))}
STAGES = 3
MICRO_BATCHES = 8
MINUTE = 60.0
CHANGED = 0.3
FACTOR = 3.0


def make_run(seconds: float, overlap: int, most_steps: int) -> Manifest:
    base = swarms.manifest(swarms.options(Path("unused"), full=1, rounds=10**6))
    return dataclasses.replace(
        base,
        operators=(tiny.OPERATOR.peer_id,),
        start_peers=len(FULL) + len(WEAK),
        model=dataclasses.replace(swarms.MODEL, n_layers=6),
        train=TrainSpec(
            inner_steps=most_steps,
            micro_batches=MICRO_BATCHES,
            rows=1,
            sequence=16,
            lr=1e-3,
            warmup_steps=0,
            total_steps=10**6,
        ),
        data=swarms.text(16),
        outer=OuterSpec(topk=32, overlap=overlap),
        timing=TimingSpec(
            round_deadline=10 * seconds, round_seconds=seconds, heartbeat=1.0, gone_after=min(15.0, 5 * seconds)
        ),
    )


def step_seconds(manifest: Manifest, paces: list[float]) -> float:
    """Returns the least seconds of an inner step of a replica whose members have these paces."""
    layers = manifest.model.n_layers
    speeds = [round(10**9 / pace) for pace in paces]
    rooms = tiny.rooms([tiny.full_memory(manifest)] * len(paces))
    ranges = partition.split(manifest, rooms, speeds)
    assert ranges is not None
    seconds = [pace * (last - first) / layers for pace, (first, last) in zip(paces, ranges, strict=True)]
    stages = [StageCost(forward=s * paced.FORWARD, backward=s * (1 - paced.FORWARD)) for s in seconds]
    links = [LinkCost(forward=0.0, backward=0.0, latency=0.0)] * (len(stages) - 1)
    micro_batches = manifest.train.micro_batches
    return pipeline_model.step_seconds(stages, links, micro_batches, micro_batches)


@dataclasses.dataclass
class Machines:
    """The peers' paces over time: (time, seconds of a micro-batch), with None while a peer is away."""

    swarm: Swarm
    history: dict[str, list[tuple[float, float | None]]] = dataclasses.field(default_factory=dict)

    def set(self, name: str, pace: float | None) -> None:
        if pace is not None:
            paced.set_pace(self.swarm.folder / name, pace)
        self.history.setdefault(name, []).append((time.time(), pace))

    def pace(self, name: str, at: float) -> float | None:
        found = None
        for when, pace in self.history.get(name, []):
            found = pace if when <= at else found
        return found


def possible(
    manifest: Manifest, machines: Machines, names: dict[str, str], begin: float, end: float, plans: list[Any]
) -> float:
    """Returns the tokens that the machines could train from `begin` to `end`, in the chains of the plan of each moment.

    names: of the peers, by peer id.
    plans: (time, replicas) of each plan.
    """
    marks = {begin, end, *(t for h in machines.history.values() for t, _ in h), *(t for t, _ in plans)}
    times = sorted(t for t in marks if begin <= t <= end)
    tokens = 0.0
    for left, right in itertools.pairwise(times):
        planned = [replicas for t, replicas in plans if t <= left][-1]
        members = [[names[stage["peer"]] for stage in replica["stages"]] for replica in planned]
        busy = {name for replica in members for name in replica}
        alone = [[name] for name in machines.history if name in FULL and name not in busy]
        for replica in members + alone:
            paces = [machines.pace(name, left) for name in replica]
            if all(paces):
                per_step = step_seconds(manifest, [p for p in paces if p])
                tokens += manifest.train.step_tokens * (right - left) / per_step
    return tokens


def measure(places: dict[str, Place], chosen: argparse.Namespace) -> dict[str, Any]:
    most = round(chosen.seconds / (UNIT * MICRO_BATCHES) * 1.5 * FACTOR) if not chosen.barrier else chosen.steps
    seconds = chosen.seconds if not chosen.barrier else 100 * chosen.seconds
    manifest = make_run(seconds, chosen.overlap, most)
    third = tiny.third_memory(manifest)
    peers = [*FULL, *WEAK]
    draw = random.Random(chosen.seed)
    with (
        tempfile.TemporaryDirectory(prefix="potluck-uneven-") as folder,
        Swarm(
            Path(folder) / "run",
            manifest,
            (tiny.OPERATOR,),
            memory=dict.fromkeys(WEAK, third),
            places=places,
            module="tests.faults.paced",
        ) as swarm,
    ):
        machines = Machines(swarm)
        swarm.module = "peer.cli"
        swarm.start_node(NODE)
        swarm.module = "tests.faults.paced"
        for name in peers:
            machines.set(name, UNIT * {**FULL, **WEAK}[name])
            swarm.start(name)
        ids = {swarm.wait(n, lambda e: e.kind == "started", "its start").fields["peer"]: n for n in peers}
        warm = chosen.warm
        swarm.wait(NODE, lambda e: e.kind == "commit" and e.fields["round"] == warm, f"round {warm}")
        predicted = predict(swarm, places)
        if chosen.change:
            change(machines, draw, chosen.rounds * chosen.seconds)
        if chosen.churn:
            churn(swarm, machines, draw, chosen.rounds * chosen.seconds)
        last = warm + chosen.rounds
        swarm.wait(NODE, lambda e: e.kind == "commit" and e.fields["round"] >= last, f"round {last}")
        commits = [e for e in swarm.events(NODE) if e.kind == "commit"]
        for name in list(swarm.running):
            swarm.kill(name)
        swarm.check()
    found = figures(manifest, machines, ids, commits, warm)
    return {"predicted": predicted, "of_predicted": round(found["tokens_per_second"] / predicted, 3), **found}


def predict(swarm: Swarm, places: dict[str, Place]) -> int:
    """Returns the tokens a second that `potluck plan` prints."""
    command = [*places[NODE][1], sys.executable, "-m", "peer.cli", "plan", swarm.addresses[0]]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r": ([\d,]+) tokens per second", told.splitlines()[0])
    assert found is not None
    return int(found[1].replace(",", ""))


def figures(
    manifest: Manifest, machines: Machines, ids: dict[str, str], commits: list[Any], warm: int
) -> dict[str, Any]:
    """Returns the figures of the rounds after `warm`."""
    counted = [e for e in commits if e.fields["round"] > warm]
    (begin,) = (e.time for e in commits if e.fields["round"] == warm)
    end = counted[-1].time
    plans = [(e.time, e.fields["plan"]["replicas"]) for e in commits if e.fields["plan"]]
    done = sum(c["tokens"] for e in counted for c in e.fields["contributions"])
    could = possible(manifest, machines, ids, begin, end, plans)
    return {
        "efficiency": round(done / could, 3),
        "tokens_per_second": round(done / (end - begin), 1),
        "possible": round(could / (end - begin), 1),
        "seconds_per_round": round((end - begin) / len(counted), 2),
        "steps": [[c["steps"] for c in e.fields["contributions"]] for e in counted],
        "left_out": [x["reason"] for e in counted for x in e.fields["left_out"]],
        "rounds": len(counted),
    }


def change(machines: Machines, draw: random.Random, seconds: float) -> None:
    """Makes CHANGED of the peers FACTOR times slower or faster, one after the other, within these seconds."""
    names = draw.sample(sorted(machines.history), round(CHANGED * len(machines.history)))
    for name in names:
        time.sleep(seconds / (len(names) + 1))
        (_, pace) = machines.history[name][-1]
        assert pace is not None
        machines.set(name, pace * draw.choice((FACTOR, 1 / FACTOR)))


def churn(swarm: Swarm, machines: Machines, draw: random.Random, seconds: float) -> None:
    """Ends or kills a peer every MINUTE, and starts the one that left before."""
    end, gone = time.monotonic() + seconds, []
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(MINUTE, left))
        if left < MINUTE:
            return
        name = draw.choice([n for n in (*FULL, *WEAK) if n in swarm.running])
        machines.set(name, None)
        if draw.random() < 0.5:
            swarm.kill(name)
        else:
            swarm.running[name].terminate()
            swarm.ended(name)
        gone.append(name)
        if len(gone) > 1:
            back = gone.pop(0)
            swarm.start(back)
            machines.set(back, UNIT * {**FULL, **WEAK}[back])


@contextlib.contextmanager
def placed(chosen: argparse.Namespace) -> Iterator[dict[str, Place]]:
    """Puts the peers behind links; the bootstrap node, a server, has no limit."""
    names = [*FULL, *WEAK]
    if chosen.netlab:
        with lab(chosen.netlab, {NODE: "0/0:20", **dict.fromkeys(names, "20/100:20")}) as there:
            yield there.places
    else:
        with averaging.loopback(1 + len(names)) as place:
            yield dict.fromkeys([NODE, *names], (place.hosts[0], place.prefix[0]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netlab", type=Path, help="the lab's script; without it, loopback")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=3, help="rounds that are not counted")
    parser.add_argument("--overlap", type=int, default=0, choices=(0, 1), help="of the manifest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4, help="with --barrier: inner steps of everybody")
    for flag in ("change", "churn", "barrier"):
        parser.add_argument(f"--{flag}", action="store_true")
    chosen = parser.parse_args()
    with placed(chosen) as places:
        print(json.dumps(measure(places, chosen), indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
