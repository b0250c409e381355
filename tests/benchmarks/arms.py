"""Compares what replicas and chains of every kind learn from the same tokens, with small models of bytes.

    python -m tests.benchmarks.arms --keep ROWS.jsonl f/muon c/muon/42:int8:int4 fc/muon/42:int8:int4
    python -m tests.benchmarks.arms --keep ROWS.jsonl --seeds 3 --control
    python -m tests.benchmarks.arms --keep ROWS.jsonl --device cuda --width 256 --rows 32 f/muon c/muon/84:int8:int4

An arm is written REPLICAS/OPTIMIZER[/w[:FORWARD:BACKWARD]][/OPTION,...]. REPLICAS has a letter for each replica: f for
a full one, c for a chain with a stage for each block. All replicas of an arm have the residual width w; 0, the default,
stands for the whole width. A step's rows are divided among the replicas, so that every arm reads the same tokens in as
many steps. Each round ends with the outer step and its sparse update. All arms of a seed have the same text. Options:

    blind      attention sees the present token only (a control)
    first      only the first stage trains `anchor`
    ahead      overlap = 1: a round begins before the one before it is decided (peer/node/training.py)
    lr=X       the learning rate
    eta=X      the outer learning rate
    warm=X     the share of the steps in which the learning rate rises
    k=X        entries of every 4096 that are sent
    values=X   of sparse updates: sym2 (2 bits), ref2 (2 bits as in SparseLoCo's reference code) or fp32
    s=K        cuts of the paper (tests/benchmarks/subspace.py, which lists more options)
    nesterov   dense updates and Nesterov momentum of 0.9 in the outer step (DiLoCo)
    average    H = 1: gradients are averaged over replicas before each step (data parallel)

All seeds and replicas of an arm are computed at once, on a processor or a GPU: the first dimension of every tensor has
an element for each. `check` compares number formats, gradients and the outer step with the product's. Clipping is the
product's, too. One thing differs from a run: attention does not look at the ends of documents.

Loss: nats per held-out token after the last round, as a plain model; `half`: after half of the rounds. Gap: to the arm
of full replicas of width 0 with the same optimizer and seed; mean and standard error over seeds.

Shapes: E elements, B rows, L positions, V vocabulary, D width, W residual width, S stages.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from peer.corpus.text import CorpusReader
from peer.state.outer_optimizer import Outer
from peer.training import model, update
from peer.training.optimizer import MUON_A, MUON_B, MUON_C, MUON_RMS, MUON_STEPS, learning_rate
from protocol.codec import formats, topk
from protocol.run import init, layout
from protocol.run.corpus import slots
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest
from tests.benchmarks import regime
from tests.support.chains import Quantized

VALID_SEQUENCES = 256
TOPK = 32
NESTEROV = 0.9
ALL = slice(None)
CONTROL = ("f/muon", "f/muon/blind", *(f"c/muon/{w}:fp32:fp32" for w in (4, 16, 64)))
EMBED, ANCHOR = "model.embed_tokens.weight", "model.embed_tokens.anchor"
Params = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Arm:
    """One kind of training."""

    replicas: str
    optimizer: str
    width: int = 0
    forward: str = "fp32"
    backward: str = "fp32"
    options: frozenset[str] = frozenset()

    @classmethod
    def of(cls, text: str) -> Arm:
        replicas, optimizer, *more = text.split("/")
        width, wires = 0, ["fp32", "fp32"]
        if more and more[0][0].isdigit():
            first, *found = more.pop(0).split(":")
            width, wires = int(first), found or wires
        return cls(replicas, optimizer, width, *wires, frozenset(name for part in more for name in part.split(",")))

    @property
    def base(self) -> str:
        """The arm that this one is compared with."""
        return f"{'f' * len(self.replicas)}/{self.optimizer}"

    def word(self, name: str, default: str) -> str:
        """The X of an option NAME=X."""
        return next((text.partition("=")[2] for text in self.options if text.startswith(f"{name}=")), default)

    def number(self, name: str, default: float) -> float:
        return float(self.word(name, str(default)))

    @property
    def rank(self) -> int:
        """K, where cuts are the ones of tests/benchmarks/subspace.py; else 0."""
        return int(self.number("s", 0))

    @property
    def is_sparse(self) -> bool:
        """Whether sparse updates are exchanged, not whole ones."""
        return self.options.isdisjoint(("nesterov", "average"))

    def cut_bytes(self, spec: ModelSpec) -> int:
        """Bytes of a token at a cut, both directions."""
        if self.rank:
            return 2 * formats.bytes_per_token("bf16", self.rank)
        return sum(formats.bytes_per_token(f, spec.written) for f in (self.forward, self.backward))

    def compression(self, spec: ModelSpec) -> float:
        """Times fewer bytes at a cut than bf16 of all values."""
        return 2 * formats.bytes_per_token("bf16", spec.d_model) / self.cut_bytes(spec)


class Swarm:
    """The replicas of one arm, for several seeds: element e has seed `seeds[e // R]`, and is replica e % R of it.

    cuts: blocks before which a chain is cut. text: a corpus of the run's sequences; None: bytes.
    """

    STATE = ("theta", "begin", "first", "second", "feedback", "momentum")
    """Attributes that a checkpoint keeps."""

    def __init__(
        self,
        arm: Arm,
        made: Manifest,
        seeds: Sequence[int],
        device: torch.device,
        cuts: Sequence[int] | None = None,
        text: CorpusReader | None = None,
    ) -> None:
        self.arm, self.made, self.spec, self.device = arm, made, made.model, device
        self._text = text
        self.R, self.E, spec = len(arm.replicas), len(seeds) * len(arm.replicas), made.model
        self.seeds = [regime.manifest(seed, arm.optimizer).seed_bytes for seed in seeds]
        self.cuts = tuple(range(1, spec.n_layers) if cuts is None else cuts)
        states = [dict(_named(spec, seed)) for seed in self.seeds for _ in range(self.R)]
        self.theta: Params = {n: torch.stack([torch.from_numpy(x[n]) for x in states]).to(device) for n in states[0]}
        self.is_chain = torch.tensor([float(x == "c") for _ in seeds for x in arm.replicas], device=device)
        has_copies = spec.residual_width and "c" in arm.replicas
        self.copies = [f"{ANCHOR}.{s}" for s in self.cuts] if has_copies else []
        self.parameters: Params = {n: x.clone().requires_grad_() for n, x in self.theta.items()}
        self.parameters |= {n: self.theta[ANCHOR].clone().requires_grad_() for n in self.copies}
        self.first = {n: torch.zeros_like(x) for n, x in self.parameters.items()}
        self.second = {n: torch.zeros_like(x) for n, x in self.parameters.items()}
        self.feedback = {n: torch.zeros_like(x) for n, x in self.parameters.items()}
        self.momentum = {n: torch.zeros_like(x) for n, x in self.theta.items()} if "nesterov" in arm.options else {}
        self.begin = {n: x.detach().clone() for n, x in self.parameters.items()}
        """b of the round under way."""
        self.steps = 0
        self.is_mixed = False
        """Whether products are in bf16."""
        self._angles = model.rope(spec, device)
        self._mask = None
        if "blind" in arm.options:
            length = made.train.sequence
            self._mask = torch.full((length, length), -math.inf, device=device).fill_diagonal_(0.0)

    # --- the model

    def loss(self, ids_EBL: Tensor, through: bool = True, of: slice = ALL) -> Tensor:
        """Mean nats per token [E]. through: with the formats and the copies of the chains' cuts. of: these elements."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_mixed):
            return self._loss(ids_EBL, through, of)

    def _loss(self, ids_EBL: Tensor, through: bool, of: slice) -> Tensor:
        p, spec = {name: x[of] for name, x in self.parameters.items()}, self.spec
        E, B, L = ids_EBL.shape[0], ids_EBL.shape[1], ids_EBL.shape[2] - 1
        at_ET = ids_EBL[..., :-1].reshape(E, -1) + torch.arange(E, device=self.device)[:, None] * spec.vocab_size
        x = rows(p[EMBED], at_ET)
        if spec.residual_width:
            x = torch.cat((x, rows(p[ANCHOR], at_ET)), dim=-1)
        chain, kinds = self.is_chain[of, None, None] > 0, set(self.arm.replicas[of.start or 0 :: of.step or 1])
        for i in range(spec.n_layers):
            if i in self.cuts and through and "c" in kinds:
                behind = self.cut(p, i, x, at_ET, of)
                x = torch.where(chain, behind, x) if "f" in kinds else behind
            x = self._block(p, f"model.layers.{i}.", x, B, L)
        x = self._norm(p, "model.norm.weight", x)
        logits = x @ p["lm_head.weight"].mT
        targets = ids_EBL[..., 1:].reshape(-1)
        nats = functional.cross_entropy(logits.reshape(-1, spec.vocab_size).float(), targets, reduction="none")
        return nats.view(E, -1).mean(1)

    def cut(self, p: Params, i: int, x: Tensor, at_ET: Tensor, of: slice) -> Tensor:
        """X [E, T, D] behind the cut before block i."""
        sent = Quantized.apply(x[..., : self.spec.written], (self.arm.forward, self.arm.backward))
        return torch.cat((sent, rows(p[f"{ANCHOR}.{i}"], at_ET)), dim=-1) if self.copies else sent

    def _norm(self, p: Params, name: str, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], None, self.spec.norm_eps) * p[name][:, None]

    def _block(self, p: Params, prefix: str, x: Tensor, B: int, L: int) -> Tensor:
        spec, (cos, sin) = self.spec, self._angles
        n = self._norm(p, prefix + "input_layernorm.weight", x)
        q, k, v = (
            (n @ p[f"{prefix}self_attn.{name}_proj.weight"].mT).view(-1, L, spec.n_heads, spec.head_dim).transpose(1, 2)
            for name in "qkv"
        )
        q, k = (
            y * cos[:L] + torch.cat((-y[..., y.shape[-1] // 2 :], y[..., : y.shape[-1] // 2]), -1) * sin[:L]
            for y in (q, k)
        )
        seen = functional.scaled_dot_product_attention(
            q.to(v.dtype), k.to(v.dtype), v, attn_mask=self._mask, is_causal=self._mask is None
        )
        seen = seen.transpose(1, 2).reshape(x.shape)
        x = model.plus(x, seen @ p[prefix + "self_attn.o_proj.weight"].mT)
        n = self._norm(p, prefix + "post_attention_layernorm.weight", x)
        gate, up = (n @ p[f"{prefix}mlp.{name}_proj.weight"].mT for name in ("gate", "up"))
        return model.plus(x, (functional.silu(gate) * up) @ p[prefix + "mlp.down_proj.weight"].mT)

    # --- an inner step

    def step(self, ids_EBL: Tensor) -> None:
        """One inner step of all elements."""
        self.loss(ids_EBL).sum().backward()
        train, self.steps = self.made.train, self.steps + 1
        rate = learning_rate(train, self.steps)
        with torch.no_grad():
            gradients = {n: self._gradient(n, x.grad) for n, x in self.parameters.items() if x.grad is not None}
            if "first" in self.arm.options:
                gradients = {n: g for n, g in gradients.items() if n not in self.copies}
            if "average" in self.arm.options:
                gradients = {n: self._mean(g).expand_as(self._by_seed(g)).flatten(0, 1) for n, g in gradients.items()}
            square = sum(g.square().flatten(1).sum(1) for g in gradients.values())
            scale = (train.clip / (square.sqrt() + 1e-6)).clamp(max=1.0)
            for name, g in gradients.items():
                if train.optimizer == "muon" and ".layers." in name and g.dim() == 3:
                    self.muon(name, g * _wide(scale, g), rate)
                else:
                    self.adamw(name, g * _wide(scale, g), rate)
            for x in self.parameters.values():
                x.grad = None

    def _gradient(self, name: str, g: Tensor) -> Tensor:
        """The gradient that is used."""
        return g

    def muon(self, name: str, g: Tensor, rate: float) -> None:
        x, train = self.parameters[name], self.made.train
        self.first[name].lerp_(g, 1 - train.momentum)
        made = orthogonal(g.lerp(self.first[name], train.momentum))
        x.mul_(1 - rate * train.weight_decay)
        x.sub_(made * (MUON_RMS * math.sqrt(max(g.shape[1:])) * rate))

    def adamw(self, name: str, g: Tensor, rate: float) -> None:
        x, train = self.parameters[name], self.made.train
        self.first[name].lerp_(g, 1 - train.beta1)
        self.second[name].lerp_(self._square(name, g), 1 - train.beta2)
        root = (self.second[name] / (1 - train.beta2**self.steps)).sqrt() + 1e-8
        x.mul_(1 - rate * train.weight_decay)
        x.sub_(self.first[name] / (1 - train.beta1**self.steps) / root * rate)

    def _square(self, name: str, g: Tensor) -> Tensor:
        """What AdamW's second moment is the running mean of."""
        return g * g

    # --- a round

    @torch.no_grad()
    def begin_round(self) -> None:
        """All parameters from b, which is θ, or with `ahead` θ of the round before last minus what was moved since."""
        for name, x in self.parameters.items():
            x.copy_(self.begin[name])

    @torch.no_grad()
    def end_round(self) -> None:
        """The outer step: θ -= η Σ sent / R, `anchor` by the updates of all its copies."""
        moved = {name: torch.zeros_like(x) for name, x in self.theta.items()}
        for name, x in self.parameters.items():
            whole, delta = self._whole(name), self.begin[name] - x
            moved[whole] += self._sent(name, delta)
            self.begin[name] = self.theta[whole] - delta
        eta = self.arm.number("eta", self.made.outer.eta)
        for name, x in self.theta.items():
            mean = self._mean(moved[name])
            if self.momentum:
                self._by_seed(self.momentum[name]).mul_(NESTEROV).add_(mean)
                mean = mean + NESTEROV * self._mean(self.momentum[name])
            self._by_seed(x).sub_(eta * mean)
        if "ahead" not in self.arm.options:
            self.begin = {n: self.theta[self._whole(n)].clone() for n in self.parameters}

    def _sent(self, name: str, delta: Tensor) -> Tensor:
        """What is sent of a displacement: a sparse part of the error feedback, or with `nesterov` and `average` all."""
        if not self.arm.is_sparse:
            return delta
        e = self.feedback[name].mul_(self.made.outer.beta).add_(delta)
        if name in self.copies:
            e.mul_(_wide(self.is_chain, e))
        sent = sparse(e, self.made.outer.topk, self.arm.word("values", "sym2"))
        e.sub_(sent)
        return sent

    def _whole(self, name: str) -> str:
        return ANCHOR if name in self.copies else name

    def _by_seed(self, x: Tensor) -> Tensor:
        """A view [seeds, R, ...] of [E, ...]."""
        return x.view(-1, self.R, *x.shape[1:])

    def _mean(self, x: Tensor) -> Tensor:
        """Over replicas [seeds, 1, ...]."""
        return self._by_seed(x).mean(1, keepdim=True)

    def ids(self, first: int, step: int) -> Tensor:
        """The rows [E, B, L + 1] of an inner step of the round whose first slot is `first`."""
        count = self.made.train.rows * self.R
        text = self._text or regime.text(self.made.train.sequence)
        found = [torch.from_numpy(text.slots(seed, slots(first, step, count))) for seed in self.seeds]
        return torch.stack(found).view(self.E, self.made.train.rows, -1).to(self.device)

    @torch.no_grad()
    def evaluate(self, held_out: np.ndarray, through: bool) -> list[float]:
        """The loss of the θ of each seed. through: with the cuts of a chain, if there is one in this arm."""
        for name, x in self.parameters.items():
            x.copy_(self.theta[self._whole(name)])
        of = slice(self.arm.replicas.find("c") if through and "c" in self.arm.replicas else 0, None, self.R)
        total = torch.zeros(len(self.seeds), device=self.device)
        for part in torch.from_numpy(held_out).to(self.device).split(32):
            total += self.loss(part.expand(len(total), -1, -1), through, of) * len(part)
        found: list[float] = (total / len(held_out)).tolist()
        return found

    # --- checkpoints

    def state(self) -> dict[str, Any]:
        """What `restore` needs between two rounds."""
        return {"steps": self.steps, **{name: getattr(self, name) for name in self.STATE}}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        for name in self.STATE:
            here, there = getattr(self, name), state[name]
            for key in here if isinstance(here, dict) else ():
                here[key].copy_(there[key])
            if isinstance(here, Tensor):
                here.copy_(there)


def swarm_of(
    arm: Arm,
    made: Manifest,
    seeds: Sequence[int],
    device: torch.device,
    cuts: Sequence[int] | None = None,
    text: CorpusReader | None = None,
) -> Swarm:
    """The replicas of an arm, with the cuts that it names. Parameters as in Swarm."""
    from tests.benchmarks.subspace import Subspace

    return (Subspace if arm.rank else Swarm)(arm, made, seeds, device, cuts, text)


def rows(table_EVD: Tensor, at_ET: Tensor) -> Tensor:
    """The rows [E, T, D] of tables; `at_ET` counts through all of them."""
    return functional.embedding(at_ET, table_EVD.flatten(0, 1))


def _named(spec: ModelSpec, seed: bytes) -> Iterator[tuple[str, np.ndarray]]:
    """θ(0) by name."""
    for shard in layout.shard_names(spec):
        names = [name for name, _ in layout.tensors(spec, shard)]
        yield from zip(names, init.initial_shard(spec, seed, shard), strict=True)


def _wide(x_E: Tensor, like: Tensor) -> Tensor:
    return x_E.view(-1, *(1 for _ in like.shape[1:]))


def orthogonal(x: Tensor) -> Tensor:
    """As peer/training/optimizer.py, of matrices [E, n, m]."""
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(torch.bfloat16 if x.is_cuda else torch.float32)
    for _ in range(MUON_STEPS):
        gram = x @ x.mT
        x = MUON_A * x + (MUON_B * gram + MUON_C * (gram @ gram)) @ x
    return (x.mT if is_tall else x).float()


def sparse(e: Tensor, keep: int, values: str = "sym2") -> Tensor:
    """Q(TopK(e)) of tensors [E, ...], dense: tiles as protocol/codec has them."""
    tiling = topk.tiling(tuple(e.shape[1:]), keep)
    tiles = torch.stack([update.tiles(x.contiguous(), tiling) for x in e])
    at = tiles.abs().topk(tiling.keep, dim=-1)[1]
    kept = tiles.gather(-1, at)
    if values != "fp32":
        kept = {"sym2": _sym2, "ref2": _ref2}[values](kept.flatten(1)).view_as(kept)
    sent = torch.zeros_like(tiles).scatter_(-1, at, kept)
    across = (tiling.bands, tiling.across, tiling.tr, tiling.tc)
    return sent.view(-1, *across).transpose(2, 3).reshape(e.shape)


def _sym2(v_EN: Tensor) -> Tensor:
    """Values with the two levels of protocol/codec/sparse.py."""
    size = v_EN.abs().double()
    total, count = size.sum(1, keepdim=True), size.shape[1]
    t = lo = hi = total / count
    for _ in range(8):
        low = size <= t
        n, below = low.sum(1, keepdim=True), torch.where(low, size, 0.0).sum(1, keepdim=True)
        hi = torch.where(n < count, (total - below) / (count - n).clamp(min=1), below / n.clamp(min=1))
        lo = torch.where(n > 0, below / n.clamp(min=1), hi)
        t = (lo + hi) / 2
    return torch.where(size > t, hi, lo).float() * v_EN.sign()


def _ref2(v_EN: Tensor) -> Tensor:
    """Values with the four levels of SparseLoCo's reference code: bins of 6 / 4 standard deviations around -2, -1, 0
    and 1 of them from the mean; a bin's level is the mean of its values."""
    centred = v_EN - v_EN.mean(1, keepdim=True)
    width = centred.square().sum(1, keepdim=True).div(max(1, v_EN.shape[1] - 1)).sqrt() * 6 / 4
    bins = (centred / width.clamp(min=1e-30)).round().clamp(-2, 1)
    found = torch.zeros_like(v_EN)
    for number in range(-2, 2):
        is_in = bins == number
        mean = torch.where(is_in, v_EN, 0.0).sum(1, keepdim=True) / is_in.sum(1, keepdim=True).clamp(min=1)
        found = torch.where(is_in, mean, found)
    return found


def check(device: torch.device) -> None:
    """Compares gradients, Muon's step and the outer step of a tiny chain with the product's. Raises AssertionError."""
    from tests.support.chains import Oracle

    arm = Arm.of("c/muon/8:fp32:fp32")
    made = manifest(arm, 1, rows=2, rounds=2, width=32)
    swarm = Swarm(arm, made, [0], device)
    spec, shards = made.model, layout.shard_names(made.model)
    oracle = Oracle(spec, made.train, tuple(range(2, spec.n_layers + 1)))
    outers = {name: Outer(spec, made.outer.codec, made.outer.beta, made.outer.eta) for name in ("", *swarm.copies)}
    theta = {shard: init.initial_shard(spec, swarm.seeds[0], shard) for shard in shards}
    for outer in outers.values():
        outer.theta = theta
    oracle.begin_round(theta)
    swarm.begin_round()
    draw = torch.Generator().manual_seed(0)
    for step in range(made.train.inner_steps):
        ids = torch.randint(spec.vocab_size, (1, made.train.rows, made.train.sequence + 1), generator=draw)
        swarm.step(ids.to(device))
        oracle.forward(0, ids[0])
        oracle.backward(0)
        norm = math.sqrt(sum(value for _, value in oracle.grad_sumsq()))
        oracle.step(step + 1, norm)
    swarm.end_round()
    payloads = {shard: [] for shard in shards}
    for name, outer in outers.items():
        for shard in shards if not name else ("anchor",):
            moved = oracle.displacement(shard)
            if name:
                copy = oracle.copies[swarm.copies.index(name)].detach().numpy()
                moved = [(theta["anchor"][0], copy)]
            outer.accumulate(shard, moved)
            payloads[shard].append((1.0, outer.encode(shard)[0]))
    begin = dict(_named(spec, swarm.seeds[0]))
    for shard in shards:
        outers[""].apply(shard, payloads[shard])
        for (name, _), array in zip(layout.tensors(spec, shard), outers[""].theta[shard], strict=True):
            start = begin[name]
            there, here = array - start, swarm.theta[name][0].cpu().numpy() - start
            off = np.linalg.norm(there - here) / np.linalg.norm(there)
            assert off < 0.02, f"{name}: moves by {off:.3f} otherwise than in the product"


def manifest(arm: Arm, replicas: int, rows: int, rounds: int, width: int) -> Manifest:
    """Of an arm's training."""
    heads, ff = max(2, width // 32), 2 * round(width * 1.375)
    spec = replace(regime.MODEL, d_model=width, n_heads=heads, d_ff=ff, residual_width=arm.width)
    made = regime.manifest(0, arm.optimizer, rounds, spec)
    return with_options(arm, replace(made, train=replace(made.train, rows=rows // replicas)))


def with_options(arm: Arm, made: Manifest) -> Manifest:
    """The recipe with what the arm's options change of it."""
    train, warm = made.train, arm.number("warm", made.train.warmup_steps / made.train.total_steps)
    return replace(
        made,
        outer=replace(made.outer, topk=int(arm.number("k", TOPK))),
        train=replace(train, lr=arm.number("lr", train.lr), warmup_steps=max(1, round(warm * train.total_steps))),
    )


def run(arm: Arm, seeds: Sequence[int], chosen: argparse.Namespace) -> list[dict[str, float]]:
    """Losses of one training by seed: `plain` and `through` after the last round, `half` plain after half of them."""
    made = manifest(arm, len(arm.replicas), chosen.rows, chosen.rounds, chosen.width)
    swarm, began = swarm_of(arm, made, seeds, torch.device(chosen.device)), time.perf_counter()
    inner, held_out = made.train.inner_steps, regime.text().held_out(VALID_SEQUENCES)
    found: list[dict[str, float]] = [{} for _ in seeds]
    for r in range(chosen.rounds):
        swarm.begin_round()
        for step in range(inner):
            swarm.step(swarm.ids(r * inner * chosen.rows, step))
        swarm.end_round()
        if r + 1 in (chosen.rounds // 2, chosen.rounds):
            for into, plain, through in zip(
                found, swarm.evaluate(held_out, False), swarm.evaluate(held_out, True), strict=True
            ):
                into |= {"half": plain} if r + 1 < chosen.rounds else {"plain": plain, "through": through}
    for into in found:
        into["seconds"] = time.perf_counter() - began
    return found


Key = tuple[str, int]
"""An arm and a seed."""


def table(arms: Sequence[str], rows: Mapping[Key, dict[str, float]], width: int) -> None:
    """Prints what there is of these arms."""
    print("| arm | under bf16 | seeds | plain | gap | through | gap |")
    print("|---|---|---|---|---|---|---|")
    for text in arms:
        arm = Arm.of(text)
        seeds = sorted(seed for name, seed in rows if name == text and (arm.base, seed) in rows)
        if not seeds:
            continue
        less = arm.compression(replace(regime.MODEL, d_model=width, residual_width=arm.width))
        cells = [text, f"{less:.1f} x" if "c" in arm.replicas else "", str(len(seeds))]
        for name in ("plain", "through"):
            values = [rows[text, seed][name] for seed in seeds]
            gaps = [value - rows[arm.base, seed]["plain"] for value, seed in zip(values, seeds, strict=True)]
            error = f" ± {statistics.stdev(gaps) / math.sqrt(len(gaps)):.4f}" if len(gaps) > 1 else ""
            cells += [f"{statistics.mean(values):.4f}", f"{statistics.mean(gaps):+.4f}{error}"]
        print(f"| {' | '.join(cells)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*")
    parser.add_argument("--control", action="store_true", help="the arms that show that context matters")
    parser.add_argument("--keep", type=Path, required=True, help="JSON lines of what was run; it is not run again")
    parser.add_argument("--rounds", type=int, default=regime.ROUNDS)
    parser.add_argument("--rows", type=int, default=regime.ROWS, help="of a step, of all replicas together")
    parser.add_argument("--width", type=int, default=regime.MODEL.d_model)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    check(torch.device(chosen.device))
    kind = {"rounds": chosen.rounds, "rows": chosen.rows, "width": chosen.width}
    lines = chosen.keep.read_text().splitlines() if chosen.keep.exists() else []
    rows = {(x["arm"], x["seed"]): x for x in map(json.loads, lines) if kind.items() <= x.items()}
    arms = [*(CONTROL if chosen.control else ()), *chosen.arms]
    wanted = list(dict.fromkeys(name for text in arms for name in (Arm.of(text).base, text)))
    for text in wanted:
        if seeds := [seed for seed in range(chosen.seeds) if (text, seed) not in rows]:
            for seed, found in zip(seeds, run(Arm.of(text), seeds, chosen), strict=True):
                rows[text, seed] = {"arm": text, "seed": seed, **kind, **found}
                with chosen.keep.open("a") as file:
                    file.write(json.dumps(rows[text, seed]) + "\n")
    print(f"bigram entropy of the held-out text: {regime.bigram_entropy():.3f}\n")
    table(wanted, rows, chosen.width)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
