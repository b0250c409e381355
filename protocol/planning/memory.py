"""How much memory a stage needs, and which shards it holds.

Memory, in bytes above an idle process (P parameters of the stage, E = V d of the embedding, k the highest allowed rank):

    parameters  24 P        theta, local copy, gradient, two AdamW moments, error feedback: fp32 each
    first stage 16 E + 20 V k  of a compressed chain, instead of 24 E: theta, T_perp, error feedback, what moved; A, A0, and of A
                            the gradient and two moments
    overlap      4 P        where the next round's inner steps begin
    scratch         4 (E + D)  what the next state of the embedding and of a block (D parameters) is written into
    reader      (4 + 4) E   a chain's stage without `embed` keeps the global embedding, and T_perp of a compressed chain
    in flight   4 r L (B (17 d + 4 F) + [head] 4 V) x micro-batches in flight
    frames      r L (4 k + f) x micro-batches in flight  what came in: a frame with f bytes a token, and its tensor
    backward    8 r L (17 d + 4 F) + [table] 4 E  the gradients within the block that goes backward, and of a head or embedding
                            that is trained as a whole, before they are added
    or, if more  8 T        than the last three: AdamW on the largest tensor (T parameters), when nothing is in flight
    spare        4 M + scratch  a peer without a stage that keeps all shards warm (M parameters of the model), if it has that much

with r rows, L tokens, B blocks, d width, F feed-forward width, V vocabulary. tests/benchmarks/memory.py compares it with measured
peaks. Of the 17 d, tensors are 10 d: the rest, one V of the head's and half of "backward" is what glibc's heap cannot use again.
"""

from __future__ import annotations

import functools

from protocol.codec import boundary_formats
from protocol.run import layout
from protocol.run.manifest import Manifest


def stage_shards(manifest: Manifest, first: int, last: int) -> tuple[str, ...]:
    """The shards that the stage of blocks first <= i < last trains, in canonical order."""
    return (
        *(("embed",) if first == 0 else ()),
        *(f"block.{i}" for i in range(first, last)),
        *(("head",) if last == manifest.model.n_layers else ()),
    )


def held_shards(manifest: Manifest, first: int, last: int) -> tuple[str, ...]:
    """The shards that the stage keeps at the global state: what it trains, and `embed` as a reader."""
    trained = stage_shards(manifest, first, last)
    return trained if "embed" in trained else ("embed", *trained)


def in_flight(manifest: Manifest, first: int, last: int) -> int:
    """The activations of how many micro-batches a stage keeps at once: the last one goes backward right after forward."""
    return 1 if last == manifest.model.n_layers else window(manifest)


def window(manifest: Manifest) -> int:
    """How many micro-batches a chain can always have under way; more where its members' memory allows (`depths`)."""
    return min(manifest.train.micro_batches, 4)


def activation_bytes(manifest: Manifest, first: int, last: int) -> int:
    """Bytes that one micro-batch keeps between its forward and its backward."""
    train = manifest.train
    head = 4 * manifest.model.vocab_size if last == manifest.model.n_layers else 0
    return (last - first) * _block_bytes(manifest) + 4 * train.rows * train.sequence * head


def _block_bytes(manifest: Manifest) -> int:
    spec, train = manifest.model, manifest.train
    return 4 * train.rows * train.sequence * (17 * spec.d_model + 4 * spec.d_ff)


def frame_bytes(manifest: Manifest, first: int, last: int) -> int:
    """Bytes of a micro-batch that came in: its frame and its tensor. None for a full replica."""
    if last - first == manifest.model.n_layers:
        return 0
    chains, width = manifest.chains, max(k or manifest.model.d_model for k in manifest.chains.rank)
    most = max(boundary_formats.bytes_per_token(f, width) for f in (chains.forward, chains.backward))
    return manifest.train.rows * manifest.train.sequence * (4 * width + most)


def stage_memory(manifest: Manifest, first: int, last: int) -> int:
    """Bytes that the stage of blocks first <= i < last needs above an idle process (the formula above)."""
    plain = in_flight(manifest, first, last)
    return memory_at(manifest, first, last, plain, window(manifest))


def memory_at(manifest: Manifest, first: int, last: int, plain: int, most: int) -> int:
    """The same with all activations of `plain` micro-batches and `most` of them in flight."""
    flight = activation_bytes(manifest, first, last) * plain + frame_bytes(manifest, first, last) * most
    step = 8 * max(_table(manifest, first, last), manifest.model.d_ff * manifest.model.d_model)
    return _kept(manifest, first, last) + max(flight + _backward(manifest, first, last), step)


def resting_bytes(manifest: Manifest, first: int, last: int) -> int:
    """What a stage needs before any micro-batch is in flight: what stays from step to step, and the gradients within a block."""
    return _kept(manifest, first, last) + _backward(manifest, first, last)


def _kept(manifest: Manifest, first: int, last: int) -> int:
    """What stays from step to step."""
    spec, widths = manifest.model, manifest.chains.rank
    params = sum(layout.parameters(spec, s) for s in stage_shards(manifest, first, last))
    embed = spec.vocab_size * spec.d_model
    if first > 0:
        table = 8 * embed if max(widths) else 4 * embed
    elif last == spec.n_layers:
        table = 0
    else:  # it is among the parameters
        table = max(20 * spec.vocab_size * k - 8 * embed if k else 0 for k in widths)
    return (24 + 4 * manifest.outer.overlap) * params + table + _scratch(manifest)


def _backward(manifest: Manifest, first: int, last: int) -> int:
    return 2 * _block_bytes(manifest) + 4 * _table(manifest, first, last)


def _table(manifest: Manifest, first: int, last: int) -> int:
    """Parameters of the embedding or the head where the stage may train one as a whole, else 0."""
    spec = manifest.model
    trained = last == spec.n_layers or (first == 0 and 0 in manifest.chains.rank)
    return spec.vocab_size * spec.d_model if trained else 0


def _scratch(manifest: Manifest) -> int:
    spec = manifest.model
    return 4 * (spec.vocab_size * spec.d_model + layout.parameters(spec, "block.0"))


def keeps_warm(manifest: Manifest, memory_bytes: int) -> bool:
    """Whether a spare with this memory keeps all shards, so that it can take any stage that its memory allows."""
    return memory_bytes >= 4 * layout.total_parameters(manifest.model) + _scratch(manifest)


def depths(manifest: Manifest, first: int, last: int, memory_bytes: int) -> tuple[int, int]:
    """For how many micro-batches under way this memory is enough: with all activations, and with only their inputs.

    The second keeps all activations of one micro-batch, and of each what came in.
    """
    one, frame = activation_bytes(manifest, first, last), frame_bytes(manifest, first, last)
    free = memory_bytes - resting_bytes(manifest, first, last)
    plain = max(free // (one + frame), window(manifest))
    return plain, max(plain, (free - one) // max(frame, 1))


@functools.lru_cache(maxsize=8)
def needs_by_range(manifest: Manifest) -> dict[tuple[int, int], int]:
    """(first, last) -> stage_memory, for every range of blocks."""
    layers = manifest.model.n_layers
    return {(a, b): stage_memory(manifest, a, b) for a in range(layers) for b in range(a + 1, layers + 1)}


def smallest_stage(manifest: Manifest) -> int:
    """Bytes that the least demanding stage of one block needs: a peer with less cannot take part."""
    return min(stage_memory(manifest, i, i + 1) for i in range(manifest.model.n_layers))
