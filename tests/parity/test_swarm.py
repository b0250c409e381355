"""The oracle: a whole swarm, daemons and bootstrap node and all, against the equations written out in reference.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bootstrap.archive import Archive
from peer.demo.text import demo_corpus
from protocol.codec import subspace
from protocol.run import data_order, init, layout
from tests.e2e import swarms
from tests.parity import reference

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_swarm_computes_what_the_equations_say(tmp_path: Path, overlap: int) -> None:
    chosen = swarms.options(tmp_path / "run", full=1, chains=1, stages=3, rank=(8,), inner_steps=3)
    chains = {"forward": "bf16", "backward": "bf16"}
    manifest = swarms.manifest(chosen, outer={"overlap": overlap}, chains=chains)
    swarms.run(chosen, manifest)
    archive = Archive(chosen.out / "bootstrap", manifest)
    commits = archive.commits
    archive.close()
    plan = commits[0].plan
    assert plan is not None
    assert [len(r.stages) for r in plan.replicas] == [1, 3]
    train, model = manifest.train, manifest.model
    corpus = demo_corpus()

    def windows(r: int, replica: int, step: int) -> np.ndarray:
        of_round = commits[r].plan
        assert of_round is not None
        work = of_round.replicas[replica].work
        assert (work.steps, work.micro_batches) == (train.inner_steps, train.micro_batches)
        at = data_order.slots(work.slot, step, train.step_rows)
        return corpus.slots(manifest.seed_bytes, at)

    config = {
        "model": dataclasses.asdict(model),
        "replicas": [{"stages": [(s.first, s.last) for s in r.stages], "k": r.rank} for r in plan.replicas],
        "outer": {name: getattr(manifest.outer, name) for name in manifest.outer.__slots__},
        "rounds": manifest.rounds,
        "wire": manifest.chains.forward,
        **{name: getattr(train, name) for name in train.__slots__},
    }
    theta0 = {
        name: array
        for shard in layout.shard_names(model)
        for (name, _), array in zip(
            layout.tensors(model, shard), init.initial_shard(model, manifest.seed_bytes, shard), strict=True
        )
    }
    basis = subspace.basis(manifest.seed_bytes, model.d_model, 8)
    expected, _ = reference.run(config, theta0, basis, windows)
    found = [[c.loss for c in commit.contributions] for commit in commits[1:]]
    np.testing.assert_allclose(np.array(found, dtype=float), expected, rtol=1e-4)
