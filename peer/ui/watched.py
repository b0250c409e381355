"""What a monitor remembers of a run beyond its screen: the rounds, who contributed what, the operators' nodes, relays and forks.

It is fed with events, as the screen is (peer/ui/run_state.py); peer/ui/state.py is all of it as plain data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from peer import events
from peer.events import Event
from peer.ui.names import Names
from peer.ui.run_state import View, Without
from peer.ui.text import mean_loss
from protocol.ledger.credits import Credits
from protocol.run.manifest import Manifest

_MOST_ROUNDS = 4_000
"""Rounds whose figures are kept for the charts; of more, every second one is forgotten."""
_RECENT = 60
"""Rounds that are kept with who was left out."""
_MOST_FORKS = 5
RECORDED = "bootstrap"
"""The source of what a bootstrap node tells of itself."""
MOST_LEFT_OUT = 5
"""Of a round, that are named."""
_PACE = 5
"""Rounds over which the present speed is a mean."""


@dataclass(frozen=True, slots=True)
class RoundView:
    """A decided round."""

    round: int
    """Its number."""
    time: float
    """When it was decided, Unix seconds on its leader's clock."""
    seconds: float | None
    """Since the round before was decided; null where that is not known."""
    tokens: int
    """Trained tokens."""
    loss: float | None
    """Nats per token."""
    replicas: int
    """How many replicas' work is in it."""
    bytes: int
    """Of their payloads."""
    left_out: tuple[Without, ...]
    """Replicas whose work is not in it, five at most."""
    left_out_total: int
    """How many that are."""
    held_out: float | None = None
    """Nats per token of the state after it on text that nobody trains on: the median of all who measured it; null where nobody did."""

    @property
    def tokens_per_second(self) -> float | None:
        """None where the seconds are not known."""
        return self.tokens / self.seconds if self.seconds else None


class Watched:
    """A run, as far as its events have told it."""

    def __init__(self, manifest: Manifest, names: Mapping[str, str] | None = None) -> None:
        self.view = View(manifest, Names(names))
        self.credits = Credits(manifest.model.n_layers)
        self.rounds: list[RoundView] = []
        """In order, the older ones thinned out."""
        self.recent: deque[RoundView] = deque(maxlen=_RECENT)
        """The newest of them."""
        self.relays: dict[str, events.Relayed] = {}
        """By the node that relays."""
        self.refused = 0
        """How often the operators' nodes have refused somebody, as they say; a recording of a node's events tells of that one."""
        self._refused: dict[str, int] = {}  # by each since its start
        self.forks: list[str] = []
        """Rounds with two decided commits, for a reader."""
        self.operators = self.view.manifest.operators
        """Who operates the run, by the newest commit."""
        self.quorum = self.view.manifest.quorum
        """How many of them decide."""
        self.leader = ""
        """The node that proposed the newest commit."""
        self.voters: tuple[str, ...] = ()
        """Whose votes it has."""

    def feed(self, event: Event) -> None:
        """Takes one event into account."""
        event = self.view.feed(event)
        match event.body:
            case events.Commit() as commit:
                self._committed(event.time, commit)
            case events.Announced(refused=told) if event.source in self.operators:
                before = self._refused.get(event.source, 0)
                self.refused += told - before if told >= before else told
                self._refused[event.source] = told
            case events.Refused() if event.source == RECORDED:
                self.refused += 1
            case events.Relayed() as relayed:
                if event.source in self.relays or len(self.relays) < len(self.operators):
                    self.relays[event.source] = relayed
            case events.Forked(round=round):
                text = f"round {round} has two decided commits"
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
        if commit.board is not None:
            self.operators = commit.board.names
            self.quorum = min(commit.board.quorum, max(1, len(self.operators)))
        self.credits.add(commit)
        before = self.recent[-1] if self.recent else None
        follows = before is not None and commit.round == before.round + 1 and when > before.time
        figures = RoundView(
            round=commit.round,
            time=when,
            seconds=when - before.time if before is not None and follows else None,
            tokens=sum(c.tokens for c in commit.contributions),
            loss=mean_loss(commit.contributions),
            replicas=len(commit.contributions),
            bytes=sum(c.size for c in commit.contributions),
            left_out=self.view.left_out[:MOST_LEFT_OUT],
            left_out_total=len(commit.left_out),
        )
        self.recent.append(figures)
        if commit.round:
            self.rounds.append(figures)
            if len(self.rounds) > _MOST_ROUNDS:
                del self.rounds[-_MOST_ROUNDS:-1:2]
