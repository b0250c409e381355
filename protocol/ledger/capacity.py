"""Bounds on the size of a commit, so that every reader can read its record. Pure.

A reader bounds a message in bytes and values (protocol/wire/framing.py) and entries of a list
(protocol/wire/schema.py). A plan is cut (`bounded`) so that both

    this commit    what it says of the round + the plan                                            <=  budget
    the next one   the most that it can say of the plan's replicas + a plan that is no longer      <=  budget

The budget is the reader's limit less the longest commit without replicas: envelope, digests, claims, decree,
MAX_DIVERGED, MAX_SPARES and REASONS_BYTES. Divergences and reasons beyond their bounds are left out (`foremost`,
`shortened`), and divergences are reported in a later round.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire import encoding, framing
from protocol.wire.commit import Commit, Contribution, Diverged, LeftOut, Share
from protocol.wire.decree import LONGEST_NOTE, MAX_OPERATORS, Invitation
from protocol.wire.framing import LARGEST, Cost
from protocol.wire.plan import Plan, ReplicaSpec
from protocol.wire.schema import AtMost, packed

MAX_DIVERGED = 2048
MAX_STRANGERS_DIVERGED = 64
"""Of MAX_DIVERGED, entries of peers that the plan does not name."""
MAX_SPARES = 4096
"""Of one plan; who is neither in a replica nor a spare waits for a later plan."""
REASONS_BYTES = 256 * 1024
"""Bytes that the reasons of all left-out replicas of a commit take together."""
SHORTEST_REASON_BYTES = 24
"""Bytes that a reason may always have."""
_ID, _INTEGER, _NUMBER, _CHARACTER = "d" * 64, 2**63, 1 / 3, "\U0010ffff"
"""The longest id or digest, numbers and character, as they are encoded."""


def cost(value: Any) -> Cost:
    """Returns the cost of a dataclass, a tuple of them, or plain data in a message."""
    data = value if isinstance(value, dict | str | int) else packed(value)
    return Cost(len(framing.pack_message(data)), _values(data))


def _values(data: Any) -> int:
    if isinstance(data, dict):
        return 1 + len(data) + sum(_values(value) for value in data.values())
    if isinstance(data, list):
        return 1 + sum(_values(value) for value in data)
    return 1


def longest(hint: Any, **given: Any) -> Any:
    """The longest value of a message type (protocol/wire/bounds.py); `given` replaces fields of a dataclass."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        base, count = args[0], args[1].count if isinstance(args[1], AtMost) else len(_ID)
        items = typing.get_args(base)
        if typing.get_origin(base) is tuple:
            return (longest(items[0]),) * count
        if typing.get_origin(base) is dict:
            return {f"{number:064}": longest(items[1]) for number in range(count)}
        if base is str:
            return _ID if count == len(_ID) else _CHARACTER * count
        return bytes(count) if base is bytes else _INTEGER if base is int else _NUMBER
    if origin in (types.UnionType, typing.Union):
        return longest(args[0])
    if hint is bool:
        return True
    if hint is Invitation:
        given = {"reason": _CHARACTER * LONGEST_NOTE, **given}
    hints = typing.get_type_hints(hint, include_extras=True)
    names = [field.name for field in dataclasses.fields(hint)]
    return hint(**{name: given[name] if name in given else longest(hints[name]) for name in names})


@functools.lru_cache(maxsize=64)
def budget(manifest: Manifest) -> Cost:
    """Returns the most that the contributions and the next plan of one commit may cost together."""
    names = layout.shard_names(manifest.model)
    without_replicas = longest(
        Commit,
        contributions=(),
        left_out=(),
        diverged=(longest(Diverged, shard=max(names, key=len)),) * MAX_DIVERGED,
        digests=dict.fromkeys(names, _ID),
        plan=longest(Plan, replicas=(), forming=(), forming_since=(), seats=(), spares=(_ID,) * MAX_SPARES),
        members=(_ID,) * MAX_OPERATORS,
    )
    heads = 64  # of long lists and maps
    whole = Cost(framing.MAX_MESSAGE - REASONS_BYTES - heads, framing.MAX_VALUES)
    return whole - _envelope() - cost(without_replicas)


@functools.cache
def _envelope() -> Cost:
    """A record with all its votes, or a message of the quorum."""
    votes = {f"{index:064}": bytes(64) for index in range(encoding.MAX_VOTES)}
    return cost(
        {"t": "longest name", "round": _INTEGER, "c": None, "n": _INTEGER, "l": [b""], "v": votes, "pledged": _ID}
    )


def can_be_read(commit: Commit) -> bool:
    """Returns whether its record can be read with all votes. A commit in another message may be too long for that."""
    try:
        return (cost(commit) + _envelope()).is_within(LARGEST)
    except framing.FrameError:
        return False


@functools.lru_cache(maxsize=64)
def _longest_contribution(stages: int) -> Cost:
    """Returns the most that a replica costs in a commit: its contribution, or the reason why it is left out."""
    counted, out = cost(longest(Contribution, shares=(longest(Share),) * stages)), _left_out(stages)
    return Cost(max(counted.size, out.size), max(counted.values, out.values))


@functools.lru_cache(maxsize=64)
def _left_out(peers: int) -> Cost:
    """A left-out replica and the makers of its work, without the rest of its reason (REASONS_BYTES)."""
    return cost(longest(LeftOut, reason="r" * SHORTEST_REASON_BYTES, peers=(_ID,) * peers, faults="1" * peers))


def bounded(
    manifest: Manifest, plan: Plan, contributions: tuple[Contribution, ...] = (), left_out: Sequence[LeftOut] = ()
) -> Plan:
    """`plan` with as many of its first replicas as fit into this commit and the next; the other members are spares."""
    whole = budget(manifest)
    said = functools.reduce(Cost.__add__, (_left_out(len(x.peers)) for x in left_out), cost(contributions))
    decided, planned = _longest_contribution(1).times(len(plan.seats)), cost(plan.seats)
    kept: list[ReplicaSpec] = []
    for replica in (*plan.replicas, *plan.forming):
        decided += _longest_contribution(len(replica.stages))
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
    """At most MAX_DIVERGED entries: members of `plan` first, then spares, then MAX_STRANGERS_DIVERGED others. Of each
    of these kinds the first entry of every peer comes first, one that the log refutes: those with many hide nobody."""
    planned = {peer for replica in (plan.replicas if plan else ()) for peer in replica.peers}
    named = plan.peers if plan else frozenset[str]()
    before, ranked = Counter[str](), list[tuple[int, int, Diverged]]()
    for d in sorted(diverged, key=lambda d: not d.refuted):
        ranked.append((0 if d.peer in planned else 1 if d.peer in named else 2, before[d.peer], d))
        before[d.peer] += 1
    ranked.sort(key=lambda entry: entry[:2])
    known = [d for kind, _, d in ranked if kind < 2]
    return (*known, *[d for kind, _, d in ranked if kind == 2][:MAX_STRANGERS_DIVERGED])[:MAX_DIVERGED]


def shortened(left_out: Sequence[LeftOut]) -> tuple[LeftOut, ...]:
    """Returns the entries with reasons of at most REASONS_BYTES bytes together."""
    most = max(SHORTEST_REASON_BYTES, REASONS_BYTES // max(len(left_out), 1))
    return tuple(
        x if len(x.reason.encode()) <= most else dataclasses.replace(x, reason=_cut(x.reason, most)) for x in left_out
    )


def _cut(text: str, most: int) -> str:
    return text.encode()[:most].decode(errors="ignore")
