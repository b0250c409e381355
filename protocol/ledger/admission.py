"""Which offers are admitted to a commit: pure functions of the manifest, the plan and what is offered.

A payload's bytes are checked where it is decoded (protocol/codec/sparse.py), and what it does is judged when all are there
(protocol/round/judging.py). Here are the rules about what an offer says.
"""

from __future__ import annotations

import functools

from protocol.ledger import part_lists
from protocol.planning import memory
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.plan import ReplicaSpec
from protocol.wire.session import Attest, Offer

MAX_DIGEST = 64
"""Characters of a shard's digest: what is attested gets into commits."""


def is_sound(manifest: Manifest, attest: Attest) -> bool:
    """Whether what is attested can be compared: digests of shards that the model has."""
    known = _shards(manifest.model)
    return all(shard in known and len(digest) <= MAX_DIGEST for shard, digest in attest.digests.items())


@functools.lru_cache(maxsize=8)
def _shards(model: layout.ModelSpec) -> frozenset[str]:
    return frozenset(layout.shard_names(model))


def why_refused(manifest: Manifest, spec: ReplicaSpec, peer: str, offer: Offer) -> str | None:
    """Why `offer` is not admitted as `peer`'s share of the replica `spec`; None if it is.

    Raises ValueError where `peer` is not a member of `spec`.
    """
    stage, train = spec.stage_of(peer), manifest.train
    wanted = memory.stage_shards(manifest, stage.first, stage.last)
    if offer.replica != spec.number:
        return "it does not cover the planned shards"
    if not 1 <= offer.steps <= spec.work.steps or offer.tokens != train.tokens(offer.steps, spec.work.micro_batches):
        return "steps and tokens do not agree with the plan"
    return part_lists.why_not_parts(manifest, wanted, offer.parts)
