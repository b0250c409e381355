"""The bounds that no plan exceeds, against the best of all plans."""

from __future__ import annotations

import random
import statistics

from protocol.planning.arrange import arrange
from tests.support import bounds, plans

SWARMS = 6
ROUNDED = 1.04
"""Of a chain's rate what the bound rounds up, at most."""


def test_no_plan_exceeds_the_bounds_and_the_best_comes_near() -> None:
    shares = []
    for seed in range(3 * SWARMS):
        rng = random.Random(seed)
        manifest = plans.small_manifest(rng)
        peers = plans.small_swarm(rng, manifest)[:5]
        best = plans.optimum(manifest, peers)
        found, _ = arrange(manifest, peers)
        bound = bounds.priced(manifest, peers, [(r.members, r.rate) for r in found])
        assert best <= bound * (1 + 1e-9)
        assert bound <= ROUNDED * bounds.paces(manifest, peers)
        if best > 0:
            shares.append(best / bound)
        if len(shares) == SWARMS:
            break
    assert len(shares) == SWARMS
    # it knows nothing of stages that wait for each other, nor of what a chain does between rounds
    assert statistics.mean(shares) > 0.5, "a bound that nothing comes near says nothing"


def test_of_full_replicas_alone_the_bound_is_what_they_bring() -> None:
    rng = random.Random(1)
    manifest = plans.manifest_of("0.5B")
    peers = [c for c in plans.volunteers(rng, 60) if c.memory_bytes > 20e9]
    found, _ = arrange(manifest, peers)
    ours = plans.total(manifest, peers, found)
    bound = bounds.priced(manifest, peers, [(r.members, r.rate) for r in found])
    assert ours <= bound * (1 + 1e-9)
    assert bound <= 1.01 * ours
