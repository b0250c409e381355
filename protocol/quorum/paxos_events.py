"""Events and effects of the quorum (protocol/quorum/paxos.py), and the proposer's phases and transition table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from protocol.quorum.table import Row, Table, anywhere
from protocol.wire.ballot import Accept, Pledge, Prepare, Promise, QuorumMessage, Reject, Vote
from protocol.wire.commit import Commit, Part, Record, Share
from protocol.wire.encoding import MessageHead, RecordHead
from protocol.wire.session import Heartbeat, LogRequest


@dataclass(frozen=True, slots=True)
class Objection:
    """A fault of a commit. lie: it breaks a rule, else a doubt; again: a repeated doubt, treated as a lie."""

    reason: str
    lie: bool
    again: bool = False
    about: str = ""
    """The diverged peer that a doubt is about, which may attest other digests to the leader; else empty."""

    @property
    def accuses(self) -> bool:
        """Whether the leader is named to the operator."""
        return self.lie or self.again


class Phase(Enum):
    """The phase of a proposer in the open round."""

    IDLE = "idle"
    """Nothing, because it does not lead or has nothing to propose."""
    PREPARING = "preparing"
    """It asks the members to promise its ballot."""
    PLEDGING = "pledging"
    """It asks them to pledge a commit, so that no other one can be accepted in this ballot."""
    ACCEPTING = "accepting"
    """It asks them to accept a commit."""
    APPENDING = "appending"
    """The commit is decided and is being written to the log."""


@dataclass(frozen=True, slots=True)
class Proposed:
    """Event: the leader's machine wants this commit. Its `leader` and `members` are filled in by the quorum's."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Heard:
    """Event: another operator's node sent this. The head of a message that `Quorum.hears` refuses."""

    peer: str
    message: QuorumMessage | Heartbeat | MessageHead


@dataclass(frozen=True, slots=True)
class Learned:
    """Event: `peer` sent a record; the signatures of its voters are right. Its head, if it is not the next one."""

    peer: str
    record: Record | RecordHead


@dataclass(frozen=True, slots=True)
class Held:
    """Event: a payload is durable here."""

    digest: str


@dataclass(frozen=True, slots=True)
class Listed:
    """Event: a list of parts is durable here."""

    root: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Appended:
    """Event: an `Append` is durable."""

    record: Record


@dataclass(frozen=True, slots=True)
class Judged:
    """Event: the answer to `Judge`. unfair: the objection to the commit with this digest, None if there is none."""

    digest: str
    unfair: Objection | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: time passed. `due`: this node would propose the open round's commit now, if it led."""

    due: bool = False


@dataclass(frozen=True, slots=True)
class Save:
    """Effect: make this vote durable before anything that follows it is done."""

    vote: Promise


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: to another operator's node, if it can be reached; it is sent again while it matters."""

    peer: str
    message: QuorumMessage | Heartbeat | LogRequest


@dataclass(frozen=True, slots=True)
class SendLog:
    """Effect: send the log's records after round `after`."""

    peer: str
    after: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Effect: fetch this payload from one of `holders`; the answer is `Held`."""

    holders: tuple[str, ...]
    part: Part


@dataclass(frozen=True, slots=True)
class FetchList:
    """Effect: fetch this share's list of parts, if it is not here; the answer is `Listed`."""

    holders: tuple[str, ...]
    share: Share


@dataclass(frozen=True, slots=True)
class Judge:
    """Effect: examine a commit that `peer` proposes, of which all is held; the answer is `Judged`."""

    peer: str
    commit: Commit


@dataclass(frozen=True, slots=True)
class Refused:
    """Effect: tell the operator why a commit of `peer` gets no vote here; another node leads then."""

    peer: str
    round: int
    unfair: Objection


@dataclass(frozen=True, slots=True)
class Skipped:
    """Effect: tell the operator that `peer` leads and lets the round wait; another leads."""

    peer: str
    round: int


@dataclass(frozen=True, slots=True)
class Append:
    """Effect: make this record the durable next one of the log; the answer is `Appended`."""

    record: Record


@dataclass(frozen=True, slots=True)
class Decided:
    """Effect: this commit is the round's for ever, and it is in the log."""

    record: Record


@dataclass(frozen=True, slots=True)
class Leads:
    """Effect: whether this node leads from now on."""

    leads: bool


@dataclass(frozen=True, slots=True)
class Stalled:
    """Effect: too few members give signs of life to decide anything; `missing` is empty when it goes on."""

    missing: tuple[str, ...]


Event = Proposed | Heard | Learned | Held | Listed | Judged | Appended | Tick
Effect = Save | Send | SendLog | Fetch | FetchList | Judge | Refused | Skipped | Append | Decided | Leads | Stalled

_ROWS: tuple[Row[Phase], ...] = (
    Row(Phase.IDLE, None, Phase.PLEDGING, (), "we lead, ballot 0 is ours and still free, a commit is proposed"),
    Row(Phase.IDLE, None, Phase.PREPARING, (), "we lead, a commit is proposed, or accepted here"),
    Row(Phase.PREPARING, None, Phase.PREPARING, (Prepare,), "some have not answered, every RETRY_SECONDS"),
    Row(Phase.PREPARING, Promise, Phase.PLEDGING, (), "enough promised: the newest certified commit, or ours"),
    Row(Phase.PLEDGING, None, Phase.PLEDGING, (Accept,), "some have not answered, every RETRY_SECONDS"),
    Row(Phase.PLEDGING, Pledge, Phase.ACCEPTING, (), "enough have pledged it: their signatures go with it"),
    Row(Phase.PLEDGING, Promise, Phase.IDLE, (), "another commit was certified before; later again, with that"),
    Row(Phase.ACCEPTING, None, Phase.ACCEPTING, (Accept,), "some have not answered, every RETRY_SECONDS"),
    Row(Phase.ACCEPTING, Vote, Phase.APPENDING, (Append,), "enough have voted: the commit is decided"),
    *(
        Row(phase, Reject, Phase.IDLE, (), "a higher ballot is promised; later again, with a higher one")
        for phase in (Phase.PREPARING, Phase.PLEDGING, Phase.ACCEPTING)
    ),
    *(
        Row(phase, Judged, Phase.IDLE, (), "we find that the commit cannot be: more than f have certified it")
        for phase in (Phase.PLEDGING, Phase.ACCEPTING)
    ),
    *(
        Row(phase, Learned, Phase.APPENDING, (Append,), "the record is the next one of the log")
        for phase in (Phase.IDLE, Phase.PREPARING, Phase.PLEDGING, Phase.ACCEPTING)
    ),
    *(
        Row(phase, Leads, Phase.IDLE, (), "another node leads")
        for phase in (Phase.PREPARING, Phase.PLEDGING, Phase.ACCEPTING, Phase.APPENDING)
    ),
    Row(Phase.APPENDING, Appended, Phase.IDLE, (Decided,), "the next round begins"),
    Row(Phase.IDLE, Appended, Phase.IDLE, (Decided,), "the next round begins; who leads changed meanwhile"),
    Row(Phase.IDLE, Appended, Phase.IDLE, (SendLog,), "the commit was ours: the other nodes get the record"),
    anywhere(None, (Heartbeat,), "every `heartbeat` seconds, to all other nodes"),
    anywhere(Heard, (LogRequest,), "the sender is at a later round"),
    anywhere(Heard, (SendLog,), "the sender is at an earlier round"),
    anywhere(Learned, (LogRequest,), "records in between are missing"),
    anywhere(Tick, (Skipped,), "the leader lets the round wait that this node would decide"),
)
TABLE = Table("proposer", Phase, _ROWS)
