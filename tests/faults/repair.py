"""Members of a four-stage chain are lost in the middle of a step, one after the other:

    python -m tests.faults.repair [--times 100] [--netlab PATH/netlab.sh] [--no-spare] [--dir FOLDER]

One bootstrap node, one full replica, four weak peers that make a chain, and a spare. Every kind of fault (SIGKILL,
SIGSTOP, and with --netlab a cut link) strikes every position, in the middle of the forward and of the backward pass of
a step. The round must commit. Then the lost member comes back: a killed one is started again, a stopped one continued,
a cut one healed; nothing else is started. When it is a spare, the next fault strikes. In the end the log is replayed:
everybody must have attested those bits.

Printed: seconds from the fault until all members of the reconfigured chain have completed an inner step. Ctrl-C ends it
early.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peer.events import Attest, ChainReconfigured, Commit, Event, Role, Started, Step
from protocol.planning import partition
from protocol.run import layout
from protocol.run.manifest import Manifest, TimingSpec
from tests.e2e import swarms
from tests.faults.processes import Swarm, Tail
from tests.support import tiny
from tests.support.lab import Lab, lab

STAGES, STEPS, MICRO = 4, 6, 4
NODE, FULL = "node-0", "full-0"
WEAK = [f"weak-{i}" for i in range(STAGES)]
SPARE = "spare-0"
PATIENCE = 300.0
"""Seconds for anything to happen, on a busy machine too."""


def make_manifest(residual_width: int) -> Manifest:
    """The demo's recipe with a small model and steps of four micro-batches; short leases."""
    chosen = swarms.options(
        Path("unused"),
        full=1,
        chains=1,
        stages=STAGES,
        residual_width=residual_width,
        rounds=10**6,
        inner_steps=STEPS,
    )
    made = swarms.manifest(chosen)
    return dataclasses.replace(
        made,
        model=dataclasses.replace(made.model, d_ff=512),
        operators=(tiny.OPERATOR.peer_id,),
        train=dataclasses.replace(made.train, micro_batches=MICRO),
        timing=TimingSpec(round_deadline=60.0, heartbeat=0.5, gone_after=5.0),
    )


def least_memory(manifest: Manifest, stages: int) -> int:
    """The least memory with which this number of peers makes a chain."""
    low, high = 0, tiny.full_memory(manifest)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (middle, high) if partition.split(manifest, tiny.rooms([middle] * stages)) is None else (low, middle)
        )
    return high


def weak_memory(manifest: Manifest) -> int:
    """The least memory of which four peers make a chain; three do not."""
    least = least_memory(manifest, STAGES)
    assert partition.split(manifest, tiny.rooms([least] * (STAGES - 1))) is None
    return least


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """A fault: its kind, its target and its moment."""

    kind: str
    phase: str
    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """`seconds`: until all members of the reconfigured chain had completed an inner step; None where the chain ended
    its round.
    `kept`: whether its work is in the commit; `back`: seconds until the lost member was in a plan again."""

    seconds: float | None
    kept: bool
    back: float


class Campaign:
    """The swarm, and what befalls it."""

    def __init__(self, swarm: Swarm, names: list[str], lab: Lab | None) -> None:
        self.swarm, self.lab = swarm, lab
        self.tails = {name: Tail(swarm.folder / name / "events.jsonl") for name in (NODE, *names)}
        self.names = names
        self.dying: subprocess.Popen[bytes] | None = None
        swarm.start_node(NODE)
        for name in names:
            swarm.start(name)
        self.until(lambda: all(self.ids().get(n) for n in names), "everybody's start")
        self.until(lambda: self.plan() is not None and self.round() >= 2, "the second round")

    def until(self, wanted: Callable[[], Any], what: str) -> Any:
        """Waits for a condition; no process may end meanwhile."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if found := wanted():
                return found
            for name, process in self.swarm.running.items():
                if process.poll() is not None:
                    errors = (self.swarm.folder / name / "stderr.txt").read_text()[-2000:]
                    raise AssertionError(f"{name} ended with {process.returncode} before {what}: {errors}")
            time.sleep(0.05)  # files have no other sign of news
        raise AssertionError(f"{what} did not happen within {PATIENCE:g} s")

    def ids(self) -> dict[str, str]:
        """Peer ids by name."""
        started = {n: [e.body for e in self.tails[n].read() if isinstance(e.body, Started)] for n in self.names}
        return {name: bodies[-1].peer for name, bodies in started.items() if bodies}

    def commits(self) -> list[Event]:
        return [e for e in self.tails[NODE].read() if isinstance(e.body, Commit)]

    def round(self) -> int:
        return max((e.body.round for e in self.commits() if isinstance(e.body, Commit)), default=-1)

    def plan(self) -> dict[str, Any] | None:
        """The newest plan, if it has a chain of four."""
        commits = self.commits()
        plan = commits[-1].fields["plan"] if commits else None
        return plan if plan and any(len(r["stages"]) == STAGES for r in plan["replicas"]) else None

    def chain(self) -> list[str]:
        """Names of the chain's members in the newest plan."""
        names = {peer: name for name, peer in self.ids().items()}
        plan = self.plan()
        (chain,) = (r for r in plan["replicas"] if len(r["stages"]) == STAGES)
        return [names[stage["peer"]] for stage in chain["stages"]]

    def await_fate(self, fault: Fault, step: int = 2, micro: int = 1) -> tuple[str, float]:
        """Strikes at this place in a round; the target, and when it was struck."""
        victim = self.chain()[fault.position]
        folder = self.swarm.folder / victim
        told = {"phase": fault.phase, "step": step, "micro": micro, "kind": fault.kind}
        (folder / "fate.new").write_text(json.dumps(told))
        (folder / "fate.new").rename(folder / "fate")
        if fault.kind == "kill":
            self.dying = self.swarm.running.pop(victim)
        self.until((folder / "struck").exists, f"{fault} of {victim}")
        at = json.loads((folder / "struck").read_text())["time"]
        (folder / "struck").unlink()
        return victim, at

    def strike(self, fault: Fault) -> Outcome:
        """One fault, and everything until the lost member is in a plan again."""
        victim, at = self.await_fate(fault)
        process = self.dying if fault.kind == "kill" else None
        folder = self.swarm.folder / victim
        if fault.kind == "cut":
            self.lab.control("cut", victim)
            (folder / "cut").touch()
        round = self.round() + 1
        reconfigs = self.until(
            lambda: self._mends(round) or self.round() >= round, f"the reconfig after {fault} of {victim}"
        )
        peers = self._mends(round)[-1].fields["peers"] if reconfigs is not True else []
        names = [n for n, peer in self.ids().items() if peer in peers]
        self.until(
            lambda: self.round() >= round or (names and all(self._steps(n, round, at) for n in names)),
            f"an inner step after {fault} of {victim}",
        )
        firsts = [self._steps(n, round, at) for n in names]
        seconds = max(times[0] for times in firsts) - at if firsts and all(firsts) else None
        self.until(lambda: self.round() >= round, f"the commit of round {round} after {fault} of {victim}")
        (commit,) = (e for e in self.commits() if e.fields["round"] == round)
        kept = any(len(c["shares"]) == STAGES for c in commit.fields["contributions"])
        begin = time.time()
        if process is not None:
            process.wait()
            self.swarm.start(victim)
        elif fault.kind == "stop":
            self.swarm.running[victim].send_signal(signal.SIGCONT)
        else:
            self.lab.control("heal", victim)
        self.until(lambda: self._is_back(victim), f"the return of {victim}")
        return Outcome(seconds, kept, time.time() - begin)

    def _mends(self, round: int) -> list[Event]:
        return [e for e in self.tails[NODE].read() if e.kind == "chain_reconfigured" and e.fields["round"] == round]

    def _steps(self, name: str, round: int, after: float) -> list[float]:
        """When a member completed inner steps of the reconfigured chain."""
        events = self.tails[name].read()
        reconfigured = [
            e.time for e in events if isinstance(e.body, ChainReconfigured | Role) and e.body.round == round
        ]
        begin = max(after, reconfigured[-1]) if reconfigured else float("inf")
        return [e.time for e in events if isinstance(e.body, Step) and e.body.round == round and e.time > begin]

    def _is_back(self, name: str) -> bool:
        """Whether it has a stage in the newest plan, or is a spare of it and holds the whole state before it."""
        plan, peer, round = self.plan(), self.ids().get(name), self.round()
        if plan is None or peer is None:
            return False
        if any(s["peer"] == peer for r in plan["replicas"] for s in r["stages"]):
            return True
        shards = len(layout.shard_names(self.swarm.manifest.model))
        said = (e.body for e in self.tails[NODE].read()[-400:])
        attested = (body for body in said if isinstance(body, Attest) and body.peer == peer)
        holds = any(body.round >= round and len(body.digests) == shards for body in attested)
        return peer in plan["spares"] and holds


def homes(script: Path, names: list[str]) -> contextlib.AbstractContextManager[Lab]:
    """A home link of 50 Mb/s and 10 ms for everybody."""
    return lab(script, dict.fromkeys(names, "50/50:10"))


@contextlib.contextmanager
def campaign(
    folder: Path, script: Path | None = None, spare: bool = True, residual_width: int = 8
) -> Iterator[Campaign]:
    """A swarm in `folder` that trains; when the block ends its processes do, and its bits are checked."""
    manifest = make_manifest(residual_width)
    weak = [*WEAK, SPARE] if spare else WEAK
    names = [FULL, *weak]
    manifest = dataclasses.replace(manifest, start_peers=len(names))
    memory = dict.fromkeys(weak, weak_memory(manifest))
    with contextlib.ExitStack() as stack:
        links = stack.enter_context(homes(script, [NODE, *names])) if script else None
        places = links.places if links else None
        swarm = Swarm(folder, manifest, tiny.OPERATORS[:1], memory, places, module="tests.faults.victim")
        with swarm:
            yield Campaign(swarm, names, links)
            for name in list(swarm.running):
                swarm.kill(name)
            swarm.check()


def faults(times: int, kinds: tuple[str, ...]) -> Iterator[Fault]:
    """Every kind at every position in either phase, again and again."""
    every = [Fault(k, phase, p) for p in range(STAGES) for phase in ("forward", "backward") for k in kinds]
    yield from itertools.islice(itertools.cycle(every), times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--netlab", type=Path, help="the lab's script; needs root")
    parser.add_argument("--no-spare", action="store_true")
    parser.add_argument("--dir", type=Path, help="keep everything there; must not exist yet")
    chosen = parser.parse_args()
    folder = chosen.dir or Path(tempfile.mkdtemp(prefix="potluck-repair-")) / "run"
    kinds = ("kill", "stop", "cut") if chosen.netlab else ("kill", "stop")
    seen: dict[str, list[Outcome]] = {kind: [] for kind in kinds}
    with campaign(folder, chosen.netlab, not chosen.no_spare) as swarm, contextlib.suppress(KeyboardInterrupt):
        for number, fault in enumerate(faults(chosen.times, kinds), start=1):
            outcome = swarm.strike(fault)
            seen[fault.kind].append(outcome)
            print(f"{number:3d} {fault.kind:4s} {fault.phase:8s} stage {fault.position}: {outcome}", flush=True)
    every = list(itertools.chain.from_iterable(seen.values()))
    for kind, outcomes in [*seen.items(), ("all", every)]:
        times = [o.seconds for o in outcomes if o.seconds is not None]
        middle = f"median {statistics.median(times):.2f} s, worst {max(times):.2f} s" if times else "-"
        kept = sum(o.kept for o in outcomes)
        print(f"{kind}: {len(outcomes)} faults, every round committed, {kept} with the chain's work", end="; ")
        print(f"next inner step: {middle}")
    print("all attested bits are those of the replayed log")
    if chosen.dir is None:
        shutil.rmtree(folder.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
