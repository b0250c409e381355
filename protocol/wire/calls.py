"""What small calls and streams between peers begin with or answer, besides messages (protocol/wire/encoding.py): read by the same decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar

from protocol.errors import shown
from protocol.identity import short_peer
from protocol.wire import framing
from protocol.wire.bounds import MAX_SHARDS, Count, Round, RunId, Shard, Size
from protocol.wire.encoding import MessageError
from protocol.wire.schema import AtMost, SchemaError, build, packed, row

T = TypeVar("T")
MOST_STATES = 256
"""Rounds of one answer."""


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
"""All of them."""


def read(cls: type[T], raw: bytes, peer: str, what: str) -> T:
    """The `cls` in `raw`, which `peer` sent; `what` names it in errors. Raises MessageError."""
    try:
        data = framing.unpack_message(raw)
        return build(cls, {"held": data} if cls is States else data, ignore_unknown=True)
    except (framing.FrameError, SchemaError) as error:
        raise MessageError(peer, f"{what} of {short_peer(peer)}: {shown(error)}; it was dropped") from None


def write(value: object) -> bytes:
    """The inverse of `read`."""
    data = packed(value)
    return framing.pack_message(data["held"] if isinstance(value, States) else data)
