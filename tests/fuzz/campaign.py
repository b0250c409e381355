"""A fuzzing campaign: `python -m tests.fuzz.campaign --inputs 10000000`; `make fuzz`.

Every input is a seed, or an earlier input that provoked an answer which was new, changed by tests/fuzz/mutate.py; one
in `bomb_every` is a bomb. An input fails when its target raises what it may not, says an error of more than one
printable line, accepts what is not sound, takes over `seconds` of CPU time, or, for one input in `memory_every` and
half of the bombs, allocates over `memory_bytes` (Python's and numpy's allocations, by tracemalloc). What hangs for
`hang_seconds` is interrupted. Failures are written to tests/fuzz/found/ and told once per place.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import math
import random
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tests.fuzz import mutate
from tests.fuzz.targets import TARGETS, Target, one_line

CORPUS = 400
TRIES = 3
"""Of an input that seems to take too long."""
CHUNK = 100_000
"""Inputs after which a campaign that is kept writes down what it has done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of an input. `seconds`: CPU time; the slowest is reported. `found`: the folder of failures."""

    seconds: float = 5.0
    hang_seconds: float = 120.0
    memory_bytes: int = 64 << 20
    memory_every: int = 1000
    bomb_every: int = 4000
    found: Path = Path(__file__).parent / "found"


LIMITS = Limits()


class Hang(BaseException):
    """An input took too long."""


class Bad(AssertionError):
    """An input did what it may not."""


@dataclass(slots=True)
class State:
    """One target's figures, and the inputs that are changed further."""

    target: Target
    corpus: list[bytes]
    limits: Limits = LIMITS
    answers: set[str] = field(default_factory=set)
    inputs: int = 0
    accepted: int = 0
    slowest: float = 0.0
    largest: int = 0
    failures: dict[str, bytes] = field(default_factory=dict)
    began: float = math.inf


def attempt(state: State, raw: bytes, memory: bool) -> str:
    """One input; its answer in a few words. Raises Bad, Hang, and whatever the target may not raise."""
    target, limits = state.target, state.limits
    if memory:
        tracemalloc.start()
    state.began = time.perf_counter()
    try:
        answer = f"ok {target.run(raw)!r:.60}"
        state.accepted += 1
    except target.refuses as error:
        if not one_line(error):
            raise Bad(f"not one printable line: {error!r:.200}") from None
        answer = f"{type(error).__name__} {error}"
    finally:
        taken = time.perf_counter() - state.began
        state.began = math.inf
        if memory:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            state.largest = max(state.largest, peak)
    state.inputs += 1
    if not memory:
        state.slowest = max(state.slowest, taken)
        most = min(limits.seconds, target.allowed(len(raw)))
        if taken > most and (spent := min(_cpu_seconds(target, raw) for _ in range(TRIES))) > most:
            raise Bad(f"took {spent:.4f} s of CPU time for {len(raw)} bytes, {most:.4f} s are allowed")
    elif peak > limits.memory_bytes:
        raise Bad(f"took {peak >> 20} MiB for {len(raw)} bytes")
    return answer


def _cpu_seconds(target: Target, raw: bytes) -> float:
    """Of another attempt: the machine may have been busy."""
    began = time.process_time()
    with contextlib.suppress(*target.refuses):
        target.run(raw)
    return time.process_time() - began


_DIGITS = re.compile(r"[0-9a-f]{6,}|\d+|'[^']*'|\"[^\"]*\"")


def one(state: State, rng: random.Random) -> None:
    """Makes and tries one input; remembers what failed and what was new."""
    target, limits = state.target, state.limits
    bomb = rng.randrange(limits.bomb_every) == 0
    known = target.seeds if rng.random() < 0.5 else state.corpus
    raw = mutate.bomb(rng) if bomb else target.change(rng, rng.choice(known), target.seeds)
    try:
        answer = attempt(state, raw, rng.randrange(2 if bomb else limits.memory_every) == 0)
    except (Exception, Hang, RecursionError) as error:
        state.inputs += 1
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
        if place not in state.failures:
            state.failures[place] = raw
            limits.found.mkdir(exist_ok=True)
            name = re.sub(r"\W+", "-", target.name)
            (limits.found / f"{name}-{hashlib.sha256(raw).hexdigest()[:12]}").write_bytes(raw)
            print(f"FAILED {target.name}: {place}: {str(error)[:200]!r}", flush=True)
        return
    key = _DIGITS.sub("#", answer)
    if key not in state.answers and len(raw) < 1 << 14 and len(state.corpus) < CORPUS:
        state.answers.add(key)
        state.corpus.append(raw)


def run(
    targets: Sequence[Target],
    seed: int,
    goes_on: Callable[[int], bool],
    progress: Callable[[int], None] = lambda n: None,
    limits: Limits = LIMITS,
) -> list[State]:
    """Tries inputs as long as `goes_on(how many)`; targets take turns by their share."""
    states = [State(target, list(target.seeds), limits) for target in targets]
    turns = [state for state in states for _ in range(state.target.share)]
    rng = random.Random(seed)
    rng.shuffle(turns)
    logging.disable(logging.CRITICAL)  # peers' nonsense is logged for debugging

    def interrupt(number: int, frame: FrameType | None) -> None:
        if time.perf_counter() - min(state.began for state in states) > limits.hang_seconds:
            raise Hang(f"over {limits.hang_seconds:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, limits.hang_seconds / 4, limits.hang_seconds / 4)
    count = 0
    try:
        for state in states:
            for raw in state.target.seeds:
                attempt(state, raw, False)  # a seed must be taken or refused properly, too
        while goes_on(count):
            for state in turns:
                one(state, rng)
                count += 1
            progress(count)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        logging.disable(logging.NOTSET)
    return states


def channel_targets() -> list[Target]:
    from tests.fuzz import channels  # which takes time

    unit = channels.turn()
    return [channels.target(channel, unit) for channel in channels.CHANNELS]


def in_chunks(targets: Sequence[Target], inputs: int, seed: int, keep: Path) -> bool:
    """Tries so many inputs, chunk by chunk, each of another seed; those in `keep` are done. Whether any failed."""
    done = [json.loads(line) for line in keep.read_text().splitlines()] if keep.exists() else []
    while (count := sum(chunk["inputs"] for chunk in done)) < inputs:
        began = time.process_time()
        states = run(targets, seed + len(done), lambda tried: tried < min(CHUNK, inputs - count))
        done.append({
            "inputs": sum(state.inputs for state in states),
            "failures": sorted(f"{s.target.name}: {place}" for s in states for place in s.failures),
            "cpu_seconds": round(time.process_time() - began, 1),
            "by_channel": {state.target.name: state.inputs for state in states},
        })  # fmt: skip
        with keep.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
        took = sum(chunk["cpu_seconds"] for chunk in done)
        wrong = sum(len(chunk["failures"]) for chunk in done)
        print(f"{count + done[-1]['inputs']:,} inputs, {took:.0f} s of processor, {wrong} failures", flush=True)
    return any(chunk["failures"] for chunk in done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="targets whose name contains this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--channels", action="store_true", help="messages to every channel, in place of decoders")
    parser.add_argument("--keep", type=Path, help="a file of what was done, in chunks; a campaign goes on after it")
    chosen = parser.parse_args()
    targets = [target for target in (channel_targets() if chosen.channels else TARGETS) if chosen.only in target.name]
    if chosen.keep:
        raise SystemExit(in_chunks(targets, chosen.inputs, chosen.seed, chosen.keep))
    began, told = time.monotonic(), time.monotonic()
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def progress(count: int) -> None:
        nonlocal told
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(f"{count:,} inputs in {told - began:.0f} s", flush=True)

    states = run(targets, chosen.seed, lambda count: count < chosen.inputs, progress)
    seconds = time.monotonic() - began
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    result = {
        "commit": commit,
        "command": " ".join(["python -m tests.fuzz.campaign", *sys.argv[1:]]),
        "seconds": round(seconds),
        "cpu_seconds": round(time.process_time()),
        "inputs": sum(state.inputs for state in states),
        "failures": sum(len(state.failures) for state in states),
        "rss_growth_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss) >> 10,
        "answers": dict(Counter({state.target.name: len(state.answers) for state in states})),
    }
    print(f"\n{'target':<30}{'inputs':>12}{'taken':>12}{'answers':>9}{'slowest':>10}{'memory':>10}  failures")
    for s in states:
        print(
            f"{s.target.name:<30}{s.inputs:>12,}{s.accepted:>12,}{len(s.answers):>9}{1000 * s.slowest:>7.0f} ms"
            f"{s.largest / 2**20:>6.1f} MiB  {len(s.failures)}"
        )
    print(f"{result['inputs']:,} inputs, {result['failures']} failures, {seconds:.0f} s, commit {commit[:12]}")
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(1 if result["failures"] else 0)


if __name__ == "__main__":
    main()
