"""What the stages of a chain tell about an inner step: its report, and the NORM frames that grow from the last stage to the first."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from peer.chain.activation_stats import Running
from protocol.planning import pipeline_model
from protocol.planning.pipeline_model import LinkCost, StageCost

MAX_STAGES = 64
_NORM = struct.Struct(">Bd")
_MEASURED = struct.Struct(">6dII")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One complete inner step. `loss`: nats per token; `norm`: of the whole replica's gradient, before the clip.

    `tokens`: trained by the whole replica; `seconds`: of which `busy_s` this stage computed, `wait_forward_s` it waited
    for activations and `wait_backward_s` for gradients (the one that came first ends a wait for either);
    `forward_link_s`, `backward_link_s`: it took the activations from the previous stage, and the gradients from the next, to
    come through the link (peer/chain/link.py); `forward_bytes`, `backward_bytes`: sent to the next and the previous stage, headers
    included; `depth`: micro-batches that were let into the chain at once; `queued`: most frames that waited here for this
    stage; `seconds_per_microbatch`: seconds of forward and backward per micro-batch, without what was computed anew; `stage_seconds_per_microbatch`: of every stage, where
    this is the first of several. `activations`, `gradients`: of what came so far from the previous and from the next stage
    (None: there is no such stage; peer/chain/activation_stats.py).
    """

    step: int
    loss: float
    norm: float
    tokens: int
    seconds: float
    busy_s: float
    wait_forward_s: float
    wait_backward_s: float
    forward_link_s: float
    backward_link_s: float
    forward_bytes: int
    backward_bytes: int
    depth: int
    queued: int
    activations: Running | None
    gradients: Running | None
    seconds_per_microbatch: float
    stage_seconds_per_microbatch: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StageTiming:
    """One stage's step: seconds per micro-batch of computing, (delay, transfer) of what came from either side (peer/chain/link.py),
    and for how many micro-batches its memory holds all activations, or only their inputs."""

    forward_s: float
    backward_s: float
    forward_delay: float
    forward_transfer: float
    backward_delay: float
    backward_transfer: float
    plain_depth: int
    most_depth: int

    @property
    def seconds_per_microbatch(self) -> float:
        return self.forward_s + self.backward_s

    def plausible(self) -> bool:
        times = (self.forward_s, self.backward_s, self.forward_transfer, self.backward_transfer)
        known = all(math.isfinite(value) for value in (self.forward_delay, self.backward_delay))
        return known and finite(*times) and max(times) < 1e6 and self.plain_depth >= 1 and self.most_depth >= 1

    def stage(self) -> StageCost:
        return StageCost(
            forward=self.forward_s, backward=self.backward_s, plain_depth=self.plain_depth, most_depth=self.most_depth
        )

    def link(self, following: StageTiming) -> LinkCost:
        """The boundary between this stage and the next."""
        return LinkCost(
            forward=following.forward_transfer,
            backward=self.backward_transfer,
            latency=max(0.0, (following.forward_delay + self.backward_delay) / 2),
        )


@dataclass(frozen=True, slots=True)
class Norms:
    """The body of a NORM frame, of a stage and all behind it: the wish to stop after this step, the loss, squared gradient norms of
    their shards in canonical order, and what each stage measured."""

    stop: bool
    loss: float
    sums: list[float]
    stages: list[StageTiming]

    def pack(self) -> bytes:
        records = b"".join(_MEASURED.pack(*astuple(stage)) for stage in self.stages)
        return _NORM.pack(self.stop, self.loss) + struct.pack(f">{len(self.sums)}d", *self.sums) + records

    @classmethod
    def unpack(cls, body: bytes | memoryview, shards: int) -> Norms:
        """Raises ValueError with what is wrong with the norms of so many shards."""
        rest = len(body) - _NORM.size - 8 * shards
        if rest <= 0 or rest % _MEASURED.size:
            raise ValueError(f"norms of {len(body)} bytes")
        wish, loss = _NORM.unpack_from(body)
        sums = list(struct.unpack_from(f">{shards}d", body, _NORM.size))
        stages = [StageTiming(*values) for values in _MEASURED.iter_unpack(body[-rest:])]
        if wish > 1 or not finite(loss, *sums):
            raise ValueError("impossible gradient norms")
        if not all(stage.plausible() for stage in stages):
            raise ValueError("impossible measurements")
        return cls(wish == 1, loss, sums, stages)

    @classmethod
    def most_bytes(cls, shards: int) -> int:
        """The longest that `pack` gives for a model of so many shards."""
        return _NORM.size + 8 * shards + MAX_STAGES * _MEASURED.size


def finite(*values: float) -> bool:
    """Whether all of them are numbers from 0 on."""
    return all(math.isfinite(value) and value >= 0 for value in values)


def pick_depth(stages: Sequence[StageTiming], micro_batches: int) -> int:
    """How many micro-batches the first of these stages had better let into the chain at once."""
    links = [a.link(b) for a, b in itertools.pairwise(stages)]
    return pipeline_model.pick_depth([m.stage() for m in stages], links, micro_batches)
