from sweep import *
out = sys.argv[1] + "/s2.jsonl"; dev = sys.argv[2] if len(sys.argv) > 2 else "cuda"
I = dict(fw="int4", bw="int4"); X = dict(fw="int8", bw="int4")
def one(sd):
    a = lambda n, **k: Arm(n, "c", seed=sd, mode="C", **k)
    r = [Arm("f", seed=sd), Arm("adam", opt="adamw", seed=sd), a("C16", k=16), a("C17i", k=17, **I), a("C40", k=40, **X), a("C60i", k=60, **I), a("C60ipred", k=60, pred=1, **I), a("C60imean", k=60, pred=2, **I), a("C40pred", k=40, pred=1, **X),
     a("C16c", k=16, cons=1), a("C17ic", k=17, cons=1, **I), a("C40c", k=40, cons=1, **X), a("C60ic", k=60, cons=1, pred=1, **I)]
    r += [a(f"C16x{x}", k=16, aux=x) for x in (.003, .03, .3)] + [a(f"C40x{x}", k=40, aux=x, **X) for x in (.003, .03, .3)] + [a("C17ix.03", k=17, aux=.03, **I)]
    r += [a("C17iw.1", k=17, wide=.1, **I), a("C40w.1", k=40, wide=.1, **X), a("C40w5", k=40, wide=5, **X), a("C17iw5", k=17, wide=5, **I), a("C40xw", k=40, wide=.1, aux=.03, **X), a("C17ixw", k=17, wide=.1, aux=.03, **I), a("C40cw", k=40, wide=.1, cons=1, **X)]
    r += [Arm("adamC16", "c", opt="adamw", k=16, mode="C", seed=sd), Arm("adamC40", "c", opt="adamw", k=40, mode="C", seed=sd, **X), a("C16m2", k=16, merge=2.), a("C40m2", k=40, merge=2., **X)]
    return r
def two(sd):
    a = lambda n, r, **k: Arm(n, r, seed=sd, mode="C", **k)
    return [a("f", "f"), a("ff", "ff"), a("fcC40", "fc", k=40, **X), a("ccC40", "cc", k=40, **X), a("fcC17i", "fc", k=17, **I), a("fcC40x", "fc", k=40, aux=.03, **X), a("fcC40X", "fc", k=40, aux=.03, auxf=1, **X), a("fcC17iX", "fc", k=17, aux=.03, auxf=1, **I),
     a("fcC40X3", "fc", k=40, aux=.003, auxf=1, **X), a("fcC60ip", "fc", k=60, pred=1, **I), a("ccC17ix", "cc", k=17, aux=.03, **I), a("fcC40c", "fc", k=40, cons=1, **X), a("fcC40C", "fc", k=40, cons=2, **X)]
def four(sd):
    return [Arm(f"m{x}", "ffff", lr=x * 1e-3, seed=sd) for x in (3, 6, 9, 14)] + [Arm(f"a{x}", "ffff", opt="adamw", lr=x * 1e-3, seed=sd) for x in (1.5, 3, 6)]
if __name__ == "__main__":
    q = dict(rounds=1, inner=2, held=4, rows=4) if dev == "cpu" else {}
    sd = (0,) if dev == "cpu" else (0, 1, 2)
    go([x for s in sd for x in one(s)], cfg(**q), out, dev)
    go([x for s in sd for x in two(s)], cfg(**{"name": "b128r2", "R": 2, **q}), out, dev)
    go([x for s in sd[:2] for x in four(s)], cfg(**{"name": "b128r4", "R": 4, "rows": 16, **q}), out, dev)
