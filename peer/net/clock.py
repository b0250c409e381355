"""The two clocks of a process, as one object that the composition root hands to whatever asks for the time.

`steady` only goes forward and says how long something takes: leases, deadlines and pauses are measured by it. `wall` is what the
machine takes for the time of day. It may jump, so nothing waits by it: it is written into commits, announcements and events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """`steady`: seconds since some moment, the same moment for the whole process. `wall`: seconds since 1970."""

    steady: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
