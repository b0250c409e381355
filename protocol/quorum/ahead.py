"""What a node that does not decide knows of the log beyond its own, until it counts: part of its machine.

Where commits have to be confirmed (protocol/ledger/confirming.py), such a node takes into its log only what is, so that it never has to
be cut off. A confirmation is of the newest commit, by those who decided that one. Between it and the node's own log others may have
become operators. So the records between are kept here, each checked against the one before, until a certificate of one of them is there:
then that one counts, and all before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from protocol.ledger import confirming, ousting
from protocol.ledger.validation import why_not_next
from protocol.run.manifest import Manifest
from protocol.wire.ballot import Confirmed
from protocol.wire.commit import Commit, Record, confirmation_body, is_decided, votes_needed

MAX_VOTES = 16
"""Signatures of one certificate."""


class Ahead:
    """Of one node, after its log's `head`. `verify`: (peer, bytes, signature)."""

    def __init__(self, manifest: Manifest, head: Commit | None, verify: Callable[[str, bytes, bytes], bool]) -> None:
        self.manifest = manifest
        self._verify = verify
        self._head = head
        self._chain: dict[int, Record] = {}
        self._told: dict[str, Confirmed] = {}
        self._counts = -1

    def begin(self, head: Commit) -> None:
        """This commit is the log's last now."""
        self._head = head
        following = self._chain.get(head.round + 1)
        self._chain = {r: known for r, known in self._chain.items() if r > head.round}
        if following is not None and following.commit.parent != head.digest:
            self._chain.clear()
            self._counts = -1

    @property
    def end(self) -> int:
        """The newest round up to which all is known."""
        own = -1 if self._head is None else self._head.round
        return max(self._chain, default=own)

    def learn(self, record: Record) -> None:
        """A record whose signatures are right. One that is another than was known of its round takes its place, until one of them counts."""
        round = record.commit.round
        known, before = self._chain.get(round), self._before(round)
        first = 0 if self._head is None else self._head.round + 1
        if not first <= round <= self.end + 1 or round <= self._counts:
            return
        if (known is not None and known.commit == record.commit) or (round > first and before is None):
            return
        deciders = ousting.deciders(self.manifest, before, record.commit.decree)
        if why_not_next(self.manifest, before, record) is not None:
            follows_another = before is not None and record.commit.parent != before.digest
            if follows_another and round - 1 > self._counts and is_decided(record, deciders):
                self._cut(round - 1)  # perhaps that is one that nobody follows: it is asked for again
            return
        self._cut(round)
        self._chain[round] = record
        if not confirming.is_needed(len(deciders), record.commit):
            self._counts = round
        for told in [x for x in self._told.values() if x.round == round]:
            self._look(told)

    def hear(self, peer: str, told: Confirmed) -> None:
        """`peer` says that these have confirmed a commit. Of each sender the newest is kept; what many said together may be old."""
        known = self._told.get(peer)
        if known is not None and (known.round, known.digest) == (told.round, told.digest):
            together = {**known.by, **told.by}
            told = dataclasses.replace(told, by=together if len(together) <= MAX_VOTES else told.by)
            if told == known:
                return
        elif known is not None and len(told.by) > 1 and told.round <= known.round:
            return
        self._told[peer] = told
        self._look(told)

    def next(self) -> Record | None:
        """What comes next in the log, if it counts."""
        first = 0 if self._head is None else self._head.round + 1
        return self._chain.get(first) if first <= self._counts else None

    def _cut(self, round: int) -> None:
        """Forgets what is known from this round on."""
        self._chain = {r: known for r, known in self._chain.items() if r < round}

    def _before(self, round: int) -> Commit | None:
        if round - 1 in self._chain:
            return self._chain[round - 1].commit
        return self._head if self._head is not None and self._head.round == round - 1 else None

    def _look(self, told: Confirmed) -> None:
        """Whether this is the certificate of a commit that is known here."""
        known = self._chain.get(told.round)
        if known is None or known.commit.digest != told.digest or told.round <= self._counts:
            return
        members = ousting.deciders(self.manifest, self._before(told.round), known.commit.decree)
        body = confirmation_body(self.manifest.run_id, told.round, told.digest)
        same = [other.by for other in self._told.values() if (other.round, other.digest) == (told.round, told.digest)]
        named = [who for who in members if any(self._verify(who, body, by[who]) for by in same if who in by)]
        if len(named) >= votes_needed(len(members)):
            self._counts = told.round
