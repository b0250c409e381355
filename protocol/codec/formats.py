"""Names and sizes of number formats: of updates (protocol/codec/sparse.py), and of activations and gradients at a stage
boundary (peer/chain/quantize.py). Without numpy, for programs that only read a log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TILE_SIDE = 64
TILE = TILE_SIDE * TILE_SIDE
"""The most elements of a tile (protocol/codec/topk.py)."""
VALUES, INDICES = ("sym2", "int4", "int8", "fp32"), "rice"
"""The formats of an update's values, the first the usual one, and of its indices."""
TRANSFORMS = ("none", "dct")
"""Of an update's tiles, before its entries are chosen (protocol/codec/dct.py)."""
DENSE = ("int8", "fp32")
"""Formats of the values of all elements, without indices."""


@dataclass(frozen=True, slots=True)
class Codec:
    """Keep `topk` of every 4096 elements, as `values`, after a `transform` of the tiles; `sample`: the share of the
    elements, chosen at random, among which they are."""

    topk: int
    values: str = VALUES[0]
    transform: str = TRANSFORMS[0]
    sample: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.topk <= TILE:
            raise ValueError(f"topk must be in 1..{TILE}")
        if self.values not in VALUES:
            raise ValueError(f'values must be one of {", ".join(VALUES)}, not "{self.values}"')
        if self.is_dense and self.topk != TILE:
            raise ValueError(f"topk must be {TILE} where values is {self.values}, which sends every element")
        if self.transform not in TRANSFORMS:
            raise ValueError(f'transform must be one of {", ".join(TRANSFORMS)}, not "{self.transform}"')
        if self.is_dense and (self.is_transformed or self.sample != 1):
            raise ValueError(
                f"transform must be none, sample 1 where values is {self.values}, which sends every element"
            )
        if not self.topk <= self.sample * TILE <= TILE:
            raise ValueError(f"sample must be at most 1 and at least topk / {TILE}")

    @property
    def is_dense(self) -> bool:
        return self.values in DENSE

    @property
    def is_transformed(self) -> bool:
        return self.transform != "none"


FORMATS = ("bf16", "fp32", "int8", "int4", "tah4", "sym2")
"""A frame names its format by the position here."""
TAH4_TILE = 64
"""Most values of one tile of `tah4`."""
TAH4_LEAST_TILE = 16


def tah4_tile(width: int) -> int:
    """Values of one tile of `tah4` where a token has `width` of them."""
    return math.gcd(width, TAH4_TILE)


def fits(name: str, width: int) -> bool:
    """Returns whether tokens of this many values can travel in this format."""
    return {"int4": width % 2 == 0, "tah4": tah4_tile(width) >= TAH4_LEAST_TILE}.get(name, True)


def bytes_per_token(name: str, width: int) -> int:
    """Bytes of `width` values of one token, scales included."""
    if name == "tah4":
        size = tah4_tile(width)
        return width // size * (size // 2 + 5)
    return {
        "bf16": 2 * width,
        "fp32": 4 * width,
        "int8": width + 2,
        "int4": width // 2 + 2,
        "sym2": (width + 3) // 4 + 2,
    }[name]
