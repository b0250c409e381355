"""The run as of now, as plain data: what `potluck monitor --once --json` prints.

The classes are the schema, and docs/events.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peer import events
from peer.events import AnnouncedLoad, Contribution
from peer.ui import utilization
from peer.ui.logged import LoggedEvaluation, evaluations
from peer.ui.names import harmless_name
from protocol.ledger import schedule
from protocol.run.manifest import Manifest
from protocol.wire.announcement import Announcement
from protocol.wire.commit import Commit, Diverged, LeftOut
from protocol.wire.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPeer:
    """A peer's announcement, and its place in the plan."""

    peer: str
    """Its peer id."""
    name: str
    """What its owner calls it; others may have the same name. Letters, digits, spaces, `-`, `_` and `.` only."""
    version: int
    """The version of Potluck's protocol that it speaks."""
    addresses: tuple[str, ...]
    """The multiaddresses that it listens on."""
    memory_bytes: int
    """What Potluck may use there above an idle process."""
    up_bps: int
    """Bits per second that it can send."""
    down_bps: int
    """Bits per second that it can receive."""
    speed_flops: int
    """Floating-point operations a second that its training reached; 0 while that is unknown."""
    refused: int
    """How often it has refused somebody who used too much of it."""
    device: str
    """`cpu`, `cuda` or `mps`; `2 x cuda` where two of them are one peer; `bootstrap` for a bootstrap node."""
    reachable: str
    """How others reach it: `direct`, `mapped` by its router, `private` if that lets nobody in; empty while it is not known."""
    serial: int
    """Grows with each of its announcements: Unix time in milliseconds."""
    phase: str
    """What it does, in its own word."""
    round: int
    """Its round."""
    step: int
    """Its newest inner step in that round."""
    loss: float | None
    """Nats per token of that step."""
    bytes_sent: int
    """All bytes that it has sent since it was started, as of its last whole round."""
    bytes_received: int
    """All bytes that it has received since it was started, as of its last whole round."""
    bytes_written: int
    """All bytes that it has written to disk since it was started, as of its last whole round."""
    chain: AnnouncedLoad | None
    """Its newest inner step in a chain; null outside of one."""
    role: str
    """In the newest plan: `full`, `stage`, `joining` while it fetches what it will train, `spare`, or `waiting` where it is not named."""
    replica: int | None
    """The replica's number in that plan."""
    first: int | None
    """The first block that it trains."""
    last: int | None
    """The block after the last one that it trains."""
    rank: int | None
    """Values per token that cross the chain's boundaries; 0: all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenBottleneck:
    """What a chain waits for."""

    replica: int
    """The chain's number in the plan."""
    peer: str
    """The member that computes, or that receives over the link."""
    what: str
    """`computing`; or `forward`, `backward`: the link over which the member receives activations or gradients."""
    share: float
    """Of the time of an inner step, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCommit:
    """A decided round."""

    time: float
    """When it was decided, Unix seconds on its leader's clock."""
    digest: str
    """SHA-256 of the commit."""
    round: int
    """The decided round; 0 decides the first plan only."""
    contributions: tuple[Contribution, ...]
    """What enters the mean."""
    left_out: tuple[LeftOut, ...]
    """Replicas whose work does not, each with its reason."""
    diverged: tuple[Diverged, ...]
    """Peers whose digest of a shard after the round before differs from the majority's."""
    evaluations: tuple[LoggedEvaluation, ...]
    """What was measured of an earlier state, on text that nobody trains on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The run as of now."""

    run: str
    """The run's id."""
    name: str
    """The run's name in the manifest."""
    time: float
    """Now, Unix seconds."""
    round: int
    """The open round, or the last one where the run is finished; 0 before the first plan."""
    rounds: int
    """How many rounds the run has."""
    finished: bool
    """Whether the last round is committed."""
    log_digest: str | None
    """The digest of the newest commit: two who see the same have the same log."""
    plan: Plan | None
    """The newest plan."""
    peers: tuple[SeenPeer, ...]
    """Everybody who announces himself, bootstrap nodes too."""
    bottlenecks: tuple[SeenBottleneck, ...]
    """What each chain waits for, as far as its members announced it; nothing when the run is over."""
    commits: tuple[SeenCommit, ...]
    """The whole log."""


def snapshot(manifest: Manifest, commits: Sequence[Commit], peers: Mapping[str, Announcement], now: float) -> Snapshot:
    """From the run's log and everybody's newest announcement; `now`: Unix seconds."""
    plan = next((c.plan for c in reversed(commits) if c.plan is not None), None)
    head = commits[-1] if commits else None
    finished = schedule.is_over(manifest, head)
    return Snapshot(
        run=manifest.run_id,
        name=manifest.name,
        time=now,
        round=0 if head is None else head.round + (0 if finished else 1),
        rounds=schedule.last_round(manifest, head),
        finished=finished,
        log_digest=head.digest if head else None,
        plan=plan,
        peers=tuple(_peer(a, plan) for _, a in sorted(peers.items())),
        bottlenecks=() if finished else tuple(_bottlenecks(peers, plan)),
        commits=tuple(_commit(c) for c in commits),
    )


def _bottlenecks(peers: Mapping[str, Announcement], plan: Plan | None) -> list[SeenBottleneck]:
    out = []
    for replica in plan.replicas if plan is not None else ():
        reports = [a.chain if (a := peers.get(peer)) is not None else None for peer in replica.peers]
        found = utilization.bottleneck(
            [None if r is None else utilization.activity(events.announced_load(r)) for r in reports]
        )
        if found is not None and replica.is_chain:
            peer, share = replica.peers[found.position], round(found.share, 3)
            out.append(SeenBottleneck(replica=replica.number, peer=peer, what=found.what, share=share))
    return out


def _waits(plan: Plan | None, peer: str) -> str:
    """What a peer without a stage in the plan is there for."""
    if plan is not None and peer in plan.spares:
        return "spare"
    return "joining" if plan is not None and plan.held_by(peer) else "waiting"


def _peer(a: Announcement, plan: Plan | None) -> SeenPeer:
    number = plan.replica_of(a.peer) if plan is not None else None
    spec = plan.replica(number) if plan is not None and number is not None else None
    stage = spec.stage_of(a.peer) if spec is not None else None
    trains = None if spec is None else "stage" if spec.is_chain else "full"
    return SeenPeer(
        peer=a.peer,
        name=harmless_name(a.name),
        version=a.version,
        addresses=a.addresses,
        memory_bytes=a.memory_bytes,
        up_bps=a.up_bps,
        down_bps=a.down_bps,
        speed_flops=a.speed_flops,
        refused=a.refused,
        device=a.device,
        reachable=a.reachable,
        serial=a.serial,
        phase=a.phase,
        round=a.round,
        step=a.step,
        loss=a.loss,
        bytes_sent=a.bytes_sent,
        bytes_received=a.bytes_received,
        bytes_written=a.bytes_written,
        chain=events.announced_load(a.chain) if a.chain is not None else None,
        role=trains or _waits(plan, a.peer),
        replica=number,
        first=stage.first if stage is not None else None,
        last=stage.last if stage is not None else None,
        rank=spec.rank if spec is not None else None,
    )


def _commit(commit: Commit) -> SeenCommit:
    told = events.commit_of(commit)
    return SeenCommit(
        time=commit.time,
        digest=commit.digest,
        round=commit.round,
        contributions=told.contributions,
        left_out=commit.left_out,
        diverged=commit.diverged,
        evaluations=evaluations(commit),
    )
