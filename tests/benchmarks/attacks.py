"""Measures the rounds per second of a run under attack.

    python -m tests.benchmarks.attacks [--seconds S] [--times N] [--only NAME ...] [--identities N]

The attacks are those of tests/hostile/attacks. One core runs a bootstrap node, two peers and their network daemons; the
peers wait for 0.2 s a round instead of computing. Another core runs the enemy, a process with a daemon for each of its
identities. Quiet spells and attacks take turns. Each attack has new identities, so that none is refused for an earlier
one. Some attacks need spells longer than `--seconds` (`Attack.spell`). `--identities` sets the number of identities of
the attacks that use several.

The table has the median rounds per second, their ratio, the enemy's attempts per second (messages, streams and calls,
refused ones included), the growth of the attacked processes' memory, and the reasons for which the enemy was refused.
An enemy that ends or does nothing ends the benchmark. Exits with 1 below 80 % of the quiet rate.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.hostile.attacks import ATTACKS
from tests.hostile.siege import Siege, rate

BOUND = 0.8


@dataclass(frozen=True)
class Row:
    """Medians over all spells of an attack.

    cpu_ms: processor time of node and peers for a quiet round.
    load: the machine's load average.
    """

    attack: str
    quiet: float
    attacked: float
    tries: float
    process_mib: float
    daemon_mib: float
    refused: list[str]
    cpu_ms: float
    load: float

    @property
    def ratio(self) -> float:
        return self.attacked / self.quiet

    def __str__(self) -> str:
        rates = f"{self.quiet:.2f} | {self.attacked:.2f} | {self.ratio:.2f} | {self.tries:,.0f}"
        grown = f"{self.process_mib:+.0f} | {self.daemon_mib:+.0f}"
        return f"| {ATTACKS[self.attack].text} | {rates} | {grown} | {'; '.join(self.refused) or '-'} |"


async def measure(siege: Siege, name: str, seconds: float, times: int, identities: int | None) -> Row:
    """Alternates quiet spells with spells of one attack."""
    attack = ATTACKS[name]
    seconds = max(seconds, attack.spell)
    quiet, left, tries, refused = list[float](), list[float](), list[float](), set[str]()
    before, cpu = siege.sizes(), 0.0
    for _ in range(times):
        began, head = time.process_time(), siege.ground.head
        quiet.append(await rate(siege.ground, seconds))
        cpu = 1000 * (time.process_time() - began) / max(1, siege.ground.head - head)
        many = identities if attack.identities > 1 else None
        async with siege.attacked(attack, many) as blows:
            left.append(await rate(siege.ground, seconds))
        tries.append(blows.done / blows.seconds)
        refused |= {b.reason for b in siege.refusals(blows)}
    after = siege.sizes()
    daemon = max(after.daemons[n] - before.daemons[n] for n in after.daemons)
    return Row(
        attack=name,
        quiet=statistics.median(quiet),
        attacked=statistics.median(left),
        tries=statistics.median(tries),
        process_mib=after.process - before.process,
        daemon_mib=daemon,
        refused=sorted(refused),
        cpu_ms=round(cpu, 1),
        load=os.getloadavg()[0],
    )


async def campaign(folder: Path, seconds: float, times: int, names: list[str], identities: int | None) -> list[Row]:
    """Measures each attack and prints its row at once."""
    rows = list[Row]()
    async with Siege(folder, cores=(0, 1)) as siege:
        for name in names:
            rows.append(await measure(siege, name, seconds, times, identities))
            print(json.dumps({**dataclasses.asdict(rows[-1]), "ratio": round(rows[-1].ratio, 3)}), flush=True)
        await siege.ground.goes_on(5)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(ATTACKS))
    parser.add_argument("--identities", type=int)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = chosen.only or list(ATTACKS)
        work = campaign(Path(folder), chosen.seconds, chosen.times, names, chosen.identities)
        rows = asyncio.run(work)
    print(
        "| attack | quiet | attacked | ratio | tries per second | processes, MiB | daemon, MiB | refused because it |"
    )
    print("|---|---|---|---|---|---|---|---|", *rows, sep="\n")
    raise SystemExit(any(row.ratio < BOUND for row in rows))


if __name__ == "__main__":
    main()
