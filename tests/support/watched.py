"""A made-up run as a monitor sees it: full replicas, chains of three, spares, and their events of some rounds."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from typing import Any

from peer import events
from peer.events import Event
from protocol.run.manifest import Manifest
from protocol.wire.announcement import ChainReport
from protocol.wire.commit import Contribution, LeftOut, Share
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec, Work
from tests.support import tiny

BEGAN = 1_700_000_000.0
ROUND_SECONDS = 60.0
_DIGITS = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def peer_id(number: int) -> str:
    """As long as a real one, and different from all others."""
    digest = hashlib.sha256(str(number).encode()).digest()
    return "12D3KooW" + "".join(_DIGITS[byte % len(_DIGITS)] for byte in digest + digest)[:44]


def made(replica: int, loss: float | None, *peers: str, tokens: int = 64, size: int = 100) -> Contribution:
    """One replica's contribution of `size` bytes by `peers`, by unnamed ones where none are given."""
    each = size // max(1, len(peers))
    shares = tuple(Share(peer=peer, root="0" * 64, size=each, norm=1.0, listed=8) for peer in peers or ("",))
    return Contribution(replica=replica, tokens=tokens, steps=4, loss=loss, shares=shares)


def decided(round: int, *contributions: Contribution, plan: Plan | None, **changes: Any) -> events.Commit:
    """The event of a commit."""
    values: dict[str, Any] = {"left_out": (), "diverged": (), "digests": {}, **changes}
    return events.Commit(
        run="run", round=round, parent="run", time=BEGAN, contributions=contributions, plan=plan, **values
    )


def says(phase: str, round: int, step: int, loss: float | None = None, **changes: Any) -> events.Announced:
    """The event of an announcement."""
    return events.Announced(run="run", peer="", phase=phase, round=round, step=step, loss=loss, **changes)


@dataclasses.dataclass(frozen=True)
class MadeUp:
    """A run with `peers` peers: a fifth are full replicas, a few are spares, and the others are in chains of three."""

    peers: int
    rounds: int = 1000

    @staticmethod
    def loss(round: int, step: int = 0, number: int = 0) -> float:
        """Of the `number`-th replica in a step."""
        return 3.0 + 5.0 * math.exp(-round / 80) + (0.05 * math.sin(number + step) if step else 0.0)

    @property
    def manifest(self) -> Manifest:
        return tiny.manifest(rounds=self.rounds)

    @property
    def ids(self) -> list[str]:
        return [peer_id(i) for i in range(self.peers)]

    def plan(self, round: int) -> Plan:
        ids, work = self.ids, Work(steps=4, micro_batches=2)
        full = max(1, self.peers // 5)
        chains = (self.peers - full) // 3
        replicas = [((ids[i], 0, 4),) for i in range(full)] + [
            ((ids[at], 0, 1), (ids[at + 1], 1, 2), (ids[at + 2], 2, 4)) for at in range(full, full + 3 * chains, 3)
        ]
        made = [
            ReplicaSpec(
                number=number,
                stages=tuple(StageSpec(peer=p, first=a, last=b) for p, a, b in stages),
                work=work,
            )
            for number, stages in enumerate(replicas)
        ]
        return Plan(round=round, replicas=tuple(made), spares=tuple(ids[full + 3 * chains :]), next_number=len(made))

    def begin(self) -> Iterator[Event]:
        """Everybody comes, and the first plan is made."""
        node = self.manifest.operators[0]
        yield Event(
            BEGAN,
            "bootstrap",
            events.Ready(run="run", peer=node, device="bootstrap"),
        )
        for i, peer in enumerate(self.ids):
            yield Event(
                BEGAN,
                "bootstrap",
                events.Ready(
                    run="run",
                    peer=peer,
                    memory_bytes=(4 + i % 20) * 10**9,
                    up_bps=(5 + i % 40) * 10**6,
                    down_bps=10**8,
                    speed_flops=10**12,
                    device=("cuda", "cpu", "mps")[i % 3],
                    reachable=("direct", "mapped", "private", "")[i % 4],
                ),
            )
        yield self.commit(0)

    def commit(self, round: int, loss: float | None = None) -> Event:
        """The decision about a round; every tenth leaves a replica out."""
        before, contributions = self.plan(round), []
        said = self.loss(round) if loss is None else loss
        out = [before.replicas[round % len(before.replicas)].number] if round % 10 == 9 else []
        for replica in before.replicas if round else ():
            if replica.number not in out:
                contributions.append(made(replica.number, said, *replica.peers, tokens=2048, size=100_000))
        body = decided(
            round,
            *contributions,
            left_out=tuple(LeftOut(replica=n, reason="its offer came too late") for n in out),
            plan=self.plan(round + 1),
            leader=self.manifest.operators[0],
            voters=self.manifest.operators,
        )
        return Event(BEGAN + round * ROUND_SECONDS, "bootstrap", body)

    def steps(self, round: int, step: int) -> Iterator[Event]:
        """What everybody announces of an inner step."""
        when = BEGAN + (round - 1) * ROUND_SECONDS + step * ROUND_SECONDS / 5
        for number, replica in enumerate(self.plan(round).replicas):
            for position, peer in enumerate(replica.peers):
                load = self._load(number + position) if replica.is_chain else None
                loss = self.loss(round, step, number)
                yield Event(
                    when,
                    peer,
                    says(
                        "training",
                        round,
                        step,
                        loss if position == len(replica.peers) - 1 else None,
                        bytes_sent=(round - 1) * 200_000,
                        bytes_written=(round - 1) * 30_000,
                        chain=load,
                    ),
                )

    @staticmethod
    def _load(seed: int) -> ChainReport:
        return ChainReport(
            seconds=2.0, busy_s=0.4 + 0.1 * (seed % 15), wait_forward_s=0.1, wait_backward_s=0.2, forward_link_s=0.9,
            backward_link_s=0.3, forward_bytes=12_000, backward_bytes=4_500, depth=7, queued=3,
        )  # fmt: skip

    def all(self, rounds: int) -> Iterator[Event]:
        """The run up to the third step of the round after `rounds`."""
        yield from self.begin()
        for round in range(1, rounds + 1):
            for step in (1, 2, 3, 4):
                yield from self.steps(round, step)
            for replica in self.plan(round).replicas:
                for peer in replica.peers:
                    done = says("waiting", round, 4, bytes_sent=round * 200_000, bytes_written=round * 30_000)
                    yield Event(BEGAN + round * ROUND_SECONDS - 1, peer, done)
            yield self.commit(round)
        for step in (1, 2, 3):
            yield from self.steps(rounds + 1, step)
