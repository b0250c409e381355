"""What anybody asks a bootstrap node: for records of the log, and how the run stands by its operators' decrees."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from peer.net.base import Transport, call
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import encoding, endpoints, framing
from protocol.wire.decree import Motion, Motions
from protocol.wire.session import LogRequest

CALL_SECONDS = 10.0
NEXT_SECONDS = 1.0
"""After which another node is asked besides, where one has not answered: it may just have died."""


async def in_turn(nodes: Iterable[str], ask: Callable[[str], Awaitable[bool]]) -> None:
    """Asks one node after the other until `ask` says that all is known; the next one besides where one takes long. Raises what `ask` raises."""
    left, asked = list(nodes), set[asyncio.Task[bool]]()
    try:
        while left or asked:
            if left:
                asked.add(asyncio.ensure_future(ask(left.pop(0))))
            done, asked = await asyncio.wait(
                asked, timeout=NEXT_SECONDS if left else None, return_when=asyncio.FIRST_COMPLETED
            )
            if any(task.result() for task in done):
                return
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def page(transport: Transport, node: str, after: int, seconds: float = CALL_SECONDS) -> list[bytes]:
    """The records of the rounds after round `after`, as many as `node` sends at once; none where it has no more. They come within so many
    seconds. Raises RemoteError."""
    reply = await call(transport, node, endpoints.LOG, encoding.encode(LogRequest(after=after)), timeout=seconds)
    try:
        found = framing.unpack_message(reply)
    except framing.FrameError as error:
        raise RemoteError(node, f"log of {short_peer(node)}: {error}; ask another bootstrap node") from None
    if not isinstance(found, list) or not all(isinstance(raw, bytes) for raw in found):
        raise RemoteError(node, f"log of {short_peer(node)}: not a list of commits; ask another bootstrap node")
    return found


async def ask(transport: Transport, node: str, motion: Motion) -> Motions:
    """A node's answer. Raises RemoteError."""
    raw = await call(transport, node, endpoints.DECREES, encoding.encode(motion), timeout=CALL_SECONDS)
    try:
        return encoding.expect(Motions, encoding.decode(raw, node), node)
    except RemoteError as error:
        raise RemoteError(node, f"{error}; is it of the same version?") from None


async def operating(transport: Transport, node: str) -> Motions:
    """The same, where nothing is moved: who operates the run, by that node's word. Raises RemoteError."""
    return await ask(transport, node, Motion())
