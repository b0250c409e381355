"""Compares a full replica with the best plain training loop of the same model, on this machine's processor.

    python -m tests.benchmarks.plain [--only trainer|daemon] [--steps 8] [--rounds 4] [--inner-steps 30]

The model has d = 512 and 8 layers. An inner step has two micro-batches of two rows of 512 tokens, on two threads. The
plain loop has nn.Linear, scaled_dot_product_attention, cross_entropy of all logits, clip_grad_norm_ and fused AdamW,
and nothing else. All figures are medians. Exits with 1 if a ratio is too small.

`trainer`: steps of `StageTrainer` through `run_steps`, as the daemon trains, and steps of the plain loop by turns in
one process. The trainer must reach 0.99 of the plain loop's tokens per second.

`daemon`: a bootstrap node and a volunteer, real processes over real network daemons, with the demo's text in sequences
of 128, as many tokens a step, one thread, and the default outer step. Every few seconds all of them are stopped while
the plain loop does a step in a process of its own, so that both have the same machine at the same time. Tokens per
second are those of whole rounds, from commit to commit, without these pauses. They must reach 0.98 of the plain loop's.
Two more ratios are printed: of the volunteer's steps alone, and of tokens per second of processor time, all processes
of the swarm together. Other work on the machine changes the latter less.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional

from bootstrap.archive import Archive
from peer.chain.pipeline import StageSetup, run_steps
from peer.demo import recipe
from peer.training.trainer import StageTrainer, make_worker
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import OuterSpec, TrainSpec
from tests.e2e import swarms

MODEL = ModelSpec(vocab_size=4096, d_model=512, n_layers=8, n_heads=8, d_ff=1408, context=512)
ROWS, MICRO_BATCHES, THREADS = 2, 2, 2
TRAINER, DAEMON = 0.99, 0.98
POLL, TURN, ROUND = 0.1, 9.0, 600.0
"""Seconds between two looks at the swarm, between two steps of the plain loop, and of a round at most.

The swarm stands still for a step of the plain loop, and peers must not take each other for gone.
"""


def train_spec(inner_steps: int) -> TrainSpec:
    """Returns the training, with `inner_steps` in a round."""
    return TrainSpec(
        inner_steps=inner_steps, micro_batches=MICRO_BATCHES, rows=ROWS, sequence=MODEL.context, lr=3e-4,
        warmup_steps=10, total_steps=10**6,
    )  # fmt: skip


class Layer(nn.Module):
    """One layer of the plain loop's decoder."""

    def __init__(self) -> None:
        super().__init__()
        d, wide = MODEL.d_model, MODEL.d_ff
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(*s, bias=False) for s in ((d, wide), (d, wide), (wide, d)))
        self.first, self.second = nn.RMSNorm(d, MODEL.norm_eps), nn.RMSNorm(d, MODEL.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps [B, L, D] to the same shape."""
        h = self.first(x)
        q, k, v = (f(h).unflatten(-1, (MODEL.n_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))

        def turned(y: Tensor) -> Tensor:
            a, b = y.chunk(2, -1)
            return y * cos + torch.cat((-b, a), -1) * sin

        seen = functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).flatten(-2))
        h = self.second(x)
        out: Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return out


class Plain:
    """The model and its loop. `step` takes the ids of an inner step [rows, L + 1]."""

    def __init__(self) -> None:
        width = MODEL.d_model // MODEL.n_heads
        rates = MODEL.rope_theta ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(MODEL.context), rates).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.embed = nn.Embedding(MODEL.vocab_size, MODEL.d_model)
        self.layers = nn.ModuleList(Layer() for _ in range(MODEL.n_layers))
        self.norm = nn.RMSNorm(MODEL.d_model, MODEL.norm_eps)
        self.head = nn.Linear(MODEL.d_model, MODEL.vocab_size, bias=False)
        self.parameters = [p for part in (self.embed, self.layers, self.norm, self.head) for p in part.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=3e-4, fused=True)

    def step(self, ids: Tensor) -> float:
        """One inner step; its mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part in ids.chunk(MICRO_BATCHES):
            x = self.embed(part[:, :-1])
            for layer in self.layers:
                x = layer(x, self.cos[: x.shape[1]], self.sin[: x.shape[1]])
            logits = self.head(self.norm(x))
            loss = functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return total


def ids_of(rows: int, sequence: int) -> np.ndarray:
    """Returns tokens with the frequencies of words (Zipf's law), [rows, sequence + 1]."""
    weights = 1 / (np.arange(MODEL.vocab_size) + 2.7)
    return np.random.default_rng(1).choice(MODEL.vocab_size, (rows, sequence + 1), p=weights / weights.sum())


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def of_trainer(steps: int) -> bool:
    """Measures steps of both by turns, in one process."""
    spec = train_spec(10**6)
    trainer = StageTrainer(MODEL, spec, layout.shard_names(MODEL))
    rng = np.random.default_rng(0)
    trainer.begin_round(
        {
            shard: [
                np.ones(s, np.float32) if len(s) == 1 else 0.02 * rng.standard_normal(s, np.float32)
                for s in layout.shapes(MODEL, shard)
            ]
            for shard in layout.shard_names(MODEL)
        }
    )
    ids, plain, worker = ids_of(spec.step_rows, MODEL.context), Plain(), make_worker(THREADS)

    async def read(step: int) -> np.ndarray:
        return ids

    numbers = itertools.count(1)

    def ours() -> object:
        setup = StageSetup(trainer=trainer, worker=worker, wires=("int4", "sym2"), timeout=600.0, read=read)
        return asyncio.run(run_steps(setup, first_step=next(numbers), steps=1))

    there = torch.tensor(ids)
    took: list[tuple[float, float]] = []
    for turn in range(steps + 2):
        pair = (ours, lambda: plain.step(there))
        found = [seconds(work) for work in (pair if turn % 2 else pair[::-1])]
        took.append((found[0], found[1]) if turn % 2 else (found[1], found[0]))
    mine, theirs = (statistics.median(column) for column in zip(*took[2:], strict=True))
    rates = [spec.step_tokens / s for s in (mine, theirs)]
    ratio = statistics.median(b / a for a, b in took[2:])
    print(
        f"trainer {rates[0]:.0f} tokens/s, plain loop {rates[1]:.0f}: {ratio:.3f} (median of {steps} pairs)", flush=True
    )
    return ratio >= TRAINER


class Apart:
    """The plain loop in a process of its own, which computes when it is told to. Use as `with`."""

    def __init__(self, rows: int, sequence: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_steps_when_told, args=(theirs, rows, sequence), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Apart:
        self.step()  # memory is taken
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()

    @property
    def pid(self) -> int:
        """Id of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def step(self) -> tuple[float, float]:
        """The seconds of an inner step, and those of the processor."""
        self._ours.send(None)
        took, used = self._ours.recv()
        return float(took), float(used)


def _steps_when_told(told: Connection, rows: int, sequence: int) -> None:
    torch.set_num_threads(1)
    plain, there = Plain(), torch.tensor(ids_of(rows, sequence))
    while True:
        try:
            told.recv()
        except EOFError:
            return
        began = time.process_time()
        took = seconds(lambda: plain.step(there))
        told.send((took, time.process_time() - began))


@dataclass
class Turns:
    """The steps of the plain loop, and the pauses of the swarm for them.

    pauses: (began, ended) in seconds since the epoch.
    steps: seconds, and seconds of the processor.
    """

    pauses: list[tuple[float, float]] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)

    def pause(self, stopped: Sequence[psutil.Process], plain: Apart) -> None:
        """Suspends all these processes for a step of the plain loop."""
        began = time.time()
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        try:
            self.steps.append(plain.step())
        finally:
            for process in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
        self.pauses.append((began, time.time()))

    def without(self, start: float, end: float) -> float:
        """Returns the seconds from start to end outside all pauses."""
        return end - start - sum(max(0.0, min(end, b) - max(start, a)) for a, b in self.pauses)

    def between(self, start: float, end: float) -> tuple[float, float, int]:
        """Returns median seconds and processor seconds of the plain loop's steps in this time, and their number."""
        steps = [step for step, (began, _) in zip(self.steps, self.pauses, strict=True) if start <= began < end]
        took, used = (statistics.median(column) for column in zip(*steps, strict=True))
        return took, used, len(steps)


def _processor_seconds(processes: Sequence[psutil.Process]) -> float:
    """Returns the processor seconds that these processes have used so far."""
    used = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            used += sum(process.cpu_times()[:2])
    return used


def _newest_round(events: Path) -> int:
    """Returns the last decided round by the node's events."""
    lines = [json.loads(line) for line in events.read_text().splitlines() if '"event": "commit"' in line]
    return max((line["round"] for line in lines), default=0)


def of_daemon(rounds: int, inner_steps: int) -> bool:
    """Measures whole rounds of real processes, by turns with the plain loop."""
    sequence = recipe.MODEL.context
    rows = ROWS * MODEL.context // sequence
    train = dataclasses.replace(train_spec(inner_steps), sequence=sequence, rows=rows)
    turns, name = Turns(), "full-0"
    with tempfile.TemporaryDirectory(prefix="potluck-plain-") as folder, Apart(train.step_rows, sequence) as plain:
        out = Path(folder) / "run"
        chosen = swarms.options(out, full=1, rounds=rounds, inner_steps=inner_steps, in_memory=False)
        manifest = dataclasses.replace(swarms.manifest(chosen), model=MODEL, train=train, outer=OuterSpec())
        with swarms.Background(chosen, manifest, rounds * ROUND) as swarm:
            swarm.event(name, lambda e: e.kind == "step", "its first step")
            daemons = [p for p in psutil.Process().children(recursive=True) if p.pid != plain.pid]
            processor, later = {0: _processor_seconds(daemons)}, time.monotonic() + TURN
            while swarm.goes_on(POLL):
                if (newest := _newest_round(out / "bootstrap" / "events.jsonl")) not in processor:
                    processor[newest] = _processor_seconds(daemons)
                if time.monotonic() > later:
                    turns.pause(daemons, plain)
                    later = time.monotonic() + TURN
            swarm.result()
        archive = Archive(out / "bootstrap", manifest)
        decided = {c.round: c.time for c in archive.commits if c.contributions}
        archive.close()
        lines = [json.loads(line) for line in (out / name / "events.jsonl").read_text().splitlines()]
    trained: dict[int, list[float]] = {}
    for line in lines:
        if line["event"] == "step":
            trained.setdefault(line["round"], []).append(turns.without(line["at"] - line["seconds"], line["at"]))
    found: list[tuple[float, float, float]] = []
    for r in sorted(decided):
        if r - 1 in decided and r in trained and {r - 1, r} <= processor.keys():
            whole, steps = turns.without(decided[r - 1], decided[r]), sum(trained[r])
            used, count = processor[r] - processor[r - 1], len(trained[r])
            loop, theirs, turned = turns.between(decided[r - 1], decided[r])
            found.append((count * loop / whole, steps / whole, count * theirs / used))
            print(
                f"round {r}: {whole:.2f} s, of them {steps:.2f} s in {count} steps; {used:.2f} s of processors;"
                f" plain loop, {turned} by turns: {loop:.3f} s a step, {theirs:.3f} s of processors"
            )
    rate, own, efficiency = (statistics.median(column) for column in zip(*found, strict=True))
    print(
        f"daemon: {rate:.3f} of the plain loop's tokens per second over whole rounds, {own:.3f} of its own steps'\n"
        f"tokens of a second of processors, network and node with it: {efficiency:.3f} of the plain loop's"
    )
    return rate >= DAEMON


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["trainer", "daemon"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--inner-steps", type=int, default=30)
    chosen = parser.parse_args()
    torch.set_num_threads(THREADS)
    kept = [of_trainer(chosen.steps)] if chosen.only != "daemon" else []
    kept += [of_daemon(chosen.rounds, chosen.inner_steps)] if chosen.only != "trainer" else []
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
