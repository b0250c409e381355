"""Measures the dense baseline: hivemind's own averaging of a whole model among N processes, in bytes and seconds.

    python -m tests.benchmarks.averaging --compression fp16 8bit
    python -m tests.benchmarks.averaging --netlab PATH/netlab.sh --up 20 --down 100 --rtt 40

Every process holds the fp32 tensors of a model (--parameters millions) and averages them each round with
`hivemind.averaging.DecentralizedAverager`. Only group size, compression and deadlines differ from its defaults. A
round's seconds run from the common start until the last process has the mean: `matchmaking` until the slowest process
has found its group (hivemind takes 5 s at least), `averaging` after that. Bytes are those that the network interfaces
sent, headers included, for each process.

On loopback the processes share a network namespace of their own. That needs root; without it, other traffic of the
loopback interface is counted, too. With --netlab each process has a namespace behind an emulated link.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from protocol.run import layout
from protocol.run.layout import ModelSpec
from tests.support.lab import lab

COMPRESSIONS = ("none", "fp16", "8bit")
DEADLINE = 1800.0
"""Seconds for one round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Medians over the rounds in which all processes were one group.

    error: relative error of the mean of one tensor.
    """

    compression: str
    place: str
    peers: int
    parameters: int
    rounds: int
    whole_rounds: int
    seconds: float
    matchmaking_seconds: float
    averaging_seconds: float
    sent_bytes_per_peer: float
    error: float
    memory_bytes: int


def model(millions: float) -> ModelSpec:
    """Returns a decoder of about this many million parameters."""
    d = 640 if millions >= 20 else 128
    rest = ModelSpec(vocab_size=d * 26, d_model=d, n_layers=1, n_heads=d // 64, d_ff=d * 11 // 4, context=512)
    block = layout.parameters(rest, "block.0")
    outside = layout.total_parameters(rest) - block
    return dataclasses.replace(rest, n_layers=max(1, round((millions * 1e6 - outside) / block)))


# --- where the processes run


@dataclass(frozen=True, slots=True)
class Place:
    """Where the processes run.

    hosts: the address of each process.
    prefix: the first words of a command that runs beside each process.
    shared: whether all processes share one network interface.
    """

    name: str
    hosts: list[str]
    prefix: list[list[str]]
    shared: bool

    def sent(self) -> list[int]:
        """Returns the bytes sent so far: one figure if the interface is shared, else one for each process."""
        found = []
        for prefix in self.prefix[:1] if self.shared else self.prefix:
            text = subprocess.run([*prefix, "cat", "/proc/net/dev"], capture_output=True, text=True, check=True).stdout
            found.append(sum(int(line.split(":")[1].split()[8]) for line in text.splitlines()[2:]))
        return found


@contextlib.contextmanager
def loopback(peers: int) -> Iterator[Place]:
    """Puts all processes into one new network namespace, or without root onto the loopback of this machine."""
    if os.geteuid() != 0:
        yield Place("loopback, shared with others", ["127.0.0.1"] * peers, [[]] * peers, True)
        return
    name = f"averaging-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield Place("loopback", ["127.0.0.1"] * peers, [["ip", "netns", "exec", name]] * peers, True)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


@contextlib.contextmanager
def homes(netlab: Path, peers: int, up: float, down: float, rtt: float) -> Iterator[Place]:
    """Puts each process behind a link of `up`/`down` Mb/s, with `rtt` ms between any two; see the lab's README."""
    names = [f"p{i}" for i in range(peers)]
    with lab(netlab, dict.fromkeys(names, f"{up:g}/{down:g}:{rtt / 2:g}")) as links:
        hosts, prefixes = zip(*(links.places[n] for n in names), strict=True)
        yield Place(f"{up:g}/{down:g} Mb/s, {rtt:g} ms", list(hosts), list(prefixes), False)


# --- one process


def be_peer(host: str, initial: str, peers: int, millions: float, compression: str, index: int) -> None:
    """Prints its address, then averages once for each line on standard input."""
    import hivemind
    import numpy as np
    import torch
    from hivemind.averaging.control import AveragingStage
    from hivemind.compression import Float16Compression, NoCompression, Uniform8BitQuantization, quantization

    def extract(self: Any, serialized: Any) -> Any:
        """hivemind's `Quantization.extract`, which fails on numpy 2.4: it makes an int of an array with one element."""
        size = int(np.frombuffer(serialized.buffer, count=1, dtype=np.int64)[0])
        codebook = np.frombuffer(serialized.buffer, offset=8, count=size, dtype=self.codebook_dtype)
        codes = np.frombuffer(serialized.buffer, offset=8 + codebook.nbytes, dtype=self.indices_dtype)
        index = torch.as_tensor(codes.astype(np.int64)).reshape(tuple(serialized.size))
        return torch.as_tensor(codebook.copy())[index].requires_grad_(serialized.requires_grad)

    quantization.Quantization.extract = extract
    os.environ["QUANTIZATION_THREADS"] = "1"
    torch.set_num_threads(1)
    chosen = {"none": NoCompression, "fp16": Float16Compression, "8bit": Uniform8BitQuantization}[compression]()
    spec = model(millions)
    shapes = [shape for shard in layout.shard_names(spec) for shape in layout.shapes(spec, shard)]

    def first(of: int) -> torch.Tensor:
        """Returns the smallest matrix of process `of`. Every process draws all of them, to compute the mean."""
        return torch.randn(
            min((s for s in shapes if len(s) == 2), key=np.prod), generator=torch.Generator().manual_seed(of)
        )

    at = next(i for i, shape in enumerate(shapes) if shape == tuple(first(0).shape))
    generator = torch.Generator().manual_seed(1000 + index)
    tensors = [first(index) if i == at else torch.randn(s, generator=generator) for i, s in enumerate(shapes)]
    wanted = sum((first(of) for of in range(peers)), torch.zeros(shapes[at])) / peers
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{host}/tcp/0"],
        initial_peers=[initial] if initial else [],
        start=True,
        startup_timeout=120.0,
    )
    averager = hivemind.averaging.DecentralizedAverager(
        tensors, dht, prefix="dense", target_group_size=peers, compression=chosen, start=True,
        allow_state_sharing=False,
    )  # fmt: skip
    print(json.dumps({"address": str(dht.get_visible_maddrs()[0])}), flush=True)
    for _ in sys.stdin:
        began = time.monotonic()
        step = averager.step(timeout=DEADLINE, wait=False)
        while not step.done() and step.stage.value < AveragingStage.RUNNING_ALLREDUCE.value:
            time.sleep(0.005)
        found = time.monotonic()
        group = step.result(DEADLINE)
        ended = time.monotonic()
        with averager.get_tensors() as held:
            error = float((held[at] - wanted).norm() / wanted.norm())
        said = {"began": began, "found": found, "ended": ended, "group": len(group or ()), "error": error}
        print(json.dumps(said), flush=True)
    averager.shutdown()
    dht.shutdown()


# --- all of them


def measure(place: Place, *, compression: str, millions: float = 50, rounds: int = 3) -> Result:
    """Averages among len(place.hosts) processes. Raises RuntimeError if one ends early."""
    peers = len(place.hosts)
    children: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryFile("w+") as errors:
        try:
            addresses: list[str] = []
            for index, (host, prefix) in enumerate(zip(place.hosts, place.prefix, strict=True)):
                initial = addresses[0] if addresses else ""
                arguments = ["peer", host, initial, str(peers), str(millions), compression, str(index)]
                children.append(
                    _start([*prefix, sys.executable, "-m", "tests.benchmarks.averaging", *arguments], errors)
                )
                addresses.append(_heard(children[-1], errors)["address"])
            kept: list[tuple[float, float, float]] = []
            error, memory = 0.0, 0
            for _ in range(rounds):
                before = place.sent()
                for child in children:
                    assert child.stdin is not None
                    child.stdin.write("\n")
                    child.stdin.flush()
                said = [_heard(child, errors) for child in children]
                sent = sum(after - b for after, b in zip(place.sent(), before, strict=True)) / peers
                memory = max(memory, sum(_memory(child.pid) for child in children))
                began = min(s["began"] for s in said)
                if all(s["group"] == peers for s in said):
                    found, ended = max(s["found"] for s in said) - began, max(s["ended"] for s in said) - began
                    kept.append((ended, found, sent))
                    error = max(s["error"] for s in said)
        finally:
            for child in children:
                assert child.stdin is not None
                with contextlib.suppress(OSError):
                    child.stdin.close()
            for child in children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(30)
                _end(child.pid)
                child.wait()
    if not kept:
        raise RuntimeError(f"{place.name}, {compression}: in no round all {peers} processes were one group")
    seconds, found, sent = (statistics.median(values) for values in zip(*kept, strict=True))
    return Result(
        compression=compression,
        place=place.name,
        peers=peers,
        parameters=layout.total_parameters(model(millions)),
        rounds=rounds,
        whole_rounds=len(kept),
        seconds=seconds,
        matchmaking_seconds=found,
        averaging_seconds=seconds - found,
        sent_bytes_per_peer=sent,
        error=error,
        memory_bytes=memory,
    )


def _start(command: Sequence[str], errors: IO[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "HIVEMIND_LOGLEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment)


def _heard(child: subprocess.Popen[str], errors: IO[str]) -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        errors.seek(0)
        raise RuntimeError(f"a process ended early: {errors.read()[-2000:]}")
    return dict(json.loads(line))


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def _memory(pid: int) -> int:
    """Returns the proportional set size of a process and its children, in which shared pages count once."""
    total = 0
    for process in _family(pid):
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def _end(pid: int) -> None:
    """Ends a process and its children: hivemind's own processes outlive a parent that was killed."""
    for process in reversed(_family(pid)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", nargs="+", default=["fp16", "8bit"], choices=COMPRESSIONS)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parameters", type=float, default=50, help="millions")
    parser.add_argument("--netlab", type=Path, help="the lab's script; without it, loopback")
    parser.add_argument("--up", type=float, default=20, help="Mb/s")
    parser.add_argument("--down", type=float, default=100, help="Mb/s")
    parser.add_argument("--rtt", type=float, default=40, help="ms between two processes")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    results = []
    for compression in chosen.compression:
        there = (
            homes(chosen.netlab, chosen.peers, chosen.up, chosen.down, chosen.rtt)
            if chosen.netlab
            else loopback(chosen.peers)
        )
        with there as place:
            found = measure(place, compression=compression, millions=chosen.parameters, rounds=chosen.rounds)
        results.append(found)
        dense = 4 * found.parameters
        print(
            f"{found.place}, {found.peers} processes, {found.parameters / 1e6:.1f} M parameters, {compression}:"
            f" {found.seconds:.1f} s a round ({found.matchmaking_seconds:.1f} s matchmaking,"
            f" {found.averaging_seconds:.1f} s averaging), {found.sent_bytes_per_peer / 1e6:.1f} MB sent per process"
            f" ({found.sent_bytes_per_peer / dense:.3f} of dense fp32), error {found.error:.1e},"
            f" {found.whole_rounds} of {found.rounds} rounds whole, {found.memory_bytes / 1e9:.1f} GB in all",
            flush=True,
        )
    if chosen.json:
        chosen.json.write_text(json.dumps([dataclasses.asdict(r) for r in results], indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["peer"]:
        _, _, host, initial, peers, millions, compression, index = sys.argv
        be_peer(host, initial, int(peers), float(millions), compression, int(index))
    else:
        main()
