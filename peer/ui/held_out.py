"""What was measured on text that nobody trains on, by round, as commits tell it; readers are shown the median of all who measured a state."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass

from peer import events
from peer.ui.text import clean
from protocol.wire.evaluation import LONGEST_SAMPLE

_MOST_ROUNDS = 4_000
"""Whose figures are kept; of more, every second one is forgotten."""
_MOST_PEERS = 32
"""Of one round."""


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of the state after `round`: the medians, in nats per token and bits per byte, and (peer, loss) of all who measured it."""

    round: int
    loss: float
    bits_per_byte: float
    by: tuple[tuple[str, float], ...]
    sample: str = ""
    """How the model goes on with the held-out text, as most say who measured it; empty where no text is what most say."""


class HeldOut:
    """Belongs to one reader."""

    def __init__(self) -> None:
        self.found: dict[int, Found] = {}
        """By round, in order."""
        self._told: dict[int, dict[str, events.Evaluation]] = {}

    @property
    def newest(self) -> Found | None:
        """None before the first."""
        return next(reversed(self.found.values()), None)

    def add(self, event: events.Evaluated) -> None:
        """What another commit says; what somebody says again changes nothing."""
        told = self._told.setdefault(event.round, {})
        for said in event.evaluations:
            if len(told) < _MOST_PEERS:
                told.setdefault(said.peer, said)
        if not told:
            return
        late = event.round < next(reversed(self.found), -1)
        self.found[event.round] = Found(
            round=event.round,
            loss=statistics.median(said.loss for said in told.values()),
            bits_per_byte=statistics.median(said.bits_per_byte for said in told.values()),
            by=tuple((peer, said.loss) for peer, said in sorted(told.items())),
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
    return clean(sample, LONGEST_SAMPLE) if 2 * count > len(samples) else ""
