from sweep import *
torch.set_num_threads(1)
I = dict(fw="int4", bw="int4"); X = dict(fw="int8", bw="int4")
a = lambda n, **k: Arm(n, "c", seed=int(sys.argv[1]), mode="C", cons=1, call=1, axis=1, **k)
go([a("x42X", k=42, **X), a("x42i", k=42, **I), a("x22i", k=22, **I)], cfg(), "rows/s5.jsonl", "cpu")
