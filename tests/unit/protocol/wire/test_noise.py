"""The handshake is the published one, and nothing but the next message of a conversation is taken."""

from __future__ import annotations

import pytest

from protocol.wire.noise import KEY, MAX_MESSAGE, TAG, Cipher, Handshake, NoiseError

PROLOGUE = bytes.fromhex("4a6f686e2047616c74")
INITIATOR = {
    "static": bytes.fromhex("e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1"),
    "fresh": bytes.fromhex("893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a"),
}
RESPONDER = {
    "static": bytes.fromhex("4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893"),
    "fresh": bytes.fromhex("bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b"),
}
HASH = "c8e5f64e846193be2a834104c2a009868d6c9f3bd3c186299888b488b2f1f58e"
SAID = [
    ("4c756477696720766f6e204d69736573",
     "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c79444c756477696720766f6e204d69736573"),
    ("4d757272617920526f746862617264",
     "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f14480884381cbad1f276e038c48378ffce2b65285e08d6b68aaa3629a5a86"
     "39392490e5b9bd5269c2f1e4f488ed8831161f19b7815528f8982ffe09be9b5c412f8a0db50f8814c7194e83f23dbd8d162c9326ad"),
    ("462e20412e20486179656b",
     "c7195ffacac1307ff99046f219750fc47693e23c3cb08b89c2af808b444850a80ae475b9df0f169ae80a89be0865b57f58c9fea0d4ec82a28642"
     "7402f113e4b6ae769a1d95941d49b25030"),
    ("4361726c204d656e676572", "96763ed773f8e47bb3712f0e29b3060ffc956ffc146cee53d5e1df"),
    ("4a65616e2d426170746973746520536179", "3e40f15f6f3a46ae446b253bf8b1d9ffb6ed9b174d272328ff91a7e2e5c79c07f5"),
    ("457567656e2042f6686d20766f6e2042617765726b",
     "eb3f3515110702e047a6c9da4478b6ead94873c11c0f2d710ddb3f09fce024b3a58502ae3f"),
]  # fmt: skip
"""Payloads and messages in turn: the vector of Noise_XX_25519_ChaChaPoly_SHA256 that cacophony published."""


def parties(prologue: bytes = PROLOGUE) -> tuple[Handshake, Handshake]:
    return (
        Handshake(initiator=True, prologue=PROLOGUE, **INITIATOR),
        Handshake(initiator=False, prologue=prologue, **RESPONDER),
    )


def shaken() -> tuple[Handshake, Handshake]:
    """Two that are done."""
    a, b = parties()
    b.read(a.write(b""))
    a.read(b.write(b""))
    b.read(a.write(b""))
    return a, b


def test_it_says_what_the_published_vector_says() -> None:
    a, b = parties()
    for turn, (payload, message) in enumerate(SAID[:3]):
        writer, reader = (b, a) if turn % 2 else (a, b)
        assert writer.write(bytes.fromhex(payload)).hex() == message
        assert reader.read(bytes.fromhex(message)).hex() == payload
    assert a.hash.hex() == b.hash.hex() == HASH
    assert (a.their_static, b.their_static) == (b.own_static, a.own_static)
    (a_sends, a_receives), (b_sends, b_receives) = a.ciphers, b.ciphers
    for turn, (payload, message) in enumerate(SAID[3:]):
        sends, receives = (a_sends, b_receives) if turn % 2 else (b_sends, a_receives)
        assert sends.seal(bytes.fromhex(payload)).hex() == message
        assert receives.open(bytes.fromhex(message)).hex() == payload


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_changed_handshake_fails_before_anything_can_be_sent(turn: int) -> None:
    """The first message is not sealed: what was changed in it shows in the second."""

    def shake(place: int) -> None:
        a, b = parties()
        for t in range(3):
            writer, reader = (b, a) if t % 2 else (a, b)
            message = bytearray(writer.write(bytes.fromhex(SAID[t][0])))
            if t == turn:
                message[place] ^= 1 << place % 7
            reader.read(bytes(message))

    for place in range(len(bytes.fromhex(SAID[turn][1]))):
        with pytest.raises(NoiseError):
            shake(place)


def test_a_handshake_that_is_cut_short_fails() -> None:
    for turn in range(3):
        a, b = parties()
        for t in range(turn + 1):
            writer, reader = (b, a) if t % 2 else (a, b)
            message = writer.write(b"")
            if t < turn:
                reader.read(message)
        for size in {0, 1, KEY - 1, len(message) - 1}:
            fresh = parties()
            for t in range(turn):
                writer, other = (fresh[1], fresh[0]) if t % 2 else (fresh[0], fresh[1])
                other.read(writer.write(b""))
            with pytest.raises(NoiseError):
                fresh[(turn + 1) % 2].read(message[:size])


def test_another_prologue_fails() -> None:
    a, b = parties(b"through another relay")
    b.read(a.write(b""))
    with pytest.raises(NoiseError):
        a.read(b.write(b""))


def test_a_key_that_gives_no_secret_fails() -> None:
    _, b = parties()
    b.read(bytes(KEY))
    with pytest.raises(NoiseError, match="no secret"):
        b.write(b"")


def test_a_message_out_of_turn_fails() -> None:
    a, b = parties()
    with pytest.raises(NoiseError, match="turn"):
        a.read(b"x" * 100)
    with pytest.raises(NoiseError, match="turn"):
        b.write(b"")
    a.write(b"")
    with pytest.raises(NoiseError, match="turn"):
        a.write(b"")
    with pytest.raises(NoiseError, match="not over"):
        _ = a.ciphers


def test_only_the_next_message_is_opened() -> None:
    (sends, _), (_, receives) = (party.ciphers for party in shaken())
    first, second, third = (sends.seal(b"message") for _ in range(3))
    assert receives.open(first) == b"message"
    for wrong in (first, third, second[:-1], second + b"x", b"", bytes([second[0] ^ 1]) + second[1:]):
        with pytest.raises(NoiseError):
            receives.open(wrong)
    assert receives.open(second) == b"message"


def test_directions_have_different_keys() -> None:
    (a_sends, a_receives), (b_sends, _) = (party.ciphers for party in shaken())
    with pytest.raises(NoiseError):
        a_receives.open(a_sends.seal(b"mirrored"))
    assert a_receives.open(b_sends.seal(b"answer")) == b"answer"


def test_sizes_are_bounded() -> None:
    with pytest.raises(NoiseError, match="at most"):
        Cipher(bytes(KEY)).seal(bytes(MAX_MESSAGE - TAG + 1))
    _, b = parties()
    with pytest.raises(NoiseError, match="at most"):
        b.read(bytes(MAX_MESSAGE + 1))
