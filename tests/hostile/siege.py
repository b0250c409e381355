"""An enemy's process, which does what it is told of tests/hostile/attacks, and what it leaves of a node and two peers.

    python -m tests.hostile.siege FOLDER    (reads orders, one a line, from its standard input)

The enemy has a process and daemons of its own, at another address of the loopback interface than everybody else, as
strangers do. Each attack is made under new identities, so that none is refused for what the one before did.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peer import events
from peer.net.p2p import P2PTransport
from protocol.run import manifest as manifests
from protocol.run.manifest import Manifest
from tests.hostile.attacks import ATTACKS
from tests.hostile.attacks.attacker import Attack, Attacker, Done
from tests.hostile.ground import SOON, Ground, daemon, identity
from tests.support.volunteers import Volunteer

HOME = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
"""Where the enemy lives: Linux has all of 127.0.0.0/8."""
BEGINS, OVER = "begins", "over"
MIB = 1 << 20


# --- the enemy's side


async def enemies(made: Manifest, order: dict[str, Any], folder: Path) -> Attacker:
    """Starts the daemons of an enemy's identities, and connects them."""
    node, victim = order["node"], order["victim"]
    ids = [addresses[0].rpartition("/p2p/")[2] for addresses in (node, victim)]
    done = Done()

    async def one(number: int) -> Attacker:
        me = identity(f"{order['who']} {number}")
        transport = await daemon(me, made.run_id, folder, folder, HOME)
        for addresses in (node, victim):
            await transport.connect(addresses, timeout=SOON)
        return Attacker(me, transport, made, ids[0], ids[1], tuple(node), tuple(victim), done)

    first, *others = await asyncio.gather(*(one(number) for number in range(order["identities"])))
    return replace(first, others=tuple(others))


async def obey(folder: Path) -> None:
    """Carries out one order after the other."""
    made = manifests.from_bytes((folder / "manifest").read_bytes(), "manifest")
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        order = json.loads(line)
        own = Path(tempfile.mkdtemp(dir="/tmp", prefix="enemy-"))
        enemy = await enemies(made, order, own)
        print(BEGINS, flush=True)
        work = asyncio.create_task(ATTACKS[order["attack"]].work(enemy))
        await reader.readline()
        print(json.dumps({"done": enemy.done.times, "ended": work.done()}), flush=True)
        work.cancel()
        for one in (enemy, *enemy.others):
            gone(one.transport)
        await asyncio.wait({work}, timeout=5.0)
        await asyncio.gather(*(one.transport.aclose() for one in (enemy, *enemy.others)))
        shutil.rmtree(own, ignore_errors=True)
        print(OVER, flush=True)


def gone(transport: P2PTransport) -> None:
    """Ends a daemon at once: without waiting until an enemy has taken its leave."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(transport.daemon.pid, signal.SIGKILL)


# --- our side


@dataclass(frozen=True)
class Sizes:
    """MiB of memory: of this process, and of each daemon."""

    process: float
    daemons: dict[str, float]


class Siege:
    """A ground with two peers, and an enemy's process; an async context. `cores`: ours, and the enemy's."""

    def __init__(self, folder: Path, of: Manifest | None = None, cores: tuple[int, int] | None = None) -> None:
        self.ground = Ground(folder, of)
        self.ground.relay_bps = 10**7
        self.longest_gap = 0.0
        """Processor seconds that the loop of node and peers took without a pause, since it was set to 0."""
        self._folder = folder
        self._cores = cores
        self._number = 0

    async def __aenter__(self) -> Siege:
        if self._cores is not None:
            pin(self._cores[0])
        await self.ground.__aenter__()
        self._watch = asyncio.create_task(self._watches())
        self.victim: Volunteer = (await self.ground.join("a", "b"))[0]
        await self.ground.goes_on(3)
        (self._folder / "manifest").write_bytes(self.ground.manifest.to_bytes())
        command = [sys.executable, "-m", "tests.hostile.siege", str(self._folder)]
        if self._cores is not None:
            command.append(str(self._cores[1]))
        pipe = asyncio.subprocess.PIPE
        self._enemy = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, start_new_session=True)
        return self

    async def __aexit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._enemy.pid, signal.SIGKILL)  # its daemons, too
        await self._enemy.wait()
        self._watch.cancel()
        await self.ground.__aexit__(*error)

    async def _watches(self) -> None:
        """How long the loop is busy at once."""
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.01)
            self.longest_gap = max(self.longest_gap, time.thread_time() - began)

    @contextlib.asynccontextmanager
    async def attacked(self, attack: Attack, identities: int | None = None) -> AsyncIterator[Blows]:
        """The enemy attacks within it; then its tries are known. Raises AssertionError if it ends or does nothing."""
        self._number += 1
        blows = Blows(f"{attack.name} {self._number}", identities or attack.identities)
        order = {
            "attack": attack.name,
            "who": blows.who,
            "identities": blows.identities,
            "node": self.ground.boot.addresses,
            "victim": self.victim.transport.addresses,
        }
        await self._say(json.dumps(order))
        assert await self._hear() == BEGINS, f"{attack.name}: the enemy has not begun"
        began = time.monotonic()
        try:
            yield blows
        finally:
            await self._say("stop")
            told = json.loads(await self._hear())
            blows.done, blows.seconds = told["done"], time.monotonic() - began
            assert await self._hear() == OVER
        assert not told["ended"], f"{attack.name}: the enemy has ended"
        assert blows.done > 0, f"{attack.name}: the enemy did nothing"

    async def _say(self, line: str) -> None:
        self._enemy.stdin.write(line.encode() + b"\n")
        await self._enemy.stdin.drain()

    async def _hear(self) -> str:
        assert self._enemy.stdout is not None
        async with asyncio.timeout(SOON):
            return (await self._enemy.stdout.readline()).decode().strip()

    def refusals(self, blows: Blows) -> list[events.Refused]:
        """What the operator, or the volunteer, was told of the enemy."""
        found = [e.body for log in (self.ground.events, self.victim.events) for e in log]
        return [b for b in found if isinstance(b, events.Refused) and b.peer in blows.ids]

    def sizes(self) -> Sizes:
        """Now."""
        started = self.ground.daemons.started
        names = {self.ground.boot.peer_id: "node", **{peer.id: name for name, peer in self.ground.peers.items()}}
        daemons = {name: resident(started[who].daemon.pid) for who, name in names.items()}
        return Sizes(resident(os.getpid()), daemons)

    def disk(self) -> float:
        """MiB of files now."""
        files = [os.path.join(folder, file) for folder, _, found in os.walk(self._folder) for file in found]
        return sum(map(size, files)) / MIB


@dataclass
class Blows:
    """One spell of an attack. `done`: how often the enemy tried, in these `seconds`."""

    who: str
    identities: int
    done: int = 0
    seconds: float = 0.0

    @property
    def ids(self) -> set[str]:
        """The enemy's peer ids."""
        return {identity(f"{self.who} {number}").peer_id for number in range(self.identities)}


def resident(pid: int) -> float:
    """MiB of memory that a process has now; where that is not told, the most that this one ever had."""
    with contextlib.suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize() / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB


def size(path: str) -> int:
    """Bytes; none of a file that is gone."""
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0


def pin(core: int) -> None:
    """This process and what it starts has this core alone, where there are several."""
    with contextlib.suppress(OSError, AttributeError):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {core})


async def rate(ground: Ground, seconds: float) -> float:
    """Rounds per second."""
    head, began = ground.head, time.monotonic()
    await ground.until(lambda: time.monotonic() >= began + seconds)
    return (ground.head - head) / (time.monotonic() - began)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        pin(int(sys.argv[2]))
    random.seed(0)
    asyncio.run(obey(Path(sys.argv[1])))
