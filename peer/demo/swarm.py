"""`potluck demo`: a whole swarm on this machine, and an audit of its log.

Starts one bootstrap node and every peer as a process, reads their events, and shows them. With `--in-memory` they are
tasks of this process. At the end the log is replayed from θ(0): losses, sample and digests come from that replay.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from bootstrap.archive import Archive
from bootstrap.node import BootstrapNode, Work
from peer import events
from peer.corpus.text import open_corpus
from peer.corpus.tokenizer import TextEncoder, load_tokenizer
from peer.demo import recipe
from peer.demo.recipe import TOKENIZER, DemoOptions, PeerSpec, demo_corpus, identity_of
from peer.events import Emitter, Event, Sink, from_json
from peer.log import replay
from peer.log.recompute import Recomputer, store_state
from peer.net import directory
from peer.net.base import cancel
from peer.net.disk import Disk, disk_errors
from peer.node import open_run
from peer.ui import screen as tui
from protocol.errors import LocalError, UsageError
from protocol.run import layout
from protocol.run import manifest as manifests
from protocol.run.manifest import Manifest
from protocol.wire.schema import plain

# --- report

VALID_SEQUENCES = 48
PROMPT = "The people of the United States"


@dataclass(slots=True)
class Tally:
    """Totals of a run's events."""

    manifest: Manifest
    names: dict[str, str]
    attests: dict[int, dict[str, dict[str, str]]] = field(default_factory=dict)
    commits: dict[int, events.Commit] = field(default_factory=dict)
    sent: dict[str, list[int]] = field(default_factory=dict)
    boundary: dict[str, list[int]] = field(default_factory=dict)
    phases: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    idle_rss: dict[str, int] = field(default_factory=dict)
    peak_rss: dict[str, int] = field(default_factory=dict)
    diverged: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False

    def feed(self, event: Event) -> None:
        """Takes one event into account."""
        name = self.names.get(event.source, event.source)
        match event.body:
            case events.Attest(peer=peer, round=round, digests=digests):
                self.attests.setdefault(round, {})[peer] = digests
            case events.Commit() as commit:
                self.commits[commit.round] = commit
            case events.Diverged(peer=peer, round=round, shard=shard):
                self.diverged.append({"peer": self.names.get(peer, peer), "round": round, "shard": shard})
            case events.Started(rss_bytes=rss_bytes):
                self.idle_rss[name] = rss_bytes
            case events.Round() as done:
                self.peak_rss[name] = done.peak_rss_bytes
                self.sent.setdefault(name, []).append(done.bytes_sent)
                self.phases.setdefault(name, []).append(done.seconds)
                if done.boundary_tokens:
                    totals = self.boundary.setdefault(name, [0, 0, 0])
                    totals[0] += done.boundary_forward_bytes
                    totals[1] += done.boundary_backward_bytes
                    totals[2] += done.boundary_tokens
            case events.RunFinished():
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
        """Returns whether every shard was attested after every round."""
        shards = set(layout.shard_names(self.manifest.model))
        return all(
            shards <= {s for attested in self.attests.get(r, {}).values() for s in attested} for r in range(rounds + 1)
        )


def audit(options: DemoOptions, manifest: Manifest, tally: Tally, seconds: float) -> dict[str, Any]:
    """Replays the log; returns the result for `--json`. Runs in a process of its own, since it needs torch."""
    import torch

    from peer.training import inference, trainer

    torch.set_num_threads(1)  # more threads than free cores spin against each other
    archive = Archive(options.out / "bootstrap", manifest)
    tokenizer_json = (open_run.ASSETS / TOKENIZER).read_bytes()
    tokenizer = load_tokenizer(tokenizer_json, manifest.tokenizer.digest)
    corpus = demo_corpus()
    held_out, entropy = corpus.held_out(VALID_SEQUENCES), corpus.unigram_entropy()
    whole = trainer.StageTrainer(
        manifest.model, manifest.train, layout.shard_names(manifest.model), device=options.device
    )
    losses: list[float] = []
    digests: dict[int, dict[str, str]] = {}
    try:
        for state in replay.replay(manifest, archive.commits, archive.blobs.get):
            whole.begin_round(state.theta)
            losses.append(whole.evaluate(held_out))
            digests[state.round] = state.digests
    finally:
        archive.close()
    rounds = max(digests)
    wrong = tally.disagreements(digests)
    dice = inference.Dice(options.seed, temperature=0.8)
    text = inference.continuation(whole.stage, TextEncoder(tokenizer).ids(PROMPT), manifest.train.sequence, dice)
    ids = list(itertools.islice(text, 60))
    to_bits = 1 / (math.log(2) * corpus.index.bytes_per_token)
    tokens = sum(commit.tokens for commit in tally.commits.values())
    first_stages = [b for n, b in tally.boundary.items() if n.endswith("-0") and b[0]]
    last_stages = [b for b in tally.boundary.values() if b[1]]
    return {
        "rounds": rounds,
        "val_loss_first": losses[0],
        "val_loss_last": losses[-1],
        "val_loss": losses,
        "val_bits_per_byte_last": losses[-1] * to_bits,
        "unigram_entropy": entropy,
        "below_unigram": 1 - losses[-1] / entropy,
        "same_bits": not wrong and not tally.diverged and tally.covered(rounds),
        "diverged": wrong or tally.diverged,
        "state_digest": layout.state_digest(manifest.model, digests[rounds]),
        "bytes_sent_per_peer_per_round": {n: b[-1] / len(b) for n, b in sorted(tally.sent.items())},
        "payload_bytes_per_replica_per_round": _mean(
            [c.size for commit in tally.commits.values() for c in commit.contributions]
        ),
        "dense_fp32_bytes": 4 * layout.total_parameters(manifest.model),
        "boundary_bytes_per_token": _mean([b[0] / b[2] for b in first_stages]),
        "boundary_backward_bytes_per_token": _mean([b[1] / b[2] for b in last_stages]),
        "boundary_dense_bf16_bytes_per_token": 2 * manifest.model.d_model,
        "left_out": [
            {"round": commit.round, **plain(left)} for commit in tally.commits.values() for left in commit.left_out
        ],
        "train_loss": [
            _mean([c.loss for c in commit.contributions if c.loss is not None])
            for r, commit in sorted(tally.commits.items())
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


def summary(result: dict[str, Any]) -> str:
    """The result as text."""
    payload, below = result["payload_bytes_per_replica_per_round"], result["below_unigram"]
    lines = [
        "",
        f"{result['rounds']} rounds, {result['tokens']:,} tokens in {result['seconds']:.0f} s",
        f"validation loss {result['val_loss_first']:.3f} -> {result['val_loss_last']:.3f} nats per token"
        f" ({result['val_bits_per_byte_last']:.3f} bits per byte)",
        f"{100 * abs(below):.1f} % {'above' if below < 0 else 'below'} {result['unigram_entropy']:.3f}, the loss of"
        " guesses by each token's frequency",
        f"same bits on every peer after every round: {'yes' if result['same_bits'] else 'NO'}, state"
        f" {result['state_digest'][:16]}…",
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


# --- swarm

if TYPE_CHECKING:
    from peer.node.peer import Factories

SILENCE_SECONDS = 900.0
END_SECONDS = 60.0
"""Time for the node to report the end of the run after all peers have ended."""
LAST_NEWS_SECONDS = 3.0
"""The node stays so long after the end for a monitor in another terminal, which polls every two seconds."""
PRELOAD = ("peer.node.peer", "peer.net.p2p", "peer.training.device")
"""Imports of every process of the swarm besides the command."""

Command = Callable[[Sequence[str]], None]
"""The program `potluck`: a module's function, for other processes; takes the arguments."""


async def run(
    options: DemoOptions,
    command: Command,
    manifest: Manifest | None = None,
    factories: Mapping[str, Factories] | None = None,
) -> None:
    """Runs a demo, from an empty folder to the summary. Raises PotluckError.

    command: the program `potluck`, for the processes of the swarm.
    manifest: the run (default: the demo's recipe).
    factories: of `run_in_memory`.
    """
    out = options.out
    if manifest is None:
        recipe.check(options)
    if out.exists():
        raise UsageError(f"--out {out}: exists already; remove it or choose another folder")
    corpus = await asyncio.to_thread(demo_corpus, recipe.SEQUENCE, lambda line: print(line, flush=True))
    if manifest is None:
        manifest = recipe.make_manifest(options, corpus.digest)
    peers = recipe.make_peers(manifest, options)
    with disk_errors(out):
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.touch()
        for name in ("bootstrap", *(p.name for p in peers)):
            (out / name).mkdir(parents=True)
        (out / "run.toml").write_text(manifests.to_toml(manifest))
        (out / "bootstrap" / "identity.key").write_bytes(identity_of(options.seed, "bootstrap").libp2p_bytes())
        for peer in peers:
            (out / peer.name / "identity.key").write_bytes(peer.identity.libp2p_bytes())
    tally = Tally(manifest, {p.identity.peer_id: p.name for p in peers})
    began = time.monotonic()
    names = {**tally.names, manifest.operators[0]: "bootstrap"}
    console = None if options.screen else Console(force_terminal=False)
    with tui.Screen(manifest, names, console) as screen:

        def feed(event: Event) -> None:
            tally.feed(event)
            screen.feed(event)

        swarm = (
            run_in_memory(options, manifest, peers, corpus.folder, feed, factories or {})
            if options.in_memory
            else run_processes(options, command, peers, corpus.folder, feed)
        )
        async with contextlib.aclosing(swarm) as events:
            async for _ in events:
                if tally.finished:
                    break
    seconds = time.monotonic() - began
    print("the model is computed again from the log, to check what everybody said", flush=True)
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        result = await asyncio.get_running_loop().run_in_executor(pool, audit, options, manifest, tally, seconds)
    print(summary(result), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if not result["same_bits"]:
        first = result["diverged"][0] if result["diverged"] else {"peer": "a peer", "shard": "a shard", "round": "?"}
        at = f"in {first['shard']} after round {first['round']}"
        raise LocalError(f"same_bits: {first['peer']} had other bits {at}; see {out}")


async def run_in_memory(
    options: DemoOptions,
    manifest: Manifest,
    peers: list[PeerSpec],
    corpus: Path,
    feed: Sink,
    factories: Mapping[str, Factories],
) -> AsyncGenerator[None, None]:
    """Runs the swarm as tasks of this process over the in-memory transport; yields after every event.

    corpus: folder of the text, for the node.
    factories: make a peer's parts, by the peer's name (default: the usual ones).
    """
    from peer.net.memory import MemoryNetwork
    from peer.node.config import JoinConfig, Machine
    from peer.node.peer import Peer
    from peer.state.storage import Storage
    from peer.training.device import Hardware

    queue: asyncio.Queue[Event] = asyncio.Queue()
    network = MemoryNetwork()
    key = identity_of(options.seed, "bootstrap")
    archive = Archive(options.out / "bootstrap", manifest)
    archive.serve_corpus(corpus, open_corpus(corpus, Disk(), manifest).raw)
    archive.save_tokenizer((open_run.ASSETS / recipe.TOKENIZER).read_bytes())
    node_transport = network.transport(key.peer_id, directory.valid_record(manifest.run_id))
    emit = Emitter("bootstrap", queue.put_nowait)
    compute = Recomputer(manifest, archive.commits, archive.blobs.get, newest_state=archive.newest_state).digest
    store = functools.partial(store_state, manifest, archive.commits, archive.blobs)
    serving = BootstrapNode(key, node_transport, archive, emit, work=Work(digest=compute, store_state=store))
    node = asyncio.create_task(serving.serve())
    tasks: set[asyncio.Task[Any]] = {node}
    storages = []
    for peer in peers:
        storage = Storage(options.out / peer.name)
        storages.append(storage)
        run = open_run.Run(None, manifest.run_id, node_transport.addresses)
        config = JoinConfig(run=run, folder=options.out / peer.name, up_bps=peer.up_bps, down_bps=peer.up_bps)
        machine = Machine(config, Hardware.find((options.device,), peer.memory_bytes))
        emit = Emitter(peer.identity.peer_id, queue.put_nowait)
        transport = network.transport(peer.identity.peer_id, directory.valid_record(manifest.run_id))
        made = factories.get(peer.name)
        member = Peer(manifest, peer.identity, transport, storage, machine, emit, made)
        tasks.add(asyncio.create_task(member.run()))
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
            if isinstance(event.body, events.RunFinished):
                await asyncio.gather(*(tasks - {node}))
            yield
    finally:
        await cancel(*tasks)
        archive.close()
        for storage in storages:
            storage.close()


class _Child:
    """A process of the swarm, forked from a server that has imported everything once."""

    def __init__(self, command: Command, folder: Path, arguments: list[str]) -> None:
        self.folder = folder
        context = multiprocessing.get_context("forkserver")
        self.output, theirs = context.Pipe(duplex=False)
        errors = str(folder / "stderr.txt")
        self.process = context.Process(target=_be_potluck, args=(command, theirs, errors, arguments))
        self.process.start()
        theirs.close()

    def failure(self) -> str:
        """Why it ended."""
        lines = (self.folder / "stderr.txt").read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("potluck: ") if lines else f"exit code {self.process.exitcode}"


def _be_potluck(command: Command, output: Connection, errors: str, arguments: list[str]) -> None:
    """Runs the command in the child, with the pipe as its standard output."""
    os.dup2(output.fileno(), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
    output.close()
    command(arguments)


async def run_processes(
    options: DemoOptions, command: Command, peers: list[PeerSpec], corpus: Path, feed: Sink
) -> AsyncGenerator[None, None]:
    """Runs the swarm as processes; yields after every event.

    Ends with the bootstrap node, or raises LocalError when all peers have ended. corpus: folder of the text, for the
    node.
    """
    multiprocessing.set_forkserver_preload([command.__module__, *PRELOAD])
    queue: asyncio.Queue[tuple[str, Event | None]] = asyncio.Queue()
    children: dict[str, _Child] = {}
    readers: list[asyncio.Task[None]] = []

    async def start(name: str, *arguments: str) -> None:
        children[name] = await asyncio.to_thread(_Child, command, options.out / name, [*arguments, "--json"])
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
        here = ("--host", "127.0.0.1", "--port", "0", "--corpus", str(corpus))
        await start("bootstrap", "bootstrap", run_file, "--dir", folder, *here)
        left: set[str] = set()
        nobody: LocalError | None = None
        end = math.inf
        while True:
            name, event = await asyncio.wait_for(queue.get(), min(SILENCE_SECONDS, end - time.monotonic()))
            if event is None:
                failure = children[name].failure()
                if name == "bootstrap":
                    raise LocalError(f"bootstrap node: {failure}")
                left.add(name)
                if children[name].process.exitcode:
                    feed(Event(time.time(), name, events.Warning(text=f"{name} ended: {failure}")))
                if len(left) == len(peers):
                    nobody = LocalError(f"every peer ended, the last one ({name}) with: {failure}; see {options.out}")
                    if any(children[peer.name].process.exitcode for peer in peers):
                        raise nobody
                    end = time.monotonic() + END_SECONDS
                continue
            feed(event)
            if isinstance(event.body, events.Listening):
                for peer in peers:
                    await start(peer.name, *_join_arguments(options, peer, event.body.address))
            if isinstance(event.body, events.RunFinished):
                await asyncio.to_thread(_all_ended, [c for n, c in children.items() if n != "bootstrap"])
                await asyncio.sleep(LAST_NEWS_SECONDS)
            yield
    except TimeoutError:
        silence = LocalError(f"the swarm: nothing happened for {SILENCE_SECONDS:g} s; see {options.out}")
        raise nobody or silence from None
    finally:
        for child in children.values():
            child.process.terminate()
        await asyncio.to_thread(_all_ended, list(children.values()))
        await cancel(*readers)


def _join_arguments(options: DemoOptions, peer: PeerSpec, address: str) -> list[str]:
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
    return ["join", address, "--on-battery", "--on-metered", *(str(x) for pair in values.items() for x in pair)]


def _all_ended(children: list[_Child]) -> None:
    """Waits a minute for processes to end, then kills them."""
    end = time.monotonic() + 60
    for child in children:
        child.process.join(max(0.0, end - time.monotonic()))
        if child.process.is_alive():
            child.process.kill()
            child.process.join()
