"""What a peer found of its line before, in a file of its folder: the next start goes by it and measures nothing.

It counts for DAYS days, and only where the machine's interfaces have the same addresses: elsewhere it may be on another line. If the line
is another one after all, real transfers show that (peer/net/transfers.py), and what they show is written here again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from peer.net.disk import Disk

FILE = "line.json"
DAYS = 7.0
_FUTURE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class KnownLine:
    """Bits a second each way; None: it was not measured."""

    up_bps: int | None = None
    down_bps: int | None = None


UNKNOWN = KnownLine()


def read(disk: Disk, folder: Path, hosts: Collection[str], wall: float) -> KnownLine:
    """What the file says at `wall`, where the interfaces have these addresses; nothing where it does not hold any more."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        said = json.loads(disk.read(folder / FILE))
        age = wall - float(said["time"])
        if -_FUTURE_SECONDS <= age <= DAYS * 86_400 and said["hosts"] == sorted(hosts):
            rates = [
                said[name] if isinstance(said[name], int) and said[name] > 0 else None
                for name in ("up_bps", "down_bps")
            ]
            return KnownLine(*rates)
    return UNKNOWN


def write(disk: Disk, folder: Path, known: KnownLine, hosts: Collection[str], wall: float) -> None:
    """Raises UsageError."""
    said = {**asdict(known), "hosts": sorted(hosts), "time": wall}
    disk.write(folder / FILE, json.dumps(said).encode(), sync=False)
