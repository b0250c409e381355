"""`potluck demo`: a whole swarm on this machine, and an audit of what it did.

Starts one bootstrap node and every peer as a process of its own (the same commands that strangers use, on loopback), reads
their events, and shows them. At the end an auditor replays the log from θ(0): the validation losses, the text sample and the
digests that it prints come from that replay, not from what the peers say. `--in-memory` runs the same bootstrap node and the same
daemons in this process over the in-memory transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console

from bootstrap.archive import Archive
from peer.cli import commands
from peer.events import Emitter, Event, Sink, from_json
from peer.log import replay
from peer.net.blobs import disk_error
from peer.training import data
from peer.ui import screen as tui
from protocol.errors import LocalError, UsageError
from protocol.identity import Identity
from protocol.planning import planner
from protocol.run import layout
from protocol.run import manifest as manifests
from protocol.run.layout import ModelSpec
from protocol.run.manifest import ChainSpec, Manifest, OuterSpec, TimingSpec, TokenizerSpec, TrainSpec

TOKENIZER = "sotu-4k.json"
MODEL = ModelSpec(vocab_size=4096, d_model=128, n_layers=4, n_heads=4, d_ff=352, context=128)
ROUNDS = 30
INNER_STEPS = 10
SILENCE_SECONDS = 900.0
PRELOAD = ["peer.node.peer", "peer.cli.commands", "peer.net.p2p", "peer.training.device"]
VALID_WINDOWS = 48
PROMPT = "The people of the United States"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What was typed; see `potluck demo --help`."""

    rounds: int | None
    full: int
    chains: int
    stages: int
    spares: int
    k: tuple[int, ...]
    inner_steps: int | None
    seed: int
    device: str
    out: Path
    json: Path | None
    screen: bool
    in_memory: bool


def parse_k(text: str) -> tuple[int, ...]:
    """ "16" or "16,8" as numbers. Raises UsageError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f'--k {text}: not a number or a list of numbers; write for example "16" or "16,8"') from None


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """One peer of the demo and what it is told to announce."""

    name: str
    identity: Identity
    memory_bytes: int
    up_bps: int


def _identity(seed: int, name: str) -> Identity:
    """A key that depends on the demo's seed only, so that two demos order their peers alike. For demos, not for the open."""
    return Identity(hashlib.sha256(f"potluck/demo/{seed}/{name}".encode()).digest())


def make_manifest(options: DemoOptions) -> Manifest:
    """The demo's recipe, changed by what was typed. Raises UsageError."""
    if options.full + options.chains == 0:
        raise UsageError("--full 0 --chains 0: nobody would train; ask for at least one replica")
    if options.chains and options.stages > MODEL.n_layers:
        raise UsageError(
            f"--stages {options.stages}: the demo's model has {MODEL.n_layers} blocks; ask for at most so many"
        )
    if len(options.k) not in (1, max(options.chains, 1)):
        raise UsageError(f"--k: {len(options.k)} values for {options.chains} chains; give one, or one for each chain")
    if any(not 0 <= k <= MODEL.d_model for k in options.k):
        raise UsageError(f"--k: the demo's model is {MODEL.d_model} wide; give values from 0 (off) to that")
    rounds, inner = options.rounds or ROUNDS, options.inner_steps or INNER_STEPS
    tokenizer = (commands.ASSETS / TOKENIZER).read_bytes()
    return Manifest(
        name="demo",
        seed=options.seed,
        rounds=rounds,
        start_peers=options.full + options.chains * options.stages + options.spares,
        operators=(_identity(options.seed, "bootstrap").peer_id,),
        model=MODEL,
        tokenizer=TokenizerSpec(digest=hashlib.sha256(tokenizer).hexdigest(), file=TOKENIZER),
        train=TrainSpec(
            inner_steps=inner,
            micro_batches=2,
            rows=4,
            sequence=128,
            lr=3e-3,
            warmup_steps=min(20, rounds * inner // 10),
            total_steps=rounds * inner,
        ),
        outer=OuterSpec(k=256, values="sym2"),
        chains=ChainSpec(k=tuple(dict.fromkeys(options.k))),
        timing=TimingSpec(round_deadline=600.0, heartbeat=1.0, gone_after=20.0),
    )


def make_peers(manifest: Manifest, options: DemoOptions) -> list[PeerSpec]:
    """The peers, with memories and uplinks that make the matchmaker plan what was asked for. Raises UsageError."""
    layers = manifest.model.n_layers
    wanted = [(f"full-{i}", planner.stage_memory(manifest, 0, layers), 1_000_000_000) for i in range(options.full)]
    last = planner.stage_memory(manifest, layers - 1, layers)
    rest = _least_memory(manifest, options.stages, last) if options.chains else 0
    for chain in range(options.chains):
        # each chain a little slower than the one before, so that the matchmaker does not mix their members
        up = int(_uplink(manifest, options.k[chain % len(options.k)]) * (1 + 0.01 * (options.chains - chain)))
        for stage in range(options.stages):
            memory = last if stage == options.stages - 1 else rest
            wanted.append((f"chain-{chain}-{stage}", memory, up))
    for spare in range(options.spares):
        wanted.append((f"spare-{spare}", max(last, rest), _uplink(manifest, options.k[-1])))
    return [PeerSpec(name, _identity(options.seed, name), memory, up) for name, memory, up in wanted]


def _least_memory(manifest: Manifest, stages: int, last: int) -> int:
    """The least memory with which `stages` - 1 equal peers and one with `last` bytes hold the model."""
    low, high = 0, planner.stage_memory(manifest, 0, manifest.model.n_layers)
    while low + 1 < high:
        middle = (low + high) // 2
        if planner.split(manifest, [middle] * (stages - 1) + [last]) is None:
            low = middle
        else:
            high = middle
    return high


def _uplink(manifest: Manifest, k: int) -> int:
    """The least round uplink, in bits per second, at which the matchmaker chooses `k`."""
    up = 100  # one chain may be a hundredth slower than another
    while planner.boundary_k(manifest, up) != k:
        up = max(up + 1, up * 21 // 20)
        if up > 10**12:
            raise UsageError(f"--k {k}: cannot be told from the other values of --k; give different ones")
    return up


# --- running the swarm


@dataclass(slots=True)
class Tally:
    """What the events of a run add up to."""

    manifest: Manifest
    names: dict[str, str]
    attests: dict[int, dict[str, dict[str, str]]] = field(default_factory=dict)
    commits: dict[int, dict[str, Any]] = field(default_factory=dict)
    sent: dict[str, list[int]] = field(default_factory=dict)
    boundary: dict[str, list[int]] = field(default_factory=dict)
    phases: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    idle_rss: dict[str, int] = field(default_factory=dict)
    peak_rss: dict[str, int] = field(default_factory=dict)
    diverged: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False

    def feed(self, event: Event) -> None:
        f = event.fields
        match event.kind:
            case "attest":
                self.attests.setdefault(f["round"], {})[f["peer"]] = f["digests"]
            case "commit":
                self.commits[f["round"]] = f
            case "diverged":
                self.diverged.append(
                    {"peer": self.names.get(f["peer"], f["peer"]), "round": f["round"], "shard": f["shard"]}
                )
            case "started":
                self.idle_rss[self.names.get(event.source, event.source)] = f["rss_bytes"]
            case "round":
                name = self.names.get(event.source, event.source)
                self.peak_rss[name] = f["peak_rss_bytes"]
                self.sent.setdefault(name, []).append(f["bytes_sent"])
                self.phases.setdefault(name, []).append(f["seconds"])
                if f["boundary_tokens"]:
                    totals = self.boundary.setdefault(name, [0, 0, 0])
                    totals[0] += f["boundary_forward_bytes"]
                    totals[1] += f["boundary_backward_bytes"]
                    totals[2] += f["boundary_tokens"]
            case "finished" if event.source == "bootstrap":
                self.finished = True

    def disagreements(self, digests: dict[int, dict[str, str]]) -> list[dict[str, Any]]:
        """Every attested digest that differs from the auditor's, by peer, round and shard."""
        return [
            {"peer": self.names.get(peer, peer), "round": round, "shard": shard}
            for round, peers in sorted(self.attests.items())
            for peer, attested in sorted(peers.items())
            for shard, digest in attested.items()
            if round in digests and digests[round][shard] != digest
        ]

    def covered(self, rounds: int) -> bool:
        """Whether every shard was attested after every round."""
        shards = set(layout.shard_names(self.manifest.model))
        return all(
            shards <= {s for attested in self.attests.get(r, {}).values() for s in attested} for r in range(rounds + 1)
        )


async def run(options: DemoOptions) -> None:
    """Everything, from an empty folder to the summary. Raises PotluckError."""
    manifest = make_manifest(options)
    peers = make_peers(manifest, options)
    out = options.out
    if out.exists():
        raise UsageError(f"--out {out}: exists already; remove it or choose another folder")
    try:
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.touch()
        for name in ("bootstrap", *(p.name for p in peers)):
            (out / name).mkdir(parents=True)
        (out / "run.toml").write_text(manifests.to_toml(manifest))
        (out / "bootstrap" / "identity.key").write_bytes(_identity(options.seed, "bootstrap").libp2p_bytes())
        for peer in peers:
            (out / peer.name / "identity.key").write_bytes(peer.identity.libp2p_bytes())
    except OSError as error:
        raise disk_error(out, error) from None
    tally = Tally(manifest, {p.identity.peer_id: p.name for p in peers})
    began = time.monotonic()
    names = {**tally.names, manifest.operators[0]: "bootstrap"}
    console = None if options.screen else Console(force_terminal=False)
    with tui.Screen(manifest, names, console) as screen:

        def feed(event: Event) -> None:
            tally.feed(event)
            screen.feed(event)

        swarm = _in_memory(options, manifest, peers, feed) if options.in_memory else _processes(options, peers, feed)
        async with contextlib.aclosing(swarm) as events:
            async for _ in events:
                if tally.finished:
                    break
    seconds = time.monotonic() - began
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        result = await asyncio.get_running_loop().run_in_executor(pool, _audit, options, manifest, tally, seconds)
    print(_summary(result), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if not result["same_bits"]:
        first = result["diverged"][0] if result["diverged"] else {"peer": "a peer", "shard": "a shard", "round": "?"}
        raise LocalError(
            f"same_bits: {first['peer']} had other bits in {first['shard']} after round {first['round']}; see {out}"
        )


class _Child:
    """One process of the swarm: a fork of a server that has imported everything once, then the command as it was typed."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.folder = folder
        context = multiprocessing.get_context("forkserver")
        self.output, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_be_potluck, args=(theirs, str(folder / "stderr.txt"), arguments))
        self.process.start()
        theirs.close()

    def failure(self) -> str:
        """Why it ended, in a few words."""
        lines = (self.folder / "stderr.txt").read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("potluck: ") if lines else f"exit code {self.process.exitcode}"


def _be_potluck(output: Connection, errors: str, arguments: list[str]) -> None:
    """In the child: standard output is the pipe, and the command runs."""
    os.dup2(output.fileno(), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
    output.close()
    sys.argv = ["potluck", *arguments]
    cli = importlib.import_module("peer.cli.main")
    cli.main()


async def _processes(options: DemoOptions, peers: list[PeerSpec], feed: Sink) -> AsyncGenerator[None, None]:
    """The swarm as processes; yields after every event, ends when the bootstrap node ends or nobody is left."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    queue: asyncio.Queue[tuple[str, Event | None]] = asyncio.Queue()
    children: dict[str, _Child] = {}
    readers: list[asyncio.Task[None]] = []

    async def start(name: str, *arguments: str) -> None:
        children[name] = await asyncio.to_thread(_Child, options.out / name, [*arguments, "--json"])
        readers.append(asyncio.create_task(read(name, children[name])))

    async def read(name: str, child: _Child) -> None:
        stream = asyncio.StreamReader(limit=1 << 22)
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(os.dup(child.output.fileno()), "rb")
        )
        with open(child.folder / "events.jsonl", "ab") as log:
            while line := await stream.readline():
                log.write(line)
                log.flush()
                event = from_json(line.decode("utf-8", "replace"))
                if event is not None:
                    queue.put_nowait((name, event))
        pipe.close()
        child.output.close()
        await asyncio.to_thread(child.process.join)
        queue.put_nowait((name, None))

    try:
        folder = str(options.out / "bootstrap")
        run_file = str(options.out / "run.toml")
        await start("bootstrap", "bootstrap", run_file, "--dir", folder, "--host", "127.0.0.1", "--port", "0")
        left: set[str] = set()
        while True:
            name, event = await asyncio.wait_for(queue.get(), SILENCE_SECONDS)
            if event is None:
                failure = children[name].failure()
                if name == "bootstrap":
                    raise LocalError(f"bootstrap node: {failure}")
                left.add(name)
                if children[name].process.exitcode:
                    feed(Event(time.time(), name, "warning", {"text": f"{name} ended: {failure}"}))
                if len(left) == len(peers):
                    raise LocalError(f"every peer ended, the last one ({name}) with: {failure}; see {options.out}")
                continue
            feed(event)
            if event.kind == "listening":
                for peer in peers:
                    await start(peer.name, *_join_arguments(options, peer, event.fields["address"]))
            yield
            if event.kind == "finished" and name == "bootstrap":
                await asyncio.to_thread(_all_ended, [c for n, c in children.items() if n != "bootstrap"])
    except TimeoutError:
        raise LocalError(f"the swarm: nothing happened for {SILENCE_SECONDS:g} s; see {options.out}") from None
    finally:
        for child in children.values():
            child.process.terminate()
        await asyncio.to_thread(_all_ended, list(children.values()))
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


def _join_arguments(options: DemoOptions, peer: PeerSpec, address: str) -> list[str]:
    """What a volunteer with this machine would type."""
    values = {
        "--dir": options.out / peer.name,
        "--host": "127.0.0.1",
        "--port": 0,
        "--device": options.device,
        "--memory": peer.memory_bytes,
        "--up": f"{peer.up_bps}bps",
        "--down": f"{peer.up_bps}bps",
        "--threads": 1,
    }
    return ["join", address, *(str(x) for pair in values.items() for x in pair)]


def _all_ended(children: list[_Child]) -> None:
    """Waits for processes to end; those that do not within a minute are killed."""
    end = time.monotonic() + 60
    for child in children:
        child.process.join(max(0.0, end - time.monotonic()))
        if child.process.is_alive():
            child.process.kill()
            child.process.join()


async def _in_memory(
    options: DemoOptions, manifest: Manifest, peers: list[PeerSpec], feed: Sink
) -> AsyncGenerator[None, None]:
    """The swarm as tasks of this process over the in-memory transport; yields after every event."""
    from peer.config import JoinConfig
    from peer.net.memory import MemoryNetwork
    from peer.node import peer as daemon
    from peer.state.storage import Storage

    queue: asyncio.Queue[Event] = asyncio.Queue()
    network = MemoryNetwork()
    key = _identity(options.seed, "bootstrap")
    archive = Archive(options.out / "bootstrap", manifest)
    archive.save_tokenizer((commands.ASSETS / TOKENIZER).read_bytes())
    node_transport = network.transport(key.peer_id, commands.valid_record(manifest.run_id))
    node = asyncio.create_task(
        commands.serve_bootstrap(manifest, key, node_transport, archive, Emitter("bootstrap", queue.put_nowait))
    )
    tasks: set[asyncio.Task[Any]] = {node}
    storages = []
    for peer in peers:
        storage = Storage(options.out / peer.name)
        storages.append(storage)
        config = JoinConfig(
            folder=options.out / peer.name,
            device=options.device,
            memory_bytes=peer.memory_bytes,
            up_bps=peer.up_bps,
            down_bps=peer.up_bps,
        )
        emit = Emitter(peer.identity.peer_id, queue.put_nowait)
        transport = network.transport(peer.identity.peer_id, commands.valid_record(manifest.run_id))
        tasks.add(
            asyncio.create_task(
                daemon.join(manifest, peer.identity, transport, storage, config, node_transport.addresses, emit)
            )
        )
    try:
        while True:
            getter = asyncio.create_task(queue.get())
            done: set[asyncio.Task[Any]]
            done, _ = await asyncio.wait({getter, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {getter}:
                task.result()
                tasks.remove(task)
            if getter not in done:
                getter.cancel()
                continue
            event = getter.result()
            feed(event)
            if event.kind == "finished" and event.source == "bootstrap":
                await asyncio.gather(*(tasks - {node}))
            yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        archive.close()
        for storage in storages:
            storage.close()


# --- what came of it


def _audit(options: DemoOptions, manifest: Manifest, tally: Tally, seconds: float) -> dict[str, Any]:
    """Replays the log; the result that `--json` writes. Runs in a process of its own: it needs torch, the screen does not."""
    import torch

    from peer.training import trainer

    torch.set_num_threads(1)  # more threads than free cores spin against each other
    archive = Archive(options.out / "bootstrap", manifest)
    tokenizer_json = (commands.ASSETS / TOKENIZER).read_bytes()
    tokenizer = data.load_tokenizer(tokenizer_json, manifest.tokenizer.digest)
    corpus = data.prepare(
        manifest.data, tokenizer, manifest.train.sequence, data.cache_folder(), manifest.model.vocab_size
    )
    windows = corpus.valid_windows(VALID_WINDOWS)
    whole = trainer.StageTrainer(
        manifest.model, manifest.train, layout.shard_names(manifest.model), device=options.device
    )
    losses: list[float] = []
    digests: dict[int, dict[str, str]] = {}
    try:
        for state in replay.replay(manifest, archive.commits, archive.blobs.get):
            whole.begin_round(state.theta)
            losses.append(whole.evaluate(windows))
            digests[state.round] = state.digests
    finally:
        archive.close()
    rounds = max(digests)
    wrong = tally.disagreements(digests)
    ids = whole.sample(tokenizer.encode(PROMPT).ids, 60, 0.8, options.seed)
    to_bits = 1 / (math.log(2) * corpus.bytes_per_token)
    tokens = sum(c["tokens"] for f in tally.commits.values() for c in f["contributions"])
    first_stages = [b for n, b in tally.boundary.items() if n.endswith("-0") and b[0]]
    last_stages = [b for b in tally.boundary.values() if b[1]]
    return {
        "rounds": rounds,
        "val_loss_first": losses[0],
        "val_loss_last": losses[-1],
        "val_loss": losses,
        "val_bits_per_byte_last": losses[-1] * to_bits,
        "unigram_entropy": corpus.unigram_entropy,
        "below_unigram": 1 - losses[-1] / corpus.unigram_entropy,
        "same_bits": not wrong and not tally.diverged and tally.covered(rounds),
        "diverged": wrong or tally.diverged,
        "state_digest": layout.state_digest(manifest.model, digests[rounds]),
        "bytes_sent_per_peer_per_round": {n: b[-1] / len(b) for n, b in sorted(tally.sent.items())},
        "payload_bytes_per_replica_per_round": _mean(
            [c["bytes"] for f in tally.commits.values() for c in f["contributions"]]
        ),
        "dense_fp32_bytes": 4 * layout.total_parameters(manifest.model),
        "boundary_bytes_per_token": _mean([b[0] / b[2] for b in first_stages]),
        "boundary_backward_bytes_per_token": _mean([b[1] / b[2] for b in last_stages]),
        "boundary_dense_bf16_bytes_per_token": 2 * manifest.model.d_model,
        "left_out": [{"round": f["round"], **x} for f in tally.commits.values() for x in f["left_out"]],
        "train_loss": [
            _mean([c["loss"] for c in f["contributions"] if c["loss"] is not None])
            for r, f in sorted(tally.commits.items())
            if r
        ],
        "peak_rss_above_idle_bytes": {n: b - tally.idle_rss.get(n, 0) for n, b in sorted(tally.peak_rss.items())},
        "phase_seconds": {n: _mean_phases(p) for n, p in sorted(tally.phases.items())},
        "seconds": seconds,
        "tokens": tokens,
        "sample": PROMPT + tokenizer.decode(ids),
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _mean_phases(rounds: list[dict[str, float]]) -> dict[str, float]:
    names = {name for r in rounds for name in r}
    return {name: sum(r.get(name, 0.0) for r in rounds) / len(rounds) for name in sorted(names)}


def _summary(result: dict[str, Any]) -> str:
    """A few lines for a person."""
    payload = result["payload_bytes_per_replica_per_round"]
    lines = [
        "",
        f"{result['rounds']} rounds, {result['tokens']:,} tokens in {result['seconds']:.0f} s",
        f"validation loss {result['val_loss_first']:.3f} -> {result['val_loss_last']:.3f} nats per token"
        f" ({result['val_bits_per_byte_last']:.3f} bits per byte), {100 * result['below_unigram']:.1f} % below the unigram"
        f" entropy of {result['unigram_entropy']:.3f}",
        f"same bits on every peer after every round: {'yes' if result['same_bits'] else 'NO'}, state"
        f" {result['state_digest'][:16]}… (replayed from the log)",
    ]
    if payload:
        ratio = result["dense_fp32_bytes"] / payload
        lines.append(f"a replica's update: {payload:,.0f} bytes a round, {ratio:.0f} times under dense fp32")
    if result["boundary_bytes_per_token"]:
        lines.append(
            f"a chain's boundary: {result['boundary_bytes_per_token']:.1f} bytes a token forward, dense bf16 takes"
            f" {result['boundary_dense_bf16_bytes_per_token']}"
        )
    return "\n".join([*lines, "", "the trained model says:", "  " + result["sample"].replace("\n", "\n  "), ""])
