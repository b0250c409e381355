"""A whole round among eight peers beside hivemind's dense averaging of the same model, in one run: bytes and seconds.

    python -m tests.benchmarks.round                                     # loopback
    python -m tests.benchmarks.round --netlab PATH/netlab.sh             # behind emulated 100/20 Mb/s links, 40 ms

Potluck: `potluck bootstrap` and eight `potluck join`, a model of 50 M parameters, one inner step of a few tokens a round, so that the
round is what is measured. Its seconds are those from the last peer's last inner step to the moment at which the last peer
begins the next: packing, sending, deciding, fetching, applying, comparing. Bytes are those of the network interfaces,
headers and signs of life included. The peers share one disk, which they keep busy; the node has one of its own, in memory.
The dense side is tests/benchmarks/averaging.py: matchmaking is not counted against it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protocol.run import layout
from protocol.run.manifest import Manifest, OuterSpec, TimingSpec, TrainSpec
from tests.benchmarks import averaging
from tests.e2e import swarms
from tests.faults.processes import Swarm
from tests.support import tiny
from tests.support.lab import Place, lab

Places = dict[str, Place]
NODE = "node-0"


def make_run(millions: float, peers: int, rounds: int, overlap: int) -> Manifest:
    chosen = swarms.options(Path("unused"), full=peers, rounds=rounds, inner_steps=1)
    base = swarms.manifest(chosen)
    train = TrainSpec(
        inner_steps=1, micro_batches=1, rows=1, sequence=16, lr=1e-3, warmup_steps=0, total_steps=1000
    )  # fmt: skip
    return dataclasses.replace(
        base,
        operators=(tiny.OPERATOR.peer_id,),
        model=averaging.model(millions),
        train=train,
        data=swarms.text(train.sequence),
        outer=OuterSpec(topk=32, overlap=overlap),
        timing=TimingSpec(round_deadline=600.0, heartbeat=2.0, gone_after=120.0),
    )


@contextlib.contextmanager
def loopback(names: list[str]) -> Iterator[Places]:
    with averaging.loopback(len(names)) as place:
        yield dict.fromkeys(names, (place.hosts[0], place.prefix[0]))


@contextlib.contextmanager
def homes(netlab: Path, names: list[str], up: float, down: float, rtt: float) -> Iterator[Places]:
    """Peers behind links; the bootstrap node, a server, has no limit."""
    links = {n: f"{'0/0' if n == NODE else f'{up:g}/{down:g}'}:{rtt / 2:g}" for n in names}
    with lab(netlab, links) as there:
        yield there.places


def bytes_of(prefix: list[str]) -> tuple[int, int]:
    """(sent, received) of all interfaces of a namespace."""
    text = subprocess.run([*prefix, "cat", "/proc/net/dev"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(":")[1].split() for line in text.splitlines()[2:]]
    return sum(int(row[8]) for row in rows), sum(int(row[0]) for row in rows)


def measure(places: Places, millions: float, rounds: int, overlap: int) -> dict[str, Any]:
    """Medians over `rounds` rounds, the first one not counted. `parts` is of use only without overlap."""
    peers = [n for n in places if n != NODE]
    manifest = make_run(millions, len(peers), rounds + 2, overlap)
    with (
        tempfile.TemporaryDirectory(prefix="potluck-round-") as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as other_disk,
        Swarm(Path(folder) / "run", manifest, (tiny.OPERATOR,), places=places) as swarm,
    ):
        shutil.move(swarm.folder / NODE, other_disk)
        (swarm.folder / NODE).symlink_to(Path(other_disk) / NODE)
        swarm.start_node(NODE)
        for name in peers:
            swarm.start(name)
        marks: list[dict[str, tuple[int, int]]] = []
        for number in range(1, rounds + 2):
            swarm.wait(NODE, lambda e, n=number: e.kind == "commit" and e.fields["round"] == n, f"round {number}")
            marks.append({name: bytes_of(places[name][1]) for name in peers})
        for name in peers:
            swarm.wait(name, lambda e: e.kind == "role" and e.fields["round"] == rounds + 2, "the last round")
            swarm.wait(name, lambda e: e.kind == "round" and e.fields["round"] == rounds + 1, "the last state")
        ends = {n: [max_time(swarm, p, "step", n) for p in peers] for n in range(2, rounds + 2)}
        begins = {n: [max_time(swarm, p, "role", n) for p in peers] for n in range(3, rounds + 3)}
        parts = [breakdown(swarm, peers, n) for n in range(2, rounds + 2)]
        phases = [e.fields["seconds"] for p in peers for e in swarm.events(p) if e.kind == "round"]
        commits = [e.fields for e in swarm.events(NODE) if e.kind == "commit"]
    payload = statistics.median(
        sum(s["size"] for s in c["shares"]) for commit in commits for c in commit["contributions"]
    )
    sent = [(marks[-1][p][0] - marks[0][p][0]) / rounds for p in peers]
    received = [(marks[-1][p][1] - marks[0][p][1]) / rounds for p in peers]
    shared = len({tuple(prefix) for _, prefix in places.values()}) == 1
    share = len(peers) if shared else 1
    return {
        "seconds": statistics.median(max(begins[n + 1]) - max(ends[n]) for n in range(2, rounds + 2)),
        "sent": statistics.mean(sent) / share,
        "received": statistics.mean(received) / share,
        "payload": payload,
        "phases": {k: round(statistics.median(p.get(k, 0.0) for p in phases), 2) for k in phases[-1]},
        "parts": {k: round(statistics.median(p[k] for p in parts), 2) for k in parts[0]},
        "parameters": layout.total_parameters(manifest.model),
    }


def breakdown(swarm: Swarm, peers: list[str], number: int) -> dict[str, float]:
    """Seconds from the last peer's last inner step to the last offer, the commit, the last state, the next round's begin."""
    commits = [e.time for e in swarm.events(NODE) if e.kind == "commit" and e.fields["round"] == number]
    marks = [max(max_time(swarm, p, kind, number) for p in peers) for kind in ("step", "offered", "round")]
    marks.append(max(max_time(swarm, p, "role", number + 1) for p in peers))
    step, offered, applied, begun = marks
    return {
        "pack": offered - step, "decide": commits[0] - offered, "apply": applied - commits[0], "begin": begun - applied
    }  # fmt: skip


def max_time(swarm: Swarm, name: str, kind: str, number: int) -> float:
    return max(e.time for e in swarm.events(name) if e.kind == kind and e.fields["round"] == number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parameters", type=float, default=50, help="millions")
    parser.add_argument("--overlap", type=int, default=0, choices=(0, 1), help="of the manifest")
    parser.add_argument("--netlab", type=Path, help="the lab's script; without it, loopback")
    parser.add_argument("--up", type=float, default=20, help="Mb/s")
    parser.add_argument("--down", type=float, default=100, help="Mb/s")
    parser.add_argument("--rtt", type=float, default=40, help="ms between two peers")
    parser.add_argument("--dense", nargs="*", default=["fp16", "8bit"], choices=averaging.COMPRESSIONS)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    names = [NODE, *(f"p{i}" for i in range(chosen.peers))]
    link = (chosen.up, chosen.down, chosen.rtt)
    with homes(chosen.netlab, names, *link) if chosen.netlab else loopback(names) as places:
        began = time.monotonic()
        ours = measure(places, chosen.parameters, chosen.rounds, chosen.overlap)
    print(
        f"potluck, {chosen.peers} peers, {ours['parameters'] / 1e6:.1f} M parameters: {ours['seconds']:.2f} s a round, "
        f"{ours['sent'] / 1e6:.2f} MB up and {ours['received'] / 1e6:.2f} MB down per peer, payload "
        f"{ours['payload'] / 1e6:.3f} MB; {ours['parts']}; phases of a peer {ours['phases']} ({time.monotonic() - began:.0f} s in all)",
        flush=True,
    )
    theirs = []
    for compression in chosen.dense:
        with (
            averaging.homes(chosen.netlab, chosen.peers, *link)
            if chosen.netlab
            else averaging.loopback(chosen.peers) as place
        ):
            dense = averaging.measure(
                place, compression=compression, millions=chosen.parameters, rounds=chosen.rounds
            )  # fmt: skip
        theirs.append(dataclasses.asdict(dense))
        up = dense.sent_bytes_per_peer
        print(
            f"hivemind {compression}: {dense.averaging_seconds:.1f} s a round after {dense.matchmaking_seconds:.1f} s of "
            f"matchmaking, {up / 1e6:.1f} MB up and as many down; against it {up / ours['sent']:.0f} times fewer bytes up, "
            f"{2 * up / (ours['sent'] + ours['received']):.0f} times fewer in all, "
            f"{dense.averaging_seconds / ours['seconds']:.1f} times less time",
            flush=True,
        )
    if chosen.json:
        chosen.json.write_text(json.dumps({"potluck": ours, "hivemind": theirs}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
