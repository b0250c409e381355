"""How long a round waits for replicas that are late. Pure.

Nobody is late before the round's training time is over, and LEAST of it more: machines and lines are never quite as
expected, and in a large run the work of one replica alone would be worth no waiting at all. From then on everybody who has offered is idle, and the tokens
that they could train meanwhile are what the waiting costs. It is worth as many tokens as the late replicas are expected
to bring. How long they will take is not known. So the round waits until it has cost as much as it can bring: that is
never more than twice what waiting for the right time would have cost (the ski rental problem: Karlin, Manasse, Rudolph,
Sleator, "Competitive snoopy caching", 1988). Decoupled DiLoCo (arXiv:2604.21428) calls such a time an adaptive grace.

With `overlap` those who have offered go on with the next round, and are idle only when they have done all that they
were given for it: that is HEADROOM times what they have time for (protocol/planning/allotment.py).

A member whose session has ended, and that has not opened another one for some heartbeats (protocol/round/presence.py), is hardly there any
more. It is waited for no longer than ABSENT times as long as the slowest of the others took, however long the lease is: a process that
was killed holds up a short round for a short time only, and one whose line was cut in a long round has time to come back.

Work that comes too late is not lost: it stays in its sender's error feedback.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from protocol.planning.allotment import HEADROOM
from protocol.run.manifest import Manifest
from protocol.wire.plan import ReplicaSpec

LEAST = 0.05
"""Share of the training time that everybody is waited for."""
ABSENT = 2.0
"""So many times the time of the slowest complete replica is waited for a peer without a session."""
OVERRUN = 0.03
"""Share of the training time by which the last inner step of who was planned may end too late: less than LEAST."""


def is_over_for_absent(since: Collection[float], waited: float) -> bool:
    """Whether a round has waited long enough for peers without a session. `since`: after how many seconds each of the others was complete."""
    return bool(since) and waited >= ABSENT * max(since)


def is_over(
    manifest: Manifest, offered: Iterable[tuple[float, int]], late: Iterable[ReplicaSpec], waited: float
) -> bool:
    """Whether a round has waited long enough for the replicas that are `late`. `waited`: seconds since it began; `offered`: when
    each of the others was complete, in those seconds, and its tokens."""
    seconds = manifest.timing.training_seconds
    if waited < (1 + LEAST) * seconds:
        return False
    over = seconds * (HEADROOM if manifest.outer.overlap else 1.0)
    cost = sum(tokens / seconds * max(0.0, waited - max(when, over)) for when, tokens in offered)
    works = [replica.work for replica in late]
    worth = sum(manifest.train.tokens(work.steps, work.micro_batches) for work in works) / HEADROOM
    return cost >= worth
