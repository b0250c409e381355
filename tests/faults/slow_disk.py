"""`potluck` on a machine whose disk takes a megabyte in a tenth of a second, as somebody meets it who waits until what he wrote is there.

The operating system's call is replaced before anything is imported.
"""

from __future__ import annotations

import os
import time

BYTES_A_SECOND = 10e6
_fast = os.fsync


def _slow(fd: int) -> None:
    _fast(fd)
    time.sleep(os.fstat(fd).st_size / BYTES_A_SECOND)


if __name__ == "__main__":
    os.fsync = _slow
    from peer.cli.main import main

    main()
