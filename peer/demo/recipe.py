"""What the demo trains, and who takes part."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from peer.demo.text import SEQUENCE, TOKENIZER
from peer.node import open_run
from protocol.errors import UsageError
from protocol.identity import Identity
from protocol.planning import partition
from protocol.planning.arrange import arrange
from protocol.planning.budget import Budget, needs_of
from protocol.planning.partition import Candidate
from protocol.run.layout import ModelSpec
from protocol.run.manifest import ChainSpec, DataSpec, Manifest, OuterSpec, TimingSpec, TokenizerSpec, TrainSpec

MODEL = ModelSpec(vocab_size=4096, d_model=128, n_layers=4, n_heads=4, d_ff=352, context=128)
HOME_BPS = 20_000_000
"""An uplink."""
ROUNDS = 30
INNER_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What was typed; see `potluck demo --help`."""

    rounds: int | None
    full: int
    chains: int
    stages: int
    spares: int
    rank: tuple[int, ...]
    inner_steps: int | None
    seed: int
    device: str
    out: Path
    json: Path | None
    screen: bool
    in_memory: bool


def parse_rank(text: str) -> tuple[int, ...]:
    """ "16" or "16,8" as numbers. Raises UsageError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f'--rank {text}: not a number or a list of numbers; write for example "16" or "16,8"'
        ) from None


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """One peer of the demo and what it is told to announce."""

    name: str
    identity: Identity
    memory_bytes: int
    up_bps: int


def identity_of(seed: int, name: str) -> Identity:
    """A key that depends on the demo's seed only, so that two demos order their peers alike. For demos, not for the open."""
    return Identity(hashlib.sha256(f"potluck/demo/{seed}/{name}".encode()).digest())


def check(options: DemoOptions, model: ModelSpec = MODEL) -> None:
    """Raises UsageError where what was typed cannot be."""
    if options.full + options.chains == 0:
        raise UsageError("--full 0 --chains 0: nobody would train; ask for at least one replica")
    if options.chains and options.stages > model.n_layers:
        raise UsageError(
            f"--stages {options.stages}: the demo's model has {model.n_layers} blocks; ask for at most so many"
        )
    if len(options.rank) not in (1, max(options.chains, 1)):
        raise UsageError(
            f"--rank: {len(options.rank)} values for {options.chains} chains; give one, or one for each chain"
        )
    if any(not 0 <= rank <= model.d_model for rank in options.rank):
        raise UsageError(f"--rank: the demo's model is {model.d_model} wide; give values from 0 (off) to that")


def make_manifest(options: DemoOptions, corpus: str, model: ModelSpec = MODEL) -> Manifest:
    """The demo's recipe, changed by what was typed. `corpus`: the digest of its text (peer/demo/text.py). Raises UsageError."""
    check(options, model)
    rounds, inner = options.rounds or ROUNDS, options.inner_steps or INNER_STEPS
    tokenizer = (open_run.ASSETS / TOKENIZER).read_bytes()
    return Manifest(
        name="demo",
        seed=options.seed,
        rounds=rounds,
        start_peers=options.full + options.chains * options.stages + options.spares,
        operators=(identity_of(options.seed, "bootstrap").peer_id,),
        model=model,
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
        chains=ChainSpec(rank=tuple(dict.fromkeys(options.rank))),
        timing=TimingSpec(round_deadline=600.0, heartbeat=1.0, gone_after=20.0),
    )


def make_peers(manifest: Manifest, options: DemoOptions) -> list[PeerSpec]:
    """The peers, with memories and uplinks that make the matchmaker plan what was asked for. Raises UsageError."""
    from peer.training.device import host_budget

    layers = manifest.model.n_layers
    some = Budget(0, options.device, 0 if host_budget(options.device) == 0 else None)
    whole, last = (_needed(manifest, some, first, layers) for first in (0, layers - 1))
    wanted = [(f"full-{i}", whole, 1_000_000_000) for i in range(options.full)]
    rest = _least_memory(manifest, some, options.stages, last, whole) if options.chains else 0
    rooms = _rooms(some, rest, options.stages, last)
    for chain in range(options.chains):
        # each chain a little slower than the one before, so that the matchmaker does not mix their members
        up = int(
            _uplink(manifest, rooms, options.rank[chain % len(options.rank)]) * (1 + 0.01 * (options.chains - chain))
        )
        for stage in range(options.stages):
            wanted.append((f"chain-{chain}-{stage}", last if stage == options.stages - 1 else rest, up))
    for spare in range(options.spares):
        wanted.append((f"spare-{spare}", max(last, rest), _uplink(manifest, rooms, options.rank[-1])))
    return [PeerSpec(name, identity_of(options.seed, name), size, up) for name, size, up in wanted]


def _needed(manifest: Manifest, some: Budget, first: int, last: int) -> int:
    """How much of it has to be offered for these blocks."""
    own, host = needs_of(manifest, first, last, some.device)
    return own if some.is_split else own + host


def _rooms(some: Budget, rest: int, stages: int, last: int) -> list[Budget]:
    """Of a chain's members, of whom the last has `last` bytes and the others `rest`."""
    return [replace(some, memory_bytes=size) for size in [rest] * (stages - 1) + [last]]


def _least_memory(manifest: Manifest, some: Budget, stages: int, last: int, whole: int) -> int:
    """The least memory with which `stages` - 1 equal peers and one with `last` bytes hold the model, for all of which `whole` is enough."""
    low, high = 0, whole
    while low + 1 < high:
        middle = (low + high) // 2
        if partition.split(manifest, _rooms(some, middle, stages, last)) is None:
            low = middle
        else:
            high = middle
    return high


def _uplink(manifest: Manifest, rooms: list[Budget], rank: int) -> int:
    """An uplink, in bits per second, at which the matchmaker chooses `rank` for a chain of members with this memory: that of a home, where
    it does."""

    def is_chosen(up: int) -> bool:
        """Also by a chain that is a hundredth quicker or two."""
        return _rank(manifest, rooms, up) == _rank(manifest, rooms, up * 51 // 50) == rank

    if is_chosen(HOME_BPS):
        return HOME_BPS
    up = 100
    while not is_chosen(up):
        up = max(up + 1, up * 26 // 25)
        if up > 10**13:
            raise UsageError(f"--rank {rank}: cannot be told from the other values of --rank; give different ones")
    return up


def _rank(manifest: Manifest, rooms: list[Budget], up: int) -> int:
    members = [
        Candidate(
            peer=str(i),
            memory_bytes=room.memory_bytes,
            device=room.device,
            host_bytes=room.host_bytes,
            up_bps=up,
            down_bps=up,
        )
        for i, room in enumerate(rooms)
    ]
    replicas, _ = arrange(manifest, members)
    return replicas[0].rank
