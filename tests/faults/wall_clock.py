"""`potluck` on a machine whose time of day is off by as many seconds as the file `wall` in its --dir says, from one
moment to the next.

The operating system's clock is replaced before anything is imported, so hivemind, too, takes the wrong time for the
right one.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

_right = time.time
_offset = Path(sys.argv[sys.argv.index("--dir") + 1]) / "wall" if "--dir" in sys.argv else None


def _wrong() -> float:
    try:
        return _right() + float(_offset.read_text()) if _offset is not None else _right()
    except (FileNotFoundError, ValueError):  # there is none, or it is being written
        return _right()


if __name__ == "__main__":
    time.time = _wrong
    from peer.cli.main import main

    main()
