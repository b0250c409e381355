"""The methods that `[outer]` of a manifest makes beside SparseLoCo (docs/guides/manifest.md)."""

from __future__ import annotations

from typing import Any

FAMILY: dict[str, dict[str, Any]] = {
    "averaging": {"topk": 4096, "values": "fp32", "eta": 0.7},
    "averaging in int8": {"topk": 4096, "values": "int8", "eta": 0.7},
    "diloco": {"topk": 4096, "values": "fp32", "eta": 0.7, "optimizer": "nesterov"},
    "diloco in int8": {"topk": 4096, "values": "int8", "eta": 0.7, "optimizer": "nesterov", "momentum": 0.8},
    "dct": {"topk": 256, "transform": "dct", "eta": 0.8},
    "cocktail": {"topk": 82, "values": "int4", "sample": 0.1, "eta": 0.8},
}
"""Fields of OuterSpec, by name."""
