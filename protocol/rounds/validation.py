"""What makes a commit the next one of a run: rules for everybody who reads a log and believes nobody.

`why_not_next` checks what the log stands on: votes, run, round, parent. Every machine asks it before it takes a commit.
`problems` checks what a commit says against the plan that it decides about and against the manifest, for monitors and
auditors. The lists of parts, and what the payloads hold, are checked by peer/log/replay.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from protocol.errors import PotluckError, RemoteError
from protocol.identity import short_peer
from protocol.rounds import access, board, chain_repair, ousting, part_lists, schedule
from protocol.run.manifest import Manifest
from protocol.wire import encoding
from protocol.wire.commit import Commit, Contribution, Record, is_decided
from protocol.wire.plan import Plan, ReplicaSpec, Work

MAX_SLOT = 2**62
"""No run comes so far."""


class BadCommit(PotluckError):
    """These bytes are not the next commit of the run; the text goes on from "the commit of round N"."""


def why_not_next(manifest: Manifest, head: Commit | None, record: Record) -> str | None:
    """Why `record`, whose signatures are right, cannot come next after `head` in the log; None if it can."""
    commit, round = record.commit, 0 if head is None else head.round + 1
    members = ousting.deciders(manifest, head, commit.decree)
    if commit.run != manifest.run_id:
        return "is of another run"
    if commit.round != round:
        return f"is not the one of round {round}"
    if commit.parent != (head.digest if head else manifest.run_id):
        return "does not follow the one before it"
    if not ousting.is_complete(board.of(manifest, commit), commit.members, commit.out):
        return "names other members than operators of the run"
    if commit.leader not in members:
        return "was proposed by a node that is not a member"
    if not is_decided(record, members):
        return "lacks the votes of a majority"
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


def problems(manifest: Manifest, plan: Plan | None, commit: Commit) -> Iterator[str]:
    """Everything in `commit` that no honest leader writes. `plan`: the one of its round, None where that has none."""
    last = schedule.last_round(manifest, commit)
    if commit.round > last:
        yield f"the run has {last} rounds only"
    planned = sorted(r.number for r in plan.replicas) if plan is not None else []
    decided = sorted([c.replica for c in commit.contributions] + [x.replica for x in commit.left_out])
    seats = {seat.number for seat in plan.seats} if plan is not None else set()
    taken = seats.intersection(decided)
    if decided != sorted([*planned, *taken]):
        yield f"decides about replicas {decided}, the plan has {planned}"
    wrong = {d.peer for d in commit.diverged}
    for contribution in commit.contributions:
        peers = tuple(share.peer for share in contribution.shares)
        spec = plan.taken(contribution.replica, peers, manifest.model.n_layers) if plan is not None else None
        if plan is not None and spec is not None:
            yield from _contribution(manifest, plan, spec, contribution, wrong)
    took_part = [share.peer for c in commit.contributions for share in c.shares]
    if len(set(took_part)) < len(took_part):
        yield "counts a peer twice"
    if commit.plan is not None:
        if commit.plan.round != commit.round + 1:
            yield f"plans round {commit.plan.round}, not the next one"
        numbers = [r.number for r in commit.plan.replicas] + [seat.number for seat in commit.plan.seats]
        if len(set(numbers)) < len(numbers) or not all(0 <= n < commit.plan.next_number for n in numbers):
            yield f"plans replicas under the numbers {numbers}"
        for replica in (*commit.plan.replicas, *commit.plan.forming):
            edges = [0, *(stage.last for stage in replica.stages)]
            if [s.first for s in replica.stages] != edges[:-1] or edges[-1] != manifest.model.n_layers:
                yield f"plans replica {replica.number} with stages that are not the whole model"


def _contribution(
    manifest: Manifest, plan: Plan, spec: ReplicaSpec, contribution: Contribution, wrong: set[str]
) -> Iterator[str]:
    name, work = f"replica {contribution.replica}", spec.work
    peers = tuple(share.peer for share in contribution.shares)
    if peers != spec.peers and (not spec.is_chain or not chain_repair.is_allowed(plan, spec, peers)):
        yield f"{name} has other peers than its plan and its spares"
        return
    if not 1 <= contribution.steps <= work.steps or contribution.tokens != manifest.train.tokens(
        contribution.steps, work.micro_batches
    ):
        yield f"{name}: its weight is wrong ({contribution.steps} steps cannot have {contribution.tokens} tokens)"
    for share in contribution.shares:
        if share.peer in wrong:
            yield f"{name} counts although the state of {short_peer(share.peer)} differed"
        if not part_lists.may_be_fetched(manifest, share):
            yield f"{name}: {short_peer(share.peer)} has a list of parts that no share of the run can have"
