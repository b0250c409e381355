"""An enemy who does one thing again and again, as fast as it can, and counts how often it tried."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from peer.net import base
from peer.net.base import Stream
from protocol.errors import RemoteError
from protocol.wire import encoding
from protocol.wire.encoding import Message
from tests.hostile.ground import SOON, Enemy

AT_ONCE = 20
"""Streams that an enemy opens, and calls that it makes, at once."""


class Done:
    """What one enemy did: messages sent, streams opened, calls made, also those that were refused."""

    times = 0


@dataclass(frozen=True)
class Attacker(Enemy):
    """An enemy. `addresses`: the node's; `victim_addresses`: a peer's; `others`: the enemy's other identities."""

    victim: str
    addresses: tuple[str, ...]
    victim_addresses: tuple[str, ...]
    done: Done
    others: tuple[Attacker, ...] = ()

    async def over_and_over(self, work: Callable[[], Awaitable[object]], beside: int = 1) -> None:
        """Does it for ever, `beside` at once, whatever the others answer."""

        async def one() -> None:
            while True:
                self.done.times += 1  # a try, even if it has to wait for its turn until the attack is over
                with contextlib.suppress(RemoteError, ConnectionError, TimeoutError):
                    await work()
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for _ in range(beside):
                group.create_task(one())

    async def in_sessions(self, message: Callable[[int], bytes], **announced: Any) -> None:
        """Says it in sessions as fast as they take it, one after the other. `announced`: the first announcement."""

        async def one() -> None:
            session, number = await self.session(**announced), 0
            while True:
                await session.send(message(number))
                self.done.times, number = self.done.times + 1, number + 1

        await self.over_and_over(one)

    async def says(self, message: Callable[[int], Message], **announced: Any) -> None:
        """The same of messages."""
        await self.in_sessions(lambda number: encoding.encode(message(number)), **announced)

    async def calls(self, target: str, name: str, request: bytes | Callable[[int], bytes]) -> None:
        """Calls; what is answered is thrown away."""

        def made() -> bytes:
            return request if isinstance(request, bytes) else request(self.done.times)

        await self.over_and_over(lambda: base.call(self.transport, target, name, made(), timeout=SOON), AT_ONCE)

    async def on_streams(self, target: str, name: str, frame: Callable[[int], bytes], beside: int = AT_ONCE) -> None:
        """Keeps streams open, sends frame after frame on each, and reads what comes, as fast as it is answered."""

        async def one() -> None:
            stream = await self.open(target, name)
            reading = asyncio.create_task(drained(stream))
            try:
                while not reading.done():
                    await stream.send(frame(self.done.times))
                    self.done.times += 1
            finally:
                reading.cancel()
                await stream.close()

        await self.over_and_over(one, beside)


async def drained(stream: Stream) -> None:
    """Reads until the stream ends, and wants nothing of it."""
    with contextlib.suppress(RemoteError):
        while True:
            await stream.recv()


Work = Callable[[Attacker], Coroutine[Any, Any, None]]


@dataclass(frozen=True, kw_only=True)
class Attack:
    """What an enemy does. `told`: the reasons, one of which the node or the peer gives for refusing it; empty: it is
    slowed, or answered, and breaks no limit. `slowly`: only after ten seconds of it. `identities`: that the enemy has
    at once. `spell`: seconds after which it is known what it costs, where it costs more at first."""

    work: Work
    told: tuple[str, ...] = ()
    slowly: bool = False
    identities: int = 1
    spell: float = 0.0

    @property
    def name(self) -> str:
        return self.work.__name__

    @property
    def text(self) -> str:
        """What it is, for a table."""
        return " ".join((self.work.__doc__ or "").split())
