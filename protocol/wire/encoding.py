"""Messages and records as bytes, and signed envelopes.

    message    msgpack map {"t": type, ...fields}
    record     msgpack map {"c": commit, "n": ballot, "v": {peer: signature of its vote}}
    envelope   msgpack map {"p": peer, "b": message, "s": Ed25519 signature of DOMAIN and the message}

Unknown fields are ignored. A missing or ill-typed field is refused (`MessageError`).
"""

from __future__ import annotations

import contextlib
import functools
import typing
from collections.abc import Iterator
from typing import Any, TypeVar

from protocol import identity
from protocol.errors import LocalError, RemoteError, shown
from protocol.identity import Identity, short_peer
from protocol.wire import framing
from protocol.wire.announcement import Announcement, DirectoryMessage
from protocol.wire.ballot import QuorumMessage
from protocol.wire.claims import Claim
from protocol.wire.commit import DOMAIN, Commit, Record, body_of
from protocol.wire.decree import DecreeMessage
from protocol.wire.schema import SchemaError, build, packed
from protocol.wire.session import NodeMessage, PeerMessage

MAX_VOTES = 16
T = TypeVar("T")


class MessageError(RemoteError):
    """A peer sent what is not a message, or one with a wrong signature."""


Message = PeerMessage | NodeMessage | DirectoryMessage | QuorumMessage | DecreeMessage | Claim
TYPES: dict[str, type] = {cls.__name__.lower(): cls for cls in typing.get_args(Message)}


def encode(message: Message) -> bytes:
    """A message as bytes; equal messages give equal bytes."""
    return framing.pack_message({"t": type(message).__name__.lower(), **packed(message)})


@contextlib.contextmanager
def _dropped(peer: str, what: str) -> Iterator[None]:
    """Raises MessageError about `what`, which `peer` sent, in place of SchemaError and FrameError."""
    try:
        yield
    except (SchemaError, framing.FrameError) as error:
        raise MessageError(peer, f"{what}: {shown(error)}; it was dropped") from None


def decode(raw: bytes | memoryview, peer: str) -> Message:
    """The message in `raw`, which `peer` sent. Raises MessageError."""
    with _dropped(peer, f"message from {short_peer(peer)}"):
        data = framing.unpack_message(bytes(raw))
        kind = data.pop("t", None) if isinstance(data, dict) else None
        if not isinstance(kind, str) or kind not in TYPES:
            raise SchemaError("t", "is not a known message type")
        cls = TYPES[kind]
        message: Message = build(cls, data, ignore_unknown=True)
        return message


def expect(cls: type[T], message: Any, peer: str) -> T:
    """`message` if it is a `cls`. Raises MessageError."""
    if not isinstance(message, cls):
        raise MessageError(
            peer,
            f"message from {short_peer(peer)}: expected {cls.__name__}, got {type(message).__name__}; it was dropped",
        )
    return message


def encode_record(record: Record) -> bytes:
    """A record for disk and network. Raises LocalError if nobody could read it, which is a bug of this node."""
    try:
        raw = framing.pack_message({"c": packed(record.commit), "n": record.ballot, "v": record.votes})
        _record(raw)
    except (SchemaError, framing.FrameError) as error:
        raise LocalError(
            f"commit of round {record.commit.round}: nobody could read its record ({error});"
            " it was not written, tell the operator"
        ) from None
    return raw


def commit_in(raw: bytes) -> Commit:
    """The commit of a record that was checked before."""
    return _record(raw).commit


def _record(raw: bytes | memoryview) -> Record:
    data = framing.unpack_message(bytes(raw))
    if not isinstance(data, dict):
        raise SchemaError("record", "is not a map")
    fields = {"commit": data.get("c"), "ballot": data.get("n"), "votes": data.get("v")}
    record = build(Record, fields, ignore_unknown=True)
    if len(record.votes) > MAX_VOTES:
        raise SchemaError("votes", f"has {len(record.votes)} entries; at most {MAX_VOTES}")
    return record


def decode_record(raw: bytes | memoryview, peer: str) -> Record:
    """A record of `peer` with right signatures; enough voters are not checked. Raises MessageError."""
    with _dropped(peer, f"record from {short_peer(peer)}"):
        record = _record(raw)
    body = body_of(record.commit, record.ballot)
    if not all(identity.verify(voter, body, signed) for voter, signed in record.votes.items()):
        raise MessageError(peer, f"record from {short_peer(peer)}: a signature is wrong; it was dropped")
    return record


def decode_any(raw: bytes, peer: str) -> Message | Record:
    """A message or a record that `peer` sent. Raises MessageError."""
    with _dropped(peer, f"message from {short_peer(peer)}"):
        data = framing.unpack_message(raw)
    return decode(raw, peer) if isinstance(data, dict) and "t" in data else decode_record(raw, peer)


def seal(who: Identity, message: Message) -> bytes:
    body = encode(message)
    return framing.pack_message({"p": who.peer_id, "b": body, "s": who.sign(DOMAIN + body)})


def unseal(raw: bytes | memoryview) -> tuple[str, Message]:
    """(signer, message) of an envelope whose signature is right. Raises MessageError."""
    return unseal_signed(raw)[:2]


def unseal_signed(raw: bytes | memoryview) -> tuple[str, Message, bytes]:
    """The same, and the signature."""
    with _dropped("unknown", "envelope"):
        data = framing.unpack_message(bytes(raw))
    if not isinstance(data, dict):
        raise MessageError("unknown", "envelope: not a map; it was dropped")
    peer, body, signature = data.get("p"), data.get("b"), data.get("s")
    if not (isinstance(peer, str) and isinstance(body, bytes) and isinstance(signature, bytes)):
        raise MessageError("unknown", "envelope: fields are missing; it was dropped")
    if not identity.verify(peer, DOMAIN + body, signature):
        raise MessageError(peer, f"envelope of {shown(short_peer(peer))}: the signature is wrong; it was dropped")
    return peer, decode(body, peer), signature


@functools.lru_cache(maxsize=2048)
def unseal_announcement(raw: bytes, subkey: str | None, run: str) -> Announcement | None:
    """The announcement in an envelope, or None where it is not one of `run` signed by its peer, and by `subkey`."""
    try:
        signer, message = unseal(raw)
    except MessageError:
        return None
    if not isinstance(message, Announcement) or message.run != run:
        return None
    return message if signer == message.peer and subkey in (None, signer) else None
