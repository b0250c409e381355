"""Memory that a machine offers, and whether it is enough for a stage, a spare, or work beside training. Pure.

A stage needs `own` bytes of the device that trains and `host` bytes beside it (protocol/planning/memory.py).

    a processor, or `mps`                 one budget; all that a stage needs is its own
    a GPU with memory of its own          two budgets, each of which must be enough
    a GPU that uses the host's memory     one budget, for both together

Several devices have the memory of each (`4 x cuda`). A full replica is on each of them where each holds it, else they
hold it together; a stage of a chain is on the first.
"""

from __future__ import annotations

import functools
import itertools
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, replace

from protocol.planning import memory
from protocol.planning.memory import CPU, NEVER, WAITING, on_gpu
from protocol.planning.pipeline_model import Depths
from protocol.run import layout
from protocol.run.manifest import Manifest

JOINED = 1 << 15
"""Tokens that a GPU computes at once, at most: more make it no faster (docs/results/gpu.md)."""

Bytes = tuple[int, int]
"""Of what trains, and of the host beside it."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Usable memory above an idle process.

    memory_bytes: of `device`, which trains
    host_bytes: beside a GPU; 0: the GPU uses the host's memory, None: unknown. A processor has none.
    """

    memory_bytes: int
    device: str = CPU
    host_bytes: int | None = None

    @property
    def is_split(self) -> bool:
        """Whether the host has a budget of its own."""
        return on_gpu(self.device) and self.host_bytes != 0

    def holds(self, need: Bytes) -> bool:
        own, host = need
        if not self.is_split:
            return own + host <= self.memory_bytes
        return own <= self.memory_bytes and (self.host_bytes is None or host <= self.host_bytes)

    def share(self, need: Bytes) -> float:
        """Which part of it that takes; of two budgets, of the one of which it takes more."""
        own, host = need
        if not self.is_split:
            return (own + host) / max(self.memory_bytes, 1)
        return max(own / max(self.memory_bytes, 1), host / self.host_bytes if self.host_bytes else 0.0)

    @property
    def of_one(self) -> Budget:
        """Returns the same of one of several devices."""
        return replace(self, device=self.device.rpartition(" x ")[2])

    def own_bytes(self, host: int) -> int:
        """Returns the bytes left for training where the host needs `host` bytes."""
        return self.memory_bytes if self.is_split else self.memory_bytes - host


# --- stages


def needs_of(manifest: Manifest, first: int, last: int, device: str = CPU, joined: int = 1) -> Bytes:
    """Returns the needs of the stage of blocks first <= i < last, of each device; NEVER where it is impossible."""
    kind, ranks = memory.GPU if on_gpu(device) else CPU, memory.device_count(device)
    own = memory.stage_memory(manifest, first, last, kind, joined)
    if ranks > 1 and last - first == manifest.model.n_layers:
        own = min(own, max(memory.sharded_memory(manifest, ranks, kind, joined)))
    return own, memory.host_memory(manifest, first, last, kind)


def needs_by_range(manifest: Manifest, device: str = CPU) -> Mapping[tuple[int, int], Bytes]:
    """(first, last) -> `needs_of`, for every range of blocks."""
    found, whole = _needs_by_range(manifest, on_gpu(device)), (0, manifest.model.n_layers)
    if memory.device_count(device) == 1:
        return found
    return ChainMap({whole: needs_of(manifest, *whole, device)}, found)


@functools.lru_cache(maxsize=8)
def _needs_by_range(manifest: Manifest, gpu: bool) -> dict[tuple[int, int], Bytes]:
    layers, device = manifest.model.n_layers, memory.GPU if gpu else CPU
    inner = {n: needs_of(manifest, 1, 1 + n, device) for n in range(1, layers - 1)}  # all blocks are alike
    found: dict[tuple[int, int], Bytes] = {}
    for a, b in itertools.combinations(range(layers + 1), 2):
        found[a, b] = inner[b - a] if a > 0 and b < layers else needs_of(manifest, a, b, device)
    return found


def fits(manifest: Manifest, budget: Budget, first: int, last: int) -> bool:
    """Returns whether this is enough for the stage of blocks first <= i < last."""
    return budget.holds(needs_by_range(manifest, budget.device)[first, last])


def holds_whole(manifest: Manifest, budget: Budget) -> bool:
    return fits(manifest, budget, 0, manifest.model.n_layers)


def is_sharded(manifest: Manifest, budget: Budget) -> bool:
    """Returns whether several devices hold the whole model together, and none of them alone."""
    several = memory.device_count(budget.device) > 1
    return several and holds_whole(manifest, budget) and not holds_whole(manifest, budget.of_one)


def most_blocks(manifest: Manifest, budget: Budget) -> int:
    return max(
        (b - a for (a, b), need in needs_by_range(manifest, budget.device).items() if budget.holds(need)), default=0
    )


def smallest_stage(manifest: Manifest, device: str = CPU) -> Bytes:
    """The least need of a stage of one block, or of the whole model where it has no chains."""
    layers, needs = manifest.model.n_layers, needs_by_range(manifest, device)
    some = [needs[a, b] for a, b in [(0, layers), *((i, i + 1) for i in range(layers))]]
    some = [need for need in some if need[0] < NEVER]
    return min(own for own, _ in some), min(host for _, host in some)


# --- whatever a peer may be asked to train


@functools.lru_cache(maxsize=8)
def _most_demanding(manifest: Manifest, gpu: bool, in_files: bool) -> tuple[Bytes, ...]:
    """Returns the needs of the most demanding stages; without files, with all other shards for a later role."""
    layers, device = manifest.model.n_layers, memory.GPU if gpu else CPU
    parts = [(a, b) for a, b in ((0, layers - 1), (1, layers)) if a < b and not manifest.model.tie_word_embeddings]
    found = []
    for a, b in ((0, layers), *parts):
        plain, most = memory.in_flight(manifest, a, b), memory.under_way(manifest)
        later = 0 if in_files else memory.later_bytes(manifest, a, b)
        own = memory.memory_at(manifest, a, b, plain, most, in_files=in_files, device=device)
        host = memory.host_memory(manifest, a, b, device, in_files=in_files)
        found.append((own, host + later) if gpu else (own + later, host))
    return tuple(found)


def in_files(manifest: Manifest, budget: Budget) -> bool:
    """Whether a peer keeps in files what only a round's end needs, since it has no room for all of it in memory."""
    most = _most_demanding(manifest, on_gpu(budget.device), False)
    if budget.is_split:  # what trains has no part in it
        return budget.host_bytes is not None and any(host > budget.host_bytes for _, host in most)
    return not all(budget.holds(need) for need in most)


def keeps_warm(manifest: Manifest, budget: Budget) -> bool:
    """Returns whether a spare keeps all shards, so that it can take any stage for which it has room."""
    needed = memory.warm_bytes(manifest)
    return budget.holds((0, needed) if budget.is_split else (needed, 0))


def has_room_to_evaluate(manifest: Manifest, budget: Budget) -> bool:
    """Returns whether there is room for a copy of the whole model in addition to any stage."""
    gpu, copy = on_gpu(budget.device), _copy_bytes(manifest)
    return all(budget.holds((own + copy, host)) for own, host in _most_demanding(manifest, gpu, gpu))


def _copy_bytes(manifest: Manifest) -> int:
    return int(memory.COPY * 4 * layout.total_parameters(manifest.model))


# --- how much of a step at a time


def joined(manifest: Manifest, micro_batches: int, budget: Budget, devices: int = 1) -> int:
    """Micro-batches that a full replica computes as one, to keep a GPU busy: a divisor that fits in memory."""
    most = min(_most_joined(manifest, budget), micro_batches // devices)
    return next((count for count in range(most, 1, -1) if micro_batches % count == 0), 1)


def _most_joined(manifest: Manifest, budget: Budget) -> int:
    """As many as there is memory for, beside a copy of the model where that is there to evaluate."""
    if not on_gpu(budget.device):
        return 1
    layers, room = manifest.model.n_layers, budget.of_one if holds_whole(manifest, budget.of_one) else budget
    if has_room_to_evaluate(manifest, budget):
        room = replace(room, memory_bytes=budget.memory_bytes - _copy_bytes(manifest))
    counts = range(JOINED // (manifest.train.rows * manifest.train.sequence), 1, -1)
    return next((n for n in counts if room.holds(needs_of(manifest, 0, layers, room.device, n))), 1)


def depths(manifest: Manifest, first: int, last: int, budget: Budget) -> Depths:
    """Micro-batches under way for which a stage has memory; a host beside a GPU has room for all frames of a step.

    Recomputing and last stages keep one micro-batch's activations; below a window a stage recomputes.
    """
    device = budget.device
    one, frame = memory.activation_bytes(manifest, first, last, device), memory.frame_bytes(manifest, first, last)
    resting = memory.resting_bytes(manifest, first, last, in_files=in_files(manifest, budget), device=device)
    free = budget.own_bytes(memory.host_memory(manifest, first, last, device)) - resting
    most = max(memory.under_way(manifest), (free - one) // max(frame, 1))
    if last == manifest.model.n_layers:
        return Depths(plain=most, held=most, most=most)
    plain = max(memory.in_flight(manifest, first, last), free // (one + WAITING * frame))
    held = (free - plain * one) // max(frame, 1) if plain >= memory.window(manifest) else plain
    return Depths(plain=plain, held=max(plain, held), most=max(plain, held, most))
