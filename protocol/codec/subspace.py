"""Basis U of the subspace in which compressed stage boundaries send (Heterogeneous Low-Bandwidth Pre-Training, sec. 3).

A fixed random orthonormal U [d, k_max], the same bits on every machine. QR differs between libraries and devices, so it
is modified Gram-Schmidt, done twice, in float64, where every reduction is a fixed tree of elementwise additions without
BLAS. Columns are nested: the first k of them are the basis for every k.

Shape letters: K columns of U, D model width, P rows of a panel, R rows in the cache.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from protocol.codec import philox
from protocol.codec.topk import Map

Array64 = npt.NDArray[np.float64]
PANEL = 64
"""Rows whose shares are taken from later rows in one go."""
_CACHED = 1 << 15
"""Elements of the rows that stay in the cache."""


def basis(seed: bytes, d: int, k_max: int, run: Map = map) -> npt.NDArray[np.float32]:
    """U [d, k_max] fp32 with orthonormal columns (to fp32 rounding), in about 12 d k_max² operations.

    Raises ValueError unless 0 <= k_max <= d.
    """
    if not 0 <= k_max <= d:
        raise ValueError(f"a basis of {k_max} columns does not fit in {d} dimensions")
    rows_KD = philox.normal_like(seed, "subspace", (k_max, d), 1.0, run=run).astype(np.float64)
    for _ in range(2):
        _orthonormalize(rows_KD, run)
    return np.ascontiguousarray(rows_KD.T.astype(np.float32))


def _orthonormalize(rows_KD: Array64, run: Map) -> None:
    """Modified Gram-Schmidt in place: row j is normalized, then its share is taken from all later rows."""
    k, d = rows_KD.shape
    for first in range(0, k, PANEL):
        panel_PD = rows_KD[first : first + PANEL]
        for j, row_D in enumerate(panel_PD):
            row_D /= np.sqrt(_tree_sum(row_D * row_D))
            _take_shares(panel_PD[j : j + 1], panel_PD[j + 1 :])
        later_KD, step = rows_KD[first + PANEL :], max(1, _CACHED // d)
        parts = [later_KD[at : at + step] for at in range(0, len(later_KD), step)]
        list(run(lambda part_RD, panel_PD=panel_PD: _take_shares(panel_PD, part_RD), parts))  # type: ignore[misc]


def _take_shares(panel_PD: Array64, rows_RD: Array64) -> None:
    """Takes the shares of the panel's rows, in their order, from all `rows_RD`."""
    product_RD = np.empty_like(rows_RD)
    for row_D in panel_PD:
        share_R = _tree_sum(np.multiply(rows_RD, row_D, out=product_RD)).copy()
        np.multiply(share_R[:, None], row_D, out=product_RD)
        rows_RD -= product_RD


def _tree_sum(x: Array64) -> Array64:
    """Sum over the last axis: the upper half is added to the lower half until one is left (the middle one of an odd
    number waits). Changes `x`."""
    n = x.shape[-1]
    while n > 1:
        half = (n + 1) // 2
        x[..., : n - half] += x[..., half:n]
        n = half
    return x[..., 0]
