"""How busy the members of a chain are: its `chain` events (peer/chain/pipeline.py), what its announcements repeat of them, and what
the chain waits for.

Shares are of the time of one inner step. A stage's are those of computing, of waiting for activations and of waiting for
gradients; the rest is the step's end, when norms travel. A link's are those of carrying activations to the stage behind
it, and gradients to the one before it: the receiver measures them (peer/chain/link.py). The chain's bottleneck is the stage
or the direction of a link with the largest share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.wire.announcement import ChainReport

_TIMES = ("seconds", "busy_s", "wait_forward_s", "wait_backward_s", "forward_link_s", "backward_link_s")
_COUNTS = ("forward_bytes", "backward_bytes", "depth", "queued")
_STATISTICS = ("activations", "gradients")
_MEANS = ("rms", "largest", "refused")


def announced(f: Mapping[str, Any]) -> ChainReport:
    """What an announcement repeats of a `chain` event with these fields."""
    return ChainReport(
        times_ms=tuple(round(1000 * f[name]) for name in _TIMES),
        counts=tuple(f[name] for name in _COUNTS),
        **{name: tuple(float(f[name][x]) for x in _MEANS) if f[name] else () for name in _STATISTICS},
    )


def fields(report: ChainReport) -> dict[str, Any]:
    """The fields of the `chain` event that an announcement repeats."""
    return {
        **{name: ms / 1000 for name, ms in zip(_TIMES, report.times_ms, strict=True)},
        **dict(zip(_COUNTS, report.counts, strict=True)),
        **{
            name: dict(zip(_MEANS, found, strict=True)) if (found := getattr(report, name)) else None
            for name in _STATISTICS
        },
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """One stage's inner step. Shares of its time, 0 to 1; bytes that it sent to the next stage and to the previous one."""

    busy: float
    wait_forward: float
    wait_backward: float
    forward_link: float
    backward_link: float
    forward_bytes: int
    backward_bytes: int
    depth: int
    queued: int


def activity(f: Mapping[str, Any]) -> Activity:
    """Of a `chain` event with these fields. Raises KeyError, TypeError, ValueError where they are not."""
    seconds = max(float(f["seconds"]), 1e-3)
    busy, wait_forward, wait_backward, forward_link, backward_link = (
        min(1.0, max(0.0, float(f[name]) / seconds)) for name in _TIMES[1:]
    )
    forward_bytes, backward_bytes, depth, queued = (int(f[name]) for name in _COUNTS)
    return Activity(
        busy=busy,
        wait_forward=wait_forward,
        wait_backward=wait_backward,
        forward_link=forward_link,
        backward_link=backward_link,
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        depth=depth,
        queued=queued,
    )


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """`what`: "computing" of the stage at `position`, or "forward" or "backward", the link over which it receives activations
    or gradients; `share` of the time."""

    position: int
    what: str
    share: float

    def text(self, names: Sequence[str]) -> str:
        """For a reader; `names` of the chain's members in order."""
        here = names[self.position]
        share = percent(self.share)
        if self.what == "computing":
            return f"{here} computes {share}"
        other = names[self.position + (-1 if self.what == "forward" else 1)]
        return f"link {other} → {here} is busy {share}"


def bottleneck(stages: Sequence[Activity | None]) -> Bottleneck | None:
    """Of a chain with these stages, as far as they are known: of equal shares the first one's, and computing before links."""
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
