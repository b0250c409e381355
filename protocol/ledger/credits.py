"""Credit for contributions, computed from the log. Pure.

Member i of a chain of L blocks, with blocks a up to b, has floor(tokens b / L) - floor(tokens a / L) tokens of the
contribution.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from protocol.wire.commit import Commit, Contribution
from protocol.wire.plan import Plan


@dataclass(slots=True)
class Credit:
    """Credit of one peer.

    tokens: committed; rounds: commits with its work; streak: rounds without a gap up to `last`
    left_out: rounds whose work was not taken, with the last reason; probation: rounds without weight
    """

    peer: str
    tokens: int = 0
    rounds: int = 0
    streak: int = 0
    last: int = 0
    left_out: int = 0
    reason: str = ""
    probation: int = 0


def parts(contribution: Contribution, plan: Plan | None, layers: int) -> Iterator[tuple[str, int]]:
    """Each member's tokens of a contribution. plan: of its round."""
    peers = contribution.peers
    spec = plan.taken(contribution.replica, peers, layers) if plan is not None else None
    ends = [stage.last for stage in spec.stages] if spec is not None else []
    if len(ends) != len(peers) or any(a >= b for a, b in itertools.pairwise([0, *ends])):
        ends = list(range(1, len(peers) + 1))  # no plan that honest nodes make
    before = 0
    for peer, end in zip(peers, ends, strict=True):
        until = contribution.tokens * end // ends[-1]
        yield peer, until - before
        before = until


class Credits:
    """Credits after the commits that were added, for models of `layers` blocks. tokens: of all peers."""

    def __init__(self, layers: int) -> None:
        self.tokens = 0
        self.round = 0
        self._layers = layers
        self._plan: Plan | None = None
        self._of: dict[str, Credit] = {}

    def add(self, commit: Commit) -> None:
        """The next commit of the log."""
        self.round = commit.round
        self.tokens += commit.tokens
        for contribution in commit.contributions:
            for peer, tokens in parts(contribution, self._plan, self._layers):
                credit = self._credit(peer)
                credit.tokens += tokens
                if credit.last != commit.round:
                    credit.rounds += 1
                    credit.streak = credit.streak + 1 if credit.last == commit.round - 1 else 1
                    credit.last = commit.round
        for left in commit.left_out:
            spec = self._plan.find(left.replica) if self._plan is not None else None
            for peer in left.peers or (spec.peers if spec is not None else ()):
                credit = self._credit(peer)
                if left.probation:
                    credit.probation += 1
                    continue
                credit.left_out += 1
                credit.reason = left.reason
        self._plan = commit.plan

    def _credit(self, peer: str) -> Credit:
        return self._of.setdefault(peer, Credit(peer))

    def streak(self, credit: Credit) -> int:
        """Returns the number of consecutive rounds up to the newest with a contribution of this peer."""
        return credit.streak if credit.last == self.round else 0

    def of(self, peer: str) -> tuple[int, int, int]:
        """The peer's tokens, its rank by them from 1 on (0: it has none), and the number of peers that have some."""
        own = self._of.get(peer)
        some = [credit.tokens for credit in self._of.values() if credit.tokens]
        if own is None or not own.tokens:
            return 0, 0, len(some)
        return own.tokens, 1 + sum(tokens > own.tokens for tokens in some), len(some)

    def table(self) -> list[Credit]:
        """Returns the credits of all peers that were ever planned, most tokens first."""
        return sorted(self._of.values(), key=lambda c: (-c.tokens, -c.rounds, c.peer))
