"""`potluck join` at the pace of paced.py, with the time of the file `wall` in its --dir (seconds since 1970), and the
power supplies of the folder `supplies` there, laid out as in /sys/class/power_supply."""

from __future__ import annotations

import sys
from pathlib import Path

from peer.cli import main as cli
from peer.net.base import Clock
from peer.node.peer import Factories
from tests.faults.paced import paced


def set_wall(folder: Path, seconds: float) -> None:
    """From now on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "wall.new").write_text(repr(seconds))
    (folder / "wall.new").rename(folder / "wall")


def main() -> None:
    folder = Path(sys.argv[sys.argv.index("--dir") + 1])
    cli.main(
        factories=Factories(
            inner_loop=paced(folder),
            clock=Clock(wall=lambda: float((folder / "wall").read_text())),
            supplies=folder / "supplies",
        )
    )


if __name__ == "__main__":
    main()
