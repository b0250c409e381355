"""Measures the way of two homes to each other, and the speed of a call, a blob and a chain's stream on it.

    python -m tests.benchmarks.reach --netlab PATH/netlab.sh                      # all pairs of routers
    python -m tests.benchmarks.reach --netlab PATH/netlab.sh --nodes 6            # six public nodes instead of one
    python -m tests.benchmarks.reach --netlab PATH/netlab.sh --shares --pairs cone/cone sym/sym    # and its speed
    python -m tests.benchmarks.reach --netlab PATH/netlab.sh --nodes 6 --tries 10 --pairs cone/cone
    python -m tests.benchmarks.reach --netlab PATH/netlab.sh --memory             # memory of a relay, 50 circuits

Real daemons, one process each, run behind real NAT (nftables). Every home has --link (Mb/s up / Mb/s down, ms there and
back to the core). The nodes are public, have --relay-link, and relay. A home starts as `potluck join` does
(peer/node/way_in.py): it finds out how others reach it, and starts again if nobody does. Time runs from the moment at
which a home knows the other's announced addresses; until then both are connected with the nodes only.

`first frame`: seconds until a frame was echoed, and its way. `then`: the way of a stream that was opened up to LATER
seconds later, if the first one went through a relay. Shares are of the sender's uplink. `relay`: bits a second that all
relays passed on meanwhile, and their share of the limit of one.

Routers: none (a public machine), cone (port-restricted), sym (symmetric), full (everything is forwarded), upnp (needs
miniupnpd, and NETLAB_NET=11.0.0 in the environment, since it takes no reserved address for a public one); cone/beside:
both behind one router.

`--memory` measures the worst case of honest peers, in which all data under way is at the relay: the receivers of 50
circuits do not read, behind a line fifty times slower than their senders', who send until they are stopped. It prints
the resident bytes of the relay's process and of its daemon, before and after.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from peer.chain.connect import PipelineStreams
from peer.net import keyfile, p2p
from peer.net.address import host_of, is_public
from peer.net.base import Clock, Ended, Stream, Transport, call, serve_calls
from peer.net.blobs import NO_ROUND, BlobServer, BlobStore, Fetcher
from peer.net.reach import DialBackServer
from peer.net.relay import RelayedTransport, RelayServer
from peer.net.uplink import Uplink
from peer.node.open_run import KEY, Door, Run
from peer.node.way_in import NetworkStart
from protocol.errors import RemoteError
from protocol.wire import endpoints
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from tests.benchmarks.chain import Processes, heard, say
from tests.support import networks, tiny
from tests.support.lab import beside, lab

KINDS = ("none", "cone", "sym", "full", "upnp")
BESIDE = "beside"
"""The second home's router is that of the first."""
PAIRS = (*((a, b) for a in KINDS for b in KINDS), ("cone", BESIDE))
LATER = 20.0
LINK, RELAY_LINK = "20/100:40", "200/200:10"
QUICK, SLOW = "200/200:40", "200/4:40"
"""Links for `--memory`: the sender's is faster than the receiver's."""
LIMIT = 100_000_000
BLOB = 12_000_000
FRAME, FRAMES = 256 * 1024, 40
CIRCUITS = 50
SETTLED = 8.0
"""Seconds after which senders have been stopped by their receivers."""


# --- the processes


async def be_relay(folder: Path, host: str) -> None:
    folder.mkdir()
    transport = await p2p.start(folder / "relay", host=host, validate=lambda *_: False)
    server = RelayServer(transport, LIMIT, lambda peer: True)
    await server.serve()
    await DialBackServer(transport, Clock()).serve()
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
    """A peer behind its router that carries out orders. `direct`: the transport below `transport`."""

    def __init__(self, transport: RelayedTransport, direct: Transport, folder: Path, limit: int | None) -> None:
        self.transport = transport
        self.direct = direct
        self.store = BlobStore(folder / "blobs")
        self.addresses: dict[str, list[str]] = {}
        self.pipes = PipelineStreams(networks.network(transport, self.reach, limit=limit))
        self.blob = os.urandom(BLOB)
        self.uplink = Uplink(limit)
        self.held: list[asyncio.Task[None]] = []

    async def reach(self, peer: str) -> None:
        await self.transport.connect(self.addresses[peer], timeout=10.0)

    async def serve(self) -> str:
        """Serves everything, and returns the name of its blob."""

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
                where = await self.echoed(peer)
                return {"seconds": time.monotonic() - began, "where": where}
            case "later":
                where = ""
                while not where and time.monotonic() - began < LATER:
                    await asyncio.sleep(0.5)
                    where = await self.echoed(peer)
                return {"seconds": time.monotonic() - began, "where": where}
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

    async def echoed(self, peer: str) -> str:
        """Has a frame echoed over a new stream. Returns the host at the other end; empty if a relay is between."""
        stream = await self.transport.open(peer, "echo", timeout=10.0)
        await stream.send(b"frame")
        await stream.recv()
        await stream.close()
        return "" if self.transport.is_behind(peer) else host_of(self.direct.seen_at(peer))

    async def pipe(self, stages: Sequence[str], position: int, round: int) -> dict[str, Any]:
        """Sends frames from the first stage to the second, as a chain does, until all have come."""
        chain = ReplicaSpec(stages=tuple(StageSpec(peer=p, first=i, last=i + 1) for i, p in enumerate(stages)))
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
    own = folder / name
    own.mkdir()
    key = keyfile.load_or_create(own / KEY)
    nodes = tuple(address.rpartition("/p2p/")[2] for address in relays)
    manifest = tiny.manifest(operators=nodes)
    way_in = NetworkStart(Run(None, manifest.run_id, tuple(relays)), own, Door(host="0.0.0.0"))
    transport = await way_in.start()
    await transport.connect(relays, timeout=20.0)
    began = time.monotonic()
    transport, found = await way_in.find_reach(transport, manifest)
    assert found is not None
    settled = time.monotonic() - began
    home = Home(await RelayedTransport.begin(transport, key, nodes), transport, own / "files", limit)
    blob = await home.serve()
    listed = [*transport.addresses, *(f"{address}/p2p/{transport.peer_id}" for address in found.addresses)]
    addresses = [address for address in listed if "/127." not in address]
    say(peer=transport.peer_id, addresses=addresses, blob=blob, how=found.how, settled=settled)
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
    """The relays and two homes, each a process."""

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
        """Returns the figures of all relays together, and the first one's memory."""
        self.relay.tell({})
        said = [self.relay.hear(stage) for stage in self.relay.stages]
        return {**said[0], **{name: sum(one[name] for one in said) for name in ("circuits", "passed")}}


COMMAND = [sys.executable, "-m", "tests.benchmarks.reach"]


class Town:
    """The public nodes, and homes without processes.

    nodes: addresses.
    places: the first words of a command in each home.
    """

    def __init__(self, folder: Path, relay: Processes, nodes: list[str], places: dict[str, list[str]]) -> None:
        self.folder, self.relay, self.nodes, self.places = folder, relay, nodes, places

    @contextlib.contextmanager
    def street(self, chosen: argparse.Namespace, homes: tuple[str, str], limited: bool = True) -> Iterator[Street]:
        """Starts a process in each of two homes, without any state.

        limited: they send no more than nine tenths of their uplinks.
        """
        limit = ["--limit", str(int(0.9e6 * float(chosen.link.partition("/")[0])))] if limited else []
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            command = [*COMMAND, "--folder", folder, "--relays", *self.nodes, *limit, "--be"]
            both = Processes([[*self.places[home], *command, home] for home in homes])
            try:
                peers = [both.hear(stage) for stage in both.stages]
                both.tell(peers)
                for stage in both.stages:
                    both.hear(stage)
                yield Street(self.relay, both, peers)
            finally:
                both.kill()


@contextlib.contextmanager
def town(chosen: argparse.Namespace, homes: dict[str, str], besides: dict[str, str]) -> Iterator[Town]:
    """Starts the nodes.

    homes: their links.
    besides: homes that are behind the router of another.
    """
    nodes = [f"n{i}" for i in range(chosen.nodes)]
    with (
        lab(chosen.netlab, {**dict.fromkeys(nodes, chosen.relay_link), **homes}) as there,
        tempfile.TemporaryDirectory(prefix="potluck-reach-") as folder,
        contextlib.ExitStack() as stack,
    ):
        places = {name: there.places[name][1] for name in homes}
        places |= {name: stack.enter_context(beside(there, first)) for name, first in besides.items()}
        hosts = [there.places[name] for name in nodes]
        command = [*COMMAND, "--be", "relay", "--folder"]
        relay = Processes(
            [
                [*prefix, *command, f"{folder}/{n}", "--host", host]
                for n, (host, prefix) in zip(nodes, hosts, strict=True)
            ]
        )
        stack.callback(relay.kill)
        found = [relay.hear(stage)["address"] for stage in relay.stages]
        relay.tell([])
        for stage in relay.stages:
            relay.hear(stage)
        yield Town(Path(folder), relay, found, places)


def homes_of(chosen: argparse.Namespace, pairs: Sequence[tuple[str, str]]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the arguments of `town` for these pairs; the names are those of `names_of`."""
    homes, besides = dict[str, str](), dict[str, str]()
    for pair in pairs:
        a, b = names_of(pair)
        homes[a] = f"{chosen.link}:0:{pair[0]}"
        if pair[1] == BESIDE:
            besides[b] = a
        else:
            homes[b] = f"{chosen.link}:0:{pair[1]}"
    return homes, besides


def names_of(pair: tuple[str, str]) -> tuple[str, str]:
    return (f"c{pair[0]}", f"d{pair[0]}") if pair[1] == BESIDE else (f"a{pair[0]}", f"b{pair[1]}")


HEAD = "| routers | how they are reached | first frame | then |", "|---|---|---|---|"
SHARES = " call | blob | pipe open | pipe | relay, of its limit |", "---|---|---|---|---|"


def named(where: str, there: Street) -> str:
    """Returns the way of a stream whose other end was at this host."""
    a, b = (peer["how"] for peer in there.peers)
    if not where:
        return "relayed"
    if not is_public(where):
        return "local"
    return "punched" if a == b == "private" else "direct" if b == "private" else b


def row(chosen: argparse.Namespace, place: Town, kinds: tuple[str, str]) -> bool:
    """Measures and prints a row. Returns whether everything worked."""
    with place.street(chosen, names_of(kinds), not chosen.no_limit) as there:
        b = there.peers[1]["peer"]
        first = there.ask(0, do="first", peer=b)
        results, then, shares = [first], "", ""
        if not first.get("where", "?"):
            later = there.ask(0, do="later", peer=b)
            results.append(later)
            if later.get("where"):
                then = f"{named(later['where'], there)} after {first['seconds'] + later['seconds']:.1f} s"
        if chosen.shares:
            shares = carries(chosen, there, results)
        reached = " / ".join(f"{peer['how']} ({peer['settled']:.1f} s)" for peer in there.peers)
    failed = [result["error"] for result in results if "error" in result]
    if failed:
        print(f"| {kinds[0]} / {kinds[1]} | {reached} | FAILED: {failed[0]} |", flush=True)
        return False
    way = f"{named(first['where'], there)}, {first['seconds']:.1f} s"
    print(f"| {kinds[0]} / {kinds[1]} | {reached} | {way} | {then} |{shares}", flush=True)
    return bool(first["where"]) or first["seconds"] <= 5.0


def carries(chosen: argparse.Namespace, there: Street, results: list[dict[str, Any]]) -> str:
    """Measures a call and shares of the uplink, and adds all figures to `results`."""
    up = 1e6 * float(chosen.link.partition("/")[0])
    a, b = (peer["peer"] for peer in there.peers)
    calls = there.ask(0, do="call", peer=b)
    before = there.carried()
    blob = there.ask(0, do="blob", peer=b, name=there.peers[1]["blob"])
    for home in (0, 1):
        there.begin(home, do="pipe", stages=[a, b], round=1)
    pipe, other = there.result(0), there.result(1)
    after = there.carried()
    results += [calls, blob, pipe, other]
    if any("error" in result for result in results):
        return ""
    bps = 8 * (after["passed"] - before["passed"]) / (after["time"] - before["time"])
    blobs, pipes = (f"{8 * result['bytes'] / result['seconds'] / up:.0%}" for result in (blob, pipe))
    relayed = f"{bps / 1e6:.1f} Mb/s, {bps / LIMIT:.0%}"
    return f" {calls['seconds']:.2f} s | {blobs} | {pipe['opened']:.1f} s | {pipes} | {relayed} |"


def memory(chosen: argparse.Namespace) -> bool:
    links = {"a": f"{QUICK}:0:cone", "b": f"{SLOW}:0:cone"}
    with town(chosen, links, {}) as place, place.street(chosen, ("a", "b"), False) as there:
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
        f"{CIRCUITS} circuits: {sum(before['rss']) / 1e6:.0f} MB before, {most / 1e6:.0f} MB at most,"
        f" {each / 1e6:.2f} MB each; process and daemon: {', '.join(f'{r / 1e6:.0f} MB' for r in seen['rss'])};"
        f" passed on: {seen['passed'] / 1e6:.1f} MB"
    )
    return each <= 2e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netlab", type=Path, help="the lab's script")
    parser.add_argument("--link", default=LINK, help="of a home: Mb/s up/down:ms to the core and back")
    parser.add_argument("--relay-link", default=RELAY_LINK)
    parser.add_argument("--pairs", nargs="*", help="such as cone/sym")
    parser.add_argument("--nodes", type=int, default=1, help="public ones")
    parser.add_argument("--tries", type=int, default=1, help="of each pair, from nothing")
    parser.add_argument("--shares", action="store_true", help="what the way carries, too")
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
    pairs = [(a, b) for a, _, b in (pair.partition("/") for pair in chosen.pairs)] if chosen.pairs else PAIRS
    for head, more in zip(HEAD, SHARES, strict=True):
        print(head + (more if chosen.shares else ""), flush=True)
    with town(chosen, *homes_of(chosen, pairs)) as place:
        worked = [row(chosen, place, pair) for pair in pairs for _ in range(chosen.tries)]
    return 0 if all(worked) else 1


if __name__ == "__main__":
    raise SystemExit(main())
