"""Number formats of a stage boundary and their sizes. What the bytes mean: peer/chain/quantize.py."""

from __future__ import annotations

import math

FORMATS = ("bf16", "fp32", "int8", "int4", "tah4", "sym2")
"""A frame names its format by the position here."""
TILE = 64
"""Most values of one tile of `tah4`."""
LEAST_TILE = 16


def tile(width: int) -> int:
    """Values of one tile of `tah4` where a token has `width` of them."""
    return math.gcd(width, TILE)


def fits(name: str, width: int) -> bool:
    """Whether tokens of so many values can travel in this format."""
    return {"int4": width % 2 == 0, "tah4": tile(width) >= LEAST_TILE}.get(name, True)


def bytes_per_token(name: str, width: int) -> int:
    """Bytes of `width` values of one token, scales included."""
    if name == "tah4":
        size = tile(width)
        return width // size * (size // 2 + 5)
    return {
        "bf16": 2 * width,
        "fp32": 4 * width,
        "int8": width + 2,
        "int4": width // 2 + 2,
        "sym2": (width + 3) // 4 + 2,
    }[name]
