"""`potluck bootstrap --corpus FOLDER`; `potluck join LINE` on machines without text fetches what it trains on."""

from __future__ import annotations

from pathlib import Path

from peer.demo import recipe
from peer.demo.recipe import demo_corpus
from protocol.codec import blob_hash
from tests.e2e import swarms
from tests.faults.processes import Swarm

ROUNDS = 4


def test_peers_with_nothing_fetch_what_they_train_on(tmp_path: Path) -> None:
    """A full replica and a chain of two, in empty homes; the state is the same bits for all, and the log replays to
    it."""
    chosen = swarms.options(tmp_path / "unused", full=1, chains=1, residual_width=8, rounds=ROUNDS, inner_steps=20)
    manifest = swarms.manifest(chosen, timing={"round_deadline": 60.0, "round_seconds": 3.0})
    memories = {peer.name: peer.memory_bytes for peer in recipe.make_peers(manifest, chosen)}
    with Swarm(
        tmp_path / "run",
        manifest,
        (recipe.identity_of(0, "bootstrap"),),
        memories,
    ) as swarm:
        swarm.fetches |= set(memories)
        swarm.start_node("node-0")
        for name in memories:
            swarm.start(name)
        swarm.wait("node-0", lambda e: e.kind == "run_finished", "the end of the run")
        for name in memories:
            assert swarm.ended(name) == 0
            fetched = [e for e in swarm.events(name) if e.kind == "text_fetched"]
            assert len(fetched) == 1
            assert fetched[0].fields["tokens"] == demo_corpus().index.sequences * demo_corpus().index.sequence
            assert not [
                e.fields["text"] for e in swarm.events(name) if e.kind == "warning" and "text:" in e.fields["text"]
            ]
            assert any(blob_hash.is_name(path.name) for path in (tmp_path / "run" / name / "text").iterdir())
            assert not list((tmp_path / "run" / name / "home").glob("**/corpus-*")), (
                "nothing was built or looked up there"
            )
        swarm.kill("node-0")
        assert swarm.check() == ROUNDS


def test_a_peer_whose_text_nobody_has_says_so(tmp_path: Path) -> None:
    """One line, and the exit code of a remote fault."""
    chosen = swarms.options(tmp_path / "unused", full=1, rounds=1)
    made = swarms.manifest(chosen)
    manifest = swarms.manifest(chosen, data={"corpus": blob_hash.name_of(b"another")})
    assert made.data.corpus != manifest.data.corpus
    with Swarm(tmp_path / "run", manifest, (recipe.identity_of(0, "bootstrap"),)) as swarm:
        swarm.fetches.add("full")
        swarm.serves_text = False
        swarm.start_node("node-0")
        swarm.start("full")
        assert swarm.ended("full") == 1
        lines = (tmp_path / "run" / "full" / "stderr.txt").read_text().strip().splitlines()
        assert len(lines) == 1, lines
        assert "nobody gives the index of the run's corpus" in lines[0]
        assert "tell the operator, or name its folder with --corpus" in lines[0]
