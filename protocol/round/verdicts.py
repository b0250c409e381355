"""What has become of each replica of the open round: complete, failed or pending. Part of the leader's machine, pure.

A replica is judged again only when something happened to one of its members. So an event costs the leader the same time however
many replicas there are; what is collected of all of them is collected once, for the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from protocol.wire.commit import Contribution, LeftOut
from protocol.wire.plan import Plan, ReplicaSpec

Judge = Callable[[ReplicaSpec], Contribution | str | None]
"""A replica -> what it contributes, why it has failed, or None while it is pending."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What judging goes by beside what happened to single peers. `wrong`: peers that diverged; whenever `all_anew` is another one, every
    replica is judged again."""

    plan: Plan | None
    wrong: Set[str] = frozenset()
    all_anew: object = None


class Verdicts:
    """By the replicas' numbers: what the `complete` ones contribute, why others have `failed`, and the `pending` ones; and `since` when
    each that was ever complete was so."""

    def __init__(self) -> None:
        self.complete: dict[int, Contribution] = {}
        self.failed: dict[int, str] = {}
        self.pending: dict[int, ReplicaSpec] = {}
        self.since: dict[int, float] = {}
        self._seen = Seen(None)
        self._of: dict[str, list[ReplicaSpec]] = {}
        self._touched: set[str] = set()

    def touch(self, peers: Iterable[str]) -> None:
        """Something happened to these peers."""
        self._touched.update(peers)

    def renew(self, seen: Seen, judge: Judge, waited: float) -> bool:
        """Judges the replicas of the plan, `waited` seconds after the round began: those to whose members something happened, or all of
        them where the plan is another one than the last time, or all are to be judged anew. Whether any verdict is another one now."""
        plan, before, self._seen = seen.plan, self._seen, seen
        todo: Iterable[ReplicaSpec]
        if plan is not before.plan or seen.all_anew != before.all_anew:
            self._of = {}
            self.complete, self.failed, self.pending = {}, {}, {}
            todo = plan.replicas if plan is not None else ()
            for replica in todo:
                for peer in replica.peers:
                    self._of.setdefault(peer, []).append(replica)
        else:
            touched = self._touched | (seen.wrong ^ before.wrong)
            todo = [replica for peer in touched for replica in self._of.get(peer, ())]
        self._touched.clear()
        return sum([self._enter(replica, judge(replica), waited) for replica in todo]) > 0

    def _enter(self, replica: ReplicaSpec, found: Contribution | str | None, waited: float) -> bool:
        """Whether that is news."""
        number = replica.number
        before = self.complete.get(number) or self.failed.get(number)
        if before == found and (before is not None or number in self.pending):
            return False
        for verdicts in (self.complete, self.failed, self.pending):
            verdicts.pop(replica.number, None)
        if found is None:
            self.pending[replica.number] = replica
        elif isinstance(found, str):
            self.failed[replica.number] = found
        else:
            self.complete[replica.number] = found
            self.since.setdefault(number, waited)
        return True

    def contributions(self) -> list[Contribution]:
        """Those of the complete replicas, in the order of the plan."""
        replicas = self._seen.plan.replicas if self._seen.plan is not None else ()
        return [self.complete[r.number] for r in replicas if r.number in self.complete]

    def in_turn(self) -> list[Contribution]:
        """The same in the order in which they were complete for the first time."""
        return sorted(self.contributions(), key=lambda c: self.since[c.replica])

    def left_out(self, waited: float) -> list[LeftOut]:
        """The others, after so many seconds."""
        late = f"no offer after {waited:.0f} s"
        return [LeftOut(replica=number, reason=reason) for number, reason in self.failed.items()] + [
            LeftOut(replica=number, reason=late) for number in self.pending
        ]
