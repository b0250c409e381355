from sweep import *
out = sys.argv[1] + "/s1.jsonl"; dev = sys.argv[2] if len(sys.argv) > 2 else "cuda"
def arms(sd):
    a = lambda n, **k: Arm(n, "c", seed=sd, **k)
    I = dict(fw="int4", bw="int4")
    return [Arm("f", seed=sd), Arm("adam", opt="adamw", seed=sd), Arm("f9", lr=9e-3, seed=sd), Arm("adamA16", "c", opt="adamw", k=16, seed=sd),
     a("A4", k=4), a("A16", k=16), a("A64", k=64), a("A60i", k=60, **I), a("A16i", k=17, **I),
     *[a(f"{m}16", k=16, mode=m) for m in "TLCO"], a("C16.5", k=16, mode="C", merge=.5), a("C16.25", k=16, mode="C", merge=.25),
     *[a(f"{m}60i", k=60, mode=m, **I) for m in "TLCO"], a("C60i.5", k=60, mode="C", merge=.5, **I),
     *[a(f"{m}17i", k=17, mode=m, **I) for m in "LCO"],
     a("L40.84", k=40, mode="L", fw="int8", bw="int4"), a("L80.42", k=80, mode="L", fw="int4", bw="sym2"), a("L60u", k=60, mode="L", fw="u4", bw="int4"),
     a("L60int8", k=60, mode="L", fw="int8", bw="int8"), a("L22.42", k=22, mode="L", fw="int4", bw="sym2"),
     a("T16n", k=16, mode="T", newu=1), a("L16n", k=16, mode="L", newu=1), a("L60in", k=60, mode="L", newu=1, **I), a("L60in4", k=60, mode="L", newu=4, **I),
     a("L16fold", k=16, mode="L", fold=1), a("L60ifold", k=60, mode="L", fold=1, **I), a("L16w", k=16, mode="L", wperp=.05),
     a("L60ipred", k=60, mode="L", pred=1, **I), a("L17ipred", k=17, mode="L", pred=1, **I),
     a("T16e4", k=16, mode="T", elr=4), a("L16e3", k=16, mode="L", elr=3), a("C16e3", k=16, mode="C", elr=3), a("O16e3", k=16, mode="O", elr=3), Arm("Lk128", "c", mode="L", seed=sd, **I)]
go([x for sd in (0, 1) for x in arms(sd)] , cfg(), out, dev)
go([Arm("blind", blind=1), Arm("f")], cfg(), out, dev)
def two(sd):
    I = dict(fw="int4", bw="int4")
    a = lambda n, r, **k: Arm(n, r, seed=sd, **k)
    return [a("f", "f"), a("ff", "ff"), a("fcA16", "fc", k=16), a("ccA16", "cc", k=16), a("fcL16", "fc", k=16, mode="L"), a("fcC16", "fc", k=16, mode="C"), a("fcC16.5", "fc", k=16, mode="C", merge=.5),
      a("fcA60i", "fc", k=60, **I), a("fcL60i", "fc", k=60, mode="L", **I), a("fcC60i", "fc", k=60, mode="C", **I), a("fcT60i", "fc", k=60, mode="T", **I), a("fcL60ip", "fc", k=60, mode="L", pproj=.5, **I), a("fcL17i", "fc", k=17, mode="L", **I), a("fcO60i", "fc", k=60, mode="O", **I), a("ccL60i", "cc", k=60, mode="L", **I)]
go([x for sd in (0, 1) for x in two(sd)], cfg(name="b128r2", R=2), out, dev)
