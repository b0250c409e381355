"""Signed envelopes, for what others must believe later: `{"p": peer, "b": body, "s": signature of the domain and the body}` (Ed25519)."""

from __future__ import annotations

import functools

from protocol import identity
from protocol.errors import shown
from protocol.identity import Identity, short_peer
from protocol.wire import framing
from protocol.wire.announcement import Announcement
from protocol.wire.commit import DOMAIN
from protocol.wire.encoding import Message, MessageError, decode, encode


def seal(who: Identity, message: Message) -> bytes:
    """A signed envelope."""
    body = encode(message)
    return framing.pack_message({"p": who.peer_id, "b": body, "s": who.sign(DOMAIN + body)})


def unseal(raw: bytes | memoryview) -> tuple[str, Message]:
    """(signer, message) of an envelope whose signature is right. Raises MessageError."""
    return unseal_signed(raw)[:2]


def unseal_signed(raw: bytes | memoryview) -> tuple[str, Message, bytes]:
    """The same, and the signature."""
    try:
        data = framing.unpack_message(bytes(raw))
    except framing.FrameError as error:
        raise MessageError("unknown", f"envelope: {error}; it was dropped") from None
    if not isinstance(data, dict):
        raise MessageError("unknown", "envelope: not a map; it was dropped")
    peer, body, signature = data.get("p"), data.get("b"), data.get("s")
    if not (isinstance(peer, str) and isinstance(body, bytes) and isinstance(signature, bytes)):
        raise MessageError("unknown", "envelope: fields are missing; it was dropped")
    if not identity.verify(peer, DOMAIN + body, signature):
        raise MessageError(peer, f"envelope of {shown(short_peer(peer))}: the signature is wrong; it was dropped")
    return peer, decode(body, peer), signature


@functools.lru_cache(maxsize=2048)
def unseal_announcement(raw: bytes, subkey: str, run: str) -> Announcement | None:
    """The announcement in a DHT record, or None where it is not one of `run` signed by `subkey`."""
    try:
        signer, message = unseal(raw)
    except MessageError:
        return None
    if not isinstance(message, Announcement) or not signer == message.peer == subkey or message.run != run:
        return None
    return message
