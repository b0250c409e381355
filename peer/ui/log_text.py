"""The log of a run as text and as JSON, and what its verification found: `potluck log`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer.log.reader import Source
from peer.ui.lines import decreed
from peer.ui.text import clean, cleaned, count, mean_loss, readable, size
from protocol.errors import LocalError, UsageError
from protocol.identity import short_peer
from protocol.ledger import history, part_lists, schedule, standing
from protocol.ledger.audits import LEAST_AGREEMENT
from protocol.ledger.credits import Credits
from protocol.ledger.history import BadCommit
from protocol.ledger.standing import Standing
from protocol.planning import partition
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit, Record
from protocol.wire.plan import Plan
from protocol.wire.schema import plain

if TYPE_CHECKING:
    from protocol.codec.topk import Empty


async def show(manifest: Manifest, source: Source, out: Callable[[str], None], note: Callable[[str], None]) -> None:
    """Tells the rounds as a person wants them. Raises what `source` raises, and LocalError at a commit that is not to
    be believed."""
    out(f"run {manifest.run_id[:12]} {clean(manifest.name)}: log {source.name}")
    plan: Plan | None = None
    async for record in believed(manifest, source, note):
        for line in round_lines(record, plan, schedule.last_round(manifest, record.commit)):
            out(line)
        plan = record.commit.plan


async def show_json(
    manifest: Manifest, source: Source, out: Callable[[dict[str, Any]], None], note: Callable[[str], None]
) -> None:
    """Tells one map per round: its record, and the commit's digest. Raises like `show`."""
    async for record in believed(manifest, source, note):
        out({"digest": record.commit.digest, **plain(record)})


async def credits_of(
    manifest: Manifest, source: Source, note: Callable[[str], None]
) -> tuple[Credits, Standing, Commit | None]:
    """Who has contributed what, what else the log says of them, and the newest commit. Raises like `show`."""
    credits, now, head = Credits(manifest.model.n_layers), standing.of(manifest), None
    async for record in believed(manifest, source, note):
        credits.add(head := record.commit)
        now = now.after(head)
    return credits, now, head


async def believed(manifest: Manifest, source: Source, note: Callable[[str], None]) -> AsyncIterator[Record]:
    """The records of a log, checked one after the other. Raises LocalError at the first that cannot be believed, and like the source."""
    before: Commit | None = None
    try:
        async for raw in source.records(note):
            record = history.follow(manifest, before, raw)
            yield record
            before = record.commit
    except BadCommit as error:
        round = 0 if before is None else before.round + 1
        raise LocalError(f"log {source.name}: round {round}: the commit {error}; compare with another node's") from None


async def verify(
    manifest: Manifest,
    source: Source,
    checkpoint: Path | None,
    out: Callable[[str], None],
    note: Callable[[str], None],
    empty: Empty,
) -> None:
    """Says all that is wrong with a log, and what it proves. `empty` makes the arrays of the model's state. Raises LocalError when
    something is wrong."""
    from peer.log import replay

    start = replay.start_from(manifest, checkpoint, empty) if checkpoint else None

    def report(problem: replay.Problem) -> None:
        out(clean(str(problem), 400))

    done = await replay.verify(manifest, source.records(note), source.payload, report, start, empty)
    head = done.head.round if done.head else -1
    if start is not None and start.round >= head:
        raise UsageError(
            f"checkpoint {checkpoint}: is of round {start.round}, the log ends at round {head}; give an older one"
        )
    out(
        f"run {manifest.run_id[:12]} {clean(manifest.name)}: {count(range(head + 1), 'commit')},"
        f" {count(range(done.contributions), 'contribution')}; replayed {count(range(done.payloads), 'payload')}"
        f" ({size(done.payload_bytes)}) from round {start.round if start else 0} on"
    )
    out(f"{done.agreed} of {done.attested} attested digests of shards are what the replay gives")
    names = layout.shard_names(manifest.model)
    if head >= 0 and set(names) <= set(done.digests):
        out(f"state after round {head}: {layout.state_digest(manifest.model, done.digests)}")
    if done.problems:
        raise LocalError(
            f"log {source.name}: {count(done.problems, 'problem')}; compare with another node's before you build on it"
        )


def round_lines(record: Record, plan: Plan | None, rounds: int) -> list[str]:
    """A record of a run of `rounds` rounds in a few lines; `plan` is that of its round."""
    record = cleaned(record)
    commit, total = record.commit, sum(c.tokens for c in record.commit.contributions)
    lines = [_title(record, plan)]
    for c in commit.contributions:
        own, norm = "-" if c.loss is None else f"{c.loss:.3f}", part_lists.total(share.norm for share in c.shares)
        lines.append(
            f"  {_name(plan, c.replica):<13} weight {c.tokens / total:.3f}  loss {own:>6}  steps {c.steps:<3} {size(c.size):>8}"
            f"  norm {norm:<6.3g}  {_peers(c.peers)}" + (f"  counts as {c.standing:.0%}" if c.standing < 1 else "")
        )
    for left in commit.left_out:
        what = "no weight yet" if left.probation else "left out"
        spec = plan.find(left.replica) if plan is not None else None
        peers = left.peers or (spec.peers if spec is not None else ())
        lines.append(f"  {_name(plan, left.replica):<13} {what}: {readable(left.reason, {})}  {_peers(peers)}")
    for d in commit.diverged:
        lines.append(f"  {'diverged':<13} {_peers((d.peer,))} in {d.shard} after round {commit.round - 1}")
    for x in commit.evaluations:
        figures = f"loss {x.loss:.3f}, {x.bits_per_byte:.3f} bits per byte, {count(range(x.sequences), 'sequence')}"
        lines.append(f"  {'held out':<13} {figures}, after round {x.round}  {_peers((x.peer,))}")
        if x.sample:
            lines.append(f"  {'it writes':<13} {x.sample}")
    for said in commit.scores:
        for mark in said.marks:
            figures = f"{mark.assigned:+.5f} on its own text, {mark.other:+.5f} on other"
            lines.append(
                f"  {'scored':<13} replica {mark.replica} of round {said.round}: {figures}  {_peers((said.peer,))}"
            )
    for audit in commit.audits:
        found = "is what it says" if audit.agreement >= LEAST_AGREEMENT else "is not what it says"
        what = f"replica {audit.replica} in round {audit.round} {found}: agreement {audit.agreement:.1f}"
        lines.append(f"  {'trained again':<13} {what}  {_peers((audit.peer,))}")
    if commit.decree is not None:
        lines.append(f"  {'decree':<13} {decreed(commit.decree.decree, {})}")
    for guest in commit.joined:
        why = f": {guest.invitation.reason}" if guest.invitation.reason else ""
        by = f"by {_peers((guest.operator,))}, invitation {_peers((guest.invitation.key,))}"
        lines.append(f"  {'invited':<13} {_peers((guest.peer,))} {by}{why}")
    if commit.plan is not None and (plan is None or _who(commit.plan) != _who(plan)):
        lines += _plan_lines(commit.plan, plan)
    elif commit.plan is None and commit.round < rounds:
        lines.append(f"  {'plan':<13} none: nobody was there to train the next round")
    return lines


def _title(record: Record, plan: Plan | None) -> str:
    commit = record.commit
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(max(commit.time, 0.0), 2.0**32)))
    title = f"round {commit.round}  {when}"
    if commit.round:
        loss = mean_loss(commit.contributions)
        title += f"  {len(commit.contributions)} of {count(plan.replicas if plan else (), 'replica')}"
        title += f"  loss {loss:.3f}" if loss is not None else ""
        title += f"  {size(sum(c.size for c in commit.contributions))}"
    if len(commit.members) > 1:
        title += f"  {len(record.votes)} votes, led by {short_peer(commit.leader)}"
    return title


def _plan_lines(plan: Plan, before: Plan | None) -> list[str]:
    """The next round's `plan`, and which blocks move since the plan `before`."""
    chains = [r for r in plan.replicas if r.is_chain]
    lengths = f" of {', '.join(str(len(r.stages)) for r in chains)}" if chains else ""
    lines = [
        f"  {'plan':<13} {len(plan.replicas) - len(chains)} full, {count(chains, 'chain')}{lengths},"
        f" {count(plan.spares, 'spare')}" + (f", {len(plan.forming)} forming" if plan.forming else "")
    ]
    for replica, old, new in partition.moves(before, plan):
        shapes = " become ".join(" > ".join(map(str, chain.blocks)) for chain in (old, new))
        lines.append(f"  {f'{replica} moved':<13} blocks {shapes}  {_peers(new.peers)}")
    return lines


def _who(plan: Plan) -> tuple[object, ...]:
    places = [(r.number, r.rank, r.stages) for r in (*plan.replicas, *plan.forming)]
    return places, len(plan.forming), plan.spares


def _name(plan: Plan | None, number: int) -> str:
    """A replica with its kind in the round's plan."""
    spec = plan.find(number) if plan is not None else None
    if spec is None:
        return f"{number} unplanned"
    return f"{number} chain rank {spec.rank}" if spec.is_chain else f"{number} full"


def _peers(peers: Sequence[str]) -> str:
    return " > ".join(map(short_peer, peers))
