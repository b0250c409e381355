"""Measures a chain of four homes that only the bootstrap node can reach, so that its relay carries every boundary.

    python -m tests.benchmarks.homes --netlab PATH/netlab.sh
    python -m tests.benchmarks.homes --netlab PATH/netlab.sh --kill      # four nodes; the busiest relay is killed

Processes, daemons and routers are real (port-restricted cones, --link). Machines are emulated (tests/faults/paced.py):
a micro-batch takes as long as its pace says. The result has the rounds, those in which the chain's work was committed,
and their inner steps; tokens a second, beside the figure of `potluck plan` after the warm rounds and the same chain
with transfers that take no time (`ideal`); the largest rate of a relay; and the seconds from the plan to the chain's
first step. With --kill, the relay of most streams is killed in the middle of a round.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protocol.planning import memory, partition
from protocol.run.manifest import Manifest, OuterSpec, TimingSpec, TrainSpec
from tests.benchmarks.uneven import Machines, predict, step_seconds
from tests.e2e import swarms
from tests.faults.processes import Swarm
from tests.support import tiny
from tests.support.lab import Lab, lab

NODES = ("node-0", "node-1", "node-2", "node-3")
HOMES = tuple(f"home-{i}" for i in range(4))
PACE = 0.8
"""Seconds of a micro-batch through the whole model."""
MICRO_BATCHES = 16


def make_run(seconds: float, rounds: int, nodes: int) -> Manifest:
    base = swarms.manifest(swarms.options(Path("unused"), full=1, rounds=rounds))
    return dataclasses.replace(
        base,
        operators=tuple(key.peer_id for key in tiny.OPERATORS[:nodes]),
        quorum=nodes,
        start_peers=len(HOMES),
        model=dataclasses.replace(swarms.MODEL, n_layers=2 * len(HOMES), d_model=256, n_heads=4, d_ff=256),
        train=TrainSpec(
            inner_steps=1000,
            micro_batches=MICRO_BATCHES,
            rows=1,
            sequence=64,
            lr=1e-3,
            warmup_steps=0,
            total_steps=10**6,
        ),
        data=swarms.text(64),
        outer=OuterSpec(topk=32),
        timing=TimingSpec(round_deadline=10 * seconds, round_seconds=seconds, heartbeat=1.0, gone_after=15.0),
    )


def quarter(manifest: Manifest) -> int:
    """Returns the least memory with which four peers make a chain; three of them do not."""
    low, high = 0, memory.stage_memory(manifest, 0, manifest.model.n_layers)
    while high - low > 1:
        middle = (low + high) // 2
        if partition.split(manifest, tiny.rooms([middle] * len(HOMES))) is None:
            low = middle
        else:
            high = middle
    assert partition.split(manifest, tiny.rooms([high] * (len(HOMES) - 1))) is None
    return high


def measure(there: Lab, chosen: argparse.Namespace) -> dict[str, Any]:
    nodes = [name for name in there.places if name in NODES]
    manifest = make_run(chosen.seconds, 10**6, len(nodes))
    places = {n: (host if n in nodes else "0.0.0.0", prefix) for n, (host, prefix) in there.places.items()}
    keys, offered = tiny.OPERATORS[: len(nodes)], dict.fromkeys(HOMES, quarter(manifest))
    with (
        contextlib.nullcontext(chosen.keep)
        if chosen.keep
        else tempfile.TemporaryDirectory(prefix="potluck-homes-") as folder,
        Swarm(Path(folder) / "run", manifest, keys, offered, places) as swarm,
    ):
        machines = Machines(swarm)
        for name in nodes:
            swarm.start_node(name)
        swarm.module = "tests.faults.paced"
        for name in HOMES:
            machines.set(name, PACE)
            swarm.options[name] = ["--up", "20Mbps", "--down", "100Mbps", "--up-limit", "18Mbps"]
            swarm.start(name)
        told, warm, last = nodes[0], chosen.warm, chosen.warm + chosen.rounds
        swarm.wait(told, lambda e: e.kind == "commit" and e.fields["round"] == warm, f"round {warm}")
        predicted, killed = predict(swarm, places), None
        if chosen.kill:
            killed = kill_relay(swarm, nodes, chosen.seconds)
            told = next(name for name in nodes if name != killed)
        swarm.wait(told, lambda e: e.kind == "commit" and e.fields["round"] >= last, f"round {last}")
        found = {"killed": killed, **figures(swarm, nodes, told, warm)}
        for name in list(swarm.running):
            swarm.kill(name)
        swarm.check()
    ideal = manifest.train.step_tokens / step_seconds(manifest, [PACE] * len(HOMES))
    shares = {"share_of_ideal": found["tokens_per_second"] / ideal, "predicted_share": predicted / ideal}
    return {**found, "predicted": predicted, "ideal": round(ideal, 1), **{k: round(v, 3) for k, v in shares.items()}}


def kill_relay(swarm: Swarm, nodes: Sequence[str], seconds: float) -> str:
    """Kills the node that relays most, in the middle of a round, and returns its name."""

    def circuits(name: str) -> int:
        told = [e.fields["circuits"] for e in swarm.events(name) if e.kind == "relayed"]
        return int(told[-1]) if told else 0

    begun = len(swarm.events(nodes[0]))
    swarm.wait(nodes[0], lambda e: e.kind == "commit", "the next commit", after=begun)
    time.sleep(seconds / 3)
    name = max(nodes, key=circuits)
    swarm.kill(name)
    return name


def figures(swarm: Swarm, nodes: Sequence[str], told: str, warm: int) -> dict[str, Any]:
    """Returns the results by the events of node `told`. Rounds up to `warm` do not count for the speed."""
    commits = [e for e in swarm.events(told) if e.kind == "commit"]
    events = [e for name in (*nodes, *HOMES) for e in swarm.events(name)]
    counted = [e for e in commits if e.fields["round"] > warm]
    (begin,) = (e.time for e in commits if e.fields["round"] == warm)
    tokens = sum(c["tokens"] for e in counted for c in e.fields["contributions"])
    relayed = [e.fields for e in events if e.kind == "relayed"]
    planned = min(e.time for e in commits if e.fields["plan"])
    return {
        "rounds": commits[-1].fields["round"],
        "with_the_chain": sum(bool(e.fields["contributions"]) for e in commits if e.fields["round"]),
        "steps": [sum(c["steps"] for c in e.fields["contributions"]) for e in commits if e.fields["round"]],
        "left_out": [x["reason"] for e in commits for x in e.fields["left_out"]],
        "failures": sorted({e.fields["reason"] for e in events if e.kind == "chain_failed"}),
        "tokens_per_second": round(tokens / (counted[-1].time - begin), 1),
        "plan_to_first_step": round(min(e.time for e in events if e.kind == "step") - planned, 1),
        "most_circuits": max((fields["circuits"] for fields in relayed), default=0),
        "most_relayed_bps": round(max((fields["bps"] for fields in relayed), default=0.0)),
        "warnings": sorted({e.fields["text"] for e in events if e.kind == "warning"}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netlab", type=Path, required=True, help="the lab's script")
    parser.add_argument("--link", default="20/100:40", help="of a home: Mb/s up/down:ms to the core and back")
    parser.add_argument("--router", default="cone", help="cone, sym; none: homes reach each other")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warm", type=int, default=2, help="rounds that are not counted")
    parser.add_argument("--keep", type=Path, help="folder for what the processes write, to be looked at afterwards")
    parser.add_argument("--kill", action="store_true", help="a relay, in the middle of a round that counts")
    chosen = parser.parse_args()
    nodes = NODES if chosen.kill else NODES[:1]
    links = {**dict.fromkeys(nodes, "200/200:10"), **dict.fromkeys(HOMES, f"{chosen.link}:0:{chosen.router}")}
    with lab(chosen.netlab, links) as there:
        found = measure(there, chosen)
    print(json.dumps(found, indent=1))
    return 0 if found["with_the_chain"] == found["rounds"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
