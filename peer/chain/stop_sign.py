"""How a trainer is asked to end a round."""

from __future__ import annotations

from typing import Protocol


class StopSign(Protocol):
    """An asyncio.Event, a threading.Event, or the end of a round (peer/node/training.py)."""

    def is_set(self) -> bool:
        """Whether the inner step under way is the last one."""
        ...
