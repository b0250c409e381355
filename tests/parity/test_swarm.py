"""The oracle: a whole swarm, daemons and bootstrap node and all, against the equations written out in reference.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bootstrap.archive import Archive
from peer.demo.recipe import demo_corpus
from protocol.run import init, layout
from protocol.run.corpus import slots
from protocol.run.layout import RopeScaling
from tests.e2e import swarms
from tests.parity import reference
from tests.support.family import FAMILY

pytestmark = pytest.mark.slow


TODAY = {
    "num_key_value_heads": 1, "use_qk_norm": True, "document_end_id": 0,
    "rope_scaling": RopeScaling(rope_type="llama3", factor=4.0, original_max_position_embeddings=32),
}  # fmt: skip


SOME = ("diloco", "diloco in int8", "dct", "cocktail")


@pytest.mark.parametrize(
    ("outer", "model", "train"),
    [
        ({}, {}, {}), ({"overlap": 1}, {}, {}), ({}, TODAY, {}), ({}, {}, {"optimizer": "muon"}),
        *((FAMILY[name], {}, {}) for name in SOME), ({**FAMILY["diloco"], "overlap": 1}, {}, {}),
    ],
    ids=["waits", "overlaps", "today's architecture", "muon", *SOME, "diloco overlaps"],
)  # fmt: skip
def test_the_swarm_computes_what_the_equations_say(
    tmp_path: Path, outer: dict[str, Any], model: dict[str, Any], train: dict[str, Any]
) -> None:
    chosen = swarms.options(tmp_path / "run", full=1, chains=1, stages=3, residual_width=8, inner_steps=3)
    chains = {"forward": "bf16", "backward": "bf16"}
    manifest = swarms.manifest(chosen, outer=outer, chains=chains, model=model, train=train)
    swarms.run(chosen, manifest)
    archive = Archive(chosen.out / "bootstrap", manifest)
    commits = archive.commits
    archive.close()
    plan = commits[0].plan
    assert [len(r.stages) for r in plan.replicas] == [1, 3]
    inner, spec = manifest.train, manifest.model
    corpus = demo_corpus()

    def windows(r: int, replica: int, step: int) -> np.ndarray:
        of_round = commits[r].plan
        work = of_round.replicas[replica].work
        assert (work.steps, work.micro_batches) == (inner.inner_steps, inner.micro_batches)
        at = slots(work.slot, step, inner.step_rows)
        return corpus.slots(manifest.seed_bytes, at)

    config = {
        "model": dataclasses.asdict(spec),
        "replicas": [{"stages": [(s.first, s.last) for s in r.stages]} for r in plan.replicas],
        "outer": {**dataclasses.asdict(manifest.outer), "seed": manifest.seed_bytes},
        "rounds": manifest.rounds,
        "wire": manifest.chains.forward,
        **{name: getattr(inner, name) for name in inner.__slots__},
    }
    theta0 = {
        name: array
        for shard in layout.shard_names(spec)
        for (name, _), array in zip(
            layout.tensors(spec, shard), init.initial_shard(spec, manifest.seed_bytes, shard), strict=True
        )
    }
    expected, _ = reference.run(config, theta0, windows)
    found = [[c.loss for c in commit.contributions] for commit in commits[1:]]
    np.testing.assert_allclose(np.array(found, dtype=float), expected, rtol=1e-4)
