"""What a peer does only at times: it pauses, politely, outside of its hours and while others use the machine, and goes on by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from peer import events
from peer.net.base import Clock
from peer.node.pausing import Busy, Hours, OtherPrograms, Use

LOOK_SECONDS = 5.0

Look = Callable[[], Awaitable[str | None]]
"""Why nothing is to be done now; None: nothing keeps it."""


def by_hours(hours: Hours, clock: Clock) -> Look:
    """Keeps to the hours."""

    async def look() -> str | None:
        return None if hours.has(clock.wall()) else f"outside of its hours, {hours}"

    return look


def while_busy(clock: Clock, others: Callable[[], Awaitable[Use]] | None = None) -> Look:
    """Leaves the machine to others while they use it. `others()`: what they do (default: it is looked up)."""
    busy, measured = Busy(), others or OtherPrograms().look

    async def look() -> str | None:
        use = await measured()
        if not busy.see(clock.steady(), use):
            return None
        return f"other programs use {use.cpu:.0%} of the processors and {use.gpu:.0%} of the GPU"

    return look


class Pauses:
    """Of one peer, which looks every `seconds`. `freed()` is called when it has left."""

    def __init__(
        self, looks: Sequence[Look], emit: events.Emit, freed: Callable[[], None], seconds: float = LOOK_SECONDS
    ) -> None:
        self._looks, self._emit, self._freed, self._seconds = list(looks), emit, freed, seconds

    async def between(self, work: Callable[[], Awaitable[None]]) -> None:
        """Does `work`, which is broken off as by Ctrl-C when a pause begins, and begun again afterwards, until it has come to its end."""
        why = await self._why()
        while True:
            if why is not None:
                self._emit(events.Paused(reason=why))
                while await self._why() is not None:
                    await asyncio.sleep(self._seconds)
                self._emit(events.Resumed())
            why = None
            try:
                async with asyncio.timeout(None) as limit:
                    watching = asyncio.create_task(self._break_off(limit))
                    try:
                        await work()
                    finally:
                        watching.cancel()
                return
            except TimeoutError:
                if not limit.expired():
                    raise
            why = watching.result()
            self._freed()

    async def _break_off(self, limit: asyncio.Timeout) -> str:
        while (why := await self._why()) is None:
            await asyncio.sleep(self._seconds)
        limit.reschedule(asyncio.get_running_loop().time())
        return why

    async def _why(self) -> str | None:
        for look in tuple(self._looks):
            try:
                why = await look()
            except Exception as error:  # the peer goes on without it
                self._looks.remove(look)
                self._emit(
                    events.Warning(text=f"pauses: {error}; this machine is looked at no more until the next start")
                )
                continue
            if why is not None:
                return why
        return None
