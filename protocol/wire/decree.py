"""Decisions of a run's operators: who may take part, how long the run is, and who operates it; and invitations.

A decree is in the commit that enacts it, signed by as many members of the quorum as a commit needs votes. So every
reader of the log can check it, and no single operator of several can make one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from protocol.wire import bounds
from protocol.wire.schema import AtMost, Within, row

BAN, ADMIT, OPEN, CLOSE, SET = "ban", "admit", "open", "close", "set"
APPOINT, DISMISS, QUORUM = "appoint", "dismiss", "quorum"
ACTIONS = (BAN, ADMIT, OPEN, CLOSE, SET, APPOINT, DISMISS, QUORUM)
"""`ban` keeps a peer out, `admit` lets it in again, or into a run that is closed; `open` lets everybody in who is not
banned, and `close` only who is admitted; `set` gives the run another schedule, or other limits. `appoint` makes
somebody an operator, `dismiss` ends that, `quorum` says how many of them decide (protocol/ledger/board.py)."""
OF_PEERS = (BAN, ADMIT, DISMISS)
LONGEST_REASON = 200
MAX_OPERATORS, MAX_APPOINTED, MAX_PLACES = 16, 7, 2
"""Of a run, of one decree, and addresses of one operator."""


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One of a run's operators."""

    peer: bounds.PeerId
    """The key of its node."""
    places: Annotated[tuple[bounds.Place, ...], AtMost(MAX_PLACES)] = ()
    """Where that is found, without the key; those of the manifest have no addresses here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The operators of a run, and the size of its quorum."""

    operators: Annotated[tuple[Operator, ...], AtMost(MAX_OPERATORS)]
    """All of them."""
    quorum: bounds.QuorumSize
    """How many of them decide a round."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(operator.peer for operator in self.operators)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits for strangers, as in the manifest's `admission`."""

    probation: bounds.Probation
    """The work of a newcomer has no weight for so many rounds."""
    share: bounds.PartOfAll
    """Of a round's weight, for one peer."""
    range_sessions: bounds.Sessions
    """With a node, for strangers from one range of addresses."""
    range_share: bounds.PartOfAll
    """Of what is planned, for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The length of a run, and the limits of strangers (protocol/ledger/schedule.py)."""

    rounds: bounds.Rounds
    """It is over after so many."""
    total_steps: bounds.Steps
    """The inner steps of the learning rate's schedule, as in the manifest's `train`."""
    limits: Limits | None = None
    """What strangers may have; None: what the manifest says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decree:
    """A decree; operators sign its message."""

    run: bounds.RunId
    number: bounds.Count
    """How many decrees the run has had before, so that none can be used twice."""
    action: bounds.Word
    """One of ACTIONS."""
    subject: bounds.PeerId = ""
    """The peer, where it is about one; else empty."""
    reason: Annotated[str, AtMost(LONGEST_REASON)] = ""
    schedule: Schedule | None = None
    """From the round after on, where it sets one."""
    operators: Annotated[tuple[Operator, ...], AtMost(MAX_APPOINTED)] = ()
    """Who is appointed; one who was before has other addresses from now on."""
    quorum: bounds.QuorumSize | None = None
    """How many operators decide from now on, where it says that."""

    @property
    def is_sound(self) -> bool:
        """Whether the action is one of ACTIONS and has the fields that it needs, and no others."""
        return self.action in ACTIONS and (
            (self.action in OF_PEERS) == bool(self.subject)
            and (self.action == SET) == (self.schedule is not None)
            and (self.action == APPOINT) == bool(self.operators)
            and (self.action == QUORUM) == (self.quorum is not None)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Enacted:
    """A decree with enough signatures (protocol/wire/encoding.py: of the domain and the decree as a message)."""

    decree: Decree
    """The decision."""
    signatures: Annotated[dict[bounds.PeerId, bounds.Signature], AtMost(16)]
    """The operators' signatures, by operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Motion:
    """A decree that an operator signed, `sealed`, for a node to gather signatures of; without one it only asks."""

    sealed: Annotated[bytes, AtMost(4096)] = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Motions:
    """A node's answer. number: of the next decree; wanted: signatures that it needs; signed: of what was sent."""

    number: bounds.Count
    wanted: bounds.Count
    schedule: Schedule
    board: Board
    signed: Annotated[tuple[bounds.PeerId, ...], AtMost(16)] = ()
    newest: Decree | None = None


MOST_GUESTS = 1000
"""Of one invitation."""
LONGEST_NOTE = 64
MAX_JOINED = 16


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """An operator's signed invitation of the first `count` peers that hold its key."""

    run: bounds.RunId
    key: bounds.PeerId
    """Its public key, which is what it is called by, too."""
    expires: bounds.Count
    """Unix seconds; it holds up to then."""
    count: Annotated[int, Within(1, MOST_GUESTS)]
    """How many peers it lets in."""
    reason: Annotated[str, AtMost(LONGEST_NOTE)] = ""
    """For whom or what, for a reader."""


@row
@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """One peer that it lets in, with all that shows it to anybody."""

    invitation: Invitation
    """The invitation."""
    operator: bounds.PeerId
    """Who has signed the invitation."""
    signature: bounds.Signature
    """The operator's."""
    peer: bounds.PeerId
    """Who comes in."""
    proof: bounds.Signature
    """The invitation's key's, for this peer and nobody else."""


DecreeMessage = Decree | Motion | Motions
