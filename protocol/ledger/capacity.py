"""Bounds on the size of a commit, so that every reader can read its record. Pure.

A reader bounds a message in bytes and values (protocol/wire/framing.py) and entries of a list (protocol/wire/schema.py).
A plan is cut (`bounded`) so that both

    this commit    what it says of the round + the plan                                            <=  budget
    the next one   the most that it can say of the plan's replicas + a plan that is no longer      <=  budget

The budget is the reader's limit less the longest commit without replicas: envelope, digests, claims, decree,
MAX_DIVERGED, MAX_SPARES and REASONS_BYTES. Divergences and reasons beyond their bounds are left out (`foremost`,
`shortened`), and divergences are reported in a later round.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire import encoding, framing
from protocol.wire.bounds import LONGEST_PLACE
from protocol.wire.claims import LONGEST_SAMPLE, MAX_MARKS, Audit, Evaluation, Mark, Score
from protocol.wire.commit import (
    MAX_AUDITS,
    MAX_EVALUATIONS,
    MAX_SCORES,
    Commit,
    Contribution,
    Diverged,
    LeftOut,
    Share,
)
from protocol.wire.decree import (
    ACTIONS,
    LONGEST_NOTE,
    LONGEST_REASON,
    MAX_APPOINTED,
    MAX_JOINED,
    MAX_OPERATORS,
    MAX_PLACES,
    Board,
    Decree,
    Enacted,
    Invitation,
    Joined,
    Limits,
    Operator,
    Schedule,
)
from protocol.wire.plan import Plan, ReplicaSpec
from protocol.wire.schema import packed

MAX_DIVERGED = 4096
"""Entries of one commit."""
MAX_STRANGERS_DIVERGED = 64
"""Of them, those of peers that the plan does not name."""
MAX_SPARES = 4096
"""Of one plan; who is neither in a replica nor a spare waits for a later plan."""
REASONS_BYTES = 256 * 1024
"""Bytes that the reasons of all left-out replicas of a commit take together."""
SHORTEST_REASON_BYTES = 24
"""Bytes that a reason may always have."""
_PEER, _DIGEST, _INTEGER, _NUMBER = "P" * 64, "d" * 64, 2**63, 1 / 3
"""The longest that there are of each kind, as they are encoded (protocol/identity.py takes no longer peer id)."""
_LIMITS = Limits(probation=_INTEGER, share=_NUMBER, range_sessions=_INTEGER, range_share=_NUMBER)
_OPERATOR = Operator(peer=_PEER, places=("\U0010ffff" * LONGEST_PLACE,) * MAX_PLACES)
_SCHEDULE = Schedule(rounds=_INTEGER, total_steps=_INTEGER, limits=_LIMITS)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a reader counts: bytes, and values (every number, text, list, map and key)."""

    size: int
    values: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.size + other.size, self.values + other.values)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.size - other.size, self.values - other.values)

    def times(self, count: int) -> Cost:
        """So many times this."""
        return Cost(self.size * count, self.values * count)

    def is_within(self, budget: Cost) -> bool:
        """Whether the budget allows this."""
        return self.size <= budget.size and self.values <= budget.values


def cost(value: Any) -> Cost:
    """What a dataclass, a tuple of them, or plain data takes in a message."""
    data = value if isinstance(value, dict | str | int) else packed(value)
    return Cost(len(framing.pack_message(data)), _values(data))


def _values(data: Any) -> int:
    if isinstance(data, dict):
        return 1 + len(data) + sum(_values(value) for value in data.values())
    if isinstance(data, list):
        return 1 + sum(_values(value) for value in data)
    return 1


@functools.lru_cache(maxsize=64)
def budget(manifest: Manifest) -> Cost:
    """What the contributions and the next plan of one commit may take together."""
    names = layout.shard_names(manifest.model)
    longest = max(names, key=len)
    empty = Commit(
        run=_DIGEST,
        round=_INTEGER,
        parent=_DIGEST,
        time=_NUMBER,
        contributions=(),
        left_out=(),
        diverged=(),
        digests=dict.fromkeys(names, _DIGEST),
        plan=Plan(round=_INTEGER, replicas=(), next_number=_INTEGER, next_slot=_INTEGER),
        leader=_PEER,
        members=(_PEER,) * MAX_OPERATORS,
        decrees=_INTEGER,
        schedule=_SCHEDULE,
        board=Board(operators=(_OPERATOR,) * MAX_OPERATORS, quorum=7),
        idle=_INTEGER,
    )
    reserved = [
        _envelope(),
        cost(empty),
        reserved_for_a_decree(),
        _longest_evaluation().times(MAX_EVALUATIONS),
        _longest_score().times(MAX_SCORES),
        _longest_audit().times(MAX_AUDITS),
        longest_joined().times(MAX_JOINED),
        cost(Diverged(peer=_PEER, shard=longest)).times(MAX_DIVERGED),
        cost(_PEER).times(MAX_SPARES),
        Cost(REASONS_BYTES + 64, 0),  # and what the heads of seven long lists and maps take
    ]
    return functools.reduce(Cost.__sub__, reserved, Cost(framing.MAX_MESSAGE, framing.MAX_VALUES))


@functools.cache
def _envelope() -> Cost:
    """Whatever a commit travels in: a record with all its votes, or a message of the quorum."""
    votes = {f"{_PEER[4:]}{index:04}": bytes(64) for index in range(encoding.MAX_VOTES)}
    return cost(
        {"t": "longest name", "round": _INTEGER, "c": None, "n": _INTEGER, "l": [b""], "v": votes, "pledged": _DIGEST}
    )


def can_be_read(commit: Commit) -> bool:
    """Whether its record can be read, whoever votes for it. A commit that came as another message may be too long for
    that."""
    try:
        return (cost(commit) + _envelope()).is_within(Cost(framing.MAX_MESSAGE, framing.MAX_VALUES))
    except framing.FrameError:
        return False


def reserved_for_a_decree() -> Cost:
    """What the longest one takes."""
    signatures = {f"{_PEER[4:]}{index:04}": bytes(64) for index in range(encoding.MAX_VOTES)}
    reason = "\U0010ffff" * LONGEST_REASON
    enacted = Enacted(
        decree=Decree(
            run=_DIGEST,
            number=_INTEGER,
            action=max(ACTIONS, key=len),
            subject=_PEER,
            reason=reason,
            schedule=_SCHEDULE,
            operators=(_OPERATOR,) * MAX_APPOINTED,
            quorum=7,
        ),
        signatures=signatures,
    )
    return cost(enacted)


def _longest_evaluation() -> Cost:
    return cost(
        Evaluation(
            peer=_PEER,
            round=_INTEGER,
            sequences=_INTEGER,
            loss=_NUMBER,
            bits_per_byte=_NUMBER,
            signature=bytes(64),
            sample="\U0010ffff" * LONGEST_SAMPLE,
        )
    )


def _longest_score() -> Cost:
    mark = Mark(replica=_INTEGER, assigned=_NUMBER, other=_NUMBER)
    return cost(Score(peer=_PEER, round=_INTEGER, marks=(mark,) * MAX_MARKS, signature=bytes(64)))


def _longest_audit() -> Cost:
    return cost(Audit(peer=_PEER, round=_INTEGER, replica=_INTEGER, agreement=-_NUMBER, signature=bytes(64)))


def longest_joined() -> Cost:
    """What it takes at most to say that one peer comes in by an invitation."""
    note = "\U0010ffff" * LONGEST_NOTE
    invitation = Invitation(run=_DIGEST, key=_PEER, expires=_INTEGER, count=_INTEGER, reason=note)
    return cost(Joined(invitation=invitation, operator=_PEER, signature=bytes(64), peer=_PEER, proof=bytes(64)))


def _decided(replica: ReplicaSpec) -> Cost:
    """What a commit says of a replica, at most: its contribution, or why it is left out."""
    return _longest_contribution(len(replica.stages))


@functools.lru_cache(maxsize=64)
def _longest_contribution(stages: int) -> Cost:
    share = Share(peer=_PEER, root=_DIGEST, size=_INTEGER, norm=_NUMBER, listed=_INTEGER)
    found = Contribution(
        replica=_INTEGER,
        tokens=_INTEGER,
        steps=_INTEGER,
        loss=_NUMBER,
        shares=(share,) * stages,
        scale=_NUMBER,
        standing=_NUMBER,
    )
    counted, out = cost(found), _left_out(stages)
    return Cost(max(counted.size, out.size), max(counted.values, out.values))


@functools.lru_cache(maxsize=64)
def _left_out(peers: int) -> Cost:
    """What a commit says of a replica that is left out and of so many peers who made its work, beside the REASONS_BYTES."""
    out = LeftOut(
        replica=_INTEGER, reason="r" * SHORTEST_REASON_BYTES, judged=_PEER, peers=(_PEER,) * peers, probation=True
    )
    return cost(out)


def bounded(
    manifest: Manifest, plan: Plan, contributions: tuple[Contribution, ...] = (), left_out: Sequence[LeftOut] = ()
) -> Plan:
    """`plan` with as many of its replicas, the first ones, as there is space for in a commit with these contributions
    and these `left_out`, and in the next one for what it says of them; the members of the others are spares."""
    whole = budget(manifest)
    said = functools.reduce(Cost.__add__, (_left_out(len(x.peers)) for x in left_out), cost(contributions))
    decided, planned = _longest_contribution(1).times(len(plan.seats)), cost(plan.seats)
    kept: list[ReplicaSpec] = []
    for replica in (*plan.replicas, *plan.forming):
        decided += _decided(replica)
        planned += cost(replica) + (cost(_INTEGER) if len(kept) >= len(plan.replicas) else Cost(0, 0))  # forming_since
        if not ((said + planned).is_within(whole) and (decided + planned).is_within(whole)):
            break
        kept.append(replica)
    replicas, forming = plan.replicas[: len(kept)], tuple(kept[len(plan.replicas) :])
    if (replicas, forming) == (plan.replicas, plan.forming) and len(plan.spares) <= MAX_SPARES:
        return plan
    members = {peer for replica in kept for peer in replica.peers}
    cut = (*plan.replicas, *plan.forming)[len(kept) :]
    over = {peer for replica in cut for peer in replica.peers if peer not in members}
    spares = tuple(sorted([*plan.spares, *over])[:MAX_SPARES])
    since = plan.forming_since[: len(forming)]
    return dataclasses.replace(plan, replicas=replicas, forming=forming, forming_since=since, spares=spares)


def foremost(diverged: Sequence[Diverged], plan: Plan | None) -> tuple[Diverged, ...]:
    """At most MAX_DIVERGED of `diverged`; those of the members of `plan`, whose work waits for it, before all others,
    of whom at most MAX_STRANGERS_DIVERGED: anybody may attest anything, and the log is for ever."""
    planned = {peer for replica in (plan.replicas if plan else ()) for peer in replica.peers}
    named = {peer for replica in (plan.forming if plan else ()) for peer in replica.peers}
    named.update(plan.spares if plan else ())
    strangers = [d for d in diverged if d.peer not in planned and d.peer not in named][:MAX_STRANGERS_DIVERGED]
    first = [d for d in diverged if d.peer in planned]
    return (*first, *(d for d in diverged if d.peer in named and d.peer not in planned), *strangers)[:MAX_DIVERGED]


def shortened(left_out: Sequence[LeftOut]) -> tuple[LeftOut, ...]:
    """The same, with reasons that take at most REASONS_BYTES bytes together."""
    most = max(SHORTEST_REASON_BYTES, REASONS_BYTES // max(len(left_out), 1))
    return tuple(
        x if len(x.reason.encode()) <= most else dataclasses.replace(x, reason=_cut(x.reason, most)) for x in left_out
    )


def _cut(text: str, most: int) -> str:
    return text.encode()[:most].decode(errors="ignore")
