"""Measures how busy home links keep a chain: four stages behind emulated links wait instead of computing.

    python -m tests.benchmarks.chain --netlab PATH/netlab.sh              # the grid, about an hour and a half
    python -m tests.benchmarks.chain --netlab PATH/netlab.sh --target     # 100 Mb/s, 25 ms, d/8 at full size

Everything but the model's arithmetic is real: daemons, streams, frames, queues, the tensors' size, number formats, the
measurements and the choice of the depth. `--seconds_per_microbatch` has the seconds of forward and backward for a stage
and micro-batch. The tensors' size follows from it: transfer and computing have the ratio of a 70 B model (d = 8192) in
four stages of 400 TFLOP/s each, 262.5 microseconds a token. Every boundary has the link's rate in each direction. The
two inner stages have twice the rate, since each has two neighbours.

Links that carry more than LOAD together would measure this machine. There the clock is slowed by a whole number (time
dilation; Gupta et al., NSDI 2006): it divides the rates, and multiplies latencies, routers' queues, deadlines of dials,
intervals of heartbeats and seconds_per_microbatch. All ratios stay as they were, those of TCP's windows included.

Peers know their uplinks' rates (`potluck join --up-limit`, nine tenths of them), except with --no-limit. TCP keeps its
windows while a connection rests (net.ipv4.tcp_slow_start_after_idle=0, docs/guides/home-links.md), except with
--idle-restart.

The ideal is the same chain with transfers that take no time, (M + S - 1) x seconds_per_microbatch for M micro-batches.
The table has the measured share of it and the cost model's prediction, at the depth that the chain picked from its own
measurements, and both for textbook 1F1B, whose depth is the number of stages. A row is the median of three steps, or
one long step. Where transfers take over twice as long as computing, M is 32 only, since more micro-batches would give
the same share.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import torch

from peer.chain.connect import PATIENCE, Patience, PipelineStreams
from peer.chain.link import LIVENESS, Liveness
from peer.chain.pipeline import StageSetup, run_steps
from peer.net import p2p
from peer.net.base import Stream
from peer.training.trainer import make_worker
from protocol.codec import formats
from protocol.planning import pipeline_model
from protocol.planning.pipeline_model import UNBOUNDED, Depths, LinkCost, StageCost
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec
from protocol.wire import endpoints
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from protocol.wire.schema import plain
from tests.support import networks
from tests.support.lab import lab

STAGES = 4
D = 8192
TOKEN_SECONDS = 6 * 70e9 / (STAGES * 400e12)
PACE = 256 * TOKEN_SECONDS
RATES = (10, 50, 100, 1000)
LATENCIES = (10, 25, 75)
SPEC = ModelSpec(vocab_size=97, d_model=8, n_layers=STAGES, n_heads=1, d_ff=8, context=4096)
LIMIT = 0.9
"""Share of its uplink that a peer gives as `potluck join --up-limit`."""
CARRIED = (1448 - 52 / 2) / 1500
"""Share of a link's rate without a limit: a packet of 1500 bytes carries 1448, and 52 bytes answer every second one."""
TIMEOUT = 900.0
FINDING = 4
"""Steps in which a chain finds its depth. In the first, windows of TCP and libp2p open, and links seem slow."""
SAMPLES = 3
"""Steps of a row, whose median time counts."""
LONG = 20.0
"""Seconds of a first step after which no others are made: it is a mean over many micro-batches itself."""
LOAD = 200.0
"""Mb/s over all boundaries and directions that two cores carry easily; they can carry twice as much."""
QUEUE_MS = 100
"""Length of a router's queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table.

    rate: Mb/s of a boundary, in each direction.
    latency: ms, one way.
    divisor: d/k.
    seconds_per_microbatch: of forward and backward.
    wire: number format, both ways.
    limited: whether the peers know their uplinks' rates.
    """

    rate: float
    latency: float
    divisor: int
    micro_batches: int
    seconds_per_microbatch: float
    wire: str
    limited: bool

    @property
    def tokens(self) -> int:
        return round(self.seconds_per_microbatch / TOKEN_SECONDS)

    @property
    def transfer(self) -> float:
        """Returns the seconds for which a frame occupies a link."""
        carried = LIMIT if self.limited else CARRIED
        bits = self.tokens * formats.bytes_per_token(self.wire, D // self.divisor) * 8
        return bits / (self.rate * 1e6 * carried)

    @property
    def slower(self) -> int:
        """Returns the factor by which the clock is slowed, so that the links are measured and not this machine."""
        used = self.transfer / max(self.transfer, self.seconds_per_microbatch)
        return math.ceil(2 * (STAGES - 1) * self.rate * used / LOAD)

    def costs(self) -> tuple[list[StageCost], list[LinkCost]]:
        """Returns the stages and links for the cost model."""
        stage = StageCost(forward=self.seconds_per_microbatch / 3, backward=self.seconds_per_microbatch * 2 / 3)
        between = LinkCost(forward=self.transfer, backward=self.transfer, latency=self.latency / 1e3)
        return [stage] * STAGES, [between] * (STAGES - 1)

    @property
    def ideal(self) -> float:
        return (self.micro_batches + STAGES - 1) * self.seconds_per_microbatch

    def predicted(self, depth: int) -> float:
        """Returns the share of the ideal by the cost model."""
        return self.ideal / pipeline_model.step_seconds(*self.costs(), self.micro_batches, depth)


# --- one stage


class StandIn:
    """Replaces a StageTrainer: returns tensors of the true size and computes nothing."""

    def __init__(self, spec: ModelSpec, train: TrainSpec, shards: Sequence[str], width: int) -> None:
        self.spec, self.train, self.shards, self.width = spec, train, tuple(shards), width
        self.own = tuple(shard for shard in shards if shard != "anchor")
        self.device, self.stage = torch.device("cpu"), SimpleNamespace(form=torch.float32)
        self._values = torch.full((train.rows, train.sequence, width), 1e-3)

    def nothing(self, *arguments: object) -> None:
        return

    reset = synchronize = launch_norms = mark = step = nothing

    def forward(self, micro: int, ids: torch.Tensor, wire: torch.Tensor | None, *, recompute: bool) -> torch.Tensor:
        return torch.tensor(1.0) if "head" in self.shards else self._values

    def backward(self, micro: int, wire: torch.Tensor | None = None) -> torch.Tensor | None:
        return None if "embed" in self.shards else self._values

    def grad_sumsq(self) -> list[tuple[str, float]]:
        return [(shard, 1.0) for shard in self.own]


class Paced(StandIn):
    """Waits for the time that computing would take."""

    def __init__(self, train: TrainSpec, stage: int, width: int, seconds_per_microbatch: float) -> None:
        ends = {0: ("embed",), STAGES - 1: ("head",)}.get(stage, ())
        shards = [name for name in layout.shard_names(SPEC) if name in (f"block.{stage}", *ends)]
        super().__init__(SPEC, train, shards, width)
        self.seconds_per_microbatch, self._late = seconds_per_microbatch, 0.0

    def wait(self, seconds: float) -> None:
        """Waits; an error of the last wait is made up for, so that waits are exact in the long run."""
        end = time.perf_counter() + seconds - self._late
        time.sleep(max(0.0, end - time.perf_counter()))
        self._late = min(time.perf_counter() - end, seconds)

    def forward(self, micro: int, ids: torch.Tensor, wire: torch.Tensor | None, *, recompute: bool) -> torch.Tensor:
        self.wait(self.seconds_per_microbatch / 3)
        return super().forward(micro, ids, wire, recompute=recompute)

    def backward(self, micro: int, wire: torch.Tensor | None = None) -> torch.Tensor | None:
        self.wait(self.seconds_per_microbatch * 2 / 3)
        return super().backward(micro, wire)


@contextlib.asynccontextmanager
async def joined(
    stage: int, host: str, folder: Path, limit: int | None = None, clock: int = 1
) -> AsyncIterator[tuple[Stream | None, Stream | None]]:
    """Opens this stage's streams to the stages before and after it.

    Prints its address, and reads those of the others from standard input.

    clock: how many times slower time runs here.
    """
    torch.set_num_threads(1)
    transport = await p2p.start(folder / f"key-{stage}", host=host, validate=lambda *_: False)
    addresses: dict[str, str] = {}

    async def reach(peer: str) -> None:
        await transport.connect([addresses[peer]], timeout=60)

    patience = Patience(dial=PATIENCE.dial * clock)
    ours = PipelineStreams(networks.network(transport, reach, limit=limit), patience=patience, liveness=slowed(clock))
    await transport.serve(endpoints.PIPE, lambda stream: ours.serve(stream, 0))
    say(address=transport.addresses[0], peer=transport.peer_id)
    peers = await heard()
    addresses |= {p["peer"]: p["address"] for p in peers}
    chain = ReplicaSpec(stages=tuple(StageSpec(peer=p["peer"], first=i, last=i + 1) for i, p in enumerate(peers)))
    previous, following = await ours.neighbours(Plan(round=1, replicas=(chain,)), 0, 0, stage)
    say(ready=True)
    yield previous, following
    ours.forget(2)
    await transport.aclose()


def say(**fields: object) -> None:
    """Prints a line for the parent process."""
    print("@" + json.dumps(fields), flush=True)


async def heard() -> Any:
    """Returns the parent's next line, or None at the end."""
    text = await asyncio.to_thread(sys.stdin.readline)
    return json.loads(text) if text else None


def slowed(clock: int) -> Liveness:
    return Liveness(
        beat_s=clock * LIVENESS.beat_s, silent_s=clock * LIVENESS.silent_s, longest_s=clock * LIVENESS.longest_s
    )


async def zeros(train: TrainSpec, step: int) -> np.ndarray:
    """Returns the text of an inner step, which nobody reads."""
    return np.zeros((train.step_rows, train.sequence + 1), np.int64)


async def be_stage(stage: int, host: str, folder: Path, limit: int | None, clock: int) -> None:
    """Reads cases from standard input, and reports on each."""
    worker = make_worker()
    async with joined(stage, host, folder, limit, clock) as (previous, following):
        while (asked := await heard()) is not None:
            train = TrainSpec(
                inner_steps=1, micro_batches=asked["micro_batches"], rows=1, sequence=asked["tokens"],
                lr=1.0, warmup_steps=0, total_steps=1,
            )  # fmt: skip
            setup = StageSetup(
                trainer=Paced(train, stage, asked["width"], asked["seconds_per_microbatch"]),  # type: ignore[arg-type]
                worker=worker,
                wires=(asked["forward"], asked["backward"]),
                timeout=TIMEOUT,
                read=functools.partial(zeros, train),
                depth=asked["depth"],
                depths=Depths(plain=most, held=most, most=most) if (most := asked["most"]) else UNBOUNDED,
                liveness=slowed(clock),
            )
            reports = await run_steps(setup, first_step=1, steps=asked["steps"], previous=previous, following=following)
            say(reports=plain(reports))


# --- the chain


class Processes:
    """Runs the stages' processes and tells each the addresses of the others."""

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self.stages = [
            subprocess.Popen(c, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for c in commands
        ]  # fmt: skip

    def introduce(self) -> None:
        self.tell([self.hear(s) for s in self.stages])
        for s in self.stages:
            self.hear(s)

    def hear(self, stage: subprocess.Popen[str]) -> Any:
        out: IO[str] | None = stage.stdout
        assert out is not None
        for text in out:
            if text.startswith("@"):
                return json.loads(text[1:])
        raise SystemExit("a stage has ended; its error is above")

    def tell(self, fields: object) -> None:
        for s in self.stages:
            assert s.stdin is not None
            s.stdin.write(json.dumps(fields) + "\n")
            s.stdin.flush()

    def kill(self) -> None:
        for s in self.stages:
            s.kill()
            s.wait()


class Chain:
    """Four processes in a lab; use as `with Chain.start(...)`."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes

    @classmethod
    @contextlib.contextmanager
    def start(
        cls, netlab: Path, idle_restart: bool, limited: bool, rate: float, latency: float, slower: int
    ) -> Iterator[Chain]:
        """Gives every boundary `rate` Mb/s each way and `latency` ms one way, before the first connection.

        libp2p sizes its windows by the round trip of that. `limited`: see `Case`.
        """
        rates = [(1 if i in (0, STAGES - 1) else 2) * rate / slower for i in range(STAGES)]
        links = {f"s{i}": f"{mine:.3f}/{mine:.3f}:{latency * slower:g}" for i, mine in enumerate(rates)}
        with (
            lab(netlab, links, idle_restart=idle_restart) as there,
            tempfile.TemporaryDirectory(prefix="potluck-chain-") as folder,
        ):
            for name in there.places:
                there.control("set", name, f"queue={QUEUE_MS * slower}")
            commands = []
            for i, (host, prefix) in enumerate(there.places.values()):
                stage = [sys.executable, "-m", "tests.benchmarks.chain", "--stage", str(i), "--host", host]
                if limited:
                    stage += ["--limit", str(int(LIMIT * rates[i] * 1e6))]
                commands.append([*prefix, *stage, "--folder", folder, "--clock", str(slower)])
            processes = Processes(commands)
            try:
                processes.introduce()
                yield cls(processes)
            finally:
                processes.kill()

    def steps(self, case: Case, depth: int, most: int | None, count: int) -> list[dict[str, Any]]:
        """Returns the first stage's reports of `count` inner steps.

        depth: of the first step; the chain picks that of the others, up to `most`.
        """
        self.processes.tell(
            {
                "micro_batches": case.micro_batches,
                "tokens": case.tokens,
                "width": D // case.divisor,
                "seconds_per_microbatch": case.seconds_per_microbatch * case.slower,
                "steps": count,
                "forward": case.wire,
                "backward": case.wire,
                "depth": depth,
                "most": most,
            }
        )
        reports: list[list[dict[str, Any]]] = [self.processes.hear(s)["reports"] for s in self.processes.stages]
        return reports[0]

    def middle(self, case: Case, depth: int, most: int | None = None) -> dict[str, Any]:
        """Returns the report with the median time of SAMPLES steps.

        depth: of these steps; 0: the chain finds it in steps before them.
        """
        guess = depth or pipeline_model.pick_depth(*case.costs(), case.micro_batches)
        found = self.steps(case, guess, most, 1 if depth or most else FINDING + 1)[-1]
        samples = [found]
        while len(samples) < SAMPLES and found["seconds"] < LONG:
            samples += self.steps(case, found["depth"], most, 1)
        return sorted(samples, key=lambda report: float(report["seconds"]))[len(samples) // 2]


HEAD = (
    "| Mb/s | ms | k/d | format | M | clock | transfer / seconds_per_microbatch | depth | share | predicted | 1F1B |"
    " predicted |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def measure(chain: Chain, case: Case, depth: int) -> tuple[dict[str, Any], int]:
    """Measures and prints a row; returns it and the depth that the chain used. `depth`: see `Chain.middle`."""
    ours = chain.middle(case, depth)
    textbook = chain.middle(case, STAGES, STAGES)
    row = {
        "rate": case.rate, "latency": case.latency, "divisor": case.divisor, "format": case.wire,
        "micro_batches": case.micro_batches, "slower": case.slower,
        "ratio": case.transfer / case.seconds_per_microbatch, "depth": ours["depth"],
        "share": case.ideal * case.slower / ours["seconds"], "predicted": case.predicted(ours["depth"]),
        "textbook": case.ideal * case.slower / textbook["seconds"], "textbook_predicted": case.predicted(STAGES),
    }  # fmt: skip
    part = "1" if case.divisor == 1 else f"1/{case.divisor}"
    shares = " | ".join(f"{100 * row[n]:.1f} %" for n in ("share", "predicted", "textbook", "textbook_predicted"))
    print(
        f"| {case.rate:g} | {case.latency:g} | {part} | {case.wire} | {case.micro_batches} | 1/{case.slower} |"
        f" {row['ratio']:.2f} | {row['depth']} | {shares} |",
        flush=True,
    )
    return row, ours["depth"]


def cases(chosen: argparse.Namespace) -> Iterator[Case]:
    limited = not chosen.no_limit
    if chosen.target:
        for wire in chosen.formats:
            yield Case(
                rate=100,
                latency=25,
                divisor=8,
                micro_batches=32,
                seconds_per_microbatch=2048 * TOKEN_SECONDS,
                wire=wire,
                limited=limited,
            )
            yield Case(
                rate=100,
                latency=25,
                divisor=8,
                micro_batches=128,
                seconds_per_microbatch=512 * TOKEN_SECONDS,
                wire=wire,
                limited=limited,
            )
        return
    for rate in chosen.rates:
        for latency in chosen.latencies:
            for divisor in chosen.divisors:
                for micro_batches in chosen.micro_batches:
                    for wire in chosen.formats:
                        case = Case(
                            rate=rate, latency=latency, divisor=divisor, micro_batches=micro_batches,
                            seconds_per_microbatch=chosen.seconds_per_microbatch, wire=wire, limited=limited,
                        )  # fmt: skip
                        if micro_batches == 32 or case.transfer <= 2 * case.seconds_per_microbatch:
                            yield case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netlab", type=Path, help="the lab's script")
    parser.add_argument("--seconds_per_microbatch", type=float, default=PACE)
    parser.add_argument("--target", action="store_true")
    parser.add_argument(
        "--idle-restart", action="store_true", help="leave TCP's windows to shrink at rest, Linux's default"
    )
    parser.add_argument("--no-limit", action="store_true", help="peers do not know what their uplinks have")
    parser.add_argument("--rates", type=float, nargs="*", default=RATES, help="Mb/s")
    parser.add_argument("--latencies", type=float, nargs="*", default=LATENCIES, help="one-way ms")
    parser.add_argument("--divisors", type=int, nargs="*", default=(1, 8, 32), help="d/k")
    parser.add_argument("--micro-batches", type=int, nargs="*", default=(32, 128))
    parser.add_argument("--formats", nargs="*", default=("int4",), choices=formats.FORMATS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--clock", type=int, default=1, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.stage is not None:
        asyncio.run(be_stage(chosen.stage, chosen.host, chosen.folder, chosen.limit, chosen.clock))
        return 0
    if chosen.netlab is None:
        parser.error("--netlab is needed: the chain runs behind emulated links")
    rows = []
    print(HEAD)
    for same, some in itertools.groupby(
        cases(chosen), lambda case: (case.limited, case.rate, case.latency, case.slower)
    ):
        with Chain.start(chosen.netlab, chosen.idle_restart, *same) as chain:
            depth, before = 0, None
            for case in some:
                if before != (shape := (case.divisor, case.seconds_per_microbatch, case.wire)):
                    depth, before = 0, shape
                row, depth = measure(chain, case, depth)
                rows.append(row)
    worst = max(abs(r[a] - r[b]) for r in rows for a, b in (("share", "predicted"), ("textbook", "textbook_predicted")))
    print(f"largest difference between measurement and prediction: {100 * worst:.1f} points")
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
