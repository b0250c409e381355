"""Identities against libp2p's published encodings, and against forgeries."""

from __future__ import annotations

from pathlib import Path

import base58
import pytest

import bootstrap
import peer
import protocol
from peer.net import keyfile
from protocol.errors import LocalError
from protocol.identity import Identity, IdentityError, public_key, short_peer, verify


def test_equal_seeds_give_equal_peers_and_the_peer_id_holds_the_key() -> None:
    one, two = Identity(bytes(range(32))), Identity(bytes(range(32)))
    assert one.peer_id == two.peer_id
    assert one.peer_id.startswith("12D3Koo")
    raw = base58.b58decode(one.peer_id)
    assert raw[:6].hex() == "002408011220"
    assert public_key(one.peer_id).public_bytes_raw() == raw[6:]


def test_a_known_key_has_its_known_peer_id() -> None:
    # RFC 8032, test 1: secret key and public key.
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    public = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    identity = Identity(seed)
    assert base58.b58decode(identity.peer_id)[6:] == public
    assert identity.libp2p_bytes() == bytes.fromhex("08011240") + seed + public


def test_signatures() -> None:
    identity, other = Identity(b"a" * 32), Identity(b"b" * 32)
    signature = identity.sign(b"text")
    assert verify(identity.peer_id, b"text", signature)
    assert not verify(identity.peer_id, b"Text", signature)
    assert not verify(other.peer_id, b"text", signature)
    assert not verify(identity.peer_id, b"text", signature[:-1])
    assert not verify(identity.peer_id, b"text", b"")
    assert not verify("nobody", b"text", signature)


@pytest.mark.parametrize(
    "text",
    ["", "0", "nobody", "12D3Koo", "é" * 10, "1" * 52, "x" * 5000, "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"],
)
def test_what_is_no_peer_id(text: str) -> None:
    with pytest.raises(IdentityError):
        public_key(text)


def test_identity_files(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "deep" / "identity.key"
    made = keyfile.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert keyfile.load_or_create(path).peer_id == made.peer_id
    assert [p.name for p in path.parent.iterdir()] == ["identity.key"]
    assert Identity.from_libp2p(path.read_bytes()).sign(b"x") == made.sign(b"x")


@pytest.mark.parametrize("damage", [b"", b"rsa", b"\x08\x01\x12\x40" + b"x" * 64, b"\x08\x00\x12\x40" + b"x" * 64])
def test_broken_identity_files_are_refused(tmp_path, damage: bytes) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "identity.key"
    path.write_bytes(damage)
    with pytest.raises(IdentityError, match=r"identity\.key"):
        keyfile.load_or_create(path)


def test_an_identity_file_that_cannot_be_made(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="file"):
        keyfile.load_or_create(tmp_path / "file" / "identity.key")


def test_the_secret_is_not_printed() -> None:
    assert "secret" not in repr(Identity(b"secretsecretsecretsecretsecretse"))


def test_messages_name_peers_in_one_way() -> None:
    name = short_peer(Identity(bytes(32)).peer_id)
    assert len(name) == 8
    cut = [
        path.name
        for package in (bootstrap, peer, protocol)
        for path in Path(package.__path__[0]).rglob("*.py")
        if "[-8:]" in path.read_text()
    ]
    assert cut == ["identity.py"]
