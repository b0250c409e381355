"""What a monitor remembers of a run beyond its screen: the rounds, who contributed what, the operators' nodes, relays and forks.

It is fed with events, as the screen is (peer/ui/run_state.py), and peer/ui/state.py tells it as plain data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peer import events
from peer.events import Event
from peer.ui.run_state import View
from peer.ui.text import clean, mean_loss
from protocol.rounds.credits import Credits
from protocol.run.manifest import Manifest

_MOST_ROUNDS = 4_000
"""Rounds whose figures are kept for the charts; of more, every second one is forgotten."""
_RECENT = 60
"""Rounds that are kept with who was left out."""
_MOST_FORKS = 5
MOST_LEFT_OUT = 5
"""Of a round, that are named."""
_PACE = 5
"""Rounds over which the present speed is a mean."""


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """A decided round. `seconds`: since the one before, None where that is not known; `left_out`: (replica, reason) for a reader, of
    the first few of `left_out_total`."""

    round: int
    time: float
    seconds: float | None
    tokens: int
    loss: float | None
    replicas: int
    bytes: int
    left_out: tuple[tuple[str, str], ...]
    left_out_total: int

    @property
    def tokens_per_second(self) -> float | None:
        """None where the seconds are not known."""
        return self.tokens / self.seconds if self.seconds else None


@dataclass(frozen=True, slots=True)
class RelayFigures:
    """What a bootstrap node passes on between peers, as it last said."""

    circuits: int
    bps: float
    bytes: int
    refused: int


class Watched:
    """A run, as far as its events have told it."""

    def __init__(self, manifest: Manifest, names: Mapping[str, str] | None = None) -> None:
        self.view = View(manifest, names or {})
        self.credits = Credits(manifest.model.n_layers)
        self.rounds: list[RoundFigures] = []
        """In order, the older ones thinned out."""
        self.recent: deque[RoundFigures] = deque(maxlen=_RECENT)
        """The newest of them."""
        self.reachable: dict[str, str] = {}
        """How others reach a peer, by peer id."""
        self.relays: dict[str, RelayFigures] = {}
        """By the node that relays."""
        self.forks: list[str] = []
        """Rounds with two decided commits, for a reader."""
        self.leader = ""
        """The node that proposed the newest commit."""
        self.voters: tuple[str, ...] = ()
        """Whose votes it has."""

    def feed(self, event: Event) -> None:
        """Takes one event into account."""
        self.view.feed(event)
        match event.body:
            case events.Commit() as commit:
                self._committed(event.time, commit)
            case events.Ready(peer=peer, reachable=reachable):
                self.reachable[peer] = clean(reachable, 12)
            case events.Gone(peer=peer):
                self.reachable.pop(peer, None)
            case events.Relayed(circuits=circuits, bps=bps, bytes=passed, refused=refused):
                if event.source in self.relays or len(self.relays) < len(self.view.manifest.operators):
                    self.relays[event.source] = RelayFigures(circuits, bps, passed, refused)
            case events.Forked(round=round, liars=liars):
                who = ", ".join(map(self.view.name, liars)) or "nobody who can be named"
                text = f"round {round} has two decided commits; voted for both: {clean(who)}"
                if text not in self.forks and len(self.forks) < _MOST_FORKS:
                    self.forks.append(text)

    @property
    def pace(self) -> float | None:
        """Tokens per second in the newest rounds; None while that is not known."""
        known = [f for f in list(self.recent)[-_PACE:] if f.seconds]
        return sum(f.tokens for f in known) / sum(f.seconds or 0.0 for f in known) if known else None

    def _committed(self, when: float, commit: events.Commit) -> None:
        if self.recent and commit.round <= self.recent[-1].round:
            return
        self.leader, self.voters = commit.leader, commit.voters
        self.credits.add(commit)
        before = self.recent[-1] if self.recent else None
        follows = before is not None and commit.round == before.round + 1 and when > before.time
        figures = RoundFigures(
            round=commit.round,
            time=when,
            seconds=when - before.time if before is not None and follows else None,
            tokens=sum(c.tokens for c in commit.contributions),
            loss=mean_loss(commit.contributions),
            replicas=len(commit.contributions),
            bytes=sum(c.bytes for c in commit.contributions),
            left_out=tuple(self.view.left_out[:MOST_LEFT_OUT]),
            left_out_total=len(commit.left_out),
        )
        self.recent.append(figures)
        if commit.round:
            self.rounds.append(figures)
            if len(self.rounds) > _MOST_ROUNDS:
                del self.rounds[-_MOST_ROUNDS:-1:2]


Point = tuple[float, float]


def thinned(points: Sequence[Point], most: int) -> tuple[Point, ...]:
    """At most `most` of the points (x, y), which are in order of x: neighbours become one with their mean y, at the last one's x."""
    if len(points) <= most:
        return tuple(points)
    out = []
    for i in range(most):
        part = points[i * len(points) // most : (i + 1) * len(points) // most]
        out.append((part[-1][0], sum(y for _, y in part) / len(part)))
    return tuple(out)
