"""What a bootstrap node tells. Units and numbering: peer/events."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.wire import commit as wire
from protocol.wire.announcement import Announcement


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """A bootstrap node listens and can be joined."""

    address: str
    """What a volunteer passes to `potluck join`: a multiaddress, `#`, and the run's id; empty while the machine has no address."""
    addresses: tuple[str, ...]
    """All multiaddresses that it listens on, the best one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Announcement):
    """A peer has a session with a bootstrap node, and announced what it offers; once more when that changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A peer has been silent for too long (`timing.gone_after`), announces itself no more, or has said that it leaves."""

    peer: str
    """Who."""


@dataclass(frozen=True, kw_only=True)
class Commit(wire.Commit):
    """A round is decided: whose updates enter the mean, and who trains what in the next round."""

    voters: tuple[str, ...] = ()
    """The bootstrap nodes whose votes are in the log; only `potluck monitor` tells them."""


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
