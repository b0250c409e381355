"""How many rounds per second are left while somebody attacks?

    python -m tests.benchmarks.attacks [--seconds S] [--times N] [--only NAME ...]

A bootstrap node and two peers that do everything but compute (a round's work is HOLD seconds of waiting) have one core, with their network daemons;
the enemy, a process of its own with a daemon, has another. Quiet spells and attacks take turns, each attack under a new identity, so that none is
refused for what the one before did. Told are the medians of the rounds per second, their ratio, by how much the memory of the attacked process has
grown in all, and for what the node or a peer refused the enemy. Bound: 80 % of the quiet rate, and nobody ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from peer import events
from peer.net import directory, p2p
from peer.net.base import Stream
from peer.net.p2p import P2PTransport
from protocol.errors import RemoteError
from protocol.run import layout
from protocol.run import manifest as manifests
from protocol.run.manifest import Manifest
from protocol.wire import encoding, endpoints, framing
from protocol.wire.dial_back import DialMe
from protocol.wire.session import Announced, Attest, Heartbeat, LogRequest
from tests import false_states, volunteers
from tests.hostile.ground import SOON, Enemy, Ground, identity
from tests.liars import Liar

HOLD = 0.2
BEGINS = b"begins\n"
BOUND = 0.8
AT_ONCE = 20
"""Streams that an enemy opens beside each other."""


@dataclass(frozen=True)
class Attacker(Enemy):
    """An enemy who knows a peer, too."""

    victim: str
    addresses: tuple[str, ...]

    async def over_and_over(self, work: Callable[[int], Awaitable[object]]) -> None:
        """Does it for ever, whatever comes of it."""
        number = 0
        while True:
            with contextlib.suppress(RemoteError, ConnectionError):
                await work(number)
            number += 1
            await asyncio.sleep(0)

    async def in_sessions(self, message: Callable[[int], bytes]) -> None:
        """Says it in a session as fast as it goes, and in a new one when that ends."""

        async def one(_: int) -> None:
            session = await self.session()
            number = 0
            while True:
                await session.send(message(number))
                number += 1

        await self.over_and_over(one)


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
    asked = encoding.encode(LogRequest(after=-1))
    await _calls(enemy, enemy.node, endpoints.LOG, asked)


async def hoarded(enemy: Attacker) -> None:
    """streams to a chain's member, opened and kept"""
    kept: list[Stream] = []

    async def one(_: int) -> None:
        kept.append(await enemy.open(enemy.victim, endpoints.PIPE))

    await enemy.over_and_over(lambda number: asyncio.gather(*(one(i) for i in range(AT_ONCE)), return_exceptions=True))


async def opened(enemy: Attacker) -> None:
    """streams to a chain's member, opened and closed"""

    async def one(_: int) -> None:
        await (await enemy.open(enemy.victim, endpoints.PIPE)).close()

    await enemy.over_and_over(lambda number: asyncio.gather(*(one(i) for i in range(AT_ONCE)), return_exceptions=True))


async def states(enemy: Attacker) -> None:
    """questions for a peer's states"""
    await _calls(enemy, enemy.victim, endpoints.STATES, b"\x80")


async def tokenizer(enemy: Attacker) -> None:
    """the tokenizer, fetched from the node again and again"""
    asked = framing.pack_message({"named": endpoints.TOKENIZER_NAME})
    await _calls(enemy, enemy.node, endpoints.BLOB, asked)


async def dial_back(enemy: Attacker) -> None:
    """requests to dial back"""
    await _calls(enemy, enemy.node, endpoints.DIAL_BACK, encoding.encode(DialMe(ports=(1, 2, 3))))


async def garbage(enemy: Attacker) -> None:
    """random bytes under every name, to the node and the peer"""
    rng = random.Random(0)
    names = sorted(v for v in vars(endpoints).values() if isinstance(v, str) and v.startswith("potluck/"))

    async def one(number: int) -> None:
        stream = await enemy.open(rng.choice((enemy.node, enemy.victim)), rng.choice(names))
        try:
            for _ in range(10):
                await stream.send(rng.randbytes(rng.randrange(10_000)))
        finally:
            await stream.close()

    await enemy.over_and_over(lambda number: asyncio.gather(*(one(i) for i in range(4)), return_exceptions=True))


async def planned(enemy: Attacker) -> None:
    """a peer that is planned, attests a false state and offers other replicas' work"""
    addresses = [f"{a}" for a in enemy.addresses]
    await Liar(enemy.manifest, enemy.identity, enemy.transport, addresses, false_states.DIGESTS, random.Random(0)).run()


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


async def _calls(enemy: Attacker, target: str, name: str, request: bytes) -> None:
    """Calls on streams of their own, some beside each other; what is answered is thrown away."""

    async def one() -> None:
        stream = await enemy.open(target, name)
        try:
            await stream.send(request)
            await stream.recv(timeout=SOON)
        finally:
            await stream.close()

    await enemy.over_and_over(lambda number: asyncio.gather(*(one() for _ in range(AT_ONCE)), return_exceptions=True))


async def attack(manifest: Manifest, name: str, who: str, key: Path, node: list[str], victim: list[str]) -> None:
    """As the enemy's process: attacks until it is killed."""
    me = identity(who)
    key.write_bytes(me.libp2p_bytes())
    key.chmod(0o600)
    run = manifest.run_id
    transport: P2PTransport = await p2p.start(
        key,
        host="127.0.0.1",
        validate=directory.valid_record(run),
        latest=directory.latest_expiry(run),
        sockets=key.parent,
    )
    for addresses in (node, victim):
        await transport.connect(addresses, timeout=SOON)
    ids = [addresses[0].rpartition("/p2p/")[2] for addresses in (node, victim)]
    print(BEGINS.decode(), end="", flush=True)
    await next(a for a in ATTACKS if a.__name__ == name)(Attacker(me, transport, manifest, ids[0], ids[1], tuple(node)))


async def rate(ground: Ground, seconds: float) -> float:
    """Rounds per second."""
    head, began = ground.head, time.monotonic()
    await ground.until(lambda: time.monotonic() >= began + seconds)
    return (ground.head - head) / (time.monotonic() - began)


def core(number: int) -> None:
    """This process and what it starts has this core alone, where there are several."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setaffinity(0, {number})


async def measure(folder: Path, seconds: float, times: int, names: list[str]) -> list[dict[str, object]]:
    """A row for each attack."""
    made = volunteers.manifest(rounds=1_000_000, start_peers=2)
    rows: list[dict[str, object]] = []
    async with Ground(folder, made) as ground:

        async def hold(peer: str, round: int) -> None:
            await asyncio.sleep(HOLD)

        ground.hold = hold
        (victim, _) = await ground.join("a", "b")
        await ground.goes_on(5)
        (folder / "manifest").write_bytes(made.to_bytes())
        for name in names:
            quiet, attacked, refused = [], [], set()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for time_ in range(times):
                quiet.append(await rate(ground, seconds))
                who = f"{name} {time_}"
                said = json.dumps([name, who, ground.boot.addresses, victim.transport.addresses])
                with tempfile.TemporaryDirectory() as own:
                    command = [sys.executable, "-m", __spec__.name, "--enemy", said, "--folder", str(folder), own]
                    enemy = await asyncio.create_subprocess_exec(
                        *command, stdout=subprocess.PIPE, start_new_session=True
                    )
                    try:
                        assert enemy.stdout is not None
                        if await enemy.stdout.readline() != BEGINS:
                            raise SystemExit(f"{name}: the enemy has ended")
                        attacked.append(await rate(ground, seconds))
                    finally:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(enemy.pid, signal.SIGKILL)  # its daemon, too
                        await enemy.wait()
                told = [e.body for log in (ground.events, victim.events) for e in log]
                refused |= {b.reason for b in told if isinstance(b, events.Refused) and b.peer == identity(who).peer_id}
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            row = {
                "attack": name,
                "quiet": statistics.median(quiet),
                "attacked": statistics.median(attacked),
                "ratio": statistics.median(attacked) / statistics.median(quiet),
                "grown_mib": grown,
                "refused": sorted(refused),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
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
        asyncio.run(attack(made, name, who, own / "key", node, victim))
        return
    core(0)
    with tempfile.TemporaryDirectory() as folder:
        names = chosen.only or [a.__name__ for a in ATTACKS]
        rows = asyncio.run(measure(Path(folder), chosen.seconds, chosen.times, names))
    print(
        "| attack | rounds per second, quiet | attacked | ratio | memory, MiB | refused because it |\n|---|---|---|---|---|---|"
    )
    for row in rows:
        text = next(a.__doc__ for a in ATTACKS if a.__name__ == row["attack"])
        print(
            f"| {text} | {row['quiet']:.2f} | {row['attacked']:.2f} | {row['ratio']:.2f} | +{row['grown_mib']:.0f}"
            f" | {'; '.join(row['refused']) or '-'} |"  # type: ignore[arg-type]
        )
    raise SystemExit(any(row["ratio"] < BOUND for row in rows))  # type: ignore[operator]


if __name__ == "__main__":
    main()
