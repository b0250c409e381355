"""What the commit of the open round will say of it, from the moment when nobody is waited for any more. Part of the leader's machine, pure.

What was offered is judged first (protocol/round/judging.py), which takes time: the machine asks (leader_events.py: Judge), somebody
decodes the payloads in his own time (bootstrap/background_jobs.py), and the answer comes back as an event (Verdict). What has been judged is not
judged again while nothing else was offered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.identity import short_peer
from protocol.ledger import schedule
from protocol.ledger.run_state import RunState
from protocol.ledger.standing import Standing
from protocol.planning.partition import Candidate
from protocol.round import judging
from protocol.round.attestations import Attestations
from protocol.round.judging import Case, Judged
from protocol.round.questions import Question
from protocol.round.verdicts import Verdicts
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit, Contribution, Diverged, LeftOut
from protocol.wire.plan import Plan


@dataclass(frozen=True, slots=True)
class Said:
    """What a commit says of its round."""

    contributions: Sequence[Contribution] = ()
    left_out: Sequence[LeftOut] = ()
    diverged: Sequence[Diverged] = ()


class Docket:
    """What is to be judged in the open round, and what was. `standing`: before the round."""

    def __init__(self, standing: Standing) -> None:
        self._said = Said()
        self._standing = standing
        self._case: Case | None = None
        self._answered: tuple[Case, Sequence[Judged]] | None = None

    def begin(self) -> None:
        """The next round is open."""
        self._said, self._case, self._answered = Said(), None, None

    def close(self, state: RunState, head: Commit, verdicts: Verdicts, said: Said) -> Case | None:
        """Nobody is waited for any more. What has to be judged before there is a commit. `state`: after `head`; `said`: before it is."""
        standing = state.standing
        self._said, self._standing = said, standing
        new = (c.replica for c in said.contributions if standing.is_on_probation(c.replica, c.peers))
        self._case = Case(
            manifest=state.manifest,
            round=head.round + 1,
            parent=head.digest,
            contributions=tuple(verdicts.in_turn()),
            last=head.contributions,
            medians=state.medians,
            trial=frozenset(new),
        )
        known = self._answered is not None and self._answered[0] == self._case
        return None if known or not self._case.contributions else self._case

    def answer(self, case: Case, judged: Sequence[Judged]) -> bool:
        """Whether this is the answer that is waited for."""
        if case != self._case:
            return False
        self._answered = case, judged
        return True

    def said(self) -> Said:
        """What the commit says, now that all is judged."""
        if self._case is None or self._answered is None or self._answered[0] != self._case:
            return self._said
        found = dict(zip((c.replica for c in self._case.contributions), self._answered[1], strict=True))
        sound = [c for c in self._said.contributions if found[c.replica].reason is None]
        kept = [c for c in sound if c.replica not in self._case.trial]
        weights = self._standing.weigh(kept)
        counted = [
            dataclasses.replace(c, scale=found[c.replica].scale, standing=weight)
            for c, weight in zip(kept, weights, strict=True)
        ]
        out = list(self._said.left_out)
        out += [
            _judged_out(c, f"judged: {why}")
            for c in self._said.contributions
            if (why := found[c.replica].reason) is not None
        ]
        out += [self._tried(c, len(kept)) for c in sound if c.replica in self._case.trial]
        return Said(counted, sorted(out, key=lambda x: x.replica), self._said.diverged)

    def _tried(self, contribution: Contribution, counted: int) -> LeftOut:
        """`counted`: how many replicas' work counts."""
        left = max(self._standing.left(peer) for peer in contribution.peers) - self._standing.compares(counted)
        more = (
            f"its work counts after {left} more round{'s' * (left > 1)}"
            if left
            else "its work counts from the next round on"
        )
        reason = f"on probation, and nothing is wrong with it; {more}"
        return dataclasses.replace(_judged_out(contribution, reason), probation=True)


def _judged_out(contribution: Contribution, reason: str) -> LeftOut:
    who = ", ".join(short_peer(peer) for peer in contribution.peers)
    return LeftOut(
        replica=contribution.replica,
        reason=f"peer {who}: {reason}",
        judged=judging.name_of(contribution),
        peers=contribution.peers,
    )


def question(
    manifest: Manifest,
    commit: Commit,
    there: tuple[Candidate, ...],
    resting: tuple[Candidate, ...],
    fallen: tuple[Candidate, ...],
    previous: Plan | None,
    attestations: Attestations,
) -> Question:
    """Which plan comes with `commit`. `there`, `resting`, `fallen`: who may be planned, who only where these make no replica, and who only
    where those do not either; `previous`: the plan of its round, or the last one."""
    return Question(
        manifest=manifest,
        candidates=there,
        resting=resting,
        fallen=fallen,
        round=commit.round + 1,
        previous=previous,
        contributions=commit.contributions,
        left_out=commit.left_out,
        attested=attestations.snapshot(commit.round - 1) if commit.round else None,
        range_share=schedule.limits(manifest, commit.schedule).range_share,
    )
