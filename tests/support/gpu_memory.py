"""Parts that unit tests of gpu memory share with others."""

from __future__ import annotations

from protocol.run import presets
from protocol.run.manifest import Manifest, TrainSpec
from tests.support import tiny

GB = 10**9


def run_of(name: str) -> Manifest:
    """A run of a preset."""
    preset = presets.PRESETS[name]
    train = TrainSpec(
        inner_steps=preset.inner_steps, micro_batches=preset.micro_batches, rows=preset.rows,
        sequence=preset.model.context, lr=preset.lr, warmup_steps=10, total_steps=10_000,
    )  # fmt: skip
    return tiny.manifest(model=preset.model, train=train)


RUNS = {name: run_of(name) for name in presets.PRESETS}
