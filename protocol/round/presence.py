"""Who is there, as a bootstrap node sees it. Pure: `now` is a time on a steady clock, in seconds.

A peer is *ready* while it is announced and gives signs of life. It is *absent* when its session ended and was not
opened again for some heartbeats: a spare may take its place in a chain. It is *gone* when it gave no sign of life for
a lease (`gone_after`).

Its *presence* is the share of the rounds that it began in which it was still there at the end: what a plan of the next
round can expect of it. Who is there all day and away all night is planned all day.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping

from protocol.run.manifest import TimingSpec
from protocol.wire.plan import Plan

ABSENT_HEARTBEATS = 2
"""After so many heartbeats without a session a peer is absent."""
TRUSTED_ROUNDS = 20.0
"""A peer that nobody knows yet is taken to have stayed for so many rounds."""
REMEMBERED_ROUNDS = 200.0
"""What was about so many rounds ago counts a third of what is now."""
REMEMBERED_PEERS = 20_000


def absent(
    ready: Iterable[str], sessions: Collection[str], heard: Mapping[str, float], timing: TimingSpec, now: float
) -> frozenset[str]:
    """The `ready` peers without one of the open `sessions` that were `heard` too long ago to be back at once."""
    patience = ABSENT_HEARTBEATS * timing.heartbeat
    return frozenset(p for p in ready if p not in sessions and now - heard.get(p, now) > patience)


def gone(ready: Iterable[str], heard: Mapping[str, float], timing: TimingSpec, now: float) -> list[str]:
    """The `ready` peers that gave no sign of life for a lease."""
    return [p for p in ready if now - heard.get(p, now) > timing.gone_after]


class Final:
    """Who is waited for at the end of the run: the members of its last plan."""

    def __init__(self, plan: Plan | None, timing: TimingSpec) -> None:
        self._members = frozenset(p for r in (plan.replicas if plan else ()) for p in r.peers)
        self._timing = timing

    def waits(self, attested: Mapping[str, object], ready: Collection[str], waited: float) -> bool:
        """Whether somebody who has not attested the final state is waited for, so many seconds after it was decided: those that are gone
        not for long, and nobody for ever."""
        late = self._members - attested.keys()
        if waited >= self._timing.gone_after:
            late &= set(ready)
        return bool(late) and waited < self._timing.round_deadline


class Stays:
    """In which share of its rounds each peer stayed to the end, those of long ago counting less."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._there: set[str] = set()

    def begin(self, there: Iterable[str]) -> None:
        """A round begins with these peers; the one before has ended."""
        for peer in self._there:
            self._count(peer, 1.0)
        self._there = set(there)

    def lost(self, peer: str) -> None:
        """A peer is gone, or its session is, and the round goes on."""
        if peer in self._there:
            self._there.remove(peer)
            self._count(peer, 0.0)

    def of(self, peer: str) -> float:
        """The presence of `peer`, in 0..1."""
        stayed, rounds = self._known.get(peer, (0.0, 0.0))
        return (stayed + TRUSTED_ROUNDS) / (rounds + TRUSTED_ROUNDS)

    def _count(self, peer: str, stayed: float) -> None:
        before, rounds = self._known.pop(peer, (0.0, 0.0))
        kept = 1 - 1 / REMEMBERED_ROUNDS
        self._known[peer] = (kept * before + stayed, kept * rounds + 1)
        if len(self._known) > REMEMBERED_PEERS:
            self._known.popitem(last=False)
