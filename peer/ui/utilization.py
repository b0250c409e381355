"""How busy the members of a chain are, and what the chain waits for.

It follows from `chain` events, or from what announcements repeat of them. All shares are of the time of one inner step.
A stage computes for a part of it, waits for activations, and waits for gradients; the rest is the end of the step, when
gradient norms travel along the chain. A link is busy for a part of it with activations for the stage behind it, and for
a part with gradients for the stage before it; the receiver measures both (peer/chain/link.py). The bottleneck of a
chain is the stage, or the direction of a link, with the largest share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peer.events import StageLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """One stage's inner step. The first five are shares of its time, 0 to 1."""

    busy: float
    """Computing."""
    wait_forward: float
    """Waiting for activations."""
    wait_backward: float
    """Waiting for gradients."""
    forward_link: float
    """The link from the previous stage carried activations."""
    backward_link: float
    """The link from the next stage carried gradients."""
    forward_bytes: int
    """Sent to the next stage."""
    backward_bytes: int
    """Sent to the previous stage."""
    depth: int
    """Micro-batches that the chain had in work at once."""
    queued: int
    """The most frames that waited for this stage."""


def activity(load: StageLoad) -> Activity:
    """The shares that follow from what a stage measured."""
    seconds = max(load.seconds, 1e-3)

    def share(part: float) -> float:
        return min(1.0, max(0.0, part / seconds))

    return Activity(
        busy=share(load.busy_s),
        wait_forward=share(load.wait_forward_s),
        wait_backward=share(load.wait_backward_s),
        forward_link=share(load.forward_link_s),
        backward_link=share(load.backward_link_s),
        forward_bytes=load.forward_bytes,
        backward_bytes=load.backward_bytes,
        depth=load.depth,
        queued=load.queued,
    )


WAITS = {"computing": "◄", "forward": "→", "backward": "←"}
"""How tables mark what a chain waits for, in the row of its stage."""
LEGEND = "◄ its chain waits for it; → ← for the link to it"


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What a chain waits for."""

    position: int
    """The stage that computes, or that receives over the link."""
    what: str
    """`computing`; or `forward`, `backward`: the link over which the stage receives activations or gradients."""
    share: float
    """Of the time, 0 to 1."""

    def text(self, names: Sequence[str]) -> str:
        """For a reader; `names` of the chain's members in order."""
        here = names[self.position]
        share = percent(self.share)
        if self.what == "computing":
            return f"{here} computes {share}"
        return f"link {self._other(names)} → {here} is busy {share}"

    def brief(self, names: Sequence[str]) -> str:
        """The same for a reader who knows the stage, as in its row of a table."""
        if self.what == "computing":
            return f"computes {percent(self.share)}"
        return f"link from {self._other(names)} {percent(self.share)}"

    def _other(self, names: Sequence[str]) -> str:
        """Who sends over the link."""
        return names[self.position + (-1 if self.what == "forward" else 1)]


def bottleneck(stages: Sequence[Activity | None]) -> Bottleneck | None:
    """What a chain with these stages waits for, as far as they are known. Of equal shares it is the first stage's, and
    computing before links."""
    found = [
        Bottleneck(position, what, share)
        for position, a in enumerate(stages)
        if a is not None
        for what, share, there in (
            ("computing", a.busy, True),
            ("forward", a.forward_link, position > 0),
            ("backward", a.backward_link, position + 1 < len(stages)),
        )
        if there
    ]
    return max(found, key=lambda b: b.share, default=None)


def percent(share: float) -> str:
    """`93 %`."""
    return f"{100 * share:.0f} %"
