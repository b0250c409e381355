"""Measures the bytes and seconds of joining late, coming back, and being interrupted, over real daemons and disks.

    python -m tests.benchmarks.newcomer [FOLDER]

The run has 120 rounds of 8 replicas, and a model of 49 million parameters. Three peers serve the newest checkpoint, of
round 100, and a bootstrap node the log and the payloads. Nothing is trained: the state and the payloads of rounds 101
to 120 are noise that went through the codec. Payloads of earlier rounds are only named, since nobody needs them. FOLDER
(default: a temporary one) keeps the prepared files. Exits with 1 if a bound is not kept.

In each case a process of its own joins with the daemon of users, until its first inner step could begin. Only its inner
loop does nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bootstrap.archive import Archive
from bootstrap.node import BootstrapNode
from peer.events import Emitter, Event
from peer.net import directory, keyfile, p2p
from peer.net.base import Handler, Stream, Transport, Unreachable
from peer.node.audit import held_out_text
from peer.node.peer import Factories, Peer
from peer.state.outer_optimizer import Outer
from peer.state.payloads import Exchange
from peer.state.storage import Checkpoint, Storage
from peer.training import device
from protocol.codec import blob_hash, sparse
from protocol.codec.formats import Codec
from protocol.identity import Identity
from protocol.ledger import part_lists
from protocol.run import init, layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest, TimingSpec, TokenizerSpec
from protocol.wire import encoding, endpoints
from protocol.wire.announcement import Announcement
from protocol.wire.commit import Commit, Contribution, Part
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from tests.support import machines, networks, tiny
from tests.support.volunteers import TOKENIZER, Noise

MODEL = ModelSpec(vocab_size=16384, d_model=512, n_layers=10, n_heads=8, d_ff=1408, context=1024)
REPLICAS, ROUNDS, CHECKPOINT, STOPPED = 8, 120, 100, 115
HOLDERS = 3
KILLS = 10
KILLED_BPS = 60_000_000
"""Rate of each holder for the newcomer that is killed: its download takes about nine seconds."""
JOINERS = ("newcomer", "returning", "killed", "cheated")
DEADLINE = 3000.0


def identity(name: str) -> Identity:
    return Identity(hashlib.sha256(name.encode()).digest())


def manifest() -> Manifest:
    """Returns a run in which nobody is taken for gone and no deadline passes."""
    return tiny.manifest(
        model=MODEL,
        rounds=1000,
        checkpoint_rounds=CHECKPOINT,
        tokenizer=TokenizerSpec(digest=hashlib.sha256(TOKENIZER).hexdigest()),
        timing=TimingSpec(round_deadline=1e6, heartbeat=2.0, gone_after=1e5),
    )


# --- what is there before anybody joins


def payload(codec: Codec, replica: int, round: int, shard: str) -> bytes:
    """Returns a replica's payload, made of noise."""
    seed = hashlib.sha256(f"{replica} {round} {shard}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(seed[:8], "little"))
    return sparse.encode(codec, [rng.standard_normal(s, dtype=np.float32) * 1e-3 for s in layout.shapes(MODEL, shard)])


def prepare(folder: Path) -> None:
    """Writes the folders of the bootstrap node, of a holder, and of a peer that stopped after round 115."""
    run, shards = manifest(), layout.shard_names(MODEL)
    codec = run.outer.codec
    outer = Outer(MODEL, codec, run.outer.beta, run.outer.eta)
    for shard in shards:
        outer.theta[shard] = init.initial_shard(MODEL, b"round 100", shard)
    holder, returning = Storage(folder / "holder"), Storage(folder / "returning")
    archive = Archive(folder / "bootstrap", run)
    archive.save_tokenizer(TOKENIZER)
    parent, sizes = run.run_id, dict.fromkeys(shards, 0)
    for round in range(ROUNDS + 1):
        contributions, digests, lists = [], {}, {}
        if round == CHECKPOINT + 1:
            digests = {s: outer.digest(s) for s in shards}
            holder.save_checkpoint(Checkpoint(CHECKPOINT, outer.theta, {}), digests)
        for replica in range(REPLICAS if round else 0):
            parts = []
            for shard in shards:
                if round <= CHECKPOINT:
                    name, size = hashlib.sha256(f"{round} {replica} {shard}".encode()).hexdigest(), sizes[shard]
                    size = size or len(payload(codec, replica, round, shard))
                    sizes[shard] = size
                else:
                    data = payload(codec, replica, round, shard)
                    name, size = archive.blobs.put(data, round), len(data)
                    if CHECKPOINT < round <= STOPPED:
                        returning.blobs.put(data, round)
                parts.append(Part(shard=shard, digest=name, size=size, norm=1.0))
            share = part_lists.share_of(identity(f"replica {replica}").peer_id, tuple(parts))
            archive.blobs.put(part_lists.pack(tuple(parts)), round)
            lists[share.root] = tuple(parts)
            contributions.append(Contribution(replica=replica, tokens=64, steps=4, loss=1.0, shares=(share,)))
        stages = [(StageSpec(peer=identity(n).peer_id, first=0, last=MODEL.n_layers),) for n in JOINERS]
        replicas = tuple(ReplicaSpec(number=i, stages=s) for i, s in enumerate(stages))
        plan = Plan(round=round + 1, replicas=replicas, next_number=len(replicas))
        commit = Commit(
            run=run.run_id, round=round, parent=parent, time=0.0, contributions=tuple(contributions), left_out=(),
            diverged=(), digests=digests, plan=plan if round == ROUNDS else None, leader=tiny.OPERATOR.peer_id,
            members=run.operators,
        )  # fmt: skip
        archive.append(tiny.record(commit))
        parent = commit.digest
        if round > CHECKPOINT:
            for shard in shards:
                items = [(w, archive.blobs.get(p.digest) or b"") for w, p, _ in commit.payloads(shard, lists)]
                outer.apply(shard, items)
        if round == STOPPED:
            returning.save_checkpoint(Checkpoint(STOPPED, outer.theta, {}), {s: outer.digest(s) for s in shards})
        print(f"\rprepared round {round} of {ROUNDS}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    final = {s: outer.digest(s) for s in shards}
    (folder / "final.json").write_text(json.dumps(layout.state_digest(MODEL, final)))
    for closing in (holder, returning, archive):
        closing.close()


# --- who is there


class WrongStream:
    """A stream that sends every range with a wrong bit."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, *parts: bytes | memoryview, **options: Any) -> None:
        frame = b"".join(parts)
        if len(frame) > blob_hash.RANGE_BYTES // 2:
            frame = bytes([frame[0] ^ 1]) + frame[1:]
        await self._stream.send(frame, **options)


class LyingTransport:
    """A transport with streams that send wrong bits."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def serve(self, name: str, handler: Handler) -> None:
        await self._transport.serve(name, lambda stream: handler(WrongStream(stream)))  # type: ignore[arg-type]


class Holder:
    """A peer that announces and serves the checkpoint of round 100."""

    def __init__(self, folder: Path, transport: Any, limit: int | None) -> None:
        self.transport = transport
        self.storage = Storage(folder)

        self.exchange = Exchange(
            manifest(), self.storage, networks.network(transport, nodes=manifest().operators, limit=limit)
        )

    def announce(self, who: Identity, node: BootstrapNode) -> None:
        """Announces itself as in a session with the node, which a holder has not."""
        said = Announcement(
            run=manifest().run_id, peer=who.peer_id, addresses=self.transport.addresses, serial=int(time.time() * 1000)
        )
        assert node.roster.add(who.peer_id, encoding.seal(who, said)) is not None


@contextlib.asynccontextmanager
async def network(folder: Path, limit: int | None = None, cheats: int = 0) -> AsyncIterator[tuple[str, list[Any]]]:
    """Starts a bootstrap node and the holders; yields its address and all transports."""
    run, key = manifest(), folder / "operator.key"
    key.write_bytes(tiny.OPERATOR.libp2p_bytes())
    archive = Archive(folder / "bootstrap", run)
    boot = await p2p.start(key, host="127.0.0.1", validate=directory.valid_record(manifest().run_id))
    emit = Emitter("bootstrap", lambda event: None)
    serving = BootstrapNode(tiny.OPERATOR, boot, archive, emit)
    node = asyncio.create_task(serving.serve())
    holders = []
    try:
        for index in range(HOLDERS):
            path = folder / f"holder-{index}"
            if not path.exists():
                shutil.copytree(folder / "holder", path)
            own = keyfile.load_or_create(path / "identity.key")
            transport = await p2p.start(
                path / "identity.key",
                host="127.0.0.1",
                bootstrap=boot.addresses,
                validate=directory.valid_record(manifest().run_id),
            )
            holders.append(Holder(path, LyingTransport(transport) if index < cheats else transport, limit))
            await holders[-1].exchange.serve()
            holders[-1].announce(own, serving)
        yield boot.addresses[0], [boot, *(h.transport for h in holders)]
    finally:
        for holder in holders:
            await holder.exchange.aclose()
            await holder.transport.aclose()
            holder.storage.close()
        node.cancel()
        await asyncio.gather(node, return_exceptions=True)
        await boot.aclose()
        archive.close()


# --- who joins


async def join(name: str, folder: Path, address: str) -> None:
    """Runs `potluck join` in a process of its own, with an empty inner loop, until the state is complete."""
    run, ready = manifest(), asyncio.Event()
    warnings: list[str] = []
    began = time.monotonic()

    async def idle(who: str, round: int) -> None:
        ready.set()
        await asyncio.Event().wait()

    def inner_loop(run: Manifest, who: str, *_: object) -> Noise:
        return Noise(idle, run, who)

    def hear(event: Event) -> None:
        if event.kind == "warning":
            warnings.append(event.fields["text"])

    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "identity.key").write_bytes(identity(name).libp2p_bytes())
    storage = Storage(path, 4 << 30)
    while True:
        with contextlib.suppress(Unreachable):  # right after a kill; `potluck join` tries again, too
            transport = await p2p.start(
                path / "identity.key",
                host="127.0.0.1",
                bootstrap=[address],
                validate=directory.valid_record(manifest().run_id),
            )
            break
    machine = machines.machine(path, 1 << 40, nodes=[address], up_bps=10**9, down_bps=10**9)
    emit = Emitter(name, hear)
    made = Factories(text=held_out_text, inner_loop=inner_loop)
    peer = Peer(run, identity(name), transport, storage, machine, emit, made)
    work = asyncio.create_task(peer.run())
    done = asyncio.create_task(ready.wait())
    await asyncio.wait({work, done}, return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        work.result()
    assert peer.rounds is not None
    outer = peer.rounds.outer
    digests = {shard: outer.digest(shard) for shard in layout.shard_names(MODEL)}
    result = {
        "received": transport.traffic.received[endpoints.BLOB],
        "seconds": time.monotonic() - began,
        "right": layout.state_digest(MODEL, digests) == json.loads((folder / "final.json").read_text()),
        "peak_rss": device.peak_rss(),
        "warnings": warnings,
    }
    print(json.dumps(result), flush=True)
    os._exit(0)  # no last checkpoint: the next case may use the folder


def begin(name: str, folder: Path, address: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.benchmarks.newcomer", "join", name, str(folder), address]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


async def result_of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    output, _ = await asyncio.to_thread(process.communicate)
    return dict(json.loads(output.splitlines()[-1]))


async def case(folder: Path, name: str, cheats: int = 0) -> dict[str, Any]:
    """Measures one peer that joins undisturbed."""
    async with network(folder, None, cheats) as (address, serving):
        process = await asyncio.to_thread(begin, name, folder, address)
        return {**await result_of(process), "sent": sum(t.traffic.sent[endpoints.BLOB] for t in serving)}


async def killed(folder: Path, expected: int) -> dict[str, Any]:
    """Measures a newcomer that is killed ten times, at equal steps of its `expected` bytes."""
    async with network(folder, KILLED_BPS) as (address, serving):

        def sent() -> int:
            return sum(t.traffic.sent[endpoints.BLOB] for t in serving)

        for kill in range(KILLS):
            process = await asyncio.to_thread(begin, "killed", folder, address)
            while sent() < expected * (kill + 1) / (KILLS + 1):
                assert process.poll() is None, "it was to be killed before its end"
                await asyncio.sleep(0.002)
            os.kill(process.pid, signal.SIGKILL)
            await asyncio.to_thread(process.communicate)
        process = await asyncio.to_thread(begin, "killed", folder, address)
        return {**await result_of(process), "sent": sent()}


async def measure(folder: Path) -> int:
    whole = 4 * layout.total_parameters(MODEL)
    for name in JOINERS:
        if name != "returning":
            shutil.rmtree(folder / name, ignore_errors=True)
    print(f"a checkpoint: {whole:,} bytes; a round of {REPLICAS} replicas: {round_bytes(folder) / whole:.2%} of it")
    wrong = 0

    def told(what: str, found: dict[str, Any], share: float, bound: float) -> None:
        nonlocal wrong
        kept = share <= bound and found["right"]
        wrong += not kept
        print(
            f"{what}: {share:.2%} of the bound's base, at most {bound:.0%}: {'kept' if kept else 'NOT KEPT'};"
            f" {found['received']:,} bytes received, {found['sent']:,} sent, {found['seconds']:.1f} s,"
            f" peak RSS {found['peak_rss'] / 1e6:.0f} MB, state {'right' if found['right'] else 'WRONG'}",
            flush=True,
        )

    new = await case(folder, "newcomer")
    told("joins late, newest checkpoint 20 rounds old (of a checkpoint)", new, new["received"] / whole, 1.5)
    back = await case(folder, "returning")
    told("comes back after 5 rounds (of a checkpoint)", back, back["received"] / whole, 0.12)
    cut = await killed(folder, new["sent"])
    told("killed ten times (bytes sent again)", cut, cut["sent"] / new["sent"] - 1, 0.02)
    cheated = await case(folder, "cheated", cheats=1)
    told("one of three holders is corrupt (of a checkpoint)", cheated, cheated["received"] / whole, 1.55)
    named = [w for w in cheated["warnings"] if "not asked again" in w]
    print("  named:", named[:1])
    return 1 if wrong or not named else 0


def round_bytes(folder: Path) -> int:
    """Returns the payload bytes of the last round."""
    archive = Archive(folder / "bootstrap", manifest())
    try:
        return sum(share.size for share in archive.commits[-1].shares)
    finally:
        archive.close()


@contextlib.contextmanager
def workplace(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        yield kept
    else:
        with tempfile.TemporaryDirectory(prefix="potluck-newcomer-") as name:
            yield Path(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="keeps what was prepared")
    with workplace(parser.parse_args().folder) as folder:
        if not (folder / "final.json").exists():
            prepare(folder)
        return asyncio.run(asyncio.wait_for(measure(folder), DEADLINE))


if __name__ == "__main__":
    if sys.argv[1:2] == ["join"]:
        asyncio.run(join(sys.argv[2], Path(sys.argv[3]), sys.argv[4]))
    raise SystemExit(main())
