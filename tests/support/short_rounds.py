"""Parts that unit tests of short rounds share with others."""

from __future__ import annotations

from protocol.run.manifest import TrainSpec
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec, Work
from tests.support import tiny

TRAIN = TrainSpec(inner_steps=4, micro_batches=2, rows=4, sequence=8, lr=1e-2, warmup_steps=0, total_steps=40)
RUN = tiny.manifest(train=TRAIN)
PLAN = Plan(
    round=1,
    replicas=(
        ReplicaSpec(stages=(StageSpec(peer="me", first=0, last=tiny.LAYERS),), work=Work(steps=4, micro_batches=2)),
    ),
)
