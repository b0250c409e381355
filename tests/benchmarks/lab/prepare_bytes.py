import sys; sys.path.insert(0,'.')
import numpy as np
from tests.benchmarks import regime
t=regime.text(); n=t.index.sequences
ids=t.sequences([range(0,n)]); print(ids.shape, ids.max())
rng=np.random.default_rng(0); ids=ids[rng.permutation(n)][:46000]
np.savez_compressed('bytes.npz', train=ids.astype(np.uint16).reshape(-1), held=t.held_out(256).astype(np.uint16))
