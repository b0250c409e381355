"""Parts that unit tests of moved share with others."""

from __future__ import annotations

import asyncio

from peer.net.base import Clock
from tests.support import tiny

M = tiny.manifest()


def virtual_clock() -> Clock:
    loop = asyncio.get_running_loop()
    return Clock(steady=loop.time, wall=lambda: 1e9 + loop.time())
