from sweep import *
out = sys.argv[1] + "/s3.jsonl"; dev = sys.argv[2] if len(sys.argv) > 2 else "cuda"
I = dict(fw="int4", bw="int4"); X = dict(fw="int8", bw="int4")
def one(sd):
    a = lambda n, m="C", **k: Arm(n, "c", seed=sd, mode=m, cons=1, **k)
    return [Arm("f", seed=sd), Arm("fcons40", k=40, cons=2, seed=sd), Arm("adam", opt="adamw", seed=sd), *[a(f"{m}40c", m, k=40, **X) for m in "CTAL"], a("C40ca", k=40, call=1, **X), a("T40ca", "T", k=40, call=1, **X),
      a("C12c", k=12, **X), a("C17icp", k=17, pred=1, **I), a("T17ic", "T", k=17, **I), a("C17ica", call=1, k=17, **I), a("adamC40c", k=40, opt="adamw", **X), a("T60icp", "T", k=60, pred=1, **I)]
def big(sd):
    a = lambda n, m="C", **k: Arm(n, "c", seed=sd, mode=m, cons=1, **k)
    return [Arm("f", seed=sd), a("C80c", k=80, **X), a("T80c", "T", k=80, **X), a("C36ic", k=36, **I), a("C80ca", k=80, call=1, **X), Arm("adam", opt="adamw", seed=sd)]
def long(sd):
    a = lambda n, m="C", **k: Arm(n, "c", seed=sd, mode=m, cons=1, **k)
    return [Arm("f", seed=sd), Arm("fcons40", k=40, cons=2, seed=sd), a("C40c", k=40, **X), a("T40c", "T", k=40, **X), a("C17ic", k=17, **I), a("C40ca", k=40, call=1, **X)]
def two(sd):
    a = lambda n, r, m="C", **k: Arm(n, r, seed=sd, mode=m, **k)
    return [a("f", "f"), a("ff", "ff"), a("fcT40c", "fc", "T", k=40, cons=1, **X), a("fcC40ca", "fc", k=40, cons=1, call=1, **X), a("fcC17ic", "fc", k=17, cons=1, **I)]
if __name__ == "__main__":
    q = dict(rounds=1, inner=2, held=4, rows=4) if dev == "cpu" else {}
    sd = (0,) if dev == "cpu" else (0, 1, 2)
    go([x for s in sd for x in one(s)], cfg(**q), out, dev)
    go([x for s in sd for x in two(s)], cfg(**{"name": "b128r2", "R": 2, **q}), out, dev)
    go([x for s in sd[:2] for x in big(s)], cfg(**{"name": "b256", "D": 256, "F": 704, "H": 8, **q}), out, dev)
    go([x for s in sd[:2] for x in long(s)], cfg(**{"name": "b128x4", "rows": 32, "micro": 2 if dev != "cpu" else 1, **q}), out, dev)
