"""The discrete cosine transform of tiles (orthonormal DCT-II; of updates in DeMo, Peng et al., 2024, arXiv:2411.19870),
bit for bit the same on every machine.

    C = A_r X A_c^T,    X = A_r^T C A_c,    A_n[k, i] = sqrt((2 - [k = 0]) / n) cos(pi (2 i + 1) k / 2 n)

of a tile X [r, c] of a matrix (protocol/codec/topk.py); the chunks of a vector stay as they are. All products are of
whole numbers in float64 whose sums stay below 2^53, so none is rounded, in whatever order they are added: A_n in units
of 2^-22, a tile in units of 2^-24 of the power of two above its largest magnitude, and A_r X in the same units. What
they are in the end is rounded to fp32.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

from protocol.codec.topk import BLOCK, Array, Map, Tiling

_BITS, _UNITS = 22, 24  # of the matrices, and of a tile


@functools.lru_cache(maxsize=64)
def matrix(n: int) -> npt.NDArray[np.float64]:
    """A_n in units of 2^-22: whole numbers [n, n]."""
    rows = [
        [math.sqrt((1 if k == 0 else 2) / n) * math.cos(math.pi * (2 * i + 1) * k / (2 * n)) for i in range(n)]
        for k in range(n)
    ]
    return np.rint(np.ldexp(np.array(rows), _BITS))


def turned(x_TRC: Array, inverse: bool = False) -> Array:
    """C of tiles X [T, r, c], or X of tiles C."""
    rows, cols = (matrix(side).T if inverse else matrix(side) for side in x_TRC.shape[1:])
    _, exponent_T11 = np.frexp(np.abs(x_TRC).max(axis=(1, 2), keepdims=True))
    whole_TRC = np.rint(np.ldexp(x_TRC.astype(np.float64), _UNITS - exponent_T11))
    whole_TRC = np.rint(np.ldexp(rows @ whole_TRC, -_BITS))
    return np.ldexp(whole_TRC @ cols.T, exponent_T11 - _UNITS - _BITS).astype(np.float32)


def transformed(x: Array, tiling: Tiling, run: Map = map, inverse: bool = False) -> Array:
    """C of all tiles of a tensor, in their places, or X of all C."""
    if x.ndim == 1:
        return x
    new = np.empty(x.shape, dtype=np.float32)

    def job(part: Tiling) -> None:
        bands = slice(part.band, part.band + part.bands)
        old_BArc, new_BArc = (
            a.reshape(-1, tiling.tr, tiling.across, tiling.tc)[bands].transpose(0, 2, 1, 3) for a in (x, new)
        )
        new_BArc[...] = turned(old_BArc.reshape(-1, tiling.tr, tiling.tc), inverse).reshape(new_BArc.shape)

    list(run(job, tiling.cut(BLOCK)))
    return new
