"""What a member of the quorum has against a commit (protocol/round/fairness.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unfair:
    """What is wrong with a commit, for a reader. `lie`: nobody honest writes this, else it is a doubt. `again`: the leader gave this node
    reason to doubt it before, so it is treated as one that lies; its commit may be an honest one all the same."""

    reason: str
    lie: bool
    again: bool = False
    about: str = ""
    """The peer that the commit says to have diverged, where a doubt is about its work: it may attest other digests to the leader than to this
    node. Else empty."""

    @property
    def accuses(self) -> bool:
        """Whether the leader is named to the operator."""
        return self.lie or self.again
