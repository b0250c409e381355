"""θ(0): the first state of the model, which follows from the manifest's seed."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from protocol.codec.philox import normal_like
from protocol.run import layout
from protocol.run.layout import ModelSpec

INIT_STD = 0.02


def initial_shard(spec: ModelSpec, seed: bytes, shard: str) -> list[npt.NDArray[np.float32]]:
    """One shard of θ(0): norms 1, matrices of std 0.02; those that end a residual branch 0.02 / sqrt(2
    layers)."""
    arrays = []
    for name, shape in layout.tensors(spec, shard):
        if len(shape) == 1:
            arrays.append(np.ones(shape, dtype=np.float32))
            continue
        ends_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = INIT_STD / math.sqrt(2 * spec.n_layers) if ends_branch else INIT_STD
        arrays.append(normal_like(seed, "theta0/" + name, shape, std))
    return arrays
