"""How long a newcomer takes until it is at work, in runs that are long under way and go on meanwhile.

    python -m tests.benchmarks.long_log [--rounds 10 100 1000 10000] [--replicas 1 16] [--keep FOLDER]

Real processes. A bootstrap node over a log of so many rounds of so many replicas, which is written and not trained
(tests/support/long_logs.py), and one peer that has the newest state and trains on: rounds take about half a second. Then a newcomer joins. Told
are the seconds until the node serves, until the peer that was there goes on, and until the newcomer has found the run, has read the log, has the
state, and does its first inner step; how many rounds were decided meanwhile; bytes of the log; and the largest memory of the
processes. Exits with 1 if a newcomer takes over twice as long as in the run of fewest rounds, and the time in which its state came. That run is
measured again right before each other one, since what else this machine has to do changes.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer.state.storage import Checkpoint, Storage
from protocol.identity import Identity
from protocol.run import init, layout
from protocol.run.manifest import Manifest, TimingSpec
from protocol.wire import logfile
from tests.e2e import swarms
from tests.faults.processes import Swarm
from tests.support import long_logs, tiny

NODE, OLD, NEW = "node-0", "old", "new"
FACTOR = 2.0


def identity(name: str) -> Identity:
    return Identity(hashlib.sha256(name.encode()).digest())


def manifest(folder: Path) -> Manifest:
    """The demo's text and a tiny model; rounds last as long as one inner step and its boundary."""
    made = swarms.manifest(swarms.options(folder / "none", rounds=10**6, full=1))
    timing = TimingSpec(round_deadline=60.0, round_seconds=0.5, heartbeat=2.0, gone_after=30.0)
    return dataclasses.replace(
        made, operators=(tiny.OPERATOR.peer_id,), start_peers=1, checkpoint_rounds=50, timing=timing
    )


def prepare(swarm: Swarm, rounds: int, replicas: int) -> None:
    """The node's log, and the peer with the newest state."""
    run, old = swarm.manifest, identity(OLD)
    peers = (old.peer_id, *long_logs.trainers(replicas - 1))
    log = long_logs.records(long_logs.commits(run, rounds, peers), tiny.OPERATOR)
    long_logs.write(swarm.folder / NODE, run, log)
    (swarm.folder / OLD).mkdir()
    (swarm.folder / OLD / "identity.key").write_bytes(old.libp2p_bytes())
    storage = Storage(swarm.folder / OLD)
    theta = {s: init.initial_shard(run.model, b"a state", s) for s in layout.shard_names(run.model)}
    storage.save_checkpoint(Checkpoint(rounds, theta, {}), {s: layout.shard_digest(a) for s, a in theta.items()})
    storage.close()


def peak_mb(swarm: Swarm, name: str) -> float:
    """Of a process that runs."""
    status = Path(f"/proc/{swarm.running[name].pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1e3


def measure(folder: Path, rounds: int, replicas: int) -> dict[str, Any]:
    """One newcomer."""
    with Swarm(folder, manifest(folder), (tiny.OPERATOR,)) as swarm:
        swarm.serves_text = False
        prepare(swarm, rounds, replicas)
        size = (swarm.folder / NODE / logfile.LOG).stat().st_size
        at = {"node": time.time()}
        swarm.start_node(NODE)
        at["old"] = time.time()
        swarm.start(OLD)
        swarm.wait(OLD, lambda e: e.kind == "offered", "its work")
        at["joins"] = time.time()
        head = newest(swarm)
        swarm.start(NEW)
        swarm.wait(NEW, lambda e: e.kind == "step", "its first inner step")
        found: dict[str, float] = {}
        for event in swarm.events(NEW):
            found.setdefault(event.kind, event.time - at["joins"])
        states = [e.fields["seconds"] for e in swarm.events(NEW) if e.kind == "fetching" and e.fields["done"]]
        return {
            "rounds": rounds,
            "replicas": replicas,
            "log_mb": size / 1e6,
            "node_s": at["old"] - at["node"],
            "old_s": at["joins"] - at["old"],
            "work_s": found["step"],
            "state_s": sum(states),
            "phases": {
                kind: round(found[kind], 1) for kind in ("found", "started", "recovered", "step") if kind in found
            },
            "meanwhile": newest(swarm) - head,
            "mb": {name: round(peak_mb(swarm, name)) for name in (NODE, OLD, NEW)},
            "said": [e.fields for e in swarm.events(NEW) if e.kind in ("reading_log", "warning")],
        }


def newest(swarm: Swarm) -> int:
    """The newest round that the node has decided."""
    return max(e.fields["round"] for e in swarm.events(NODE) if e.kind == "commit")


def told(found: dict[str, Any], base: dict[str, Any]) -> bool:
    """Prints a row, and whether the bound is kept. `base`: the run of fewest rounds."""
    bound = FACTOR * base["work_s"] + found["state_s"]
    kept = found["work_s"] <= bound
    phases = ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in found["phases"].items())
    print(
        f"load {os.getloadavg()[0]:.0f}: {found['rounds']:>6} rounds of {found['replicas']:>2}: log {found['log_mb']:.1f} MB; node serves after {found['node_s']:.1f} s,"
        f" a peer goes on after {found['old_s']:.1f} s; the newcomer is at work after {found['work_s']:.1f} s ({phases}), at most"
        f" {bound:.1f} s: {'kept' if kept else 'NOT KEPT'}; {found['meanwhile']} rounds meanwhile; peak MB {found['mb']}",
        flush=True,
    )
    for line in found["said"]:
        print("       ", line)
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, nargs="+", default=[10, 100, 1000, 10000])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--keep", type=Path, help="folder for the processes' files")
    chosen = parser.parse_args(arguments)
    good = True
    with tempfile.TemporaryDirectory(prefix="potluck-long-log-") as name:
        for replicas in chosen.replicas:
            fewest, *others = sorted(chosen.rounds)
            for rounds in others or [fewest]:
                folder = (chosen.keep or Path(name)) / f"{replicas}-{rounds}"
                base = measure(folder / "fewest", fewest, replicas)
                told(base, base)
                if others:
                    good &= told(measure(folder / "many", rounds, replicas), base)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
