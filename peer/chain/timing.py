"""What a stage measures of an inner step, and what it reports.

The first stage learns what all stages measured (peer/chain/grad_norm.py) and picks from it how many micro-batches it lets into the
chain at once (protocol/planning/pipeline_model.py).

How a link is measured (`LinkClock`): each header says when its frame was handed over, by the sender's clock. A stage pings the
next one when an inner step begins, and the next one echoes. Both frames are small and meet an idle link, so the difference
`arrival - stamp` is the latency plus the offset of the two clocks. A frame occupies the link from the later of `stamp + that
difference` and the arrival of the frame before it, until it has arrived. The offsets of both directions cancel. A ping waits where its
receiver does not read yet, as in a round's first step; then the quickest frame is the better measure.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.planning.pipeline_model import Depths, LinkCost, StageCost
from protocol.wire.announcement import ChainReport

Costs = tuple[list[StageCost], list[LinkCost]]
"""What the stages of a chain, or those from one on, and the boundaries between them take, as the model of a pipeline takes it."""
CLOCK_STEPS = 4
"""Steps whose smallest delay counts; clocks drift apart in the long run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(ChainReport):
    """One complete inner step."""

    step: int
    """Counted from the run's beginning."""
    loss: float
    """Nats per token."""
    norm: float
    """Of the whole replica's gradient, before the clip."""
    tokens: int
    """Trained by the whole replica."""
    wait_text_s: float
    """Seconds of waiting for text, that of the next step too."""
    seconds_per_microbatch: float
    """Of forward and backward, without what was computed a second time."""
    stage_seconds_per_microbatch: tuple[float, ...] = ()
    """The same of every stage, where this is the first of several."""
    took: Costs | None = None
    """Of this stage and those behind it."""


@dataclass(frozen=True, slots=True)
class StageTiming:
    """What one stage measured in an inner step.

    `forward_s`, `backward_s`: seconds of computing per micro-batch. The delay and the transfer (`LinkClock.measured`) of what came
    forward from the previous stage and backward from the next. `plain`, `held`, `most`: for how many micro-batches under way the stage
    has memory (protocol/planning/pipeline_model.py: Depths).
    """

    forward_s: float
    backward_s: float
    forward_delay: float
    forward_transfer: float
    backward_delay: float
    backward_transfer: float
    plain: int
    held: int
    most: int

    @property
    def seconds_per_microbatch(self) -> float:
        """Of forward and backward together."""
        return self.forward_s + self.backward_s

    def plausible(self) -> bool:
        """Whether a stage can have measured this."""
        times = (self.forward_s, self.backward_s, self.forward_transfer, self.backward_transfer)
        known = all(math.isfinite(value) for value in (self.forward_delay, self.backward_delay))
        return known and finite(*times) and max(times) < 1e6 and 1 <= self.plain <= self.held <= self.most

    def stage(self) -> StageCost:
        """The stage, as the model of a pipeline takes it."""
        return StageCost(
            forward=self.forward_s,
            backward=self.backward_s,
            depths=Depths(plain=self.plain, held=self.held, most=self.most),
        )

    def link(self, following: StageTiming) -> LinkCost:
        """The boundary between this stage and the next, as the model of a pipeline takes it."""
        return LinkCost(
            forward=following.forward_transfer,
            backward=self.backward_transfer,
            latency=max(0.0, (following.forward_delay + self.backward_delay) / 2),
        )


def costs(stages: Sequence[StageTiming]) -> Costs:
    """Of these stages, one behind the other."""
    return [m.stage() for m in stages], [a.link(b) for a, b in itertools.pairwise(stages)]


def finite(*values: float) -> bool:
    """Whether all of them are numbers from 0 on."""
    return all(math.isfinite(value) and value >= 0 for value in values)


class LinkClock:
    """What frames tell about the way from a neighbour to us. Times are seconds; `stamp` is by the neighbour's clock, all others by ours.

    `trip`: the way there and back as the last ping found it, at most `most_trip` where we measured it.
    """

    def __init__(self, most_trip: float) -> None:
        self.trip = 0.0
        self._most_trip = most_trip
        self._pinged = 0.0
        self._delays: deque[float] = deque(maxlen=CLOCK_STEPS)
        self._frames: list[tuple[float, float]] = []  # of this step's micro-batches: stamp, arrival

    def pinged(self, now: float) -> None:
        """A ping is sent."""
        self._pinged = now

    def echoed(self, now: float) -> None:
        """Its echo has come."""
        self.trip = min(now - self._pinged, self._most_trip)

    def told(self, trip: float) -> None:
        """The neighbour's ping says how long its last one took."""
        self.trip = trip

    def small(self, stamp: float, arrival: float) -> None:
        """A ping or an echo has come, over an idle link."""
        self._delays.append(arrival - stamp)

    def frame(self, stamp: float, arrival: float) -> None:
        """A micro-batch's frame has come."""
        self._frames.append((stamp, arrival))

    def measured(self) -> tuple[float, float]:
        """(delay, transfer) of this step: latency plus clock offset, and the mean time that a frame occupied the link. The next step
        begins."""
        frames, self._frames = self._frames, []
        if not frames or not self._delays:
            return 0.0, 0.0
        delay = min(*self._delays, *(arrival - stamp for stamp, arrival in frames))
        before, total = -math.inf, 0.0
        for stamp, arrival in frames:
            total += max(0.0, arrival - max(stamp + delay, before))
            before = arrival
        return delay, total / len(frames)
