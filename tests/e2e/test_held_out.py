"""The held-out loss that replicas and an operator's auditor measure is in the log, true, and on the screens."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from peer.corpus.tokenizer import load_tokenizer
from peer.demo import recipe
from peer.demo.recipe import demo_corpus
from peer.events import Event
from peer.log import replay
from peer.node.evaluating import PROMPT_IDS, SAMPLE_IDS
from peer.training import inference
from protocol.run.manifest import EvaluationSpec
from tests.e2e import swarms
from tests.faults.processes import DEADLINE, Swarm
from tests.support.potluck import run

NODE = "node-0"
SURE = 10
"""Characters of what the model writes that no rounding changes: each token follows from those before it."""


def potluck(*arguments: object) -> str:
    """What a command prints."""
    return str(run(*arguments, text=True, timeout=DEADLINE, check=True).stdout)


@pytest.mark.timeout(900)
def test_the_log_has_the_held_out_loss_of_its_states(tmp_path: Path) -> None:
    chosen = swarms.options(tmp_path / "unused", full=2, rounds=10**6, inner_steps=10)
    made = swarms.manifest(chosen, timing={"round_deadline": 60.0, "round_seconds": 3.0})
    manifest = dataclasses.replace(made, evaluation=EvaluationSpec(every=3, sequences=5))
    assert manifest.evaluated_sequences == 5
    keys, names = (recipe.identity_of(0, "bootstrap"),), [p.name for p in recipe.make_peers(manifest, chosen)]
    with Swarm(tmp_path / "run", manifest, keys, memory=dict.fromkeys(names, 10**9)) as swarm:
        swarm.options[NODE] = ["--audit"]
        swarm.start_node(NODE)
        for name in names:
            swarm.start(name)
        peers = {swarm.started(name) for name in names}
        operator = manifest.operators[0]

        def by(who: str) -> int:
            """A round after the first of whose state this one has said what it measured."""

            def has_it(event: Event) -> bool:
                return event.kind == "commit" and who in {x["peer"] for x in event.fields["evaluations"] if x["round"]}

            commit = swarm.wait(NODE, has_it, f"an evaluation by {who}").fields
            return int(commit["evaluations"][0]["round"])

        newest = max(map(by, (*peers, operator)))
        swarm.wait(names[0], lambda e: e.kind == "round" and bool(e.fields["evaluations"]), "a peer's news of it")
        lines = potluck("log", "show", swarm.addresses[0], "--json").splitlines()
        told = [x for line in lines for x in json.loads(line)["commit"]["evaluations"]]
        assert {x["peer"] for x in told} == peers | {operator}
        assert max(x["round"] for x in told) >= newest
        assert "held out" in potluck("monitor", swarm.addresses[0], "--once")
        for name in list(swarm.running):
            swarm.kill(name)
        swarm.check()
        for _, archive in swarm.logs():
            states = {s.round: s.theta for s in replay.replay(manifest, archive.commits, archive.blobs.get)}
            said = [x for c in archive.commits for x in c.evaluations]
    corpus = demo_corpus(manifest.train.sequence)
    windows, per_byte = corpus.held_out(5), math.log(2) * corpus.index.bytes_per_token
    assert len(said) >= 3
    tokenizer = load_tokenizer(tmp_path / "run" / NODE / "tokenizer.json", manifest.tokenizer.digest)
    for x in said:
        loss = inference.nats(inference.load(manifest.model, states[x.round], "cpu"), windows) / windows[:, 1:].size
        assert x.sequences == 5
        assert x.loss == pytest.approx(loss, rel=1e-5)
        assert x.bits_per_byte == pytest.approx(loss / per_byte, rel=1e-5)
        measured, prompt = inference.Measured(manifest.model, states[x.round], "cpu"), windows[0, :PROMPT_IDS].tolist()
        beginning = tokenizer.decode(prompt)
        goes_on = tokenizer.decode([*prompt, *measured.goes_on(prompt, SAMPLE_IDS)])[len(beginning) :]
        shown_beginning, arrow, shown_rest = (part.strip() for part in x.sample.partition("⇒"))
        assert arrow, x.sample
        assert shown_beginning == " ".join(beginning.split())
        assert shown_rest[:SURE] == " ".join(goes_on.split())[:SURE], "which may be nothing: a young model writes lines"
    shown = potluck("log", "show", tmp_path / "run" / NODE)
    assert shown.count("held out") == len(said)
    potluck("log", "verify", tmp_path / "run" / NODE)
