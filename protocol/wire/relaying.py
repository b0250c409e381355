"""What is said to open a relayed stream, and the form of what is sealed in it; docs/adr/0022-sealed-relays.md.

A -> relay   ask: the peer that is meant; then the first message of the handshake, which the relay passes on
relay -> A   answer: `here`, or why not; from then on it passes on whatever comes, both ways
A -> B       handshake of protocol/wire/noise.py: the second and third message carry the proof of who is there, the
             third also the name of what A wants
A <-> B      sealed records, numbered by their cipher: one byte that says what it is, then
             DATA bytes | CREDIT 4 bytes: so many more may be sent | PING | PONG | CLOSE nothing
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol import identity
from protocol.identity import Identity
from protocol.wire import framing
from protocol.wire.framing import FrameError
from protocol.wire.noise import TAG

DOMAIN = b"potluck relayed stream 1: static key "
"""Before the static key in what an identity signs."""
MAX_ASK = 256
MAX_HELLO = 1024
MAX_NAME = 64

HERE, ABSENT, FULL = "here", "absent", "full"
ANSWERS = {
    HERE: "passes on",
    ABSENT: "is not connected to that peer",
    FULL: "relays as much as it can",
}
"""What a relay may answer, for a reader."""

DATA, CREDIT, PING, PONG, CLOSE = range(5)
RECORD = 32 * 1024
MAX_RECORD = 1 + RECORD + TAG
WINDOW = 512 * 1024
"""Bytes of data under way in one direction, at most: what the relay may have to hold if the receiver does not read."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The sender's key, and the name of the wanted service: empty in the second message."""

    peer: str
    name: str


def pack_ask(peer: str) -> bytes:
    return framing.pack_message({"to": peer})


def ask_of(raw: bytes) -> str:
    """The peer that is meant. Raises FrameError."""
    match framing.unpack_message(raw, limit=MAX_ASK):
        case {"to": str(peer)}:
            return peer
    raise FrameError("relay: not an ask")


def pack_answer(state: str) -> bytes:
    return framing.pack_message({"state": state})


def answer_of(raw: bytes) -> str:
    """One of ANSWERS. Raises FrameError."""
    match framing.unpack_message(raw, limit=MAX_ASK):
        case {"state": str(state)} if state in ANSWERS:
            return state
    raise FrameError("relay: not an answer")


def prologue(relay: str) -> bytes:
    """The relay that both ends use; so a relay that forwards to another relay is detected."""
    return b"potluck/relayed/1 " + relay.encode()


def pack_hello(own: Identity, static: bytes, name: str = "") -> bytes:
    """The payload that proves that `static`, a public key, is `own`'s."""
    return framing.pack_message({"peer": own.peer_id, "signature": own.sign(DOMAIN + static), "name": name})


def hello_of(raw: bytes, static: bytes) -> Hello:
    """The inverse of `pack_hello`, with the signer of `static`. Raises FrameError."""
    match framing.unpack_message(raw, limit=MAX_HELLO):
        case {"peer": str(peer), "signature": bytes(signature), "name": str(name)} if len(name) <= MAX_NAME:
            if len(signature) == identity.SIGNATURE_BYTES and identity.verify(peer, DOMAIN + static, signature):
                return Hello(peer, name)
    raise FrameError("relayed stream: no proof of who is there")


def credit(size: int) -> bytes:
    """The body of a CREDIT record."""
    return size.to_bytes(4, "big")


def record_of(raw: bytes) -> tuple[int, bytes]:
    """Kind and body of an opened record. Raises FrameError."""
    kind, body = (raw[0], raw[1:]) if raw else (-1, b"")
    sizes = {DATA: range(1, RECORD + 1), CREDIT: (4,), PING: (0,), PONG: (0,), CLOSE: (0,)}
    if kind not in sizes or len(body) not in sizes[kind]:
        raise FrameError("relayed stream: not a record")
    return kind, body
