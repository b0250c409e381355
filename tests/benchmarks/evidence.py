"""The tables of "Heterogeneous Low-Bandwidth Pre-Training of LLMs" (arXiv 2601.02360) again, by small models.

    python -m tests.benchmarks.evidence --keep evidence.jsonl --page docs/results/evidence.md            # make evidence
    python -m tests.benchmarks.evidence --keep evidence.jsonl --page docs/results/evidence.md --quick
    python -m tests.benchmarks.evidence --keep evidence.jsonl --page docs/results/evidence.md --scale 27M \\
        --device cuda --corpus FOLDER

Four replicas of four stages, AdamW, H = 15 inner steps a round. Cuts are those of the paper
(tests/benchmarks/subspace.py) or the product's (docs/adr/0066-anchors.md); the arms are in
tests/benchmarks/evidence_arms.py. An arm with one seed or several is a *job*, one tensor program.

On processors two workers, processes of one thread, take job after job. A finished job is a line of the kept file. What
is under way is on disk every minute, and a run that was killed goes on from there to the same bits. The first seed of
all tables comes before the others: a run that was stopped has whole tables for fewer seeds. The page and its picture
are made of all rows of the file (tests/benchmarks/evidence_page.py); the exit code says whether they were made, not
whether the paper is right.

Losses of a seed, nats per held-out token after the last round: `plain`, of θ as a plain model; `through`, with the cuts
of a chain; `own`, the paper's: the mean over replicas, each with its cuts.

27M and 178M parameters are for a GPU, with a corpus of `potluck data build`, tokens of a vocabulary of 8,192 or 32,000
in sequences of 512 or 1,024. A call there may be killed after nine minutes: the next one goes on, if the folder with
the checkpoints is still there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from tests.benchmarks import evidence_page, regime
from tests.benchmarks.evidence_arms import BLOCKS, SCALES, UNFINISHED, Job, Scale, carry_out, ready

WORKERS = 2
SECONDS_A_MILLION = 60.0
"""Of a core for a million tokens, where no row tells."""
QUICK = ("paper", "product")
SHOWN = tuple(scale for scale in SCALES.values() if scale.name != "tiny")
"""On the page."""


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a kept file. A line that was cut off by a kill is none."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def keep(path: Path, row: dict[str, Any]) -> None:
    """Adds a line, and takes away the beginning of one that a kill left behind."""
    line = json.dumps(row).encode() + b"\n"
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def todo(
    scale: Scale, names: Sequence[str], passes: Iterable[tuple[int, ...]], rows: Sequence[dict[str, Any]]
) -> list[Job]:
    """Jobs without a row, in their order."""
    jobs = [
        Job(scale, name, seeds)
        for number, seeds in enumerate(passes)
        for name in names
        if not number or name not in scale.once
    ]
    return [job for job in jobs if not any(job.key.items() <= row.items() for row in rows)]


def estimate(jobs: Sequence[Job], rows: Sequence[dict[str, Any]], workers: int) -> str:
    """A line that says how long these take, by the seconds of the rows."""
    known = [row for row in rows if jobs and row["scale"] == jobs[0].scale.name]
    done = sum(row["tokens"] * len(row["seeds"]) * len(row["arm"].partition("/")[0]) for row in known)
    rate = sum(row["seconds"] for row in known) / done if known else SECONDS_A_MILLION / 1e6
    minutes = sum(job.work for job in jobs) * rate / workers / 60
    source = f"by {len(known)} rows" if known else "a guess"
    return f"evidence: {len(jobs)} jobs to do, about {minutes:.0f} minutes with {workers} workers ({source})"


def work(jobs: Sequence[Job], device: str, corpus: Path | None, folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of jobs as they are done."""
    told = partial(print, flush=True)
    if device != "cpu":
        for job in jobs:
            yield carry_out(job, device, corpus, folder, told)
            job.file(folder).unlink(missing_ok=True)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.benchmarks.evidence_arms"])
    pool = ProcessPoolExecutor(WORKERS, context, ready)  # not `with`, which would wait for its jobs after Ctrl-C
    waiting, running = list(jobs), dict[Future[dict[str, Any]], Job]()
    while waiting or running:
        while waiting and len(running) < WORKERS:
            job = waiting.pop(0)
            running[pool.submit(carry_out, job, device, corpus, folder, told)] = job
        for future in wait(running, return_when="FIRST_COMPLETED").done:
            yield future.result()
            running.pop(future).file(folder).unlink(missing_ok=True)
    pool.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True, help="JSON lines of what was run; it is not run again")
    parser.add_argument("--page", type=Path, help="the page; a picture and the rows are written beside it")
    parser.add_argument("--quick", action="store_true", help="the arms of Tables 1 and 2, one seed")
    parser.add_argument("--scale", choices=SCALES, default="0.2M")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--corpus", type=Path, help="a folder of `potluck data build`, for 27M and 178M")
    chosen = parser.parse_args()
    scale = SCALES[chosen.scale]
    if chosen.corpus is None and scale.vocabulary != regime.MODEL.vocab_size:
        parser.error(
            f"scale {scale.name}: has tokens, not bytes; give --corpus FOLDER with sequences of {scale.sequence}"
        )
    names = [name for block in QUICK for name in BLOCKS[block]] if chosen.quick else scale.arms
    folder = chosen.keep.with_suffix(".parts")
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    try:
        with FileLock(folder / "lock", timeout=0):
            for left in folder.glob(f"*{UNFINISHED}"):  # by a kill
                left.unlink()
            rows = read(chosen.keep)
            jobs = todo(scale, names, scale.passes[: 1 if chosen.quick else None], rows)
            if jobs:
                print(estimate(jobs, rows, WORKERS if chosen.device == "cpu" else 1), flush=True)
            for row in work(jobs, chosen.device, chosen.corpus, folder):
                keep(chosen.keep, row)
                print(f"{row['arm']}, seeds {row['seeds']}: {row['own']}, {row['seconds']:.0f} s", flush=True)
            if chosen.page:
                evidence_page.write(chosen.page, read(chosen.keep), SHOWN if scale in SHOWN else (scale,))
    except Timeout:
        parser.error(f"{chosen.keep}: another command writes to it; wait for its end, or name another file")
    except BrokenProcessPool:
        print("evidence: a worker was killed, perhaps for memory; the same command goes on", flush=True)
        return 1
    except KeyboardInterrupt:
        print("evidence: interrupted; the same command goes on", flush=True)
        for worker in multiprocessing.active_children():
            worker.terminate()
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
