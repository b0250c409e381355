"""Everything that travels as a message: announcements, what peers and bootstrap nodes tell each other, commits.

On the wire a message is a msgpack map `{"t": type, …fields}`; unknown fields are ignored, a missing or ill-typed one is
refused (`MessageError`). What must be believed later, by others, is signed (Ed25519): an announcement is *sealed*,
`{"p": peer, "b": body, "s": signature of the domain and the body}`; a commit travels as a *record*, `{"c": body, "n": ballot,
"v": {peer: signature of the vote}}`. Units are in the names: bytes, bps (bits per second), seconds. Over 400 lines,
since all that travels is here.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any, TypeVar

from protocol import framing, identity
from protocol.errors import RemoteError, shown
from protocol.identity import Identity
from protocol.schema import SchemaError, build, plain

VERSION = 1
DOMAIN = b"potluck/1/"
MAX_VOTES = 16
MAX_SPEED = 10**18
"""Operations a second: more than any one machine."""
T = TypeVar("T")


class MessageError(RemoteError):
    """A peer sent what is not a message, or one with a wrong signature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainReport:
    """A chain member's last inner step. `times_ms`: of the step, computing, waiting for activations, for gradients, and those
    of receiving activations and gradients over its links; `counts`: bytes sent forward and backward, depth, most frames that
    waited. `activations`, `gradients`: running means of rms and largest magnitude and the refused frames, of what came
    from the previous and from the next stage; empty where there is none. What makes them: peer/pipeline.py, peer/stats.py.
    """

    times_ms: tuple[int, ...]
    counts: tuple[int, ...]
    activations: tuple[float, ...] = ()
    gradients: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if (len(self.times_ms), len(self.counts)) != (6, 4):
            raise ValueError("times_ms must have 6 entries and counts 4")
        if not {len(self.activations), len(self.gradients)} <= {0, 3}:
            raise ValueError("activations and gradients must have 3 entries each, or none")
        if min(*self.times_ms, *self.counts, *self.activations, *self.gradients) < 0:
            raise ValueError("no entry may be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What a peer says of itself in the DHT. `memory_bytes` is what Potluck may use above an idle process, `speed_flops` the
    floating-point operations a second that its training reached (protocol/speed.py), 0 while that is unknown; `chain`: of a
    member of a chain."""

    run: str
    peer: str
    version: int = VERSION
    addresses: tuple[str, ...] = ()
    memory_bytes: int = 0
    up_bps: int = 0
    down_bps: int = 0
    speed_flops: int = 0
    device: str = "cpu"
    serial: int = 0
    phase: str = "starting"
    round: int = 0
    step: int = 0
    loss: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    chain: ChainReport | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.speed_flops <= MAX_SPEED:
            raise ValueError(f"speed_flops must be in 0..{MAX_SPEED}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One peer's blocks `first <= i < last`. The stage with block 0 has `embed` too, the one with the last has `head`."""

    peer: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """One replica: a full peer (one stage) or a chain; `k` values per token at its boundaries, 0 = uncompressed."""

    k: int
    stages: tuple[StageSpec, ...]

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(stage.peer for stage in self.stages)

    @property
    def blocks(self) -> tuple[int, ...]:
        """How many blocks each stage has."""
        return tuple(stage.last - stage.first for stage in self.stages)

    def stage_of(self, peer: str) -> StageSpec:
        """The stage of a member. Raises ValueError for anybody else."""
        return self.stages[self.peers.index(peer)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who does what in `round`. `slot`: the first window of training text of the round (see protocol/assign.py)."""

    round: int
    slot: int
    replicas: tuple[ReplicaSpec, ...]
    spares: tuple[str, ...] = ()

    def replica_of(self, peer: str) -> int | None:
        """The index of the replica that `peer` is a member of."""
        for index, replica in enumerate(self.replicas):
            if peer in replica.peers:
                return index
        return None

    def stage_of(self, peer: str) -> StageSpec | None:
        """What `peer` trains, if anything."""
        replica = self.replica_of(peer)
        return None if replica is None else self.replicas[replica].stage_of(peer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One shard's payload: its digest (a blob's name, protocol/ranges.py), its bytes, and the L2 norm of what it sends."""

    shard: str
    digest: str
    size: int
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A stage's share of its replica's contribution to `round`."""

    round: int
    replica: int
    parts: tuple[Part, ...]
    tokens: int
    steps: int
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A leading node has this payload of `peer`'s offer to `round`, and it is valid: others may fetch it at once."""

    round: int
    peer: str
    part: Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """The sender cannot finish `round`; its replica sits out."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """The sender's chain, the `epoch`-th of its replica in `round`, lost `peer`; the sender keeps its work and waits for a Mend."""

    round: int
    replica: int
    epoch: int
    peer: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mend:
    """The members of a replica's chain from now on, under a new epoch (protocol/repair.py); nobody: its round is over. `steps` > 0:
    so many inner steps are done and no more are needed, offer them. A member sends it back when it follows."""

    round: int
    replica: int
    epoch: int
    peers: tuple[str, ...]
    steps: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attest:
    """The digests of the sender's shards after `round` was applied."""

    round: int
    digests: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A sign of life."""

    phase: str
    round: int
    step: int = 0
    loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Opens a session with a bootstrap node."""

    run: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Please send the commits after round `after`."""

    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The run is over and everybody's state was compared."""

    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One stage's parts within a contribution."""

    peer: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One replica's committed contribution; its weight in the mean is tokens / sum of tokens. A share may be a spare's of the
    round's plan, in the place of a member that was lost."""

    replica: int
    tokens: int
    steps: int
    loss: float | None
    shares: tuple[Share, ...]

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError("tokens must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A planned replica whose work is not in the commit, and why."""

    replica: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    """A peer whose digest of `shard` after the previous round differs from the majority's."""

    peer: str
    shard: str


@dataclass(frozen=True, kw_only=True)
class Commit:
    """What was decided for one round (round 0: the first plan only). `parent` is the previous commit's digest, the run
    id for round 0. `digests`: the majority's shard digests of the state *before* this round, as far as attested. `leader`
    proposed it; `members` decide the next round."""

    run: str
    round: int
    parent: str
    time: float
    contributions: tuple[Contribution, ...]
    left_out: tuple[LeftOut, ...]
    diverged: tuple[Diverged, ...]
    digests: dict[str, str]
    plan: Plan | None
    leader: str = ""
    members: tuple[str, ...] = ()

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(commit_body(self)).hexdigest()

    def includes(self, peer: str, parts: tuple[Part, ...]) -> bool:
        """Whether exactly these parts of `peer` were committed."""
        return any(s.peer == peer and s.parts == parts for c in self.contributions for s in c.shares)

    def payloads(self, shard: str) -> tuple[tuple[float, Part, str], ...]:
        """(weight, part, sender) of every committed payload of `shard`, in commit order."""
        total = sum(c.tokens for c in self.contributions)
        return tuple(
            (c.tokens / total, part, share.peer)
            for c in self.contributions
            for share in c.shares
            for part in share.parts
            if part.shard == shard
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Paxos, phase 1: please promise `ballot` for `round`."""

    round: int
    ballot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The answer, and a member's durable vote: the highest ballot that was promised, and the commit that was accepted last
    (in ballot `accepted`), if any."""

    round: int
    ballot: int = -1
    accepted: int = -1
    commit: Commit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """Paxos, phase 2: please accept `commit`."""

    round: int
    ballot: int
    commit: Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """The answer: the commit with this digest is accepted; the signature is over `vote_body`."""

    round: int
    ballot: int
    digest: str
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """The answer to a ballot that is too low."""

    round: int
    ballot: int
    promised: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A decided commit with its proof: the signatures of the members that accepted it in `ballot`."""

    commit: Commit
    ballot: int
    votes: dict[str, bytes]


Message = (
    Offer
    | Offered
    | Withdraw
    | Broken
    | Mend
    | Attest
    | Beat
    | Hello
    | Ask
    | Finished
    | Announcement
    | Prepare
    | Promise
    | Accept
    | Vote
    | Reject
)
_TYPES: dict[str, type] = {cls.__name__.lower(): cls for cls in Message.__args__}


def encode(message: Message) -> bytes:
    """A message as bytes; equal messages give equal bytes."""
    return framing.pack_message({"t": type(message).__name__.lower(), **plain(message)})


def decode(raw: bytes | memoryview, peer: str) -> Message:
    """The message in `raw`, which `peer` sent. Raises MessageError."""
    try:
        data = framing.unpack_message(bytes(raw))
        kind = data.pop("t", None) if isinstance(data, dict) else None
        if not isinstance(kind, str) or kind not in _TYPES:
            raise SchemaError("t", "is not a known message type")
        cls = _TYPES[kind]
        message: Message = build(cls, data, ignore_unknown=True)
        return message
    except (SchemaError, framing.FrameError) as error:
        raise MessageError(peer, f"message from {peer[-8:]}: {shown(error)}; it was dropped") from None


def expect(cls: type[T], message: Any, peer: str) -> T:
    """`message` if it is a `cls`. Raises MessageError."""
    if not isinstance(message, cls):
        raise MessageError(
            peer,
            f"message from {peer[-8:]}: expected {cls.__name__}, got {type(message).__name__}; it was dropped",
        )
    return message


def seal(who: Identity, message: Message) -> bytes:
    """A signed envelope."""
    body = encode(message)
    return framing.pack_message({"p": who.peer_id, "b": body, "s": who.sign(DOMAIN + body)})


def unseal(raw: bytes | memoryview) -> tuple[str, Message]:
    """(signer, message) of an envelope whose signature is right. Raises MessageError."""
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
        raise MessageError(peer, f"envelope of {shown(peer[-8:])}: the signature is wrong; it was dropped")
    return peer, decode(body, peer)


def unseal_announcement(raw: bytes, subkey: str, run: str) -> Announcement | None:
    """The announcement in a DHT record, or None where it is not one of `run` signed by `subkey`."""
    try:
        signer, message = unseal(raw)
    except MessageError:
        return None
    if not isinstance(message, Announcement) or not signer == message.peer == subkey or message.run != run:
        return None
    return message


def vote_body(run: str, round: int, ballot: int, digest: str) -> bytes:
    """What a vote's signature is over."""
    return DOMAIN + framing.pack_message(["vote", run, round, ballot, digest])


def commit_body(commit: Commit) -> bytes:
    """The bytes whose sha256 is the commit's digest."""
    return DOMAIN + framing.pack_message({"t": "commit", **plain(commit)})


def encode_record(record: Record) -> bytes:
    """A record as it is stored and sent."""
    return framing.pack_message({"c": plain(record.commit), "n": record.ballot, "v": record.votes})


def decode_record(raw: bytes | memoryview, peer: str) -> Record:
    """The record in `raw`, which `peer` sent; every signature in it is right. Whether its voters are a majority of the
    round's members is for whoever knows the commit before. Raises MessageError."""
    try:
        data = framing.unpack_message(bytes(raw))
        if not isinstance(data, dict):
            raise SchemaError("record", "is not a map")
        fields = {"commit": data.get("c"), "ballot": data.get("n"), "votes": data.get("v")}
        record = build(Record, fields, ignore_unknown=True)
    except (SchemaError, framing.FrameError) as error:
        raise MessageError(peer, f"record from {peer[-8:]}: {shown(error)}; it was dropped") from None
    commit = record.commit
    if len(record.votes) > MAX_VOTES:
        raise MessageError(peer, f"record from {peer[-8:]}: {len(record.votes)} votes; it was dropped")
    body = vote_body(commit.run, commit.round, record.ballot, commit.digest)
    for voter, signature in record.votes.items():
        if not identity.verify(voter, body, signature):
            raise MessageError(peer, f"record from {peer[-8:]}: a signature is wrong; it was dropped")
    return record


def decode_any(raw: bytes, peer: str) -> Message | Record:
    """A message or a record that `peer` sent. Raises MessageError."""
    try:
        data = framing.unpack_message(raw)
    except framing.FrameError as error:
        raise MessageError(peer, f"message from {peer[-8:]}: {shown(error)}; it was dropped") from None
    return decode(raw, peer) if isinstance(data, dict) and "t" in data else decode_record(raw, peer)


def is_decided(record: Record, members: tuple[str, ...]) -> bool:
    """Whether a majority of `members`, those that the commit before names, voted for it."""
    return 2 * len(set(record.votes) & set(members)) > len(members)
