"""Length of a run, and its limits for strangers: from the manifest and the newest commit. Pure.

A decree can change both (protocol/ledger/access.py); every later commit carries the change. A round whose commit has no
contribution is *idle*: the state is unchanged, so it takes no part of the learning rate's schedule, and the run has one
round more. Every commit carries the number of idle rounds. Round 0, which only plans, is not one of them.
"""

from __future__ import annotations

from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit
from protocol.wire.decree import Enacted, Limits, Schedule


def of(manifest: Manifest, head: Commit | None) -> Schedule:
    if head is None or head.schedule is None:
        return Schedule(rounds=manifest.rounds, total_steps=manifest.train.total_steps)
    return head.schedule


def limits(manifest: Manifest, now: Schedule | None) -> Limits:
    """Returns the limits of strangers by schedule `now`; None: none was decreed."""
    if now is not None and now.limits is not None:
        return now.limits
    said = manifest.admission
    return Limits(
        probation=said.probation, share=said.share, range_sessions=said.range_sessions, range_share=said.range_share
    )


def last_round(manifest: Manifest, head: Commit | None) -> int:
    """The number of the run's last round, if every round after `head` brings work."""
    return of(manifest, head).rounds + (0 if head is None else head.idle)


def is_over(manifest: Manifest, head: Commit | None) -> bool:
    return head is not None and head.round >= last_round(manifest, head)


def idle_after(manifest: Manifest, head: Commit | None, *, has_work: bool) -> int:
    """The idle rounds that the commit after `head` carries. Commits after the last round add none."""
    if head is None:
        return 0
    return head.idle + (not has_work and not is_over(manifest, head))


def steps_before(manifest: Manifest, round: int, idle: int) -> int:
    """Inner steps of the learning rate's schedule before `round`, before which so many rounds were `idle`."""
    return (round - 1 - idle) * manifest.train.inner_steps


def after(head: Commit | None, decree: Enacted | None) -> Schedule | None:
    """Returns the schedule in the commit after `head`, with this decree, if any."""
    if decree is not None and decree.decree.schedule is not None:
        return decree.decree.schedule
    return None if head is None else head.schedule


def why_not(manifest: Manifest, head: Commit | None, wanted: Schedule) -> str | None:
    """Why the commit after `head` cannot set this schedule; None if it can. The last commit sets none."""
    round, idle, last = (
        (0, 0, of(manifest, head).rounds) if head is None else (head.round + 1, head.idle, last_round(manifest, head))
    )
    if round >= last:
        return f"the run ends with round {last}, which is the last"
    if wanted.rounds + idle <= round:
        return f"round {round} is open: the run needs at least {round + 1 - idle} rounds"
    if wanted.total_steps <= manifest.train.warmup_steps:
        return f"total_steps must be more than the {manifest.train.warmup_steps} of the warm-up"
    return None


def misfit(manifest: Manifest) -> str | None:
    """A warning where the learning rate's cosine does not end with the run, for the operator; else None."""
    asked, inner = manifest.train.total_steps, manifest.train.inner_steps
    there = manifest.rounds * inner
    if asked == there:
        return None
    how = f"the learning rate is at its lowest after {asked / there:.2%} of the run"
    if asked > there:
        how = f"the run ends when the learning rate has gone {there / asked:.2%} of its way"
    return (
        f"train.total_steps: is {asked:,}, and {manifest.rounds:,} rounds of {inner:,} inner steps are"
        f" {there:,}, so {how}; write {there} before the run begins, unless that is meant"
    )
