"""Fetching what has a name instead of a digest, such as a run's manifest."""

from __future__ import annotations

from peer.net.base import Transport
from protocol.codec import blob_hash
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.wire import endpoints, framing


def answer_of(raw: bytes, what: str) -> dict[str, object]:
    """A holder's answer; `what` names it in errors. Raises FrameError."""
    answer = framing.unpack_message(raw)
    if not isinstance(answer, dict):
        raise framing.FrameError(f"{what} sent no answer")
    return answer


async def fetch_named(transport: Transport, peer: str, name: str, *, limit: int, timeout: float = 20.0) -> bytes:
    """What `peer` serves under a name such as the manifest's, at most `limit` bytes; the caller checks it. Raises
    RemoteError."""
    what = f"{name} from {short_peer(peer)}"
    stream = await transport.open(peer, endpoints.BLOB, timeout=timeout)
    try:
        await stream.send(framing.pack_message({"named": name}))
        size = answer_of(await stream.recv(1024, timeout=timeout), what).get("size")
        if not isinstance(size, int) or size < 0:
            raise RemoteError(peer, f"{what}: it does not have it; ask another node")
        if size > limit:
            raise RemoteError(peer, f"{what}: {size} bytes; at most {limit} are taken")
        data = bytearray()
        while len(data) < size:
            piece = await stream.recv(blob_hash.RANGE_BYTES, timeout=timeout)
            if not piece or len(data) + len(piece) > size:
                raise RemoteError(peer, f"{what}: it sent another number of bytes than it said; ask another node")
            data += piece
        await stream.finish()
        return bytes(data)
    except framing.FrameError as error:
        raise RemoteError(peer, f"{what}: {error}; ask another node") from None
    finally:
        await stream.close()
