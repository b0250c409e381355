"""The basis U of the subspace that compressed stage boundaries send (Heterogeneous Low-Bandwidth
Pre-Training, sec. 3).

A fixed random orthonormal U [d, k_max], the same bits on every machine: QR differs between libraries and
devices, so it is modified Gram-Schmidt, done twice, in float64, where every reduction is a fixed tree of
elementwise additions and no BLAS is called. Columns are nested: the first k of them are the basis for every
k.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from protocol.codec import philox

Array64 = npt.NDArray[np.float64]


def basis(seed: bytes, d: int, k_max: int) -> npt.NDArray[np.float32]:
    """U [d, k_max] fp32 with orthonormal columns (to fp32 rounding). Column j is the same for every k_max >
    j.

    Takes about 12 d k_max² floating-point operations. Raises ValueError unless 0 <= k_max <= d.
    """
    if not 0 <= k_max <= d:
        raise ValueError(f"a basis of {k_max} columns does not fit in {d} dimensions")
    rows_KD = philox.normal_like(seed, "subspace", (k_max, d), 1.0).astype(np.float64)
    for _ in range(2):
        _orthonormalize(rows_KD)
    return np.ascontiguousarray(rows_KD.T.astype(np.float32))


def _orthonormalize(rows_KD: Array64) -> None:
    """Modified Gram-Schmidt in place: row j is normalized, then its share is taken from all later rows."""
    for j in range(len(rows_KD)):
        row = rows_KD[j]
        row /= np.sqrt(_tree_sum(row * row))
        later = rows_KD[j + 1 :]
        later -= _tree_sum(later * row)[:, None] * row


def _tree_sum(x: Array64) -> Array64:
    """Sum over the last axis: the upper half is added to the lower half until one is left (the middle one of
    an odd number waits)."""
    n = x.shape[-1]
    while n > 1:
        half = (n + 1) // 2
        x[..., : n - half] += x[..., half:n]
        n = half
    return x[..., 0]
