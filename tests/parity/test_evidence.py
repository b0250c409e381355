"""`make evidence` in its smallest form: the arms by their equations, kills that change no bit, and the page."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.benchmarks import arms, evidence, evidence_arms, evidence_page, plot
from tests.benchmarks.arms import EMBED, Arm, Swarm
from tests.benchmarks.subspace import GRASSMANN_ROUNDS, Subspace

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
TINY = evidence_arms.SCALES["tiny"]
WRITER = "model.layers.1.mlp.down_proj.weight"


def made(text: str, rows: int = 1) -> Swarm:
    """A tiny arm of seed 0."""
    arm = Arm.of(text)
    manifest = TINY.manifest(arm)
    manifest = replace(manifest, train=replace(manifest.train, rows=rows))
    return arms.swarm_of(arm, manifest, [0], torch.device("cpu"), TINY.cuts)


def trained(swarm: Swarm, steps: int = 3) -> Swarm:
    """The swarm after a round's inner steps. Arms with as many rows in all have the same text."""
    draw = torch.Generator().manual_seed(0)
    train = swarm.made.train
    swarm.begin_round()
    for _ in range(steps):
        ids = torch.randint(TINY.vocabulary, (swarm.E * train.rows, train.sequence + 1), generator=draw)
        swarm.step(ids.view(swarm.E, train.rows, -1))
    return swarm


def outside(swarm: Subspace, table: torch.Tensor) -> torch.Tensor:
    """What of rows [E, V, D] is orthogonal to the subspace."""
    return table - torch.einsum("evd,edk,eck->evc", table, swarm.basis, swarm.basis)


# --- arms


def test_a_cut_as_wide_as_the_model_changes_nothing() -> None:
    chain, full = trained(made(f"c/adamw/s={TINY.width}")), trained(made("f/adamw"))
    for name, x in full.parameters.items():
        torch.testing.assert_close(chain.parameters[name], x, rtol=0, atol=2e-4)


def test_a_cut_passes_what_lies_in_the_subspace_and_the_rest_of_the_embedding() -> None:
    swarm = made("c/adamw/s=3")
    x, ids = torch.randn(1, 5, TINY.width), torch.arange(5)[None]
    fixed = outside(swarm, swarm.theta[EMBED])[:, :5]
    u = swarm.basis[0]
    expected = (x[0] - fixed[0]) @ u @ u.T + fixed[0]
    found = swarm.cut(swarm.parameters, 1, x, ids, arms.ALL)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert torch.linalg.matrix_rank(found - fixed[0], tol=1e-4) == 3


def test_only_full_replicas_train_the_embedding_outside_the_subspace_until_it_is_split_again() -> None:
    swarm = made("fc/adamw/s=2")
    before = outside(swarm, swarm.theta[EMBED])
    after = outside(trained(swarm), swarm.parameters[EMBED].detach())
    assert float((after[0] - before[0]).abs().max()) > 1e-3
    torch.testing.assert_close(after[1], before[1], rtol=0, atol=1e-5)
    assert not torch.equal(swarm.parameters[EMBED][1], swarm.theta[EMBED][1])
    swarm.end_round()
    torch.testing.assert_close(swarm.perp, outside(swarm, swarm.theta[EMBED]), rtol=0, atol=1e-5)
    assert float((swarm.perp - before).abs().max()) > 1e-3
    fixed = made("fc/adamw/s=2,fixed")
    trained(fixed).end_round()
    torch.testing.assert_close(fixed.perp, before, rtol=0, atol=1e-6)


def test_projected_weights_lie_in_the_subspace_of_a_chain() -> None:
    swarm = trained(made("fc/adamw/s=2,weights"))
    left = outside(swarm, swarm.parameters[WRITER].detach().mT)
    assert float(left[1].abs().max()) < 1e-5 < 1e-3 < float(left[0].abs().max())


def test_rowwise_steps_of_a_gradient_in_the_subspace_lie_in_it() -> None:
    swarm, plain = made("c/adamw/s=2,rowwise"), made("c/adamw/s=2")
    for x in (swarm, plain):
        x.steps = 1
        inside = torch.randn(1, TINY.feed_forward, TINY.width, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            x.parameters[WRITER].zero_()
            x.adamw(WRITER, (inside - outside(x, inside)).mT.contiguous(), 0.1)
    left = [float(outside(x, x.parameters[WRITER].detach().mT).abs().max()) for x in (swarm, plain)]
    assert left[0] < 1e-4 < 1e-2 < left[1]


def test_a_grassmann_step_loses_less_of_the_gradients() -> None:
    swarm, rounds = made("cc/adamw/s=2,grassmann"), GRASSMANN_ROUNDS
    for r in range(rounds):
        trained(swarm)
        before, moment = swarm.basis.clone(), swarm.moment.mean(0)
        assert float(moment.diagonal().min()) > 0
        swarm.end_round()
        assert torch.equal(swarm.basis, before) == (r + 1 < rounds)
    kept_before, kept = (torch.einsum("dk,dc,ck->", u, moment, u) for u in (before[0], swarm.basis[0]))
    assert kept > kept_before
    torch.testing.assert_close(swarm.basis[0].T @ swarm.basis[0], torch.eye(2), rtol=0, atol=1e-5)
    assert torch.equal(swarm.basis[0], swarm.basis[1])


def test_averaged_gradients_train_as_one_replica_with_all_rows_does() -> None:
    many, one = trained(made("ff/adamw/average")), trained(made("f/adamw", rows=2))
    for name, x in many.parameters.items():
        assert torch.equal(x[0], x[1])
        torch.testing.assert_close(x[:1], one.parameters[name], rtol=0, atol=2e-5)
    many.end_round()
    torch.testing.assert_close(many.theta[WRITER], many.parameters[WRITER], rtol=0, atol=1e-6)


def test_diloco_is_sgd_with_nesterov_momentum_of_the_mean_displacement() -> None:
    swarm = made("ff/adamw/nesterov,eta=0.7")
    theirs = torch.nn.Parameter(swarm.theta[WRITER][0].clone())
    sgd = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(3):
        trained(swarm)
        theirs.grad = swarm.theta[WRITER][0] - swarm.parameters[WRITER].detach().mean(0)
        sgd.step()
        swarm.end_round()
        for replica in swarm.theta[WRITER]:
            torch.testing.assert_close(replica, theirs.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("text", ["ffcc/adamw/s=3", "ffcc/muon/6:int8:int4"])
def test_products_in_bf16_as_on_a_gpu_give_about_the_same_losses(text: str) -> None:
    mixed, exact = made(text), made(text)
    mixed.is_mixed = True
    ids = torch.randint(TINY.vocabulary, (4, 1, TINY.sequence + 1), generator=torch.Generator().manual_seed(0))
    for swarm in (mixed, exact):
        for _ in range(3):
            swarm.step(ids)
    torch.testing.assert_close(mixed.loss(ids), exact.loss(ids), rtol=0.01, atol=0)
    assert not torch.equal(mixed.loss(ids), exact.loss(ids))


def test_values_of_updates() -> None:
    e = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(0))
    kept = {kind: arms.sparse(e, 32, kind)[0] for kind in ("fp32", "sym2", "ref2")}
    at = kept["fp32"] != 0
    assert torch.equal(kept["fp32"][at], e[0][at])
    assert float(e[0][at].abs().min()) >= float(e[0][~at].abs().max())
    v = np.sort(e[0][at].double().numpy())
    bins = np.clip(np.rint((v - v.mean()) / (1.5 * v.std(ddof=1))), -2, 1)
    expected = np.concatenate([np.full((bins == b).sum(), v[bins == b].mean()) for b in np.unique(bins)])
    np.testing.assert_allclose(np.sort(kept["ref2"][at].numpy()), expected, atol=1e-5)
    assert len(kept["sym2"][at].unique()) == 4


# --- kills


def bare(row: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the clock."""
    return {name: value for name, value in row.items() if name != "seconds"}


class _Killed(Exception):
    pass


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """The rows of all jobs. Their text is in a cache of these tests."""
    folder = tmp_path_factory.mktemp("undisturbed")
    jobs = evidence.todo(TINY, TINY.arms, TINY.passes, [])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(folder))
        yield [evidence_arms.carry_out(job, "cpu", None, folder) for job in jobs]


@pytest.mark.slow
def test_a_job_goes_on_from_its_checkpoint_to_the_same_bits(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    for number, job in enumerate(evidence.todo(TINY, TINY.arms, TINY.passes[:1], [])):
        lines = []

        def told(line: str, lines: list[str] = lines) -> None:
            lines.append(line)
            if len(lines) == 2:
                raise _Killed

        with pytest.raises(_Killed):
            evidence_arms.carry_out(job, "cpu", None, tmp_path, told)
        assert f"round 2 of {TINY.rounds}" in lines[1]
        again: list[str] = []
        row = evidence_arms.carry_out(job, "cpu", None, tmp_path, again.append)
        assert len(again) == TINY.rounds - 3, "it began behind the checkpoint"
        assert bare(row) == bare(undisturbed[number])


@pytest.mark.slow
def test_a_killed_command_goes_on_to_the_same_rows_and_writes_the_page(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    keep, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    command = [sys.executable, "-m", "tests.benchmarks.evidence", "--scale", "tiny", "--keep", str(keep)]
    with subprocess.Popen([*command, "--page", str(page)], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        end = time.monotonic() + DEADLINE_S
        while not any((tmp_path / "rows.parts").glob("*.pt")) and not keep.exists():
            assert process.poll() is None
            assert time.monotonic() < end
            os.sched_yield()
        os.kill(process.pid, signal.SIGKILL)
    assert not page.exists()
    keep.open("ab").write(b'{"scale": "tiny", "arm": "cut off')
    done = subprocess.run([*command, "--page", str(page)], cwd=ROOT, timeout=DEADLINE_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = evidence.read(keep)
    key = lambda row: (row["arm"], row["seeds"])  # noqa: E731
    assert sorted(map(bare, rows), key=key) == sorted(map(bare, undisturbed), key=key)
    assert page.read_text() == evidence_page.page(rows, [TINY], "page.svg")
    assert evidence.read(page.with_suffix(".jsonl")) == rows
    assert page.with_suffix(".svg").read_text().startswith("<svg")


# --- the page


def test_the_page_in_the_documents_is_made_of_its_rows() -> None:
    path = ROOT / "docs" / "results" / "evidence.md"
    rows = evidence.read(path.with_suffix(".jsonl"))
    assert path.read_text() == evidence_page.page(rows, evidence.SHOWN, "evidence.svg")
    drawn = evidence_page.picture(evidence_page.losses_of(rows, evidence.SHOWN[0]), evidence.SHOWN[0])
    assert path.with_suffix(".svg").read_text() == drawn


def test_what_three_seeds_decide() -> None:
    verdict = evidence_page.verdict
    assert verdict([], False) == "undecided: n = 0"
    assert verdict([-1.0, -1.0], False) == "undecided: n = 2"
    assert verdict([-0.02, -0.03, -0.025], False) == "yes"
    assert verdict([0.02, 0.03, 0.025], False) == "no"
    assert verdict([-0.02, 0.03, -0.025], False) == "undecided"
    assert verdict([0.001, -0.001, 0.0], True) == "yes"
    assert verdict([0.02, 0.021, 0.019], True) == "no"
    assert verdict([0.02, -0.02, 0.0], True) == "undecided"


def test_orderings_are_of_arms_that_are_trained_and_agree_with_the_paper() -> None:
    trained_arms = set(evidence_arms.SCALES["0.2M"].arms)
    assert trained_arms == set(evidence_arms.ARMS)
    for orderings in evidence_page.ORDERINGS.values():
        for ordering in orderings:
            assert ordering.sum.keys() <= trained_arms
            assert ordering.paper is None or (abs(ordering.paper) < 1e-9 if ordering.is_alike else ordering.paper < 0)
    assert trained_arms <= {name for table in evidence_page.TABLES for name, _, _ in table.rows}


def test_bytes_are_those_of_updates_and_cuts() -> None:
    scale = evidence_arms.SCALES["0.2M"]
    full, ddp, diloco = (evidence_page.bytes_sent(scale, name) for name in ("full", "ddp", "diloco"))
    assert math.isclose(ddp, diloco * scale.inner_steps)
    assert 200 < diloco / full < 400
    every, half = (evidence_page.bytes_sent(scale, name) for name in ("all 1/8", "half 1/8"))
    assert math.isclose(every - full, 3 * 4 * scale.width / 8 * scale.tokens(scale.arm("full")))
    assert math.isclose(half - full, (every - full) / 2)


def test_labels_of_a_picture_cover_no_other() -> None:
    marks = [plot.Mark(f"arm number {i}", 10.0 ** (3 + i % 4), 2 + 0.003 * i, "a") for i in range(40)]
    points = [(mark, 100.0 + 200 * (i % 4), 300 - 4.0 * i) for i, mark in enumerate(marks)]
    drawn = plot.svg([plot.Panel("p", "loss", marks)], {"a": "#888888"})
    assert all(f">{mark.label}<" in drawn for mark in marks)
    boxes = plot.places(points, (0.0, 0.0, 900.0, 450.0))
    for number, box in enumerate(boxes):
        assert not any(plot.overlap(box, other) for other in boxes[:number])
