"""What a pair of homes gets that cannot connect: a call, a blob and a chain's pipe through a relay, on emulated routers.

    python -m tests.benchmarks.reach --netlab PATH/netlab.sh                       # pairs of routers, one relay
    python -m tests.benchmarks.reach --netlab PATH/netlab.sh --memory              # what 50 circuits cost the relay

Real daemons, one process each, behind real NAT (nftables). Every home has --link (Mb/s up / Mb/s down, ms there and back to the core), the
relay is public, at --relay-link. Time runs from the moment at which a home knows the other's announced addresses only; nothing is
connected but each of them with the relay. `first frame`: until one was echoed. Shares are of what the sender's uplink carries. `relay`: bits
a second that it passed on meanwhile, and its limit.

Memory: 50 circuits whose receivers do not read, behind a line fifty times slower than that of their senders, who send until they are
stopped, is the worst that honest peers do: all that is under way is at the relay. Resident
bytes of the relay's process and of its daemon, before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from peer.chain.connect import Pipes
from peer.net import keyfile, p2p
from peer.net.base import Ended, Stream, call, serve_calls
from peer.net.blobs import NO_ROUND, BlobServer, BlobStore, Fetcher
from peer.net.relay import RelayedTransport, RelayServer
from peer.net.uplink import Uplink
from protocol.errors import RemoteError
from protocol.wire import endpoints
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from tests.benchmarks.chain import Processes, heard, say
from tests.lab import lab

PAIRS = (("cone", "cone"), ("cone", "sym"), ("sym", "cone"), ("sym", "sym"))
LINK, RELAY_LINK = "20/100:40", "200/200:10"
QUICK, SLOW = "200/200:40", "200/4:40"
"""For the memory: who sends more than its receiver's line takes."""
LIMIT = 100_000_000
BLOB = 12_000_000
FRAME, FRAMES = 256 * 1024, 40
CIRCUITS = 50
SETTLED = 8.0
"""Seconds after which senders have been stopped by their receivers."""


# --- the processes


async def be_relay(folder: Path, host: str) -> None:
    transport = await p2p.start(folder / "relay", host=host, validate=lambda *_: False)
    server = RelayServer(transport, LIMIT, lambda peer: True)
    await server.serve()
    say(address=transport.addresses[0], peer=transport.peer_id)
    await heard()
    say(ready=True)
    while (await heard()) is not None:
        everything = [psutil.Process(), *psutil.Process().children(recursive=True)]
        say(
            circuits=server.circuits,
            passed=server.passed,
            time=time.monotonic(),
            rss=[process.memory_info().rss for process in everything],
        )


class Home:
    """A peer behind its router, and what it is told to do."""

    def __init__(self, transport: RelayedTransport, folder: Path, limit: int | None) -> None:
        self.transport = transport
        self.store = BlobStore(folder / "blobs")
        self.addresses: dict[str, list[str]] = {}
        self.pipes = Pipes(transport, self.reach, lambda peer: None, Uplink(limit))
        self.blob = os.urandom(BLOB)
        self.uplink = Uplink(limit)
        self.held: list[asyncio.Task[None]] = []

    async def reach(self, peer: str) -> None:
        await self.transport.connect(self.addresses[peer], timeout=10.0)

    async def serve(self) -> str:
        """Serves everything; the name of its blob."""

        async def echo(stream: Stream) -> None:
            with contextlib.suppress(Ended):
                while True:
                    await stream.send(await stream.recv())

        async def late(stream: Stream) -> None:
            await asyncio.Event().wait()

        async def reverse(peer: str, request: bytes) -> bytes:
            return request[::-1]

        await self.transport.serve("echo", echo)
        await self.transport.serve("late", late)
        await serve_calls(self.transport, "reverse", reverse)
        await BlobServer(self.store, uplink=self.uplink).serve(self.transport)
        await self.transport.serve(endpoints.PIPE, lambda stream: self.pipes.serve(stream, 0))
        return self.store.put(self.blob, sync=False)

    async def do(self, order: dict[str, Any]) -> dict[str, Any]:
        peer, began = order.get("peer", ""), time.monotonic()
        match order["do"]:
            case "first":
                await self.reach(peer)
                stream = await self.transport.open(peer, "echo", timeout=10.0)
                await stream.send(b"first")
                await stream.recv()
                seconds = time.monotonic() - began
                await stream.close()
                return {"seconds": seconds, "path": "relayed" if self.transport.is_behind(peer) else "direct"}
            case "call":
                assert await call(self.transport, peer, "reverse", b"abc", timeout=10.0) == b"cba"
            case "blob":
                fetcher = Fetcher(self.transport, self.store, reach=self.reach)
                await fetcher.fetch(order["name"], BLOB, [peer], round=NO_ROUND)
                await fetcher.aclose()
                self.store.remove(order["name"])
                return {"seconds": time.monotonic() - began, "bytes": BLOB}
            case "pipe":
                return await self.pipe(order["stages"], order["stages"].index(self.transport.peer_id), order["round"])
            case "hold":
                await self.reach(peer)
                self.held = [asyncio.create_task(self.pour(peer)) for _ in range(order["count"])]
        return {"seconds": time.monotonic() - began}

    async def pipe(self, stages: Sequence[str], position: int, round: int) -> dict[str, Any]:
        """As the chain's first stage sends frames to the second, until all have come."""
        chain = ReplicaSpec(rank=0, stages=tuple(StageSpec(peer=p, first=i, last=i + 1) for i, p in enumerate(stages)))
        began = time.monotonic()
        previous, following = await self.pipes.neighbours(Plan(round=round, replicas=(chain,)), 0, 0, position)
        opened = time.monotonic()
        if following is not None:
            for _ in range(FRAMES):
                await following.send(bytes(FRAME))
            while await following.recv() != b"all":
                pass
        if previous is not None:
            count = 0
            while count < FRAMES:
                count += len(await previous.recv()) == FRAME
            await previous.send(b"all")
            await previous.finish()
        return {"opened": opened - began, "seconds": time.monotonic() - opened, "bytes": FRAME * FRAMES}

    async def pour(self, peer: str) -> None:
        stream = await self.transport.open(peer, "late", timeout=20.0)
        with contextlib.suppress(RemoteError):
            while True:
                await stream.send(bytes(32_000), timeout=600.0)


async def be_home(folder: Path, name: str, relays: Sequence[str], limit: int | None) -> None:
    key = keyfile.load_or_create(folder / name)
    transport = await p2p.start(folder / name, bootstrap=relays, validate=lambda *_: False)
    nodes = [address.rpartition("/p2p/")[2] for address in relays]
    home = Home(await RelayedTransport.begin(transport, key, nodes), folder / f"{name}-files", limit)
    blob = await home.serve()
    addresses = [address for address in transport.addresses if "/127." not in address]
    say(peer=transport.peer_id, addresses=addresses, blob=blob)
    for other in await heard():
        home.addresses[other["peer"]] = other["addresses"]
    say(ready=True)
    while (order := await heard()) is not None:
        try:
            say(**await asyncio.wait_for(home.do(order), 120.0))
        except (RemoteError, TimeoutError) as error:
            say(error=f"{type(error).__name__}: {error}")
    os._exit(0)


# --- the table


class Street:
    """A relay and two homes, each a process."""

    def __init__(self, relay: Processes, homes: Processes, peers: list[dict[str, Any]]) -> None:
        self.relay, self.homes, self.peers = relay, homes, peers

    def ask(self, home: int, **order: Any) -> dict[str, Any]:
        self.begin(home, **order)
        return self.result(home)

    def begin(self, home: int, **order: Any) -> None:
        pipe = self.homes.stages[home].stdin
        assert pipe is not None
        pipe.write(json.dumps(order) + "\n")
        pipe.flush()

    def result(self, home: int) -> dict[str, Any]:
        return dict(self.homes.hear(self.homes.stages[home]))

    def carried(self) -> dict[str, Any]:
        """What the relay says of itself."""
        self.relay.tell({})
        return dict(self.relay.hear(self.relay.stages[0]))


@contextlib.contextmanager
def street(chosen: argparse.Namespace, kinds: tuple[str, str], lines: tuple[str, str] | None = None) -> Any:
    """`kinds`: of the homes' routers; `lines`: their links, if not as chosen and limited accordingly."""
    a, b = lines or (chosen.link, chosen.link)
    links = {"relay": chosen.relay_link, "a": f"{a}:0:{kinds[0]}", "b": f"{b}:0:{kinds[1]}"}
    unlimited = chosen.no_limit or lines is not None
    limit = [] if unlimited else ["--limit", str(int(0.9e6 * float(chosen.link.partition("/")[0])))]
    command = [sys.executable, "-m", "tests.benchmarks.reach"]
    with lab(chosen.netlab, links) as there, tempfile.TemporaryDirectory(prefix="potluck-reach-") as folder:
        host, prefix = there.places["relay"]
        started: list[Processes] = []
        try:
            relay = Processes([[*prefix, *command, "--be", "relay", "--folder", folder, "--host", host]])
            started.append(relay)
            found = relay.hear(relay.stages[0])
            relay.tell([])
            relay.hear(relay.stages[0])
            homes = Processes(
                [
                    [*there.places[n][1], *command, "--be", n, "--folder", folder, "--relays", found["address"], *limit]
                    for n in ("a", "b")
                ]
            )
            started.append(homes)
            peers = [homes.hear(stage) for stage in homes.stages]
            homes.tell(peers)
            for stage in homes.stages:
                homes.hear(stage)
            yield Street(relay, homes, peers)
        finally:
            for processes in started:
                processes.kill()


HEAD = "| routers | path | first frame | call | blob | pipe open | pipe | relay, of its limit |\n|---|---|---|---|---|---|---|---|"


def row(chosen: argparse.Namespace, kinds: tuple[str, str]) -> bool:
    """Measures and prints a row; whether everything worked."""
    up = 1e6 * float(chosen.link.partition("/")[0])

    def share(result: dict[str, Any]) -> str:
        return f"{8 * result['bytes'] / result['seconds'] / up:.0%}"

    with street(chosen, kinds) as there:
        a, b = (peer["peer"] for peer in there.peers)
        first = there.ask(0, do="first", peer=b)
        calls = there.ask(0, do="call", peer=b)
        before = there.carried()
        blob = there.ask(0, do="blob", peer=b, name=there.peers[1]["blob"])
        for home in (0, 1):
            there.begin(home, do="pipe", stages=[a, b], round=1)
        pipe, other = there.result(0), there.result(1)
        after = there.carried()
    failed = [result["error"] for result in (first, calls, blob, pipe, other) if "error" in result]
    if failed:
        print(f"| {kinds[0]} / {kinds[1]} | FAILED: {failed[0]} |", flush=True)
        return False
    bps = 8 * (after["passed"] - before["passed"]) / (after["time"] - before["time"])
    print(
        f"| {kinds[0]} / {kinds[1]} | {first['path']} | {first['seconds']:.1f} s | {calls['seconds']:.2f} s | {share(blob)} |"
        f" {pipe['opened']:.1f} s | {share(pipe)} | {bps / 1e6:.1f} Mb/s, {bps / LIMIT:.0%} |",
        flush=True,
    )
    return first["path"] == "direct" or first["seconds"] <= 5.0


def memory(chosen: argparse.Namespace) -> bool:
    with street(chosen, ("cone", "cone"), (QUICK, SLOW)) as there:
        b = there.peers[1]["peer"]
        there.ask(0, do="first", peer=b)
        before = there.carried()
        there.ask(0, do="hold", peer=b, count=CIRCUITS)
        seen = before
        while seen["circuits"] < CIRCUITS:
            time.sleep(0.2)
            seen = there.carried()
        end, most = time.monotonic() + SETTLED, 0
        while time.monotonic() < end:
            time.sleep(0.2)
            seen = there.carried()
            most = max(most, sum(seen["rss"]))
    each = (most - sum(before["rss"])) / CIRCUITS
    print(
        f"{CIRCUITS} circuits: {sum(before['rss']) / 1e6:.0f} MB before, {most / 1e6:.0f} MB at most, {each / 1e6:.2f} MB each;"
        f" process and daemon: {', '.join(f'{r / 1e6:.0f} MB' for r in seen['rss'])}; passed on: {seen['passed'] / 1e6:.1f} MB"
    )
    return each <= 2e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netlab", type=Path, help="the lab's script")
    parser.add_argument("--link", default=LINK, help="of a home: Mb/s up/down:ms to the core and back")
    parser.add_argument("--relay-link", default=RELAY_LINK)
    parser.add_argument("--pairs", nargs="*", help="such as cone/sym")
    parser.add_argument("--no-limit", action="store_true", help="homes do not know what their uplinks have")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--be", help=argparse.SUPPRESS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--relays", nargs="*", default=(), help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.be == "relay":
        asyncio.run(be_relay(chosen.folder, chosen.host))
        return 0
    if chosen.be:
        asyncio.run(be_home(chosen.folder, chosen.be, chosen.relays, chosen.limit))
        return 0
    if chosen.netlab is None:
        parser.error("--netlab is needed: homes are behind emulated routers")
    if chosen.memory:
        return 0 if memory(chosen) else 1
    pairs = [tuple(pair.split("/")) for pair in chosen.pairs] if chosen.pairs else PAIRS
    print(HEAD)
    worked = [row(chosen, pair) for pair in pairs]
    return 0 if all(worked) else 1


if __name__ == "__main__":
    raise SystemExit(main())
