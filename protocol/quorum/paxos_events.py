"""Events and effects of the quorum (protocol/quorum/paxos.py), and the proposer's phases and transition table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from protocol.quorum.table import Table, Transition
from protocol.quorum.unfair import Unfair
from protocol.wire.ballot import Accept, Confirmed, Holds, Pledge, Prepare, Promise, Reject, Vote
from protocol.wire.commit import Commit, Part, Record, Share
from protocol.wire.decree import Enacted
from protocol.wire.double_vote import DoubleVote
from protocol.wire.session import Heartbeat, LogRequest


class Phase(Enum):
    """What a node does about the round's commit, as a proposer."""

    IDLE = "idle"
    """Nothing, because it does not lead or has nothing to propose."""
    PREPARING = "preparing"
    """It asks the members to promise its ballot."""
    PLEDGING = "pledging"
    """Where members may lie: it asks them to pledge a commit, so that nobody can be asked to accept another one."""
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
    """Event: another operator's node sent this."""

    peer: str
    message: Prepare | Promise | Accept | Pledge | Vote | Reject | Heartbeat | Holds | Confirmed | DoubleVote


@dataclass(frozen=True, slots=True)
class Learned:
    """Event: `peer` sent a record; the signatures of its voters are right."""

    peer: str
    record: Record


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
    """Event: the answer to a `Judge`; `unfair`: what is wrong with the commit that has this digest, None where nothing is."""

    digest: str
    unfair: Unfair | None


@dataclass(frozen=True, slots=True)
class Ousted:
    """Event: enough of the other operators have signed the decree that takes one out."""

    enacted: Enacted


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
    message: (
        Prepare | Promise | Accept | Pledge | Vote | Reject | Heartbeat | LogRequest | Holds | Confirmed | DoubleVote
    )


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
    """Effect: find out whether this commit, of which all is here and for which `peer` asks for votes, is one that this node could have
    proposed; the answer is `Judged`."""

    peer: str
    commit: Commit


@dataclass(frozen=True, slots=True)
class Refused:
    """Effect: tell the operator that `peer` asked for votes for a commit that gets none here, and why. Where it led, another leads."""

    peer: str
    round: int
    unfair: Unfair


@dataclass(frozen=True, slots=True)
class Skipped:
    """Effect: tell the operator that `peer` leads and lets the round wait; another leads."""

    peer: str
    round: int


@dataclass(frozen=True, slots=True)
class Named:
    """Effect: a member has voted for two commits of one round, as this proves. Tell the operator, and the peers."""

    proof: DoubleVote


@dataclass(frozen=True, slots=True)
class Forked:
    """Effect: two commits of one round are decided, that of our log and `other`, and no signature proves who lied. Tell the operator, and show
    it to all peers. This node decides nothing any more."""

    other: Record


@dataclass(frozen=True, slots=True)
class Certified:
    """Effect: tell all peers that they may apply this commit, the last one of the log."""

    certificate: Confirmed


@dataclass(frozen=True, slots=True)
class Undo:
    """Effect: cut the log off after the last round that stays, keep the decree durably, and begin again (`Quorum.begin`)."""

    enacted: Enacted


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


Event = Proposed | Heard | Learned | Held | Listed | Judged | Appended | Ousted | Tick
Effect = (
    Save
    | Send
    | SendLog
    | Fetch
    | FetchList
    | Judge
    | Refused
    | Skipped
    | Named
    | Forked
    | Certified
    | Undo
    | Append
    | Decided
    | Leads
    | Stalled
)

_ROWS: tuple[Transition[Phase], ...] = (
    Transition(Phase.IDLE, None, Phase.ACCEPTING, (), "we lead, ballot 0 is ours and still free, a commit is proposed"),
    Transition(
        Phase.IDLE, None, Phase.PREPARING, (), "we lead, and a commit is proposed or was accepted here and not decided"
    ),
    Transition(Phase.IDLE, None, Phase.PLEDGING, (), "as for ACCEPTING, where members may lie"),
    Transition(Phase.PREPARING, Promise, Phase.PLEDGING, (), "the same"),
    Transition(Phase.PLEDGING, None, Phase.PLEDGING, (Accept,), "some have not answered, every RETRY_SECONDS"),
    Transition(Phase.PLEDGING, Pledge, Phase.ACCEPTING, (), "enough have pledged it: their signatures go with it"),
    Transition(Phase.PLEDGING, Promise, Phase.IDLE, (), "another commit was certified before; later again, with that"),
    Transition(Phase.PLEDGING, Reject, Phase.IDLE, (), "a higher ballot is promised; later again, with a higher one"),
    Transition(Phase.PLEDGING, Learned, Phase.APPENDING, (Append,), "the record is the next one of the log"),
    Transition(Phase.PLEDGING, Leads, Phase.IDLE, (), "another node leads"),
    Transition(Phase.PREPARING, None, Phase.PREPARING, (Prepare,), "some have not answered, every RETRY_SECONDS"),
    Transition(
        Phase.PREPARING,
        Promise,
        Phase.ACCEPTING,
        (),
        "a majority promised: the commit that was accepted in the highest ballot, else our own",
    ),
    Transition(Phase.PREPARING, Promise, Phase.IDLE, (), "a majority promised, and there is no commit to propose"),
    Transition(Phase.ACCEPTING, None, Phase.ACCEPTING, (Accept,), "some have not answered, every RETRY_SECONDS"),
    Transition(Phase.ACCEPTING, Vote, Phase.APPENDING, (Append,), "a majority voted: the commit is decided"),
    Transition(Phase.PREPARING, Reject, Phase.IDLE, (), "a higher ballot is promised; later again, with a higher one"),
    Transition(Phase.ACCEPTING, Reject, Phase.IDLE, (), "a higher ballot is promised; later again, with a higher one"),
    Transition(Phase.IDLE, Learned, Phase.APPENDING, (Append,), "the record is the next one of the log"),
    Transition(Phase.PREPARING, Learned, Phase.APPENDING, (Append,), "the record is the next one of the log"),
    Transition(Phase.ACCEPTING, Learned, Phase.APPENDING, (Append,), "the record is the next one of the log"),
    Transition(
        Phase.IDLE, None, Phase.APPENDING, (Append,), "we decide nothing, and the next one of the log counts by now"
    ),
    Transition(Phase.ACCEPTING, Judged, Phase.IDLE, (), "what another claims to have accepted is not fair"),
    Transition(Phase.APPENDING, Appended, Phase.IDLE, (Decided,), "the next round begins"),
    Transition(Phase.IDLE, Appended, Phase.IDLE, (Decided,), "the next round begins; who leads changed meanwhile"),
    Transition(Phase.IDLE, Appended, Phase.IDLE, (SendLog,), "the commit was ours: the other nodes get the record"),
    Transition(Phase.PREPARING, Leads, Phase.IDLE, (), "another node leads"),
    Transition(Phase.ACCEPTING, Leads, Phase.IDLE, (), "another node leads"),
    Transition(Phase.APPENDING, Leads, Phase.IDLE, (), "another node leads"),
    Transition(None, None, None, (Heartbeat,), "every `heartbeat` seconds, to all other nodes"),
    Transition(None, Heard, None, (LogRequest,), "the sender is at a later round"),
    Transition(None, Heard, None, (SendLog,), "the sender is at an earlier round"),
    Transition(None, Heard, None, (Confirmed,), "the same, and enough members have confirmed our last commit"),
    Transition(None, Learned, None, (LogRequest,), "records in between are missing"),
    Transition(
        None, Appended, None, (Holds,), "the commit has to be confirmed: the other nodes hear that it is in our log"
    ),
    Transition(
        None, None, None, (Confirmed,), "all members that give signs of life hold our last commit, or a grace is over"
    ),
    Transition(None, None, None, (Certified,), "enough members have confirmed our last commit"),
    Transition(None, Learned, None, (Named,), "it and our log prove that a member voted twice"),
    Transition(None, Heard, None, (Named,), "another node has such a proof"),
    Transition(None, None, None, (DoubleVote,), "the same: all other nodes get the proof"),
    Transition(
        None, Learned, None, (Forked,), "a member holds another decided commit than our log, and nothing proves a lie"
    ),
    Transition(None, Learned, None, (SendLog,), "a member holds another decided commit than our log: it gets ours"),
    Transition(None, Ousted, None, (Undo,), "the decree may come with the commit after the last round that stays"),
    Transition(None, Learned, None, (Undo,), "the record brings such a decree"),
    Transition(None, Heard, None, (Undo,), "the commit that we are asked to accept brings such a decree"),
    Transition(None, Tick, None, (Skipped,), "the leader lets the round wait that this node would decide"),
)
TABLE = Table("proposer", Phase, _ROWS)
