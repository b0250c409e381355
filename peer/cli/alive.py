"""A file whose age says whether a process lives: its event loop touches it, so it grows old when the process hangs, not only when it is gone.

Health checks look at its age (docker/*.Dockerfile). That costs them no start of a Python, and the process a write of some bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

ALIVE = "alive"
"""In the folder of a peer or a node."""
TOUCH_SECONDS = 10.0
"""Far less than the minute after which a health check takes the process for dead."""


@contextlib.asynccontextmanager
async def shown_alive(folder: Path) -> AsyncIterator[None]:
    """Within, the file in `folder` is young, as long as this event loop turns. A disk that refuses lets it grow old."""
    file = folder / ALIVE
    touching = asyncio.create_task(_touch(file))
    try:
        yield
    finally:
        touching.cancel()
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


async def _touch(file: Path) -> None:
    while True:
        with contextlib.suppress(OSError):
            file.touch()
        await asyncio.sleep(TOUCH_SECONDS)
