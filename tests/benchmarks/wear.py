"""Measures a peer's disk writes, wake-ups, bytes while it waits, and bytes before its first step.

    # alone on its loopback, so that bytes can be counted
    unshare -n sh -c 'ip link set lo up; exec python -m tests.benchmarks.wear'
    python -m tests.benchmarks.wear --part disk --d 128 --layers 6

A bootstrap node and one peer run as real processes with daemons.

`disk`: bytes per parameter and round that the system wrote for the peer (/proc/PID/io), and those that the peer counts
itself. Whole feedbacks and checkpoints are listed apart, since they come once in 320 rounds. The part runs twice: with
so little memory that the peer's state is in files, which the system writes when it likes, and with enough.
`idle`: voluntary context switches of all threads of a peer that waits for a second one, and bytes on the loopback.
`begin`: bytes on the loopback from a peer's start to its first inner step, and again for its second start.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import tempfile
import time
from pathlib import Path

from peer.demo import recipe
from peer.events import Event
from protocol.identity import Identity
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest
from tests.e2e import swarms
from tests.faults.processes import Swarm

NODE, PEER = "node-0", "peer"
SETTLED_SECONDS, IDLE_SECONDS = 45.0, 60.0
WHOLE = 1.0
"""Bytes a parameter. A round that writes this much more than others writes a whole feedback or a checkpoint."""
PLENTY = 2_000_000_000
"""Bytes of memory."""
FIRST = 4
"""The round after which bytes are counted, since the first writes are done."""


def written(pid: int) -> int:
    """Returns the bytes that the system wrote to disks for this process."""
    said = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(said["write_bytes"])


def switches(pid: int) -> int:
    """Returns how often threads of the process gave up the processor by themselves, which they do before a wake-up."""
    count = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                count += int(line.split()[1])
    return count


def loopback() -> int:
    """Returns the bytes that passed the loopback so far, both ways of every connection."""
    (line,) = [x for x in Path("/proc/self/net/dev").read_text().splitlines() if x.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[0])


def make(options: argparse.Namespace, start_peers: int) -> tuple[Manifest, tuple[Identity, ...]]:
    chosen = swarms.options(Path("unused"), full=1, rounds=options.rounds + FIRST + 8)
    model = ModelSpec(
        vocab_size=4096, d_model=options.d, n_layers=options.layers, n_heads=options.d // 16, d_ff=3 * options.d,
        context=128,
    )  # fmt: skip
    made = swarms.manifest(chosen, outer={"topk": 32}, train={"micro_batches": 1, "rows": 1, "sequence": 128})
    made = dataclasses.replace(made, model=model, start_peers=start_peers, checkpoint_rounds=options.checkpoint_rounds)
    return made, (recipe.identity_of(chosen.seed, "bootstrap"),)


def rounds(swarm: Swarm) -> list[Event]:
    return [e for e in swarm.events(PEER) if e.kind == "round"]


def disk(options: argparse.Namespace, folder: Path) -> None:
    for name, memory in (("state in files", None), ("state in memory", PLENTY)):
        print(f"{name}: {count_disk(options, folder / name, memory)}", flush=True)


def count_disk(options: argparse.Namespace, folder: Path, memory: int | None) -> str:
    """Measures a peer with this much memory (None: as little as a full replica needs)."""
    made, keys = make(options, 1)
    parameters = layout.total_parameters(made.model)
    with Swarm(folder, made, keys, None if memory is None else {PEER: memory}) as swarm:
        swarm.start_node(NODE)
        swarm.start(PEER)
        swarm.wait(PEER, lambda e: e.kind == "round" and e.fields["round"] >= FIRST, "its first rounds")
        pid, first = swarm.running[PEER].pid, rounds(swarm)[-1].fields["round"]
        before = written(pid)
        while (last := rounds(swarm)[-1].fields["round"]) < first + options.rounds:
            time.sleep(0.2)
        system = (written(pid) - before) / (last - first) / parameters
        totals = [e.fields.get("bytes_written", 0) for e in rounds(swarm) if e.fields["round"] >= first]
    steps = [later - sooner for sooner, later in itertools.pairwise(totals)]
    usual = statistics.median(steps) / parameters
    whole = [step / parameters for step in steps if step / parameters > usual + WHOLE]
    sizes = ", ".join(f"{x:.1f}" for x in whole)
    return (
        f"{parameters:,} parameters, {last - first} rounds: {system:.4f} bytes a parameter and round by the system;"
        f" by the peer's own count {usual:.4f} in a usual round, and {len(whole)} with more: {sizes}"
    )


def idle(options: argparse.Namespace, folder: Path) -> None:
    made, keys = make(options, 2)
    with Swarm(folder, made, keys) as swarm:
        swarm.start_node(NODE)
        swarm.start(PEER)
        swarm.wait(PEER, lambda e: e.kind == "started", "its start")
        time.sleep(SETTLED_SECONDS)
        for name in (PEER, NODE):
            pid = swarm.running[name].pid
            before, passed = switches(pid), loopback()
            time.sleep(IDLE_SECONDS)
            woken, passed = switches(pid) - before, loopback() - passed
            print(
                f"{name}: {woken / IDLE_SECONDS:.1f} wake-ups a second;"
                f" {60 * passed / IDLE_SECONDS / 1e3:.0f} kB a minute pass",
                flush=True,
            )


def begin(options: argparse.Namespace, folder: Path) -> None:
    made, keys = make(options, 1)
    with Swarm(folder, made, keys) as swarm:
        swarm.measures.add(PEER)
        swarm.fetches.add(PEER)
        swarm.start_node(NODE)
        for what in ("first", "second"):
            before, known = loopback(), len(swarm.events(PEER))
            swarm.start(PEER)
            swarm.wait(PEER, lambda e: e.kind == "step", "its first inner step", known)
            passed = loopback() - before
            probe = [e.fields for e in swarm.events(PEER)[known:] if e.kind == "measured"]
            cost = sum(e["bytes_sent"] + e["bytes_received"] for e in probe)
            print(
                f"{what} start: {passed / 1e6:.1f} MB before the first inner step,"
                f" {cost / 1e6:.1f} MB of them to measure the line",
                flush=True,
            )
            swarm.kill(PEER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("disk", "idle", "begin"), action="append")
    parser.add_argument("--d", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--checkpoint-rounds", type=int, default=320)
    chosen = parser.parse_args()
    for name, part in (("disk", disk), ("idle", idle), ("begin", begin)):
        if chosen.part is None or name in chosen.part:
            with tempfile.TemporaryDirectory() as folder:
                part(chosen, Path(folder) / "run")


if __name__ == "__main__":
    main()
