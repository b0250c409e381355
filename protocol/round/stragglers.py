"""Straggler timeout of a round, and late-join slots (*seats*). Pure.

*Grace.* Nobody is late before the training time and GRACE_SHARE of it more. From then on the peers that have offered
are idle, and the tokens that they could train are the cost of waiting; the gain is the tokens that late replicas are
expected to bring. The round waits until the cost equals the gain, which is at most twice the cost of the best choice
(ski rental: Karlin et al., "Competitive snoopy caching", 1988). A member whose session has ended is waited for ABSENT
times as long as the slowest other replica took, at most.

*Seats.* A plan of a run with `timing.round_seconds` has a few seats: full replicas with a number and text of their own
that are not planned for a peer. The leader gives one (`TakeSeat`) to an unplanned peer that attests the whole state,
while SEAT_LEAST_SHARE of the training time is left. Its work counts by its tokens (docs/adr/0025-seats.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set

from protocol.planning import budget
from protocol.planning.allotment import HEADROOM
from protocol.planning.partition import Candidate
from protocol.round.attestations import Attestations
from protocol.round.chain_repair import ChainRoster
from protocol.round.offers import ReplicaStates
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.plan import ReplicaSpec
from protocol.wire.session import TakeSeat

GRACE_SHARE = 0.05
"""Share of the training time that everybody is waited for."""
ABSENT = 2.0
"""So many times the time of the slowest complete replica is waited for a peer without a session."""
OVERRUN = 0.03
"""Share of the training time by which the last inner step of who was planned may end too late: less than LEAST."""


def absent_timed_out(since: Collection[float], waited: float) -> bool:
    """Returns whether peers without a session are given up. since: seconds at which the others were complete."""
    return bool(since) and waited >= ABSENT * max(since)


def timed_out(
    manifest: Manifest, offered: Iterable[tuple[float, int]], late: Iterable[ReplicaSpec], waited: float
) -> bool:
    """Whether `late` replicas are given up, `waited` seconds into the round. offered: (seconds, tokens) of others."""
    seconds = manifest.timing.training_seconds
    if waited < (1 + GRACE_SHARE) * seconds:
        return False
    over = seconds * (HEADROOM if manifest.outer.overlap else 1.0)
    cost = sum(tokens / seconds * max(0.0, waited - max(when, over)) for when, tokens in offered)
    works = [replica.work for replica in late]
    worth = sum(manifest.train.tokens(work.steps, work.micro_batches) for work in works) / HEADROOM
    return cost >= worth


SEAT_LEAST_SHARE = 0.15
"""Share of a round's time to train that is left when a seat is given."""
SEAT_PATIENCE_SECONDS = 0.5
"""Seconds that a seat is waited for when all others have offered."""


def give_seat(
    manifest: Manifest, roster: ChainRoster, attestations: Attestations, peer: Candidate | None, waited: float
) -> TakeSeat | None:
    """The seat that a peer has or gets, `waited` seconds after the round began; None: it gets none."""
    seconds = manifest.timing.training_seconds
    if peer is None or roster.plan is None:
        return None
    if roster.seat_of(peer.peer) is None and waited <= (1 - SEAT_LEAST_SHARE) * seconds:
        claim_seat(manifest, roster, attestations, peer)
    number = roster.seat_of(peer.peer)
    if number is None:
        return None
    return TakeSeat(round=roster.plan.round, replica=number, seconds=max(0.0, seconds - waited))


def claim_seat(
    manifest: Manifest,
    roster: ChainRoster,
    attestations: Attestations,
    peer: Candidate | None,
    number: int | None = None,
) -> ReplicaSpec | None:
    """Takes the free seat `number`, or the first, for a peer that holds the whole state and has no other work."""
    plan, layers = roster.plan, manifest.model.n_layers
    if peer is None or plan is None or not plan.seats or not budget.holds_whole(manifest, peer.budget):
        return None
    forms = any(peer.peer in replica.peers for replica in plan.forming if replica.is_chain)
    if (
        roster.replica_of(peer.peer) is not None
        or forms
        or not attestations.holds(peer.peer, plan.round - 1, layout.shard_names(manifest.model))
    ):
        return None
    return roster.take_seat(peer.peer, layers, number)


def waits(
    manifest: Manifest,
    roster: ChainRoster,
    verdicts: ReplicaStates,
    newcomers: Set[int],
    waited: float,
    *,
    patient: bool = True,
) -> bool:
    """Whether a round waits for pending replicas: planned ones by `timed_out`, seats by SEAT_PATIENCE_SECONDS."""
    seconds = manifest.timing.training_seconds
    seats = roster.seats & verdicts.pending.keys()
    late = [replica for number, replica in verdicts.pending.items() if number not in seats]
    if verdicts.complete and not patient:
        late = [replica for replica in late if replica.number not in newcomers]
    if late:
        offered = ((verdicts.since[number], c.tokens) for number, c in verdicts.complete.items())
        return not timed_out(manifest, offered, late, waited)
    last = max(verdicts.since.values(), default=seconds)
    return bool(seats) and waited < min(
        (1 + GRACE_SHARE) * seconds, last + min(GRACE_SHARE * seconds, SEAT_PATIENCE_SECONDS)
    )
