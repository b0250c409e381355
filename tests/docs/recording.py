"""A recording of a run of 500 peers, as a monitor hears it of a real node: for pictures, since no machine here runs so
many.

    python -m tests.docs.recording pictures                                       # about a minute
    potluck monitor pictures/many.toml --replay pictures/many.jsonl

Over its network daemon a node serves a log that holds before every check, and announcements that 500 peers have signed
(tests/support/crowd.py). A monitor asks for both, checks them, and what it tells is written down. Nobody trains: plans,
losses and bytes follow formulas (tests/support/watched.py), who comes and goes follows a seed, and rounds are decided
as fast as the monitor reads them. Each is told with its minute.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from peer.events import Event
from peer.node.open_run import Door, manifest_of, parse_run, start_transport
from peer.ui.monitor import PEERS_A_POLL, Monitor
from protocol.ledger import claims, run_state
from protocol.run import manifest as manifests
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest, TrainSpec
from protocol.wire.claims import Evaluation
from protocol.wire.commit import Commit, Record
from protocol.wire.plan import Plan
from tests.support import crowd, tiny
from tests.support.watched import BEGAN, ROUND_SECONDS

PEERS, ROUNDS, SEED = 500, 60, 1
"""Peers, decided rounds, and the seed of coming and going."""
LAST_STEP = 4
LOOKED, COUNTED = 2, 15
"""The rounds between two looks of the monitor at announcements: one within a step, one after the round."""
AWAY = 0.02
"""The part of all peers that is away at a time."""
MODEL = ModelSpec(vocab_size=4096, d_model=256, n_layers=tiny.LAYERS, n_heads=4, d_ff=688, context=256)
NAMES = ("Ada", "", "lab-gpu-03", "", "old laptop", "Grace", "", "attic_2")
"""What peers call themselves, by turns."""


@dataclasses.dataclass(frozen=True)
class Measured(crowd.Signing):
    """A run of a usual model; full replicas measure the loss on held-out text, and some peers have names."""

    @functools.cached_property
    def manifest(self) -> Manifest:
        train = TrainSpec(
            inner_steps=4, micro_batches=2, rows=4, sequence=256, lr=1e-3, warmup_steps=0, total_steps=4 * self.rounds
        )
        return tiny.manifest(name="many", rounds=self.rounds, model=MODEL, train=train)

    def plan(self, round: int) -> Plan:
        """Of a round, with full replicas and chains among each other."""
        made = super().plan(round)
        replicas = sorted(made.replicas, key=lambda replica: random.Random(replica.number).random())
        return dataclasses.replace(made, replicas=tuple(replicas))

    def name_of(self, index: int) -> str:
        return NAMES[index % len(NAMES)]

    def record(self, before: Commit | None) -> Record:
        """The next record of the log; what was measured is in the commit after the round."""
        made = super().record(before)
        if before is None or not before.round or not run_state.evaluation_is_due(self.manifest, before):
            return made
        plain = Evaluation(
            peer="",
            round=before.round,
            sequences=self.manifest.evaluated_sequences,
            loss=self.loss(before.round) + 0.07,
            bits_per_byte=(self.loss(before.round) + 0.07) / 3.0,
            signature=b"",
            sample="Fellow citizens of the Senate and House of Representatives: ⇒ I have the honor to report that the",
        )
        said = tuple(
            claims.signed(self.keys[peer], before.digest, plain) for peer in run_state.evaluators(self.manifest, before)
        )
        return tiny.record(dataclasses.replace(made.commit, evaluations=said))


async def record(folder: Path, peers: int = PEERS, rounds: int = ROUNDS) -> tuple[Path, Path]:
    """Writes the manifest and the recording, three steps into the open round, and returns their paths."""
    made, dice = Measured(peers), random.Random(SEED)
    manifest, recording = folder / "many.toml", folder / "many.jsonl"
    manifest.write_text(manifests.to_toml(made.manifest), encoding="utf-8")
    with (
        tempfile.TemporaryDirectory(prefix="potluck-recording-") as name,
        open(recording, "w", encoding="utf-8") as out,
    ):
        async with crowd.node(made, Path(name) / "node") as node:
            now = BEGAN

            def write(event: Event) -> None:
                told = (
                    event.source == "bootstrap" and event.time < now + ROUND_SECONDS
                )  # what a commit says has its time
                out.write((event if told else dataclasses.replace(event, time=now)).to_json() + "\n")

            run = parse_run(node.line)
            transport = await start_transport(Path(name), Door(host="127.0.0.1"), run.run_id, sparing=True)
            try:
                monitor = Monitor(await manifest_of(run, transport), transport, bootstrap=run.bootstrap)

                async def look(step: int, phase: str = "training") -> None:
                    nonlocal now
                    now = BEGAN + (node.round + step / (LAST_STEP + 1)) * ROUND_SECONDS
                    node.hear(step, phase)
                    for _ in range(max(1, len(monitor.peers) // PEERS_A_POLL)):
                        await monitor.poll(write)

                node.decide()
                for round in range(1, rounds + 1):
                    node.away = frozenset(dice.sample(made.ids, int(AWAY * peers)) if round % 6 == 0 else node.away)
                    if round % LOOKED == 0:
                        await look(1 + round % (LAST_STEP - 1))
                    if round % COUNTED == 0:
                        await look(LAST_STEP, "waiting")
                    node.decide()
                for step in (1, 2, 3):
                    await look(step)
            finally:
                await transport.aclose()
    return manifest, recording


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    typed = parser.parse_args(arguments)
    typed.folder.mkdir(parents=True, exist_ok=True)
    manifest, recording = asyncio.run(record(typed.folder))
    print(f"potluck monitor {manifest} --replay {recording}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
