"""How much memory a stage needs, and which shards it holds.

Memory, in bytes above an idle process (P parameters of the stage, E = V d of the embedding, k the highest allowed rank):

    parameters  16 P       local copy, gradient, two AdamW moments: fp32 each; of what Muon trains 12: it has one moment
    first stage 20 V k     of a compressed chain, instead of 16 E: A, A0, and of A the gradient and two moments
    overlap      4 P       where the next round's inner steps begin
    state        8 P + 4 E  theta and error feedback, and the embedding where it is only read; in files: nothing (below)
    scratch      4 (E + D)  what the next state of the embedding and of a block (D parameters) is written into; in files: nothing; beside a GPU, where
                           several shards' is made at a time, 4 (2 E + 3 D)
    in flight    4 r L (B n + [documents] L) x micro-batches between their forward and their backward; n = 14 d + 3 c + 4 F values a token of a block,
                           and with normalized queries and keys 3 (d + c) more; documents that do not see each other have a mask
    frames       r L (4 k + f) x micro-batches under way in the chain  what came in from either side: a frame with f bytes a token, and its tensor
    reader       8 r L d   of a compressed chain: a micro-batch's rows of the embedding, one for each token that occurs, and one for each position
    backward     8 r L t + 4 d F + [first, whole] 4 E  gradients within the block that goes backward, t = 8 d + 2 c + 4 F values a token; that of its largest
                           matrix, and of an embedding that is trained as a whole, before they are added
    loss         8 min(r L V, LOGITS) + 4 E  in the last stage: logits and their logarithms of a slice of the tokens, and the gradient of the
                           head; in a full replica that, or the embedding's gradient, if it is more
    or, if more  4 (E - G)  than in flight, frames, reader, backward and loss: what the embedding of a compressed chain moved, in its first stage, when the
                           G parameters' gradients, its own V k among them, are gone; 8 E of tied embeddings, which are their two gradients
    or, if more  12 W      where Muon trains: the largest matrix of a block (W parameters) while its update is made orthogonal
    later role   4 Q       θ of what it lacks for another role (Q parameters), while it trains in the one that it has; in files: nothing
    spare        4 M + scratch  a peer without a stage that keeps all shards warm (M parameters of the model), if it has that much

with r rows, L tokens, B blocks, d width, c width of the keys (d, or less where heads share them), F feed-forward width, V vocabulary.
tests/benchmarks/memory.py compares it with measured peaks. A block keeps t of its n values as tensors (with normalized queries and keys
2 (d + c) more): the rest of n, and half of 8 r L t, is what glibc's heap cannot use again.

*A GPU* with memory of its own has two budgets (protocol/planning/budget.py): its own memory, and the host's beside it. State, scratch and what is
for a later role lie on the host. Blocks are compiled on the GPU and compute in bf16 (peer/training/compiled.py), so that other rows stand in the
place of these; T are the parameters of a block's matrices:

    in flight    r L B (14 d + 4 c + 6 F) + 2 B T, documents as above, per micro-batch; with normalized queries and keys r L B (2 d + 2 c) more;
                           in a chain's stage, whose blocks are recorded (peer/training/recorded.py), 6 r L d more, 12 where activations are whole
    backward     r L (8 d + 6 F) + 4 T + 2 d F + [first, whole] 4 E
    loss         4 min(r L V, GPU_LOGITS) + 8 E + 4 r L d

On the host beside it, together (`host_memory`):

    state, scratch, later role  as above; in files: nothing
    moments      8 P       the copy of the optimizer's moments that is written with a checkpoint; 4 of what Muon trains; of a compressed chain's
                           first stage 8 V k instead of 8 E
    copies       8 LANES min(PART, E or the largest matrix)  what the update goes through on its way (peer/training/update.py)
    frames       r L f x (M + 1)  from either side, at most all of a step's M micro-batches, before they are tensors
    reader       16 r L d  of a compressed chain: rows of the embedding on their way to the GPU, of two micro-batches, in sizes of powers of two

Bytes that a compiled block keeps were counted (tests/unit/test_gpu_memory.py), and the sums are within 2 % of two peaks on a card (docs/results/gpu.md).

*In files.* State and scratch are used at the round boundary only, and of the embedding a micro-batch reads r L rows. A peer whose
memory is not enough for whatever it may be asked to do with all of it in memory keeps them in files that are mapped: the
system holds in memory what is used of them, as far as there is room. The formula promises what that takes, so that more peers
can take part. Disk: 12 P + 8 E.

*Tied embeddings.* The model is trained by full replicas only (NEVER): the first and the last stage of a chain would both move the one matrix, and
each step one would have to send the other a gradient as large as the matrix. A replica has, after the last block, both gradients of it at
once, 8 E; the matrix counts once.

Twice as many micro-batches may be under way as a stage has room to keep the activations of: the others wait, which costs little, and so
a stage in the middle always finds work. A stage of one block may compute activations anew, rather than keep those of several: less is not
possible.
"""

from __future__ import annotations

import math

from protocol.codec import boundary_formats
from protocol.run import layout
from protocol.run.manifest import Manifest

LOGITS = 1 << 23
"""At a time, in the last stage (peer/training/model.py); of one token at least."""
GPU_LOGITS = 1 << 27
"""The same on a GPU: so many that matrix products keep it busy."""
NEVER = 1 << 62
"""Bytes that nobody has: of a stage that there cannot be."""
WAITING = 2
"""How many times as many micro-batches may be under way as a stage keeps the activations of."""
CPU, GPU = "cpu", "cuda"
"""Devices, as they are announced (peer/training/device.py: name_of). What is no CUDA device counts as a processor."""
ABREAST = 3
"""Shards whose next state a peer with a GPU makes at a time, where its state is in memory; others one after the other, which takes less of it."""
LANES, PART = 4, 1 << 23
"""What a GPU's update goes through on the host (peer/training/update.py): lanes, and elements of a part of a tensor."""
COPY = 1.25
"""Of the parameters' bytes: what a model takes that is trained no more, with its activations."""
AUDITED_STATES = 2
"""Of the whole model, that wait until their rounds are trained again (peer/node/examining.py)."""


def on_gpu(device: str) -> bool:
    """Whether a device of this name, such as `cuda`, `cuda:1` or `2 x cuda`, is a GPU, for which other rows hold."""
    return device.rpartition(" ")[2].partition(":")[0] == GPU


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
    """The activations of how many micro-batches a stage keeps at once, at the least. One of the last stage, which goes backward right
    after forward, and one of a single block, whose others are computed anew where memory is short."""
    return 1 if last == manifest.model.n_layers or last - first == 1 else window(manifest)


def window(manifest: Manifest) -> int:
    """The activations of how many micro-batches a stage of several blocks can always keep; more where its memory allows (`depths`)."""
    return min(manifest.train.micro_batches, 4)


def under_way(manifest: Manifest) -> int:
    """How many micro-batches every chain can always have under way; more where its members' memory allows (`depths`)."""
    return min(manifest.train.micro_batches, WAITING * window(manifest))


def activation_bytes(manifest: Manifest, first: int, last: int, device: str = CPU, joined: int = 1) -> int:
    """Bytes that one micro-batch, or so many that are computed as one, keeps between its forward and its backward."""
    length, tokens = manifest.train.sequence, _tokens(manifest, joined)
    mask = 4 * tokens * length if manifest.model.document_end_id >= 0 else 0
    is_recorded = on_gpu(device) and last - first < manifest.model.n_layers
    recorded = (12 if 0 in manifest.chains.rank else 6) * tokens * manifest.model.d_model if is_recorded else 0
    return (last - first) * _block_bytes(manifest, device, tokens) + mask + recorded


def _tokens(manifest: Manifest, joined: int) -> int:
    """Of so many micro-batches."""
    return joined * manifest.train.rows * manifest.train.sequence


def _block_bytes(manifest: Manifest, device: str, tokens: int) -> int:
    spec = manifest.model
    d, c = spec.d_model, spec.key_value_width
    if on_gpu(device):
        values = 14 * d + 4 * c + 6 * spec.d_ff + (2 * (d + c) if spec.use_qk_norm else 0)
        return tokens * values + 2 * _matrices(manifest)
    normalized = 3 * (d + c) if spec.use_qk_norm else 0
    return 4 * tokens * (14 * d + 3 * c + normalized + 4 * spec.d_ff)


def _matrices(manifest: Manifest) -> int:
    """Parameters of a block's matrices."""
    return sum(math.prod(shape) for shape in layout.shapes(manifest.model, "block.0") if len(shape) > 1)


def frame_bytes(manifest: Manifest, first: int, last: int) -> int:
    """Bytes of a micro-batch that came in, from either side: frames and their tensors. None for a full replica."""
    return _came(manifest, first, last, 4)


def _came(manifest: Manifest, first: int, last: int, value_bytes: int) -> int:
    """Of frames, and of so many bytes for each of their values."""
    chains, width = manifest.chains, max(k or manifest.model.d_model for k in manifest.chains.rank)
    forward, backward = (
        value_bytes * width + boundary_formats.bytes_per_token(f, width) for f in (chains.forward, chains.backward)
    )
    came = (forward if first > 0 else 0) + (backward if last < manifest.model.n_layers else 0)
    return manifest.train.rows * manifest.train.sequence * came


def stage_memory(manifest: Manifest, first: int, last: int, device: str = CPU, joined: int = 1) -> int:
    """Bytes that the stage of blocks first <= i < last needs above an idle process (the formula above); NEVER where it cannot be.
    `joined`: how many micro-batches are computed as one, by a full replica."""
    if manifest.model.tie_word_embeddings and last - first < manifest.model.n_layers:
        return NEVER
    plain, most = in_flight(manifest, first, last), under_way(manifest)
    return memory_at(manifest, first, last, plain, most, in_files=True, device=device, joined=joined)


def memory_at(
    manifest: Manifest,
    first: int,
    last: int,
    plain: int,
    most: int,
    *,
    in_files: bool,
    device: str = CPU,
    joined: int = 1,
) -> int:
    """The same with all activations of `plain` micro-batches and `most` of them in flight."""
    kept = activation_bytes(manifest, first, last, device, joined) * plain
    flight = kept + frame_bytes(manifest, first, last) * most + _backward(manifest, first, last, device, joined)
    moved = max(_moved(manifest, first, last), 12 * max(_muon(manifest, "block.0"), default=0))
    return _kept(manifest, first, last, in_files, device) + max(flight, moved)


def resting_bytes(manifest: Manifest, first: int, last: int, *, in_files: bool, device: str = CPU) -> int:
    """What a stage needs before any micro-batch is in flight: what stays from step to step, and the gradients within a block."""
    return _kept(manifest, first, last, in_files, device) + _backward(manifest, first, last, device, 1)


def later_bytes(manifest: Manifest, first: int, last: int) -> int:
    """Bytes of the shards that a stage does not hold, and holds before it becomes another one."""
    held = held_shards(manifest, first, last)
    return sum(layout.shard_bytes(manifest.model, s) for s in layout.shard_names(manifest.model) if s not in held)


def host_memory(manifest: Manifest, first: int, last: int, device: str, *, in_files: bool = True) -> int:
    """Bytes of the host's memory that the stage needs beside a GPU that has its own; 0 of a processor, whose are in `stage_memory`."""
    if not on_gpu(device):
        return 0
    spec, train, chains = manifest.model, manifest.train, manifest.chains
    params, one_less = _trained(manifest, first, last)
    whole, embed, widths = last - first == spec.n_layers, spec.vocab_size * spec.d_model, chains.rank
    moments = 8 * params - 4 * one_less
    if first == 0 and not whole:
        moments += max(8 * spec.vocab_size * k - 8 * embed if k else 0 for k in widths)
    largest = max(embed, *(math.prod(shape) for shape in layout.shapes(spec, "block.0")))
    copies = 8 * LANES * min(PART, largest)
    frames = _came(manifest, first, last, 0) * (train.micro_batches + 1)
    reader = 0 if whole or not max(widths) else 16 * _tokens(manifest, 1) * spec.d_model
    state = 0 if in_files else 8 * params + (4 * embed if first else 0) + _scratch(manifest, 2, ABREAST)
    return 4 * manifest.outer.overlap * params + moments + copies + frames + reader + state


def _trained(manifest: Manifest, first: int, last: int) -> tuple[int, int]:
    """The parameters of a stage's shards, and how many of them Muon trains."""
    shards = stage_shards(manifest, first, last)
    params = sum(layout.parameters(manifest.model, s) for s in shards)
    return params, sum(size for s in shards for size in _muon(manifest, s))


def _kept(manifest: Manifest, first: int, last: int, in_files: bool, device: str) -> int:
    """What stays from step to step, where the parameters are."""
    spec, widths = manifest.model, manifest.chains.rank
    params, one_less = _trained(manifest, first, last)
    embed = spec.vocab_size * spec.d_model
    instead = 0  # of the embedding's parameters
    if first == 0 and last < spec.n_layers:
        instead = max(20 * spec.vocab_size * k - 16 * embed if k else 0 for k in widths)
    kept = 16 * params - 4 * one_less + instead
    if on_gpu(device):  # the rest is the host's
        return kept
    state = 0 if in_files else 8 * params + (4 * embed if first else 0) + _scratch(manifest)
    return kept + 4 * manifest.outer.overlap * params + state


def _muon(manifest: Manifest, shard: str) -> list[int]:
    """The parameters of each tensor of a shard that Muon trains."""
    shapes, train = layout.shapes(manifest.model, shard), manifest.train
    return [math.prod(shape) for shape in shapes if train.has_one_moment(shard, shape)]


def _backward(manifest: Manifest, first: int, last: int, device: str, joined: int) -> int:
    tokens, whole = _tokens(manifest, joined), last - first == manifest.model.n_layers
    read = 0 if whole or not max(manifest.chains.rank) else 8 * tokens * manifest.model.d_model
    loss = _loss(manifest, device, tokens) if last == manifest.model.n_layers else 0
    return _gradient_bytes(manifest, device, tokens) + max(4 * _table(manifest, first, last), loss) + read


def _gradient_bytes(manifest: Manifest, device: str, tokens: int) -> int:
    """Of a block that goes backward, beside its activations."""
    spec = manifest.model
    if on_gpu(device):
        values = 8 * spec.d_model + 6 * spec.d_ff
        return tokens * values + 4 * _matrices(manifest) + 2 * spec.d_model * spec.d_ff
    values = 8 * spec.d_model + 2 * spec.key_value_width + 4 * spec.d_ff
    return 8 * tokens * values + 4 * spec.d_model * spec.d_ff


def _loss(manifest: Manifest, device: str, tokens: int) -> int:
    """Bytes while the last stage computes the loss and its gradients, beside the activations."""
    spec = manifest.model
    if on_gpu(device):
        return 4 * (min(tokens * spec.vocab_size, GPU_LOGITS) + (2 * spec.vocab_size + tokens) * spec.d_model)
    slices = min(tokens, max(1, LOGITS // spec.vocab_size)) * spec.vocab_size
    return 8 * slices + 4 * spec.vocab_size * spec.d_model


def _moved(manifest: Manifest, first: int, last: int) -> int:
    """Bytes of what the embedding of a compressed chain moved, where it is trained, less the gradients that are gone by then; or of both
    gradients of a tied one."""
    spec = manifest.model
    embed, narrowest = spec.vocab_size * spec.d_model, min((k for k in manifest.chains.rank if k), default=0)
    if spec.tie_word_embeddings:
        return 8 * embed
    if first > 0 or last == spec.n_layers or not narrowest:
        return 0
    others = sum(layout.parameters(spec, s) for s in stage_shards(manifest, first, last)) - embed
    return max(0, 4 * (embed - others - spec.vocab_size * narrowest))


def _table(manifest: Manifest, first: int, last: int) -> int:
    """Parameters of the embedding where the stage may train it as a whole, else 0."""
    spec = manifest.model
    whole = last == spec.n_layers or 0 in manifest.chains.rank
    return spec.vocab_size * spec.d_model if first == 0 and whole else 0


def warm_bytes(manifest: Manifest) -> int:
    """Bytes of the state of all shards, with what the next one of some is written into."""
    return 4 * layout.total_parameters(manifest.model) + _scratch(manifest)


def _scratch(manifest: Manifest, tables: int = 1, blocks: int = 1) -> int:
    spec = manifest.model
    return 4 * (tables * spec.vocab_size * spec.d_model + blocks * layout.parameters(spec, "block.0"))
