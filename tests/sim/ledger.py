"""What must be true, computed a second time: the replay of the log and the ledger of every peer's work, in fractions.

The model of a shard is a vector of three rational numbers, so every check is an equality, not a tolerance.

P1  theta(shard, r) = theta(shard, r-1) - eta sum_m w_m sent_m, over the decided commits: what every peer that attests
    round r must hold.
P2  the first commit of a round that any node writes, applies or learns is the only one, and it follows from the one
    before.
P3  for every peer and shard, with the pseudo-gradients delta_1 ... delta_n that its EncodeUpdate and KeepInFeedback records made durable, and
    sent_i the payload of record i if a decided commit names it, else 0:

        sum_i beta^(n-i) sent_i + e = sum_i beta^(n-i) delta_i        whenever no offer is waiting for its decision.

    A pseudo-gradient counts from the moment the feedback with it is durable: a crash before that moment loses the work of
    that one round (its delta is zero, even if what was sent of it is committed), and nothing else is ever lost. Conversely
    nothing may be committed that never was durable at its sender.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fractions import Fraction

from protocol.wire.commit import Commit, Part

Vector = tuple[Fraction, ...]
SIZE = 3
ZERO: Vector = (Fraction(0),) * SIZE


class Violation(Exception):
    """A promise was broken; `promise` names it."""

    def __init__(self, promise: str, text: str) -> None:
        super().__init__(f"{promise}: {text}")
        self.promise = promise


def add(x: Vector, y: Vector, factor: Fraction | int = 1) -> Vector:
    """x + factor y."""
    return tuple(a + factor * b for a, b in zip(x, y, strict=True))


def scale(x: Vector, factor: Fraction) -> Vector:
    return tuple(factor * a for a in x)


def digest(shard: str, x: Vector) -> str:
    """The digest of a shard's vector or of a payload."""
    return hashlib.sha256(f"{shard} {' '.join(map(str, x))}".encode()).hexdigest()


def initial(shard: str) -> Vector:
    """theta(0) of a shard."""
    raw = hashlib.sha256(shard.encode()).digest()
    return tuple(Fraction(raw[i]) for i in range(SIZE))


def weighted(commit: Commit, shard: str) -> list[tuple[Fraction, Part]]:
    """(weight, part) of every committed payload of `shard`, with exact weights, in commit order."""
    total = sum(c.tokens for c in commit.contributions)
    parts = [(c.tokens, p) for c in commit.contributions for s in c.shares for p in s.parts if p.shard == shard]
    return [(Fraction(tokens, total), part) for tokens, part in parts]


def outer_step(theta: Vector, commit: Commit, shard: str, payloads: dict[str, Vector], eta: Fraction) -> Vector:
    """theta after `commit`. Raises KeyError if a payload is missing."""
    for weight, part in weighted(commit, shard):
        theta = add(theta, payloads[part.digest], -eta * weight)
    return theta


@dataclass(frozen=True)
class Entry:
    """One round's durable work of a peer on one shard; `part` is what it offers."""

    round: int
    delta: Vector
    part: Part | None


class Ledger:
    """The omniscient observer of one simulated run."""

    def __init__(self, beta: Fraction, eta: Fraction, run: str) -> None:
        self.beta = beta
        self.eta = eta
        self.run = run
        self.payloads: dict[str, Vector] = {}
        self.log: dict[int, Commit] = {}
        self.entries: dict[tuple[str, str], list[Entry]] = {}
        self._theta: dict[tuple[str, int], Vector] = {}
        self._digests: dict[tuple[str, int], str] = {}
        self._committed: set[tuple[str, int, str, str]] = set()

    def saw(self, commit: Commit, who: str) -> None:
        """P2: `who` wrote, applied or learned this commit."""
        known = self.log.get(commit.round)
        if known is None:
            parent = self.log[commit.round - 1].digest if commit.round else self.run
            if commit.parent != parent:
                raise Violation("P2", f"{who}: the commit of round {commit.round} has another parent")
            self.log[commit.round] = commit
            self._decided(commit)
        elif known is not commit and known != commit:
            raise Violation("P2", f"{who} has another commit for round {commit.round} than somebody before it")

    def _decided(self, commit: Commit) -> None:
        for contribution in commit.contributions:
            for share in contribution.shares:
                for part in share.parts:
                    entries = self.entries.get((share.peer, part.shard), [])
                    if not any(e.round == commit.round and e.part == part for e in entries):
                        raise Violation(
                            "P3",
                            f"round {commit.round} commits work of {share.peer} on {part.shard} that is not durable",
                        )
                    self._committed.add((share.peer, commit.round, part.shard, part.digest))

    def theta(self, shard: str, round: int) -> Vector:
        """The replay of the log."""
        if round <= 0:
            return initial(shard)
        key = (shard, round)
        if key not in self._theta:
            before = self.theta(shard, round - 1)
            self._theta[key] = outer_step(before, self.log[round], shard, self.payloads, self.eta)
        return self._theta[key]

    def theta_digest(self, shard: str, round: int) -> str:
        """The digest that every honest peer must attest."""
        key = (shard, round)
        if key not in self._digests:
            self._digests[key] = digest(shard, self.theta(shard, round))
        return self._digests[key]

    def check_theta(self, who: str, shard: str, round: int, theta: Vector) -> None:
        """P1."""
        if theta != self.theta(shard, round):
            raise Violation("P1", f"{who}: {shard} after round {round} is not what the log gives")

    def durable(self, who: str, shard: str, entry: Entry, again: bool = False) -> None:
        """An offer, or the feedback after a round, of `who` is on its disk; `again`: the feedback that belongs to the offer."""
        entries = self.entries.setdefault((who, shard), [])
        if again:
            assert entries[-1].part == entry.part
            entries.pop()
        entries.append(entry)

    def check_feedback(self, who: str, shard: str, e: Vector) -> None:
        """P3, at a moment at which every offer of `who` is decided and resolved."""
        done, applied = ZERO, ZERO
        for entry in self.entries.get((who, shard), []):
            done = add(scale(done, self.beta), entry.delta)
            applied = scale(applied, self.beta)
            if entry.part and (who, entry.round, shard, entry.part.digest) in self._committed:
                applied = add(applied, self.payloads[entry.part.digest])
        if add(applied, e) != done:
            raise Violation("P3", f"{who}: on {shard}, applied updates + e differ from the decayed sum of its work")
