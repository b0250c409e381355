"""Parts that unit tests of tui share with others."""

from __future__ import annotations

from typing import Any

from peer import events
from peer.events import Body, Event
from peer.ui.run_view import RunView
from peer.ui.text import Names
from protocol.identity import Identity
from protocol.wire.announcement import Means
from protocol.wire.commit import LeftOut
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec, Work
from tests.support import tiny
from tests.support.watched import decided, made

PEERS = [Identity(bytes([i] * 32)).peer_id for i in range(1, 7)]
NAMES = dict(zip(PEERS, ("full-0", "full-1", "a", "b", "c", "spare"), strict=True))


def stage(peer: str, first: int, last: int) -> StageSpec:
    return StageSpec(peer=peer, first=first, last=last)


WORK = Work(steps=4, micro_batches=2)
PLAN = Plan(
    round=1,
    replicas=(
        ReplicaSpec(number=0, stages=(stage(PEERS[0], 0, 4),), work=WORK),
        ReplicaSpec(number=1, stages=(stage(PEERS[1], 0, 4),), work=WORK),
        ReplicaSpec(number=2, stages=(stage(PEERS[2], 0, 1), stage(PEERS[3], 1, 2), stage(PEERS[4], 2, 4)), work=WORK),
    ),
    spares=(PEERS[5],),
)


class Story:
    """Feeds events of a made-up run of 2 full replicas, a chain of 3, and a spare; one second apart."""

    def __init__(self, names: dict[str, str] | None = NAMES) -> None:
        self.events: list[Event] = []
        self.view = RunView(tiny.manifest(), Names(names))
        self.sent = dict.fromkeys(PEERS, 100)

    def tell(self, source: str, body: Body) -> None:
        event = Event(1_700_000_000.0 + len(self.events), source, body)
        self.events.append(event)
        self.view.feed(event)

    def begin(self) -> Story:
        for peer in PEERS:
            self.tell("bootstrap", ready(peer))
        self.commit(0, [])
        return self

    def commit(self, number: int, losses: list[float], left_out: tuple[LeftOut, ...] = ()) -> None:
        contributions = [made(i, loss) for i, loss in enumerate(losses)]
        self.tell("bootstrap", decided(number, *contributions, left_out=left_out, plan=PLAN))

    def step(self, peer: str, round: int, step: int, loss: float | None) -> None:
        self.tell(peer, events.Step(round=round, step=step, loss=loss, tokens=16, seconds=0.1))

    def round(self, number: int, loss: float, left_out: tuple[LeftOut, ...] = ()) -> None:
        for step in range(1, 5):
            for peer in PEERS[:5]:
                self.step(peer, number, step, loss)
        self.commit(number, [loss, loss, loss], left_out)
        for peer in PEERS[:5]:
            self.sent[peer] += 400
            self.applied(peer, number, self.sent[peer], boundary_tokens=64 if peer in PEERS[2:5] else 0)

    def applied(self, peer: str, round: int, sent: int, boundary_tokens: int = 0) -> None:
        self.tell(
            peer,
            events.Round(
                round=round,
                seconds={},
                bytes_sent=sent,
                bytes_received=0,
                boundary_forward_bytes=1,
                boundary_backward_bytes=1,
                boundary_tokens=boundary_tokens,
            ),
        )

    def chain(self, peer: str, busy: float, **changes: Any) -> None:
        """`busy`: seconds of a step of 2 s that `peer` computes."""
        means = Means(rms=1.0, largest=2.0, refused=0, sampled=1, frames=8)
        values: dict[str, Any] = {
            "round": 1, "step": 1, "seconds": 2.0, "busy_s": busy, "wait_forward_s": 0.1, "wait_backward_s": 0.3,
            "forward_link_s": 0.5, "backward_link_s": 0.2, "forward_bytes": 12_300, "backward_bytes": 4_500, "depth": 7,
            "queued": 3, "seconds_per_microbatch": 0.2, "activations": means, "gradients": None,
        }  # fmt: skip
        self.tell(peer, events.Chain(**{**values, **changes}))

    def finish(self) -> None:
        self.tell("bootstrap", events.RunFinished(round=5, state_digest="ab" * 32))

    def attest(self, number: int, wrong: str | None = None) -> None:
        for peer in PEERS[:3]:
            digest = "bad" if peer == wrong else "good"
            digests = {"embed": "same", "block.0": digest}
            self.tell("bootstrap", events.Attest(peer=peer, round=number, digests=digests))


def ready(peer: str) -> events.Ready:
    return events.Ready(run="run", peer=peer, memory_bytes=64_000_000, up_bps=20_000_000, device="cpu")
