"""What a volunteer's machine (protocol/round/member.py) hears and says, its phases, and its transition table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from protocol.ledger.history import Stretch, Tip
from protocol.quorum.table import Row, Table, anywhere
from protocol.wire.commit import Commit, Record
from protocol.wire.encoding import Message
from protocol.wire.plan import Plan
from protocol.wire.session import (
    Attest,
    ChainFailure,
    ChainReconfig,
    Finished,
    Heartbeat,
    LogRequest,
    Offer,
    TakeSeat,
    TimeUp,
    Withdraw,
)


class Phase(Enum):
    """The phase of a peer."""

    WAITING = "waiting"
    """It waits for a commit, or for a plan that names it."""
    TRAINING = "training"
    """It does inner steps."""
    STOPPING = "stopping"
    """The inner steps are to end early, and their work is kept."""
    ENCODING = "encoding"
    """The round's work goes into the error feedback, and a payload is taken out of it."""
    APPLYING = "applying"
    """A commit's payloads are added to θ."""
    HOLDING = "holding"
    """It fetches or builds the shards that the plan wants it to hold."""
    DONE = "done"
    """The run is over."""


@dataclass(frozen=True, slots=True)
class Connected:
    """Event: a session with a bootstrap node has been opened."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Event: a record has arrived whose signatures are right."""

    record: Record


@dataclass(frozen=True, slots=True)
class LogCame:
    """Event: a part of the log has arrived that was asked for by ReadLog."""

    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class LogRead:
    """Event: the nodes have no more of the log, or cannot be asked now."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Event: the inner steps of `round` are done, or its time is over. loss: nats per token, None if unknown here."""

    round: int
    steps: int
    tokens: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class Failed:
    """Event: the training of `round` ended early, after `steps` complete inner steps."""

    round: int
    steps: int
    reason: str


@dataclass(frozen=True, slots=True)
class ChainFailed:
    """Event: our chain lost `peer`, our work is kept. With the reason SLOW the member is only slow."""

    round: int
    generation: int
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class UpdateEncoded:
    """Event: `offer` and its payloads are durable. Without an offer: the error feedback with the round's work is."""

    round: int
    offer: Offer | None


@dataclass(frozen=True, slots=True)
class Applied:
    """Event: the commit of `round` is applied to every shard that is held."""

    round: int


@dataclass(frozen=True, slots=True)
class ShardsHeld:
    """Event: the shards that the plan in the commit of `round` wants held are held."""

    round: int


@dataclass(frozen=True, slots=True)
class Digested:
    """Event: the {shard: digest} of the shards that were held after `round` are known."""

    round: int
    digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class Told:
    """Event: the bootstrap node `node` says this in its session. What moves a round is believed from the leader only;
    a Heartbeat says which turn the node is in."""

    node: str
    message: TimeUp | TakeSeat | ChainReconfig | Finished | Heartbeat


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: time passed."""


@dataclass(frozen=True, slots=True)
class TrainOrder:
    """Effect: do the inner steps of `plan.round` in `replica`; the answer is Trained or Failed.

    steps > 0: the others have done this many; resume: training goes on with new members
    total_steps: of a decreed schedule; idle: rounds before without work
    """

    plan: Plan
    replica: int
    generation: int = 0
    steps: int = 0
    resume: bool = False
    total_steps: int | None = None
    idle: int = 0


@dataclass(frozen=True, slots=True)
class Stop:
    """Effect: end the training of `round` at the next inner step; the answer is Trained or Failed all the same."""

    round: int


@dataclass(frozen=True, slots=True)
class EncodeUpdate:
    """Effect: e = β e + δ, e -= sent; payloads, then the offer durable; the answer is UpdateEncoded(offer)."""

    plan: Plan
    replica: int
    steps: int
    tokens: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class KeepInFeedback:
    """Effect: e = β e + δ for a round that sends nothing, durable; the answer is UpdateEncoded(None)."""

    round: int


@dataclass(frozen=True, slots=True)
class EndIn:
    """Effect: end the training of `round` with the last inner step within `seconds`, at least one; then Trained."""

    round: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RestoreFeedback:
    """Effect: put what `offer` would have sent back into the error feedback, e += sent. It has no answer."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class Apply:
    """Effect: add the commit's payloads to held shards, build those in `rebuild` from the log; then Applied comes."""

    commit: Commit
    rebuild: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HoldShards:
    """Effect: hold the shards of the commit's plan, after the commit; the answers are ShardsHeld, later Digested."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: send this to every bootstrap node with a session. What matters is sent again later."""

    message: Message


@dataclass(frozen=True, slots=True)
class ReadLog:
    """Effect: read what the log has after `tip`; the answers are LogCame, as often as something came, and LogRead."""

    tip: Tip


@dataclass(frozen=True, slots=True)
class Unbelieved:
    """Effect: warn the user that `node`, which does not lead, gives orders. Comes once for each node."""

    node: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Effect: the run is over; make the state durable and leave."""


LogEvent = Connected | Committed | LogCame | LogRead | Tick
TrainingEvent = Trained | Failed | ChainFailed
Event = LogEvent | TrainingEvent | Told | UpdateEncoded | Applied | ShardsHeld | Digested
TrainingEffect = TrainOrder | EndIn | Stop | EncodeUpdate | KeepInFeedback | RestoreFeedback
Effect = TrainingEffect | Apply | HoldShards | ReadLog | Send | Unbelieved | Finish


_ROWS: tuple[Row[Phase], ...] = (
    Row(Phase.WAITING, None, Phase.WAITING, (RestoreFeedback,), "its round is applied without our offer"),
    Row(Phase.WAITING, None, Phase.APPLYING, (Apply,), "the commit of round `applied` + 1 is known, the log is read"),
    Row(Phase.APPLYING, Applied, Phase.WAITING),
    Row(Phase.WAITING, None, Phase.HOLDING, (HoldShards,), "no newer commit, the log is read, the plan is new"),
    Row(Phase.HOLDING, ShardsHeld, Phase.WAITING),
    Row(Phase.WAITING, None, Phase.TRAINING, (TrainOrder, EndIn), "the plan names us"),
    Row(Phase.WAITING, TakeSeat, Phase.TRAINING, (TrainOrder, EndIn), "we came within the round, and hold the state"),
    Row(Phase.WAITING, None, Phase.TRAINING, (EndIn,), "the plan is the one that we train ahead by already"),
    Row(Phase.WAITING, None, Phase.ENCODING, (EncodeUpdate,), "the plan is the one that we trained ahead by"),
    Row(Phase.TRAINING, TimeUp, Phase.TRAINING, (EndIn,), "the round's time is over, and others have offered"),
    Row(Phase.TRAINING, Trained, Phase.ENCODING, (EncodeUpdate,)),
    Row(Phase.TRAINING, Failed, Phase.ENCODING, (Withdraw, KeepInFeedback)),
    Row(Phase.TRAINING, None, Phase.STOPPING, (Stop,), "the round's commit is known: we are too late"),
    Row(Phase.STOPPING, Trained, Phase.ENCODING, (KeepInFeedback,)),
    Row(Phase.STOPPING, Failed, Phase.ENCODING, (KeepInFeedback,)),
    Row(Phase.ENCODING, UpdateEncoded, Phase.WAITING, (Offer,), "the offer is durable"),
    Row(Phase.ENCODING, UpdateEncoded, Phase.WAITING, (), "nothing is offered, the feedback is durable"),
    Row(Phase.TRAINING, ChainFailed, Phase.TRAINING, (ChainFailure,), "our chain lost a member, or one is slow"),
    Row(Phase.TRAINING, ChainReconfig, Phase.TRAINING, (ChainReconfig, TrainOrder), "we are a new member"),
    Row(Phase.TRAINING, ChainReconfig, Phase.STOPPING, (Stop,), "a spare has taken our place"),
    Row(
        Phase.TRAINING,
        ChainReconfig,
        Phase.STOPPING,
        (ChainReconfig, Withdraw, Stop),
        "our chain broke, and is given up",
    ),
    Row(
        Phase.WAITING,
        ChainReconfig,
        Phase.TRAINING,
        (ChainReconfig, TrainOrder, EndIn),
        "a spare replaces a lost member",
    ),
    Row(Phase.WAITING, ChainReconfig, Phase.WAITING, (ChainReconfig, Withdraw), "we trained in this round already"),
    Row(Phase.WAITING, None, Phase.DONE, (Finish,), "the final state is attested, or the run was over before we came"),
    anywhere(Connected, (ReadLog,), "the log is not being read already"),
    anywhere(LogRead, (LogRequest,), "for what was decided since"),
    anywhere(Committed, (ReadLog,), "commits in between are missing"),
    anywhere(LogCame, (LogRequest,), "it does not follow what is known"),
    anywhere(Digested, (Attest,), "no later state is attested yet"),
    anywhere(ChainReconfig, (ChainReconfig,), "we follow it already, or our part of the round is done"),
    anywhere(Told, (Unbelieved,), "a node that does not lead has given orders in several rounds"),
    anywhere(Tick, (ChainFailure,), "our chain still waits for its reconfiguration"),
)
TABLE = Table("member", Phase, _ROWS)
