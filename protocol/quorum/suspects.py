"""What a node knows of members that broke the rules of voting, and of logs that differ: part of its machine.

A member is *named* by a proof that anybody can check (protocol/wire/double_vote.py). The logs are in *conflict* from the first round on of
which a member that nobody names holds another decided commit than this node. A liar's word alone makes no conflict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from protocol.ledger import ousting
from protocol.run.manifest import Manifest
from protocol.wire.commit import Record, is_decided, voted_twice
from protocol.wire.double_vote import DoubleVote

Recorded = Callable[[int], Record | None]
"""The log's record of a round, None where there is none."""


class Suspects:
    """Of one node. `conflict`: the first round in which the logs differ, None where none is known."""

    def __init__(self, manifest: Manifest, recorded: Recorded) -> None:
        self.manifest = manifest
        self.named: dict[str, DoubleVote] = {}
        self.conflict: int | None = None
        self.operators: tuple[str, ...] = ()
        """Who operates the run now."""
        self._recorded = recorded
        self._decided: tuple[Record, tuple[str, ...]] | None = None

    def members_of(self, record: Record) -> tuple[str, ...]:
        """Who decided a record of the log. It is asked of the last one with each message that comes: nothing is read for that again."""
        if self._decided is None or self._decided[0] is not record:
            before = self._recorded(record.commit.round - 1) if record.commit.round else None
            members = ousting.deciders(self.manifest, before.commit if before else None, record.commit.decree)
            self._decided = record, members
        return self._decided[1]

    def hear(self, proof: DoubleVote, out: Iterable[str]) -> bool:
        """A proof; whether it is true, of this term and news. `out`: who is out already."""
        gone = tuple(out)
        news = proof.peer not in self.named and proof.peer not in gone and proof.term == len(gone)
        if not news or proof.peer not in self._could_vote(proof.round) or not proof.is_true(self.manifest.run_id):
            return False
        self.named[proof.peer] = proof
        return True

    def _could_vote(self, round: int) -> tuple[str, ...]:
        """Who operates the run, and whom the board of that round's time names."""
        before = self._recorded(round - 1) if round > 0 else None
        then = ousting.names_of(self.manifest, before.commit if before is not None else None)
        return (*self.operators, *then)

    def compare(self, peer: str, record: Record, out: Iterable[str]) -> tuple[tuple[DoubleVote, ...], bool]:
        """`peer` sent a record, whose signatures are right: the proofs in it that are news, and whether it makes a conflict that was not
        known."""
        ours, gone = self._recorded(record.commit.round), tuple(out)
        if ours is None or ours.commit == record.commit or len(ours.commit.out) != len(record.commit.out):
            return (), False
        news = tuple(proof for proof in voted_twice(ours, record) if self.hear(proof, gone))
        members = self.members_of(ours)
        rival = record.commit.parent == ours.commit.parent and is_decided(record, members)
        if not rival or peer in self.named or peer not in members or peer in gone:
            return news, False
        fresh = self.conflict is None or record.commit.round < self.conflict
        self.conflict = record.commit.round if fresh else self.conflict
        return news, fresh

    def ousting(self, head: int) -> tuple[DoubleVote, int] | None:
        """By which proof a member can be taken out, and the last round that stays then; None where none can. `head`: the log's last round."""
        after = head if self.conflict is None else self.conflict - 1
        return next(((p, after) for _, p in sorted(self.named.items()) if p.round <= after + 1), None)
