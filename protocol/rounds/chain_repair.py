"""Who is in the chains of the open round: the plan, and what was reconfigured since. Part of the leader's machine, pure.

A member whose neighbour broke reports it (`ChainFailure`) and keeps its work. The leading node answers with a `ChainReconfig`: the chain's members
under the next *generation*, the number of chains that this replica has had in the round. The plan in the log stays as it is; who took
part is what the commit's contribution says. Of a chain that lost a member

    the member has offered             the inner steps are done: all are told to offer what they have
    a spare is ready                   takes the member's place; ready: it attested the state before the round and holds
                                       the stage's shards, and its memory is enough
    else, once per member and round    the same members again: it may be back, as it was or from its checkpoint
    else                               nobody: the chain ends its round, its members keep their work in the error feedback

Who died before its neighbours had streams to it is reported by nobody: the leading node replaces a member whose session is closed
for a while (protocol/rounds/leader.py) as soon as a spare is ready, and waits as long as there is none.

A stage that has become slow (protocol/planning/pipeline_model.py) is reported by the first one, and replaced if a spare is ready, else nothing happens.

A report of an older generation gets the present `ChainReconfig` again; the first report of an generation decides. Mends are repeated until every
member says that it follows, which all nodes hear: so whoever leads next knows them. A node that does not know of a reconfig takes
no harm: it ignores the spare's offers, and the replica is left out. Two that believe to lead may give one generation to two
chains: the members find each other only under the same names, report again, and the higher generation counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from protocol.wire.session import ChainReconfig

MAX_GENERATIONS = 32
"""A chain that broke so often in a round ends it."""
SLOW = "has become slow"
"""The reason of a report upon which nothing must be done."""


def reconfigured(plan: Plan, reconfig: ChainReconfig) -> Plan | None:
    """`plan` with the members that `reconfig` names; None where it does not allow them: each is the planned one or a spare."""
    if not 0 <= reconfig.replica < len(plan.replicas) or reconfig.round != plan.round:
        return None
    spec = plan.replicas[reconfig.replica]
    if not is_allowed(plan, spec, reconfig.peers) or len(spec.stages) < 2:
        return None
    stages = tuple(dataclasses.replace(s, peer=p) for s, p in zip(spec.stages, reconfig.peers, strict=True))
    replicas = list(plan.replicas)
    replicas[reconfig.replica] = dataclasses.replace(spec, stages=stages)
    return dataclasses.replace(plan, replicas=tuple(replicas))


def is_allowed(plan: Plan, spec: ReplicaSpec, peers: tuple[str, ...]) -> bool:
    """Whether these may be the members of `spec`: in each place the planned one or a spare of the plan, nobody twice."""
    return len(set(peers)) == len(peers) == len(spec.stages) and all(
        peer == stage.peer or peer in plan.spares for stage, peer in zip(spec.stages, peers, strict=True)
    )


class ChainRoster:
    """The chains of one round. `plan`: the round's, None where there is none."""

    def __init__(self, plan: Plan | None) -> None:
        self.plan = plan
        self.reconfigs: dict[int, ChainReconfig] = {}
        self.away: set[str] = set()
        """Who was replaced, or ended its chain, and was not heard since."""
        self._decided = plan
        self._retried: set[tuple[int, str]] = set()
        self._followers: set[tuple[int, int, str]] = set()

    def ended(self, replica: int) -> str | None:
        """Why this chain's round is over, if it is."""
        reconfig = self.reconfigs.get(replica)
        return reconfig.reason if reconfig is not None and not reconfig.peers else None

    def generation(self, replica: int) -> int:
        return self.reconfigs[replica].generation if replica in self.reconfigs else 0

    def heard(self, peer: str, reconfig: ChainReconfig) -> None:
        """`peer` follows `reconfig`, which may be news to this node; only who is known as a member can bring news."""
        if self._decided is None or not 0 <= reconfig.replica < len(self._decided.replicas):
            return
        members = reconfig.peers or self._decided.replicas[reconfig.replica].peers
        if peer not in members:
            return
        if reconfig.generation > self.generation(reconfig.replica) and peer in self.audience(reconfig.replica):
            self._set(reconfig)
        if self.reconfigs.get(reconfig.replica) == reconfig:
            self._followers.add((reconfig.replica, reconfig.generation, peer))

    def _set(self, reconfig: ChainReconfig) -> bool:
        assert self._decided is not None
        assert self.plan is not None
        if reconfig.round != self._decided.round:
            return False
        if reconfig.peers:
            found = reconfigured(self._decided, reconfig)
            if found is None:
                return False
            replicas = list(self.plan.replicas)
            replicas[reconfig.replica] = found.replicas[reconfig.replica]
            self.plan = dataclasses.replace(self.plan, replicas=tuple(replicas))
        self.reconfigs[reconfig.replica] = reconfig
        self._followers = {who for who in self._followers if who[0] != reconfig.replica}
        return True

    def replace(
        self,
        replica: int,
        lost: str,
        reason: str,
        steps: int,
        suits: Callable[[str, StageSpec], bool],
    ) -> ChainReconfig | None:
        """What is to be done about the `lost` member, who did not offer; None where nothing is: it is waited upon. `suits`: whether
        a spare is ready for a stage. `steps` > 0: so many are done by all."""
        assert self.plan is not None
        spec = self.plan.replicas[replica]
        stage = spec.stage_of(lost)
        spare = next((s for s in self.plan.spares if self._is_free(s) and suits(s, stage)), None)
        if spare is None:
            return None
        self.away.add(lost)
        return self.again(replica, tuple(spare if p == lost else p for p in spec.peers), reason, steps)

    def _is_free(self, spare: str) -> bool:
        assert self.plan is not None
        return spare not in self.away and self.plan.replica_of(spare) is None

    def without_spare(self, replica: int, lost: str, reason: str, steps: int, may_return: bool) -> ChainReconfig:
        """The same members, once for each that is lost and may return; else the end of the chain's round."""
        assert self.plan is not None
        if may_return and (replica, lost) not in self._retried:
            self._retried.add((replica, lost))
            return self.again(replica, self.plan.replicas[replica].peers, reason, steps)
        self.away.add(lost)
        return self.again(replica, (), f"{reason}; no spare is ready", 0)

    def again(self, replica: int, peers: tuple[str, ...], reason: str, steps: int) -> ChainReconfig:
        """The same chain, or another one, under a new generation; the last one is the end of the chain's round."""
        assert self.plan is not None
        generation = self.generation(replica) + 1
        if generation >= MAX_GENERATIONS:
            peers, steps, reason = (), 0, f"its chain broke too often, the last time: {reason}"
        reconfig = ChainReconfig(
            round=self.plan.round,
            replica=replica,
            generation=generation,
            peers=peers,
            steps=steps,
            reason=reason[:200],
        )
        self._set(reconfig)
        return reconfig

    def unheard(self) -> list[tuple[str, ChainReconfig]]:
        """Who does not follow a reconfig yet."""
        assert self._decided is not None
        return [
            (peer, reconfig)
            for replica, reconfig in self.reconfigs.items()
            for peer in reconfig.peers or self._decided.replicas[replica].peers
            if (replica, reconfig.generation, peer) not in self._followers
        ]

    def audience(self, replica: int) -> tuple[str, ...]:
        """Everybody whom a reconfig of this chain concerns."""
        assert self._decided is not None
        assert self.plan is not None
        members = (*self._decided.replicas[replica].peers, *self.plan.replicas[replica].peers)
        return tuple(dict.fromkeys(members))
