"""The Noise handshake XX and the ciphers that follow from it: Noise_XX_25519_ChaChaPoly_SHA256, without I/O.

    -> e                   each letter is a key that is sent, each pair a Diffie-Hellman exchange:
    <- e, ee, s, es        e is fresh for the handshake, s is a party's static key
    -> s, se               the first letter of a pair is the initiator's key

Every message carries a payload, which is encrypted from the second message on; `hash` binds all that was said before.
Source: The Noise Protocol Framework, revision 34 (Perrin, 2018); the tests use its published vectors. A static key
proves nothing by itself: a payload carries the signature of its owner (protocol/wire/relaying.py).
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from protocol.errors import PotluckError

NAME = b"Noise_XX_25519_ChaChaPoly_SHA256"
KEY = 32
TAG = 16
MAX_MESSAGE = 65535
_MESSAGES = (("e",), ("e", "ee", "s", "es"), ("s", "se"))
_LAST_NONCE = 2**64 - 2


class NoiseError(PotluckError):
    """Bytes that are not the next message of this conversation: changed, dropped, repeated or out of order."""


class Cipher:
    """One direction: every message has the next number, so that only the next one can be opened."""

    def __init__(self, key: bytes) -> None:
        self._cipher = ChaCha20Poly1305(key)
        self._number = 0

    def _nonce(self) -> bytes:
        if self._number > _LAST_NONCE:
            raise NoiseError("noise: too many messages under one key")
        return bytes(4) + self._number.to_bytes(8, "little")

    def seal(self, data: bytes, bound: bytes = b"") -> bytes:
        """`data` as a message of TAG bytes more. `bound`: what the other side must know too."""
        if len(data) + TAG > MAX_MESSAGE:
            raise NoiseError(f"noise: a message of {len(data)} bytes; at most {MAX_MESSAGE - TAG} are allowed")
        message = self._cipher.encrypt(self._nonce(), data, bound)
        self._number += 1
        return message

    def open(self, message: bytes | memoryview, bound: bytes = b"") -> bytes:
        """The inverse of `seal`. Raises NoiseError."""
        try:
            data = self._cipher.decrypt(self._nonce(), message, bound)
        except InvalidTag:
            raise NoiseError(f"noise: message {self._number} is not what was sent") from None
        self._number += 1
        return data


class Handshake:
    """One side of a handshake. static, fresh: 32-byte secret keys, `fresh` used once; prologue: shared context."""

    def __init__(self, *, initiator: bool, static: bytes, fresh: bytes, prologue: bytes) -> None:
        self._initiator = initiator
        self._keys = {
            "s": X25519PrivateKey.from_private_bytes(static),
            "e": X25519PrivateKey.from_private_bytes(fresh),
        }
        self._theirs: dict[str, bytes] = {}
        self._next = 0
        self._chain = self.hash = NAME  # exactly as long as a hash
        self._cipher: Cipher | None = None
        self._mix_hash(prologue)

    @property
    def own_static(self) -> bytes:
        return self._public("s")

    @property
    def their_static(self) -> bytes:
        return self._theirs["s"]

    def write(self, payload: bytes) -> bytes:
        """The next message, which is ours."""
        parts = []
        for token in self._turn(writes=True):
            if token == "e":
                parts.append(self._public("e"))
                self._mix_hash(parts[-1])
            elif token == "s":
                parts.append(self._seal(self._public("s")))
            else:
                self._mix_dh(token)
        parts.append(self._seal(payload))
        return b"".join(parts)

    def read(self, message: bytes) -> bytes:
        """The payload of the next message, which is theirs. Raises NoiseError, after which the handshake is over."""
        if len(message) > MAX_MESSAGE:
            raise NoiseError(f"noise: a message of {len(message)} bytes; at most {MAX_MESSAGE} are allowed")
        at = 0
        for token in self._turn(writes=False):
            if token in ("e", "s"):
                size = KEY if token == "e" else KEY + TAG
                piece, at = message[at : at + size], at + size
                if len(piece) != size:
                    raise NoiseError("noise: a message is cut short")
                if token == "e":
                    self._mix_hash(piece)
                self._theirs[token] = piece if token == "e" else self._open(piece)
            else:
                self._mix_dh(token)
        return self._open(message[at:])

    @property
    def ciphers(self) -> tuple[Cipher, Cipher]:
        """For what we send and for what we receive."""
        if self._next < len(_MESSAGES):
            raise NoiseError("noise: the handshake is not over")
        first, second = (Cipher(key) for key in _derive(self._chain, b""))
        return (first, second) if self._initiator else (second, first)

    def _turn(self, *, writes: bool) -> tuple[str, ...]:
        if self._next >= len(_MESSAGES) or (self._next % 2 == 0) != (writes == self._initiator):
            raise NoiseError("noise: a message out of turn")
        self._next += 1
        return _MESSAGES[self._next - 1]

    def _public(self, name: str) -> bytes:
        return self._keys[name].public_key().public_bytes_raw()

    def _mix_hash(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()

    def _mix_dh(self, token: str) -> None:
        ours, theirs = (token[0], token[1]) if self._initiator else (token[1], token[0])
        try:
            shared = self._keys[ours].exchange(X25519PublicKey.from_public_bytes(self._theirs[theirs]))
        except ValueError:  # a point of small order
            raise NoiseError("noise: a key that gives no secret") from None
        self._chain, key = _derive(self._chain, shared)
        self._cipher = Cipher(key)

    def _seal(self, data: bytes) -> bytes:
        message = data if self._cipher is None else self._cipher.seal(data, self.hash)
        self._mix_hash(message)
        return message

    def _open(self, message: bytes) -> bytes:
        data = message if self._cipher is None else self._cipher.open(message, self.hash)
        self._mix_hash(message)
        return data


def _derive(chain: bytes, secret: bytes) -> tuple[bytes, bytes]:
    """Two keys from a chaining key and a secret (HKDF)."""
    base = hmac.digest(chain, secret, "sha256")
    first = hmac.digest(base, b"\x01", "sha256")
    return first, hmac.digest(base, first + b"\x02", "sha256")
