"""Work of each replica of a plan: its number, text, inner steps, and micro-batches of a step.

All replicas train for `round_seconds`, each at its own pace, so the plan gives each the steps that it is expected to
have time for, and some more. Where fewer than FEWEST_STEPS whole steps would fit, a step gets fewer micro-batches.
Expected are

    the steps of the last round          FULL_SPEEDUP times as many if the replica did all that it was given
    else its members' announced speeds   the stages' seconds (protocol/planning/partition.py)
    else the most                        `inner_steps`

The text is a range of slots of its own (protocol/run/corpus.py). With `overlap` a plan also names the work of the round
after, and the next plan repeats it for every replica that stays as it is: so what was trained ahead counts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from protocol.planning.partition import Candidate, stage_seconds
from protocol.run.manifest import Manifest
from protocol.wire.plan import Plan, ReplicaSpec, Seat, Work

HEADROOM = 1.25
"""A replica is given so many times the steps that it is expected to do: its pace may rise by so much."""
FULL_SPEEDUP = 4
"""A replica that did all that it was given is expected to be so much faster."""
FEWEST_STEPS = 4
"""Every replica does about so many inner steps, if it has micro-batches for them: the rest of a step is lost time."""
REPLICAS_PER_SEAT = 8
"""Replicas of a plan, for which there is one seat more than one (protocol/round/stragglers.py)."""
MOST_SEATS = 32
NEW = -1
"""The number of a replica that has none yet."""


def allot(
    manifest: Manifest,
    round: int,
    replicas: Sequence[ReplicaSpec],
    spares: Sequence[str],
    there: Mapping[str, Candidate],
    previous: Plan | None = None,
    done: Mapping[int, int] | None = None,
) -> Plan:
    """The plan of `round` with these replicas; new ones have the number NEW.

    previous: the last plan with repaired chains; done: committed inner steps by replica; there: peers by id
    """
    number, slot = (previous.next_number, previous.next_slot) if previous is not None else (0, 0)
    planned: list[ReplicaSpec] = []
    for replica in replicas:
        if replica.number == NEW:
            replica = dataclasses.replace(replica, number=number)
            number += 1
        planned.append(replica)

    def fresh(steps: int, micro_batches: int) -> Work:
        nonlocal slot
        work = Work(slot=slot, steps=steps, micro_batches=micro_batches)
        slot += steps * micro_batches * manifest.train.rows
        return work

    known = {r.number: r for r in previous.replicas} if previous is not None else {}
    partly = {seat.number for seat in previous.seats} if previous is not None else set()
    shares: list[tuple[int, int]] = []
    for i, replica in enumerate(planned):
        before = known.get(replica.number)
        if replica.number in partly and step_seconds(manifest, replica, there) is not None:
            before = None  # who took a seat had a part of the round: its speed says more than what it did
        shares.append(share(manifest, replica, there, before, (done or {}).get(replica.number)))
        ahead = before.following if before is not None and before.is_like(replica) else None
        planned[i] = dataclasses.replace(replica, work=ahead or fresh(*shares[i]), following=None)
    if manifest.outer.overlap:
        planned = [dataclasses.replace(r, following=fresh(*s)) for r, s in zip(planned, shares, strict=True)]
    seats: list[Seat] = []
    if manifest.timing.round_seconds and planned:  # who takes one is given as much as whoever is given most
        most = max(r.work.steps for r in planned), max(r.work.micro_batches for r in planned)
        count = min(MOST_SEATS, 1 + len(planned) // REPLICAS_PER_SEAT)
        seats = [Seat(number=number + i, work=fresh(*most)) for i in range(count)]
    return Plan(
        round=round,
        replicas=tuple(planned),
        seats=tuple(seats),
        spares=tuple(spares),
        next_number=number + len(seats),
        next_slot=slot,
    )


def share(
    manifest: Manifest,
    replica: ReplicaSpec,
    there: Mapping[str, Candidate],
    before: ReplicaSpec | None,
    done: int | None,
) -> tuple[int, int]:
    """(inner steps, micro-batches). before: the replica in the last plan; done: its committed steps, or None."""
    train, most = manifest.train, manifest.train.inner_steps
    seconds, fits = step_seconds(manifest, replica, there), train.micro_batches
    if seconds is not None and FEWEST_STEPS * seconds > manifest.timing.training_seconds:
        fits = max(1, int(fits * manifest.timing.training_seconds / (FEWEST_STEPS * seconds)))
    if before is not None and before.stages == replica.stages:
        given, micro = before.work.steps, before.work.micro_batches
        if done is None:
            return given, micro
        expected = (FULL_SPEEDUP * done if done >= given else done) * micro / fits
    elif seconds is not None:
        expected = manifest.timing.training_seconds / (seconds * fits / train.micro_batches)
    else:
        expected = float(most)
    return min(most, math.ceil(expected * HEADROOM) + 1), fits


def step_seconds(manifest: Manifest, replica: ReplicaSpec, there: Mapping[str, Candidate]) -> float | None:
    """Seconds of an inner step by the stages' speeds, None if one is unknown. Links and short memory are left out."""
    stages = stage_seconds(manifest, replica, there)
    return None if stages is None else sum(stages) + (manifest.train.micro_batches - 1) * max(stages)
