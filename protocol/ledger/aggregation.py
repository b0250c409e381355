"""Aggregates: in a round of many updates nodes add them up, and peers fetch the sum, of a size that does not depend on
how many there are.

    aggregate of a shard  =  Q(TopK(Σ_m w_m sent_m)),  `outer.aggregate_topk` of every 4096 entries
    θ                    -=  η aggregate

It follows from the commit and its payloads to the last bit, so anybody can compute it: every node does, and tells its
peers the digests (`Aggregated`). A peer takes what f + 1 of 3f + 1 members of the quorum say. Without that it computes
the aggregate from all updates, as a reader of the log does. Whether a round has aggregates follows from its commit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

from protocol.codec.formats import Codec
from protocol.codec.topk import Map
from protocol.ledger import part_lists
from protocol.ledger.part_lists import Lists
from protocol.run import layout
from protocol.run.manifest import AGGREGATE_WORTH, Manifest
from protocol.wire.commit import Aggregate, Commit, liars_borne
from protocol.wire.session import Aggregated


def is_aggregated(manifest: Manifest, commit: Commit) -> bool:
    """Returns whether the aggregates of this commit's updates are applied in place of the updates."""
    return bool(manifest.outer.aggregate_topk) and commit.payload_bytes >= AGGREGATE_WORTH * largest_aggregate(manifest)


def least_replicas(manifest: Manifest) -> int:
    """The fewest full replicas whose updates can have aggregates."""
    return -(-AGGREGATE_WORTH * largest_aggregate(manifest) // part_lists.largest_update(manifest))


def fetched_bytes(manifest: Manifest, commit: Commit) -> int:
    """The most bytes that a peer that holds all shards fetches to apply a commit."""
    return largest_aggregate(manifest) if is_aggregated(manifest, commit) else commit.payload_bytes


def most_fetched(manifest: Manifest) -> float:
    """The most that `fetched_bytes` gives for any commit of a run; infinite where it has no aggregates."""
    return AGGREGATE_WORTH * largest_aggregate(manifest) if manifest.outer.aggregate_topk else math.inf


@functools.lru_cache(maxsize=64)
def largest_aggregate(manifest: Manifest) -> int:
    """The most bytes that the aggregates of all shards can have together."""
    return sum(largest_part(manifest, shard) for shard in layout.shard_names(manifest.model))


def largest_part(manifest: Manifest, shard: str) -> int:
    """The most bytes that the aggregate of a shard can have."""
    return part_lists.largest(manifest.outer.aggregate_codec, manifest.model, shard)


Weighted = list[tuple[float, bytes]]
"""Weights and payloads, in the order of their addition."""


def lists_of(commit: Commit, read: Callable[[str], bytes]) -> Lists:
    """The lists of parts of a commit. Raises BadList, and what `read` raises for a name."""
    return {share.root: part_lists.unpack(read(share.root)) for share in commit.shares}


def contributions(commit: Commit, shard: str, lists: Lists, read: Callable[[str], bytes]) -> Weighted:
    """All payloads of a shard in a commit, with their weights. Raises what `read` raises for a name."""
    return [(weight, read(part.digest)) for weight, part, _ in commit.payloads(shard, lists)]


def applied(
    manifest: Manifest, commit: Commit, shard: str, contributions: Sequence[tuple[float, bytes]], run: Map = map
) -> tuple[Codec, Weighted]:
    """What θ of a shard moves by: the contributions, or their aggregate. Raises PayloadError.

    contributions: all payloads of the shard in the commit, with their weights, in its order
    """
    if not is_aggregated(manifest, commit):
        return manifest.outer.codec, list(contributions)
    return manifest.outer.aggregate_codec, [(1.0, aggregate(manifest, shard, contributions, run))]


def aggregate(manifest: Manifest, shard: str, contributions: Sequence[tuple[float, bytes]], run: Map = map) -> bytes:
    """The aggregate of a shard; arguments as of `applied`. Raises PayloadError."""
    from protocol.codec import sparse

    outer, shapes = manifest.outer, layout.shapes(manifest.model, shard)
    return sparse.aggregate(outer.codec, shapes, contributions, outer.aggregate_codec, run)


def why_not(manifest: Manifest, named: Sequence[Aggregate]) -> str | None:
    """Why these are not aggregates of all shards within their bounds; None if they are."""
    if tuple(each.shard for each in named) != layout.shard_names(manifest.model):
        return "they are not of the model's shards"
    if not all(0 < each.size <= largest_part(manifest, each.shard) for each in named):
        return "one has a size that no aggregate can have"
    return None


class Named:
    """The aggregates of the newest rounds, as nodes name them.

    After the commit of a round its own members name them; the next commit does, too.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._said: dict[str, Aggregated] = {}

    def add(self, node: str, said: Aggregated) -> None:
        """Takes what `node` says, in place of what it said before, unless no aggregates can be so."""
        if self._manifest.outer.aggregate_topk and why_not(self._manifest, said.aggregates) is None:
            self._said[node] = said

    def of(self, commit: Commit, log: Mapping[int, Commit]) -> tuple[Aggregate, ...]:
        """Returns the aggregates of a round: those in the next commit, else those that f + 1 of the 3f + 1 members of
        the next round name; empty while there are none."""
        if commit.round + 1 in log:
            return log[commit.round + 1].aggregates
        heard = [self._said[member] for member in commit.members if member in self._said]
        said = [each.aggregates for each in heard if each.round == commit.round]
        return next((each for each in said if said.count(each) > liars_borne(len(commit.members))), ())
