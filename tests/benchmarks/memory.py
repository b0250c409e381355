"""Compares the peak memory of a chain's stage with the planner's formula, for several shapes and depths 1 to 16.

    python -m tests.benchmarks.memory                  # the grid (about 20 minutes)
    python -m tests.benchmarks.memory --shape wide --stage last --depth 16
    python -m tests.benchmarks.memory --shape grouped qk-norm documents tied --depth 1 4
    python -m tests.benchmarks.memory --shape muon --depth 1 4
    python -m tests.benchmarks.memory --memory         # with the state in memory instead of mapped files
    python -m tests.benchmarks.memory --shape 7b --stage middle --depth 2     # half an hour, 8 GB of disk

The measured stage is a process of its own with a peer's whole state: theta, error feedback, AdamW's moments, and the
arrays for the next state. It does two rounds of one inner step and an outer step. It talks through
`peer/chain/pipeline.py` and sockets to neighbours in other processes. These send activations for as many micro-batches
as may be under way, and no gradient before that many went forward. There is no network daemon; its memory is not
counted.

Memory is counted above an idle process that has loaded torch and done the same with a tiny model. Only anonymous memory
counts (RssAnon in /proc/PID/status, read every millisecond from outside). The system can drop pages of files (RssFile)
when it needs room; they are printed, too. The formula is in protocol/planning/memory.py. Exits with 1 if a peak is off
by more than a tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import multiprocessing
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peer.chain.link import Liveness
from peer.chain.pipeline import StageSetup, run_steps
from peer.net.base import Stream, Traffic
from peer.net.disk import Disk
from peer.net.stream import Flow, FrameStream
from peer.state.outer_optimizer import Outer
from peer.training import device
from peer.training.trainer import StageTrainer, make_worker
from protocol.codec.topk import in_memory
from protocol.planning import memory
from protocol.planning.pipeline_model import Depths
from protocol.run import init, layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import ChainSpec, Manifest, TrainSpec
from tests.benchmarks.chain import StandIn
from tests.support import tiny

MICRO_BATCHES = 16
ROUNDS = 2
TIMEOUT = 3000.0
WITHIN = 0.1
STAGES = ("first", "middle", "last")
WHOLE = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A chain of three equal stages of `blocks` blocks.

    k: residual width; 0 for whole activations.
    options: further fields of the model.
    optimizer: of the manifest.
    """

    vocab: int
    d: int
    blocks: int
    rows: int
    sequence: int
    k: int
    wire: str = "int4"
    ff: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    optimizer: str = "adamw"

    def manifest(self, depth: int = MICRO_BATCHES) -> Manifest:
        """Returns a manifest whose step keeps `depth` micro-batches under way for a while."""
        model = ModelSpec(
            vocab_size=self.vocab, d_model=self.d, n_layers=3 * self.blocks, n_heads=self.d // 64,
            d_ff=self.ff or self.d * 11 // 4, context=self.sequence,
            residual_width=self.k, **dict(self.options),
        )  # fmt: skip
        train = TrainSpec(
            inner_steps=1, micro_batches=depth if self.ff else min(2 * depth + 2, MICRO_BATCHES),
            rows=self.rows, sequence=self.sequence, lr=1e-3, warmup_steps=0, total_steps=9, optimizer=self.optimizer,
        )  # fmt: skip
        return tiny.manifest(model=model, train=train, chains=ChainSpec(forward=self.wire, backward=self.wire))

    def range(self, stage: str) -> tuple[int, int]:
        """Returns the stage's blocks."""
        if stage == WHOLE:
            return 0, 3 * self.blocks
        at = STAGES.index(stage)
        return at * self.blocks, (at + 1) * self.blocks


SHAPES = {
    "small": Shape(vocab=4096, d=256, blocks=4, rows=4, sequence=256, k=84),
    "whole": Shape(vocab=4096, d=256, blocks=4, rows=4, sequence=256, k=0, wire="bf16"),
    "wide": Shape(vocab=32768, d=512, blocks=2, rows=1, sequence=256, k=168),
    "wide-whole": Shape(vocab=32768, d=512, blocks=2, rows=1, sequence=256, k=0, wire="bf16"),
    "long": Shape(vocab=4096, d=512, blocks=2, rows=1, sequence=1024, k=168),
    "large": Shape(vocab=16384, d=768, blocks=2, rows=1, sequence=512, k=252),
    "7b": Shape(vocab=128_000, d=4096, ff=11_008, blocks=1, rows=1, sequence=1024, k=1344),
}
OPTIONS = {
    "grouped": Shape(vocab=4096, d=512, blocks=2, rows=1, sequence=1024, k=168, options=(("num_key_value_heads", 2),)),
    "qk-norm": Shape(vocab=4096, d=512, blocks=2, rows=1, sequence=1024, k=168, options=(("use_qk_norm", True),)),
    "documents": Shape(vocab=4096, d=512, blocks=2, rows=1, sequence=1024, k=168, options=(("document_end_id", 0),)),
    "muon": Shape(vocab=4096, d=512, blocks=2, rows=1, sequence=256, k=168, optimizer="muon"),
    "tied": Shape(vocab=32768, d=512, blocks=1, rows=1, sequence=256, k=0, options=(("tie_word_embeddings", True),)),
}
"""Options of the architecture, and Muon; they are measured only if they are named."""
FEW = (1, 2, 4, 8, 16)


Ends = tuple[socket.socket | None, socket.socket | None]
"""Sockets to the previous stage and to the next."""


# --- the processes


class Neighbour(StandIn):
    """A stage beside the measured one. `gate`: passed by each micro-batch before its gradient."""

    def __init__(self, manifest: Manifest, shards: tuple[str, ...], width: int, gate: Semaphore | None) -> None:
        super().__init__(manifest.model, manifest.train, shards, width)
        self._gate = gate

    def forward(self, micro: int, ids: torch.Tensor, wire: torch.Tensor | None, *, recompute: bool) -> torch.Tensor:
        if self._gate is not None:
            self._gate.acquire()
        return super().forward(micro, ids, wire, recompute=recompute)


class Gated(StageTrainer):
    """The measured stage, which lets gradients come once `depth` micro-batches went forward.

    most: the largest number of micro-batches under way here.
    """

    gate: Semaphore | None = None
    depth = most = 0

    def forward(self, micro: int, *args: Any, **options: Any) -> Any:
        out = super().forward(micro, *args, **options)
        self.most = max(self.most, len(self._forwarded))
        if self.gate is not None:
            last = micro + 1 == self.train.micro_batches
            for _ in range(self.depth if last else int(micro + 1 >= self.depth)):
                self.gate.release()
        return out


async def run(
    trainer: Any,
    ends: Ends,
    depth: int,
    plain: int,
    wire: str,
    before: Callable[[], object],
    after: Callable[[], object],
) -> int:
    """Runs all rounds' inner steps, with `before` and `after` around each. Returns the most frames that waited."""

    async def stream(end: socket.socket | None) -> Stream | None:
        if end is None:
            return None
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return FrameStream("other", "pipe", reader, writer, writer.transport.abort, Traffic(), Flow())

    previous, following = [await stream(end) for end in ends]
    rng, queued = np.random.default_rng(0), 0
    shape = (trainer.train.step_rows, trainer.train.sequence + 1)

    async def read(step: int) -> np.ndarray:
        ids = rng.integers(0, trainer.spec.vocab_size, shape)
        ids[:, ::100] = 0  # where documents end, if they do
        return ids

    setup = StageSetup(
        trainer=trainer, worker=make_worker(), wires=(wire, wire), timeout=TIMEOUT, read=read,
        depth=depth, depths=Depths(plain=plain, held=plain, most=depth),
        liveness=Liveness(silent_s=TIMEOUT, longest_s=TIMEOUT),  # beside other work nobody is gone
    )  # fmt: skip
    for step in range(1, ROUNDS + 1):
        before()
        reports = await run_steps(setup, first_step=step, steps=1, previous=previous, following=following)
        queued = max(queued, reports[0].queued)
        after()
    return queued


def neighbour(
    shape: Shape, shards: tuple[str, ...], ends: Ends, depth: int, ready: Semaphore, gate: Semaphore | None
) -> None:
    torch.set_num_threads(1)
    manifest = shape.manifest(depth)
    stand_in = Neighbour(manifest, shards, shape.k or shape.d, gate)
    asyncio.run(run(stand_in, ends, depth, depth, shape.wire, ready.acquire, lambda: None))


def peer(
    shape: Shape,
    shards: tuple[str, ...],
    ends: Ends,
    depth: int,
    recompute: bool,
    ready: Semaphore,
    gate: Semaphore | None,
    folder: Path | None,
) -> tuple[int, int]:
    """Runs a peer with these shards, whose state is in files of `folder` if there is one.

    Returns the most micro-batches under way, and the most frames that waited.
    """
    manifest = shape.manifest(depth)
    spec = manifest.model
    empty = in_memory if folder is None else partial(Disk().arrays, folder)
    outer = Outer(spec, manifest.outer.codec, manifest.outer.beta, manifest.outer.eta, empty=empty)
    for shard in shards:
        outer.theta[shard] = init.initial_shard(spec, b"memory", shard, empty=empty)
    trainer = Gated(spec, manifest.train, shards)
    trainer.gate, trainer.depth = gate, depth
    scratch: list[Any] = []

    def go() -> None:
        for _ in filter(None, ends):
            ready.release()

    def outer_step() -> None:
        device.return_memory()
        payloads = {}
        for shard in shards:
            outer.accumulate(shard, trainer.displacement(shard))
            payloads[shard], _ = outer.encode(shard)
        trainer.release()
        for shard in shards:
            outer.apply(shard, [(0.5, payloads[shard])] * 2, scratch)
            outer.digest(shard)
        trainer.begin_round(outer.theta)

    trainer.begin_round(outer.theta)
    plain = 1 if recompute else depth
    queued = asyncio.run(run(trainer, ends, depth, plain, shape.wire, go, outer_step))
    return trainer.most, queued


def measured(
    shape: Shape, shards: tuple[str, ...], ends: Ends, depth: int, recompute: bool, ready: Semaphore,
    gate: Semaphore | None, files: bool, result: Connection,
) -> None:  # fmt: skip
    """Sends None when the process is idle, and the result of `peer` at the end."""
    device.one_heap()
    torch.set_num_threads(1)
    small = dataclasses.replace(shape, vocab=64, d=64, ff=0, blocks=1, rows=1, sequence=8, k=0, options=())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) if files else None
        peer(small, layout.shard_names(small.manifest().model), (None, None), depth, False, ready, None, folder)
        result.send(None)
        result.send(peer(shape, shards, ends, depth, recompute, ready, gate, folder))


def resident(pid: int) -> tuple[int, int]:
    """Returns the bytes of anonymous memory and of mapped pages of files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}
    return found["RssAnon"], found["RssFile"]


def watch(pid: int, result: Connection) -> tuple[tuple[int, int], Any]:
    """Returns the most of both until a result comes, and the result."""
    anonymous = mapped = 0
    while not result.poll(0.001):
        now = resident(pid)
        anonymous, mapped = max(anonymous, now[0]), max(mapped, now[1])
    return (anonymous, mapped), result.recv()


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes at the peak above the idle process, and the result of `peer`."""

    anonymous: int
    mapped: int
    under_way: int
    waited: int


def measure(shape: Shape, stage: str, depth: int, recompute: bool, files: bool) -> Measured:
    """Runs the stage between its neighbours."""
    context = multiprocessing.get_context("spawn")
    model, (first, last) = shape.manifest().model, shape.range(stage)
    shards, blocks = memory.stage_shards(shape.manifest(), first, last), model.n_layers
    before = memory.stage_shards(shape.manifest(), 0, first) if first else ()
    behind = memory.stage_shards(shape.manifest(), last, blocks) if last < blocks else ()
    gate, ready = context.Semaphore(0) if behind else None, context.Semaphore(0)
    ends: list[socket.socket | None] = [None, None]
    here, there = context.Pipe(duplex=False)
    processes, sockets = [], []
    for side, theirs in enumerate((before, behind)):
        if theirs:
            ends[side], other = socket.socketpair()
            sockets += [ends[side], other]
            links = (other, None) if side else (None, other)
            args = (shape, theirs, links, depth, ready, gate if side else None)
            processes.append(context.Process(target=neighbour, args=args, daemon=True))
    args = (shape, shards, tuple(ends), depth, recompute, ready, gate, files, there)
    processes.append(context.Process(target=measured, args=args, daemon=True))
    try:
        for process in processes:
            process.start()
        for end in (*sockets, there):
            end.close()
        pid = processes[-1].pid
        assert pid is not None
        idle, _ = watch(pid, here)
        peak, (under_way, waited) = watch(pid, here)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return Measured(peak[0] - idle[0], peak[1] - idle[1], under_way, waited)


def grid(chosen: argparse.Namespace) -> Iterator[tuple[str, str, bool, int]]:
    for name in chosen.shape or [name for name in SHAPES if not SHAPES[name].ff]:
        for stage in chosen.stage or ((WHOLE,) if name == "tied" else STAGES):
            for recompute in (False, True) if stage not in ("last", WHOLE) else (False,):
                for depth in chosen.depth or (range(1, MICRO_BATCHES + 1) if name == "small" else FEW):
                    if recompute <= (depth > 1):
                        yield name, stage, recompute, depth


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", choices=SHAPES | OPTIONS)
    parser.add_argument("--stage", nargs="*", choices=(*STAGES, WHOLE))
    parser.add_argument("--depth", nargs="*", type=int)
    parser.add_argument("--memory", action="store_true")
    chosen = parser.parse_args()
    worst = 0.0
    print(
        "| shape | stage | recomputed | depth | peak | formula | off by | pages of files | under way | waited |\n"
        "|---|---|---|---|---|---|---|---|---|---|"
    )
    for name, stage, recompute, depth in grid(chosen):
        shape = (SHAPES | OPTIONS)[name]
        found = measure(shape, stage, depth, recompute, not chosen.memory)
        manifest, (first, last) = shape.manifest(), shape.range(stage)
        plain = 1 if recompute or stage in ("last", WHOLE) else depth
        expected = memory.memory_at(manifest, first, last, plain, depth, in_files=not chosen.memory)
        off = found.anonymous / expected - 1
        worst = max(worst, abs(off))
        again = "yes" if recompute else "no"
        print(
            f"| {name} | {stage} | {again} | {depth} |"
            f" {found.anonymous / 1e6:.1f} MB | {expected / 1e6:.1f} MB | {100 * off:+.1f} % |"
            f" {found.mapped / 1e6:.1f} MB | {found.under_way} | {found.waited} |",
            flush=True,
        )
    return 0 if worst <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
