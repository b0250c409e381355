"""How fast a corpus is built beside `tokenizers` alone, and how much memory and disk that takes.

    python -m tests.benchmarks.corpus TOKENIZER.json SOURCE... [--threads 2] [--times 3] [--spill-ids N]

`tokenizers` alone: the same documents, in memory, through `encode_batch_fast` with the library's own threads, in a process of its own.
Both are run in turn, and the best of each is told: other work on the machine slows either.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from peer.corpus import build, sources
from peer.corpus.rows import Reading
from peer.corpus.tokenizer import parse_tokenizer
from peer.net.disk import Disk

SEQUENCE = 1024


def alone(tokenizer: Path, names: list[str]) -> dict[str, float]:
    """Tokens a second of the library."""
    made = parse_tokenizer(tokenizer.read_bytes(), str(tokenizer))
    units = [u for name in names for u in sources.units(sources.parse(name), Reading())]
    texts = [[piece.decode() for piece in unit.pieces] for unit in units]
    begin, tokens = time.perf_counter(), 0
    for batch in texts:
        tokens += sum(len(encoding) for encoding in made.encode_batch_fast(batch, add_special_tokens=False))
    seconds = time.perf_counter() - begin
    return {"tokens": tokens, "seconds": seconds, "cpu": _cpu(resource.RUSAGE_SELF)}


def built(tokenizer: Path, names: list[str], threads: int, spill_ids: int) -> dict[str, float]:
    """Seconds of a whole build, peak memory of its processes (kB), and peak disk (bytes)."""
    most = [0]

    class Counting(Disk):
        def write(self, path: Path, *pieces: Any, **options: Any) -> None:
            super().write(path, *pieces, **options)
            most[0] += path.stat().st_size

    with tempfile.TemporaryDirectory() as folder:
        asked = build.Request(
            sources=tuple(map(sources.parse, names)),
            tokenizer=tokenizer.read_bytes(),
            sequence=SEQUENCE,
            out=Path(folder) / "out",
            workers=threads,
            spill_ids=spill_ids,
        )
        begin = time.perf_counter()
        halves: list[float] = []
        index = build.build(asked, Counting(), lambda _: halves.append(time.perf_counter()), threading.Event())
        seconds = time.perf_counter() - begin
        return {
            "tokens": index.tokens,
            "seconds": seconds,
            "cpu": _cpu(resource.RUSAGE_SELF) + _cpu(resource.RUSAGE_CHILDREN),
            "memory_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "worker_kb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
            "disk": most[0],
            "corpus": sum(p.stat().st_size for p in asked.out.rglob("*") if p.is_file()),
        }


def _cpu(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--spill-ids", type=int, default=1 << 20)
    parser.add_argument("--one", choices=["alone", "built"])
    options = parser.parse_args()
    if options.one:
        found = (
            alone(options.tokenizer, options.sources)
            if options.one == "alone"
            else built(options.tokenizer, options.sources, options.threads, options.spill_ids)
        )
        print(json.dumps(found))
        return
    best: dict[str, float] = {}
    for _ in range(options.times):
        for which in ("alone", "built"):
            environment = os.environ | {"RAYON_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "true"}
            command = [sys.executable, "-m", "tests.benchmarks.corpus", *sys.argv[1:], "--one", which]
            line = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1]
            print(which, line.decode(), flush=True)
            found = json.loads(line)
            for unit in ("seconds", "cpu"):
                best[f"{which} {unit}"] = max(best.get(f"{which} {unit}", 0.0), found["tokens"] / found[unit])
    for unit, words in (("seconds", "second"), ("cpu", "CPU second, reading included")):
        rates = {which: best[f"{which} {unit}"] for which in ("alone", "built")}
        told = ", ".join(f"{which} {rate / 1e6:.3f}M tokens" for which, rate in rates.items())
        print(f"{told} a {words}: {rates['built'] / rates['alone']:.0%}")


if __name__ == "__main__":
    main()
