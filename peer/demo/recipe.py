"""The demo's options, its text, model and peers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from filelock import FileLock

from peer.config import cache_folder
from peer.corpus import sources
from peer.corpus.build import Request, build
from peer.corpus.text import CorpusReader
from peer.net.disk import Disk, disk_errors
from peer.node import open_run
from peer.node.open_run import ASSETS
from protocol.errors import UsageError
from protocol.identity import Identity
from protocol.planning import partition
from protocol.planning.budget import Budget, needs_of
from protocol.run import corpus
from protocol.run.corpus import INDEX
from protocol.run.layout import ModelSpec
from protocol.run.manifest import DataSpec, Manifest, OuterSpec, TimingSpec, TokenizerSpec, TrainSpec

MODEL = ModelSpec(vocab_size=4096, d_model=128, n_layers=4, n_heads=4, d_ff=352, context=128)
HOME_UP_BPS = 20_000_000
ROUNDS = 30
INNER_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options of `potluck demo`."""

    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds to train (default: the demo's recipe).")] = None
    full: Annotated[int, typer.Option(min=0, help="Full replicas.")] = 2
    chains: Annotated[int, typer.Option(min=0, help="Pipeline chains of weak peers.")] = 1
    stages: Annotated[int, typer.Option(min=2, max=16, help="Members of each chain.")] = 3
    spares: Annotated[int, typer.Option(min=0, help="Weak peers beyond those that the chains need.")] = 0
    residual_width: Annotated[
        int,
        typer.Option(min=0, help="Values of a token that blocks write and the stages of a chain exchange; 0: all."),
    ] = 42
    inner_steps: Annotated[int | None, typer.Option(min=1, help="Inner steps per round, H.")] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of the model, the data order and the demo's keys.")] = 0
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "cpu"
    out: Annotated[Path, typer.Option(help="Folder for everything that the demo writes; must not exist yet.")] = Path(
        "demo-run"
    )
    json: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None
    screen: Annotated[bool, typer.Option("--screen/--no-screen", help="Live screen, or plain lines.")] = True
    in_memory: Annotated[
        bool, typer.Option("--in-memory", help="The same run in one process, without hivemind (for comparison).")
    ] = False


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """A peer of the demo and the resources that it announces."""

    name: str
    identity: Identity
    memory_bytes: int
    up_bps: int


def identity_of(seed: int, name: str) -> Identity:
    """A key that depends on the demo's seed only, so that two demos order their peers alike. Not a secret."""
    return Identity(hashlib.sha256(f"potluck/demo/{seed}/{name}".encode()).digest())


def check(options: DemoOptions, model: ModelSpec = MODEL) -> None:
    """Raises UsageError for impossible options."""
    if options.full + options.chains == 0:
        raise UsageError("--full 0 --chains 0: nobody would train; ask for at least one replica")
    if options.chains and options.stages > model.n_layers:
        raise UsageError(
            f"--stages {options.stages}: the demo's model has {model.n_layers} blocks; ask for at most so many"
        )
    if options.residual_width >= model.d_model or options.residual_width % 2:
        raise UsageError(
            f"--residual-width {options.residual_width}: the demo's model is {model.d_model} wide; give an even number"
            " below that, or 0 for all"
        )


def make_manifest(options: DemoOptions, corpus: str, model: ModelSpec = MODEL) -> Manifest:
    """The demo's recipe with the options. corpus: digest of its text. Raises UsageError."""
    check(options, model)
    rounds, inner = options.rounds or ROUNDS, options.inner_steps or INNER_STEPS
    tokenizer = (open_run.ASSETS / TOKENIZER).read_bytes()
    return Manifest(
        name="demo",
        seed=options.seed,
        rounds=rounds,
        start_peers=options.full + options.chains * options.stages + options.spares,
        operators=(identity_of(options.seed, "bootstrap").peer_id,),
        model=replace(model, residual_width=options.residual_width),
        tokenizer=TokenizerSpec(digest=hashlib.sha256(tokenizer).hexdigest(), file=TOKENIZER),
        data=DataSpec(corpus=corpus),
        train=TrainSpec(
            inner_steps=inner,
            micro_batches=2,
            rows=4,
            sequence=SEQUENCE,
            lr=3e-3,
            warmup_steps=min(20, rounds * inner // 10),
            total_steps=rounds * inner,
        ),
        outer=OuterSpec(topk=256),
        timing=TimingSpec(round_deadline=600.0, heartbeat=1.0, gone_after=20.0),
    )


def make_peers(manifest: Manifest, options: DemoOptions) -> list[PeerSpec]:
    """The peers, with memory and uplinks that make the matchmaker plan the requested swarm. Raises UsageError."""
    from peer.training.device import host_budget

    layers = manifest.model.n_layers
    some = Budget(0, options.device, 0 if host_budget(options.device) == 0 else None)
    whole, last = (_needed(manifest, some, first, layers) for first in (0, layers - 1))
    wanted = [(f"full-{i}", whole, 1_000_000_000) for i in range(options.full)]
    rest = _least_memory(manifest, some, options.stages, last, whole) if options.chains else 0
    for chain in range(options.chains):
        # each chain a little slower than the one before, so that the matchmaker does not mix their members
        up = int(HOME_UP_BPS * (1 + 0.01 * (options.chains - chain)))
        for stage in range(options.stages):
            wanted.append((f"chain-{chain}-{stage}", last if stage == options.stages - 1 else rest, up))
    for spare in range(options.spares):
        wanted.append((f"spare-{spare}", max(last, rest), HOME_UP_BPS))
    return [PeerSpec(name, identity_of(options.seed, name), size, up) for name, size, up in wanted]


def _needed(manifest: Manifest, some: Budget, first: int, last: int) -> int:
    own, host = needs_of(manifest, first, last, some.device)
    return own if some.is_split else own + host


def _rooms(some: Budget, rest: int, stages: int, last: int) -> list[Budget]:
    """Budgets of a chain: `last` bytes for the last member, `rest` for the others."""
    return [replace(some, memory_bytes=size) for size in [rest] * (stages - 1) + [last]]


def _least_memory(manifest: Manifest, some: Budget, stages: int, last: int, whole: int) -> int:
    """The least memory of `stages` - 1 equal peers that hold the model with a last one of `last` bytes."""
    low, high = 0, whole
    while low + 1 < high:
        middle = (low + high) // 2
        if partition.split(manifest, _rooms(some, middle, stages, last)) is None:
            low = middle
        else:
            high = middle
    return high


TOKENIZER = "sotu-4k.json"
SEQUENCE = 128


def demo_corpus(sequence: int = SEQUENCE, say: Callable[[str], None] = lambda line: None) -> CorpusReader:
    """The demo's corpus in the user's cache folder, built there unless it is complete. Raises UsageError.

    sequence: tokens. One of several processes builds; the others wait.
    """
    source, disk = sources.parse("sotu"), Disk()
    tokenizer = (ASSETS / TOKENIZER).read_bytes()
    follows_from = [corpus.FORMAT, sources.fingerprint(source), hashlib.sha256(tokenizer).hexdigest(), sequence]
    folder = cache_folder() / f"corpus-{hashlib.sha256(json.dumps(follows_from).encode()).hexdigest()[:32]}"
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if (folder / INDEX).exists():
                with contextlib.suppress(UsageError):  # it is damaged
                    if not (found := CorpusReader(folder, disk)).missing():
                        return found
                shutil.rmtree(folder)
            say(f"builds the demo's text, once: {folder}")
            request = Request(
                sources=(source,), tokenizer=tokenizer, sequence=sequence, out=folder, workers=os.cpu_count() or 1
            )
            build(request, disk, lambda line: None, threading.Event())
    return CorpusReader(folder, disk)
