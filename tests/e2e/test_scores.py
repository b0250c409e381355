"""Scores alone find a peer that teaches the opposite: real peers train, score each other, and the log says so."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from peer.corpus.text import LocalText, Text
from peer.demo.recipe import TOKENIZER, demo_corpus
from peer.log import replay
from peer.node.inner_loop import StageInnerLoop
from peer.node.open_run import ASSETS
from protocol.identity import short_peer
from protocol.ledger import standing
from protocol.run.manifest import AdmissionSpec, EvaluationSpec, JudgingSpec, Manifest, TimingSpec
from protocol.wire import encoding
from protocol.wire.commit import Commit
from tests.e2e import swarms
from tests.support import tiny, volunteers
from tests.support.potluck import run

PEERS = 5
FLIPPED = "flipped"


class Opposite(StageInnerLoop):
    """Sends the opposite of what it learned."""

    def displacement(self, shard: str) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(b, a) for a, b in super().displacement(shard)]

    def on_device(self, shard: str) -> None:
        """It works on the host."""


def gains(commits: list[Commit]) -> dict[str, list[tuple[int, float]]]:
    """(round, gain on its own text) of each peer, as each scorer says."""
    found: dict[str, list[tuple[int, float]]] = {}
    for said in (said for commit in commits for said in commit.scores):
        of = {c.replica: c.peers[0] for c in commits[said.round].contributions}
        for mark in said.marks:
            found.setdefault(of[mark.replica], []).append((said.round, mark.assigned))
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_who_teaches_the_opposite_is_found_by_scores_alone(tmp_path: Path) -> None:
    chosen = swarms.options(tmp_path / "unused", full=PEERS + 1, rounds=10**6, inner_steps=5)
    manifest = dataclasses.replace(
        swarms.manifest(chosen),
        operators=(tiny.OPERATOR.peer_id,),
        judging=JudgingSpec(
            agreement=0.0, copies=1.0, score_share=0.4
        ),  # the rounds are short: each contribution is scored
        evaluation=EvaluationSpec(every=0),
        admission=AdmissionSpec(share=1.0),
        timing=TimingSpec(round_deadline=600.0, heartbeat=2.0, gone_after=60.0),
    )

    async def work() -> list[Commit]:
        swarm = volunteers.Swarm(tmp_path, manifest)
        swarm.tokenizer = (ASSETS / TOKENIZER).read_bytes()

        async def text(*_: object) -> Text:
            return LocalText(demo_corpus(manifest.train.sequence), manifest.seed_bytes)

        swarm.text, swarm.inner_loop = text, StageInnerLoop
        async with swarm:
            for number in range(PEERS):
                swarm.start(f"peer-{number}", memory=10**9)
            swarm.inner_loop = Opposite
            bad = swarm.start(FLIPPED, memory=10**9).id
            await swarm.until(lambda: swarm.leader.standing.rests(bad))
            round = swarm.head
            await swarm.until(lambda: swarm.head >= round + 2)
            warnings = [e.fields["text"] for e in swarm.events if e.kind == "warning"]
            assert any(short_peer(bad) in text and "does not make the model better" in text for text in warnings)
            commits = list(swarm.archive.commits)
            plan = commits[-1].plan
            assert bad not in plan.peers
            assert len(plan.replicas) == PEERS, "nobody else is punished"
            assert sum(e.kind == "round" and bool(e.fields["scores"]) for e in swarm.peers["peer-0"].events) > 2
        return commits

    commits = asyncio.run(work())
    found, bad = gains(commits), volunteers.identity_of(FLIPPED).peer_id
    for peer, told in found.items():
        later = [gain for round, gain in told if round > 1]
        assert len(later) > 3
        assert all(gain < 0 for gain in later) if peer == bad else all(gain > 0 for gain in later), told
    assert len(found) == PEERS + 1
    now = standing.of(manifest, commits)
    assert [peer for peer in found if now.of(peer).fell] == [bad]

    shown = potluck("log", "show", tmp_path / "bootstrap").partition(f"\nround {len(commits)} ")[
        0
    ]  # peers that left ended one more
    assert shown.count("on its own text") == sum(map(len, found.values()))
    assert "scored" in potluck("log", "credits", tmp_path / "bootstrap", "--json")
    potluck("log", "verify", tmp_path / "bootstrap")
    assert "has a score that is not signed" in asyncio.run(forged(manifest, commits))


def potluck(*arguments: object) -> str:
    """What a command prints."""
    return str(run(*arguments, text=True, timeout=600, check=True).stdout)


async def forged(manifest: Manifest, commits: list[Commit]) -> str:
    """What verification says of the log up to the first commit with scores, one of which was changed by an operator."""
    first = next(commit for commit in commits if commit.scores)
    said = first.scores[0]
    better = tuple(dataclasses.replace(mark, assigned=mark.assigned + 1.0) for mark in said.marks)
    changed = dataclasses.replace(first, scores=(dataclasses.replace(said, marks=better), *first.scores[1:]))
    found: list[str] = []

    async def records() -> AsyncIterator[bytes]:
        for commit in (*commits[: first.round], changed):
            yield encoding.encode_record(tiny.record(commit))

    async def gone(name: str, size: int) -> bytes:
        raise replay.BadPayload("it is not asked for here")

    await replay.verify(manifest, records(), gone, lambda problem: found.append(str(problem)))
    return "\n".join(found)
