"""How an operator who voted twice is taken out, and who decides from then on: pure, from the manifest and the log.

Two votes of one member in one ballot are a proof (protocol/wire/double_vote.py). A decree with that proof, signed by enough of the *others*,
takes the member out: it says the last round that stays (`after`), which is the one before the proof's, or a later one. The next round is
decided by the others alone, and its commit brings the decree; it counts instead of whatever was decided for that round before. From then on
every commit names who is `out`. An operator who does not decide yet takes the place, if there is one; else the members are
one fewer. Nothing can be undone that is older than the proof, and nobody can be taken out without one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from protocol import identity
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit, votes_needed
from protocol.wire.decree import OUST, Board, Decree, Enacted

MAX_OUT = 16
"""Operators that a run takes out, at most: each commit names them."""


def members_after(manifest: Manifest, head: Commit | None) -> tuple[str, ...]:
    """Who decides what comes next after `head`, unless that takes one of them out."""
    return manifest.first_members if head is None else head.members


def names_of(manifest: Manifest, head: Commit | None) -> tuple[str, ...]:
    """All whom the board after `head` names (protocol/ledger/board.py)."""
    return manifest.operators if head is None or head.board is None else head.board.names


def out_after(head: Commit | None, enacted: Enacted | None = None) -> tuple[str, ...]:
    """Who is out after `head`, and with this decree."""
    known = () if head is None else head.out
    return (*known, enacted.decree.subject) if is_ousting(enacted) and enacted is not None else known


def is_ousting(enacted: Enacted | None) -> bool:
    """Whether this decree takes an operator out."""
    return enacted is not None and enacted.decree.action == OUST


def deciders(manifest: Manifest, head: Commit | None, enacted: Enacted | None) -> tuple[str, ...]:
    """Who decides the commit after `head` that brings this decree, if it brings one."""
    members = members_after(manifest, head)
    if enacted is None or not is_ousting(enacted):
        return members
    return tuple(m for m in members if m != enacted.decree.subject)


def operators_after(board: Board, out: Collection[str]) -> tuple[str, ...]:
    """The operators who are not out, in the board's order."""
    return tuple(operator for operator in board.names if operator not in out)


def is_complete(board: Board, members: Sequence[str], out: Collection[str]) -> bool:
    """Whether these may be a round's members: operators who are not out, as many as the board's quorum, or all that are left."""
    left, named = operators_after(board, out), set(members)
    return named <= set(left) and len(named) == len(members) == min(board.quorum, len(left))


def completed(
    board: Board, members: Sequence[str], out: Collection[str], living: Collection[str] | None = None
) -> tuple[str, ...]:
    """The members who stay, and who takes the place of those who do not; those who give signs of life (`living`) before others."""
    left = operators_after(board, out)
    here = set(left if living is None else living)
    size = min(board.quorum, len(left))
    stay = [m for m in members if m in left]
    if len(stay) > size:
        stay = sorted(sorted(stay, key=lambda m: m not in here)[:size], key=members.index)
    spares = sorted((o for o in left if o not in stay), key=lambda o: o not in here)
    return tuple([*stay, *spares][:size])


def why_not(manifest: Manifest, head: Commit | None, decree: Decree) -> str | None:
    """Why no commit right after `head` can bring this ousting, whoever signed it; None if one can."""
    proof, term, round = decree.proof, len(out_after(head)), 0 if head is None else head.round + 1
    if decree.subject in out_after(head):
        return "takes somebody out who is out"
    if proof is None or decree.after is None or proof.peer != decree.subject or proof.term != term:
        return "takes somebody out without a proof"
    if decree.after != round - 1 or proof.round > round:
        return "takes somebody out from another round on"
    board = names_of(manifest, head)
    if decree.subject not in board or not proof.is_true(manifest.run_id):
        return "takes somebody out with a false proof"
    if term >= MAX_OUT:
        return "takes one more out than a run can remember"
    if len(members_after(manifest, head)) < 2:
        return "takes the only member out"
    return None


def are_enough(manifest: Manifest, head: Commit | None, enacted: Enacted, body: bytes) -> bool:
    """Whether enough of those who stay have signed this ousting after `head`. `body`: what signatures are over."""
    others = set(deciders(manifest, head, enacted))
    known = {who: signature for who, signature in enacted.signatures.items() if who in others}
    if len(known) != len(enacted.signatures) or len(known) < votes_needed(len(others)):
        return False
    return all(identity.verify(who, body, signature) for who, signature in known.items())
