"""Who has contributed what, for people and as plain data: `potluck log credits` and `potluck me`.

The class is the schema, and docs/events.md lists it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from peer.ui.text import called, cleaned, count, number, readable
from protocol.ledger.credits import Credits
from protocol.ledger.standing import Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributor:
    """What one peer has brought to a run, as the log says."""

    rank: int
    """From 1: whoever has the most tokens. Equals share a rank."""
    peer: str
    """Its peer id."""
    name: str
    """How it is called: by the name that it announces, if it is there and has one, or by the end of its id."""
    tokens: int
    """Tokens that it trained and that were committed; of a chain's, as many as its blocks are of the model's."""
    share: float
    """Of all tokens of the run."""
    rounds: int
    """In the commits of so many rounds."""
    streak: int
    """In so many of the newest rounds without a gap."""
    last_round: int
    """The newest of its rounds; 0 if there is none."""
    left_out: int
    """Rounds in which it was planned and its replica's work was not taken."""
    reason: str
    """Why, in the newest of these, for a reader; empty if there is none."""
    scored: int | None = None
    """The newest of its rounds in which two peers or more have scored its work; null if there is none."""
    gain: float = 0.0
    """By so much its update made the loss less there, on text that it was given to train on, in nats per token: as most of the scorers say."""
    edge: float = 0.0
    """By how much that is more than on other text."""
    rests: int | None = None
    """Up to this round no plan has it, for what the log says of its work; null where that is not so."""
    probation: int = 0
    """Rounds whose work was good and had no weight, since it was on probation."""


def contributors(credits: Credits, names: Mapping[str, str], standing: Standing | None = None) -> list[Contributor]:
    """Everybody who was ever planned, those with the most tokens first. `names`: of those who are called by one, by their ids
    (peer/ui/names.py); `standing`: what else the log says of them."""
    found: list[Contributor] = []
    for place, credit in enumerate(credits.table(), 1):
        tied = found and found[-1].tokens == credit.tokens
        found.append(
            Contributor(
                rank=found[-1].rank if tied else place,
                peer=credit.peer,
                name=called(credit.peer, names),
                tokens=credit.tokens,
                share=credit.tokens / credits.tokens if credits.tokens else 0.0,
                rounds=credit.rounds,
                streak=credits.streak(credit),
                last_round=credit.last,
                left_out=credit.left_out,
                reason=credit.reason,
                probation=credit.probation,
                **(_scores(standing, credit.peer) if standing is not None else {}),
            )
        )
    return [cleaned(contributor) for contributor in found]


def _scores(standing: Standing, peer: str) -> dict[str, Any]:
    entry = standing.scoring.book.entry(peer)
    found: dict[str, Any] = {} if entry.newest < 0 else {"scored": entry.newest, "gain": entry.gain, "edge": entry.edge}
    return found | ({"rests": standing.of(peer).until} if standing.rests(peer) else {})


def table_lines(found: list[Contributor], round: int) -> Iterator[str]:
    """The table of all contributors after `round`."""
    yield f"{count(found, 'contributor')} after round {round}, {sum(c.tokens for c in found):,} tokens"
    wide = max([8, *(len(c.name) for c in found)])
    yield f"{'':>5}  {'peer':<{wide}}  {'tokens':>18}  {'share':>6}  {'rounds':>6}  {'in a row':>8}  {'left out':>8}"
    for c in found:
        yield (
            f"{c.rank:>5}  {c.name:<{wide}}  {c.tokens:>18,}  {c.share:>6.1%}  {c.rounds:>6,}  {c.streak:>8,}"
            f"  {c.left_out:>8,}"
        )


def own_lines(found: list[Contributor], peer: str, round: int, rounds: int, names: Mapping[str, str]) -> Iterator[str]:
    """What `peer` has brought, in lines for whoever runs it."""
    own = next((c for c in found if c.peer == peer), None)
    yield f"round {round:,} of {rounds:,} is decided; {called(peer, names)} is you"
    if own is None:
        yield "no round has planned you yet; a peer that runs is planned for the next one, or is a spare"
        return
    there = sum(1 for c in found if c.tokens)
    if own.tokens:
        yield f"you trained {own.tokens:,} tokens, {own.share:.1%} of the run: rank {own.rank} of {there}"
        since = f"the last {own.streak:,} without a gap" if own.streak > 1 else f"the newest is round {own.last_round}"
        yield f"your work is in {number(own.rounds, 'round')}, {since}"
    else:
        yield "nothing of yours is in the model yet"
    if own.probation:
        yield f"on probation for {number(own.probation, 'round')}: your work was good and had no weight; it goes into the work after it"
    if own.left_out:
        times = "once" if own.left_out == 1 else f"{own.left_out:,} times, the last time"
        yield f"left out {times} because: {readable(own.reason, {})}"
    if own.scored is not None:
        gain = f"it made the loss {own.gain:.5f} less on its own text, {own.gain - own.edge:.5f} on other text"
        yield f"others scored your work of round {own.scored:,}: {gain}"
    if own.rests is not None:
        yield f"in no plan up to round {own.rests:,}: your work was found to be of no use, by the rule or by those who scored it"
