"""Payloads of calls and streams between peers that are not messages of protocol/wire/encoding.py, and their decoder."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from protocol.errors import shown
from protocol.identity import short_peer
from protocol.wire import framing
from protocol.wire.bounds import MAX_SHARDS, Block, Count, PeerId, Reason, Round, RunId, Shard, Size, Word
from protocol.wire.encoding import MessageError, limit_of
from protocol.wire.schema import AtMost, SchemaError, build, packed, row

T = TypeVar("T")
MOST_STATES = 64


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class HeldState:
    """The sender serves these shards as they were after `round`."""

    round: Round
    shards: Annotated[tuple[Shard, ...], AtMost(MAX_SHARDS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Everything that a peer serves; it travels as the list."""

    held: Annotated[tuple[HeldState, ...], AtMost(MOST_STATES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentsRequest:
    """Please say where the moments of a shard are."""

    shard: Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentsAnswer:
    """They are a blob; without a name there are none."""

    blob: RunId = ""
    size: Size = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeHello:
    """Begins each stripe of a pipe between two stages (peer/chain/connect.py)."""

    round: Round
    generation: Count
    replica: Count
    stripe: Count


CALLS = (States, MomentsRequest, MomentsAnswer, PipeHello)


def read(cls: type[T], raw: bytes, peer: str, what: str) -> T:
    """The `cls` in `raw`, which `peer` sent; `what` names it in errors. Raises MessageError."""
    try:
        limit = limit_of(typing.cast(Any, cls))
        data = framing.unpack_message(raw, limit=limit.size, values=limit.values)
        return build(cls, {"held": data} if cls is States else data, ignore_unknown=True)
    except (framing.FrameError, SchemaError) as error:
        raise MessageError(peer, f"{what} of {short_peer(peer)}: {shown(error)}; it was dropped") from None


def write(value: object) -> bytes:
    """The inverse of `read`."""
    data = packed(value)
    return framing.pack_message(data["held"] if isinstance(value, States) else data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """A part of the giver's error feedback of `shard` for `heir`, which the giver keeps as a blob only."""

    serial: Count
    """Its number; the giver's later ones have larger numbers."""
    heir: PeerId
    """The peer that trains the shard now."""
    shard: Shard
    topk: Block
    """Entries of every 4096 in the payload (protocol/codec/sparse.py); all else of the codec is the run's."""
    blob: RunId
    """The payload's name (protocol/codec/blob_hash.py)."""
    size: Size
    """Its bytes."""
    given: bool = False
    """Whether it is the heir's. Until then the giver may take it back, and the heir must not add it."""

    def __post_init__(self) -> None:
        if self.serial < 1:
            raise ValueError("serial must be at least 1")


class Step(StrEnum):
    """The progress of the heir."""

    REFUSED = "refused"
    """It will not add this."""
    WAIT = "wait"
    """It is fetching the blob, or was given it and has not added it yet."""
    READY = "ready"
    """It has the blob, and has found nothing wrong with it."""
    TAKEN = "taken"
    """It has added it to its own feedback, durably."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverAnswer:
    """The heir's answer to a Handover."""

    step: Word
    """A Step."""
    reason: Reason = ""
    """Why it refuses."""
