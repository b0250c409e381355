"""Compares what replicas learn when their updates are summed up by reducers, with small models of bytes.

    python -m tests.benchmarks.reduced --keep ROWS.jsonl --replicas 32 all 256 256/4 256/4/return 256/4/feedback
    python -m tests.benchmarks.reduced --keep ROWS.jsonl --replicas 128 --seeds 3 all 256/4/return sampled=32

An arm is the rule of the outer step. All arms of a seed read the same text in as many steps: one row a replica and
step. Updates have TOPK of 4096 entries at two bits.

    all               every replica adds all updates
    K2[/BITS][/HOW]   of each tile of the updates' weighted sum the K2 largest of 4096 are kept, at so many bits (none:
                      fp32). HOW: `lost` (the default); `return`: each sender takes what was cut of its own update back
                      into its feedback; `feedback`: the reducer has an error feedback of its own
    sampled=M         only M replicas' updates count in a round, in turn; the others take theirs back
    regions=G:K2      the sums of G regions, each made sparse with a feedback of its own, are added

Loss: nats per held-out byte after the last round. Gap: to `all`, of the same seed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from peer.training import update
from protocol.codec import topk
from protocol.run.manifest import Manifest
from tests.benchmarks import arms, regime
from tests.benchmarks.arms import Arm, Swarm, sparse

VALID_SEQUENCES = 256


class Reduced(Swarm):
    """Full replicas whose sum is made by a rule. filled: the share of a sum's entries that are not zero, by round."""

    def __init__(self, rule: str, replicas: int, optimizer: str, made: Manifest, seeds: Sequence[int]) -> None:
        super().__init__(Arm.of(f"{'f' * replicas}/{optimizer}"), made, seeds, torch.device("cpu"))
        name, *more = rule.split("/")
        self.rule, self.value = name.split("=")[0], name.partition("=")[2]
        self.k2 = int(name) if name.isdigit() else 0
        self.bits = next((int(part) for part in more if part.isdigit()), 0)
        self.how = next((part for part in more if not part.isdigit()), "lost")
        self.residual = {n: torch.zeros_like(x[:: self.R]) for n, x in self.theta.items()}
        self.rounds = 0
        self.filled: list[float] = []

    @torch.no_grad()
    def end_round(self) -> None:
        outer, R = self.made.outer, self.R
        full = total = 0
        for name, x in self.parameters.items():
            e = self.feedback[name].mul_(outer.beta).add_(self.theta[name] - x)
            sent = sparse(e, outer.topk)
            e.sub_(sent)
            each = sent.view(-1, R, *x.shape[1:])
            own = e.view(each.shape)
            if self.rule == "sampled":
                m = int(self.value)
                chosen = torch.zeros(R, dtype=torch.bool)
                chosen[(torch.arange(m) + m * self.rounds) % R] = True
                own[:, ~chosen] += each[:, ~chosen]
                mean = each[:, chosen].mean(1)
            elif self.rule == "regions":
                count, k2 = map(int, self.value.split(":"))
                if self.rounds == 0:
                    self.residual[name] = torch.zeros(each.shape[0] * count, *x.shape[1:])
                sums = each.view(-1, R // count, *x.shape[1:]).mean(1)
                held = self.residual[name].mul_(outer.beta).add_(sums)
                made = quantized(held, k2, self.bits)
                held.sub_(made)
                mean = made.view(-1, count, *x.shape[1:]).mean(1)
            else:
                mean = each.mean(1)
                full += int((mean != 0).sum())
                total += mean.numel()
                if self.k2:
                    if self.how == "feedback":
                        mean = self.residual[name].mul_(outer.beta).add_(mean)
                    made = quantized(mean, self.k2, self.bits)
                    if self.how == "feedback":
                        mean.sub_(made)
                    if self.how == "return":
                        own += torch.where((made == 0).unsqueeze(1), each, 0.0)
                    mean = made
            theta = self.theta[name]
            theta.view(each.shape).sub_(outer.eta * mean.unsqueeze(1))
        self.begin = {name: self.theta[name].clone() for name in self.parameters}
        self.rounds += 1
        if total:
            self.filled.append(full / total)


def quantized(x: Tensor, keep: int, bits: int) -> Tensor:
    """The `keep` of 4096 largest of each tile of tensors [E, ...], dense. bits: of a value; its levels are the means of
    classes, which are split at their mean (`sym2`, further on). 0: as they are."""
    tiling = topk.tiling(tuple(x.shape[1:]), keep)
    tiles = torch.stack([update.tiles(each.contiguous(), tiling) for each in x])
    size, at = tiles.abs().topk(tiling.keep, dim=-1)
    level = size
    if bits:
        flat = size.flatten(1)
        level = torch.stack([_levels(each, bits - 1) for each in flat]).view_as(size)
    sent = torch.zeros_like(tiles).scatter_(-1, at, level * tiles.gather(-1, at).sign())
    across = (tiling.bands, tiling.across, tiling.tr, tiling.tc)
    return sent.view(-1, *across).transpose(2, 3).reshape(x.shape)


def _levels(size: Tensor, depth: int) -> Tensor:
    if depth == 0 or size.numel() == 0:
        return torch.full_like(size, float(size.mean())) if size.numel() else size
    above = size > size.mean()
    found = torch.empty_like(size)
    found[above], found[~above] = _levels(size[above], depth - 1), _levels(size[~above], depth - 1)
    return found


def run(rule: str, seed: int, chosen: argparse.Namespace) -> dict[str, float]:
    made = arms.manifest(Arm.of(f"f/{chosen.optimizer}"), 1, 1, chosen.rounds, chosen.width)
    spec = replace(made.model, n_layers=chosen.layers)
    train = replace(
        made.train, rows=1, inner_steps=chosen.inner, lr=chosen.rate or made.train.lr,
        total_steps=chosen.rounds * chosen.inner, warmup_steps=chosen.rounds * chosen.inner // 10,
    )  # fmt: skip
    made = replace(made, model=spec, train=train)
    swarm, began = Reduced(rule, chosen.replicas, chosen.optimizer, made, [seed]), time.process_time()
    held_out = regime.text().held_out(VALID_SEQUENCES)
    found: dict[str, float] = {}
    for r in range(chosen.rounds):
        swarm.begin_round()
        for step in range(chosen.inner):
            swarm.step(swarm.ids(r * chosen.inner * chosen.replicas, step))
        swarm.end_round()
        if r + 1 in (chosen.rounds // 2, chosen.rounds):
            found["half" if r + 1 < chosen.rounds else "loss"] = evaluate(swarm, held_out)
    found["filled"] = statistics.mean(swarm.filled) if swarm.filled else math.nan
    found["seconds"] = time.process_time() - began
    return found


@torch.no_grad()
def evaluate(swarm: Reduced, held_out: np.ndarray) -> float:
    """The loss of θ, by all replicas together: each measures other sequences."""
    swarm.begin_round()
    total = 0.0
    for part in torch.from_numpy(held_out).split(swarm.E):
        padded = torch.cat((part, part[:1].expand(swarm.E - len(part), -1)))
        total += float(swarm.loss(padded.unsqueeze(1), False)[: len(part)].sum())
    return total / len(held_out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rules", nargs="+")
    parser.add_argument("--keep", type=Path, required=True, help="JSON lines of what was run; it is not run again")
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--inner", type=int, default=15)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    names = ("replicas", "rounds", "inner", "width", "layers", "optimizer", "rate")
    kind = {name: getattr(chosen, name) for name in names}
    rows: dict[tuple[str, int], Mapping[str, float]] = {}

    def read() -> None:
        lines = chosen.keep.read_text().splitlines() if chosen.keep.exists() else []
        rows.update({(x["rule"], x["seed"]): x for x in map(json.loads, lines) if kind.items() <= x.items()})

    rules = list(dict.fromkeys(("all", *chosen.rules)))
    for seed in chosen.seeds:
        for rule in rules:
            read()
            if (rule, seed) not in rows:
                row = {"rule": rule, "seed": seed, **kind, **run(rule, seed, chosen)}
                with chosen.keep.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)
    read()
    print("| rule | seeds | loss | gap | % |\n|---|---|---|---|---|")
    for rule in rules:
        seeds = [seed for seed in chosen.seeds if (rule, seed) in rows and ("all", seed) in rows]
        if seeds:
            gaps = [rows[rule, s]["loss"] - rows["all", s]["loss"] for s in seeds]
            error = f" ± {statistics.stdev(gaps) / math.sqrt(len(gaps)):.4f}" if len(gaps) > 1 else ""
            loss = statistics.mean(rows[rule, s]["loss"] for s in seeds)
            gap = statistics.mean(gaps)
            print(f"| {rule} | {len(seeds)} | {loss:.4f} | {gap:+.4f}{error} | {100 * gap / loss:+.2f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
