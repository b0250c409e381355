"""What the leader's machine alone costs: seconds of one thread for each round of so many full replicas, 14 shards each.

    python -m tests.benchmarks.leader --peers 500 1000 10000 --rounds 3

Everybody is ready, attests, offers, and every payload comes to be held, one event at a time, as bootstrap/node.py gives them to the
machine; the commit is encoded as a record and read again. `replicas` is how many a plan has space for (protocol/ledger/capacity.py): of
more peers than that, the others are spares, which attest and are looked at as well.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from typing import Any

from protocol.identity import Identity
from protocol.planning import memory
from protocol.planning.partition import Candidate
from protocol.round.leader import Leader
from protocol.round.leader_events import Decided, Effect, Event, Held, Lead, Propose, Ready, Received, Tick
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest, TimingSpec
from protocol.wire import encoding
from protocol.wire.commit import Commit, Part
from protocol.wire.plan import ReplicaSpec
from protocol.wire.session import Attest, Offer
from tests.support import tiny


def make_run(peers: int, rounds: int) -> Manifest:
    return tiny.manifest(
        rounds=rounds + 1,
        start_peers=peers,
        model=ModelSpec(vocab_size=16, d_model=8, n_layers=12, n_heads=2, d_ff=16, context=8),
        timing=TimingSpec(round_deadline=3600.0, heartbeat=2.0, gone_after=15.0),
    )


class Driver:
    """A leader that everybody obeys."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.leader = Leader(manifest, (), (), 0.0)
        self.now = 0.0
        self.record = 0
        self.events = 0

    def do(self, event: Event) -> list[Effect]:
        self.events += 1
        return tiny.handle(self.leader, event, self.now)

    def decide(self, effects: list[Effect]) -> bool:
        """The commit that was proposed, if one was, is written, read and decided."""
        for effect in effects:
            if isinstance(effect, Propose):
                raw = encoding.encode_record(tiny.record(effect.commit))
                self.record = len(raw)
                self.do(Decided(encoding.decode_record(raw, "log").commit))
                return True
        return False

    def offer(self, replica: ReplicaSpec, round: int) -> Offer:
        (stage,), work = replica.stages, replica.work
        shards = memory.stage_shards(self.manifest, stage.first, stage.last)
        parts = tuple(
            Part(shard=s, digest=f"{replica.number:032x}{round:016x}{i:016x}", size=8, norm=1.0)
            for i, s in enumerate(shards)
        )
        tokens = self.manifest.train.tokens(work.steps, work.micro_batches)
        return Offer(round=round, replica=replica.number, parts=parts, tokens=tokens, steps=work.steps, loss=2.0)

    def round(self, peers: list[str], digests: dict[str, str]) -> Commit:
        """One whole round; a second passes between the replicas' offers for every hundredth of them."""
        head = self.leader.head
        assert head is not None
        assert head.plan is not None
        for peer in peers:
            self.do(Received(peer, Attest(round=head.round, digests=digests)))
        replicas = head.plan.replicas
        for index, replica in enumerate(replicas):
            peer = replica.peers[0]
            effects = self.do(Received(peer, self.offer(replica, head.plan.round)))
            for name in [n for e in effects for n in tiny.names(e)]:
                if self.decide(self.do(Held(name))):
                    assert index == len(replicas) - 1
            if index % max(1, len(replicas) // 100) == 0:
                self.now += 1.0
                self.do(Tick())
        assert self.leader.head is not None
        assert self.leader.head.round == head.round + 1
        return self.leader.head


def measured(count: int, rounds: int, profile: bool) -> dict[str, Any]:
    manifest = make_run(count, rounds)
    driver = Driver(manifest)
    driver.do(Lead(True))
    peers = [Identity(index.to_bytes(32)).peer_id for index in range(count)]
    full = tiny.full_memory(manifest)
    begun = time.process_time()
    for peer in peers:
        driver.decide(driver.do(Ready(Candidate(peer=peer, memory_bytes=full, up_bps=10**7))))
    gathering = time.process_time() - begun
    shards = memory.stage_shards(manifest, 0, manifest.model.n_layers)
    spent, profiler = [], cProfile.Profile()
    replicas = 0
    for number in range(rounds):
        digests = {shard: f"{number:032x}{i:032x}" for i, shard in enumerate(shards)}
        begun = time.process_time()
        if profile:
            profiler.enable()
        commit = driver.round(peers, digests)
        profiler.disable()
        spent.append(time.process_time() - begun)
        replicas = len(commit.contributions)
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    return {
        "peers": count,
        "replicas": replicas,
        "gathering_s": round(gathering, 2),
        "s_a_round": round(statistics.median(spent), 2),
        "events": driver.events,
        "record_kb": round(driver.record / 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[500, 1000, 10_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    for count in options.peers:
        print(json.dumps(measured(count, options.rounds, options.profile)), flush=True)


if __name__ == "__main__":
    main()
