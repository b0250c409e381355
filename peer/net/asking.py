"""What anybody asks a bootstrap node: for records of the log, and how the run stands by its operators' decrees."""

from __future__ import annotations

from peer.net.base import Transport, call
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import encoding, endpoints, framing
from protocol.wire.decree import Motion, Motions
from protocol.wire.session import LogRequest

CALL_SECONDS = 10.0


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
