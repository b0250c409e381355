"""From `potluck join LINE` to the first committed contribution, behind a home router, in a run that is in round 30.

    python -m tests.benchmarks.first --netlab PATH/netlab.sh [--keep FOLDER] [--joins N]

Real processes, daemons and routers. A bootstrap node with a corpus of 300 million tokens, and old peers that are full replicas, are public
(--public); who joins is behind a router (--link, --router) in an empty HOME with an empty folder, and says nothing of its line. The
model has 49 million parameters: 196 MB of state. What lies behind the run is written, not trained: LAST rounds of log, the
checkpoint of round CHECKPOINT with every old peer, and the payloads of the rounds after it, which are noise that went
through the codec. The corpus is noise, too. From then on everything is done: rounds are decided, offers made, updates applied.

So that two cores do not measure themselves, a machine computes little: a micro-batch takes PACE seconds, and the first tokens of its first
sequence are trained on, but whole sequences are fetched. Each of --joins newcomers comes at another moment of a round, when the one before
has left. Told are, for each: when each phase began (by its own events, and the node's commit), and what came over its line
meanwhile (its network card's count, headers included). --keep: folder for what is written once, and for the processes' own files.

Bound: what came for state and text, at 80 % of the line's downlink, one round and 20 s.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bootstrap.archive import Archive
from peer.cli import main as cli
from peer.corpus.records import ChunkWriter
from peer.events import Event
from peer.net.disk import Disk
from peer.node.inner_loop import StageInnerLoop
from peer.node.peer import Factories
from peer.state.storage import Checkpoint, Storage
from peer.ui.lines import Lines
from protocol.codec import blob_hash, sparse
from protocol.ledger import part_lists
from protocol.planning.allotment import NEW, allot
from protocol.run import corpus, init, layout
from protocol.run.corpus import TOKENIZER as TOKENIZER_FILE
from protocol.run.corpus import CorpusIndex
from protocol.run.layout import ModelSpec
from protocol.run.manifest import DataSpec, Manifest, OuterSpec, TimingSpec, TokenizerSpec, TrainSpec
from protocol.wire.commit import Commit, Contribution, Part, Share
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from tests.faults import paced
from tests.faults.history import identity
from tests.faults.processes import Swarm
from tests.support import tiny
from tests.support.lab import Lab, lab
from tests.support.volunteers import TOKENIZER

NODE = "node-0"
MODEL = ModelSpec(vocab_size=16384, d_model=512, n_layers=10, n_heads=8, d_ff=1408, context=1024)
LAST, CHECKPOINT = 28, 20
"""Rounds that are in the log from the beginning; the newcomer comes in the second one after, the 30th."""
LEFT = 24
"""Replicas of the first CHECKPOINT rounds: with fewer the payloads since the beginning are fewer bytes than the state, and are fetched instead."""
L = 1023
TOKENS = 300_000_000
TRAIN = TrainSpec(
    inner_steps=200, micro_batches=4, rows=16, sequence=L, lr=1e-4, warmup_steps=0, total_steps=10**6
)  # 128 KiB of text a step
TRAINED_ON = 16
"""Tokens of the first sequence of a micro-batch."""
PACE = 1.5
SHARE, MORE_SECONDS = 0.8, 20.0
PHASES = {
    "found": "starts, and finds the run",
    "reachable": "finds out how it is reached; downlink",
    "started": "uplink",
    "recovered": "state",
    "role": "waits for the next plan",
    "offered": "trains, and packs",
    "commit": "its work is committed",
}
"""What ends with each of these events, and what it is called."""
DIGEST = hashlib.sha256(TOKENIZER).hexdigest()


def make_run(seconds: float, index: str, peers: int) -> Manifest:
    return tiny.manifest(
        name="first",
        rounds=1000,
        start_peers=peers,
        checkpoint_rounds=CHECKPOINT,
        model=MODEL,
        tokenizer=TokenizerSpec(digest=DIGEST),
        train=TRAIN,
        data=DataSpec(corpus=index),
        outer=OuterSpec(topk=32),
        timing=TimingSpec(round_deadline=10 * seconds, round_seconds=seconds, heartbeat=2.0, gone_after=15.0),
    )


# --- what is there before anybody joins


def write_corpus(folder: Path) -> str:
    """Noise of TOKENS tokens in `folder`, if it is not there; its digest."""
    if not (folder / corpus.INDEX).exists():
        disk, each, rng = Disk(), corpus.sequences_per_chunk(L, MODEL.vocab_size), np.random.default_rng(0)
        disk.make_folder(folder / corpus.CHUNKS)
        train, held = (ChunkWriter(disk, folder / corpus.CHUNKS, each, lambda number: None) for _ in range(2))
        count, left = -(-TOKENS // L), -(-TOKENS // L)
        while left:
            train.add(rng.integers(0, MODEL.vocab_size, (min(left, each), L + 1), dtype="<u2"))
            left -= min(left, each)
        held.add(rng.integers(0, MODEL.vocab_size, (8, L + 1), dtype="<u2"))
        train.finish()
        held.finish()
        index = CorpusIndex(
            tokenizer=DIGEST, vocab_size=MODEL.vocab_size, seed=0, sequence=L, sequences=count,
            chunks=b"".join(map(bytes.fromhex, train.names)), held_out=held.names[0], held_out_sequences=8, documents=1,
            tokens=count * L, text_bytes=4 * count * L, held_out_tokens=8 * L, held_out_bytes=32 * L,
        )  # fmt: skip
        (folder / TOKENIZER_FILE).write_bytes(TOKENIZER)
        (folder / corpus.INDEX).write_bytes(index.to_bytes())
    return blob_hash.name_of((folder / corpus.INDEX).read_bytes())


def write_past(folder: Path, run: Manifest, peers: Sequence[str]) -> None:
    """The folders of the node and of the old peers as they are after LAST rounds, if they are not there."""
    if (folder / "done").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    shards = layout.shard_names(MODEL)
    theta = {shard: init.initial_shard(MODEL, b"round 20", shard) for shard in shards}
    digests = {shard: layout.shard_digest(arrays) for shard, arrays in theta.items()}
    archive = Archive(folder / NODE, run)
    kept = {name: Storage(folder / name) for name in peers}
    for name, storage in kept.items():
        storage.save_checkpoint(Checkpoint(CHECKPOINT, theta, {}), digests)
        (storage.folder / "identity.key").write_bytes(identity(name).libp2p_bytes())
    replicas: Sequence[ReplicaSpec] = [
        ReplicaSpec(number=NEW, stages=(StageSpec(peer=identity(name).peer_id, first=0, last=MODEL.n_layers),))
        for name in peers
    ]
    plan: Plan | None = None
    left, parent = [write_share(archive, [], "left", 0)] * LEFT, run.run_id
    for round in range(LAST + 1):
        shares = left if round <= CHECKPOINT else [write_share(archive, list(kept.values()), n, round) for n in peers]
        done = tuple(
            Contribution(replica=number, tokens=run.train.tokens(1, 4), steps=1, loss=1.0, shares=(share,))
            for number, share in enumerate(shares if round else [])
        )
        plan = allot(run, round + 1, replicas, (), {}, plan)
        replicas = plan.replicas
        commit = Commit(
            run=run.run_id, round=round, parent=parent, time=0.0, contributions=done, left_out=(), diverged=(),
            digests=digests if round == CHECKPOINT + 1 else {}, plan=plan, leader=tiny.OPERATOR.peer_id, members=run.operators,
        )  # fmt: skip
        archive.append(tiny.record(commit))
        parent = commit.digest
    archive.close()
    for storage in kept.values():
        storage.close()
    (folder / "done").touch()


def write_share(archive: Archive, stores: Sequence[Storage], name: str, round: int) -> Share:
    """A peer's noise, after the codec, with the node and in `stores`."""
    codec, rng, parts = archive.manifest.outer.codec, np.random.default_rng([round, *name.encode()]), []
    for shard in layout.shard_names(MODEL):
        noise = [1e-6 * rng.standard_normal(shape, dtype=np.float32) for shape in layout.shapes(MODEL, shard)]
        data = sparse.encode(codec, noise)
        digest = archive.blobs.put(data, round, sync=False)
        for storage in stores:
            storage.blobs.put(data, round, sync=False)
        parts.append(Part(shard=shard, digest=digest, size=len(data), norm=1e-3))
    packed = part_lists.pack(tuple(parts))
    for blobs in (archive.blobs, *(storage.blobs for storage in stores)):
        blobs.put(packed, round, sync=False)
    return part_lists.share_of(identity(name).peer_id, tuple(parts))


# --- who joins


class Counter:
    """What came over the line of a home, by the time of day, while the block lasts. `read()`: bytes so far."""

    def __init__(self, prefix: Sequence[str]) -> None:
        self._command = [*prefix, "cat", "/sys/class/net/eth0/statistics/rx_bytes"]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seen: list[tuple[float, int]] = []

    def __enter__(self) -> Counter:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.25):
            said = subprocess.run(self._command, capture_output=True, check=True)
            self.seen.append((time.time(), int(said.stdout)))

    def at(self, when: float) -> float:
        """Bytes until then."""
        times, counts = zip(*self.seen, strict=True)
        return float(np.interp(when, times, counts))


def first(swarm: Swarm, name: str, prefix: Sequence[str]) -> dict[str, Any]:
    """Starts a newcomer, and waits for its first committed contribution: what it did, and said, until then."""
    began, before = time.time(), len(swarm.events(NODE))
    with Counter(prefix) as counter:
        swarm.start(name)
        peer = swarm.wait(name, lambda e: e.kind == "started", "its start").fields["peer"]

        def has_its_work(event: Event) -> bool:
            return event.kind == "commit" and any(
                peer in [s["peer"] for s in c["shares"]] for c in event.fields["contributions"]
            )

        commit = swarm.wait(NODE, has_its_work, f"the work of {name}", after=before)
        swarm.wait(name, lambda e: e.kind == "round" and e.fields["own_tokens"] > 0, "the news of that")
        time.sleep(0.5)  # one more count
    at: dict[str, float] = {}
    for event in swarm.events(name):
        at.setdefault(event.kind, event.time)
    at["commit"] = commit.time
    lines = Lines(own=True)
    rounds = [e.time for e in swarm.events(NODE) if e.kind == "commit" and e.time <= commit.time]
    return {
        "at": {kind: round(when - began, 1) for kind, when in sorted(at.items(), key=lambda item: item[1])},
        "came": {kind: round(counter.at(when) / 1e6, 1) for kind, when in sorted(at.items(), key=lambda item: item[1])},
        "round_began": round(rounds[-2] - began, 1),
        "seconds_of_rounds": [round(b - a, 1) for a, b in zip(rounds[-4:], rounds[-3:], strict=False)],
        "round": commit.fields["round"],
        "line": [(round(when - began, 2), came) for when, came in counter.seen],
        "said": [f"{e.time - began:6.1f} s {line}" for e in swarm.events(name) for line in lines.of(e)],
    }


def rehearse(swarm: Swarm, folder: Path, prefix: Sequence[str]) -> None:
    """`potluck join --dry-run` in an empty home: prints what it says."""
    command = [*prefix, sys.executable, "-m", "peer.cli", "join", swarm.addresses[0], "--dry-run"]
    began, home = time.monotonic(), {"HOME": str(folder), "XDG_CACHE_HOME": ""}
    folder.mkdir()
    said = subprocess.run(
        [*command, "--dir", folder / "peer", "--memory", "17GB"], env=os.environ | home, capture_output=True, text=True
    )
    print(said.stdout, said.stderr, f"--dry-run: exit {said.returncode} after {time.monotonic() - began:.1f} s", sep="")


def measure(there: Lab, chosen: argparse.Namespace, kept: Path) -> Iterator[dict[str, Any]]:
    """One newcomer after the other."""
    peers = [name for name in there.places if name.startswith("old")]
    newcomers = [name for name in there.places if name.startswith("new")]
    run = make_run(chosen.seconds, write_corpus(kept / "corpus"), len(peers))
    past = kept / f"past-{run.run_id[:12]}"
    write_past(past, run, peers)
    folder = kept / f"run-{int(time.time())}"
    places = {n: (host if n == NODE else "0.0.0.0", prefix) for n, (host, prefix) in there.places.items()}
    with Swarm(folder, run, (tiny.OPERATOR,), places=places, corpus=kept / "corpus") as swarm:
        shutil.copytree(past, folder, dirs_exist_ok=True)
        swarm.start_node(NODE)
        swarm.module = "tests.benchmarks.first"
        for name in peers:
            paced.set_pace(folder / name, PACE)
            swarm.start(name)
        if chosen.dry_run:
            swarm.wait(NODE, _decided(LAST + 1), "a round")
            rehearse(swarm, folder / "dry-run", places[newcomers[0]][1])
        for number, name in enumerate(newcomers):
            paced.set_pace(folder / name, PACE)
            swarm.fetches.add(name)
            swarm.measures.add(name)
            after = len(swarm.events(NODE)) if number or chosen.dry_run else 0
            commit = swarm.wait(NODE, _decided(LAST + 1), "a round", after=after)
            time.sleep(max(0.0, commit.time + chosen.seconds * (number + 0.5) / len(newcomers) - time.time()))
            yield first(swarm, name, places[name][1])
            swarm.kill(name)


def _decided(round: int) -> Any:
    return lambda e: e.kind == "commit" and e.fields["round"] >= round


def told(found: dict[str, Any], chosen: argparse.Namespace) -> bool:
    """Prints a newcomer's table; whether the bound is kept."""
    said = [line for line in found.pop("said") if "round 0 " not in line]
    print(*said, sep="\n")
    print(json.dumps({name: found[name] for name in ("round", "round_began", "seconds_of_rounds")}))
    bits = 1e6 * float(chosen.link.split(":")[0].split("/")[1])
    at, came = found["at"], found["came"]
    print("| phase | seconds | MB | share of the line |\n|---|---|---|---|")
    last, before = 0.0, 0.0
    for kind, phase in PHASES.items():
        seconds, some = at[kind] - last, came[kind] - before
        share = 8e6 * some / bits / seconds if seconds else 0.0
        print(f"| {phase} | {seconds:.1f} | {some:.1f} | {share:.0%} |")
        last, before = at[kind], came[kind]
    bound = 8e6 * came["commit"] / (SHARE * bits) + chosen.seconds + MORE_SECONDS
    print(f"| in all | {at['commit']:.1f} | {came['commit']:.1f} | |\nbound: {bound:.1f} s", flush=True)
    return bool(at["commit"] <= bound)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netlab", type=Path, required=True, help="the lab's script")
    parser.add_argument("--link", default="20/100:40", help="of who joins: Mb/s up/down:ms to the core and back")
    parser.add_argument("--router", default="cone", help="of who joins: cone, sym, none")
    parser.add_argument("--public", default="200/200:10", help="links of the node and of the old peers")
    parser.add_argument("--old", type=int, default=2, help="old peers")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a round")
    parser.add_argument("--dry-run", action="store_true", help="before, somebody only asks what it would do")
    parser.add_argument("--joins", type=int, default=1, help="newcomers, one after the other")
    parser.add_argument("--keep", type=Path, help="folder for what is written")
    chosen = parser.parse_args()
    public = [NODE, *(f"old-{i}" for i in range(chosen.old))]
    links = dict.fromkeys(public, chosen.public)
    links |= {f"new-{i}": f"{chosen.link}:0:{chosen.router}" for i in range(chosen.joins)}
    kept = contextlib.nullcontext(chosen.keep) if chosen.keep else tempfile.TemporaryDirectory(prefix="potluck-first-")
    with kept as name, lab(chosen.netlab, links) as there:
        good = [told(found, chosen) for found in measure(there, chosen, Path(name))]
    return 0 if good and all(good) else 1


def frugal(folder: Path) -> type[StageInnerLoop]:
    """A paced machine's inner loop, which computes with little of the text that it gets."""

    class InnerLoop(paced.paced(folder)):  # type: ignore[misc]
        class trainer_class(paced.paced(folder).trainer_class):  # type: ignore[misc]
            def forward(self, micro: int, ids: Any, *arguments: Any, **options: Any) -> Any:
                return super().forward(micro, ids[:1, : TRAINED_ON + 1], *arguments, **options)

    return InnerLoop


def be_peer() -> None:
    """`potluck join` on such a machine."""
    folder = Path(sys.argv[sys.argv.index("--dir") + 1])
    cli.main(factories=Factories(inner_loop=frugal(folder)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["join"]:
        be_peer()
    else:
        raise SystemExit(main())
