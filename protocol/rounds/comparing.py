"""What contributions are, measured: their norms, and how much they are like each other. Pure.

The norms are those of all that was sent. The cosines are of whole numbers in float64, of which no sum comes to 2^53, so that none is
rounded; all else is `math.fsum`, or one rounded operation at a time in a stated order. So every machine measures the same.

Of a large model some tiles are compared. The work beside the codec's is then for each contribution that of the norms, and for each
panel of P contributions that of a product of matrices [P, TILES x 4096].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from protocol.codec import philox, sparse, topk
from protocol.codec.sparse import Sparse
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.commit import Part

TILES = 4096
"""Tiles of a model that are compared, about."""
BLOCK = 8
"""Tiles that are compared at a time."""
UNIT = 2.0**25
"""The norm of what is compared of a shard, in whole numbers."""
NORM_TOLERANCE = 1e-6
"""Relative, of a norm that is said: its sender may have added up the squares in another order."""
SUMMED = 1 << 18
"""Squares that are added up at a time."""

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Update:
    """What a contribution sends. `decode`: shard -> its tensors; `norms`: the L2 norms that are said of the shards."""

    decode: Callable[[str], Sequence[Sparse]]
    norms: Mapping[str, float] = field(default_factory=dict)


def update_of(manifest: Manifest, parts: Sequence[Part], read: Callable[[Part], bytes]) -> Update:
    """The update in the payloads of these parts, which are of all shards. `decode` raises PayloadError, and what `read` raises."""
    of = {part.shard: part for part in parts}

    def decode(shard: str) -> Sequence[Sparse]:
        return sparse.decode(manifest.outer.codec, layout.shapes(manifest.model, shard), read(of[shard]))

    return Update(decode, {part.shard: part.norm for part in parts})


def squares(values: npt.NDArray[np.float32]) -> float:
    """The sum of the squares of finite `values`, the same number on every machine: halves are added until one number is left."""
    sums = []
    for start in range(0, values.size, SUMMED):
        part = values[start : start + SUMMED].astype(np.float64)
        np.multiply(part, part, out=part)
        while part.size > 1:
            half = (part.size + 1) // 2
            part[: part.size - half] += part[half:]
            part = part[:half]
        sums.append(float(part[0]))
    return math.fsum(sums)


def norm(tensors: Sequence[Sparse]) -> float:
    """The L2 norm of what is sent of a shard."""
    return math.sqrt(math.fsum(squares(tensor.values) for tensor in tensors))


def is_true(said: float, norm: float) -> bool:
    """Whether a norm is what is said of it."""
    return math.isclose(said, norm, rel_tol=NORM_TOLERANCE)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of M updates, and of E of the round before, which come last: `norms` [M + E], `shards` [M + E][S]. `panels`: who is compared with
    whom, and for each shard their cosines [P, P]; `elements` [S]: how many parameters of each shard are compared."""

    norms: list[float]
    shards: list[list[float]]
    panels: list[tuple[tuple[int, ...], list[Floats]]]
    elements: list[int]


def measure(
    model: layout.ModelSpec, seed: bytes, updates: Sequence[Update], panels: Sequence[Sequence[int]]
) -> Measured:
    """Decodes every shard of every update once, one after the other. `seed`: decides which tiles are compared."""
    squared: list[list[float]] = [[] for _ in updates]
    cosines: list[list[Floats]] = [[] for _ in panels]
    elements: list[int] = []
    one_of = max(1, layout.total_parameters(model) // (TILES * topk.TILE))
    for shard in layout.shard_names(model):
        tilings = [topk.tiling(shape, 1) for shape in layout.shapes(model, shard)]
        chosen = [_chosen(seed, f"{shard}/{i}", tiling.tiles, one_of) for i, tiling in enumerate(tilings)]
        kept: list[Sampled] = []
        for row, update in zip(squared, updates, strict=True):
            tensors = update.decode(shard)
            row.append(math.fsum(squares(tensor.values) for tensor in tensors))
            kept.append(_sampled(tensors, tilings, chosen))
        sizes = [(tiles.size, tiling.n) for tiles, tiling in zip(chosen, tilings, strict=True)]
        elements.append(sum(count * n for count, n in sizes))
        for panel, into in zip(panels, cosines, strict=True):
            into.append(_cosines([kept[i] for i in panel], sizes))
    norms = [math.sqrt(math.fsum(row)) for row in squared]
    shards = [[math.sqrt(square) for square in row] for row in squared]
    return Measured(norms, shards, [(tuple(p), c) for p, c in zip(panels, cosines, strict=True)], elements)


Sampled = list[tuple[Places, Places, Floats]]
"""Of each tensor the entries of the chosen tiles, [tiles, k'] each: which of these tiles, where within it, and the value."""


def _chosen(seed: bytes, name: str, tiles: int, one_of: int) -> Places:
    """Which tiles of a tensor are compared."""
    if one_of == 1:
        return np.arange(tiles)
    return np.sort(np.argsort(philox.bits(seed, name, tiles), kind="stable")[: -(-tiles // one_of)])


def _sampled(tensors: Sequence[Sparse], tilings: Sequence[topk.Tiling], chosen: Sequence[Places]) -> Sampled:
    """The values are whole numbers, and the norm of all is UNIT."""
    parts = []
    for tensor, tiling, tiles in zip(tensors, tilings, chosen, strict=True):
        keep = tensor.index.size // tiling.tiles
        at, values = tensor.index.reshape(-1, keep)[tiles], tensor.values.reshape(-1, keep)[tiles]
        row, col = np.divmod(at, tiling.cols)
        inner = row % tiling.tr * tiling.tc + col % tiling.tc
        parts.append((np.arange(tiles.size)[:, None].repeat(keep, axis=1), inner, values))
    norm = math.sqrt(math.fsum(squares(values.reshape(-1)) for _, _, values in parts))
    # in two steps: the one number may be too large where the other is small
    return [(w, i, np.rint(v.astype(np.float64) / norm * UNIT) if norm else np.zeros(v.shape)) for w, i, v in parts]


def _cosines(rows: Sequence[Sampled], sizes: Sequence[tuple[int, int]]) -> Floats:
    """[P, P]; `sizes`: chosen tiles of each tensor, and elements of a tile."""
    total = np.zeros((len(rows), len(rows)))
    for number, (count, n) in enumerate(sizes):
        for start in range(0, count, BLOCK):
            dense = np.zeros((len(rows), BLOCK * n))
            for i, row in enumerate(rows):
                where, inner, values = (x[start : start + BLOCK] for x in row[number])
                dense[i, (where - start) * n + inner] = values
            total += dense @ dense.T  # whole numbers below 2^53: the same in any order
    return total / UNIT**2
