"""What two peers say when error feedback moves from one to the other: a call, which the giver repeats until it is done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from protocol.wire.bounds import Block, Count, PeerId, Reason, RunId, Shard, Size, Word


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """A part of the giver's error feedback of `shard`, for `heir`. The giver keeps it as a blob, and in no other place."""

    serial: Count
    """Its number; the giver's later ones have larger numbers."""
    heir: PeerId
    """The peer that trains the shard now."""
    shard: Shard
    """Of what."""
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
    """How far the heir is."""

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
    """What the heir says to a Handover."""

    step: Word
    """A Step."""
    reason: Reason = ""
    """Why it refuses."""
