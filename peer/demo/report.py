"""The result of a demo: counted while it runs, replayed from the log at its end."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

from bootstrap.archive import Archive
from peer import events
from peer.corpus.tokenizer import TextEncoder, load_tokenizer
from peer.demo.recipe import TOKENIZER, DemoOptions, demo_corpus
from peer.events import Event
from peer.log import replay
from peer.node import open_run
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.schema import plain

VALID_SEQUENCES = 48
PROMPT = "The people of the United States"


@dataclass(slots=True)
class Tally:
    """Totals of a run's events."""

    manifest: Manifest
    names: dict[str, str]
    attests: dict[int, dict[str, dict[str, str]]] = field(default_factory=dict)
    commits: dict[int, events.Commit] = field(default_factory=dict)
    sent: dict[str, list[int]] = field(default_factory=dict)
    boundary: dict[str, list[int]] = field(default_factory=dict)
    phases: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    idle_rss: dict[str, int] = field(default_factory=dict)
    peak_rss: dict[str, int] = field(default_factory=dict)
    diverged: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False

    def feed(self, event: Event) -> None:
        """Takes one event into account."""
        name = self.names.get(event.source, event.source)
        match event.body:
            case events.Attest(peer=peer, round=round, digests=digests):
                self.attests.setdefault(round, {})[peer] = digests
            case events.Commit() as commit:
                self.commits[commit.round] = commit
            case events.Diverged(peer=peer, round=round, shard=shard):
                self.diverged.append({"peer": self.names.get(peer, peer), "round": round, "shard": shard})
            case events.Started(rss_bytes=rss_bytes):
                self.idle_rss[name] = rss_bytes
            case events.Round() as done:
                self.peak_rss[name] = done.peak_rss_bytes
                self.sent.setdefault(name, []).append(done.bytes_sent)
                self.phases.setdefault(name, []).append(done.seconds)
                if done.boundary_tokens:
                    totals = self.boundary.setdefault(name, [0, 0, 0])
                    totals[0] += done.boundary_forward_bytes
                    totals[1] += done.boundary_backward_bytes
                    totals[2] += done.boundary_tokens
            case events.RunFinished():
                self.finished = True

    def disagreements(self, digests: dict[int, dict[str, str]]) -> list[dict[str, Any]]:
        """Every attested digest that differs from the auditor's, by peer, round and shard."""
        return [
            {"peer": self.names.get(peer, peer), "round": round, "shard": shard}
            for round, peers in sorted(self.attests.items())
            for peer, attested in sorted(peers.items())
            for shard, digest in attested.items()
            if round in digests and digests[round][shard] != digest
        ]

    def covered(self, rounds: int) -> bool:
        """Whether every shard was attested after every round."""
        shards = set(layout.shard_names(self.manifest.model))
        return all(
            shards <= {s for attested in self.attests.get(r, {}).values() for s in attested} for r in range(rounds + 1)
        )


def audit(options: DemoOptions, manifest: Manifest, tally: Tally, seconds: float) -> dict[str, Any]:
    """Replays the log; returns the result for `--json`. Runs in a process of its own, since it needs torch."""
    import torch

    from peer.training import inference, trainer

    torch.set_num_threads(1)  # more threads than free cores spin against each other
    archive = Archive(options.out / "bootstrap", manifest)
    tokenizer_json = (open_run.ASSETS / TOKENIZER).read_bytes()
    tokenizer = load_tokenizer(tokenizer_json, manifest.tokenizer.digest)
    corpus = demo_corpus()
    held_out, entropy = corpus.held_out(VALID_SEQUENCES), corpus.unigram_entropy()
    whole = trainer.StageTrainer(
        manifest.model, manifest.train, layout.shard_names(manifest.model), device=options.device
    )
    losses: list[float] = []
    digests: dict[int, dict[str, str]] = {}
    try:
        for state in replay.replay(manifest, archive.commits, archive.blobs.get):
            whole.begin_round(state.theta)
            losses.append(whole.evaluate(held_out))
            digests[state.round] = state.digests
    finally:
        archive.close()
    rounds = max(digests)
    wrong = tally.disagreements(digests)
    dice = inference.Dice(options.seed, temperature=0.8)
    text = inference.continuation(whole.stage, TextEncoder(tokenizer).ids(PROMPT), manifest.train.sequence, dice)
    ids = list(itertools.islice(text, 60))
    to_bits = 1 / (math.log(2) * corpus.index.bytes_per_token)
    tokens = sum(c.tokens for commit in tally.commits.values() for c in commit.contributions)
    first_stages = [b for n, b in tally.boundary.items() if n.endswith("-0") and b[0]]
    last_stages = [b for b in tally.boundary.values() if b[1]]
    return {
        "rounds": rounds,
        "val_loss_first": losses[0],
        "val_loss_last": losses[-1],
        "val_loss": losses,
        "val_bits_per_byte_last": losses[-1] * to_bits,
        "unigram_entropy": entropy,
        "below_unigram": 1 - losses[-1] / entropy,
        "same_bits": not wrong and not tally.diverged and tally.covered(rounds),
        "diverged": wrong or tally.diverged,
        "state_digest": layout.state_digest(manifest.model, digests[rounds]),
        "bytes_sent_per_peer_per_round": {n: b[-1] / len(b) for n, b in sorted(tally.sent.items())},
        "payload_bytes_per_replica_per_round": _mean(
            [c.size for commit in tally.commits.values() for c in commit.contributions]
        ),
        "dense_fp32_bytes": 4 * layout.total_parameters(manifest.model),
        "boundary_bytes_per_token": _mean([b[0] / b[2] for b in first_stages]),
        "boundary_backward_bytes_per_token": _mean([b[1] / b[2] for b in last_stages]),
        "boundary_dense_bf16_bytes_per_token": 2 * manifest.model.d_model,
        "left_out": [
            {"round": commit.round, **plain(left)} for commit in tally.commits.values() for left in commit.left_out
        ],
        "train_loss": [
            _mean([c.loss for c in commit.contributions if c.loss is not None])
            for r, commit in sorted(tally.commits.items())
            if r
        ],
        "peak_rss_above_idle_bytes": {n: b - tally.idle_rss.get(n, 0) for n, b in sorted(tally.peak_rss.items())},
        "phase_seconds": {n: _mean_phases(p) for n, p in sorted(tally.phases.items())},
        "seconds": seconds,
        "tokens": tokens,
        "sample": PROMPT + tokenizer.decode(ids),
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _mean_phases(rounds: list[dict[str, float]]) -> dict[str, float]:
    names = {name for r in rounds for name in r}
    return {name: sum(r.get(name, 0.0) for r in rounds) / len(rounds) for name in sorted(names)}


def summary(result: dict[str, Any]) -> str:
    """The result as text."""
    payload = result["payload_bytes_per_replica_per_round"]
    lines = [
        "",
        f"{result['rounds']} rounds, {result['tokens']:,} tokens in {result['seconds']:.0f} s",
        f"validation loss {result['val_loss_first']:.3f} -> {result['val_loss_last']:.3f} nats per token"
        f" ({result['val_bits_per_byte_last']:.3f} bits per byte)",
        f"{100 * result['below_unigram']:.1f} % below {result['unigram_entropy']:.3f}, the loss of guesses by each"
        " token's frequency",
        f"same bits on every peer after every round: {'yes' if result['same_bits'] else 'NO'}, state"
        f" {result['state_digest'][:16]}…",
    ]
    if payload:
        ratio = result["dense_fp32_bytes"] / payload
        lines.append(f"a replica's update: {payload:,.0f} bytes a round, {ratio:.0f} times under dense fp32")
    if result["boundary_bytes_per_token"]:
        lines.append(
            f"a chain's boundary: {result['boundary_bytes_per_token']:.1f} bytes a token forward, dense bf16 takes"
            f" {result['boundary_dense_bf16_bytes_per_token']}"
        )
    return "\n".join([*lines, "", "the trained model says:", "  " + result["sample"].replace("\n", "\n  "), ""])
