"""Mistakes on purpose, as changes of the source: each must be found by the simulation, by the promise that it breaks.

A copy of the tree is changed and run; what is found is found in the code that ships. A change that finds nothing to
replace is an error, so that the list keeps up with the code.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.sim import fresh

ROOT = Path(__file__).parents[2]
ROUNDS, NODE, PAYLOADS = "peer/node/rounds.py", "bootstrap/node.py", "bootstrap/payloads.py"
MEMBER, LEADER, ROSTER = "protocol/round/member.py", "protocol/round/leader.py", "protocol/round/chain_repair.py"
PAXOS, ACCEPTOR, OFFERS = "protocol/quorum/paxos.py", "protocol/quorum/acceptor.py", "protocol/round/offers.py"
FAIRNESS = "protocol/round/fairness.py"
JUDGING = "protocol/round/judging.py"
STORAGE, TAKING = "peer/state/storage.py", "peer/state/handover.py"


SEEDS, RARE_SEEDS = 120, 900
"""Seeds in which a bug is looked for, and a bug that only runs of one kind show."""


@dataclass(frozen=True)
class Bug:
    """`changes`: (file, text, what stands there instead). `promises`: one of them is what is broken. `only`: the kind
    of runs that shows it.
    `first`: a seed that shows it. `options`: of the simulation, with which it shows."""

    changes: tuple[tuple[str, str, str], ...]
    promises: tuple[str, ...]
    only: str = ""
    first: int = 0
    options: tuple[str, ...] = ()


BUGS: dict[str, Bug] = {
    # the machines
    "a node judges plans without the quarrels that it plans by": Bug(
        (
            (
                FAIRNESS,
                "        ready={c.peer: c for c in leader.marked(leader.ready.values())},\n",
                "        ready={c.peer: c for c in leader.standing.marked(leader.ready.values())},\n",
            ),
            # and never comes to know that it is the one that sees less
            (FAIRNESS, "        if len(leaders) <= max(1, liars_borne(members)):\n", "        if True:\n"),
        ),
        ("P2", "P4"),
        options=("--quarrels", "--calm"),
        first=17,
    ),
    "a commit is applied twice when it is heard twice": Bug(
        (
            (
                MEMBER,
                "            case ev.Committed(record):\n",
                "            case ev.Committed(record):\n"
                "                if record.commit.round == self.applied and self.phase is Phase.WAITING:\n"
                "                    self.applied -= 1\n",
            ),
        ),
        ("P1", "P2"),
    ),
    "what was not committed is not given back": Bug(
        (
            (
                MEMBER,
                "            if not commit.includes(self.peer, root_of(self._pending.parts)):",
                "            if False:",
            ),
        ),
        ("P3",),
        first=6,
    ),
    "what another peer gave is added again when it is told again": Bug(
        ((TAKING, "        if self._taken.get(key, 0) >= handover.serial:\n", "        if False:\n"),),
        ("P3",),
        first=1,
    ),
    "a spare takes part twice": Bug(
        (
            (MEMBER, "        if self._attempted >= reconfig.round:  # our part", "        if False:  # our part"),
            (
                MEMBER,
                "        self._reconfig, self._attempted = reconfig, reconfig.round\n",
                "        self._reconfig = reconfig\n",
            ),
        ),
        ("P3", "P4"),
        first=12,
    ),
    "a stale leader is accepted": Bug(
        ((ACCEPTOR, "        if accept.ballot < self.vote.ballot:\n", "        if False:\n"),),
        ("P2",),
        only="storm",
        first=2,
    ),
    "a leader ignores what was accepted before": Bug(
        (
            # nor is it bound by what it has accepted itself, and so are none of the others
            (
                PAXOS,
                "self._value = best.commit if best is not None else self.mine",
                "self._value = self.mine or (best and best.commit)",
            ),
            (
                ACCEPTOR,
                "        if vote.commit is not None and vote.commit != commit and certified <= vote.accepted:\n",
                "        if False:\n",
            ),
        ),
        ("P2",),
        only="storm",
        first=2,
    ),
    "a certificate of one commit is taken for that of another": Bug(
        (
            (
                ACCEPTOR,
                "        return all(self._verify(member, body, pledges[member]) for member in named)\n",
                "        return True\n",
            ),
        ),
        ("P2",),
        options=("--lying-nodes",),
        first=29,
    ),
    "a spare counts in two chains": Bug(
        (
            (
                ROSTER,
                "        return spare not in self.away | self._served and self.plan.replica_of(spare) is None\n",
                "        return spare not in self.away\n",
            ),
            (
                OFFERS,
                "        return offer if offer is not None and offer.replica == number else None\n",
                "        return offer\n",
            ),
        ),
        ("P2", "P4"),
        only="crowd",
        first=30,
    ),
    "whoever decides next is taken for whoever decided": Bug(
        (
            (
                "protocol/ledger/history.py",
                "    members = board.members_after(manifest, head)\n",
                "    members = commit.members\n",
            ),
        ),
        ("P2", "P4"),
        first=4,
    ),
    # the pumps
    "a commit is applied twice after a restart": Bug(
        ((ROUNDS, "Checkpoint(round, theta,", "Checkpoint(round - 1, theta,"),), ("P1",)
    ),
    "an offer is told before it is durable": Bug(
        (
            (ROUNDS, "        self.storage.save_offer(offer, self._feedback.given_back)\n", ""),
            (
                ROUNDS,
                "                self.put(member_events.UpdateEncoded(plan.round, offer))\n",
                "                self.put(member_events.UpdateEncoded(plan.round, offer))\n"
                "                asyncio.get_running_loop().call_later(1.0, self.storage.save_offer, offer, 0)\n",
            ),
        ),
        ("P3",),
    ),
    "feedback is on disk before its offer": Bug(
        (
            (
                ROUNDS,
                "        self.storage.save_offer(offer, self._feedback.given_back)\n",
                "        self.storage.save_feedback(offer.round, self.outer.feedback)\n"
                "        self.storage.save_offer(offer, self._feedback.given_back)\n",
            ),
        ),
        ("P3",),
    ),
    "a decision is told before the log is durable": Bug(
        (
            (
                NODE,
                "                    await asyncio.to_thread(self.archive.append, record)\n",
                "                    asyncio.get_running_loop().call_later(1.0, self.archive.append, record)\n",
            ),
            (
                NODE,
                "self._sessions.post_all(self.archive.records[record.commit.round])",
                "self._sessions.post_all(encoding.encode_record(record))",
            ),
        ),
        ("P2",),
    ),
    "a vote is not persisted": Bug(
        (
            (
                NODE,
                "                    await asyncio.to_thread(self.archive.save_vote, vote)\n",
                "                    pass\n",
            ),
        ),
        ("P2",),
        first=2,
    ),
    "a vote is told before it is durable": Bug(
        (
            (
                NODE,
                "                    await asyncio.to_thread(self.archive.save_vote, vote)\n",
                "                    asyncio.get_running_loop().call_later(0.5, self.archive.save_vote, vote)\n",
            ),
        ),
        ("P2",),
        first=2,
    ),
    "two effects of one step are carried out in the other order": Bug(
        (
            (
                NODE,
                "effects = self.quorum.handle(event, self._clock.steady())",
                "effects = list(reversed(self.quorum.handle(event, self._clock.steady())))",
            ),
        ),
        ("P2",),
        first=2,
    ),
    # the disk
    "feedback older than the offer": Bug(
        (
            (
                STORAGE,
                "tuple(offer for offer in self.offers if offer.round > round or offer.round in given_back)",
                "tuple[Offer, ...]()",
            ),
        ),
        ("P3",),
    ),
    "a payload is told before it is durable": Bug(
        (
            (
                ROUNDS,
                "put(payload, effect.plan.round, protect=True)",
                "put(payload, effect.plan.round, protect=True, sync=False)",
            ),
        ),
        ("P3",),
    ),
    "a checkpoint is served before it is whole": Bug(
        (
            (STORAGE, '        temporary = self.folder / f".{final.name}"\n', "        temporary = final\n"),
            (STORAGE, "            self.disk.remove(final)  # there is one only if a shard of it is damaged\n", ""),
        ),
        ("P7",),
        first=105,
    ),
    "an archive removes payloads before it has the states that take their place": Bug(
        ((PAYLOADS, "or any(archive.lacks(each) for each in kept):", "or False:"),),
        ("P4",),
        options=("--long",),
    ),
    # judging
    "one who opposes it has honest work left out": Bug(
        (
            (JUDGING, "BEARABLE = 3 / 8\n", "BEARABLE = 0.0\n"),
            (JUDGING, "if statistics.median(at_rank) < SURE_DEVIATIONS * deviation:", "if not at_rank:"),
        ),
        ("P8",),
        first=52,
        options=("--colluders",),
    ),
}


def copy_tree(folder: Path) -> None:
    """The parts of the tree that a simulation needs, with what Python has compiled of it."""
    for part in ("protocol", "peer", "bootstrap", "tests"):
        shutil.copytree(ROOT / part, folder / part)


def plant(bug: Bug, folder: Path) -> None:
    """Makes its changes in a copy of the tree."""
    for name, text, instead in bug.changes:
        path = folder / name
        source = path.read_text()
        if source.count(text) != 1:
            raise ValueError(f"{name}: {text!r} stands there {source.count(text)} times, not once; change the bug, too")
        path.write_text(source.replace(text, instead))


def find(bug: Bug, folder: Path) -> str:
    """What the simulation of a tree prints up to the first broken promise: about the bug's first seed, then, where the
    code has changed so that this one does not show it any more, about many."""
    text = fresh.simulate(folder, words(f"{bug.first}:{bug.first + 1}", *bug.options))
    if broken(text) is None:
        only = ("--only", bug.only) if bug.only else ()
        text += fresh.simulate(folder, words(f"0:{RARE_SEEDS if bug.only else SEEDS}", *bug.options, *only))
    return text


def words(seeds: str, *options: str) -> list[str]:
    """What is typed behind the simulation's command to live up to the first broken promise."""
    return ["--seeds", seeds, "--first", *options]


def simulate(folder: Path, seeds: str, *options: str, timeout: float | None = None) -> str:
    """What the simulation of a tree prints about these seeds, up to the first broken promise."""
    command = [sys.executable, "-m", "tests.sim.run", *words(seeds, *options)]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    return done.stdout + done.stderr


def broken(text: str) -> str | None:
    """The promise that a simulation found broken."""
    found = re.search(r"^seed \d+: (P\d):", text, re.MULTILINE)
    return found.group(1) if found else None
