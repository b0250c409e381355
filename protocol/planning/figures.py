"""Figures 2 and 3 of the main paper (Heterogeneous SparseLoCo) from the planner's own cost functions. Pure.

The paper's setting: chains of four equal stages, activations and gradients in bf16 (16 bits a value), whole or with an
eighth of the width; links that carry both directions at once, and all of their rate; rounds of H = 50 inner steps with
n tokens each, whose updates have 14 bits for each of 32 entries in 4096 and are sent one way. A token is a micro-batch
of its own, so that the fill is next to nothing. A step's seconds are protocol/planning/objective.py's. Utilization is
the share of a round in which stages compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from protocol.planning.objective import step

STAGES = 4
INNER_STEPS = 50
STEP_TOKENS = 65_536
BITS = 16
PAYLOAD_BITS = 14 * 32 / 4096
"""Of an update, a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One point. parameters: of the model; width: d; ratio: k/d; flops: of a stage; bps: of a link, each way."""

    parameters: float
    width: int
    ratio: float
    flops: float
    bps: float

    @property
    def step_seconds(self) -> float:
        """Of an inner step."""
        compute = np.full((1, STAGES), self.token_seconds)
        wire = BITS * self.width * self.ratio / self.bps
        links = (np.full((1, STAGES - 1), 2 * wire), np.array([wire]))
        return float(step(STEP_TOKENS, compute, links, np.full((1, STAGES), float(STEP_TOKENS)))[0][0])

    @property
    def token_seconds(self) -> float:
        """Seconds of a stage for a token, forward and backward."""
        return 6 * self.parameters / (STAGES * self.flops)

    @property
    def round_seconds(self) -> float:
        """Of the inner steps of a round, and of sending a stage's update."""
        return INNER_STEPS * self.step_seconds + self.parameters / STAGES * PAYLOAD_BITS / self.bps

    @property
    def utilization(self) -> float:
        """Share of a round in which a stage computes."""
        return INNER_STEPS * STEP_TOKENS * self.token_seconds / self.round_seconds

    def hours(self, tokens: float) -> float:
        """Of training so many tokens with one chain."""
        return tokens / (INNER_STEPS * STEP_TOKENS) * self.round_seconds / 3600


FIGURE_2_FLOPS = (400e12, 1600e12)
FIGURE_2_BPS = (10e6, 100e6, 500e6, 1e9)
RATIOS = (1.0, 1 / 8)


def figure_2() -> list[tuple[float, float, tuple[float, ...]]]:
    """(operations a second, k/d, utilization at each of FIGURE_2_BPS) for 70 billion parameters, d = 8192."""
    return [
        (
            flops,
            ratio,
            tuple(
                Setting(parameters=70e9, width=8192, ratio=ratio, flops=flops, bps=bps).utilization
                for bps in FIGURE_2_BPS
            ),
        )
        for flops in FIGURE_2_FLOPS
        for ratio in RATIOS
    ]


def figure_3() -> list[tuple[float, float, float]]:
    """(k/d, tokens, hours) for the model of 512 million parameters, d = 1536, at 1 Gb/s: 10 billion tokens whole, and
    12 billion with an eighth of the width, which come to about the same loss (the paper's Table 3). The paper does not
    say how fast a stage computes: 400 TFLOP/s, as in Figure 2."""
    return [
        (ratio, tokens, Setting(parameters=512e6, width=1536, ratio=ratio, flops=400e12, bps=1e9).hours(tokens))
        for ratio, tokens in ((1.0, 10e9), (1 / 8, 10e9), (1 / 8, 12e9))
    ]
