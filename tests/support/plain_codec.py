"""What the sparse codec is compared with: the entropy of its sets."""

from __future__ import annotations

import math
from collections.abc import Sequence

from protocol.codec import topk
from protocol.codec.formats import Codec
from protocol.codec.sparse import Sparse
from protocol.round import comparing


def entropy_size(codec: Codec, shapes: Sequence[Sequence[int]]) -> float:
    """Bytes of log2 C(n, k') bits a tile and of the bare values: the shortest code for index sets without structure."""
    size_bits = 0.0
    for shape in shapes:
        t = topk.tiling(tuple(shape), codec.topk)
        subsets = math.lgamma(t.n + 1) - math.lgamma(t.keep + 1) - math.lgamma(t.n - t.keep + 1)
        size_bits += t.tiles * subsets / math.log(2) + t.entries * 2
    return size_bits / 8


def norm_of(tensors: Sequence[Sparse]) -> float:
    """The L2 norm of what is sent of a shard."""
    return math.sqrt(math.fsum(comparing.squares(tensor.values) for tensor in tensors))
