"""Seats: how a newcomer trains in the round in which it comes. Pure.

Plans are made between rounds, for peers that hold the state by then. Who gets it just after a plan was made would wait for
nearly two rounds until its first work counts. So a plan in a run whose rounds have a length in time (`timing.round_seconds`)
has some seats: full replicas with a number and text of their own, for which nobody is planned yet. A peer in no replica of the
plan, nor in a chain that is forming, which attests the whole state before the round, is given a free seat by the leading node
(`TakeSeat`), as long as LEAST of the round's time is left. It trains until the round's time is over, offers, and counts by its
tokens as everybody else does. The next plan has it as the full replica that it is.

Nobody waits for a seat beyond PATIENCE. A seat that is not taken is nothing: no work, no text that was read, no entry in the
commit. The nodes that do not lead learn of a seat by the offer for it.
"""

from __future__ import annotations

from collections.abc import Set

from protocol.planning import budget
from protocol.planning.partition import Candidate
from protocol.round import grace
from protocol.round.attestations import Attestations
from protocol.round.chain_repair import ChainRoster
from protocol.round.verdicts import Verdicts
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.plan import ReplicaSpec
from protocol.wire.session import TakeSeat

LEAST = 0.15
"""Share of a round's time to train that is left when a seat is given."""
PATIENCE = 0.5
"""Seconds that a seat is waited for when all others have offered."""


def give(
    manifest: Manifest, roster: ChainRoster, attestations: Attestations, peer: Candidate | None, waited: float
) -> TakeSeat | None:
    """The seat that a peer is given now, so many seconds after the round began, or has been given; None: it gets none."""
    seconds = manifest.timing.training_seconds
    if peer is None or roster.plan is None:
        return None
    if roster.seat_of(peer.peer) is None and waited <= (1 - LEAST) * seconds:
        claim(manifest, roster, attestations, peer)
    number = roster.seat_of(peer.peer)
    if number is None:
        return None
    return TakeSeat(round=roster.plan.round, replica=number, seconds=max(0.0, seconds - waited))


def claim(
    manifest: Manifest,
    roster: ChainRoster,
    attestations: Attestations,
    peer: Candidate | None,
    number: int | None = None,
) -> ReplicaSpec | None:
    """A peer takes the free seat with this number, or the first one: as a replica. None where there is none, where the plan has work for
    it, and where it does not hold the whole state before the round."""
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
    verdicts: Verdicts,
    newcomers: Set[int],
    waited: float,
    *,
    patient: bool = True,
) -> bool:
    """Whether a round still waits for what is pending, so many seconds after it began: for planned replicas as protocol/round/grace.py
    says, for nothing but seats until PATIENCE after the last of the others was complete. `newcomers`: the numbers of their replicas;
    `patient`: whether they are waited for (protocol/round/newcomers.py)."""
    seconds = manifest.timing.training_seconds
    seats = roster.seats & verdicts.pending.keys()
    late = [replica for number, replica in verdicts.pending.items() if number not in seats]
    if verdicts.complete and not patient:
        late = [replica for replica in late if replica.number not in newcomers]
    if late:
        offered = ((verdicts.since[number], c.tokens) for number, c in verdicts.complete.items())
        return not grace.is_over(manifest, offered, late, waited)
    last = max(verdicts.since.values(), default=seconds)
    return bool(seats) and waited < min((1 + grace.LEAST) * seconds, last + min(grace.LEAST * seconds, PATIENCE))
