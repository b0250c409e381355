"""What a run's manifest says of its update codec. Apart from the codec, since whoever only reads a log needs no arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

TILE_SIDE = 64
TILE = TILE_SIDE * TILE_SIDE
"""The most elements of a tile (protocol/codec/topk.py)."""
VALUES = {"fp32": 0, "sym2": 1, "ref2": 2}
INDICES = {"fixed": 0, "rice": 1}
"""The formats, and their numbers in a payload."""


@dataclass(frozen=True, slots=True)
class Codec:
    """Keep `topk` of every 4096 elements, in the value format `values` and the index format `indices`."""

    topk: int
    values: str = "sym2"
    indices: str = "rice"

    def __post_init__(self) -> None:
        if not 1 <= self.topk <= TILE:
            raise ValueError(f"topk must be in 1..{TILE}")
        if self.values not in VALUES:
            raise ValueError(f'values must be one of {", ".join(VALUES)}, not "{self.values}"')
        if self.indices not in INDICES:
            raise ValueError(f'indices must be one of {", ".join(INDICES)}, not "{self.indices}"')
