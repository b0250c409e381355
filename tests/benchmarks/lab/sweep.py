import sys, json, time, torch, numpy as np
from lab import Arm, Lab
torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cudnn.allow_tf32 = True
def cfg(name="b128", R=1, rows=8, rounds=60, **k):
    return dict(name=name, V=257, D=128, N=4, F=352, H=4, L=256, cuts=(1, 2, 3), R=R, rows=rows, B=rows // R, inner=15, rounds=rounds, topk=32) | k
def go(arms, c, out, dev):
    z = np.load(sys.path[0] + "/bytes.npz")
    t = time.time(); torch.manual_seed(0)
    lab = Lab(arms, c, z["train"].reshape(-1), z["held"][:c.get("held", 256)], torch.device(dev))
    lab.run(out); print(c["name"], len(arms), "arms", round(time.time() - t, 1), "s", flush=True)
