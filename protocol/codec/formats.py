"""Names and sizes of number formats: of updates (protocol/codec/sparse.py), and of activations and gradients at a stage
boundary (peer/chain/quantize.py). Without numpy, for programs that only read a log.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_SIDE = 64
TILE = TILE_SIDE * TILE_SIDE
"""The most elements of a tile (protocol/codec/topk.py)."""
VALUES, INDICES = "sym2", "rice"


@dataclass(frozen=True, slots=True)
class Codec:
    """Keep `topk` of every 4096 elements."""

    topk: int

    def __post_init__(self) -> None:
        if not 1 <= self.topk <= TILE:
            raise ValueError(f"topk must be in 1..{TILE}")


FORMATS = ("bf16", "fp32", "int4", "sym2")
"""A frame names its format by the position here."""


def fits(name: str, width: int) -> bool:
    """Whether tokens of so many values can travel in this format."""
    return name != "int4" or width % 2 == 0


def bytes_per_token(name: str, width: int) -> int:
    """Bytes of `width` values of one token, scales included."""
    return {"bf16": 2 * width, "fp32": 4 * width, "int4": width // 2 + 2, "sym2": (width + 3) // 4 + 2}[name]
