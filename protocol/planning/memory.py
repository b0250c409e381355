"""Memory of a stage, and the shards that it holds.

In bytes above an idle process; P parameters of the stage, its rows of tokens (`anchor`) included, V vocabulary, d
width, w residual width, E = V d of the embedding in the first stage, V (d - w) in the others, r rows, L tokens, B
blocks, c width of the keys (d, or less where heads share them), F feed-forward width, D parameters of a block, M
micro-batches of a step.

    parameters    16 P: local copy, gradient, two AdamW moments in fp32; 12 P of what Muon trains
    overlap       4 P where the next round's inner steps begin
    state         8 P: theta and error feedback, 4 P more for the outer optimizer's momentum; in files: 0
    scratch       4 (V d + D): the next state of the embedding and a block, twice as much with a momentum; in files: 0;
                  beside a GPU, where several shards are made at a time, 4 (2 V d + 3 D)
    in flight     4 r L (B n + [documents] L) for each micro-batch between its forward and its backward, with
                  n = 14 d + 3 c + 4 F values a token and block, 3 (d + c) more with normalized queries and keys
    frames        r L (4 w + f) for each micro-batch under way: a frame of f bytes a token from either side, its tensor
    backward      8 r L t + 4 d F + 4 E: gradients in a block, t = 8 d + 2 c + 4 F values a token, of its largest
                  matrix, and of the rows of tokens
    loss          8 min(r L V, LOGITS) + 4 V d in the last stage, if more than 4 E: logits and their logarithms, the
                  gradient of the head
    tied          8 V d if more than the four above: both gradients of tied embeddings
    Muon          12 W if more: the largest matrix of a block while its update is made orthogonal
    later role    4 Q: the Q parameters that a peer lacks for its next role; in files: 0
    spare         4 bytes a parameter of the model + scratch: a spare that keeps all shards warm

A block keeps t of its n values as tensors (2 (d + c) more with normalized queries and keys): the rest of n, and half of
8 r L t, is what glibc's heap cannot use again. tests/benchmarks/memory.py compares the sums with measured peaks.

*A GPU* with its own memory has two budgets (protocol/planning/budget.py). State, scratch and later role lie on the
host. Blocks are compiled and compute in bf16 (peer/training/compiled.py); T are the parameters of a block's matrices:

    in flight     r L B (14 d + 4 c + 6 F) + 2 B T, 2 r L B (d + c) more with normalized queries and keys; in a chain's
                  stage, whose blocks are recorded (peer/training/recorded.py), 6 r L d more
    backward      r L (8 d + 6 F) + 4 T + 2 d F + 4 E
    loss          4 min(r L V, GPU_LOGITS) + 8 V d + 4 r L d

On the host beside it, together (`host_memory`): state, scratch and later role as above, and

    moments       8 P, 4 of what Muon trains: their copy for a checkpoint
    copies        8 LANES min(PART, V d or the largest matrix): the update on its way (peer/training/update.py)
    frames        r L f (M + 1) from either side

*In files.* A peer with too little memory for every role keeps state and scratch in mapped files, which are used at the
round boundary only. Disk: 12 P + 8 V d.

*Sharded.* Several devices can hold a replica together (peer/training/sharded.py). Each of N ranks has about P / N
parameters: whole tensors, by `owners`. The parts of a model are the tables, each block, and the head with its norm. In
bytes of a rank, G the parameters of a part, A the most of a part that other ranks have:

    parameters    16 or 12 for each of its own, as above
    inputs        4 r L d (B + 1): of each part, for the backward, and the mask
    room          4 A: for the tensors of other ranks
    part          4 G gradients, on a CPU as much again, which its heap cannot use for the next part, and in a block

                    CPU   4 r L n + 8 r L t                              n, t as above
                    GPU   the row "in flight" of one block, r L (8 d + 6 F) + 2 d F

                  in the head 8 min(r L V, LOGITS), or 4 min(r L V, GPU_LOGITS) + 4 V d + 4 r L d on a GPU
    Muon          12 W if more than inputs and part, W the largest matrix that the rank has
    overlap       4 P, of the first rank of processors

Host memory beside GPUs is that of a full replica. Moments for a checkpoint go through files where devices are
processors.

*Tied embeddings.* Such a model is trained by full replicas only (NEVER), since both ends of a chain would move one
matrix. A replica has both its gradients at once, 8 V d; the matrix counts once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from protocol.codec import formats
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest, TrainSpec

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
MOST_DEVICES = 64
"""Of one peer."""
ABREAST = 3
"""Shards whose next state is made at a time on a GPU with its state in memory; elsewhere one."""
LANES, PART = 4, 1 << 23
"""What a GPU's update goes through on the host (peer/training/update.py): lanes, and elements of a part of a tensor."""
COPY = 1.25
"""Of the parameters' bytes: what a model takes that is trained no more, with its activations."""


def on_gpu(device: str) -> bool:
    """Whether a device of this name, such as `cuda`, `cuda:1` or `2 x cuda`, is a GPU, for which other rows hold."""
    return device.rpartition(" ")[2].partition(":")[0] == GPU


def device_count(device: str) -> int:
    """Returns the number of devices in a name: 4 of `4 x cuda`, 1 of `cuda:1` and of any other."""
    number = device.rpartition(" x ")[0]
    count = int(number) if number.isdecimal() and len(number) <= len(str(MOST_DEVICES)) else 1
    return count if 1 <= count <= MOST_DEVICES else 1


def stage_shards(manifest: Manifest, first: int, last: int) -> tuple[str, ...]:
    """The shards that the stage of blocks first <= i < last trains, in canonical order. Every stage trains `anchor`."""
    return (
        *(("embed",) if first == 0 else ()),
        *(f"block.{i}" for i in range(first, last)),
        *(("head",) if last == manifest.model.n_layers else ()),
        *(("anchor",) if manifest.model.residual_width else ()),
    )


def in_flight(manifest: Manifest, first: int, last: int) -> int:
    """Micro-batches whose activations a stage keeps at least: 1 for the last stage or a single block."""
    return 1 if last == manifest.model.n_layers or last - first == 1 else window(manifest)


def window(manifest: Manifest) -> int:
    """Micro-batches whose activations a stage of several blocks can always keep; more by `depths`."""
    return min(manifest.train.micro_batches, 4)


def under_way(manifest: Manifest) -> int:
    """Micro-batches that every chain can always have under way; more by `depths`."""
    return min(manifest.train.micro_batches, WAITING * window(manifest))


def activation_bytes(manifest: Manifest, first: int, last: int, device: str = CPU, joined: int = 1) -> int:
    """Bytes that one micro-batch, or so many that are computed as one, keeps between its forward and its backward."""
    length, tokens = manifest.train.sequence, _tokens(manifest, joined)
    mask = 4 * tokens * length if manifest.model.document_end_id >= 0 else 0
    is_recorded = on_gpu(device) and last - first < manifest.model.n_layers
    recorded = 6 * tokens * manifest.model.d_model if is_recorded else 0
    return (last - first) * _block_bytes(manifest, device, tokens) + mask + recorded


def _tokens(manifest: Manifest, joined: int) -> int:
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
    return sum(math.prod(shape) for shape in layout.shapes(manifest.model, "block.0") if len(shape) > 1)


def frame_bytes(manifest: Manifest, first: int, last: int) -> int:
    """Bytes of a micro-batch that came in, from either side: frames and their tensors. None for a full replica."""
    return _came(manifest, first, last, 4)


def _came(manifest: Manifest, first: int, last: int, value_bytes: int) -> int:
    """Of frames, and of so many bytes for each of their values."""
    chains, width = manifest.chains, manifest.model.written
    forward, backward = (
        value_bytes * width + formats.bytes_per_token(f, width) for f in (chains.forward, chains.backward)
    )
    came = (forward if first > 0 else 0) + (backward if last < manifest.model.n_layers else 0)
    return manifest.train.rows * manifest.train.sequence * came


def stage_memory(manifest: Manifest, first: int, last: int, device: str = CPU, joined: int = 1) -> int:
    """Bytes of the stage of blocks first <= i < last; NEVER if it cannot be. joined: micro-batches computed as one."""
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
    """Returns the memory with all activations of `plain` micro-batches and `most` of them in flight."""
    kept = activation_bytes(manifest, first, last, device, joined) * plain
    flight = kept + frame_bytes(manifest, first, last) * most + _backward(manifest, first, last, device, joined)
    moved = max(_tied(manifest), 12 * max(_muon(manifest, "block.0"), default=0))
    return _kept(manifest, first, last, in_files, device) + max(flight, moved)


def resting_bytes(manifest: Manifest, first: int, last: int, *, in_files: bool, device: str = CPU) -> int:
    """Bytes of a stage with no micro-batch in flight, the gradients within a block included."""
    return _kept(manifest, first, last, in_files, device) + _backward(manifest, first, last, device, 1)


def later_bytes(manifest: Manifest, first: int, last: int) -> int:
    """Bytes of the shards that a stage does not hold, and holds before it becomes another one."""
    held = stage_shards(manifest, first, last)
    return sum(manifest.state_bytes(s) for s in layout.shard_names(manifest.model) if s not in held)


def host_memory(manifest: Manifest, first: int, last: int, device: str, *, in_files: bool = True) -> int:
    """Bytes of the host's memory beside a GPU that has its own; 0 for a processor."""
    if not on_gpu(device):
        return 0
    spec, train = manifest.model, manifest.train
    params, one_less = _trained(manifest, first, last)
    embed = spec.vocab_size * spec.d_model
    moments = 8 * params - 4 * one_less
    largest = max(embed, *(math.prod(shape) for shape in layout.shapes(spec, "block.0")))
    copies = 8 * LANES * min(PART, largest)
    frames = _came(manifest, first, last, 0) * (train.micro_batches + 1)
    state = 0 if in_files else _state(manifest, params) + _scratch(manifest, 2, ABREAST)
    return 4 * manifest.outer.overlap * params + moments + copies + frames + state


def _trained(manifest: Manifest, first: int, last: int) -> tuple[int, int]:
    """The parameters of a stage's shards, and how many of them Muon trains."""
    shards = stage_shards(manifest, first, last)
    params = sum(layout.parameters(manifest.model, s) for s in shards)
    return params, sum(size for s in shards for size in _muon(manifest, s))


def _kept(manifest: Manifest, first: int, last: int, in_files: bool, device: str) -> int:
    """Returns the bytes that stay from step to step on the parameters' device."""
    params, one_less = _trained(manifest, first, last)
    kept = 16 * params - 4 * one_less
    if on_gpu(device):  # the rest is the host's
        return kept
    state = 0 if in_files else _state(manifest, params) + _scratch(manifest)
    return kept + 4 * manifest.outer.overlap * params + state


def _muon(manifest: Manifest, shard: str) -> list[int]:
    """The parameters of each tensor of a shard that Muon trains."""
    shapes, train = layout.shapes(manifest.model, shard), manifest.train
    return [math.prod(shape) for shape in shapes if train.has_one_moment(shard, shape)]


def _backward(manifest: Manifest, first: int, last: int, device: str, joined: int) -> int:
    tokens = _tokens(manifest, joined)
    loss = _loss(manifest, device, tokens) if last == manifest.model.n_layers else 0
    return _gradient_bytes(manifest, device, tokens) + max(4 * _table(manifest, first), loss)


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


def _tied(manifest: Manifest) -> int:
    """Bytes of the gradients of an embedding that is the head, too."""
    spec = manifest.model
    return 8 * spec.vocab_size * spec.d_model if spec.tie_word_embeddings else 0


def _table(manifest: Manifest, first: int) -> int:
    """Parameters of a stage's rows of tokens, whose gradient a micro-batch makes as a whole."""
    spec = manifest.model
    return spec.vocab_size * (spec.d_model if first == 0 else spec.d_model - spec.written)


def warm_bytes(manifest: Manifest) -> int:
    """Bytes of the state of all shards, with what the next one of some is written into."""
    return sum(map(manifest.state_bytes, layout.shard_names(manifest.model))) + _scratch(manifest)


def _state(manifest: Manifest, params: int) -> int:
    """Bytes of theta, its momentum if there is one, and the error feedback."""
    return (12 if manifest.outer.has_momentum else 8) * params


def _scratch(manifest: Manifest, tables: int = 1, blocks: int = 1) -> int:
    spec = manifest.model
    values = tables * spec.vocab_size * spec.d_model + blocks * layout.parameters(spec, "block.0")
    return (8 if manifest.outer.has_momentum else 4) * values


# --- several devices that hold the model together


@functools.lru_cache(maxsize=256)
def owners(spec: ModelSpec, train: TrainSpec, ranks: int) -> Mapping[str, int]:
    """The rank that has each tensor, with its gradient and moments, by name: the largest first, each to the rank with
    the fewest bytes. (Flexible partitioning: Chen and others, AMSP, 2023, arXiv 2311.00257.)"""
    named = [(shard, *tensor) for shard in layout.shard_names(spec) for tensor in layout.tensors(spec, shard)]
    bytes_of = {name: _kept_bytes(train, shard, shape) for shard, name, shape in named}
    loads, found = [0] * ranks, dict.fromkeys(bytes_of, 0)
    for name in sorted(bytes_of, key=lambda name: -bytes_of[name]):
        found[name] = loads.index(min(loads))
        loads[found[name]] += bytes_of[name]
    return found


def _kept_bytes(train: TrainSpec, shard: str, shape: tuple[int, ...]) -> int:
    """Of a tensor, its gradient and its moments."""
    return (12 if train.has_one_moment(shard, shape) else 16) * math.prod(shape)


def sharded_parts(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """The parts that are computed one by one, in their order: the names of all tensors that each needs."""
    names = {shard: tuple(name for name, _ in layout.tensors(spec, shard)) for shard in layout.shard_names(spec)}
    tables = names["embed"] + names.pop("anchor", ())
    return names | {"embed": tables, "head": names["head"] + (tables if spec.tie_word_embeddings else ())}


@functools.lru_cache(maxsize=1024)
def sharded_memory(manifest: Manifest, ranks: int, device: str = CPU, joined: int = 1) -> tuple[int, ...]:
    """Bytes of each rank of a full replica on `ranks` devices. joined: micro-batches computed as one."""
    spec, train, tokens = manifest.model, manifest.train, _tokens(manifest, joined)
    owner, gpu = owners(spec, train, ranks), on_gpu(device)
    sizes, held, muon = dict[str, int](), [0] * ranks, [0] * ranks
    for shard in layout.shard_names(spec):
        for name, shape in layout.tensors(spec, shard):
            sizes[name], rank = math.prod(shape), owner[name]
            held[rank] += _kept_bytes(train, shard, shape)
            if train.has_one_moment(shard, shape):
                muon[rank] = max(muon[rank], 12 * sizes[name])
    inputs = 4 * tokens * spec.d_model * (spec.n_layers + 1)
    inputs += 4 * tokens * train.sequence if spec.document_end_id >= 0 else 0
    within = {"embed": 0, "head": _loss(manifest, device, tokens) - 4 * spec.vocab_size * spec.d_model}
    moved = _gradient_bytes(manifest, device, tokens) - (
        4 * _matrices(manifest) if gpu else 4 * spec.d_model * spec.d_ff
    )
    block, most, others = _block_bytes(manifest, device, tokens) + moved, 0, [0] * ranks
    for shard, names in sharded_parts(spec).items():
        own = [0] * ranks
        for name in names:
            own[owner[name]] += sizes[name]
        others = [max(room, sum(own) - part) for room, part in zip(others, own, strict=True)]
        most = max(most, (4 if gpu else 8) * sum(own) + within.get(shard, block))
    found = [kept + 4 * room + max(inputs + most, one) for kept, room, one in zip(held, others, muon, strict=True)]
    found[0] += 0 if gpu else 4 * manifest.outer.overlap * sum(sizes.values())
    return tuple(found)
