"""What a member of the quorum has against a commit (protocol/rounds/fairness.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unfair:
    """What is wrong with a commit, for a reader. `lie`: nobody honest writes this, else it is a doubt."""

    reason: str
    lie: bool
