"""How tensors are cut into tiles, the largest magnitudes of every tile, and work block by block.

A matrix [R, C] is cut into tiles [tr, tc], tr and tc the largest divisors <= 64 of R and C; a vector [L] into chunks of
c elements, c the largest divisor <= 4096 of L. Of every tile of n elements the k' = max(1, floor(n k / 4096 + 1/2))
largest magnitudes are kept; of equal ones, those that come first in the tile. Tiles count in row-major order, and so do
the elements within one: an entry's index is 0 <= i < n. A *band* is a row of tiles.

Shape letters: R rows, C columns, T tiles, N elements of a tile, G groups of a tile, B bands, A tiles across.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from protocol.codec.formats import TILE, TILE_SIDE

BLOCK = 1 << 18  # elements in the cache at a time
MARK = 12  # bits of an index within a tile
JOB = 1 << 20  # elements that one thread works through, with the same buffers
_MAGNITUDE = np.uint32(0x7FFFFFFF)

Array = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]
S = TypeVar("S")
T = TypeVar("T")


class Map(Protocol):
    """`map`, or that of a pool of threads: the jobs of one call may run in any order and at the same time."""

    def __call__(self, work: Callable[[S], T], items: Iterable[S], /) -> Iterable[T]: ...


Empty = Callable[[Sequence[tuple[int, ...]]], list[Array]]
"""Makes contiguous fp32 arrays of these shapes, whose values are not set."""


def in_memory(shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """The usual `Empty`."""
    return [np.empty(shape, dtype=np.float32) for shape in shapes]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of a tensor, or of its bands from `band` on: seen as [rows, cols], tiles [tr, tc], `keep` entries each."""

    rows: int
    cols: int
    tr: int
    tc: int
    keep: int
    band: int = 0

    @property
    def n(self) -> int:
        """Elements of a tile."""
        return self.tr * self.tc

    @property
    def across(self) -> int:
        """Tiles of a band."""
        return self.cols // self.tc

    @property
    def bands(self) -> int:
        return self.rows // self.tr

    @property
    def tiles(self) -> int:
        return self.bands * self.across

    @property
    def entries(self) -> int:
        return self.tiles * self.keep

    @property
    def first(self) -> int:
        """The tensor's number of the first tile."""
        return self.band * self.across

    @property
    def offsets(self) -> Positions:
        """Flat row-major position [n] of each element of the tensor's first tile."""
        row, col = np.divmod(np.arange(self.n), self.tc)
        return row * self.cols + col

    @property
    def corners(self) -> Positions:
        """Flat row-major position [tiles] of each tile's first element in the tensor."""
        band, across = np.divmod(np.arange(self.first, self.first + self.tiles), self.across)
        return band * self.tr * self.cols + across * self.tc

    def cut(self, elements: int) -> list[Tiling]:
        """Returns the same tiles in parts of at most `elements` elements, each at least one band."""
        step = max(1, elements // (self.tr * self.cols)) * self.tr
        return [
            replace(self, rows=min(step, self.rows - row), band=self.band + row // self.tr)
            for row in range(0, self.rows, step)
        ]


@dataclass(frozen=True, slots=True)
class Tiled:
    """Selected entries of a tensor, tile by tile.

    marked [entries]: index within the tile in the MARK lowest bits, if `coded` the code above them
    values: [4] of the codes, or [entries]
    """

    marked: npt.NDArray[np.uint16]
    values: Array
    coded: bool

    @property
    def sent(self) -> Array:
        return self.values.take(self.marked >> np.uint16(MARK)) if self.coded else self.values


@dataclass(frozen=True, slots=True)
class Kept:
    """The selected entries of a tensor: indices within their tile [tiles, keep], ascending, and values [entries]."""

    tiling: Tiling
    index_TK: npt.NDArray[np.uint16]
    values: Array


def _divisor(n: int, limit: int) -> int:
    return next(s for s in range(min(n, limit), 0, -1) if n % s == 0)


@functools.lru_cache(maxsize=4096)
def tiling(shape: tuple[int, ...], k: int) -> Tiling:
    """The tiles of a shape, `k` of every 4096 elements being kept. Raises ValueError if it is no vector or matrix."""
    if len(shape) not in (1, 2) or min(shape) < 1:
        raise ValueError(f"only non-empty vectors and matrices can be sparse, not shape {tuple(shape)}")
    if len(shape) == 1:
        tr, tc = 1, _divisor(shape[0], TILE)
        rows, cols = shape[0] // tc, tc
    else:
        rows, cols = shape
        tr, tc = _divisor(rows, TILE_SIDE), _divisor(cols, TILE_SIDE)
    n = tr * tc
    return Tiling(rows, cols, tr, tc, max(1, (2 * n * k + TILE) // (2 * TILE)))


def select(x_RC: Array, tiling: Tiling, run: Map) -> Kept:
    """The largest magnitudes, in the order of the bits of their fp32; values that are not finite count as larger.

    The k'-th largest of the maxima of groups of columns bounds the tile's k'-th largest from below, so only the
    elements from there on are sorted.
    """
    if tiling.keep == tiling.n:
        x_BrAc = x_RC.reshape(tiling.bands, tiling.tr, tiling.across, tiling.tc)
        every_TN = np.broadcast_to(np.arange(tiling.n, dtype=np.uint16), (tiling.tiles, tiling.n))
        return Kept(tiling, every_TN, x_BrAc.transpose(0, 2, 1, 3).reshape(-1))
    index_TK = np.empty((tiling.tiles, tiling.keep), dtype=np.uint16)
    values = np.empty(tiling.entries, dtype=np.float32)
    fits = (g for g in range(1, tiling.tr) if tiling.tr % g == 0 and g * tiling.tc >= 2 * tiling.keep)
    groups = next(fits, tiling.tr)  # of a column
    offsets, corners = tiling.offsets, tiling.cut(BLOCK)[0].corners

    def job(part: Tiling) -> None:
        blocks = part.cut(BLOCK)
        size = np.empty(blocks[0].rows * tiling.cols, dtype=np.uint32)
        for block in blocks:
            row, first = block.band * tiling.tr, block.first
            x = x_RC[row : row + block.rows].reshape(-1)
            found = _candidates(x, block, groups, size[: x.size])
            tile, index = np.divmod(found, tiling.n)
            kept = x[corners[tile] + offsets[index]]
            chosen = _largest(kept, tile, tiling.keep)
            index_TK[first : first + block.tiles] = index[chosen].reshape(-1, tiling.keep)
            values[first * tiling.keep : (first + block.tiles) * tiling.keep] = kept[chosen]

    list(run(job, tiling.cut(JOB)))
    return Kept(tiling, index_TK, values)


def _candidates(x: Array, tiling: Tiling, groups: int, size: npt.NDArray[np.uint32]) -> Positions:
    """Positions, in tile order, of all elements of the bands `x` that can be among their tile's largest. `size`
    [len(x)] is free for the magnitudes: the bits of their fp32, which have the same order, and NaN behind infinity."""
    bands, tc, A, G = tiling.bands, tiling.tc, tiling.across, groups * tiling.tc
    np.bitwise_and(x.view(np.uint32), _MAGNITUDE, out=size)
    top = size.reshape(bands, groups, -1, tiling.cols).max(axis=2)
    top_TG = top.reshape(bands, groups, A, tc).transpose(0, 2, 1, 3).reshape(-1, G)
    bound = np.partition(top_TG, G - tiling.keep, axis=1)[:, G - tiling.keep]
    bound_BC = np.repeat(bound.reshape(bands, A), tc, axis=1)
    near = size.reshape(bands, tiling.tr, tiling.cols) >= bound_BC[:, None]
    return np.flatnonzero(near.reshape(bands, tiling.tr, A, tc).transpose(0, 2, 1, 3).ravel())


def _largest(kept: Array, tile: Positions, keep: int) -> npt.NDArray[np.bool_]:
    """A mask of the candidates `kept` of the ascending tiles `tile`: their tile's `keep` largest, ties to the first."""
    counts = np.bincount(tile)
    place = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
    size_TN = np.zeros((len(counts), counts.max()), dtype=np.uint32)
    size_TN[tile, place] = kept.view(np.uint32) & _MAGNITUDE
    # The k'-th largest does not depend on the partition's algorithm; the order of equals does.
    least = np.partition(size_TN, -keep, axis=1)[:, -keep, None]
    chosen_TN: npt.NDArray[np.bool_] = size_TN >= least
    if np.count_nonzero(chosen_TN) != keep * len(counts):
        above = size_TN > least
        equal = chosen_TN & ~above
        free = keep - np.count_nonzero(above, axis=1)[:, None]
        chosen_TN = above | (equal & (np.cumsum(equal, axis=1) <= free))
    return chosen_TN[tile, place]
