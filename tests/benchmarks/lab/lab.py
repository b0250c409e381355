"""Arm-batched lab: many small swarms trained at once. Leading axis E = replicas of all arms."""
import argparse, dataclasses, json, math, sys, time
import numpy as np, torch
from torch import Tensor
import torch.nn.functional as F

@dataclasses.dataclass
class Arm:
    name: str
    reps: str = "f"
    opt: str = "muon"
    k: int = 0
    kb: int = 0            # backward rank (0: = k)
    fw: str = "fp32"
    bw: str = "fp32"
    mode: str = "A"        # A | T | L | C(copies) | O(own)
    merge: float = 1.0     # C: factor of the sum of the copies' displacements
    newu: int = 0
    fold: float = 0        # share of S-perp of last writers removed after each round
    pproj: float = 0.0     # share of steps in which full replicas insert the cuts
    pred: int = 0
    lr: float = 0.0
    elr: float = 1.0       # factor of the table's and anchors' rate
    blind: int = 0
    seed: int = 0
    wperp: float = 0       # extra decay of last writers' perp each step
    cons: int = 0           # 1: chains, 2: all: writers before the last cut stay in S
    call: int = 0           # the last blocks too
    axis: int = 0           # S = the first k coordinates
    aux: float = 0          # leak penalty at the cuts
    auxf: int = 0           # full replicas too
    wide: float = 0         # last share of rounds (<1) or every n-th round (>1) at full rank, int8/int4
    anch0: int = 0         # O: anchors start at zero extra / plain has them too

QM = {"fp32": 0., "int8": 127., "int4": 7., "int3": 3., "sym2": -1., "u4": -2.}

class Quant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, fq, bq, maskf, maskb):
        ctx.bq, ctx.mb = bq, maskb
        return quant(z, fq, maskf)
    @staticmethod
    def backward(ctx, g):
        return quant(g, ctx.bq, ctx.mb), None, None, None, None

def quant(z, q, mask):
    z = z * mask
    if bool((q == 0).all()): return z
    amax = z.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    qq = q.clamp(min=1.)
    s = amax / qq
    out = torch.round(z / s) * s
    out = torch.where(q == 0, z, out)
    if bool((q == -1).any()):
        rms = (z.square().sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)).sqrt().clamp(min=1e-30)
        two = torch.where(z.abs() >= 0.982 * rms, 1.510, 0.453) * rms * torch.where(z >= 0, 1., -1.)
        out = torch.where(q == -1, two, out)
    if bool((q == -2).any()):
        big = 1e30 * (1 - mask)
        lo, hi = (z + big).amin(-1, keepdim=True), (z - big).amax(-1, keepdim=True)
        st = ((hi - lo) / 15).clamp(min=1e-30)
        out = torch.where(q == -2, lo + torch.round((z - lo) / st) * st, out)
    return out * mask

def ns(x):
    # [..., n, m], n <= m
    dt = torch.bfloat16 if x.is_cuda else torch.float32
    x = x.to(dt)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        g = x @ x.mT
        x = 3.4445 * x + (-4.7750 * g + 2.0315 * (g @ g)) @ x
    return x.float()

def rope(L, h, dev):
    rate = 1.0 / 10000 ** (torch.arange(0, h, 2, dtype=torch.float32) / h)
    a = torch.outer(torch.arange(L, dtype=torch.float32), rate)
    a = torch.cat((a, a), -1)
    return a.cos().to(dev), a.sin().to(dev)

def rms(x, w):
    return F.rms_norm(x, (x.shape[-1],), None, 1e-5) * w

def rot(x, c, s):
    a, b = x.chunk(2, -1)
    return x * c + torch.cat((-b, a), -1) * s

def block(x, qkvo, gu, down, n1, n2, cos, sin, H, blind, Bn):
    E, T, D = x.shape
    h = rms(x, n1[:, None])
    q, k, v = (h @ qkvo[:, i].mT for i in range(3))
    L = T // Bn
    q, k, v = (t.view(E * Bn, L, H, D // H).transpose(1, 2) for t in (q, k, v))
    q, k = rot(q, cos, sin).to(v.dtype), rot(k, cos, sin).to(v.dtype)
    if blind is not None:
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=blind)
    else:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    o = o.transpose(1, 2).reshape(E, T, D)
    x = x + o @ qkvo[:, 3].mT
    h = rms(x, n2[:, None])
    return x + (F.silu(h @ gu[:, 0].mT) * (h @ gu[:, 1].mT)) @ down.mT

class Lab:
    def __init__(s, arms, cfg, train_ids, held, dev):
        s.arms, s.cfg, s.dev = arms, cfg, dev
        V, D, N, Fd, H = cfg["V"], cfg["D"], cfg["N"], cfg["F"], cfg["H"]
        s.V, s.D, s.N, s.Fd, s.H, s.L = V, D, N, Fd, H, cfg["L"]
        s.C = len(cfg["cuts"]); s.cuts = cfg["cuts"]
        s.el = [(a, m) for a in range(len(arms)) for m in range(len(arms[a].reps))]
        s.E = E = len(s.el); s.R = cfg["R"]
        s.arm_of = torch.tensor([a for a, _ in s.el], device=dev)
        s.first = torch.tensor([next(i for i, (b, m) in enumerate(s.el) if b == a) for a in range(len(arms))], device=dev)
        A = [arms[a] for a, _ in s.el]
        kind = [arms[a].reps[m] for a, m in s.el]
        t = lambda v: torch.tensor(v, device=dev, dtype=torch.float32)
        s.isc = t([1. if c == "c" else 0. for c in kind])
        s.haschain = t([1. if "c" in a.reps else 0. for a in A])
        s.pproj = [a.pproj if c == "f" else 0. for a, c in zip(A, kind)]
        s.k = [a.k or D for a in A]
        r = torch.arange(D)
        s.mask = torch.stack([(r < k).float() for k in s.k]).to(dev)[:, None]          # [E,1,D]
        s.maskb = torch.stack([(r < (a.kb or a.k or D)).float() for a in A]).to(dev)[:, None]
        s.fq, s.bq = (t([QM[getattr(a, n)] for a in A])[:, None, None] for n in ("fw", "bw"))
        s.md = {m: t([1. if a.mode == m and c == "c" else 0. for a, c in zip(A, kind)]) for m in "ATLCO"}
        s.mdO = t([1. if a.mode == "O" else 0. for a in A])
        s.merge = t([a.merge for a in A]); s.fold = t([a.fold for a in A]); s.wperp = t([a.wperp for a in A])
        s.cons = t([1. if (a.cons and c == "c") or a.cons == 2 else 0. for a, c in zip(A, kind)])
        s.consarm = t([1. if a.cons else 0. for a in A])
        s.call = t([float(a.call) for a in A])
        s.aux = t([a.aux if c == "c" or a.auxf else 0. for a, c in zip(A, kind)])
        s.wide = [a.wide for a in A]
        s.mask0, s.maskb0, s.fq0, s.bq0 = s.mask.clone(), s.maskb.clone(), s.fq.clone(), s.bq.clone()
        s.pmode = [a.pred for a in A]
        s.newu = [a.newu for a in A]; s.pred = t([float(a.pred) for a in A])
        s.muon = t([1. if a.opt == "muon" else 0. for a in A])
        s.lr = t([a.lr or {"muon": 6e-3, "adamw": 3e-3}[a.opt] for a in A])
        s.elr = t([a.elr for a in A])
        s.seeds = [a.seed for a in A]
        s.isblind = any(a.blind for a in A)
        s.blind = None
        B = cfg["B"]
        if s.isblind:
            L = s.L
            caus = torch.full((L, L), -math.inf).triu(1)
            eye = torch.full((L, L), -math.inf).fill_diagonal_(0.)
            s.blindE = torch.stack([eye if a.blind else caus for a in A]).to(dev)
        def g(seed): return torch.Generator().manual_seed(1000 + seed)
        by = {}
        for sd in sorted(set(s.seeds)):
            G = g(sd); n = lambda *sh, sc=1.: torch.randn(*sh, generator=G) * 0.02 * sc
            end = 1 / math.sqrt(2 * N)
            q = n(N, 4, D, D); q[:, 3] *= end
            by[sd] = dict(E0=n(V, D), qkvo=q, gu=n(N, 2, Fd, D), down=n(N, D, Fd, sc=end), head=n(V, D),
                          u=torch.linalg.qr(torch.randn(D, D, generator=G, dtype=torch.float64))[0].float())
        st = lambda key: torch.stack([by[sd][key] for sd in s.seeds]).to(dev)
        s.U = st("u")
        for e, a in enumerate(A):
            if a.axis: s.U[e] = torch.eye(D, device=dev)
        p = {}
        p["E0"] = st("E0"); p["head"] = st("head")
        p["qkvo"] = st("qkvo"); p["gu"] = st("gu"); p["down"] = st("down")   # [E,N,...]
        p["norms"] = torch.ones(E, N, 2, D, device=dev); p["norm"] = torch.ones(E, D, device=dev)
        if bool((s.md["A"]).any()): p["A"] = torch.zeros(E, V, D, device=dev)
        s.useB = bool((s.md["C"] + s.md["O"]).any())
        if s.useB: p["B"] = p["E0"][:, None].expand(E, s.C, V, D).clone()
        s.p = {n: x.clone().requires_grad_() for n, x in p.items()}
        s.theta = {n: x.clone() for n, x in p.items() if n != "A"}
        s.m1 = {n: torch.zeros_like(x) for n, x in p.items()}
        s.m2 = {n: torch.zeros_like(x) for n, x in p.items() if n not in ("qkvo", "gu", "down") or not bool(s.muon.all())}
        s.fb = {n: torch.zeros_like(x) for n, x in s.theta.items()}
        s.predt = torch.zeros(E, s.C, V, D, device=dev) if bool(s.pred.any()) else None
        s.cos, s.sin = rope(s.L, D // H, dev)
        s.ids = {sd: train_ids for sd in by}
        s.train_ids = torch.tensor(train_ids.astype(np.int32), device=dev)
        nw = len(train_ids) // (s.L + 1)
        s.starts = {sd: torch.tensor(np.random.default_rng(sd).permutation(nw) * (s.L + 1), device=dev) for sd in by}
        s.held = torch.tensor(held.astype(np.int64), device=dev)
        s.off = (torch.arange(E, device=dev) * V)[:, None]
        s.evaling = False
        s.rng = np.random.default_rng(5)
        s.step_i = 0
        s.constrain(s.theta, s.consarm)
        s.blockf = torch.compile(block, dynamic=False) if cfg.get("compile") else block

    # -- forward
    def loss(s, ids, active, blindm=None):
        """ids [E,B,L+1]; active [E,C]; mean loss [E]"""
        E, B, L1 = ids.shape; L, V, D = L1 - 1, s.V, s.D
        x_ids = ids[:, :, :-1].reshape(E, -1); y = ids[:, :, 1:].reshape(E, -1)
        flat = (x_ids + s.off)
        p = s.p
        x = F.embedding(flat, p["E0"].reshape(E * V, D))
        e0rows = x
        Um = s.U * s.mask.mT.transpose(1, 2)  # [E,D,D] columns beyond k zero
        perp = lambda r: r - (r @ Um) @ Um.mT
        if "A" in p:
            a = F.embedding(flat, p["A"].reshape(E * V, D)) * s.mask
            xa = a @ Um.mT + F.embedding(flat, s.bperp.reshape(E * V, D))
            x = torch.where(s.md["A"][:, None, None] > 0, xa, x)
        frozen = F.embedding(flat, s.theta["E0"].reshape(E * V, D))
        ci = 0; s.pen = 0
        for i in range(s.N):
            if i in s.cuts:
                act = active[:, ci][:, None, None]
                if torch.is_grad_enabled() and bool(s.aux.any()):
                    leak = perp(x - frozen).float().square().mean(-1); ref = x.detach().float().square().mean(-1)
                    s.pen = s.pen + s.aux * (leak / ref).mean(1)
                z = x @ Um
                if s.predt is not None:
                    pr = F.embedding(flat, s.predt[:, ci].reshape(E * V, D)) * s.pred[:, None, None]
                    zq = Quant.apply(z - pr, s.fq, s.bq, s.mask, s.maskb) + pr
                    if torch.is_grad_enabled(): s.updpred(ci, flat, zq.detach())
                else:
                    zq = Quant.apply(z, s.fq, s.bq, s.mask, s.maskb)
                anch = frozen
                if bool(s.md["L"].any()): anch = torch.where(s.md["L"][:, None, None] > 0, e0rows, anch)
                if s.useB:
                    b = F.embedding(flat, p["B"][:, ci].reshape(E * V, D))
                    anch = torch.where((s.md["C"] + s.mdO)[:, None, None] > 0, b, anch)
                xh = zq @ Um.mT + perp(anch)
                x = torch.where(act > 0, xh, x)
                ci += 1
            x = s.blockf(x, p["qkvo"][:, i], p["gu"][:, i], p["down"][:, i], p["norms"][:, i, 0], p["norms"][:, i, 1], s.cos, s.sin, s.H, blindm, B)
        h = rms(x, p["norm"][:, None])
        lg = h @ p["head"].mT
        return F.cross_entropy(lg.float().reshape(-1, V), y.reshape(-1), reduction="none").view(E, -1).mean(1)

    def updpred(s, ci, flat, z):
        E, V, D = s.E, s.V, s.D
        n = torch.zeros(E * V, device=s.dev).index_add_(0, flat.reshape(-1), torch.ones(flat.numel(), device=s.dev))
        sm = torch.zeros(E * V, D, device=s.dev).index_add_(0, flat.reshape(-1), z.reshape(-1, D).float())
        mean = sm / n.clamp(min=1)[:, None]
        two = torch.tensor([m == 2 for m in s.pmode], device=s.dev)
        if bool(two.any()):
            allm = z.float().mean(1)[:, None].expand(E, V, D)
            mean = torch.where(two[:, None, None], allm, mean.view(E, V, D)).reshape(E * V, D)
            n = torch.where(two[:, None], torch.full((E, V), 2., device=s.dev), n.view(E, V)).reshape(-1)
        rate = (1 - 0.95 ** n)[:, None].clamp(max=0.5)
        t = s.predt[:, ci].reshape(E * V, D)
        s.predt[:, ci] = (t + rate * (mean - t)).view(E, V, D)

    def begin_round(s, r):
        with torch.no_grad():
            for e, nu in enumerate(s.newu):
                if nu and r % nu == 0 and r:
                    G = torch.Generator().manual_seed(777 + r)
                    s.U[e] = torch.linalg.qr(torch.randn(s.D, s.D, generator=G, dtype=torch.float64))[0].float().to(s.dev)
            for n, x in s.theta.items():
                s.p[n].copy_(x)
            if any(s.wide):
                R = s.cfg["rounds"]
                on = torch.tensor([(0 < w < 1 and r >= R * (1 - w)) or (w > 1 and r % int(w) == int(w) - 1) for w in s.wide], device=s.dev)[:, None, None]
                if s.evaling: on = on & False
                s.mask = torch.where(on, 1., s.mask0); s.maskb = torch.where(on, 1., s.maskb0)
                s.fq = torch.where(on, 127., s.fq0); s.bq = torch.where(on, 7., s.bq0)
            s.constrain(s.p, s.cons)
            Um = s.U * s.mask
            if "A" in s.p:
                s.p["A"].copy_(s.theta["E0"] @ Um)
                s.bperp = s.theta["E0"] - s.p["A"] @ Um.mT
                s.A0 = s.p["A"].detach().clone()
            if s.useB:
                c = s.md["C"][:, None, None, None]
                s.p["B"].copy_(torch.where(c > 0, s.theta["E0"][:, None].expand_as(s.theta["B"]), s.theta["B"]))
                s.B0 = s.p["B"].detach().clone()

    def batch(s, step):
        rows, R, B = s.cfg["rows"], s.R, s.cfg["B"]
        out = []
        for (a, m), sd in zip(s.el, s.seeds):
            st = s.starts[sd]
            at = torch.arange(step * rows + m * B, step * rows + (m + 1) * B, device=s.dev) % len(st)
            out.append(st[at])
        idx = torch.stack(out)[:, :, None] + torch.arange(s.L + 1, device=s.dev)
        return s.train_ids[idx].long()

    def rate(s, step):
        tot = s.cfg["rounds"] * s.cfg["inner"]; w = tot // 20
        if step <= w: f = step / w
        else: f = 0.1 + 0.45 * (1 + math.cos(math.pi * (step - w) / (tot - w)))
        return s.lr * f

    def step(s, step, autocast):
        E = s.E
        ids = s.batch(step - 1)
        act = s.isc[:, None].expand(E, s.C).clone()
        for e, pp in enumerate(s.pproj):
            if pp and s.rng.random() < pp: act[e] = 1
        mb = cfgmb = s.cfg.get("micro", 1)
        blindm = None
        if s.isblind:
            blindm = s.blindE.repeat_interleave(s.cfg["B"], 0)[:, None]
        tot = 0
        for i in range(mb):
            b = s.cfg["B"] // mb
            with autocast():
                l = s.loss(ids[:, i * b:(i + 1) * b], act, blindm) / mb
            (l + s.pen / mb).sum().backward(); tot = tot + l.detach()
        with torch.no_grad():
            v = lambda t, x: t.view(-1, *([1] * (x.dim() - 1)))
            for n, x in s.p.items():
                if x.grad is None: x.grad = torch.zeros_like(x)
            # trained parameters by mode
            g = {n: x.grad for n, x in s.p.items()}
            if "A" in g:
                g["E0"].mul_(v(1 - s.md["A"], g["E0"])); g["A"].mul_(v(s.md["A"], g["A"])).mul_(s.mask)
            if s.useB: g["B"].mul_(v((s.md["C"] + s.md["O"]).clamp(max=1), g["B"]))
            sq = sum(x.float().square().flatten(1).sum(1) for x in g.values())
            sc = (1 / (sq.sqrt() + 1e-6)).clamp(max=1.)
            lr = s.rate(step); wd = 0.1
            t = s.step_i = s.step_i + 1
            allmuon = bool(s.muon.all())
            mats = {}
            for n, x in s.p.items():
                gr = g[n] * v(sc, x)
                ismat = n in ("qkvo", "gu", "down")
                if ismat:
                    if not allmuon: gm = gr.clone()
                    if bool(s.muon.any()):
                        mats[n] = gr
                    if allmuon: continue
                    gr = gm
                m1, m2 = s.m1[n], s.m2[n]
                if ismat:  # AdamW for its elements only; muon momentum shares m1
                    am = v(1 - s.muon, x)
                    m1a = m1 * 0.9 + gr * 0.1
                    m2.mul_(0.95).addcmul_(gr, gr, value=0.05)
                    up = (m1a / (1 - 0.9 ** t)) / ((m2 / (1 - 0.95 ** t)).sqrt() + 1e-8)
                    x.mul_(1 - v(lr, x) * wd * am).sub_(up * v(lr, x) * am)
                    m1.copy_(torch.where(am > 0, m1a, m1))
                    continue
                m1.mul_(0.9).add_(gr, alpha=0.1); m2.mul_(0.95).addcmul_(gr, gr, value=0.05)
                up = (m1 / (1 - 0.9 ** t)) / ((m2 / (1 - 0.95 ** t)).sqrt() + 1e-8)
                l, on = lr, torch.ones_like(lr); w = torch.full_like(lr, wd)
                if n == "A":
                    sca = s.mask.sum((-1, -2)).div(s.D).rsqrt(); l = lr * sca; w = wd / sca; on = s.md["A"]
                elif n == "B": on = (s.md["C"] + s.md["O"]).clamp(max=1); l = lr * s.elr; w = wd / s.elr
                elif n == "E0":
                    l = lr * torch.where(s.isc > 0, s.elr, torch.ones_like(lr)); w = wd * lr / l
                    if "A" in s.p: on = 1 - s.md["A"]
                x.mul_(1 - v(l * w * on, x)).sub_(up * v(l * on, x))
            if mats:
                mu = 0.95
                for n, gr in mats.items():
                    mm = v(s.muon, gr)
                    s.m1[n].copy_(torch.where(mm > 0, s.m1[n] * mu + gr * (1 - mu), s.m1[n]))
                    mats[n] = gr * (1 - mu) + s.m1[n] * mu
                q = ns(mats["qkvo"])
                gd = ns(torch.cat((mats["gu"].mT, mats["down"][:, :, None]), 2))
                for n, o in (("qkvo", q), ("gu", gd[:, :, :2].mT), ("down", gd[:, :, 2])):
                    x = s.p[n]; mm = v(s.muon, x)
                    x.mul_(1 - v(lr, x) * wd * mm).sub_(o * (0.2 * math.sqrt(max(x.shape[-2:])) * v(lr, x) * mm))
            if bool(s.wperp.any()):
                Um = s.U * s.mask
                for ci, i in enumerate(s.cuts):
                    w = s.p["down"][:, i - 1]; pw = Um @ (Um.mT @ w)
                    f = (s.wperp * s.isc)[:, None, None]
                    s.p["down"][:, i - 1] = w - f * (w - pw)
            s.constrain(s.p, s.cons)
            for x in s.p.values(): x.grad = None
        return tot

    @torch.no_grad()
    def constrain(s, p, on):
        if not bool(on.any()): return
        Um = s.U * s.mask
        last = max(s.cuts)
        f = on[:, None] * torch.where(torch.arange(s.N, device=s.dev)[None] < last, 1., s.call[:, None])
        f = f[:, :, None, None]
        for n, w in (("qkvo", p["qkvo"][:, :, 3]), ("down", p["down"])):
            pw = Um[:, None] @ (Um.mT[:, None] @ w)
            new = w + f * (pw - w)
            if n == "qkvo": p["qkvo"][:, :, 3] = new
            else: p["down"][:] = new

    @torch.no_grad()
    def end_round(s):
        E = s.E
        v = lambda t, x: t.view(-1, *([1] * (x.dim() - 1)))
        Um = s.U * s.mask
        d = {n: s.theta[n] - s.p[n] for n in s.theta}
        if "A" in s.p:
            da = (s.A0 - s.p["A"]) @ Um.mT
            d["E0"] = torch.where(v(s.md["A"], da) > 0, da, d["E0"])
        if s.useB:
            db = s.B0 - s.p["B"]
            dp = db - (db @ Um[:, None]) @ Um.mT[:, None]
            d["E0"] = d["E0"] + v(s.md["C"] * s.merge, d["E0"]) * dp.sum(1)
            d["B"] = db * v(s.mdO, db)
        na = len(s.arms)
        cnt = torch.zeros(na, device=s.dev).index_add_(0, s.arm_of, torch.ones(E, device=s.dev))
        # anchors (O) are contributed by chains only
        for n, x in s.theta.items():
            if n == "B" and not bool(s.mdO.any()): continue
            e = s.fb[n]; e.mul_(0.95).add_(d[n])
            flat = e.reshape(E, -1); P = flat.shape[1]
            c = 4096; keep = s.cfg["topk"]
            if P < c:
                c2 = P; kk = max(1, round(P * keep / 4096))
            else: c2, kk = c, keep
            pad = (-P) % c2
            f2 = F.pad(flat, (0, pad)).view(E, -1, c2)
            idx = f2.abs().topk(kk, -1).indices
            val = f2.gather(-1, idx)
            vv = val.reshape(E, -1); m = vv.abs().double(); there = m > 0; num = there.sum(1, keepdim=True).clamp(min=1); tot = m.sum(1, keepdim=True); tt = tot / num
            lo = hi = tt
            for _ in range(8):
                low = (m <= tt) & there; ct = low.sum(1, keepdim=True); below = torch.where(low, m, 0.).sum(1, keepdim=True)
                hi = torch.where(ct < num, (tot - below) / (num - ct).clamp(min=1), below / ct.clamp(min=1))
                lo = torch.where(ct > 0, below / ct.clamp(min=1), hi); tt = (lo + hi) / 2
            lev = torch.where(m > tt, hi, lo).float(); q = (torch.where(vv < 0, -lev, lev) * there).view_as(val)
            sent = torch.zeros_like(f2).scatter_(-1, idx, q).view(E, -1)[:, :P].view_as(e)
            e.sub_(sent)
            if n == "B":
                w = s.isc * s.mdO; cn = torch.zeros(na, device=s.dev).index_add_(0, s.arm_of, w).clamp(min=1)
                u = torch.zeros(na, *x.shape[1:], device=s.dev).index_add_(0, s.arm_of, sent * v(w, sent))
                u = u / v(cn, u)
            else:
                u = torch.zeros(na, *x.shape[1:], device=s.dev).index_add_(0, s.arm_of, sent)
                u = u / v(cnt, u)
            x.sub_(u[s.arm_of])
        s.constrain(s.theta, s.consarm)
        if bool(s.fold.any()):
            for i in s.cuts:
                w = s.theta["down"][:, i - 1]; pw = Um @ (Um.mT @ w)
                s.theta["down"][:, i - 1] = w - (s.fold * s.haschain)[:, None, None] * (w - pw)

    @torch.no_grad()
    def evaluate(s, through, autocast):
        E = s.E
        act = torch.full((E, s.C), 1. if through else 0., device=s.dev)
        tot = torch.zeros(E, device=s.dev); n = 0
        b = s.cfg.get("evalrows", 8)
        for i in range(0, len(s.held), b):
            ids = s.held[i:i + b][None].expand(E, -1, -1)
            bm = s.blindE.repeat_interleave(ids.shape[1], 0)[:, None] if s.isblind else None
            with autocast(): tot += s.loss(ids, act, bm).float() * ids.shape[1]
            n += ids.shape[1]
        return (tot / n)[s.first].tolist()

    def run(s, out, seconds=1e9, log=None):
        from contextlib import nullcontext
        ac = (lambda: torch.autocast("cuda", torch.bfloat16)) if s.cfg.get("bf16") and s.dev.type == "cuda" else nullcontext
        began = time.time(); R = s.cfg["rounds"]; res = [dict() for _ in s.arms]
        for r in range(R):
            s.begin_round(r)
            for h in range(s.cfg["inner"]):
                tot = s.step(r * s.cfg["inner"] + h + 1, ac)
            s.end_round()
            if r in (0, 2) or (r + 1) % max(1, R // 4) == 0 or r + 1 == R:
                keepp = s.p
                s.begin_round_eval(r)
                pl, th = s.evaluate(False, ac), s.evaluate(True, ac)
                for i, a in enumerate(s.arms):
                    res[i].update({f"plain{r+1}": round(pl[i], 4), f"thr{r+1}": round(th[i], 4) if "c" in a.reps else None, "plain": round(pl[i], 4), "through": round(th[i], 4) if ("c" in a.reps or a.pproj) else None})
                print(f"round {r+1}/{R} {time.time()-began:.1f} s " + " ".join(f"{a.name}.{a.seed}:{res[i]['plain']}/{res[i]['through']}" for i, a in list(enumerate(s.arms))[:6]), flush=True)
        with open(out, "a") as f:
            for i, a in enumerate(s.arms):
                f.write(json.dumps({**dataclasses.asdict(a), "cfg": s.cfg["name"], **res[i], "s": round(time.time() - began, 1)}) + "\n")

    def begin_round_eval(s, r):
        nu, s.newu = s.newu, [0] * s.E
        s.evaling = True; s.begin_round(r); s.newu = nu; s.evaling = False
