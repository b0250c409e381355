"""How busy the members of a chain are, and what the chain waits for.

It follows from what the members report of their steps (protocol/wire/announcement.py: ChainReport), in `chain` events or in announcements. All shares are of the time of one inner step.
A stage computes for a part of it, waits for activations, and waits for gradients; the rest is the end of the step, when
gradient norms travel along the chain. A link is busy for a part of it with activations for the stage behind it, and for
a part with gradients for the stage before it; the receiver measures both (peer/chain/link.py). The bottleneck of a
chain is the stage, or the direction of a link, with the largest share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.wire.announcement import ChainReport

WAITS = {"computing": "◄", "forward": "→", "backward": "←"}
"""How tables mark what a chain waits for, in the row of its stage."""
LEGEND = "◄ its chain waits for it; → ← for the link to it"


Names = Sequence[str] | Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What a chain waits for."""

    position: int
    """The stage that computes, or that receives over the link."""
    what: str
    """`computing`; or `forward`, `backward`: the link over which the stage receives activations or gradients."""
    share: float
    """Of the time, 0 to 1."""

    def text(self, names: Names) -> str:
        """For a reader; `names` of the chain's members by position."""
        here = names[self.position]
        share = percent(self.share)
        if self.what == "computing":
            return f"{here} computes {share}"
        return f"link {self._other(names)} → {here} is busy {share}"

    def brief(self, names: Names) -> str:
        """The same for a reader who knows the stage, as in its row of a table."""
        if self.what == "computing":
            return f"computes {percent(self.share)}"
        return f"link from {self._other(names)} {percent(self.share)}"

    def _other(self, names: Names) -> str:
        """Who sends over the link."""
        return names[self.position + (-1 if self.what == "forward" else 1)]


def bottleneck(stages: Sequence[ChainReport | None]) -> Bottleneck | None:
    """What a chain with these stages waits for, as far as they are known. Of equal shares it is the first stage's, and
    computing before links."""
    found = [
        Bottleneck(position, what, a.share(seconds))
        for position, a in enumerate(stages)
        if a is not None
        for what, seconds, there in (
            ("computing", a.busy_s, True),
            ("forward", a.forward_link_s, position > 0),
            ("backward", a.backward_link_s, position + 1 < len(stages)),
        )
        if there
    ]
    return max(found, key=lambda b: b.share, default=None)


def percent(share: float) -> str:
    """`93 %`."""
    return f"{100 * share:.0f} %"
