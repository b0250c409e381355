"""What a volunteer's machine (protocol/rounds/member.py) hears and says, its phases, and its transition table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from protocol.rounds.table import Table, Transition
from protocol.wire.commit import Commit, Record
from protocol.wire.encoding import Message
from protocol.wire.plan import Plan
from protocol.wire.session import Attest, ChainFailure, ChainReconfig, LogRequest, Offer, Withdraw


class Phase(Enum):
    """What a volunteer is doing."""

    WAITING = "waiting"
    """For a commit, or for a plan that names it."""
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
    """A session with a bootstrap node is open."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A record arrived whose signatures are right."""

    record: Record


@dataclass(frozen=True, slots=True)
class Trained:
    """All inner steps of `round` are done."""

    round: int
    steps: int
    tokens: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class Failed:
    """Training of `round` ended early, after `steps` complete steps."""

    round: int
    steps: int
    reason: str


@dataclass(frozen=True, slots=True)
class ChainFailed:
    """The chain that trains `round`, the `generation`-th of its replica, lost `peer`, or `peer` is SLOW; our work is kept."""

    round: int
    generation: int
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reconfigured:
    """The leader says who the members of a chain are."""

    reconfig: ChainReconfig


@dataclass(frozen=True, slots=True)
class UpdateEncoded:
    """`offer` and its payloads are durable; without one, the error feedback is."""

    round: int
    offer: Offer | None


@dataclass(frozen=True, slots=True)
class Applied:
    """`round` is applied to every shard that is held."""

    round: int


@dataclass(frozen=True, slots=True)
class ShardsHeld:
    """The shards of the plan after `round` are held."""

    round: int


@dataclass(frozen=True, slots=True)
class Digested:
    """`digests`: of the shards that were held when `round` was arranged."""

    round: int
    digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class RunOver:
    """The leader says that the run is over."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class TrainOrder:
    """Effect: do the inner steps of `plan.round` as a member of replica `replica`; answer with Trained or Failed.

    `generation` is the number of chains that the replica had in this round before. `steps` > 0: the others have done this
    many inner steps and no more are needed. `resume`: the training is under way and goes on with the members that `plan`
    names now.
    """

    plan: Plan
    replica: int
    generation: int = 0
    steps: int = 0
    resume: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """Effect: end the training of `round` at the next step; it answers as usual."""

    round: int


@dataclass(frozen=True, slots=True)
class EncodeUpdate:
    """Effect: e = beta e + delta, payloads, e -= sent; the offer and its payloads durable; answer with UpdateEncoded(offer)."""

    plan: Plan
    replica: int
    steps: int
    tokens: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class KeepInFeedback:
    """Effect: e = beta e + delta of a round that sends nothing, durable; answer with UpdateEncoded(None)."""

    round: int


@dataclass(frozen=True, slots=True)
class RestoreFeedback:
    """Effect, done at once and in order: e += what `offer` would have sent."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class Apply:
    """Effect: add the commit's payloads to the shards that are held, rebuild those in `rebuild` from the log instead;
    answer with Applied."""

    commit: Commit
    rebuild: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HoldShards:
    """Effect: hold what the commit's plan wants held, at the state after the commit; answer with ShardsHeld, and sooner or later
    with Digested."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: send to every bootstrap node with a session; what matters is sent again later."""

    message: Message


@dataclass(frozen=True, slots=True)
class Finish:
    """Effect: the run is over; make the state durable and leave."""


Event = (
    Connected
    | Committed
    | Trained
    | Failed
    | ChainFailed
    | Reconfigured
    | UpdateEncoded
    | Applied
    | ShardsHeld
    | Digested
    | RunOver
    | Tick
)
Effect = TrainOrder | Stop | EncodeUpdate | KeepInFeedback | RestoreFeedback | Apply | HoldShards | Send | Finish


_ROWS: tuple[Transition[Phase], ...] = (
    Transition(
        Phase.WAITING,
        None,
        Phase.WAITING,
        (RestoreFeedback,),
        "our offer's round is applied, and its commit has not our offer",
    ),
    Transition(Phase.WAITING, None, Phase.APPLYING, (Apply,), "the commit of round `applied` + 1 is known"),
    Transition(Phase.APPLYING, Applied, Phase.WAITING),
    Transition(Phase.WAITING, None, Phase.HOLDING, (HoldShards,), "no newer commit is known, the plan is new"),
    Transition(Phase.HOLDING, ShardsHeld, Phase.WAITING),
    Transition(Phase.WAITING, None, Phase.TRAINING, (TrainOrder,), "the plan names us"),
    Transition(Phase.WAITING, None, Phase.TRAINING, (), "the plan is the one that we train ahead by already"),
    Transition(Phase.WAITING, None, Phase.ENCODING, (EncodeUpdate,), "the plan is the one that we trained ahead by"),
    Transition(Phase.TRAINING, Trained, Phase.ENCODING, (EncodeUpdate,)),
    Transition(Phase.TRAINING, Failed, Phase.ENCODING, (Withdraw, KeepInFeedback)),
    Transition(Phase.TRAINING, None, Phase.STOPPING, (Stop,), "the round's commit is known: we are too late"),
    Transition(Phase.STOPPING, Trained, Phase.ENCODING, (KeepInFeedback,)),
    Transition(Phase.STOPPING, Failed, Phase.ENCODING, (KeepInFeedback,)),
    Transition(Phase.ENCODING, UpdateEncoded, Phase.WAITING, (Offer,), "the offer is durable"),
    Transition(Phase.ENCODING, UpdateEncoded, Phase.WAITING, (), "nothing is offered, the feedback is durable"),
    Transition(Phase.TRAINING, ChainFailed, Phase.TRAINING, (ChainFailure,), "our chain lost a member, or one is slow"),
    Transition(
        Phase.TRAINING,
        Reconfigured,
        Phase.TRAINING,
        (ChainReconfig, TrainOrder),
        "we are among the chain's new members",
    ),
    Transition(Phase.TRAINING, Reconfigured, Phase.STOPPING, (Stop,), "a spare has taken our place"),
    Transition(
        Phase.TRAINING, Reconfigured, Phase.STOPPING, (ChainReconfig, Withdraw, Stop), "the chain's round is over"
    ),
    Transition(
        Phase.WAITING,
        Reconfigured,
        Phase.TRAINING,
        (ChainReconfig, TrainOrder),
        "we are a spare and take a lost member's place",
    ),
    Transition(Phase.WAITING, None, Phase.DONE, (Finish,), "the run is over and we attested its final state"),
    Transition(None, Committed, None, (LogRequest,), "commits in between are missing"),
    Transition(None, Digested, None, (Attest,), "no later state is attested yet"),
    Transition(None, Reconfigured, None, (ChainReconfig,), "we follow it already, or our part of the round is done"),
    Transition(None, Tick, None, (ChainFailure,), "our chain still waits for its reconfiguration"),
)
TABLE = Table("member", Phase, _ROWS)
