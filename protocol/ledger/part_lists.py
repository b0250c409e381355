"""The list of a share's parts, for which a commit has only its root.

    list   msgpack [[shard, digest, size, norm], …], in canonical order of the shards, digests as 32 bytes
    root   the list's name as a blob (protocol/codec/blob_hash.py)

An offer carries its list whole. A reader of a commit gets the list like any payload, by its name
(docs/adr/0018-commits-of-roots.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from protocol.codec import blob_hash
from protocol.codec.formats import Codec
from protocol.errors import PotluckError, shown
from protocol.planning import memory
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire import framing
from protocol.wire.commit import Commit, Part, Share
from protocol.wire.plan import Plan, ReplicaSpec
from protocol.wire.schema import SchemaError, build, packed

Parts = tuple[Part, ...]
Lists = Mapping[str, Parts]


class BadList(PotluckError):
    """Bytes that are no list of parts."""


def pack(parts: Parts) -> bytes:
    return framing.pack_message(packed(parts))


def unpack(raw: bytes) -> Parts:
    """The parts of a list. Raises BadList."""
    try:
        data = framing.unpack_message(raw)
        parts = build(_List, {"parts": data}).parts
        if pack(parts) != raw:
            raise BadList("a list of parts is not in its canonical form")
        return parts
    except (framing.FrameError, SchemaError) as error:
        raise BadList(f"no list of parts ({shown(error)})") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _List:
    parts: tuple[Part, ...]


def root_of(parts: Parts) -> str:
    return blob_hash.name_of(pack(parts))


def share_of(peer: str, parts: Parts) -> Share:
    """Returns the commit's entry for these parts of `peer`."""
    raw = pack(parts)
    size, norm = sum(part.size for part in parts), total(part.norm for part in parts)
    return Share(peer=peer, root=blob_hash.name_of(raw), size=size, norm=norm, listed=len(raw))


def total(norms: Iterator[float] | Sequence[float]) -> float:
    """The L2 norm of parts with these L2 norms, the same on every machine; infinite where it is too large."""
    try:
        return math.sqrt(math.fsum(norm * norm for norm in norms))
    except OverflowError:
        return math.inf


@functools.lru_cache(maxsize=64)
def longest(manifest: Manifest) -> int:
    """The most bytes that a list of this run can have."""
    digest, most, shards = "f" * 64, blob_hash.MAX_BLOB_BYTES, layout.shard_names(manifest.model)
    return len(pack(tuple(Part(shard=shard, digest=digest, size=most, norm=0.1) for shard in shards)))


def may_be_fetched(manifest: Manifest, share: Share) -> bool:
    """Returns whether the share's list is no longer than one of this run can be."""
    return 0 < share.listed <= longest(manifest)


def why_not_of(share: Share, parts: Parts) -> str | None:
    """Why these parts are not those that a commit has `share` of; None if they are."""
    found = share_of(share.peer, parts)
    if found.root != share.root:
        return "its list of parts is not the one that it names"
    return None if found == share else "its size or norm is not that of its parts"


def why_refused(manifest: Manifest, plan: Plan | None, commit: Commit, lists: Lists) -> str | None:
    """Why a commit, or the `lists` of its shares, is invalid for the round's `plan`; None if they are valid."""
    if (unplanned := why_not_planned(manifest, plan, commit)) is not None:
        return unplanned
    for contribution, spec in zip(commit.contributions, _specs(manifest, plan, commit), strict=True):
        assert spec is not None
        for stage, share in zip(spec.stages, contribution.shares, strict=True):
            parts = lists[share.root]
            reason = why_not_of(share, parts) or why_not_parts(
                manifest, memory.stage_shards(manifest, stage.first, stage.last), parts
            )
            if reason is not None:
                return f"replica {contribution.replica}: {reason}"
    return None


def why_not_planned(manifest: Manifest, plan: Plan | None, commit: Commit) -> str | None:
    """Why a commit's contributions are not those of the round's `plan`, each once; None if they are. Lists are fetched
    only then: a commit has no more of them than the plan has stages."""
    counted = set[int]()
    for contribution, spec in zip(commit.contributions, _specs(manifest, plan, commit), strict=True):
        if spec is None or len(spec.stages) != len(contribution.shares):
            return f"replica {contribution.replica} is not the planned one"
        if contribution.replica in counted:
            return f"replica {contribution.replica} is counted twice"
        counted.add(contribution.replica)
    return None


def _specs(manifest: Manifest, plan: Plan | None, commit: Commit) -> Iterator[ReplicaSpec | None]:
    """The planned replica of each contribution, None where there is none."""
    planned = {r.number: r for r in plan.replicas} if plan is not None else {}
    for contribution in commit.contributions:
        spec = planned.get(contribution.replica)
        if spec is None and plan is not None:
            peers = tuple(share.peer for share in contribution.shares)
            spec = plan.taken(contribution.replica, peers, manifest.model.n_layers)
        yield spec


def why_not_parts(manifest: Manifest, shards: Sequence[str], parts: Parts) -> str | None:
    """Why these are not parts of exactly `shards` within their bounds; None if they are."""
    if tuple(part.shard for part in parts) != tuple(shards):
        return "it does not cover the planned shards"
    for part in parts:
        if not (math.isfinite(part.norm) and part.norm >= 0 and 0 < part.size <= largest_payload(manifest, part.shard)):
            return "a norm or size is not a number in range"
    return None if math.isfinite(total(part.norm for part in parts)) else "a norm or size is not a number in range"


def largest_payload(manifest: Manifest, shard: str) -> int:
    """The most bytes that a payload of `shard` can have."""
    return largest(manifest.outer.codec, manifest.model, shard)


def largest_update(manifest: Manifest) -> int:
    """The most bytes that the payloads of a full replica can have together."""
    return sum(largest_payload(manifest, shard) for shard in layout.shard_names(manifest.model))


@functools.lru_cache(maxsize=2 * layout.MAX_LAYERS)
def largest(codec: Codec, model: layout.ModelSpec, shard: str) -> int:
    """The most bytes that a payload of `shard` can have in this codec."""
    from protocol.codec import sparse

    return sparse.max_payload_size(codec, layout.shapes(model, shard))


def named(commit: Commit, lists: Lists, shards: Collection[str]) -> Iterator[tuple[Part, str]]:
    """(part, sender) of every payload of these shards that a commit names, as far as its lists are known."""
    for contribution in commit.contributions:
        for share in contribution.shares:
            for part in lists.get(share.root, ()):
                if part.shard in shards:
                    yield part, share.peer
