"""Measures training on an accelerator: speed, where time goes, memory, chains, and the end of a round.

    python -m tests.benchmarks.gpu --out FILE                       # all parts on the first CUDA card
    python -m tests.benchmarks.gpu replica profile --model 178M --out FILE
    python -m tests.benchmarks.gpu --device cpu --model small       # the same commands on a machine without a card

Parts:

    machine    rates of matrix products and copies
    replica    tokens a second through `run_steps`, as the daemon trains; MFU; peak memory
    profile    the parts of an inner step's time
    stage      the work of a chain's stage besides its blocks: number formats, copies, waits
    chain      four stages on one card
    round      from a round's last inner step to the first one of the next
    short      training after memory ran out

Each part and model appends a line of JSON to --out. A line that is there already is not measured again, so that an
interrupted run goes on. The table is printed at the end.

MFU: 6 N + 12 L d s operations a token (PaLM, arXiv 2204.02311; N: all parameters but the embedding, which is looked up)
over the largest rate of bf16 matrix products (fp32 without CUDA) that `machine` measured on the card.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peer.chain import quantize
from peer.chain.pipeline import StageSetup, run_steps
from peer.node.training import encode_update
from peer.state.outer_optimizer import Outer
from peer.training.trainer import StageTrainer, make_worker
from protocol.codec.formats import Codec
from protocol.planning import memory
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec
from tests.benchmarks import gpu_stage
from tests.support import tiny
from tests.support.chains import run_chain, split_shards

MODELS = {
    "178M": ModelSpec(
        vocab_size=32_000, d_model=1024, n_layers=9, n_heads=8, d_ff=2688, context=2048, residual_width=336
    ),
    "512M": ModelSpec(
        vocab_size=32_000, d_model=1536, n_layers=12, n_heads=12, d_ff=5440, context=2048, residual_width=504
    ),
    "small": ModelSpec(vocab_size=512, d_model=64, n_layers=4, n_heads=2, d_ff=128, context=64, residual_width=16),
}
"""The first two are those of SparseLoCo (arXiv 2508.15706)."""
MODELS |= {f"{name}-preset": MODELS[name] for name in ("178M", "512M")}
"""With the small micro-batches of the presets of `potluck init`."""
ROWS = {"178M": 16, "512M": 8, "small": 2, "178M-preset": 4, "512M-preset": 2}
"""Of a micro-batch."""
MICRO_BATCHES = {"178M-preset": 16, "512M-preset": 32}
"""Of a step, where they are not 4."""
STAGES = 4
STAGE_MICRO_BATCHES = 16
"""Micro-batches of a step of `stage`, at least: as many as keep a chain of four busy."""
ROUNDS, ROUND_TOPK, ROUND_THREADS = 4, 32, 16
"""Ends of rounds that are timed; entries of every 4096 that are sent (as in SparseLoCo); threads of the host."""
WIRES = ("int8", "int4")
KINDS = (
    ("attention", ("flash", "fmha", "attention", "cudnn_generated", "sdpa")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "xmma", "cublas", "mm")),
    ("optimizer", ("multi_tensor", "adam", "foreach")),
    ("copies", ("memcpy", "memset")),
)
Report = dict[str, Any]


class Bench:
    """One device, one model."""

    def __init__(self, device: str, model: str) -> None:
        self.device, self.name, self.spec = torch.device(device), model, MODELS[model]
        self.train = TrainSpec(
            inner_steps=10**6, micro_batches=MICRO_BATCHES.get(model, 4), rows=ROWS[model], sequence=self.spec.context,
            lr=1e-4, warmup_steps=10, total_steps=10**7,
        )  # fmt: skip

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], times: int = 5) -> float:
        """Returns the median seconds of `work`, after one call that warms up."""
        taken = []
        for _ in range(times + 1):
            self.synchronize()
            start = time.perf_counter()
            work()
            self.synchronize()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])

    def theta(self) -> dict[str, list[np.ndarray]]:
        """Returns random values, which are drawn faster than the initial values of a run. The speed is the same."""
        rng = np.random.default_rng(0)
        return {
            shard: [
                np.ones(shape, np.float32) if len(shape) == 1 else 0.02 * rng.standard_normal(shape, np.float32)
                for shape in layout.shapes(self.spec, shard)
            ]
            for shard in layout.shard_names(self.spec)
        }

    def ids(self, rows: int) -> np.ndarray:
        """Returns tokens with the frequencies of words (Zipf's law)."""
        weights = 1 / (np.arange(self.spec.vocab_size) + 2.7)
        shape = (rows, self.train.sequence + 1)
        return np.random.default_rng(1).choice(self.spec.vocab_size, shape, p=weights / weights.sum())

    # --- parts

    def machine(self) -> Report:
        dtype, n = (torch.bfloat16, 8192) if self.cuda else (torch.float32, 512)
        a, b = (torch.randn(n, n, device=self.device, dtype=dtype) for _ in range(2))
        times = 20 if self.cuda else 3

        def products() -> None:
            for _ in range(times):
                a @ b

        flops = 2 * n**3 * times / self.seconds(products)
        host = torch.empty(1 << 28 if self.cuda else 1 << 20, dtype=torch.uint8)
        there = host.to(self.device)
        copied = {"to the device": lambda: there.copy_(host), "to the host": lambda: host.copy_(there)}
        rates = {f"{way}, GB/s": round(len(host) / self.seconds(work) / 1e9, 2) for way, work in copied.items()}
        if self.cuda:
            host = host.pin_memory()
            rates |= {f"{w}, pinned, GB/s": round(len(host) / self.seconds(c) / 1e9, 2) for w, c in copied.items()}
        name = torch.cuda.get_device_name() if self.cuda else "cpu"
        return {
            "name": name, "torch": torch.__version__, "cores": os.cpu_count(), "matmul TFLOP/s": round(flops / 1e12, 3),
            **rates,
        }  # fmt: skip

    def replica(self, rate: float) -> Report:
        """`rate`: operations a second of `machine`."""
        trainer = StageTrainer(self.spec, self.train, layout.shard_names(self.spec), device=str(self.device))
        theta = self.theta()
        loading = self.seconds(lambda: trainer.begin_round(theta), times=1)
        ids, worker = self.ids(self.train.step_rows), make_worker(os.cpu_count() or 1)

        async def read(step: int) -> np.ndarray:
            return ids

        def steps(first: int, count: int) -> list[float]:
            setup = StageSetup(trainer=trainer, worker=worker, wires=WIRES, timeout=600.0, read=read)
            return [r.seconds for r in asyncio.run(run_steps(setup, first_step=first, steps=count))]

        first = steps(1, 1)[0]
        steps(2, 2)
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        took = steps(4, 8)
        step = statistics.median(took)
        tokens = self.train.step_tokens / step
        spec = self.spec
        params = layout.total_parameters(spec) - layout.parameters(spec, "embed")
        operations = 6 * params + 12 * spec.n_layers * spec.d_model * spec.context
        manifest = tiny.manifest(model=spec, train=self.train)
        report = {
            "tokens/s": round(tokens), "MFU": round(tokens * operations / rate, 4), "step, s": round(step, 4),
            "slowest step, s": round(max(took), 4), "first step, s": round(first, 2), "load, s": round(loading, 3),
            "formula, GB": round(memory.stage_memory(manifest, 0, spec.n_layers, self.device.type) / 1e9, 2),
        }  # fmt: skip
        if self.cuda:
            report["peak, GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
            report["reserved, GB"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
        return report

    def profile(self) -> Report:
        from torch.profiler import ProfilerActivity, profile

        trainer = StageTrainer(self.spec, self.train, layout.shard_names(self.spec), device=str(self.device))
        trainer.begin_round(self.theta())
        ids = torch.tensor(self.ids(self.train.step_rows), device=self.device).chunk(self.train.micro_batches)
        numbers = itertools.count(1)

        def step() -> None:
            for micro, part in enumerate(ids):
                trainer.forward(micro, part)
                trainer.backward(micro)
            trainer.step(next(numbers), sum(x for _, x in trainer.grad_sumsq()) ** 0.5)

        whole = self.seconds(step)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        with profile(activities=activities) as found:
            step()
            self.synchronize()
        spent: dict[str, float] = {}
        others: list[tuple[float, str]] = []
        for event in found.key_averages():
            us = event.self_device_time_total if self.cuda else event.self_cpu_time_total
            if self.cuda and event.device_type != torch.autograd.DeviceType.CUDA:
                continue
            name = event.key.lower()
            kind = next((kind for kind, words in KINDS if any(word in name for word in words)), "other")
            spent[kind] = spent.get(kind, 0.0) + us / 1e6
            if kind == "other":
                others.append((round(us / 1e3, 2), event.key[:70]))
        busy = sum(spent.values())
        return {
            "step, s": round(whole, 4),
            **{f"{kind}, %": round(100 * s / whole, 1) for kind, s in sorted(spent.items())},
            "gaps, %": round(100 * (1 - busy / whole), 1),
            "largest others, ms": sorted(others, reverse=True)[:8],
        }

    def stages(self) -> list[tuple[str, ...]]:
        """Returns the shards of four stages."""
        blocks = self.spec.n_layers // STAGES
        return split_shards([1 + blocks * i for i in range(1, STAGES)], self.spec)

    def stage(self) -> Report:
        """Measures the second of four stages in its chain and without one (tests/benchmarks/gpu_stage.py).

        Number formats are measured by themselves, too.
        """
        shards, theta = self.stages()[1], self.theta()
        count = max(self.train.micro_batches, STAGE_MICRO_BATCHES)
        train = replace(self.train, micro_batches=count)
        chained = StageTrainer(self.spec, train, shards, device=str(self.device))
        whole = gpu_stage.Bare(self.spec, train, shards, device=str(self.device))
        for trainer in (chained, whole):
            trainer.begin_round(theta)
        ids = self.ids(train.step_rows).reshape(count, train.rows, -1)
        feed = gpu_stage.feed_of(chained, ids, WIRES)
        found = gpu_stage.medians(chained, whole, feed, rounds=3, steps=4)
        form = chained.stage.form

        def formats() -> None:
            for raw, kind in zip(feed.bodies, WIRES, strict=True):
                quantize.encode(quantize.decode_measured(raw, feed.shape, kind, self.device, form)[0], kind)

        computing, copying = self._card_seconds(formats)
        shares = {"number formats": computing, "copies": copying}
        percent = {name: 100 * count * seconds / found["step, s"] for name, seconds in shares.items()}
        return {
            **{name: round(seconds, 5) for name, seconds in found.items()},
            "w": self.spec.written, "micro-batches": count,
            "overhead, %": round(100 * (1 - found["blocks alone, s"] / found["step, s"]), 2),
            **{f"{name}, by themselves, % of a step": round(share, 2) for name, share in percent.items()},
            "these, %": round(sum(percent.values()), 2),
        }  # fmt: skip

    def _card_seconds(self, work: Callable[[], object], times: int = 20) -> tuple[float, float]:
        """Returns the card's seconds of computing and of copying for `work`. On a processor all counts as computing."""
        if not self.cuda:
            return self.seconds(work, times), 0.0
        from torch.profiler import ProfilerActivity, profile

        work()
        self.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(times):
                work()
            self.synchronize()
        events = [(e.key.lower(), e.self_device_time_total / 1e6 / times) for e in found.key_averages()]
        copying = sum(seconds for name, seconds in events if name.startswith(("memcpy", "memset")))
        return sum(seconds for _, seconds in events) - copying, copying

    def chain(self) -> Report:
        """Compares four stages in one process on one card, run by the code of peers, with a full replica."""
        theta, ids = self.theta(), self.ids(self.train.step_rows)
        stages = [StageTrainer(self.spec, self.train, shards, device=str(self.device)) for shards in self.stages()]
        whole = StageTrainer(self.spec, self.train, layout.shard_names(self.spec), device=str(self.device))
        for trainer in (*stages, whole):
            trainer.begin_round(theta)

        async def read(step: int) -> np.ndarray:
            return ids

        def steps(trainers: list[StageTrainer], first: int, count: int) -> float:
            running = run_chain(trainers, steps=count, first_step=first, wires=WIRES, depth=STAGES, read=read)
            return statistics.median(report.seconds for report in asyncio.run(running)[0])

        took = {}
        for name, trainers in (("whole", [whole]), ("chain", stages)):
            steps(trainers, 1, 1)
            took[name] = steps(trainers, 2, 5)
        return {
            "w": self.spec.written,
            "a step of the chain, s": round(took["chain"], 4), "of a full replica, s": round(took["whole"], 4),
            "overhead, %": round(100 * (took["chain"] / took["whole"] - 1), 2),
        }  # fmt: skip

    def round(self) -> Report:
        """Measures the time from the last inner step of a full replica's round to the first of the next.

        The update, the commit of two replicas' updates and the load of the new state run as in the daemon
        (peer/node/training.py, rounds.py). Reports the first time, which makes buffers, the median of the others, and
        the seconds of the update on the host alone.
        """
        trainer = StageTrainer(self.spec, self.train, layout.shard_names(self.spec), device=str(self.device))
        threads, abreast = min(os.cpu_count() or 1, ROUND_THREADS), memory.ABREAST if self.cuda else 1
        outer = Outer(self.spec, Codec(ROUND_TOPK), 0.95, 1.0, threads, abreast=abreast)
        outer.theta = self.theta()
        shards, scratch = layout.shard_names(self.spec), list[np.ndarray]()
        taken: dict[str, list[float]] = {name: [] for name in ("load", "update", "apply", "all")}
        sent = 0

        def timed(name: str, work: Callable[[], Any]) -> Any:
            start = time.perf_counter()
            done = work()
            self.synchronize()
            taken[name].append(time.perf_counter() - start)
            return done

        def update() -> dict[str, bytes]:
            return dict(zip(shards, (payload for payload, _ in encode_update(outer, trainer, shards)), strict=True))

        def apply(payloads: dict[str, bytes]) -> None:
            outer.apply_all({shard: [(0.5, payload)] * 2 for shard, payload in payloads.items()}, scratch)

        trainer.begin_round(outer.theta)
        for _ in range(ROUNDS):
            self._learn(trainer)
            start = time.perf_counter()
            payloads = timed("update", update)
            trainer.release()
            timed("apply", lambda payloads=payloads: apply(payloads))
            timed("load", lambda: trainer.begin_round(outer.theta))
            taken["all"].append(time.perf_counter() - start)
            sent = sum(map(len, payloads.values()))
        self._learn(trainer)
        start = time.perf_counter()
        for shard in shards:
            outer.accumulate(shard, trainer.displacement(shard))
            outer.encode(shard)
        alone = time.perf_counter() - start
        return {
            **{f"{name}, s": round(statistics.median(s[1:]), 3) for name, s in taken.items()},
            **{f"{name} first, s": round(s[0], 3) for name, s in taken.items()},
            "update by the host alone, s": round(alone, 3),
            "payload, MB": round(sent / 1e6, 2),
            "worked on": self.device.type if trainer.on_device(shards[0]) is not None else "host",
        }  # fmt: skip

    def _learn(self, trainer: StageTrainer) -> None:
        """Changes the parameters in place of inner steps."""
        with torch.no_grad():
            for parameter in trainer.stage.parameters():
                parameter += 1e-3 * torch.randn_like(parameter)
        self.synchronize()

    def short(self) -> Report:
        """Asks for more memory than there is. Reports the error, and the loss of the training after it."""
        trainer = StageTrainer(self.spec, self.train, layout.shard_names(self.spec), device=str(self.device))
        trainer.begin_round(self.theta())
        ids = torch.tensor(self.ids(self.train.rows))
        losses = []
        said = "not provoked"
        if self.cuda:
            free, _ = torch.cuda.mem_get_info()
            hog = torch.empty(max(0, free - (1 << 30)), dtype=torch.uint8, device=self.device)
            torch.cuda.empty_cache()
            try:
                trainer.forward(0, ids.repeat(4, 1))
                trainer.backward(0)
            except RuntimeError as error:
                said = type(error).__name__
            trainer.reset()
            del hog
            torch.cuda.empty_cache()
        losses.append(trainer.forward(0, ids).item())
        trainer.backward(0)
        return {"raised": said, "loss after": round(losses[0], 3)}


PARTS = ("machine", "replica", "profile", "stage", "chain", "round", "short")


def measure(chosen: argparse.Namespace) -> list[Report]:
    there: list[Report] = []
    if chosen.out and chosen.out.exists():
        there = [json.loads(line) for line in chosen.out.read_text().splitlines()]
    for model in chosen.model:
        bench, rate = Bench(chosen.device, model), 0.0
        for part in PARTS:
            found = next((r for r in there if r["part"] == part and r["model"] in (model, "-")), None)
            if found is None and (part in (chosen.parts or PARTS) or part == "machine"):
                start = time.perf_counter()
                result = bench.replica(rate) if part == "replica" else getattr(bench, part)()
                found = {"part": part, "model": "-" if part == "machine" else model, **result}
                found["took, s"] = round(time.perf_counter() - start, 1)
                there.append(found)
                print(json.dumps(found), flush=True)
                if chosen.out:
                    with chosen.out.open("a") as file:
                        file.write(json.dumps(found) + "\n")
                if bench.cuda:
                    torch.cuda.empty_cache()
            if part == "machine" and found is not None:
                rate = 1e12 * found["matmul TFLOP/s"]
    return there


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=["178M", "512M"])
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    for row in measure(chosen):
        head = f"{row.pop('part')} {row.pop('model')}"
        print(f"| {head} | " + "; ".join(f"{name}: {value}" for name, value in row.items()) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
