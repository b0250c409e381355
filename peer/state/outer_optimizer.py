"""The outer step of SparseLoCo: the one module that writes θ and the error feedback at a round boundary.

For every shard (algorithm 1 of SparseLoCo; Eq. 2 of Heterogeneous Low-Bandwidth Pre-Training):

    e    = β e + δ              δ = θ_global - θ_local after H inner steps      accumulate
                                (its transform, where the codec has one: then e and sent are transforms, too)
    sent = Q(TopK(e));  e -= sent        the dequantized value                  encode
                                (TopK among the sample, where the codec has one)
    e   += sent                          the contribution was not committed     restore_feedback
    e    = β e, and 0 where sent         sent, but a crash took δ               without_delta
    θ   -= η Σ_m w_m sent_m              in the order of the commit             apply

With Nesterov momentum (DiLoCo, arXiv:2311.08105, as torch.optim.SGD computes it) `apply` is, g = Σ_m w_m sent_m,

    v    = μ (v + g)                     v = μ m, of the usual buffer m = μ m + g
    θ    = (θ - η g) - η v

and v, 0 at first, is state like θ: it lies behind θ's tensors in each shard, so digests, checkpoints, transfers and
replays have it.

All arithmetic is fp32 in numpy, one operation at a time and in a stated order, so θ is bit for bit the same everywhere.
Nothing is lost: for every replica, Σ_r β^(R-r) committed_r + e_R = Σ_r β^(R-r) δ_r, up to fp32 rounding.
`without_delta` keeps this after a crash between an offer and the saving of e.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from protocol.codec import dct, philox, sparse, topk
from protocol.codec.formats import Codec
from protocol.codec.sparse import Sparse
from protocol.codec.topk import Empty, Kept, Map, in_memory
from protocol.errors import LocalError
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest

Array = npt.NDArray[np.float32]
BLOCK = 1 << 16
"""Elements of a step of the work: they stay in the processor's cache."""
MOST_THREADS = 8
"""More of them compete for Python's lock (docs/results/gpu.md)."""
Accumulate = Callable[[Sequence[Array], np.float32, int, Map], Sequence[Kept]]
"""(e, β, k, run): makes e = β e + δ in place and selects the largest magnitudes, `k` of every 4096, on another device:
`Outer.accumulate` and the codec's selection in one, to the same bits (peer/training/update.py). Raises LocalError, and
leaves e unchanged, if a value is not finite."""


class Outer:
    """The shards of θ and the error feedback of one peer.

    theta: `apply` replaces its lists, so a reader of an old list sees a whole state. With a momentum each list has
        twice as many arrays: θ's, then v's.
    feedback: e by shard (fp32, as theta's arrays); may outlive the holding of the shard.
    threads: that encode and apply. The bits do not depend on it, nor on `abreast`.
    empty: makes all arrays, in memory or in mapped files.
    abreast: shards whose next state `apply_all` makes at a time.
    momentum: μ; 0: plain SGD.
    """

    def __init__(
        self,
        spec: ModelSpec,
        codec: Codec,
        beta: float,
        eta: float,
        threads: int = 1,
        empty: Empty = in_memory,
        abreast: int = 1,
        momentum: float = 0.0,
    ) -> None:
        self.threads = min(threads, MOST_THREADS)
        self.run: Map = map if threads == 1 else ThreadPoolExecutor(self.threads, "codec").map
        self.empty = empty
        self._abreast, self._taking = abreast, threading.Lock()
        self.spec = spec
        self.codec = codec
        self.beta = np.float32(beta)
        self.eta = np.float32(eta)
        self.momentum = np.float32(momentum)
        self.theta: dict[str, list[Array]] = {}
        self.feedback: dict[str, list[Array]] = {}

    @classmethod
    def of(cls, manifest: Manifest, threads: int = 1, empty: Empty = in_memory, abreast: int = 1) -> Outer:
        """That of a run."""
        outer = manifest.outer
        momentum = outer.momentum if outer.has_momentum else 0.0
        return cls(manifest.model, outer.codec, outer.beta, outer.eta, threads, empty, abreast, momentum)

    def accumulate(self, shard: str, displacement: Sequence[tuple[Array, Array]]) -> None:
        """e = β e + δ, for each tensor δ = a - b of (a, b). Raises LocalError, and leaves e
        unchanged, if a value is not finite; ValueError for wrong shapes."""
        if tuple(a.shape for a, _ in displacement) != layout.shapes(self.spec, shard):
            raise ValueError(f"{shard}: the pseudo-gradient's shapes are not those of the shard")
        for _, b in displacement:
            # θ is finite: it is b that may not be; their difference could still overflow, which `encode` refuses
            if not all(math.isfinite(x) for block in _blocks(b) for x in (block.min(), block.max())):
                raise LocalError(f"{shard}: the pseudo-gradient is not finite; this round's work is dropped")
        if self.codec.is_transformed:
            tilings = [topk.tiling(a.shape, self.codec.topk) for a, _ in displacement]
            deltas = [dct.transformed(a - b, t, self.run) for (a, b), t in zip(displacement, tilings, strict=True)]
            displacement = [(delta, np.zeros_like(delta)) for delta in deltas]
        scratch = np.empty(BLOCK, dtype=np.float32)
        for e, (a, b) in zip(self._feedback(shard), displacement, strict=True):
            for e_block, a_block, b_block in zip(_blocks(e), _blocks(a), _blocks(b), strict=True):
                delta = np.subtract(a_block, b_block, out=scratch[: a_block.size])
                np.multiply(e_block, self.beta, out=e_block)
                np.add(e_block, delta, out=e_block)

    def accumulate_on(self, device: Accumulate, shard: str) -> Sequence[Kept]:
        """`accumulate` on the device; returns the largest values of e. Raises LocalError, and leaves e unchanged."""
        return device(self._feedback(shard), self.beta, self.codec.topk, self.run)

    def encode(self, shard: str, codec: Codec | None = None, seed: bytes = b"") -> tuple[bytes, float]:
        """Takes a payload out of e. Returns it and its L2 norm. Raises PayloadError if e is not finite.

        codec: for another peer's feedback; None: that of offers.
        seed: of the elements that an offer is chosen from, where that is a sample (`Manifest.sample_seed`).
        """
        arrays = self._feedback(shard) if codec is not None else self._sampled(shard, seed)
        payload = sparse.encode(codec or self.codec, arrays, self.run)
        return payload, self._take(shard, payload, codec)

    def _sampled(self, shard: str, seed: bytes) -> list[Array]:
        """e, and 0 for the elements that are not in the sample."""
        arrays, share = self._feedback(shard), self.codec.sample
        if share == 1:
            return arrays
        named = zip(layout.tensors(self.spec, shard), arrays, strict=True)
        masks = [philox.sample(seed, name, e.size, share).reshape(e.shape) for (name, _), e in named]
        return [np.where(mask, e, np.float32(0)) for mask, e in zip(masks, arrays, strict=True)]

    def update(self, device: Accumulate, shard: str, seed: bytes = b"") -> tuple[bytes, float]:
        """`accumulate_on` and `encode`; several shards at a time may do so. Raises LocalError, and leaves e unchanged;
        PayloadError if the sum is not finite."""
        if self.codec.sample != 1:
            self.accumulate_on(device, shard)
            return self.encode(shard, seed=seed)
        payload = sparse.pack(self.codec, self.accumulate_on(device, shard), self.run)
        return payload, self._take(shard, payload, None)

    def norm(self, shard: str, payload: bytes | memoryview, codec: Codec | None = None) -> float:
        """L2 norm of a payload's values. Raises PayloadError."""
        return _norm(self._decode(shard, payload, codec))

    def held(self, shard: str) -> float:
        """L2 norm of e."""
        blocks = (block for e in self.feedback.get(shard, ()) for block in _blocks(e))
        return math.sqrt(sum(float(np.sum(np.square(block, dtype=np.float64))) for block in blocks))

    def without_delta(self, shard: str, payload: bytes | memoryview) -> None:
        """e = β e, and 0 where `payload` has a value: its δ is lost otherwise. Raises PayloadError."""
        sent = self._decode(shard, payload)
        for e, x in zip(self._feedback(shard), sent, strict=True):
            np.multiply(e, self.beta, out=e)
            e.reshape(-1)[x.index] = 0

    def restore_feedback(self, shard: str, payload: bytes | memoryview, codec: Codec | None = None) -> None:
        """Adds a payload of `encode` to e again, here or at another peer. Raises PayloadError, and changes nothing
        then."""
        returned = self._decode(shard, payload, codec)
        for e, sent in zip(self._feedback(shard), returned, strict=True):
            e.reshape(-1)[sent.index] += sent.values

    def apply(
        self,
        shard: str,
        contributions: Sequence[tuple[float, bytes | memoryview]],
        scratch: list[Array] | None = None,
        codec: Codec | None = None,
    ) -> None:
        """θ -= η Σ w_m sent_m over (weight, payload) in the given order. Raises PayloadError or ValueError (a weight
        that is not finite) before anything is changed, KeyError for a shard that is not held.

        scratch: takes the former arrays, and gives memory for the new ones; only where no reader has the former ones.
        codec: of aggregates; None: that of offers.
        """
        held = self.theta[shard]
        if not all(math.isfinite(weight) for weight, _ in contributions):
            raise ValueError(f"{shard}: a contribution's weight is not finite")

        if not contributions:  # no step, of the momentum neither
            return

        def empty(shapes: Sequence[tuple[int, ...]]) -> list[Array]:
            if scratch is None:
                return self.empty(shapes)
            with self._taking:
                return _taken(scratch, shapes, self.empty)

        tensors, codec = len(layout.shapes(self.spec, shard)), codec or self.codec
        theta = sparse.apply(codec, held[:tensors], contributions, self.eta, self.run, empty)
        momentum = held[tensors:]
        if momentum:
            momentum = sparse.apply(codec, momentum, contributions, np.float32(-1), self.run, empty)  # v + g
            list(self.run(self._move, zip(theta, momentum, strict=True)))
        self.theta[shard] = [*theta, *momentum]
        if scratch is not None:
            with self._taking:
                scratch += [array for array in held if array.flags.writeable]

    def apply_all(
        self,
        contributions: Mapping[str, Sequence[tuple[float, bytes | memoryview]]],
        scratch: list[Array] | None = None,
        codec: Codec | None = None,
    ) -> None:
        """`apply` of each of these shards; raises what it raises."""
        if self._abreast == 1:
            for shard, theirs in contributions.items():
                self.apply(shard, theirs, scratch, codec)
        else:
            with ThreadPoolExecutor(self._abreast, "apply") as pool:
                list(pool.map(lambda shard: self.apply(shard, contributions[shard], scratch, codec), contributions))

    def _move(self, pair: tuple[Array, Array]) -> None:
        """v = μ v and θ -= η v of a tensor, in place."""
        scratch = np.empty(BLOCK, dtype=np.float32)
        for theta, v in zip(*map(_blocks, pair), strict=True):
            np.multiply(v, self.momentum, out=v)
            np.subtract(theta, np.multiply(v, self.eta, out=scratch[: v.size]), out=theta)

    def digest(self, shard: str) -> str:
        return layout.shard_digest(self.theta[shard])

    def _take(self, shard: str, payload: bytes, codec: Codec | None) -> float:
        """e loses the payload's values. Returns their L2 norm."""
        sent = self._decode(shard, payload, codec)

        def subtract(job: tuple[Array, Sparse, slice]) -> None:
            e, x, here = job
            e.reshape(-1)[x.index[here]] -= x.values[here]

        pairs = zip(self.feedback[shard], sent, strict=True)  # no index comes twice: the order does not matter
        list(self.run(subtract, [(e, x, here) for e, x in pairs for here in _spans(x.index.size)]))
        return _norm(sent)

    def _decode(self, shard: str, payload: bytes | memoryview, codec: Codec | None = None) -> list[Sparse]:
        return sparse.decode(codec or self.codec, layout.shapes(self.spec, shard), payload, self.run)

    def _feedback(self, shard: str) -> list[Array]:
        if shard not in self.feedback:
            self.feedback[shard] = self.empty(layout.shapes(self.spec, shard))
            for array in self.feedback[shard]:
                array.fill(0)
        return self.feedback[shard]


def difference(displacement: Sequence[tuple[Array, Array]]) -> list[Array]:
    """δ of a displacement (see `Outer.accumulate`)."""
    return [a - b for a, b in displacement]


def _taken(scratch: list[Array], shapes: Sequence[tuple[int, ...]], empty: Empty) -> list[Array]:
    """Arrays of these shapes from `scratch`, or new ones: fresh pages cost as much as the sums."""
    found: list[Array | None] = []
    for shape in shapes:
        at = next((i for i, array in enumerate(scratch) if array.shape == shape), None)
        found.append(None if at is None else scratch.pop(at))
    made = iter(empty([shape for shape, array in zip(shapes, found, strict=True) if array is None]))
    return [next(made) if array is None else array for array in found]


def _norm(sent: Sequence[Sparse]) -> float:
    return math.sqrt(sum(float(np.sum(np.square(x.values, dtype=np.float64))) for x in sent))


def _blocks(array: Array) -> Iterator[Array]:
    flat = array.reshape(-1)
    return (flat[here] for here in _spans(flat.size))


def _spans(size: int) -> list[slice]:
    return [slice(at, at + BLOCK) for at in range(0, size, BLOCK)]
