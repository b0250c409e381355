from sweep import *
from s27 import c27
import lzma, concurrent.futures as cf
T0 = time.time(); LIMIT = float(sys.argv[2]); out = sys.argv[1] + "/s27.jsonl"; dev = sys.argv[3] if len(sys.argv) > 3 else "cuda"
with cf.ProcessPoolExecutor(2) as ex:
    parts = list(ex.map(__import__("s27load").load, [f"{sys.path[0]}/w8k.{i}.xz" for i in (0, 1)]))
ids = np.concatenate([np.frombuffer(p, "<u2") for p in parts]); held = np.load(sys.path[0] + "/held8k.npy")
print("ids", len(ids), round(time.time() - T0, 1), flush=True)
arms = [Arm("f", lr=4e-3), Arm("C168ca", "c", k=168, fw="int8", bw="int4", mode="C", cons=1, call=1, lr=4e-3), Arm("A252i", "c", k=252, fw="int4", bw="int4", lr=4e-3), Arm("adam", opt="adamw", lr=2e-3)]
q = dict(rows=4, inner=2, bf16=0) if dev == "cpu" else {}
if dev == "cpu": held = held[:2]
c = c27(name="27M", rounds=120, compile=dev == "cuda", evalrows=8, **q)
lab = Lab(arms, c, ids, held, torch.device(dev))
print("made", round(time.time() - T0, 1), flush=True)
from contextlib import nullcontext
ac = (lambda: torch.autocast("cuda", torch.bfloat16)) if dev == "cuda" else nullcontext
sync = torch.cuda.synchronize if dev == "cuda" else lambda: None
def ev(r, R):
    lab.begin_round_eval(r)
    # evaluate without compiled blocks of other shapes
    bf, lab.blockf = lab.blockf, __import__("lab").block
    p, t = lab.evaluate(False, ac), lab.evaluate(True, ac); lab.blockf = bf
    for i, a in enumerate(arms):
        row = dict(name=a.name, cfg="27M", round=r + 1, rounds=R, tokens=(r + 1) * c["inner"] * c["rows"] * c["L"], plain=round(p[i], 4), through=round(t[i], 4) if "c" in a.reps else None, s=round(time.time() - T0, 1))
        open(out, "a").write(json.dumps(row) + "\n"); print(json.dumps(row), flush=True)
r, marks, R = 0, [], 120 if dev == "cuda" else 2
while r < R:
    lab.begin_round(r)
    for h in range(c["inner"]): lab.step(r * c["inner"] + h + 1, ac)
    lab.end_round(); sync(); marks.append(time.time())
    if r == 3 and dev == "cuda":
        per = (marks[3] - marks[1]) / 2
        R = c["rounds"] = int((LIMIT - 12 - (time.time() - T0)) / per) + 3
        print("per round", round(per, 2), "rounds", R, "mem", torch.cuda.max_memory_allocated() / 1e9, flush=True)
    r += 1
    if r in (R // 4, R // 2, 3 * R // 4, R) and r: ev(r - 1, R)
    if time.time() - T0 > LIMIT: ev(r - 1, R); break
