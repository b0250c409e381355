"""The operators of a run and the size of its quorum: from the manifest and the newest commit. Pure.

The manifest names the first board; a decree can change it (protocol/ledger/access.py), and every later commit carries
the new one. A commit with another board is decided by the members before it and names the next ones.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence, Set

from protocol import identity
from protocol.identity import short_peer
from protocol.run.manifest import Manifest, why_no_quorum
from protocol.wire.commit import Commit, votes_needed
from protocol.wire.decree import APPOINT, DISMISS, MAX_OPERATORS, QUORUM, Board, Decree, Enacted, Operator

CHANGES = (APPOINT, DISMISS, QUORUM)


@functools.lru_cache(maxsize=64)
def _first(manifest: Manifest) -> Board:
    return Board(operators=tuple(Operator(peer=peer) for peer in manifest.operators), quorum=manifest.quorum)


def of(manifest: Manifest, head: Commit | None) -> Board:
    return _first(manifest) if head is None or head.board is None else head.board


def operators(manifest: Manifest, head: Commit | None) -> tuple[str, ...]:
    return of(manifest, head).names


def members_after(manifest: Manifest, head: Commit | None) -> tuple[str, ...]:
    """The members that decide the commit after `head`."""
    return manifest.first_members if head is None else head.members


def is_complete(board: Board, members: Sequence[str]) -> bool:
    """Returns whether these may be a round's members: operators, as many as the board's quorum."""
    named = set(members)
    return named <= set(board.names) and len(named) == len(members) == board.quorum


def completed(board: Board, members: Sequence[str], living: Collection[str]) -> tuple[str, ...]:
    """The members of the next round: the present ones that are still operators, then others; `living` ones first."""
    stay = [m for m in members if m in board.names]
    if len(stay) > board.quorum:
        stay = sorted(sorted(stay, key=lambda m: m not in living)[: board.quorum], key=members.index)
    spares = sorted((o for o in board.names if o not in stay), key=lambda o: o not in living)
    return tuple([*stay, *spares][: board.quorum])


def is_change(enacted: Enacted | None) -> bool:
    return enacted is not None and enacted.decree.action in CHANGES


def changed(manifest: Manifest, head: Commit | None, decree: Decree) -> Board:
    """The board after this decree, which comes after `head`."""
    now = of(manifest, head)
    left, quorum = {o.peer: o for o in now.operators}, now.quorum
    if decree.action == APPOINT:
        left |= {operator.peer: operator for operator in decree.operators}
    elif decree.action == DISMISS:
        left.pop(decree.subject, None)
    elif decree.quorum is not None:
        quorum = decree.quorum
    return Board(operators=tuple(left.values()), quorum=quorum)


def after(manifest: Manifest, head: Commit | None, enacted: Enacted | None) -> Board | None:
    """Returns the board in the commit after `head`, with this decree, if any."""
    if enacted is not None and is_change(enacted):
        return changed(manifest, head, enacted.decree)
    return None if head is None else head.board


def why_not(manifest: Manifest, head: Commit | None, decree: Decree) -> str | None:
    """Returns the reason why the commit after `head` cannot make this change of the board; None if it can."""
    names = operators(manifest, head)
    fresh = [operator.peer for operator in decree.operators]
    then = changed(manifest, head, decree)
    if len(set(fresh)) < len(fresh):
        return "it names an operator twice"
    if not all(place.isascii() and place.isprintable() for o in decree.operators for place in o.places):
        return "an address of it is none"
    for peer in fresh:
        try:
            identity.public_key(peer)
        except ValueError:
            return f"{short_peer(peer)} is no key"
    if decree.action == DISMISS and decree.subject not in names:
        return f"{short_peer(decree.subject)} is no operator of it"
    refused = None if decree.quorum is None else why_no_quorum(decree.quorum)
    if refused is not None:
        return refused
    if len(then.operators) > MAX_OPERATORS:
        return f"a run has {MAX_OPERATORS} operators at most; dismiss others first"
    if then.quorum > len(then.operators):
        left = len(then.operators)
        return f"{then.quorum} operators decide, and there would be {left}; appoint others first, or let fewer decide"
    if then == of(manifest, head):
        return "nothing would change"
    return None


def why_too_few(manifest: Manifest, head: Commit | None, decree: Decree, living: Collection[str]) -> str | None:
    """Why the members after this change could not decide, given the `living` operators; None if they could."""
    then, now = changed(manifest, head, decree), members_after(manifest, head)
    members = completed(then, now, living)
    here, needed = sum(m in living for m in members), votes_needed(len(members))
    if set(members) == set(now) or here >= needed:
        return None
    there = f"{here} of the {len(members)} who would decide give signs of life"
    return f"{there}, and a round would need {needed}; start their nodes first"


def member_doubts(
    manifest: Manifest, head: Commit | None, commit: Commit, living: Set[str], present: Set[str]
) -> Iterator[str]:
    """A voter's objections to the members after `commit`: a living member is replaced, or too few can decide."""
    change, now = is_change(commit.decree), members_after(manifest, head)
    stay = living & set(operators(manifest, commit)) if change else living
    if change and len(commit.members) < len(now):
        if not set(commit.members) <= set(now):
            yield "has others decide than those who stay"
    else:
        for member in sorted(stay - set(commit.members)):
            yield f"puts another node in the place of {short_peer(member)}, which gives signs of life"
    here = len(present & set(commit.members))
    if change and set(commit.members) != set(now) and here < votes_needed(len(commit.members)):
        yield f"has {len(commit.members)} decide, of whom {here} give signs of life"
