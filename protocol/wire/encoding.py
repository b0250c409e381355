"""Messages and records as bytes, and signed envelopes.

    message    msgpack map {"t": type, ...fields}
    record     msgpack map {"c": commit, "n": ballot, "v": {peer: signature of its vote}}
    envelope   msgpack map {"p": peer, "b": message, "s": Ed25519 signature of DOMAIN and the message}

Unknown fields are ignored. A missing or ill-typed field is refused (`MessageError`).

What arrives is checked in the order of what that costs: length, kind, the kind's bounds (`limit_of`), then the known
fields. Unknown fields are not decoded, and have SPARE bytes. `head` gives what is read of a message or record before
the rest is decoded; a record's digest and signatures are checked before that, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from protocol import identity
from protocol.errors import LocalError, RemoteError, shown
from protocol.identity import Identity, short_peer
from protocol.wire import bounds, framing
from protocol.wire.announcement import Announcement, DirectoryMessage
from protocol.wire.ballot import Accept, Promise, QuorumMessage
from protocol.wire.claims import Claim
from protocol.wire.commit import DOMAIN, Commit, Record, vote_body
from protocol.wire.decree import DecreeMessage
from protocol.wire.framing import LARGEST, Cost
from protocol.wire.schema import AtMost, SchemaError, build, most, packed
from protocol.wire.session import NodeMessage, PeerMessage

MAX_VOTES = 16
SPARE = Cost(1024, 64)
"""What a message may have besides its known fields: those of a newer version, and its kind."""
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


@functools.cache
def limit_of(cls: Any) -> Cost:
    """The most that a message of this kind has."""
    return (most(cls) + SPARE).capped(LARGEST)


@typing.overload
def decode(raw: bytes | memoryview, peer: str, *, values: int = ...) -> Message: ...
@typing.overload
def decode(raw: bytes | memoryview, peer: str, *kinds: type[T], values: int = ...) -> T: ...
def decode(raw: bytes | memoryview, peer: str, *kinds: type[Any], values: int = LARGEST.values) -> Any:
    """The message in `raw`, which `peer` sent; one of `kinds`, if any are given. Raises MessageError.

    values: the most that a message has in this run, where that is less than its kind may have
    """
    with _dropped(peer, f"message from {short_peer(peer)}"):
        found = framing.entries(raw)
        return _built(_kind(found, len(raw), peer, kinds), found, values)


def _kind(found: Mapping[str, bytes], size: int, peer: str, kinds: tuple[type[Any], ...]) -> type[Any]:
    """Returns the kind of a message of `size` bytes, if it is one of `kinds` and not too long for it."""
    kind = framing.unpack_message(found.get("t", _NONE), limit=_LONGEST_KIND, values=1)
    if not isinstance(kind, str) or kind not in TYPES:
        raise SchemaError("t", "is not a known message type")
    cls = TYPES[kind]
    if kinds and cls not in kinds:
        raise MessageError(peer, f"message from {short_peer(peer)}: unexpected {cls.__name__}; it was dropped")
    limit = limit_of(cls)
    if size > limit.size:
        raise SchemaError(cls.__name__, f"has {size} bytes; at most {limit.size}")
    return cls


def _built(cls: Any, found: Mapping[str, bytes], values: int = LARGEST.values) -> Any:
    return build(cls, _known(_names(cls), found, min(limit_of(cls).values, values)), ignore_unknown=True)


_NONE = framing.pack_message(None)
_LONGEST_KIND = 64


def _known(names: Collection[str], found: Mapping[str, bytes], values: int = LARGEST.values) -> dict[str, Any]:
    """Decodes those of a map's `entries` that have these names, and no others. Raises FrameError."""
    known = {key: value for key, value in found.items() if key in names}
    fields: dict[str, Any] = framing.unpack_message(framing.joined(known), values=values)
    return fields


@functools.cache
def _names(cls: type) -> frozenset[str]:
    return frozenset(f.name for f in dataclasses.fields(cls))


def expect(cls: type[T], message: Any, peer: str) -> T:
    """`message` if it is a `cls`. Raises MessageError."""
    if not isinstance(message, cls):
        raise MessageError(
            peer,
            f"message from {short_peer(peer)}: expected {cls.__name__}, got {type(message).__name__}; it was dropped",
        )
    return message


def encode_record(record: Record) -> bytes:
    """Returns a record for disk and network. Raises LocalError if it exceeds a reader's limits, a bug of this node."""
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
    return _record_of(framing.entries(raw))


_RECORD = {"c": "commit", "n": "ballot", "v": "votes"}
"""The names of a record's fields as they travel."""


def _record_of(found: Mapping[str, bytes]) -> Record:
    fields = _known(_RECORD, found)
    return build(Record, {_RECORD[key]: value for key, value in fields.items()}, ignore_unknown=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitHead:
    """Fields of a commit that are read before the others."""

    run: bounds.RunId
    round: bounds.Round
    parent: bounds.RunId
    leader: bounds.PeerId = ""
    members: Annotated[tuple[bounds.PeerId, ...], AtMost(MAX_VOTES)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proof:
    """Fields of a record besides its commit."""

    ballot: bounds.Ballot
    votes: Annotated[dict[bounds.PeerId, bounds.Signature], AtMost(MAX_VOTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _BallotFields:
    """Fields of a message with a commit besides that."""

    round: bounds.Round
    ballot: bounds.Ballot


def commit_head(raw: bytes) -> CommitHead:
    """The first fields of a commit that was checked before."""
    return _commit_head(framing.entries(raw))


def commit_digest(raw: bytes) -> str:
    """The digest of a commit that was checked before."""
    return _commit_digest(framing.entries(raw))


def _commit_digest(found: Mapping[str, bytes]) -> str:
    return hashlib.sha256(DOMAIN + framing.joined({**found, "t": _COMMIT})).hexdigest()


_COMMIT = framing.pack_message("commit")


def _commit_head(found: Mapping[str, bytes]) -> CommitHead:
    fields = _known(_names(CommitHead), found, limit_of(CommitHead).values)
    return build(CommitHead, fields, where="commit", ignore_unknown=True)


class RecordHead:
    """A record whose commit is not decoded yet, and nothing of which is proved.

    commit: the commit's first fields
    ballot, votes: as in a Record; no signature was checked
    """

    def __init__(self, found: Mapping[str, bytes], raw: bytes, peer: str) -> None:
        self._found = found
        self._raw = raw
        self._peer = peer
        said = {_RECORD[key]: value for key, value in found.items() if key in _RECORD}
        proof = build(_Proof, _known(_names(_Proof), said, limit_of(_Proof).values), ignore_unknown=True)
        self.ballot, self.votes = proof.ballot, proof.votes
        self._entries = framing.entries(said.get("commit", _NONE))
        self.commit = _commit_head(self._entries)

    @functools.cached_property
    def digest(self) -> str:
        """The commit's, if its bytes are as `encode_record` writes them; else another one, which has no signature."""
        return _commit_digest(self._entries)

    @property
    def size(self) -> int:
        """Its bytes."""
        return len(self._raw)

    def count(self) -> int:
        """The number of its values, which is what it costs to decode. Raises MessageError."""
        with _dropped(self._peer, f"record from {short_peer(self._peer)}"):
            return framing.count(self._raw)

    @functools.cached_property
    def _is_signed(self) -> bool:
        body = vote_body(self.commit.run, self.commit.round, self.ballot, self.digest)
        return all(identity.verify(voter, body, signed) for voter, signed in self.votes.items())

    def check(self) -> None:
        """Raises MessageError if a signature is wrong."""
        if not self._is_signed:
            raise MessageError(
                self._peer, f"record from {short_peer(self._peer)}: a signature is wrong; it was dropped"
            )

    def whole(self) -> Record:
        """The whole record. Raises MessageError if a signature is wrong, or a field of the commit."""
        self.check()
        with _dropped(self._peer, f"record from {short_peer(self._peer)}"):
            record = _record_of(self._found)
            if record.commit.digest != self.digest:
                raise SchemaError("commit", "is not written as it was signed")
        return record


class MessageHead:
    """A message whose fields are not decoded yet.

    kind: what it is
    round, ballot, commit: of a message with a commit, and its commit's first fields
    """

    def __init__(self, found: dict[str, bytes], raw: bytes, peer: str, kinds: tuple[type[Any], ...]) -> None:
        self._found = found
        self._raw = raw
        self._peer = peer
        self.kind = _kind(found, len(raw), peer, kinds)
        self.round = self.ballot = -1
        self.commit: CommitHead | None = None
        if self.kind in WITH_COMMIT:
            fields = build(_BallotFields, _known(_names(_BallotFields), found, SPARE.values), ignore_unknown=True)
            self.round, self.ballot = fields.round, fields.ballot
            body = found.get("commit", _NONE)
            self.commit = None if body == _NONE else _commit_head(framing.entries(body))

    @property
    def size(self) -> int:
        """Its bytes."""
        return len(self._raw)

    def count(self) -> int:
        """The number of its values, which is what it costs to decode. Raises MessageError."""
        with _dropped(self._peer, f"message from {short_peer(self._peer)}"):
            return framing.count(self._raw)

    def whole(self) -> Message:
        """The message. Raises MessageError."""
        with _dropped(self._peer, f"message from {short_peer(self._peer)}"):
            message: Message = _built(self.kind, self._found)
            return message


WITH_COMMIT = (Accept, Promise)
"""Messages that have a commit."""


def head(raw: bytes | memoryview, peer: str, *kinds: type[Any]) -> MessageHead | RecordHead:
    """The head of a record, or of a message of one of `kinds`, if any are given, that `peer` sent. Raises
    MessageError."""
    data = bytes(raw)
    with _dropped(peer, f"message from {short_peer(peer)}"):
        found = framing.entries(data)
        return MessageHead(found, data, peer, kinds) if "t" in found else RecordHead(found, data, peer)


def record_head(raw: bytes | memoryview, peer: str) -> RecordHead:
    """The head of a record that `peer` sent. Raises MessageError."""
    with _dropped(peer, f"record from {short_peer(peer)}"):
        data = bytes(raw)
        return RecordHead(framing.entries(data), data, peer)


def decode_record(raw: bytes | memoryview, peer: str) -> Record:
    """A record of `peer` with right signatures; enough voters are not checked. Raises MessageError."""
    return record_head(raw, peer).whole()


def decode_any(raw: bytes, peer: str, *kinds: type[Any]) -> Message | Record:
    """A message, of one of `kinds` if any are given, or a record that `peer` sent. Raises MessageError."""
    return head(raw, peer, *kinds).whole()


def seal(who: Identity, message: Message) -> bytes:
    body = encode(message)
    return framing.pack_message({"p": who.peer_id, "b": body, "s": who.sign(DOMAIN + body)})


def unseal(raw: bytes | memoryview) -> tuple[str, Message]:
    """(signer, message) of an envelope whose signature is right. Raises MessageError."""
    return unseal_signed(raw)[:2]


def unseal_signed(raw: bytes | memoryview) -> tuple[str, Message, bytes]:
    """Returns the signer, the message and the signature."""
    with _dropped("unknown", "envelope"):
        data = _known("pbs", framing.entries(raw), SPARE.values)
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
