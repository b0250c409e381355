"""Does a swarm of mixed replicas learn as well as one without compression, at 178M parameters? Three swarms on one card, side by side.

    python -m tests.benchmarks.evidence_gpu --text ids.xz --out rows.jsonl --seconds 500
    python -m tests.benchmarks.evidence_gpu --small --device cpu

Each swarm (arm) has four replicas; none, half or all of them are chains of three stages with k = d/8 in the manifest's
number formats. All arms have the same θ(0), text, slots and U, and are trained round by round side by side, so that what
is there when the time is up can be compared. A round: H inner steps of each replica (peer/training/trainer.py), then
SparseLoCo's outer step.

A chain is computed by one whole model with projector and number formats at the cuts (`tests.support.chains.project_at`, which
tests/unit/peer/training/test_exact_chains.py proves to be what a chain computes); its embedding is trained as coordinates A
(docs/adr/0002). What differs from a run, for speed: T_perp is made once a round for the whole vocabulary, and θ, feedback
and the outer step live on the card. `check_outer_step` compares that step with peer/state/outer_optimizer.py at every
start.

--text: xz of little-endian uint16 token ids, of which the first HELD_OUT windows of sequence + 1 tokens are held out.
Loss: nats per token there, after each round, of θ as a plain model, and `chain` of θ as a chain computes it. A line of
JSON for each round and arm is appended to --out; arms that are complete there are not run again. With --seconds, the
third round tells how many rounds there is time for, and the learning rate's schedule ends with the last of them.
"""

from __future__ import annotations

import argparse
import functools
import json
import lzma
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peer.chain import quantize
from peer.state.outer_optimizer import Outer
from peer.training import trainer as training
from peer.training import update
from peer.training.subspace import Boundary, without_subspace
from peer.training.trainer import StageTrainer
from protocol.codec import subspace, topk
from protocol.run import corpus, init, layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import ChainSpec, OuterSpec, TrainSpec
from tests.benchmarks.gpu import MODELS
from tests.support.chains import project_at

ARMS = {"none": 0, "half": 2, "all": 4}
"""How many of the replicas are compressed chains."""
REPLICAS = 4
STAGES = 3
WIRES = (ChainSpec().forward, ChainSpec().backward)
SEED = b"evidence"
HELD_OUT = 48
FITTED = 3
"""Rounds after which the number of rounds is fitted to the time; the learning rate still warms up."""
EMBED = "model.embed_tokens.weight"
Weights = dict[str, Tensor]
Row = dict[str, Any]


# --- the outer step


@functools.cache
def _places(shape: tuple[int, ...], k: int, device: torch.device) -> tuple[topk.Tiling, Tensor, Tensor]:
    tiling = topk.tiling(shape, k)
    return tiling, torch.tensor(tiling.offsets, device=device), torch.tensor(tiling.corners, device=device)[:, None]


def sym2(v: Tensor) -> Tensor:
    """The kept values as two bits say them (protocol/codec/sparse.py, `sym2`)."""
    m = v.abs().double()
    total, t = m.sum(), m.mean()
    lo = hi = t
    for _ in range(8):
        low = m <= t
        count, below = low.sum(), torch.where(low, m, 0.0).sum()
        hi = torch.where(count < m.numel(), (total - below) / (m.numel() - count), below / count)
        lo = torch.where(count > 0, below / count, hi)
        t = (lo + hi) / 2
    level = torch.where(m > t, hi, lo).float()
    return torch.where(v < 0, -level, level)


@torch.no_grad()
def outer_step(
    theta: Weights, feedback: Sequence[Weights], moved: Callable[[int, str], Tensor], spec: OuterSpec
) -> None:
    """e = β e + δ, e -= sent and θ -= η Σ sent / M, in place, as `Outer` does it; `moved`: δ of a replica's tensor."""
    weight = float(np.float32(1 / len(feedback)))
    for name, x in theta.items():
        tiling, offsets, corners = _places(tuple(x.shape), spec.topk, x.device)
        total = torch.zeros_like(x)
        for m, of_replica in enumerate(feedback):
            e = of_replica[name]
            e.mul_(spec.beta).add_(moved(m, name))
            at = (offsets[update.select(update.tiles(e, tiling), tiling.keep).long()] + corners).reshape(-1)
            sent = sym2(e.view(-1)[at])
            e.view(-1)[at] -= sent
            total.view(-1)[at] += weight * sent
        x.sub_(total.mul_(spec.eta))


def check_outer_step(device: torch.device, topk_: int) -> None:
    """Two rounds of two replicas of a tiny model, here and in `Outer`. Raises AssertionError."""
    spec, outer = MODELS["small"], OuterSpec(topk=topk_)
    names, shards = _names(spec), layout.shard_names(spec)
    rng = np.random.default_rng(0)

    def random() -> dict[str, list[np.ndarray]]:
        return {s: [rng.standard_normal(x, np.float32) for x in layout.shapes(spec, s)] for s in shards}

    def on_device(host: dict[str, list[np.ndarray]]) -> Weights:
        arrays = [array for shard in shards for array in host[shard]]
        return {name: torch.tensor(array, device=device) for name, array in zip(names, arrays, strict=True)}

    hosts = [Outer(spec, outer.codec, outer.beta, outer.eta) for _ in range(2)]
    start = random()
    theta, feedback = (
        on_device(start),
        [{name: torch.zeros_like(x) for name, x in on_device(start).items()} for _ in hosts],
    )
    hosts[0].theta = start
    for _ in range(2):
        deltas = [random() for _ in hosts]
        there = [on_device(delta) for delta in deltas]
        outer_step(theta, feedback, lambda m, name, there=there: there[m][name], outer)
        for shard in shards:
            for host, delta in zip(hosts, deltas, strict=True):
                host.accumulate(shard, [(x, None) for x in delta[shard]])
            hosts[0].apply(shard, [(0.5, host.encode(shard)[0]) for host in hosts])
    for here, host in ((theta, hosts[0].theta), (feedback[1], hosts[1].feedback)):
        for name, expected in on_device(host).items():
            assert torch.allclose(here[name], expected, rtol=1e-6, atol=1e-7), f"{name}: not what Outer computes"


# --- a swarm


def _names(spec: ModelSpec) -> list[str]:
    return [name for shard in layout.shard_names(spec) for name, _ in layout.tensors(spec, shard)]


class Replica:
    """A trainer of the whole model that starts each round from weights on the card. `u_DK`: it computes as a compressed chain does."""

    def __init__(self, spec: ModelSpec, train: TrainSpec, device: torch.device, u_DK: np.ndarray | None = None) -> None:
        rank = 0 if u_DK is None else u_DK.shape[1]
        shards = layout.shard_names(spec)
        self.trainer = StageTrainer(spec, train, shards, rank=rank, basis=u_DK, device=str(device))
        self.held: Weights = dict(self.trainer.stage.named_parameters())
        self.u_DK = None if u_DK is None else torch.tensor(u_DK, device=device)
        if rank:
            project_at(self.trainer, [1 + spec.n_layers * i // STAGES for i in range(1, STAGES)], wires=WIRES)

    @torch.no_grad()
    def load(self, theta: Weights, table: Boundary | None) -> None:
        for name, parameter in self.held.items():
            parameter.copy_(theta[EMBED] @ self.u_DK if name == training.COORDINATES else theta[name])
        self.trainer.stage.boundary = table if self.u_DK is not None else None

    @torch.no_grad()
    def moved(self, theta: Weights, name: str) -> Tensor:
        """δ = θ - what was trained; of a chain's embedding (A0 - A) U^T."""
        if name == EMBED and self.u_DK is not None:
            return (theta[EMBED] @ self.u_DK - self.held[training.COORDINATES]) @ self.u_DK.T
        return theta[name] - self.held[name]

    def train(self, first_step: int, steps: Iterable[Tensor]) -> Tensor:
        """One inner step with each of `steps` [B, L+1]; the mean of their losses."""
        losses = []
        for step, ids in enumerate(steps, start=first_step):
            losses.append(self.trainer.forward(0, ids))
            self.trainer.backward(0)
            self.trainer.step(step, math.sqrt(sum(value for _, value in self.trainer.grad_sumsq())))
        return torch.stack(losses).mean()


class Swarm:
    """One arm. `plain`: a full replica, of which `evaluate` borrows the model."""

    def __init__(self, bench: Bench, chains: int) -> None:
        self.bench, device = bench, bench.device
        self.theta = {name: x.clone() for name, x in bench.theta.items()}
        ranks = [None] * (REPLICAS - chains) + [bench.u_DK] * chains
        self.replicas = [Replica(bench.spec, bench.train, device, u_DK) for u_DK in ranks]
        self.feedback = [{name: torch.zeros_like(x) for name, x in self.theta.items()} for _ in ranks]
        self.load()

    def load(self) -> None:
        chain, te_VD, table = self.replicas[-1], self.theta[EMBED], None
        if chain.u_DK is not None:
            form = chain.trainer.stage.form
            table = Boundary(chain.u_DK, te_VD, without_subspace(te_VD, chain.u_DK, form), form)
        for replica in self.replicas:
            replica.load(self.theta, table)

    def round(self, r: int) -> Row:
        bench, start = self.bench, time.perf_counter()
        first, train = r * bench.train.inner_steps + 1, bench.train
        losses = []
        for m, replica in enumerate(self.replicas):
            slot = (r * REPLICAS + m) * train.inner_steps * train.rows
            steps = (bench.windows(corpus.slots(slot, h, train.rows)) for h in range(train.inner_steps))
            losses.append(replica.train(first, steps))
        loss = float(torch.stack(losses).mean())
        trained = time.perf_counter()
        outer_step(self.theta, self.feedback, lambda m, name: self.replicas[m].moved(self.theta, name), bench.outer)
        self.load()
        tokens = REPLICAS * train.inner_steps * train.step_tokens
        bench.synchronize()
        stepped = time.perf_counter()
        row = {"tokens": (r + 1) * tokens, **self.losses(), "train": round(loss, 4)}
        seconds = {"tokens/s": round(tokens / (trained - start)), "outer, s": round(stepped - trained, 2)}
        return row | seconds | {"took, s": round(time.perf_counter() - start, 2)}

    def losses(self) -> Row:
        self.bench.plain.load(self.theta, None)
        found = {"loss": round(self.bench.plain.trainer.evaluate(self.bench.held_out), 4)}
        if (chain := self.replicas[-1]).u_DK is not None:
            found["chain"] = round(chain.trainer.evaluate(self.bench.held_out), 4)
        return found


class Bench:
    """What the arms share."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.device = torch.device(chosen.device)
        self.spec = MODELS["small" if chosen.small else "178M"]
        self.train = TrainSpec(
            inner_steps=chosen.inner_steps, micro_batches=1, rows=chosen.rows, sequence=self.spec.context, lr=chosen.lr,
            warmup_steps=chosen.warmup, total_steps=chosen.rounds * chosen.inner_steps,
        )  # fmt: skip
        self.outer = OuterSpec(topk=chosen.topk)
        check_outer_step(self.device, chosen.topk)
        k = self.spec.d_model // 8
        self.u_DK = subspace.basis(SEED, self.spec.d_model, k)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            arrays = [
                array
                for shard in layout.shard_names(self.spec)
                for array in init.initial_shard(self.spec, SEED, shard, run=pool.map)
            ]
        self.theta: Weights = {
            name: torch.tensor(x, device=self.device) for name, x in zip(_names(self.spec), arrays, strict=True)
        }
        self.plain = Replica(self.spec, self.train, self.device)
        ids, length = read_text(chosen.text, self.spec), self.train.sequence
        held = HELD_OUT * (length + 1)
        self.held_out = ids[:held].reshape(HELD_OUT, length + 1)
        self.ids = torch.tensor(ids[held:].astype(np.int32), device=self.device)
        self.starts = np.random.default_rng(0).permutation((len(ids) - held - 1) // length) * length

    def windows(self, at: range) -> Tensor:
        """The windows [B, L+1] of these slots, on the card; the text begins anew after its last one."""
        starts = torch.tensor(self.starts[np.array(at) % len(self.starts)], device=self.device)
        return self.ids[starts[:, None] + torch.arange(self.train.sequence + 1, device=self.device)].long()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @torch.no_grad()
    def compile_formats(self) -> None:
        """Here, because the first one who needs those of gradients is a thread of autograd."""
        shape = (self.train.rows, self.train.sequence, self.u_DK.shape[1])
        for wire in WIRES:
            quantize.decode(quantize.encode(torch.ones(shape, device=self.device), wire), shape, wire, self.device)

    def last(self, swarms: Iterable[Swarm], rounds: int) -> None:
        """The schedule of the learning rate ends with round `rounds`."""
        for replica in (replica for swarm in swarms for replica in swarm.replicas):
            replica.trainer.train = replace(replica.trainer.train, total_steps=rounds * self.train.inner_steps)


def read_text(path: Path | None, spec: ModelSpec) -> np.ndarray:
    """Token ids, as far as the file goes, which may be cut off; without one, words of four tokens in random order."""
    if path is not None:
        whole = lzma.LZMADecompressor().decompress(path.read_bytes())
        return np.frombuffer(whole, dtype="<u2", count=len(whole) // 2) % spec.vocab_size
    rng = np.random.default_rng(0)
    words = rng.integers(0, spec.vocab_size, (40, 4))
    return words[rng.integers(0, len(words), 5000)].reshape(-1)


# --- the run


def run(chosen: argparse.Namespace, rows: list[Row]) -> None:
    """Appends what was measured to `rows` and --out."""
    start = time.perf_counter()
    done = {row["arm"]: row["rounds"] for row in rows if row["round"] == row["rounds"]}
    rounds = max(done.values(), default=chosen.rounds)
    arms = [arm for arm in chosen.arms if arm not in done]
    if not arms:
        return
    chosen.rounds = rounds
    bench = Bench(chosen)
    bench.compile_formats()
    swarms = {arm: Swarm(bench, ARMS[arm]) for arm in arms}
    print(f"ready after {time.perf_counter() - start:.1f} s; {rounds} rounds; boundaries {WIRES}", flush=True)
    took: list[float] = []
    for r in range(chosen.rounds):
        if r >= rounds or (took and time.perf_counter() - start + took[-1] > chosen.seconds):
            break
        began = time.perf_counter()
        for arm, swarm in swarms.items():
            row = {"arm": arm, "round": r + 1, "rounds": rounds, **swarm.round(r)}
            rows.append(row)
            print(json.dumps(row), flush=True)
            if chosen.out:
                with chosen.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        took.append(time.perf_counter() - began)
        if r + 1 == FITTED and not done and math.isfinite(chosen.seconds):
            left = 0.96 * (chosen.seconds - (time.perf_counter() - start))
            rounds = min(rounds, FITTED + max(1, int(left / statistics.mean(took[1:]))))
            bench.last(swarms.values(), rounds)
            print(f"time for {rounds} rounds of {took[-1]:.1f} s", flush=True)
    if bench.device.type == "cuda":
        print(f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB", flush=True)


def table(rows: Sequence[Row]) -> None:
    """Losses after each round, and how far the compressed arms are behind."""
    found = {(row["arm"], row["round"]): row for row in rows}
    print("\n| round | tokens | none | half | behind | half, chain | all | behind | all, chain | behind |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for r in sorted({r for _, r in found}):
        none, half, full = (found.get((arm, r), {}) for arm in ARMS)
        base = none.get("loss")

        def behind(loss: float | None, base: float | None = base) -> str:
            return "" if loss is None or base is None else f"{100 * (loss / base - 1):+.2f} %"

        cells = [
            none.get("loss"), half.get("loss"), behind(half.get("loss")), half.get("chain"), full.get("loss"),
            behind(full.get("loss")), full.get("chain"), behind(full.get("chain")),
        ]  # fmt: skip
        tokens = next(row["tokens"] for row in (none, half, full) if row)
        print(f"| {r} | {tokens:,} | " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="token ids; --small can do without")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=40, help="at most, with --seconds")
    parser.add_argument("--inner-steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=8, help="sequences of an inner step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--topk", type=int, default=64)
    chosen = parser.parse_args()
    if not chosen.small and chosen.text is None:
        parser.error("--text: the ids of the text are needed; make them as the help says")
    if FITTED * chosen.inner_steps > chosen.warmup and math.isfinite(chosen.seconds):
        parser.error(
            f"--warmup {chosen.warmup}: the rounds are fitted during the warm-up; give at least {FITTED * chosen.inner_steps}"
        )
    there = chosen.out.read_text().splitlines() if chosen.out and chosen.out.exists() else []
    rows: list[Row] = [json.loads(line) for line in there]
    run(chosen, rows)
    table(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
