"""What makes a commit the next one of a run: rules for everybody who reads a log and believes nobody.

`why_not_next` checks what the log stands on: votes, run, round, parent. Every machine asks it before it takes a commit.
What it says then is checked by protocol/ledger/rules.py; the lists of parts, and what the payloads hold, by peer/log/replay.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from protocol.errors import PotluckError, RemoteError
from protocol.ledger import access, board
from protocol.run.manifest import Manifest
from protocol.wire import encoding
from protocol.wire.commit import Commit, Record, is_decided
from protocol.wire.plan import Plan, Work

MAX_SLOT = 2**62
"""No run comes so far."""


class BadCommit(PotluckError):
    """These bytes are not the next commit of the run; the text goes on from "the commit of round N"."""


def why_not_next(manifest: Manifest, head: Commit | None, record: Record) -> str | None:
    """Why `record`, whose signatures are right, cannot come next after `head` in the log; None if it can."""
    commit, round = record.commit, 0 if head is None else head.round + 1
    members = board.members_after(manifest, head)
    if commit.run != manifest.run_id:
        return "is of another run"
    if commit.round != round:
        return f"is not the one of round {round}"
    if commit.parent != (head.digest if head else manifest.run_id):
        return "does not follow the one before it"
    if not board.is_complete(board.of(manifest, commit), commit.members):
        return "names other members than operators of the run"
    if commit.leader not in members:
        return "was proposed by a node that is not a member"
    if not is_decided(record, members):
        return "has too few votes"
    unlawful = access.why_unlawful(manifest, head, commit)
    if unlawful is not None:
        return unlawful
    if commit.plan is not None and not all(_allows(manifest, w) for w in _works(commit.plan)):
        return "plans more work than the manifest allows"
    return None


def _works(plan: Plan) -> Iterator[Work]:
    """What a plan gives anybody, in its round and in the one after."""
    yield from (seat.work for seat in plan.seats)
    yield from (work for r in plan.replicas for work in (r.work, r.following) if work is not None)


def _allows(manifest: Manifest, work: Work) -> bool:
    """Whether this is no more than the manifest says."""
    steps, micro_batches = manifest.train.inner_steps, manifest.train.micro_batches
    return work.steps <= steps and work.micro_batches <= micro_batches and work.slot <= MAX_SLOT


def follow(manifest: Manifest, before: Commit | None, raw: bytes) -> Record:
    """The record in `raw`, which must come right after `before` (None: it must be the first). Raises BadCommit."""
    try:
        record = encoding.decode_record(raw, "the log")
    except RemoteError as error:
        raise BadCommit(f"cannot be believed: {str(error).removesuffix('; it was dropped')}") from None
    reason = why_not_next(manifest, before, record)
    if reason is not None:
        raise BadCommit(reason)
    return record
