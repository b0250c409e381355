"""Contributions to a run, as plain data and as text: `potluck log credits` and `potluck me`.

The class is the schema; docs/events.md lists it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from peer.ui.text import called, cleaned, count, number, readable, said_of
from protocol.ledger.credits import Credits
from protocol.ledger.standing import Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributor:
    """A peer's contributions to a run, by the log."""

    rank: int
    """By tokens, from 1; equals share a rank."""
    peer: str
    name: str
    """The name that it announces, if it is present and has one; else the end of its id."""
    tokens: int
    """Committed tokens; of a chain's, the share of its blocks in the model's."""
    share: float
    """Of all tokens of the run."""
    rounds: int
    """Rounds with its work."""
    streak: int
    """The newest of these without a gap."""
    last_round: int
    """The newest of its rounds; 0 if there is none."""
    left_out: int
    """Rounds in which it was planned and its replica was left out."""
    reason: str
    """Why, in the newest of these, for a reader; empty if there is none."""
    scored: int | None = None
    """The newest of its rounds with two scores or more; null if there is none."""
    gain: float = 0.0
    """Decrease of the loss by its update there, on its own training text, in nats per token: median of the scores."""
    edge: float = 0.0
    """The gain minus the gain on other text."""
    rests: int | None = None
    """The last round in which no plan has it, because of its work; null unless it is excluded."""
    probation: int = 0
    """Rounds whose good work had no weight, since it was on probation."""


def contributors(credits: Credits, names: Mapping[str, str], standing: Standing | None = None) -> list[Contributor]:
    """All peers that were ever planned, those with the most tokens first.

    names: by peer id (peer/ui/text.py).
    standing: adds scores and exclusions.
    """
    found: list[Contributor] = []
    for place, credit in enumerate(credits.table(), 1):
        tied, name = found and found[-1].tokens == credit.tokens, called(credit.peer, names)
        found.append(
            Contributor(
                rank=found[-1].rank if tied else place,
                peer=credit.peer,
                name=name,
                tokens=credit.tokens,
                share=credit.tokens / credits.tokens if credits.tokens else 0.0,
                rounds=credit.rounds,
                streak=credits.streak(credit),
                last_round=credit.last,
                left_out=credit.left_out,
                reason=said_of(name, readable(credit.reason, names)),
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
    """A peer's contributions as text for its user."""
    own = next((c for c in found if c.peer == peer), None)
    yield f"round {round:,} of {rounds:,} is decided; {called(peer, names)} is you"
    if own is None:
        yield "you are in no round yet; a peer that runs gets work in the next round, or is a spare"
        return
    there = sum(1 for c in found if c.tokens)
    if own.tokens:
        yield f"you trained {own.tokens:,} tokens, {own.share:.1%} of the run: rank {own.rank} of {there}"
        since = f"the last {own.streak:,} without a gap" if own.streak > 1 else f"the newest is round {own.last_round}"
        yield f"your work is in {number(own.rounds, 'round')}, {since}"
    else:
        yield "none of your work is in the model yet"
    if own.probation:
        yield f"as a newcomer you brought {number(own.probation, 'round')} of good work, which is kept and counts later"
    if own.left_out:
        times = "once" if own.left_out == 1 else f"{own.left_out:,} times, the last time"
        yield f"your work was left out {times} because: {own.reason}"
    if own.scored is not None:
        gain = f"it lowered the loss by {own.gain:.5f} on its own text, by {own.gain - own.edge:.5f} on other text"
        yield f"others checked your work of round {own.scored:,}: {gain}"
    if own.rests is not None:
        why = "by the rules, or by the peers who checked it, yours did not help"
        yield f"you get no work until round {own.rests:,}: {why}"
