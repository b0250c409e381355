"""Parts that unit tests of leader share with others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from protocol.planning import memory
from protocol.planning.partition import Candidate
from protocol.round.leader import Leader
from protocol.round.leader_events import (
    AnnounceShare,
    Decided,
    Effect,
    Event,
    Held,
    Lead,
    Propose,
    Ready,
    Received,
    Resting,
    Send,
    Tick,
)
from protocol.run import layout
from protocol.run.manifest import Manifest, TimingSpec
from protocol.wire.commit import Commit, Part
from protocol.wire.session import Attest, Offer, Offered
from tests.support import tiny

M = tiny.manifest(rounds=3)
FULL, THIRD = tiny.full_memory(M), tiny.third_memory(M)
GONE, DEADLINE = M.timing.gone_after, M.timing.round_deadline
FULLS = {"a": FULL, "b": FULL}
SHARDS = layout.shard_names(M.model)
CHAIN = {"c": THIRD, "d": THIRD, "e": THIRD}


def part(peer: str, shard: str, norm: float, size: int = 8) -> Part:
    return Part(shard=shard, digest=tiny.digest(f"{peer}/{shard}"), size=size, norm=norm)


def is_news(effect: Effect) -> bool:
    """Whether it tells somebody that offers are durable here."""
    return isinstance(effect, AnnounceShare) or (isinstance(effect, Send) and isinstance(effect.message, Offered))


class Driver:
    """A leader, and peers that do what a test tells them to; time is `now`."""

    def __init__(self, memory: dict[str, int], manifest: Manifest = M, commits: tuple[Commit, ...] = ()) -> None:
        self.manifest = manifest
        self.memory = memory
        self.now = 0.0
        self.commits = list(commits)
        self.news: list[Effect] = []
        self.leader = Leader(manifest, self.commits, (), self.now)
        self.leader.handle(Lead(True), self.now)

    def do(self, *events: Event) -> list[Effect]:
        """The effects but for news of offers, which are in `news`."""
        found = [effect for event in events for effect in tiny.handle(self.leader, event, self.now)]
        self.news += [effect for effect in found if is_news(effect)]
        return [effect for effect in found if not is_news(effect)]

    def at(self, now: float) -> list[Effect]:
        self.now = now
        return self.do(Tick())

    def ready(self, *peers: str) -> list[Effect]:
        return self.do(*(Ready(Candidate(peer=p, memory_bytes=self.memory[p], up_bps=10**7)) for p in peers))

    def attest(
        self, *peers: str, round: int | None = None, digest: str = "same", shards: Sequence[str] = ("embed",)
    ) -> list[Effect]:
        at = self.leader.round - 1 if round is None else round
        return self.do(*(Received(p, Attest(round=at, digests=dict.fromkeys(shards, digest))) for p in peers))

    def offer(self, peer: str, *, norm: float = 1.0, size: int = 8, steps: int = 4, **changes: Any) -> Offer:
        plan, now = self.leader.plan, self.leader.roster.plan
        plan = now if now is not None and plan.replica_of(peer) is None else plan  # who has taken a seat
        replica = plan.replica_of(peer)
        assert replica is not None
        stage = plan.replica(replica).stage_of(peer)
        shards = memory.stage_shards(self.manifest, stage.first, stage.last)
        offer = Offer(
            round=plan.round,
            replica=replica,
            parts=tuple(part(peer, s, norm, size) for s in shards),
            tokens=steps * self.manifest.train.step_tokens,
            steps=steps,
            loss=2.0,
        )
        return dataclasses.replace(offer, **changes)

    def offered(self, *peers: str, norm: float = 1.0, steps: int = 4) -> list[Effect]:
        """Peers offer, and their payloads arrive."""
        effects: list[Effect] = []
        for peer in peers:
            for effect in self.do(Received(peer, self.offer(peer, norm=norm, steps=steps))):
                effects += self.come(effect)
        return effects

    def come(self, effect: Effect) -> list[Effect]:
        """What the effect asks for is here, and what follows; any other effect as it is."""
        names = tiny.names(effect)
        return [e for n in names for e in self.do(Held(n))] if names else [effect]

    def decide(self, effects: list[Effect]) -> Commit:
        """The one proposal among the effects becomes the decision; the quorum adds who decides what comes next."""
        (found,) = [e.commit for e in effects if isinstance(e, Propose)]
        members = self.manifest.first_members
        commit = dataclasses.replace(found, leader=members[0], members=members)
        self.commits.append(commit)
        assert [e for e in self.do(Decided(commit)) if not isinstance(e, Resting)] == []
        return commit


def opened(memory: dict[str, int], **changes: Any) -> Driver:
    """A run whose first round is open, everybody at the same state."""
    driver = Driver(memory, tiny.manifest(rounds=3, start_peers=len(memory), **changes))
    driver.decide(driver.ready(*memory))
    assert driver.attest(*memory) == []
    return driver


def left_out(commit: Commit) -> list[tuple[int, str]]:
    return [(x.replica, x.reason) for x in commit.left_out]


QUICK = TimingSpec(round_deadline=60.0, round_seconds=20.0, heartbeat=3.0, gone_after=12.0)
