"""Parts that unit tests of member share with others."""

from __future__ import annotations

from protocol.ledger.part_lists import share_of
from protocol.round.member import Member
from protocol.round.member_events import (
    Applied,
    Apply,
    Committed,
    Digested,
    Effect,
    Event,
    HoldShards,
    ShardsHeld,
    Told,
)
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit, Contribution, Part
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec, Work
from protocol.wire.session import ChainReconfig, Finished, Offer, TakeSeat, TimeUp
from tests.support import tiny

ME = "me"
M = tiny.manifest(rounds=3)
TOKENS = 4 * M.train.step_tokens
DIGESTS = {"embed": "x"}
Orders = ChainReconfig | Finished | TakeSeat | TimeUp


def plan(round: int, *peers: str) -> Plan:
    """Everybody is a full replica; the text of a round and replica is where no other's is."""

    def work(round: int, i: int) -> Work:
        return Work(slot=1000 * round + 100 * i, steps=4, micro_batches=2)

    replicas = (
        ReplicaSpec(
            number=i,
            stages=(StageSpec(peer=p, first=0, last=4),),
            work=work(round, i),
            following=work(round + 1, i),
        )
        for i, p in enumerate(peers)
    )
    return Plan(round=round, replicas=tuple(replicas))


def offer(round: int) -> Offer:
    parts = (Part(shard="embed", digest=tiny.digest(f"payload {round}"), size=8, norm=1.0),)
    return Offer(round=round, replica=0, parts=parts, tokens=TOKENS, steps=4, loss=2.0)


def contribution(of: Offer) -> Contribution:
    share = share_of(ME, of.parts)
    return Contribution(replica=0, tokens=of.tokens, steps=of.steps, loss=of.loss, shares=(share,))


def log(rounds: int, *, mine: tuple[int, ...] = (), planned: bool = True, run: str = M.run_id) -> list[Commit]:
    """Commits 0 ... `rounds`; those in `mine` contain this peer's offer."""
    commits: list[Commit] = []
    for round in range(rounds + 1):
        last = round == M.rounds
        commit = tiny.commit(
            M,
            run=run,
            round=round,
            parent=commits[-1].digest if commits else run,
            time=float(round),
            contributions=(contribution(offer(round)),) if round in mine else (),
            plan=None if last else plan(round + 1, *((ME,) if planned else ("other",))),
        )
        commits.append(commit)
    return commits


class Driver:
    """A member whose effects are collected; `settle` answers Apply and HoldShards, the digests last."""

    def __init__(
        self,
        applied: int = -1,
        offer: Offer | None = None,
        manifest: Manifest = M,
        feedback_round: int = 0,
        up_bps: int = 0,
    ) -> None:
        self.member = Member(manifest, ME, applied, offer, feedback_round, up_bps)
        self.now = 0.0

    def do(self, *events: Event | Orders) -> list[Effect]:
        """`Orders` are the leader's."""
        return [effect for event in events for effect in self.member.handle(self._heard(event), self.now)]

    def _heard(self, event: Event | Orders) -> Event:
        return Told(self.member.leader, event) if isinstance(event, Orders) else event

    def learn(self, *commits: Commit) -> list[Effect]:
        return self.do(*(Committed(tiny.record(commit)) for commit in commits))

    def settle(self, effects: list[Effect]) -> list[Effect]:
        """All effects, those that follow from answering included."""
        done: list[Effect] = []
        while effects:
            effect, *effects = effects
            done.append(effect)
            if isinstance(effect, Apply):
                effects = self.do(Applied(effect.commit.round)) + effects
            elif isinstance(effect, HoldShards):
                round = effect.commit.round
                effects = self.do(ShardsHeld(round), Digested(round, DIGESTS)) + effects
        return done
