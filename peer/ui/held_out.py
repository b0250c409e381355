"""What was measured on text that nobody trains on, by round, as commits tell it; readers are shown the median of all who measured a state."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.wire.evaluation import Evaluation

_MOST_ROUNDS = 4_000
"""Whose figures are kept; of more, every second one is forgotten."""
_MOST_PEERS = 32
"""Of one round."""


@dataclass(frozen=True, slots=True)
class Found:
    """The held-out loss of one state."""

    round: int
    """The round after which it was measured."""
    loss: float
    """Nats per token: the median of all who measured it."""
    bits_per_byte: float
    """Bits per UTF-8 byte of text, likewise."""
    by: tuple[Evaluation, ...]
    """All measurements."""
    sample: str = ""
    """How the model goes on with the held-out text, as most say who measured it; empty where no text is what most say."""


class HeldOut:
    """Belongs to one reader."""

    def __init__(self) -> None:
        self.found: dict[int, Found] = {}
        """By round, in order."""
        self._told: dict[int, dict[str, Evaluation]] = {}

    @property
    def newest(self) -> Found | None:
        """None before the first."""
        return next(reversed(self.found.values()), None)

    def add(self, evaluations: Sequence[Evaluation]) -> None:
        """The evaluations of another commit, all of one state; of one peer the first counts."""
        if not evaluations:
            return
        at = evaluations[0].round
        told = self._told.setdefault(at, {})
        for said in evaluations:
            if len(told) < _MOST_PEERS:
                told.setdefault(said.peer, said)
        late = at < next(reversed(self.found), -1)
        self.found[at] = Found(
            round=at,
            loss=statistics.median(said.loss for said in told.values()),
            bits_per_byte=statistics.median(said.bits_per_byte for said in told.values()),
            by=tuple(said for _, said in sorted(told.items())),
            sample=_most([said.sample for said in told.values()]),
        )
        if late:
            self.found = dict(sorted(self.found.items()))
        if len(self.found) > _MOST_ROUNDS:
            for round in list(self.found)[:-1:2]:
                del self.found[round], self._told[round]


def _most(samples: list[str]) -> str:
    """What more than half of them are: one alone of several can put nothing on a screen."""
    (sample, count), *_ = Counter(samples).most_common(1)
    return sample if 2 * count > len(samples) else ""
