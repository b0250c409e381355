from sweep import *
def c27(name="27M", R=1, rows=64, **k):
    return dict(name=name, V=8192, D=512, N=6, F=1408, H=8, L=512, cuts=(2, 4), R=R, rows=rows, B=rows // R, inner=15, rounds=60, topk=32, bf16=1) | k
if __name__ == "__main__":
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 8192, 513 * 4000).astype(np.uint16); held = ids[:513 * 8].reshape(8, 513)
    for comp in (0, 1):
        arms = [Arm("f"), Arm("L", "c", k=256, fw="int4", bw="int4", mode="L"), Arm("O", "c", k=256, fw="int4", bw="int4", mode="C"), Arm("A", "c", k=256, fw="int4", bw="int4")]
        lab = Lab(arms, c27(compile=comp, micro=1), ids, held, torch.device("cuda"))
        from contextlib import nullcontext
        ac = lambda: torch.autocast("cuda", torch.bfloat16)
        lab.begin_round(0)
        for i in range(3): lab.step(i + 1, ac)
        torch.cuda.synchronize(); t = time.time()
        for i in range(5): lab.step(i + 4, ac)
        torch.cuda.synchronize(); d = (time.time() - t) / 5
        print("27M compile", comp, "step", round(d, 3), "tokens/s", round(4 * 64 * 512 / d), "mem", round(torch.cuda.max_memory_allocated() / 1e9, 1), flush=True)
