"""Changes that are prepared: new replicas whose members lack shards, and the replicas in whose place they will come. Pure.

A *change* is all replicas, of those that are and those that will be, which common members link. While a member of one that will be lacks
a shard, those that are train on as they are, and all members of those that will be fetch what they lack: a member may be in one of
each. When the last one has attested its shards, one plan puts the new ones in the place of the old ones. So nobody waits for a
newcomer or for a mover, and nobody is idle because of one. A change is given up when

    a member of a new replica has left, or has not enough memory any more
    it would bring fewer tokens per second than what is there       announcements have changed since
    it has not begun after FORMING_ROUNDS                           who keeps it from beginning rests for one plan
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from protocol.wire.plan import ReplicaSpec, StageSpec

FORMING_ROUNDS = 16
"""A change that has not begun after so many rounds is given up."""

Holds = Callable[[StageSpec], bool]
"""Whether a stage's peer has attested all shards that the stage needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`after` comes in the place of `before`; either may be empty. `since`: the round of the first plan that had it."""

    before: tuple[ReplicaSpec, ...]
    after: tuple[ReplicaSpec, ...]
    since: int

    @property
    def peers(self) -> frozenset[str]:
        """Everybody whom it concerns."""
        return frozenset(peer for replica in (*self.before, *self.after) for peer in replica.peers)

    def lacking(self, holds: Holds | None) -> set[str]:
        """The members of the new replicas that lack shards. `holds` None: nobody does."""
        return {s.peer for r in self.after for s in r.stages if holds is not None and not holds(s)}

    def begun(self) -> tuple[ReplicaSpec, ...]:
        """The new replicas; one with the members of an old one, in their order, has its number."""
        numbers = {replica.peers: replica.number for replica in self.before}
        return tuple(dataclasses.replace(r, number=numbers.get(r.peers, r.number)) for r in self.after)


def linked(before: Iterable[ReplicaSpec], after: Sequence[ReplicaSpec], since: Sequence[int]) -> list[Change]:
    """The changes that put `after`, planned since these rounds, in the place of `before`, apart as far as they have no member in common.
    One of `before` that has none with any of `after` is a change by itself."""
    old = tuple(before)
    replicas = (*old, *after)
    root = list(range(len(replicas)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = i = root[root[i]]
        return i

    first: dict[str, int] = {}
    for i, replica in enumerate(replicas):
        for peer in replica.peers:
            root[find(i)] = find(first.setdefault(peer, i))
    together: dict[int, list[int]] = {}
    for i in range(len(replicas)):
        together.setdefault(find(i), []).append(i)
    return [
        Change(
            before=tuple(old[i] for i in group if i < len(old)),
            after=tuple(after[i - len(old)] for i in group if i >= len(old)),
            since=min((since[i - len(old)] for i in group if i >= len(old)), default=0),
        )
        for group in together.values()
    ]
