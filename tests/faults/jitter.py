"""A chain whose links and machines are uneven: one home link loses packets and jitters, then one stage falls to half
its speed:

    python -m tests.faults.jitter --netlab PATH/netlab.sh [--dir FOLDER]

One bootstrap node and four weak peers that make a chain, each behind an emulated home link. Four phases: as it is; with
3 % loss and 100 ms jitter on the link of LOSSY; with SLOW at half its speed as well, until a plan moves blocks away
from it; and after that. In each the chain must do all inner steps of every round and be committed, and no peer may be
reconfigured. While SLOW is slow, the bottleneck of most steps must be SLOW or a link of LOSSY, and so must be what
`potluck monitor` names last before the move; announcements are some seconds old. In the end the log is replayed:
everybody must have attested those bits.

Printed, per phase: seconds of an inner step, seconds of a round, and what was the bottleneck of how many steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from peer.ui import run_view
from protocol.run.manifest import Manifest
from protocol.wire.announcement import ChainReport
from protocol.wire.schema import build
from tests.e2e import swarms
from tests.faults import repair
from tests.faults.processes import Swarm, Thief
from tests.faults.repair import NODE, STAGES, WEAK, Campaign
from tests.support import potluck, tiny

LOSSY, SLOW = 1, 2
"""Positions in the chain."""
LINK = "loss=3 jitter=100"
ROUNDS = 2
"""In every phase."""


def make_manifest() -> Manifest:
    """The manifest of repair.py with more blocks, so that some can move, and micro-batches that hide links."""
    made = repair.make_manifest(8)
    return dataclasses.replace(
        made,
        start_peers=STAGES,
        model=dataclasses.replace(made.model, n_layers=24, d_model=64, d_ff=384),
        train=dataclasses.replace(made.train, micro_batches=12, rows=1, sequence=32),
        data=swarms.text(32),
        timing=dataclasses.replace(made.timing, round_deadline=120.0, gone_after=10.0),
    )


class Uneven:
    """The swarm, and its phases."""

    def __init__(self, swarm: Swarm, campaign: Campaign) -> None:
        self.swarm, self.campaign = swarm, campaign
        self.chain = campaign.chain()
        self.peers = [campaign.ids()[name] for name in self.chain]
        self.reconfigs = 0

    def named(self, bottleneck: run_view.Bottleneck) -> str:
        return bottleneck.text(self.chain)

    def expected(self, bottleneck: run_view.Bottleneck) -> bool:
        """Whether it is the slow stage, or a link of the lossy one."""
        if bottleneck.what == "computing":
            return bottleneck.position == SLOW
        other = bottleneck.position + (-1 if bottleneck.what == "forward" else 1)
        return LOSSY in (bottleneck.position, other)

    def monitor(self) -> run_view.Bottleneck:
        """What `potluck monitor` says."""
        _, prefix = self.swarm.places[NODE]
        done = potluck.run("monitor", self.swarm.addresses[0], "--once", "--json", before=prefix, check=True)
        said = json.loads(done.stdout)["bottlenecks"]
        (found,) = said
        return run_view.Bottleneck(self.peers.index(found["peer"]), found["what"], found["share"])

    def moved(self) -> list[dict[str, Any]]:
        """All moves of blocks so far."""
        return [e.fields for e in self.campaign.tails[NODE].read() if e.kind == "moved"]

    def rounds(self, until: int) -> None:
        """Waits for the commit of round `until`."""
        self.campaign.until(lambda: self.campaign.round() >= until, f"the commit of round {until}")

    def report(self, phase: str, first: int, last: int, since: float = 0.0) -> list[run_view.Bottleneck]:
        """Checks the rounds `first` to `last`, and prints the bottlenecks of their steps that began after `since`."""
        commits = {e.fields["round"]: e for e in self.campaign.commits()}
        steps = self.swarm.manifest.train.inner_steps
        for round in range(first, last + 1):
            fields = commits[round].fields
            done = [c["steps"] for c in fields["contributions"] if {s["peer"] for s in c["shares"]} == set(self.peers)]
            assert done == [steps], (phase, fields["contributions"], fields["left_out"])
        reconfigs = [e.fields for e in self.campaign.tails[NODE].read() if e.kind == "chain_reconfigured"]
        assert not reconfigs, reconfigs
        events = [
            {
                (e.fields["round"], e.fields["step"]): e.fields
                for e in self.campaign.tails[name].read()
                if e.kind == "chain" and first <= e.fields["round"] <= last and e.time - e.fields["seconds"] >= since
            }
            for name in self.chain
        ]
        told = [at for at in events[0] if all(at in of_peer for of_peer in events)]
        looked = [
            run_view.bottleneck([build(ChainReport, of_peer[at], ignore_unknown=True) for of_peer in events])
            for at in told
        ]
        found = [b for b in looked if b is not None]
        counts = Counter(
            f"{self.chain[b.position]} computing" if b.what == "computing" else b.text(self.chain).split(" is busy")[0]
            for b in found
        )
        times = [events[0][at]["seconds"] for at in told]
        whole = (commits[last].time - commits[first - 1].time) / (last + 1 - first)
        bottlenecks = ", ".join(f"{what} {n}" for what, n in counts.most_common())
        print(
            f"{phase}: rounds {first} to {last}, inner step median {statistics.median(times):.2f} s, "
            f"worst {max(times):.2f} s; a round {whole:.1f} s; bottleneck of {len(found)} steps: {bottlenecks}",
            flush=True,
        )
        return found

    def steady(self, phase: str) -> None:
        """ROUNDS whole rounds, as things are."""
        first = self.campaign.round() + 2
        self.rounds(first + ROUNDS - 1)
        self.report(phase, first, first + ROUNDS - 1)
        print(f"  potluck monitor: {self.named(self.monitor())}", flush=True)

    def slow(self) -> None:
        """Until blocks have moved away from the slow stage."""
        first, known, begin = self.campaign.round() + 1, len(self.moved()), time.time()
        slow = f"{self.peers[SLOW][-8:]} is the slowest stage"

        def away() -> dict[str, Any] | None:
            moves = (f for f in self.moved()[known:] if slow in f["reason"])
            return next((f for f in moves if f["after"][SLOW] < f["before"][SLOW]), None)

        said: list[tuple[run_view.Bottleneck, float]] = []
        while away() is None:
            assert time.time() - begin < repair.PATIENCE, "no blocks moved away from the slow stage"
            said.append((self.monitor(), time.time()))
        moved = away()
        begun = next(e.time for e in self.campaign.commits() if e.fields["round"] == moved["round"] - 1)
        looks = [look for look, ended in said if ended < begun]
        found = self.report("lossy and slow", first, moved["round"] - 1, begin)
        print(f"  potluck monitor: {'; '.join(map(self.named, looks))}")
        print(f"  moved in round {moved['round']}: {moved['before']} -> {moved['after']} blocks, {moved['reason']}")
        assert sum(map(self.expected, found)) > len(found) / 2, "something else was the bottleneck of more steps"
        assert self.expected(looks[-1]), "the monitor named something else in the end"

    def run(self) -> None:
        print(f"the chain: {', '.join(self.chain)}; lossy: {self.chain[LOSSY]}, slow: {self.chain[SLOW]}", flush=True)
        self.steady("as it is")
        self.campaign.lab.control("set", self.chain[LOSSY], LINK)
        self.steady("lossy")
        with Thief(self.swarm.running[self.chain[SLOW]], share=1 / 2, period=0.1):
            self.slow()
            self.steady("after the move")
        for move in self.moved():
            print(f"move in round {move['round']}: {move['before']} -> {move['after']} blocks")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netlab", type=Path, required=True, help="the lab's script; needs root")
    parser.add_argument("--dir", type=Path, help="keep everything there; must not exist yet")
    chosen = parser.parse_args()
    folder = chosen.dir or Path(tempfile.mkdtemp(prefix="potluck-jitter-")) / "run"
    manifest = make_manifest()
    memory = dict.fromkeys(WEAK, repair.least_memory(manifest, STAGES - 1) - 1)  # as much as a chain of four can have
    with (
        repair.homes(chosen.netlab, [NODE, *WEAK]) as links,
        Swarm(folder, manifest, tiny.OPERATORS[:1], memory, links.places) as swarm,
    ):
        Uneven(swarm, Campaign(swarm, WEAK, links)).run()
        for name in list(swarm.running):
            swarm.kill(name)
        print(f"all attested bits of {swarm.check()} rounds are those of the replayed log")
    if chosen.dir is None:
        shutil.rmtree(folder.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
