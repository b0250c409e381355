"""What contributions are, measured: their norms, and how much they are like each other. Pure.

The norms are those of all that was sent. The cosines are of whole numbers in float64, of which no sum comes to 2^53, so that none is
rounded; all else is `math.fsum`, or one rounded operation at a time in a stated order. So every machine measures the same.

Of a large model some tiles are compared. The work beside the codec's is then for each contribution that of the norms, and for each
panel of P contributions that of a product of matrices [P, n], where n counts the entries of TILES tiles that several of them send.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from protocol.codec import philox, sparse, topk
from protocol.codec.sparse import PayloadError, Sparse
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
        payload = read(of[shard])
        if len(payload) != of[shard].size:
            raise PayloadError(f"payload: has {len(payload)} bytes, not {of[shard].size} as is said; refused")
        return sparse.decode(manifest.outer.codec, layout.shapes(manifest.model, shard), payload)

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
    """Of M updates: `norms` [M], `shards` [M][S], and why some are `broken`: they cannot be decoded. `panels`: who is compared with whom,
    and for each shard their cosines [P, P]; `elements` [S]: how many parameters of each shard are compared."""

    norms: list[float]
    shards: list[list[float]]
    broken: dict[int, str]
    panels: list[tuple[tuple[int, ...], list[Floats]]]
    elements: list[int]


def measure(
    model: layout.ModelSpec,
    seed: bytes,
    updates: Sequence[Update],
    panels: Sequence[Sequence[int]],
    tiles: int = TILES,
) -> Measured:
    """Decodes every shard of every update once, one after the other. `seed`: decides which tiles are compared; `panels`: each update is in
    one of them; `tiles`: about so many are compared, or all."""
    squared: list[list[float]] = [[] for _ in updates]
    broken: dict[int, str] = {}
    one_of = max(1, layout.total_parameters(model) // (tiles * topk.TILE))
    cut = [_Cut(model, seed, shard, one_of) for shard in layout.shard_names(model)]
    cosines: list[list[Floats]] = [[] for _ in panels]
    for panel, into in zip(panels, cosines, strict=True):
        for shard in cut:
            rows: list[Sampled | None] = []
            for i in panel:
                try:
                    tensors = updates[i].decode(shard.name)
                except PayloadError as error:
                    broken.setdefault(i, f"{shard.name}: {error}")
                    tensors = None
                squared[i].append(0.0 if tensors is None else math.fsum(squares(x.values) for x in tensors))
                rows.append(None if tensors is None else shard.sampled(tensors))
            into.append(shard.cosines(rows))
    norms = [math.sqrt(math.fsum(row)) for row in squared]
    shards = [[math.sqrt(square) for square in row] for row in squared]
    found = [(tuple(panel), c) for panel, c in zip(panels, cosines, strict=True)]
    return Measured(norms, shards, broken, found, [shard.elements for shard in cut])


Sampled = list[tuple[Places, Places, Floats]]
"""Of each tensor the entries of the chosen tiles, [tiles, k'] each: which of these tiles, where within it, and the value."""


class _Cut:
    """A shard's tensors, and the tiles of each that are compared."""

    def __init__(self, model: layout.ModelSpec, seed: bytes, name: str, one_of: int) -> None:
        self.name = name
        self._tilings = [topk.tiling(shape, 1) for shape in layout.shapes(model, name)]
        self._chosen = [_chosen(seed, f"{name}/{i}", t.tiles, one_of) for i, t in enumerate(self._tilings)]

    @property
    def elements(self) -> int:
        return sum(tiles.size * t.n for tiles, t in zip(self._chosen, self._tilings, strict=True))

    def sampled(self, tensors: Sequence[Sparse]) -> Sampled:
        """The values are whole numbers, and the norm of all is UNIT."""
        parts = []
        for tensor, tiling, tiles in zip(tensors, self._tilings, self._chosen, strict=True):
            keep = tensor.index.size // tiling.tiles
            at, values = tensor.index.reshape(-1, keep)[tiles], tensor.values.reshape(-1, keep)[tiles]
            row, col = np.divmod(at, tiling.cols)
            inner = row % tiling.tr * tiling.tc + col % tiling.tc
            parts.append((np.arange(tiles.size)[:, None].repeat(keep, axis=1), inner, values))
        norm = math.sqrt(math.fsum(squares(values.reshape(-1)) for _, _, values in parts))
        # in two steps: the one number may be too large where the other is small
        return [(w, i, np.rint(v.astype(np.float64) / norm * UNIT) if norm else np.zeros(v.shape)) for w, i, v in parts]

    def cosines(self, rows: Sequence[Sampled | None]) -> Floats:
        """[P, P]; 0 of what is not there. All sums are of whole numbers below 2^53: the same in any order."""
        total, own = np.zeros((len(rows), len(rows))), np.zeros(len(rows))
        there = [(i, row) for i, row in enumerate(rows) if row is not None]
        for number, (tiles, tiling) in enumerate(zip(self._chosen, self._tilings, strict=True)):
            for start in range(0, tiles.size if there else 0, BLOCK):
                part = slice(start, start + BLOCK)
                cut = [(i, row[number]) for i, row in there]
                place = np.concatenate(
                    [((w[part] - start) * tiling.n + inner[part]).ravel() for _, (w, inner, _) in cut]
                )
                value = np.concatenate([values[part].ravel() for _, (_, _, values) in cut])
                who = np.concatenate([np.full(values[part].size, i) for i, (_, _, values) in cut])
                own += np.bincount(who, value * value, len(rows))
                several = np.bincount(place) > 1  # an entry that one alone sends adds to no product of two
                kept, column = several[place], np.cumsum(several) - 1
                dense = np.zeros((len(rows), int(several.sum())))
                dense[who[kept], column[place[kept]]] = value[kept]
                total += dense @ dense.T
        np.fill_diagonal(total, own)
        return total / UNIT**2


def _chosen(seed: bytes, name: str, tiles: int, one_of: int) -> Places:
    """Which tiles of a tensor are compared."""
    if one_of == 1:
        return np.arange(tiles)
    return np.sort(np.argsort(philox.bits(seed, name, tiles), kind="stable")[: -(-tiles // one_of)])
