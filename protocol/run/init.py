"""θ(0): the first state of the model, which follows from the manifest's seed."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from protocol.codec.philox import normal_like
from protocol.codec.topk import Empty, Map, in_memory
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest

INIT_STD = 0.02


def initial_shard(
    spec: ModelSpec,
    seed: bytes,
    shard: str,
    *,
    empty: Empty = in_memory,
    run: Map = map,
) -> list[npt.NDArray[np.float32]]:
    """A shard of θ(0): norms 1, matrices of std 0.02, those that end a residual branch 0.02 / sqrt(2 layers)."""
    arrays = empty(layout.shapes(spec, shard))
    for (name, shape), array in zip(layout.tensors(spec, shard), arrays, strict=True):
        if len(shape) == 1:
            array.fill(1)
        else:
            ends_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = INIT_STD / math.sqrt(2 * spec.n_layers) if ends_branch else INIT_STD
            normal_like(seed, "theta0/" + name, shape, std, out=array, run=run)
    return arrays


def initial_state(
    manifest: Manifest, shard: str, *, empty: Empty = in_memory, run: Map = map
) -> list[npt.NDArray[np.float32]]:
    """The state of a shard that follows from the seed: θ(0), and a momentum of 0 if the outer optimizer has one."""
    arrays = initial_shard(manifest.model, manifest.seed_bytes, shard, empty=empty, run=run)
    momentum = empty(manifest.state_shapes(shard)[len(arrays) :])
    for array in momentum:
        array.fill(0)
    return [*arrays, *momentum]
