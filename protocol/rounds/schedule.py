"""How long a run is: pure, from the manifest and the newest commit.

The manifest says it at first. The operators may decree otherwise (protocol/rounds/access.py), as long as the run goes on: then every commit
from that one on carries what they decreed. So whoever knows one commit knows it, and a commit that says something else is refused.
"""

from __future__ import annotations

from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit
from protocol.wire.decree import Enacted, Schedule


def of(manifest: Manifest, head: Commit | None) -> Schedule:
    """After `head`, None: at the beginning."""
    if head is None or head.schedule is None:
        return Schedule(rounds=manifest.rounds, total_steps=manifest.train.total_steps)
    return head.schedule


def is_over(manifest: Manifest, head: Commit | None) -> bool:
    """Whether no round comes after `head`."""
    return head is not None and head.round >= of(manifest, head).rounds


def after(head: Commit | None, decree: Enacted | None) -> Schedule | None:
    """What the commit after `head` carries, with this decree, if there is one."""
    if decree is not None and decree.decree.schedule is not None:
        return decree.decree.schedule
    return None if head is None else head.schedule


def why_not(manifest: Manifest, head: Commit | None, wanted: Schedule) -> str | None:
    """Why the commit after `head` cannot set this; None if it can. The last round's commit sets nothing: nobody would plan what follows."""
    round, now = 0 if head is None else head.round + 1, of(manifest, head)
    if round >= now.rounds:
        return f"the run ends with round {now.rounds}, which is the last"
    if wanted.rounds <= round:
        return f"round {round} is open: the run needs at least {round + 1} rounds"
    if wanted.total_steps <= manifest.train.warmup_steps:
        return f"total_steps must be more than the {manifest.train.warmup_steps} of the warm-up"
    return None
