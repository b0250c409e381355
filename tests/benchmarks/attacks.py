"""How many rounds per second are left while somebody attacks?

    python -m tests.benchmarks.attacks [--seconds S] [--times N] [--only NAME ...]

A bootstrap node and two peers that do everything but compute (a round's work is HOLD seconds of waiting) have one core, with their network daemons;
the enemy, a process of its own with a daemon, has another. Quiet spells and attacks take turns, each attack under a new identity, so that none is
refused for what the one before did. Told are the medians of the rounds per second, their ratio, how much the enemy did per second (messages sent,
streams opened, calls made, also those that were refused), by how much the memory of the attacked process has grown in all, and for what the node or a peer refused the
enemy. An enemy that ends, or does nothing, ends the benchmark. Bound: 80 % of the quiet rate, and nobody ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer import events
from peer.net import base, blobs
from peer.net.base import Stream
from protocol.errors import RemoteError
from protocol.run import layout
from protocol.run import manifest as manifests
from protocol.run.manifest import Manifest
from protocol.wire import encoding, endpoints
from protocol.wire.dial_back import DialMe
from protocol.wire.session import Announced, Attest, Heartbeat, LogRequest
from tests import false_states, volunteers
from tests.hostile.ground import SOON, Enemy, Ground, daemon, identity
from tests.liars import Liar

HOLD = 0.2
BEGINS = b"begins\n"
BOUND = 0.8
AT_ONCE = 20
"""Streams that an enemy opens beside each other."""


class Done:
    """What one enemy did."""

    times = 0


@dataclass(frozen=True)
class Attacker(Enemy):
    """An enemy who knows a peer, too. `addresses`: the node's."""

    victim: str
    addresses: tuple[str, ...]
    done: Done

    async def over_and_over(self, work: Callable[[], Awaitable[object]], beside: int = 1) -> None:
        """Does it for ever, so many beside each other, whatever the others answer."""

        async def one() -> None:
            while True:
                with contextlib.suppress(RemoteError, ConnectionError):
                    await work()
                self.done.times += 1
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for _ in range(beside):
                group.create_task(one())

    async def in_sessions(self, message: Callable[[int], bytes]) -> None:
        """Says it in a session as fast as it goes, and in a new one when that ends."""

        async def one() -> None:
            session, number = await self.session(), 0
            while True:
                await session.send(message(number))
                self.done.times, number = self.done.times + 1, number + 1

        await self.over_and_over(one)

    async def calls(self, target: str, name: str, request: bytes) -> None:
        """Calls; what is answered is thrown away."""
        await self.over_and_over(lambda: base.call(self.transport, target, name, request, timeout=SOON), AT_ONCE)


async def heartbeats(enemy: Attacker) -> None:
    """small messages in a session, as fast as they go"""
    beat = encoding.encode(Heartbeat(phase="x", round=1))
    await enemy.in_sessions(lambda number: beat)


async def attestations(enemy: Attacker) -> None:
    """attestations of all shards, other digests each time"""
    names = layout.shard_names(enemy.manifest.model)

    def message(number: int) -> bytes:
        digest = hashlib.sha256(number.to_bytes(8)).hexdigest()
        return encoding.encode(Attest(round=number % 100, digests=dict.fromkeys(names, digest)))

    await enemy.in_sessions(message)


async def announcements(enemy: Attacker) -> None:
    """announcements, each newer than the one before"""
    await enemy.in_sessions(lambda number: encoding.encode(Announced(sealed=enemy.sealed(serial=number + 2))))


async def log_requests(enemy: Attacker) -> None:
    """requests for the whole log in a session"""
    asked = encoding.encode(LogRequest(after=-1))
    await enemy.in_sessions(lambda number: asked)


async def log_calls(enemy: Attacker) -> None:
    """calls for the whole log, each on a stream of its own"""
    await enemy.calls(enemy.node, endpoints.LOG, encoding.encode(LogRequest(after=-1)))


async def hoarded(enemy: Attacker) -> None:
    """streams to a chain's member, opened and kept"""
    kept: list[Stream] = []

    async def one() -> None:
        kept.append(await enemy.open(enemy.victim, endpoints.PIPE))

    await enemy.over_and_over(one, AT_ONCE)


async def opened(enemy: Attacker) -> None:
    """streams to a chain's member, opened and closed"""

    async def one() -> None:
        await (await enemy.open(enemy.victim, endpoints.PIPE)).close()

    await enemy.over_and_over(one, AT_ONCE)


async def states(enemy: Attacker) -> None:
    """questions for a peer's states"""
    await enemy.calls(enemy.victim, endpoints.STATES, b"")


async def tokenizer(enemy: Attacker) -> None:
    """the tokenizer, fetched from the node again and again"""
    name = endpoints.TOKENIZER_NAME
    await enemy.over_and_over(lambda: blobs.fetch_named(enemy.transport, enemy.node, name, limit=1 << 20), AT_ONCE)


async def dial_back(enemy: Attacker) -> None:
    """requests to dial back"""
    await enemy.calls(enemy.node, endpoints.DIAL_BACK, encoding.encode(DialMe(ports=(1, 2, 3))))


async def garbage(enemy: Attacker) -> None:
    """random bytes under every name, to the node and the peer"""
    rng = random.Random(0)
    names = sorted(v for v in vars(endpoints).values() if isinstance(v, str) and v.startswith("potluck/"))

    async def one() -> None:
        stream = await enemy.open(rng.choice((enemy.node, enemy.victim)), rng.choice(names))
        try:
            for _ in range(10):
                await stream.send(rng.randbytes(rng.randrange(10_000)))
        finally:
            await stream.close()

    await enemy.over_and_over(one, 4)


async def planned(enemy: Attacker) -> None:
    """a peer that is planned, attests a false state and offers other replicas' work"""
    parts = enemy.manifest, enemy.identity, enemy.transport, enemy.addresses
    liar = Liar(*parts, false_states.DIGESTS, random.Random(0))

    async def count() -> None:
        while True:
            enemy.done.times = liar.said
            await asyncio.sleep(0.1)

    await asyncio.gather(liar.run(), count())


ATTACKS = (
    heartbeats,
    attestations,
    announcements,
    log_requests,
    log_calls,
    hoarded,
    opened,
    states,
    tokenizer,
    dial_back,
    garbage,
    planned,
)


async def attack(manifest: Manifest, name: str, who: str, folder: Path, node: list[str], victim: list[str]) -> None:
    """As the enemy's process: attacks until SIGTERM, then says how much it did."""
    me, done, loop = identity(who), Done(), asyncio.get_running_loop()
    transport = await daemon(me, manifest.run_id, folder, folder)
    for addresses in (node, victim):
        await transport.connect(addresses, timeout=SOON)
    ids = [addresses[0].rpartition("/p2p/")[2] for addresses in (node, victim)]
    loop.add_signal_handler(signal.SIGTERM, lambda: print(done.times, flush=True))
    print(BEGINS.decode(), end="", flush=True)
    work: Callable[[Attacker], Coroutine[Any, Any, None]] = next(a for a in ATTACKS if a.__name__ == name)
    await work(Attacker(me, transport, manifest, ids[0], ids[1], tuple(node), done))


async def rate(ground: Ground, seconds: float) -> float:
    """Rounds per second."""
    head, began = ground.head, time.monotonic()
    await ground.until(lambda: time.monotonic() >= began + seconds)
    return (ground.head - head) / (time.monotonic() - began)


def core(number: int) -> None:
    """This process and what it starts has this core alone, where there are several."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setaffinity(0, {number})


@dataclass(frozen=True)
class Spell:
    """One attack. `done`: what the enemy did per second."""

    rate: float
    done: float
    refused: frozenset[str]


@dataclass(frozen=True)
class Row:
    """All spells of an attack."""

    attack: str
    quiet: float
    attacked: float
    done: float
    grown_mib: float
    refused: list[str]

    @property
    def ratio(self) -> float:
        return self.attacked / self.quiet

    def __str__(self) -> str:
        text = next(a.__doc__ for a in ATTACKS if a.__name__ == self.attack)
        figures = (
            f"{self.quiet:.2f} | {self.attacked:.2f} | {self.ratio:.2f} | {self.done:,.0f} | +{self.grown_mib:.0f}"
        )
        return f"| {text} | {figures} | {'; '.join(self.refused) or '-'} |"


async def spell(ground: Ground, name: str, number: int, seconds: float) -> Spell:
    """An enemy attacks for so long."""
    victim, who = ground.peers["a"], f"{name} {number}"
    said = json.dumps([name, who, ground.boot.addresses, victim.transport.addresses])
    with tempfile.TemporaryDirectory() as own:
        command = [sys.executable, "-m", __spec__.name, "--enemy", said, "--folder", str(ground.folder), own]
        enemy = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, start_new_session=True)
        try:
            assert enemy.stdout is not None
            if await enemy.stdout.readline() != BEGINS:
                raise SystemExit(f"{name}: the enemy has not begun")
            left = await rate(ground, seconds)
            with contextlib.suppress(ProcessLookupError):
                enemy.terminate()
            done = int(await enemy.stdout.readline() or 0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(enemy.pid, signal.SIGKILL)  # its daemon, too
            await enemy.wait()
    if not done:
        raise SystemExit(f"{name}: the enemy has ended, or did nothing")
    told = [e.body for log in (ground.events, victim.events) for e in log if isinstance(e.body, events.Refused)]
    return Spell(left, done / seconds, frozenset(b.reason for b in told if b.peer == identity(who).peer_id))


async def measure(folder: Path, seconds: float, times: int, names: list[str]) -> list[Row]:
    """A row for each attack, printed as soon as it is known."""
    made, rows = volunteers.manifest(rounds=1_000_000, start_peers=2), list[Row]()
    async with Ground(folder, made) as ground:

        async def hold(peer: str, round: int) -> None:
            await asyncio.sleep(HOLD)

        ground.hold = hold
        await ground.join("a", "b")
        await ground.goes_on(5)
        (folder / "manifest").write_bytes(made.to_bytes())
        for name in names:
            quiet, attacked = list[float](), list[Spell]()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for number in range(times):
                quiet.append(await rate(ground, seconds))
                attacked.append(await spell(ground, name, number, seconds))
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            left, done = (statistics.median(getattr(one, of) for one in attacked) for of in ("rate", "done"))
            refused = sorted(frozenset().union(*(one.refused for one in attacked)))
            rows.append(Row(name, statistics.median(quiet), left, done, grown, refused))
            print(json.dumps(dataclasses.asdict(rows[-1])), flush=True)
        await ground.goes_on(5)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=[a.__name__ for a in ATTACKS])
    parser.add_argument("--enemy", help=argparse.SUPPRESS)
    parser.add_argument("--folder", nargs=2, type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.enemy:
        core(1)
        (shared, own), (name, who, node, victim) = chosen.folder, json.loads(chosen.enemy)
        made = manifests.from_bytes((shared / "manifest").read_bytes(), "manifest")
        asyncio.run(attack(made, name, who, own, node, victim))
        return
    core(0)
    with tempfile.TemporaryDirectory() as folder:
        names = chosen.only or [a.__name__ for a in ATTACKS]
        rows = asyncio.run(measure(Path(folder), chosen.seconds, chosen.times, names))
    print(
        "| attack | rounds per second, quiet | attacked | ratio | done per second | memory, MiB | refused because it |"
    )
    print("|---|---|---|---|---|---|---|", *rows, sep="\n")
    raise SystemExit(any(row.ratio < BOUND for row in rows))


if __name__ == "__main__":
    main()
