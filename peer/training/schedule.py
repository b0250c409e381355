"""The learning rate of an inner step: it follows the run, at whatever pace a replica goes through its rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from protocol.run.manifest import TrainSpec


def learning_rate(train: TrainSpec, step: float) -> float:
    """Rate at the place `step` of the schedule: inner steps from 1 over the whole run, `inner_steps` of them a round."""
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    progress = min(1.0, (step - train.warmup_steps) / (train.total_steps - train.warmup_steps))
    return train.lr * (0.1 + 0.45 * (1.0 + math.cos(math.pi * progress)))


@dataclass(frozen=True, slots=True)
class Pace:
    """How a replica goes through a round: at most `steps` inner steps of `micro_batches` each, after `before` steps of the schedule.

    They are spread over the `inner_steps` that every round has in the schedule of the learning rate: it follows the run, not the
    replica's own count. A replica that does not come to all of its steps leaves out the rest of the round's part of the schedule. `total_steps`: of the schedule,
    where it is not what the manifest says. `joined`: how many micro-batches are computed as one.
    """

    before: int
    steps: int
    micro_batches: int
    total_steps: int | None = None
    joined: int = 1

    def place(self, train: TrainSpec, step: int) -> float:
        """The place in the schedule of inner step `step`; the round's first one is `before` + 1."""
        return self.before + (step - self.before) * train.inner_steps / self.steps

    def rate(self, train: TrainSpec, step: int) -> float:
        """The learning rate of inner step `step`."""
        spec = train if self.total_steps is None else replace(train, total_steps=self.total_steps)
        return learning_rate(spec, self.place(train, step))
