"""A contribution compared with what another replica learned from the same text (protocol/rounds/audits.py).

The examiner learns d from the text that the contribution's maker was assigned, and d' from other text, both from the same state and the same
moments of AdamW, its own. For a maker who trained on neither, one text is like the other, and

    agreement = cos(s, d) - cos(s, d')

is as often positive as negative; s are the values that were sent. All is taken at the places that were sent, and in the model's blocks alone:
which tokens a text has, and so which rows of the embedding and the head change, can be counted without training.

Nothing of the maker's is needed but what the log names: neither its moments nor its error feedback, which only add what the two cosines
have in common.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.codec import sparse
from protocol.codec.sparse import Codec, Sparse
from protocol.run import layout
from protocol.run.layout import ModelSpec

Values = list[NDArray[np.float32]]
"""Of each tensor of some shards, in order, those at the places that were sent."""


def blocks(spec: ModelSpec) -> tuple[str, ...]:
    """The shards that are compared."""
    return tuple(shard for shard in layout.shard_names(spec) if shard.startswith("block."))


def sent(codec: Codec, spec: ModelSpec, payloads: Mapping[str, bytes]) -> list[Sparse]:
    """What a contribution sends of each tensor of the blocks, by its payloads. Raises PayloadError."""
    return [x for shard in blocks(spec) for x in sparse.decode(codec, layout.shapes(spec, shard), payloads[shard])]


def there(update: Sequence[Sparse], learned: Sequence[NDArray[np.float32]]) -> Values:
    """What was learned of the same tensors, where the update sends something."""
    return [array.reshape(-1)[x.index] for x, array in zip(update, learned, strict=True)]


def agreement(update: Sequence[Sparse], learned: Values, plain: Values) -> float:
    """See the module's docstring; in -1..1."""
    s = [x.values for x in update]
    return min(1.0, max(-1.0, cosine(s, learned) - cosine(s, plain)))


def cosine(some: Sequence[NDArray[np.float32]], others: Sequence[NDArray[np.float32]]) -> float:
    """Of the angle between two lists of arrays of the same shapes; 0 where one is nothing or not finite."""

    def product(a: Sequence[NDArray[np.float32]], b: Sequence[NDArray[np.float32]]) -> float:
        return math.fsum(float(np.dot(x.astype(np.float64), y.astype(np.float64))) for x, y in zip(a, b, strict=True))

    length = math.sqrt(product(some, some)) * math.sqrt(product(others, others))
    found = product(some, others) / length if length > 0 else 0.0
    return found if math.isfinite(found) else 0.0
