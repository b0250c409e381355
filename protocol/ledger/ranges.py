"""Limits for one range of addresses (a /24 of IPv4, a /48 of IPv6), since one customer may have many identities.

A range is limited in sessions and in its share of a plan (`range_sessions`, `range_share` of schedule.limits), except
for peers that an operator admitted. Private addresses have no range; relayed peers are one range.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping

from protocol.run.manifest import Manifest
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec

RELAYED = "relayed"
_BITS = {4: 24, 6: 48}
"""Of a range, by the version of IP."""


def range_of(where: str) -> str:
    """Returns the address range of a multiaddress; empty where the address does not tell operators apart."""
    if "/p2p-circuit" in where:
        return RELAYED
    try:
        host = ipaddress.ip_address(where.split("/")[2])
    except (ValueError, IndexError):
        return ""
    inner = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    host = inner or host
    if not host.is_global:
        return ""
    return str(ipaddress.ip_network((host, _BITS[host.version]), strict=False))


def limited(manifest: Manifest, plan: Plan, of: Mapping[str, str], share: float) -> Plan:
    """`plan` without the youngest replicas of ranges over their `share`; each keeps one. of: the range of each peer."""
    if share >= 1:
        return plan
    planned = (*plan.replicas, *plan.forming)
    weight = Counter(_weights(manifest, plan, of))
    most, cut = _most(planned, of, share), set[int]()
    for name in sorted(filter(None, weight)):
        theirs = [i for i, replica in enumerate(planned) if any(of.get(p) == name for p in replica.peers)]
        theirs.sort(key=lambda i: (i >= len(plan.replicas), planned[i].number))
        while weight[name] > most * weight.total() and sum(i not in cut for i in theirs) > 1:
            last = next(i for i in reversed(theirs) if i not in cut)
            cut.add(last)
            weight -= Counter(_parts(manifest, plan, planned[last], of))
    return _without(plan, cut) if cut else plan


def largest(manifest: Manifest, plan: Plan, of: Mapping[str, str], share: float) -> tuple[float, float]:
    """The largest part of what is planned that one range has, and the most that it may have. `of`, `share` as above."""
    weight = _weights(manifest, plan, of)
    found = max((part for name, part in weight.items() if name), default=0)
    return found / max(1, weight.total()), _most((*plan.replicas, *plan.forming), of, share)


def has_room(manifest: Manifest, plan: Plan | None, of: Mapping[str, str], peer: str, share: float) -> bool:
    """Returns whether a seat for `peer` leaves its range within its share."""
    if plan is None or not plan.seats or share >= 1:
        return True
    whole = (StageSpec(peer=peer, first=0, last=manifest.model.n_layers),)
    seated = plan.seated(ReplicaSpec(number=plan.next_number, stages=whole, work=plan.seats[0].work))
    return limited(manifest, seated, of, share).replica_of(peer) is not None


def _most(planned: Iterable[ReplicaSpec], of: Mapping[str, str], share: float) -> float:
    """The share of a range; an equal one for each range, and for each replica of others, at least."""
    groups = {name for replica in planned for p in replica.peers for name in [of.get(p) or f"peer {replica.peers[0]}"]}
    return max(share, 1 / max(1, len(groups)))


def _weights(manifest: Manifest, plan: Plan, of: Mapping[str, str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for replica in (*plan.replicas, *plan.forming):
        found.update(_parts(manifest, plan, replica, of))
    return found


def _parts(manifest: Manifest, plan: Plan, replica: ReplicaSpec, of: Mapping[str, str]) -> Counter[str]:
    """Planned weight of a replica by its members' ranges: tokens times blocks; the mean for a forming replica."""
    work = replica.work
    tokens = (
        manifest.train.tokens(work.steps, work.micro_batches) if replica in plan.replicas else _mean(manifest, plan)
    )
    found: Counter[str] = Counter()
    for peer, blocks in zip(replica.peers, replica.blocks, strict=True):
        found[of.get(peer, "")] += tokens * blocks
    return found


def _mean(manifest: Manifest, plan: Plan) -> int:
    works = [r.work for r in plan.replicas]
    tokens = sum(manifest.train.tokens(work.steps, work.micro_batches) for work in works)
    return max(1, tokens // max(1, len(works)))


def _without(plan: Plan, cut: set[int]) -> Plan:
    """Returns the plan without these replicas, forming ones too; members of no other replica become spares."""
    planned = (*plan.replicas, *plan.forming)
    kept = [i for i in range(len(planned)) if i not in cut]
    members = {p for i in kept for p in planned[i].peers}
    over = {p for i in cut for p in planned[i].peers} - members
    forming = [i for i in kept if i >= len(plan.replicas)]
    return dataclasses.replace(
        plan,
        replicas=tuple(planned[i] for i in kept if i < len(plan.replicas)),
        forming=tuple(planned[i] for i in forming),
        forming_since=tuple(plan.forming_since[i - len(plan.replicas)] for i in forming),
        spares=tuple(sorted({*plan.spares, *over})),
    )
