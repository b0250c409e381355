"""What a peer finds its line to carry, against what the line has; with real daemons behind emulated links, in namespaces.

    python -m tests.benchmarks.bandwidth --netlab PATH/netlab.sh          # all rows; root

The node's line has no limit. Bytes are those of the interfaces, with all headers, from the first ping to the end of the probe;
at most 16 MB may go each way. Where the processors cannot carry a rate, `--slower K` lets time go K times as slowly: rates are divided by K,
round trips and queues multiplied, as is every constant of time in the probe; the windows have to grow as far.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peer.net import bandwidth, p2p
from peer.net.bandwidth import PROBE_BYTES, PROBE_TIMEOUTS, BandwidthServer, ProbeLimits
from peer.net.base import Clock
from tests.support.lab import Lab, Place, lab

ROWS = ("5/1", "20/5", "100/20", "100/40", "250/50", "500/500")
"""Down and up, Mb/s, as lines are sold."""
TRIPS_MS = (40.0,)
QUEUE_MS = 100
"""That the lab's routers hold."""
TIMES = 3
WITHIN, WITHIN_MS, MOST_BYTES = 0.15, 10.0, 16_000_000
HEAD = (
    "| down/up, Mb/s | round trip, ms | down | up | round trip | bytes down | bytes up | seconds |\n" + "|---" * 8 + "|"
)


# --- the processes


async def be_node(host: str, folder: Path) -> None:
    transport = await p2p.start(folder / "node", host=host, validate=lambda *_: False)
    patient = ProbeLimits(bytes_per_minute=100 * PROBE_BYTES, probe_s=3600.0, idle_s=600.0)  # time goes slowly at home
    await BandwidthServer(Clock(), patient).serve(transport)
    say(address=transport.addresses[0], peer=transport.peer_id)
    await asyncio.Event().wait()


async def be_home(host: str, folder: Path, node: str) -> None:
    """Measures both ways for each line of standard input that says how slowly time goes, over new connections, as a peer does at its start."""
    transport = await p2p.start(folder / "home", host=host, validate=lambda *_: False)
    peer = node.rpartition("/p2p/")[2]
    while text := await asyncio.to_thread(sys.stdin.readline):
        slower = int(text)
        clock = Clock(steady=lambda slower=slower: time.monotonic() / slower)
        patience = bandwidth.ProbeTimeouts(answer=PROBE_TIMEOUTS.answer * slower, way=PROBE_TIMEOUTS.way * slower)
        before, began = _interface(), clock.steady()
        found = {}
        for up in (False, True):
            await transport.disconnect(peer)
            await transport.connect([node], timeout=30.0)
            found[up] = await bandwidth.measure(transport, peer, clock, up=up, patience=patience)
        seconds, after = clock.steady() - began, _interface()
        say(
            up=found[True].bps,
            down=found[False].bps,
            trip=1000 * min(way.trip for way in found.values()),
            sent=after[0] - before[0],
            received=after[1] - before[1],
            seconds=seconds,
        )
    await transport.aclose()


def say(**fields: object) -> None:
    print("@" + json.dumps(fields), flush=True)


def _interface() -> tuple[int, int]:
    """Bytes that were sent and received so far, of this namespace's line."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "wan0":
            fields = counts.split()
            return int(fields[8]), int(fields[0])
    raise SystemExit("bandwidth: no interface wan0 here; it belongs into a namespace of the lab")


# --- the rows


def heard(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith("@"):
            return dict(json.loads(text[1:]))
    raise SystemExit("a process has ended; its error is above")


def begin(place: Place, folder: str, *arguments: str) -> subprocess.Popen[str]:
    host, prefix = place
    command = [*prefix, sys.executable, "-m", "tests.benchmarks.bandwidth", "--host", host, "--folder", folder]
    return subprocess.Popen([*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class Home:
    """A node and a home whose line can be changed; use as `with Home.start(...)`."""

    def __init__(self, there: Lab, process: subprocess.Popen[str]) -> None:
        self._lab = there
        self._process = process

    @classmethod
    @contextlib.contextmanager
    def start(cls, netlab: Path) -> Iterator[Home]:
        with (
            lab(netlab, {"node": "0/0:0", "home": "100/100:40"}) as there,
            tempfile.TemporaryDirectory(prefix="potluck-bandwidth-") as folder,
        ):
            node = begin(there.places["node"], folder, "--role", "node")
            try:
                home = begin(there.places["home"], folder, "--role", "home", "--node", heard(node)["address"])
                try:
                    yield cls(there, home)
                finally:
                    home.kill()
                    home.communicate()
            finally:
                node.kill()
                node.communicate()

    def probe(self, down: float, up: float, trip: float, slower: int) -> dict[str, Any]:
        """What a home with such a line finds, as if time went `slower` times as fast as it does here."""
        line = f"up={up / slower:g} down={down / slower:g} rtt={trip * slower:g} queue={QUEUE_MS * slower}"
        self._lab.control("set", "home", line)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{slower}\n")
        self._process.stdin.flush()
        return heard(self._process)


def measure(home: Home, row: str, trip: float, times: int, slower: int) -> bool:
    """One row, the worst of `times` probes; whether all of them were right."""
    down, up = map(float, row.split("/"))
    found = [home.probe(down, up, trip, slower) for _ in range(times)]
    off = {way: [1e-6 * f[way] / rate - 1 for f in found] for way, rate in (("down", down), ("up", up))}
    late = [f["trip"] - trip for f in found]

    def shown(way: str) -> str:
        rates = ", ".join(f"{1e-6 * f[way]:.3g}" for f in found)
        return f"{rates} ({100 * max(off[way], key=abs):+.1f} %)"

    spent = [statistics.median(f[way] for f in found) / 1e6 for way in ("received", "sent")]
    seconds = statistics.median(f["seconds"] for f in found)
    print(
        f"| {row} | {trip:g} | {shown('down')} | {shown('up')} | {max(late, key=abs):+.1f} | {spent[0]:.2f} MB |"
        f" {spent[1]:.2f} MB | {seconds:.1f} |",
        flush=True,
    )
    return (
        all(abs(x) <= WITHIN for way in off.values() for x in way)
        and all(abs(x) <= WITHIN_MS for x in late)
        and all(max(f["sent"], f["received"]) <= MOST_BYTES for f in found)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netlab", type=Path, help="the lab's script")
    parser.add_argument("--rows", nargs="*", default=ROWS, help="down/up, Mb/s")
    parser.add_argument("--trips", type=float, nargs="*", default=TRIPS_MS, help="ms there and back")
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument(
        "--slower",
        type=int,
        default=1,
        help="time goes so many times as slowly, for machines that cannot carry the rates",
    )
    parser.add_argument("--role", choices=("node", "home"), help=argparse.SUPPRESS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--node", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.role == "node":
        asyncio.run(be_node(chosen.host, chosen.folder))
    elif chosen.role == "home":
        asyncio.run(be_home(chosen.host, chosen.folder, chosen.node))
    elif chosen.netlab is None:
        parser.error("--netlab is needed: the peers live behind emulated links")
    else:
        print(HEAD)
        rows = [(row, trip) for row in chosen.rows for trip in chosen.trips]
        with Home.start(chosen.netlab) as home:
            wrong = [row for row, trip in rows if not measure(home, row, trip, chosen.times, chosen.slower)]
        if wrong:
            print(f"not within {WITHIN:.0%}, {WITHIN_MS:g} ms and {MOST_BYTES / 1e6:g} MB: {', '.join(wrong)}")
        return 1 if wrong else 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
