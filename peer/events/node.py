"""What a bootstrap node tells. Units and numbering: peer/events."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.wire.commit import Diverged as DivergedShard
from protocol.wire.commit import LeftOut
from protocol.wire.decree import Limits
from protocol.wire.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """A bootstrap node listens and can be joined."""

    address: str
    """What a volunteer passes to `potluck join`: a multiaddress, `#`, and the run's id; empty while the machine has no address."""
    addresses: tuple[str, ...]
    """All multiaddresses that it listens on, the best one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A peer has a session with a bootstrap node, and announced what it offers; once more when that changes."""

    peer: str
    """Who."""
    memory_bytes: int
    """What Potluck may use there above an idle process."""
    up_bps: int
    """Bits per second that it can send."""
    down_bps: int
    """Bits per second that it can receive."""
    speed_flops: int
    """Floating-point operations a second that its training reached; 0 while that is unknown."""
    device: str
    """`cpu`, `cuda` or `mps`; `2 x cuda` where two of them are one peer."""
    reachable: str = ""
    """How others reach it: `direct`, `mapped` by its router, `private` if that lets nobody in; empty while it is not known."""
    name: str = ""
    """What its owner calls it, as announced; others may have the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A peer has been silent for too long (`timing.gone_after`), announces itself no more, or has said that it leaves."""

    peer: str
    """Who."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One replica's committed work, summed over its members."""

    replica: int
    """The replica's number in the round's plan."""
    tokens: int
    """Trained tokens; its weight in the mean is its share of all tokens."""
    steps: int
    """Inner steps."""
    loss: float | None
    """Nats per token of its first inner step, before the round changed anything; null if it is unknown."""
    bytes: int
    """Size of its payloads."""
    peers: tuple[str, ...]
    """Its members that contributed, in the order of the stages."""
    scale: float = 1.0
    """What its update is multiplied by; less than 1 where it is longer than others'."""
    standing: float = 1.0
    """What the log says of its members leaves of its weight (protocol/ledger/standing.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A round is decided: whose updates enter the mean, and who trains what in the next round."""

    round: int
    """The decided round; 0 decides the first plan only, and who may take part."""
    contributions: tuple[Contribution, ...]
    """What enters the mean."""
    left_out: tuple[LeftOut, ...]
    """Replicas whose work does not, each with its reason."""
    diverged: tuple[DivergedShard, ...]
    """Peers whose digest of a shard after the round before differs from the majority's."""
    plan: Plan | None
    """The next round's replicas, stages and spares; null after the last round, or while nobody is there."""
    leader: str = ""
    """The bootstrap node that proposed it."""
    voters: tuple[str, ...] = ()
    """The bootstrap nodes whose votes are in the log; only `potluck monitor` tells them."""
    rounds: int | None = None
    """How many rounds the run has now, where the operators have decreed it; null: as many as the manifest says."""
    operators: tuple[str, ...] | None = None
    """Who operates the run now, where the operators have decreed it; null: whom the manifest names."""
    quorum: int | None = None
    """How many of them decide rounds, where they have decreed that."""
    idle: int = 0
    """How many rounds brought no work so far: the run has so many more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainReconfigured:
    """A chain lost a member, and goes on with others. The leading node tells it; each member that follows repeats it."""

    round: int
    """The open round."""
    replica: int
    """The chain's number in the plan."""
    generation: int
    """How many times this chain was reconfigured in this round."""
    peers: tuple[str, ...]
    """Its members from now on, in the order of the stages; none: its round is over."""
    steps: int
    """If above 0: so many inner steps are done, and no more are needed."""
    reason: str = ""
    """Why, for a reader; empty where a member tells it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Blocks of a chain go from one stage to another, from this round on."""

    round: int
    """The first round with the new shape."""
    replica: int
    """The chain's number in the plan."""
    peers: tuple[str, ...]
    """Its members, in the order of the stages."""
    before: tuple[int, ...]
    """How many blocks each stage had."""
    after: tuple[int, ...]
    """How many blocks each stage has now."""
    reason: str
    """Why, for a reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attest:
    """A peer told the node the digests of its shards."""

    peer: str
    """Who."""
    round: int
    """The round after which its shards have these digests."""
    digests: dict[str, str]
    """SHA-256 by shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    """A peer's shard has other bits than the majority's."""

    peer: str
    """Who."""
    round: int
    """The round after which it differs."""
    shard: str
    """In what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayed:
    """A bootstrap node has passed on, or refused to pass on, what peers send each other who cannot connect; once a minute."""

    circuits: int
    """Streams that go through it now."""
    bytes: int
    """What it has passed on since its start."""
    bps: float
    """Bits per second in the last minute."""
    refused: int
    """How often it has said no since its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarrel:
    """A chain's member said that a neighbour sends lies. The two are no neighbours in later chains, whoever of them lied."""

    accuser: str
    """Who said it."""
    accused: str
    """Of whom."""
    reason: str
    """What it saw, for a reader."""
    out: tuple[str, ...]
    """Who is in no chain from now on, since it has quarrels with several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Somebody used more than it may of this process, which takes nothing more from it for a while."""

    peer: str
    """Who."""
    address: str
    """The network that it comes from; empty where that is not known."""
    reason: str
    """What it did, for a reader."""
    seconds: float
    """For how long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfair:
    """Another operator's node asks for votes for a commit that nobody honest proposes. It gets none here, and another node leads."""

    peer: str
    """Which node."""
    round: int
    """Of the commit."""
    reason: str
    """What is wrong with it, for a reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """Enough nodes voted for two commits of one round: more of them lie than the run bears, and no peer applies either
    (docs/failure-model.md)."""

    round: int
    """The round of both commits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decreed:
    """The operators have changed who may take part in the run, how long it is, or its limits (docs/guides/operator.md)."""

    round: int
    """Of the commit that says so; it holds from the next round on."""
    action: str
    """`ban` or `admit` one peer, `open` the run for all who are not banned, or `close` it for all who are not admitted;
    or `set` how long it is, and what strangers may have; or `appoint` or `dismiss` operators, or set their `quorum`."""
    peer: str | None
    """The peer that it is about, if it is about one."""
    reason: str
    """Why, for a reader."""
    operators: tuple[str, ...]
    """Who has signed it."""
    rounds: int | None = None
    """How many rounds the run has now, where that was set."""
    total_steps: int | None = None
    """The inner steps of the learning rate's schedule, where that was set."""
    limits: Limits | None = None
    """What strangers may have, where that was set."""
    appointed: tuple[str, ...] = ()
    """Who became an operator, or has other addresses."""
    quorum: int | None = None
    """How many operators decide from now on, where that was said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a peer says that it measured on held-out text."""

    peer: str
    """Who says so."""
    sequences: int
    """On so many held-out sequences."""
    loss: float
    """Nats per token."""
    bits_per_byte: float
    """The same per UTF-8 byte of text."""
    sample: str = ""
    """The beginning of the held-out text, `⇒`, and how the model goes on, as this peer says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A decided commit says how well the state after an earlier round foretells text that nobody trains on."""

    round: int
    """The round after which the state was measured."""
    evaluations: tuple[Evaluation, ...]
    """What each of those says who measured it; a later commit may have more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What a peer says that a contribution is worth."""

    replica: int
    """Whose contribution: the number of the replica in the round's plan."""
    assigned: float
    """By so much its update makes the loss less on text that the replica was given to train on, in nats per token."""
    other: float
    """The same on held-out text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The marks that a peer gives to contributions of a round."""

    peer: str
    """Who says so."""
    round: int
    """The round whose contributions they are."""
    marks: tuple[Mark, ...]
    """One for each that it was to score and could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A decided commit says what contributions of earlier rounds were worth."""

    round: int
    """The round of the commit."""
    scores: tuple[Score, ...]
    """What each of those says who scored them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invited:
    """A peer has come into the run by an invitation of an operator (docs/guides/operator.md)."""

    round: int
    """Of the commit that says so; it may take part from the next round on."""
    peer: str
    """Who."""
    operator: str
    """Who has signed the invitation."""
    invitation: str
    """The invitation's id, by which it can be ended."""
    reason: str
    """For whom or what it was made, for a reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leads:
    """A bootstrap node begins to lead the quorum, or no longer does."""

    leads: bool
    """Whether it leads now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """The run's last round is committed."""

    round: int
    """The last round."""
    state_digest: str | None
    """Digest of the final state if a majority attested all of it."""
