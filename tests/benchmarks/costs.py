"""What it costs when nobody attacks and everybody is only careful: judging contributions, scoring them, and measuring the held-out loss.

    python -m tests.benchmarks.costs [--presets tiny 178m 512m] [--replicas 8 32]

*Judging.* A node decodes each payload when it comes, beside the round, and notes what is in it (protocol/round/comparing.py). Between the last offer
and the commit it compares the contributions (protocol/round/judging.py): the seconds of `Case.answer`, of what is noted and of lists on
disk, on one thread beside nothing else. With as many of the round before, as in a run. The members judge once more before they vote, so
the share of the preset's round, in which replicas train for `round_seconds`, is that of TIMES such answers. After a restart nothing is
noted: then the first answer takes longer. The verdicts are the same.
*Held-out loss.* A replica measures `evaluated_sequences` every `evaluation.every` rounds: the seconds of a sequence forward alone, with the
code that measures, beside those of one that is trained on, both in this process by turns. The share is of the time that the replica
trains in so many rounds, at its full number of inner steps.

*Scores.* A replica marks others' updates (peer/node/evaluating.py): the seconds of a mark by itself, in which the model is copied, the update is
decoded and all four losses are measured, beside those of an inner step, by turns. Several marks of a round share a copy and one of the losses.

Medians of several. Exits with 1 if a held-out loss, or the scores, take more than 2 % of a replica's time, or judging more than 3 % of a round.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from peer.net.blobs import BlobStore
from peer.node.evaluating import Scorer
from peer.state.storage import Shards
from peer.training import inference
from peer.training.optimizer import Pace
from peer.training.trainer import StageTrainer
from protocol.codec import sparse
from protocol.ledger import part_lists, scoring
from protocol.round import comparing, judging
from protocol.round.comparing import Notes
from protocol.run import init, layout, presets
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest, OuterSpec, TrainSpec
from protocol.wire.commit import Contribution, Part, Share
from tests.support import tiny
from tests.support.texts import NoText

MOST_JUDGING, MOST_HELD_OUT, MOST_SCORED = 0.03, 0.02, 0.02
REPEATS = 3
TIMES = 2
"""A round's contributions are judged one after the other: by the leading node, and by the members."""
TRAINED = ModelSpec(vocab_size=4096, d_model=512, n_layers=8, n_heads=8, d_ff=1376, context=512)
SEQUENCE = 512


def seconds_of(
    work: Callable[[], object], repeats: int = REPEATS, clock: Callable[[], float] = time.monotonic
) -> float:
    """Of one call: the median of several."""
    found = []
    for _ in range(repeats):
        began = clock()
        work()
        found.append(clock() - began)
    return statistics.median(found)


def manifest_of(preset: presets.Preset) -> Manifest:
    """A run of the preset's model; nothing else of it matters here."""
    model = preset.model(preset.vocab_size, preset.sequence)
    return tiny.manifest(model=model, outer=OuterSpec(topk=32))


def contributions(manifest: Manifest, count: int, blobs: BlobStore) -> list[Contribution]:
    """So many updates that agree a little, as honest ones do; their payloads and lists are in `blobs`."""
    codec, parts = manifest.outer.codec, [list[Part]() for _ in range(count)]
    for number, shard in enumerate(layout.shard_names(manifest.model)):
        shapes = layout.shapes(manifest.model, shard)
        rng = np.random.default_rng(int.from_bytes(hashlib.sha256(shard.encode()).digest()[:4], "big"))
        common = [rng.standard_normal(shape, np.float32) for shape in shapes]
        for replica, so_far in enumerate(parts):
            own = np.random.default_rng([replica, number])
            data = sparse.encode(
                codec, [x + np.float32(1.5) * own.standard_normal(x.shape, np.float32) for x in common]
            )
            norm = comparing.examine(manifest, shard, data).norm
            so_far.append(Part(shard=shard, digest=blobs.put(data, 1), size=len(data), norm=norm))
    return [contribution(replica, tuple(of), blobs) for replica, of in enumerate(parts)]


def contribution(replica: int, parts: tuple[Part, ...], blobs: BlobStore) -> Contribution:
    """Of one full replica."""
    packed = part_lists.pack(parts)
    root, norms = blobs.put(packed, 1), part_lists.total(part.norm for part in parts)
    share = Share(peer=f"p{replica}", root=root, size=sum(p.size for p in parts), norm=norms, listed=len(packed))
    return Contribution(replica=replica, tokens=1000, steps=10, loss=None, shares=(share,))


def judged(name: str, replicas: list[int]) -> bool:
    """Prints the rows of a preset; whether all are within what is allowed."""
    preset = presets.PRESETS[name]
    manifest, good = manifest_of(preset), True
    with tempfile.TemporaryDirectory(prefix="potluck-costs-") as folder:
        blobs = BlobStore(Path(folder))
        every = contributions(manifest, 2 * max(replicas), blobs)

        def read(digest: str) -> bytes:
            data = blobs.get(digest)
            assert data is not None
            return data

        for count in replicas:
            there, before = tuple(every[:count]), tuple(every[-count:])
            case = judging.JudgingJob(
                manifest=manifest, round=1, parent="ab" * 32, contributions=there, last=before, medians=()
            )
            began = time.process_time()
            verdicts = case.answer(read)
            anew, notes = time.process_time() - began, Notes()
            began = time.process_time()
            for c in (*there, *before):
                for part in part_lists.unpack(read(c.shares[0].root)):
                    notes.keep(c.shares[0].peer, part, comparing.examine(manifest, part.shard, read(part.digest)))
            beside = (time.process_time() - began) / len((*there, *before))
            assert case.answer(read, notes.known) == verdicts
            took = seconds_of(lambda case=case, notes=notes: case.answer(read, notes.known), 5, time.process_time)  # type: ignore[misc]
            share = TIMES * took / preset.round_seconds
            good = good and share <= MOST_JUDGING
            millions = layout.total_parameters(manifest.model) / 1e6
            out = sum(v.reason is not None for v in verdicts)
            print(
                f"| {name}, {millions:.0f} M | {count} | {took:.3f} | {preset.round_seconds:g} | {share:.2%} | "
                f"{1000 * beside:.0f} | {notes.used / 1e6:.0f} | {anew:.2f} | {out} |",
                flush=True,
            )
    return good


def trained() -> tuple[Manifest, Shards, np.ndarray, Callable[[], None]]:
    """A run, a state, sequences of a micro-batch, and an inner step."""
    train = TrainSpec(
        inner_steps=20, micro_batches=4, rows=4, sequence=SEQUENCE, lr=1e-3, warmup_steps=0, total_steps=1000
    )
    manifest = tiny.manifest(model=TRAINED, train=train, outer=OuterSpec(topk=32))
    theta = {s: init.initial_shard(TRAINED, b"costs", s) for s in layout.shard_names(TRAINED)}
    trainer = StageTrainer(TRAINED, train, layout.shard_names(TRAINED))
    trainer.begin_round(theta, Pace(0, train.inner_steps, train.micro_batches))
    ids = np.random.default_rng(0).integers(0, TRAINED.vocab_size, (train.rows, SEQUENCE + 1))
    batch, done = torch.from_numpy(ids), itertools.count(1)

    def step() -> None:
        for micro in range(train.micro_batches):
            trainer.forward(micro, batch)
            trainer.backward(micro)
        norm = math.sqrt(sum(squares for _, squares in trainer.grad_sumsq()))
        trainer.step(min(next(done), train.inner_steps), norm)

    return manifest, theta, ids, step


def by_turns(step: Callable[[], None], work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of both, medians; the first of each does not count."""
    pairs = [(seconds_of(step, 1), seconds_of(work, 1)) for _ in range(2 * REPEATS + 1)]
    one, other = zip(*pairs[1:], strict=True)
    return statistics.median(one), statistics.median(other)


def held_out() -> bool:
    """Prints the row; whether it is within what is allowed."""
    manifest, theta, ids, step = trained()
    train, measure = manifest.train, inference.Measured(TRAINED, theta)
    other, one = by_turns(step, lambda: measure(ids))
    one, other = one / train.rows, other / train.step_rows
    rounds, sequences = manifest.evaluation.every, manifest.evaluated_sequences
    share = one * sequences / (other * rounds * train.inner_steps * train.step_rows)
    print(f"| {one / other:.3f} | {sequences} | {rounds} | {share:.2%} |")
    return share <= MOST_HELD_OUT


def scored() -> bool:
    """Prints the row; whether it is within what is allowed."""
    manifest, theta, _, step = trained()
    train, each = manifest.train, scoring.sequences(manifest)
    windows = np.random.default_rng(1).integers(0, TRAINED.vocab_size, (each, SEQUENCE + 1))
    with tempfile.TemporaryDirectory(prefix="potluck-costs-") as folder:
        blobs = BlobStore(Path(folder))
        made = contributions(manifest, 1, blobs)[0]
        scorer = Scorer(manifest, tiny.OPERATOR, NoText(), lambda message: None, blobs.get)

        def job() -> None:
            measure = inference.Measured(TRAINED, theta)
            scorer.gains(measure, made, windows, windows, measure(windows) / windows[:, 1:].size)

        inner, took = by_turns(step, job)
    marks = manifest.judging.score_share * scoring.TRAINED * train.inner_steps * train.step_rows
    marks /= scoring.PASSES * each
    share = marks * took / (inner * train.inner_steps)
    print(f"| {took / inner:.2f} | {each} | {marks:.2f} | {share:.2%} |")
    return share <= MOST_SCORED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="*", default=["tiny", "178m"], choices=sorted(presets.PRESETS))
    parser.add_argument("--replicas", nargs="*", type=int, default=[8, 32])
    arguments = parser.parse_args()
    print("| one sequence measured / trained | sequences | every so many rounds | share of a replica's time |")
    print("|---|---|---|---|")
    good = held_out()
    print(
        "\n| seconds of a mark / of an inner step of 16 sequences | sequences of each text | marks in a round | share of a replica's time |"
    )
    print("|---|---|---|---|")
    good = scored() and good
    print(
        "\n| model | replicas | seconds of CPU to judge a round | the round's seconds | share | ms to decode an update | MB noted | "
        "after a restart | left out |\n|---|---|---|---|---|---|---|---|---|"
    )
    for name in arguments.presets:
        good = judged(name, arguments.replicas) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
