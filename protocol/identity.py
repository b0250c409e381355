"""Identity of a peer: an Ed25519 key pair. A peer id is libp2p's encoding of the public key, and contains it."""

from __future__ import annotations

import functools

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocol.errors import UsageError

SEED_BYTES = 32
SIGNATURE_BYTES = 64
_PUBLIC_PREFIX = bytes.fromhex("002408011220")
"""Identity multihash (0x00) of 0x24 bytes: protobuf {1: Ed25519, 2: 32 bytes}."""
_PRIVATE_PREFIX = bytes.fromhex("08011240")
"""Protobuf {1: Ed25519, 2: 64 bytes}: seed, then public key."""
_MAX_PEER_ID = 64


class IdentityError(UsageError, ValueError):
    """Not a peer id, or not an identity file, that Potluck can use."""


class Identity:
    """A key pair made from 32 secret bytes; equal seeds give equal peers."""

    __slots__ = ("_key", "_public", "_seed", "peer_id")

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise IdentityError(f"identity: the seed has {len(seed)} bytes; it must have {SEED_BYTES}")
        self._seed = bytes(seed)
        self._key = Ed25519PrivateKey.from_private_bytes(self._seed)
        self._public = self._key.public_key().public_bytes_raw()
        self.peer_id: str = base58.b58encode(_PUBLIC_PREFIX + self._public).decode()

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    def sign(self, data: bytes) -> bytes:
        """The 64-byte Ed25519 signature of `data`."""
        return self._key.sign(data)

    def libp2p_bytes(self) -> bytes:
        """The content of an identity file, 68 bytes; secret."""
        return _PRIVATE_PREFIX + self._seed + self._public

    @classmethod
    def from_libp2p(cls, data: bytes) -> Identity:
        """The inverse of `libp2p_bytes`. Raises IdentityError."""
        if len(data) != len(_PRIVATE_PREFIX) + 2 * SEED_BYTES or not data.startswith(_PRIVATE_PREFIX):
            raise IdentityError("identity: not an Ed25519 key in libp2p's format; remove the file to get a new one")
        start = len(_PRIVATE_PREFIX)
        identity = cls(data[start : start + SEED_BYTES])
        if identity.libp2p_bytes() != data:
            raise IdentityError("identity: its two halves do not belong together; restore it or remove the file")
        return identity


@functools.lru_cache(maxsize=4096)
def public_key(peer_id: str) -> Ed25519PublicKey:
    """The key inside a peer id. Raises IdentityError (a ValueError) if `peer_id` is no Ed25519 peer id."""
    try:
        raw = base58.b58decode(peer_id) if len(peer_id) <= _MAX_PEER_ID else b""
    except ValueError:
        raw = b""
    if len(raw) != len(_PUBLIC_PREFIX) + 32 or not raw.startswith(_PUBLIC_PREFIX):
        shown = peer_id if len(peer_id) <= _MAX_PEER_ID and peer_id.isprintable() else "(unprintable)"
        raise IdentityError(f"peer id {shown!r}: not an Ed25519 peer id; it looks like 12D3Koo…")
    return Ed25519PublicKey.from_public_bytes(raw[len(_PUBLIC_PREFIX) :])


def short_peer(peer_id: str) -> str:
    """Returns the name of a peer in messages: the last eight characters of its id, where ids differ."""
    return peer_id[-8:]


@functools.lru_cache(maxsize=1024)
def verify(peer_id: str, data: bytes, signature: bytes) -> bool:
    """Returns whether `signature` is `peer_id`'s signature of `data`; False too for what is no peer id."""
    try:
        public_key(peer_id).verify(signature, data)
    except (InvalidSignature, IdentityError):
        return False
    return True
