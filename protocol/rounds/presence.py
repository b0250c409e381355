"""Who is there, as a bootstrap node sees it. Pure: `now` is a time on a steady clock, in seconds.

A peer is *ready* while it is announced and gives signs of life. It is *absent* when its session ended and was not
opened again for some heartbeats: a spare may take its place in a chain. It is *gone* when it gave no sign of life for
a lease (`gone_after`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from protocol.run.manifest import TimingSpec

ABSENT_HEARTBEATS = 2
"""After so many heartbeats without a session a peer is absent."""


def absent(
    ready: Iterable[str], sessions: Collection[str], heard: Mapping[str, float], timing: TimingSpec, now: float
) -> frozenset[str]:
    """The `ready` peers without one of the open `sessions` that were `heard` too long ago to be back at once."""
    patience = ABSENT_HEARTBEATS * timing.heartbeat
    return frozenset(p for p in ready if p not in sessions and now - heard.get(p, now) > patience)


def gone(ready: Iterable[str], heard: Mapping[str, float], timing: TimingSpec, now: float) -> list[str]:
    """The `ready` peers that gave no sign of life for a lease."""
    return [p for p in ready if now - heard.get(p, now) > timing.gone_after]


def awaited(late: Collection[str], ready: Collection[str], timing: TimingSpec, waited: float) -> bool:
    """Whether the end of the run waits for the peers that have not attested its final state, `waited` seconds after it was decided:
    for those that are gone not for long, and for nobody for ever."""
    if waited >= timing.gone_after:
        late = set(late) & set(ready)
    return bool(late) and waited < timing.round_deadline
