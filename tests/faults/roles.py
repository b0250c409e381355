"""Roles change in a running swarm of real processes, and no other peer waits for it:

    python -m tests.faults.roles [--netlab PATH/netlab.sh] [--dir FOLDER]

A full replica and a chain of two train a model with a past (tests/faults/history.py). Then, over slow lines, at the
same time:

    a mover       the chain's second member becomes so slow that the first one alone is worth more: it fetches the
                  blocks that it lacks while the chain trains on, and becomes a full replica; the other one a spare
    a newcomer    it fetches the whole state, and becomes a full replica

Then the newcomer is killed in the middle of a round, misses some, and *comes back*. A line stays slow until the others
have done ROUNDS rounds meanwhile: so nothing here depends on how fast the machine is. Without --netlab the processes
make their lines slow themselves (tests/faults/paced.py).

In the end the log is verified, and what it says of everybody's tokens is counted a second time.

Printed: the seconds of a round before, and while each of the three was on its way.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from peer.events import Event
from protocol.identity import short_peer
from protocol.run import layout
from protocol.run.manifest import Manifest, OuterSpec, TimingSpec
from protocol.wire.commit import Commit
from tests.e2e import swarms
from tests.faults import history, paced
from tests.faults.processes import Swarm
from tests.support import potluck, tiny
from tests.support.lab import Lab, lab

NODE = "node-0"
FULL, MOVER, OTHER, NEWCOMER = "full", "mover", "other", "newcomer"
PAST = 300
"""Rounds; more bytes of payloads than the state has."""
SECONDS = 2.5
"""Of a round."""
PUT_OFF = re.compile(r"^peer (\S+): .*; it is in no plan up to round (\d+)$")
"""A node's warning about a peer that missed rounds for which it was planned."""
PACES = (0.12, 0.36)
"""Seconds of a micro-batch: the next one where the machine is so busy that the chain is worth less than its member
alone before that one's neighbour has become slow,"""
SLOWER = 8.0
"""and what they are multiplied with when a machine becomes slow."""
ROUNDS = 3
"""Rounds that are committed while a peer is on its way, at least."""
LONGER = 1.0
"""Seconds that a round may last longer meanwhile, on a machine that does nothing else."""
MOVER_BPS, STUCK_BPS, LAB_BPS = 4e5, 8e3, 5e5
"""Bits a second of the mover's line, which also has its share of the payloads; of the others'; with --netlab."""

Trained = set[frozenset[str]]
"""The peers that trained together and were committed, by name."""


class TooBusy(Exception):
    """This machine has so much other work that nothing of what is to be seen can be seen at this pace."""


class Roles:
    """A swarm whose commits are told by the peers' names; `lab`: the emulated links, if there are any."""

    def __init__(self, swarm: Swarm, lab: Lab | None = None, pace: float = PACES[0]) -> None:
        self.swarm = swarm
        self.pace = pace
        self.lab = lab
        self.ids: dict[str, str] = {}
        self.commits: dict[int, Event] = {}
        """Those seen so far, by round."""
        swarm.module = "peer.cli"
        swarm.start_node(NODE)
        swarm.module = "tests.faults.paced"

    @property
    def newest(self) -> Event:
        return self.commits[max(self.commits)]

    def start(self, *names: str) -> None:
        """Starts peers, or starts them again, and waits until they run."""
        said = {name: len(self.swarm.events(name)) for name in names}
        for name in names:
            if not (self.swarm.folder / name / "pace").exists():
                paced.set_pace(self.swarm.folder / name, self.pace)
            self.swarm.start(name)
        for name in names:
            started = self.swarm.wait(name, lambda e: e.kind == "started", "its start", said[name])
            self.ids[started.fields["peer"]] = name

    def line(self, name: str, bps: float | None) -> None:
        """How fast a peer's line is from now on, towards it."""
        if self.lab is None:
            paced.set_line(self.swarm.folder / name, bps)
        else:
            self.lab.control("set", name, f"down={max(bps, LAB_BPS) / 1e6 if bps else 0:g}")

    def wait(self, reached: Callable[[Event], bool], what: str) -> int:
        """Waits for a commit from now on, or the newest; its round."""

        def news(event: Event) -> bool:
            if event.kind != "commit" or event.fields["round"] in self.commits:
                return False
            self.commits[event.fields["round"]] = event
            return reached(event)

        if not (self.commits and reached(self.newest)):
            self.swarm.wait(NODE, news, what)
        return int(self.newest.fields["round"])

    def until(self, wanted: Callable[[Trained], bool], what: str) -> int:
        """The round of a commit whose work is as `wanted`."""
        return self.wait(lambda commit: wanted(self.trained(commit)), what)

    def rounds(self, count: int) -> int:
        """This number of rounds more from now on; the last one."""
        self.commits |= {e.fields["round"]: e for e in self.swarm.events(NODE) if e.kind == "commit"}
        last = max(self.commits) + count
        return self.wait(lambda commit: commit.fields["round"] >= last, f"round {last}")

    def trained(self, commit: Event) -> Trained:
        return {
            frozenset(self.ids[p] for p in [s["peer"] for s in c["shares"]]) for c in commit.fields["contributions"]
        }

    def planned(self, commit: Event, kind: str = "replicas") -> list[tuple[str, ...]]:
        """The members of the plan's replicas, of `kind` or forming."""
        plan = commit.fields["plan"]
        return [tuple(self.ids.get(s["peer"], s["peer"]) for s in replica["stages"]) for replica in plan[kind]]

    def left_out(self, commit: Event) -> set[str]:
        """The peers planned for this round whose work is not in it."""
        plan = self.commits[commit.fields["round"] - 1].fields["plan"]
        numbers = {left["replica"] for left in commit.fields["left_out"]}
        stages = [stage for replica in plan["replicas"] if replica["number"] in numbers for stage in replica["stages"]]
        return {self.ids[stage["peer"]] for stage in stages}

    def look(self, commit: Event) -> bool:
        """False. Raises TooBusy where the chain is given up already."""
        if any((MOVER,) in self.planned(commit, kind) for kind in ("replicas", "forming")):
            raise TooBusy
        return False

    def end(self) -> None:
        """Kills all. All that was committed is right, and all that contributors of a round had done in it is in
        it, and everybody's credits are what the log says."""
        for name in list(self.swarm.running):
            self.swarm.kill(name)
        self.log("verify")
        with self.swarm.log_of(NODE) as archive:
            expected = recounted(archive.commits, self.swarm.manifest.model.n_layers)
            total = sum(made.tokens for commit in archive.commits for made in commit.contributions)
        credited = [json.loads(line) for line in self.log("credits", "--json").splitlines()]
        assert {c["peer"]: (c["tokens"], c["rounds"], c["left_out"]) for c in credited} == expected
        assert sum(c["tokens"] for c in credited) == total
        events = self.swarm.events(NODE)
        self.commits = {e.fields["round"]: e for e in events if e.kind == "commit"}
        assert sorted(self.commits) == list(range(min(self.commits), max(self.commits) + 1))
        assert not [e for e in events if e.kind == "diverged"]
        steps = {
            peer: Counter(e.fields["round"] for e in self.swarm.events(name) if e.kind == "step")
            for peer, name in self.ids.items()
        }
        for commit in list(self.commits.values())[1:]:  # the first one was there before
            round = commit.fields["round"]
            for contribution in commit.fields["contributions"]:
                for peer in (share["peer"] for share in contribution["shares"]):
                    assert contribution["steps"] == steps[peer][round], (round, self.ids[peer])

    def log(self, command: str, *options: str) -> str:
        """What `potluck log` prints of the node's folder; it must be content."""
        ended = potluck.run("log", command, self.swarm.folder / NODE, *options, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout


def recounted(commits: Sequence[Commit], layers: int) -> dict[str, tuple[int, int, int]]:
    """What the log says of everybody whose work it took or left out: tokens, rounds, and rounds that were left out. The
    tokens of a replica are its members' in proportion to their blocks, in whole tokens up to each boundary. No peer
    is on probation here."""
    tokens, rounds, left = Counter[str](), Counter[str](), Counter[str]()
    for before, now in itertools.pairwise(commits):
        planned = {replica.number: replica.stages for replica in before.plan.replicas}
        for made in now.contributions:
            ends = [stage.last for stage in planned.get(made.replica, ())] or [layers]  # or who took a seat
            for share, (first, last) in zip(made.shares, itertools.pairwise([0, *ends]), strict=True):
                tokens[share.peer] += made.tokens * last // layers - made.tokens * first // layers
                rounds[share.peer] += 1
        for out in now.left_out:
            left.update(out.peers or [stage.peer for stage in planned.get(out.replica, ())])
    return {peer: (tokens[peer], rounds[peer], left[peer]) for peer in rounds | left}


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """What others did while a peer's new role was on its way: the `seconds` of each of these rounds; `whole`: in how
    many of them all who were planned were committed; `steps` that the full replica did that stayed as it was."""

    seconds: list[float]
    whole: int
    steps: list[int]


def meanwhile(roles: Roles, first: int, last: int) -> Meanwhile:
    """In the rounds `first` to `last`."""
    commits = [roles.commits[r] for r in range(first - 1, last + 1)]
    mine = [
        c["steps"] for e in commits[1:] for c in e.fields["contributions"] if roles.ids[c["shares"][0]["peer"]] == FULL
    ]
    return Meanwhile(
        seconds=[b.time - a.time for a, b in itertools.pairwise(commits)],
        whole=sum(not e.fields["left_out"] for e in commits[1:]),
        steps=mine,
    )


def make_manifest() -> Manifest:
    made = swarms.manifest(swarms.options(Path("unused"), full=1, rounds=10**6, inner_steps=1000))
    return dataclasses.replace(
        made,
        operators=(tiny.OPERATOR.peer_id,),
        model=dataclasses.replace(made.model, d_ff=1024),
        train=dataclasses.replace(made.train, micro_batches=2, rows=1, sequence=16),
        data=swarms.text(16),
        outer=OuterSpec(topk=64),
        checkpoint_rounds=PAST,
        timing=TimingSpec(round_deadline=300.0, round_seconds=SECONDS, heartbeat=0.5, gone_after=100.0),
    )


@contextlib.contextmanager
def running(folder: Path, script: Path | None = None, pace: float = PACES[0]) -> Iterator[Roles]:
    """The chain trains, and the full replica. Raises TooBusy."""
    manifest = make_manifest()
    names = (NODE, FULL, MOVER, OTHER, NEWCOMER)
    with contextlib.ExitStack() as stack:
        there = stack.enter_context(lab(script, dict.fromkeys(names, "0/0:10"))) if script else None
        memory = {OTHER: tiny.full_memory(manifest) - 1}
        places = there.places if there else None
        swarm = stack.enter_context(Swarm(folder, manifest, tiny.OPERATORS[:1], memory, places))
        half = manifest.model.n_layers // 2
        chain = {MOVER: (0, half), OTHER: (half, manifest.model.n_layers)}
        history.write(swarm, PAST, chain, whole=[FULL], young=[NEWCOMER])
        roles = Roles(swarm, there, pace)
        roles.start(MOVER, OTHER)
        both = {frozenset(chain), frozenset({FULL})}
        roles.wait(lambda c: roles.look(c) or roles.trained(c) == {frozenset(chain)}, "the chain's work")
        roles.start(FULL)
        roles.wait(lambda c: roles.look(c) or roles.trained(c) == both, "both replicas' work")
        yield roles


def live(roles: Roles) -> dict[str, Meanwhile]:
    """Everything that happens, by the peer that was on its way. Raises TooBusy."""
    swarm, found = roles.swarm, dict[str, tuple[int, int]]()
    usual = roles.newest.fields["round"] + 1, roles.rounds(ROUNDS)
    for commit in roles.commits.values():
        roles.look(commit)
    roles.line(MOVER, MOVER_BPS)
    roles.line(NEWCOMER, STUCK_BPS)
    paced.set_pace(swarm.folder / OTHER, SLOWER * roles.pace)
    roles.start(NEWCOMER)
    begun = {}
    for name in (MOVER, NEWCOMER):

        def forms(commit: Event, name: str = name) -> bool:
            return (name,) in roles.planned(commit, "forming")

        begun[name] = 1 + roles.wait(forms, f"a plan in which the {name} will be a full replica")
        roles.rounds(ROUNDS)
        roles.line(name, None)
    alone = {frozenset({name}) for name in (FULL, MOVER, NEWCOMER)}
    roles.until(lambda trained: trained == alone, "three full replicas")
    last = roles.newest.fields["round"]
    swarm.wait(NEWCOMER, lambda e: e.kind == "step" and e.fields["round"] > last, "its work in the next round")
    swarm.kill(NEWCOMER)
    roles.wait(lambda commit: (NEWCOMER,) not in roles.planned(commit), "a plan without who was killed")
    roles.line(NEWCOMER, STUCK_BPS)
    roles.start(NEWCOMER)
    back = roles.rounds(1)
    roles.rounds(ROUNDS)
    roles.line(NEWCOMER, None)
    roles.until(lambda trained: trained == alone, "the return of who was killed")
    roles.end()
    came = min(r for r, commit in roles.commits.items() if frozenset({NEWCOMER}) in roles.trained(commit))
    assert came > usual[1], "it joined later"
    without = (roles.left_out(roles.commits[round]) for round in range(last + 1, back))
    assert any(NEWCOMER in names for names in without), "and was killed in the middle of a round"
    for name, first in begun.items():
        found[name] = first, in_time(roles, name, first)
    found["returning"] = back, in_time(roles, NEWCOMER, back)
    return {name: meanwhile(roles, *rounds) for name, rounds in {"nobody": usual, **found}.items()}


def in_time(roles: Roles, name: str, first: int) -> int:
    """The last round before `name` was a full replica. It became one as soon as it had attested the whole state, and
    not before; or, where it had missed rounds for which it was planned, as soon as it was let in again."""
    shards = set(layout.shard_names(roles.swarm.manifest.model))
    attested, ready, put_off = set[int](), list[int](), 0
    for event in roles.swarm.events(NODE):
        if event.kind == "warning" and (said := PUT_OFF.search(event.fields["text"])):
            (peer,) = [peer for peer in roles.ids if short_peer(peer) == said[1]]
            put_off = int(said[2]) if roles.ids[peer] == name else put_off
        if (
            event.kind == "attest"
            and roles.ids[event.fields["peer"]] == name
            and shards <= set(event.fields["digests"])
        ):
            attested.add(event.fields["round"])
        if event.kind == "commit" and event.fields["round"] >= first:
            if event.fields["round"] - 1 in attested:
                ready.append(event.fields["round"])
            ready = [round for round in ready if round >= put_off]
            if (name,) in roles.planned(event):
                assert len(ready) in (1, 2), f"{name}: planned after round {event.fields['round']}, ready after {ready}"
                return int(event.fields["round"])
    raise AssertionError(f"{name} was not planned")


def held_up(found: dict[str, Meanwhile], longer: float) -> list[str]:
    """The peers that were waited for; a round may last `longer` seconds more than before."""
    usual = statistics.median(found["nobody"].seconds)
    return [
        f"{name}: {those}, {statistics.median(those.seconds) - usual:.2f} s longer"
        for name, those in found.items()
        if those.whole < ROUNDS or statistics.median(those.seconds) > usual + longer
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netlab", type=Path, help="the lab's script; needs root")
    parser.add_argument("--dir", type=Path, help="keep everything there; must not exist yet")
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="potluck-roles-") as kept,
        running(chosen.dir or Path(kept) / "run", chosen.netlab) as roles,
    ):
        found = live(roles)
    for name, those in found.items():
        seconds = ", ".join(f"{s:.2f}" for s in those.seconds)
        print(f"{name}: {seconds} s; steps {those.steps}; {those.whole} rounds with everybody's work")
    wrong = held_up(found, LONGER)
    print("\n".join(wrong) or "nobody waited")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
