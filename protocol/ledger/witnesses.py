"""Who says which state is right: those whose work is in the log. Pure.

Whoever has a session may attest a state, under as many identities as it likes. What counts is what the *witnesses* attest: the
peers that contributed to the last ROUNDS commits, by the tokens of their replicas, nobody with more than MOST of all. Before
anything was contributed, the members of the plan are witnesses, each with the same weight. A node that has an *auditor*, which
follows the log for its operator (peer/node/audit.py), believes it before all others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping

from protocol.wire.commit import Commit
from protocol.wire.plan import Plan

ROUNDS = 8
MOST = 3
"""Nobody has more than this part of the weight: two who agree are more than the greatest one."""


class Witnesses:
    """By what is in the log so far. `auditors`: peers that this node believes before all others."""

    def __init__(self, commits: Iterable[Commit] = (), auditors: frozenset[str] = frozenset()) -> None:
        self.auditors = auditors
        self._rounds: deque[Mapping[str, int]] = deque(maxlen=ROUNDS)
        self._plan: Plan | None = None
        for commit in commits:
            self.add(commit)

    def counting(self, commits: Iterable[Commit]) -> Iterator[Commit]:
        """The same commits, each added as it is read: a log may be long, and on disk."""
        for commit in commits:
            self.add(commit)
            yield commit

    def add(self, commit: Commit) -> None:
        """The next commit of the log."""
        self.count({share.peer: c.tokens for c in commit.contributions for share in c.shares}, commit.plan)

    def count(self, tokens: Mapping[str, int], plan: Plan | None) -> None:
        """The same: `tokens` of the replica of each peer that contributed, and the next plan."""
        self._plan = plan or self._plan
        if tokens:
            self._rounds.append(tokens)

    def weights(self) -> Mapping[str, int]:
        """Of each witness: its tokens, or less; of each auditor, more than of all others."""
        found = self._earned()
        return found | dict.fromkeys(self.auditors, sum(found.values()) + 1)

    def _earned(self) -> dict[str, int]:
        tokens: Counter[str] = Counter()
        for found in self._rounds:
            tokens.update(found)
        if tokens:
            most = max(1, tokens.total() // MOST)
            return {peer: max(1, min(count, most)) for peer, count in tokens.items()}
        return {peer: 1 for replica in (self._plan.replicas if self._plan else ()) for peer in replica.peers}
