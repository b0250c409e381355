"""Tables of a manifest: costs and needs of stages by kind and number of blocks, and room of a swarm's members.

A stage is the first of a chain (with the embedding), a middle one, the last (with the head), or the whole model.
Arrays of members are [n], rows of members [N, S]; R, K, n: see `Shapes`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.codec import formats, sparse
from protocol.planning import budget, memory, partition
from protocol.planning.budget import Budget
from protocol.planning.memory import NEVER, WAITING
from protocol.planning.partition import Candidate
from protocol.run import layout
from protocol.run.manifest import AGGREGATE_WORTH, Manifest

FIRST, MIDDLE, LAST, WHOLE = range(4)
IN_MEMORY, IN_FILES, CARD, SHARED = range(4)
"""Kinds of memory: a processor's, with its state in files, a GPU's own, the host's used by a GPU."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shapes:
    """Tables of a manifest, of one micro-batch.

    R: kinds of memory (4), K: kinds of a stage (4), n: blocks of the stage, 0..layers
    """

    layers: int
    tokens: int
    """Of a micro-batch."""
    micro_batches: int
    """Of an inner step."""
    block_ops: float
    extra_ops: Floats
    """[K]: operations beside the blocks'."""
    needs: Floats
    """[R, K, n]: memory, infinite where there is no such stage."""
    host: Floats
    """[K, n]: the host's memory beside a GPU that has its own, infinite where there is no such stage."""
    resting: Floats
    """[R, K, n]: memory with nothing in flight."""
    flight: Floats
    """[R, K, n]: memory of a micro-batch between its forward and its backward."""
    frame: Floats
    """[K]: memory of what came in for it."""
    least: Floats
    """[K, n]: micro-batches for all of whose activations every stage has memory."""
    window: int
    """The same of every stage of several blocks."""
    under_way: int
    """Micro-batches that every chain can have under way."""
    payload_bits: Floats
    """[K, n]: what its member offers after a round, and fetches of every other replica."""
    entry_bits: float
    """Of a payload, for each entry."""
    boundary_bits: Floats
    """[2]: of a frame forward and backward."""
    round_seconds: float
    """How long a round trains."""
    overlap: bool
    """Whether training goes on while a round's payloads travel."""
    most_fetched: tuple[float, float]
    """The size of an aggregate in multiples of an update, and the fewest replicas of a round that has one; infinite
    without aggregates."""


@functools.lru_cache(maxsize=8)
def shapes(manifest: Manifest) -> Shapes:
    """The tables of a manifest. Raises nothing: every manifest has them."""
    layers, train = manifest.model.n_layers, manifest.train
    tokens = train.rows * train.sequence
    embed, block, head = partition.part_operations(manifest)
    needs, host = np.full((4, 4, layers + 1), math.inf), np.full((4, layers + 1), math.inf)
    flight, resting = np.zeros((4, 4, layers + 1)), np.zeros((4, 4, layers + 1))
    least, frame = np.zeros((4, layers + 1)), np.zeros(4)
    for kind in (FIRST, MIDDLE, LAST, WHOLE):
        for n in _sizes(kind, layers):
            first, last = _place(kind, n, layers)
            host[kind, n] = memory.host_memory(manifest, first, last, memory.GPU)
            least[kind, n] = memory.in_flight(manifest, first, last)
            frame[kind] = memory.frame_bytes(manifest, first, last)
            for form in (IN_MEMORY, IN_FILES, CARD, SHARED):
                device, files = memory.GPU if form in (CARD, SHARED) else memory.CPU, form != IN_MEMORY
                more = host[kind, n] if form == SHARED else 0.0
                needs[form, kind, n] = memory.stage_memory(manifest, first, last, device) + more
                rest = memory.resting_bytes(manifest, first, last, in_files=files, device=device)
                resting[form, kind, n] = rest + more
                flight[form, kind, n] = memory.activation_bytes(manifest, first, last, device)
    kinds = (manifest.chains.forward, manifest.chains.backward)
    bits = [8 * tokens * formats.bytes_per_token(f, manifest.model.written) for f in kinds]
    return Shapes(
        layers=layers,
        tokens=tokens,
        micro_batches=train.micro_batches,
        block_ops=float(block),
        extra_ops=np.array([embed, 0, head, embed + head], dtype=np.float64),
        needs=needs,
        host=host,
        resting=resting,
        flight=flight,
        frame=frame,
        least=least,
        window=memory.window(manifest),
        under_way=memory.under_way(manifest),
        payload_bits=(payload := _payload_bits(manifest)),
        entry_bits=float(payload[WHOLE, layers]) / _entries(manifest),
        boundary_bits=np.array(bits, dtype=np.float64),
        round_seconds=manifest.timing.training_seconds,
        overlap=manifest.outer.overlap > 0,
        most_fetched=_most_fetched(manifest, float(payload[WHOLE, layers])),
    )


def form_of(manifest: Manifest, room: Budget) -> int:
    """Of which kind a machine's memory is."""
    if memory.on_gpu(room.device):
        return CARD if room.is_split else SHARED
    return IN_FILES if budget.in_files(manifest, room) else IN_MEMORY


def _sizes(kind: int, layers: int) -> range:
    """The numbers of blocks that a stage of this kind can have."""
    if kind == WHOLE:
        return range(layers, layers + 1)
    return range(1, layers - 1 if kind == MIDDLE else layers)


def _place(kind: int, n: int, layers: int) -> tuple[int, int]:
    """A range of n blocks that is of this kind."""
    return {FIRST: (0, n), MIDDLE: (1, 1 + n), LAST: (layers - n, layers), WHOLE: (0, layers)}[kind]


def _payload_bits(manifest: Manifest) -> Floats:
    """[K, n]: bits of the payloads of a stage's shards."""

    def bits(shard: str) -> int:
        return 8 * sparse.max_payload_size(manifest.outer.codec, layout.shapes(manifest.model, shard))

    embed, block, head = bits("embed"), bits("block.0"), bits("head")
    anchor = bits("anchor") if manifest.model.residual_width else 0
    n = np.arange(manifest.model.n_layers + 1, dtype=np.float64)
    return np.stack([anchor + extra + n * block for extra in (embed, 0, head, embed + head)])


def _most_fetched(manifest: Manifest, payload_bits: float) -> tuple[float, float]:
    """See `Shapes.most_fetched`."""
    if not manifest.outer.aggregate_topk:
        return math.inf, math.inf
    codec, shards = manifest.outer.aggregate_codec, layout.shard_names(manifest.model)
    size = sum(sparse.max_payload_size(codec, layout.shapes(manifest.model, shard)) for shard in shards)
    return 8 * size / payload_bits, AGGREGATE_WORTH * 8 * size / payload_bits


def _entries(manifest: Manifest) -> int:
    """Of the payloads of a whole replica."""
    shards, codec = layout.shard_names(manifest.model), manifest.outer.codec
    return sum(sparse.entries(codec, layout.shapes(manifest.model, shard)) for shard in shards)


MOST_BYTES = NEVER // 2


class Holding:
    """The members' memory, in the order in which they were given."""

    def __init__(self, manifest: Manifest, candidates: Sequence[Candidate]) -> None:
        self._table = shapes(manifest)
        rooms = [c.budget for c in candidates]
        self._memory = np.array([min(max(room.memory_bytes, 0), MOST_BYTES) for room in rooms], dtype=np.float64)
        beside = [room.host_bytes if room.is_split else None for room in rooms]
        self._host = np.array([math.inf if b is None else min(b, MOST_BYTES) for b in beside], dtype=np.float64)
        self._flight, self._resting = (x.reshape(16, -1) for x in (self._table.flight, self._table.resting))  # [R K, n]
        self._sharded = np.array([budget.is_sharded(manifest, room) for room in rooms], dtype=np.bool_)
        self._form = np.array([form_of(manifest, room) for room in rooms], dtype=np.int64)

    def caps(self) -> Ints:
        """[K, n]: the most blocks that a member can hold as a stage of each kind."""
        table, caps = self._table, np.zeros((4, len(self._form)), dtype=np.int64)
        for kind in (FIRST, MIDDLE, LAST):
            beside = np.searchsorted(table.host[kind, 1:], self._host, side="right")
            caps[kind] = np.minimum(self._within(table.needs[:, kind, 1:]), beside)
        whole = (self._memory >= table.needs[self._form, WHOLE, -1]) & (self._host >= table.host[WHOLE, -1])
        caps[WHOLE] = np.where(whole | self._sharded, table.layers, 0)
        return caps

    def caps_at(self, caps: Ints, depth: int) -> Ints:
        """[K, n]: the most blocks with `depth` micro-batches in flight, at most `caps`; one block where none fit."""
        table, found = self._table, caps.copy()
        for kind in (FIRST, MIDDLE):
            flight = depth * (table.flight[:, kind] + WAITING * table.frame[kind])
            needs = np.maximum(table.needs[:, kind], table.resting[:, kind] + flight)
            found[kind] = np.minimum(caps[kind], np.maximum(self._within(needs[:, 1:]), 1))
        return found

    def _within(self, needs: Floats) -> Ints:
        """[n]: how many of the `needs` [R, blocks] of what trains, which ascend, are within a member's memory."""
        found = [np.searchsorted(some, self._memory, side="right") for some in needs]
        within: Ints = np.stack(found)[self._form, np.arange(len(self._form))]
        return within

    def room(self, rows: Ints, kind: Ints, blocks: Ints) -> tuple[Floats, Floats, Floats]:
        """[N, S] each: micro-batches with all activations, with others waiting, and with recomputation; or infinite."""
        table, there, which = self._table, rows >= 0, 4 * self._form[rows] + kind
        one, frame = self._flight[which, blocks], np.maximum(table.frame[kind], 1.0)
        free = self._memory[rows] - self._resting[which, blocks]
        most = np.where(there, np.maximum(np.floor((free - one) / frame), table.under_way), math.inf)
        plain = np.maximum(np.floor(free / np.maximum(one + WAITING * frame, 1.0)), table.least[kind, blocks])
        held = np.where(plain >= table.window, np.maximum(plain, np.floor((free - plain * one) / frame)), plain)
        inner = there & (kind != LAST) & (kind != WHOLE)
        return np.where(inner, plain, math.inf), np.where(inner, held, most), most
