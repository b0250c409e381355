"""Chains of the open round: the plan, and reconfigurations since. Part of the leader's machine, pure.

A member that loses a neighbour reports it (`ChainFailure`) and keeps its work. The leading node answers with a
`ChainReconfig`: the members under the next *generation*, the number of reconfigurations of this replica in the round.
The plan in the log stays as it is; the commit's contribution names the members. A chain that lost a member:

    a member has offered its stage    the inner steps are done: all are told to offer what they have
    a spare is ready                  takes the place: it attested the state, holds the shards, has the memory, and was
                                      not a member before
    else, once per member and round   the same members go on: the lost one may be back
    else                              the chain's round is over; members keep their work in the error feedback

An accused member (protocol/round/accusations.py) is replaced, or the chain's round is over. An absent member
(protocol/round/presence.py) that no neighbour reports, and a slow stage (protocol/planning/pipeline_model.py), are
replaced once a spare is ready. After MAX_GENERATIONS the chain's round is over.

The first report of a generation decides; a report of an older one is answered with the present `ChainReconfig`, which
is repeated until every member follows it. Members tell all nodes, so that the next leader knows it. The next plan keeps
a reconfigured chain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from protocol.identity import short_peer
from protocol.round.accusations import LIES
from protocol.round.offers import Offers
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from protocol.wire.session import ChainFailure, ChainReconfig

MAX_GENERATIONS = 32
"""A chain whose generation would reach this ends its round."""
SLOW = "has become slow"
"""The reason of a report that may remain without consequence: the chain still trains."""


def reconfigured(plan: Plan, reconfig: ChainReconfig) -> Plan | None:
    """`plan` with the members that `reconfig` names; None where `plan` does not allow them."""
    spec = plan.find(reconfig.replica)
    if spec is None or reconfig.round != plan.round or not spec.is_chain or not plan.allows(spec, reconfig.peers):
        return None
    if reconfig.steps > spec.work.steps:
        return None
    stages = tuple(dataclasses.replace(s, peer=p) for s, p in zip(spec.stages, reconfig.peers, strict=True))
    return plan.replaced(dataclasses.replace(spec, stages=stages))


class ChainRoster:
    """Chains of one round by replica number.

    plan: with the present members; reconfigs: the newest of each chain; away: lost peers
    """

    def __init__(self, plan: Plan | None) -> None:
        self.plan = plan
        self.reconfigs: dict[int, ChainReconfig] = {}
        self.away: set[str] = set()
        self.changes = 0
        self._index: tuple[Plan | None, dict[int, ReplicaSpec], dict[str, int]] | None = None
        self._logged = plan
        self._retried: set[tuple[int, str]] = set()
        self._served: set[str] = set()
        self._followers: set[tuple[int, int, str]] = set()
        self._seats: dict[str, int] = {}

    def find(self, replica: int) -> ReplicaSpec | None:
        return self._indexed()[0].get(replica)

    def versions(self, replica: int) -> tuple[ReplicaSpec | None, ReplicaSpec | None]:
        """The replica with this number as it was planned, and as it is now."""
        return self._logged.find(replica) if self._logged is not None else None, self.find(replica)

    def replica_of(self, peer: str) -> int | None:
        return self._indexed()[1].get(peer)

    def offered_by(self, peer: str, number: int) -> ReplicaSpec | None:
        """The replica of an offer: the named one if `peer` is a member (leaders may disagree), else its own."""
        named, own = self.find(number), self.replica_of(peer)
        if named is not None and peer in named.peers:
            return named
        return None if own is None else self.find(own)

    def _indexed(self) -> tuple[dict[int, ReplicaSpec], dict[str, int]]:
        """The replicas by number, and the first one of each peer."""
        if self._index is None or self._index[0] is not self.plan:
            replicas = self.plan.replicas if self.plan is not None else ()
            of = {peer: r.number for r in reversed(replicas) for peer in r.peers}
            self._index = (self.plan, {r.number: r for r in replicas}, of)
        return self._index[1:]

    def seat_of(self, peer: str) -> int | None:
        return self._seats.get(peer)

    @property
    def seats(self) -> set[int]:
        return set(self._seats.values())

    def take_seat(self, peer: str, layers: int, number: int | None = None) -> ReplicaSpec | None:
        """Gives `peer` the seat `number`, or the first free one; None if there is none. layers: of the model."""
        assert self.plan is not None
        taken = self.seats
        free = [s.number for s in self.plan.seats if s.number not in taken and number in (None, s.number)]
        found = self.plan.taken(free[0], (peer,), layers) if free else None
        if found is not None:
            self._seats[peer] = found.number
            self.plan = self.plan.seated(found)
        return found

    def ended(self, replica: int) -> str | None:
        reconfig = self.reconfigs.get(replica)
        return reconfig.reason if reconfig is not None and not reconfig.peers else None

    def generation(self, replica: int) -> int:
        return self.reconfigs[replica].generation if replica in self.reconfigs else 0

    def follows(self, peer: str, reconfig: ChainReconfig, is_sole: bool = False) -> None:
        """`peer` says that it follows `reconfig`. It may be news to this node; only a known member can bring news, and
        none to the `is_sole` leader of the round."""
        logged = self._logged.find(reconfig.replica) if self._logged is not None else None
        if logged is None or peer not in (reconfig.peers or logged.peers) or reconfig.generation > MAX_GENERATIONS:
            return
        is_newer = reconfig.generation > self.generation(reconfig.replica)
        if is_newer and not is_sole and peer in self.audience(reconfig.replica):
            self._adopt(reconfig)
        if self.reconfigs.get(reconfig.replica) == reconfig:
            self._followers.add((reconfig.replica, reconfig.generation, peer))

    def reported(self, peer: str, failure: ChainFailure) -> ChainReconfig | ReplicaSpec | None:
        """The answer to a report: a newer reconfiguration, the chain that has to change, or None."""
        spec, known = self.find(failure.replica), self.reconfigs.get(failure.replica)
        if spec is None or failure.generation > self.generation(failure.replica):
            return None
        is_member = peer in spec.peers
        if known is not None and (failure.generation < known.generation or not known.peers or not is_member):
            return known
        return spec if is_member and spec.is_chain else None

    def _adopt(self, reconfig: ChainReconfig) -> None:
        """Makes `reconfig` the newest one of its chain, unless the plan does not allow it."""
        assert self._logged is not None
        assert self.plan is not None
        if reconfig.round != self._logged.round:
            return
        if reconfig.peers:
            found = reconfigured(self._logged, reconfig)
            if found is None:
                return
            self.plan = self.plan.replaced(found.replica(reconfig.replica))
            self._served.update(reconfig.peers)
        self.reconfigs[reconfig.replica] = reconfig
        self.changes += 1
        self._followers = {who for who in self._followers if who[0] != reconfig.replica}

    def lost(
        self, peer: str, reason: str, must_go_on: bool, offers: Offers, suits: Callable[[str, StageSpec], bool]
    ) -> ChainReconfig | None:
        """Returns the new chain of `peer`; None: it waits. must_go_on: it does not wait without a spare."""
        replica = self.replica_of(peer)
        if replica is None or self.plan is None:
            return None
        spec = self.plan.replica(replica)
        if self.ended(replica) or not spec.is_chain:
            return None
        steps, text, lies = offers.steps(spec), f"peer {short_peer(peer)}: {reason}", reason.startswith(LIES)
        if offers.of(replica, peer) is not None:
            return self.renew(replica, spec.peers, text, steps) if must_go_on else None
        found = self.replace(replica, peer, text, steps, suits)
        if found is not None or not must_go_on:
            return found
        return self.go_on_without_spare(replica, peer, text, steps, may_return=not (lies or offers.has_failed(peer)))

    def replace(
        self,
        replica: int,
        lost: str,
        reason: str,
        steps: int,
        suits: Callable[[str, StageSpec], bool],
    ) -> ChainReconfig | None:
        """Replaces the member `lost` by a spare that `suits`, None if there is none. steps > 0: done by all."""
        assert self.plan is not None
        spec = self.plan.replica(replica)
        stage = spec.stage_of(lost)
        spare = next((s for s in self.plan.spares if self._is_free(s) and suits(s, stage)), None)
        if spare is None:
            return None
        self.away.add(lost)
        return self.renew(replica, tuple(spare if p == lost else p for p in spec.peers), reason, steps)

    def _is_free(self, spare: str) -> bool:
        """Returns whether `spare` is present and was no member in this round: a peer trains once a round."""
        assert self.plan is not None
        return spare not in self.away | self._served and self.plan.replica_of(spare) is None

    def go_on_without_spare(self, replica: int, lost: str, reason: str, steps: int, may_return: bool) -> ChainReconfig:
        """Keeps the members, once for each that is lost and may return; else ends the chain's round."""
        assert self.plan is not None
        if may_return and (replica, lost) not in self._retried:
            self._retried.add((replica, lost))
            return self.renew(replica, self.plan.replica(replica).peers, reason, steps)
        self.away.add(lost)
        return self.renew(replica, (), f"{reason}; no spare is ready", 0)

    def renew(self, replica: int, peers: tuple[str, ...], reason: str, steps: int) -> ChainReconfig:
        """Gives the chain a new generation with these members; without members its round is over."""
        assert self.plan is not None
        generation = self.generation(replica) + 1
        if generation >= MAX_GENERATIONS:
            peers, steps, reason = (), 0, f"its chain failed too often, the last time: {reason}"
        reconfig = ChainReconfig(
            round=self.plan.round,
            replica=replica,
            generation=generation,
            peers=peers,
            steps=steps,
            reason=reason[:200],
        )
        self._adopt(reconfig)
        return reconfig

    def not_following(self) -> list[tuple[str, ChainReconfig]]:
        """Returns members that have not confirmed their reconfiguration yet."""
        assert self._logged is not None
        return [
            (peer, reconfig)
            for replica, reconfig in self.reconfigs.items()
            for peer in reconfig.peers or self._logged.replica(replica).peers
            if (replica, reconfig.generation, peer) not in self._followers
        ]

    def audience(self, replica: int) -> tuple[str, ...]:
        """Returns the recipients of this chain's reconfiguration: its members by the log and those of now."""
        assert self._logged is not None
        assert self.plan is not None
        members = (*self._logged.replica(replica).peers, *self.plan.replica(replica).peers)
        return tuple(dict.fromkeys(members))
