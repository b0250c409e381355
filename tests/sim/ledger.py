"""What must be true, computed a second time from what the disks say: the replay of the log, and the ledger of every
peer's work.

P1  What a peer attests of a shard after round r is what the log gives: θ(r) = θ(r-1) - η Σ w_m sent_m over the
    decided commits.
P2  The first commit of a round that any node's log holds is the only one, and it follows from the one before.
    And no process tells what a crash could make untrue: a vote, a promise or a record is sent once it is on the
    sender's disk.
P3  For every peer and shard, with the pseudo-gradients δ_1 ... δ_n whose feedback was durable, and sent_i the payload
    of round i where a decided commit names it, else 0:

        Σ_i β^(n-i) sent_i + e = Σ_i β^(n-i) δ_i        once no offer waits for its decision.

    A pseudo-gradient counts from the moment that the feedback with it is saved: in memory, which a killed process
    leaves and a loss of power takes, or on disk. What a crash takes before that counts as what was sent of it, and as
    zero elsewhere; nothing else is ever lost, and what was sent is never taken back. An offer is sent once it is on the
    sender's disk. What moves from one peer's e to another's is subtracted there and added here, each from the moment
    that the feedback without it, or with it, is durable: every part is added once at most, by its heir or by its giver
    again.

β is 1 or 1/2, and all that is learned are small whole numbers. So fp32 rounds less than TOLERANCE away in e, and
whatever is lost or added twice is a thousand times as much, for sixteen rounds after it.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load

from peer.state import handover as moves
from peer.state import storage
from peer.state.outer_optimizer import Outer
from protocol.codec import blob_hash, dct, sparse, topk
from protocol.codec.formats import Codec
from protocol.ledger import aggregation, part_lists, rules, run_state
from protocol.ledger.run_state import RunState
from protocol.round import handover
from protocol.run import init, layout
from protocol.run.manifest import Manifest
from protocol.wire import encoding
from protocol.wire.ballot import Accept, Promise
from protocol.wire.calls import Handover
from protocol.wire.commit import Commit, Part, votes_needed
from protocol.wire.schema import build
from protocol.wire.session import Offer
from tests.sim.disk import MEMORY
from tests.sim.trainer import DrawnTrainer
from tests.sim.world import Violation

TOLERANCE = 1e-4
"""Several times the largest difference that fp32 made in the feedback of 24 runs, 1.4e-6."""
Arrays = list[NDArray[np.float32]]
Exact = list[NDArray[np.float64]]


@dataclass(slots=True)
class Entry:
    """One round's durable work of a peer on one shard: what it learned (None: nothing), and what it offered."""

    delta: Arrays | None = None
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """A change of a peer's feedback after `round` by a hand-over: `sign` times what it holds."""

    round: int
    sign: int
    handover: Handover


@dataclass(slots=True)
class Ledger:
    """The omniscient observer of one run."""

    manifest: Manifest
    stats: Counter[str]
    payloads: dict[str, bytes] = field(default_factory=dict)
    log: list[Commit] = field(default_factory=list)
    entries: dict[tuple[str, str], dict[int, Entry]] = field(default_factory=dict)
    aggregates: set[str] = field(default_factory=set)
    """The names of those of all rounds up to the newest whose state was computed."""
    heads: dict[str, int] = field(default_factory=dict)
    """The newest round in each node's log."""
    votes: dict[str, Promise] = field(default_factory=dict)
    """The vote on each node's disk."""
    moves: dict[tuple[str, str], list[Move]] = field(default_factory=dict)
    """By peer and shard, in order."""
    heirs: dict[str, set[str]] = field(default_factory=dict)
    """By giver those whose feedback has in it what that one handed over."""
    _state: RunState | None = None
    _handovers: dict[tuple[str, int], Handover] = field(default_factory=dict)
    _notes: dict[str, dict[str, str]] = field(default_factory=dict)
    _on_disk: dict[str, int] = field(default_factory=dict)
    """The round of the feedback on each peer's disk."""
    _added: set[tuple[str, int]] = field(default_factory=set)
    _stored: set[tuple[str, str]] = field(default_factory=set)
    _offered: dict[tuple[str, int], str] = field(default_factory=dict)
    """By peer and round the root of the offer on its disk."""
    _accepted: dict[tuple[int, int, str], set[str]] = field(default_factory=dict)
    _replay: Outer | None = None
    _made: list[str] = field(default_factory=list)
    """The names of the aggregates of the newest round whose state was computed."""
    _digests: list[dict[str, str]] = field(default_factory=list)

    # --- what is durable

    def written(self, who: str, path: Path, data: bytes, trainer: DrawnTrainer | None) -> None:
        """A file is on the disk of `who`."""
        if path.parent.name == "blobs":
            self.payloads.setdefault(path.name, data)
            self._stored.add((who, path.name))
        elif path.name.startswith("offer-"):
            said = json.loads(data)
            said.pop(storage.GIVEN_BACK)
            offer = build(Offer, said)
            self._offered[who, offer.round] = part_lists.root_of(offer.parts)
            for part in offer.parts:
                self._entry(who, part.shard, offer.round).part = part
        elif path.name.startswith("handover-"):
            if path.suffix == ".payload":
                self.payloads.setdefault(blob_hash.name_of(data), data)
            else:
                handover = build(Handover, json.loads(data))
                self._handovers[who, handover.serial] = handover
        elif path.name.startswith("feedback-") and trainer is not None:
            round = self._on_disk[who] = int(path.name.split("-")[1].split(".")[0])
            self._saved(who, round, data, trainer)
        elif path.parent == MEMORY and trainer is not None:
            self.stats["copies in memory"] += 1
            self._saved(who, int(_metadata(data)[storage.ROUND]), data, trainer)

        elif path.name == "vote":
            vote = encoding.decode(data[4:], who)
            assert isinstance(vote, Promise)
            before = self.votes.get(who)
            if before is not None and before.round == vote.round and vote.ballot < before.ballot:
                raise Violation("P2", f"{who[-8:]} goes back behind what it promised for round {vote.round}")
            self.votes[who] = vote
            if vote.commit is not None:
                self._accepted.setdefault((vote.round, vote.accepted, vote.commit.digest), set()).add(who)

    def _saved(self, who: str, round: int, data: bytes, trainer: DrawnTrainer) -> None:
        """The feedback after `round` is durable, or in the memory of `who`, with all that this life has learned."""
        for learned in [r for r in trainer.deltas if r <= round]:
            for shard, delta in trainer.deltas[learned].items():
                self._entry(who, shard, learned).delta = delta
        notes = _metadata(data)
        for key in (storage.GIVEN_BACK, storage.COPY, storage.NUMBER, storage.ROUND):
            notes.pop(key, "")
        self._moved(who, round, notes)
        self._check_file(who, round, data)

    def lost_power(self, who: str) -> None:
        """What was in the memory of `who` only is gone."""
        for (peer, _), entries in self.entries.items():
            for round, entry in entries.items():
                if peer == who and round > self._on_disk.get(who, 0) and entry.delta is not None:
                    entry.delta = None
                    self.stats["rounds that were in memory only"] += 1

    def _moved(self, who: str, round: int, notes: dict[str, str]) -> None:
        """What the notes of a durable feedback say of hand-overs that the ones before did not."""
        before, self._notes[who] = self._notes.get(who, {}), notes
        for serial in range(int(before.get(moves.OUT, 0)) + 1, int(notes.get(moves.OUT, 0)) + 1):
            self._move(who, Move(round, -1, self._handovers[who, serial]))
        back = notes.get(moves.BACK, "")
        if back and back != before.get(moves.BACK, ""):
            self._add(who, who, Move(round, 1, self._handovers[who, int(back)]))
        known, now = (json.loads(n.get(moves.TAKEN, "{}")) for n in (before, notes))
        for key, serial in now.items():
            if known.get(key) != serial:
                giver = key.rpartition("/")[0]
                self._add(who, giver, Move(round, 1, self._handovers[giver, serial]))

    def _add(self, who: str, giver: str, move: Move) -> None:
        handover = move.handover
        if (giver, handover.serial) in self._added or (who != giver and (who != handover.heir or not handover.given)):
            raise Violation("P3", f"{who[-8:]} adds hand-over {handover.serial} of {giver[-8:]}, which is not its own")
        self._added.add((giver, handover.serial))
        self.stats["taken back" if who == giver else "handed over"] += 1
        self.heirs.setdefault(giver, set()).add(who)
        self._move(who, move)

    def _move(self, who: str, move: Move) -> None:
        self.moves.setdefault((who, move.handover.shard), []).append(move)

    def told(self, who: str, raw: bytes) -> None:
        """A message leaves `who`: what it says must be on its disk."""
        message: Any = msgpack.unpackb(raw)  # one of ours, which needs no check
        kind, round = message.get("t", "record"), message.get("round", -1)
        vote, decided = self.votes.get(who), self.heads.get(who, -1)
        if kind == "offer":
            offer = encoding.decode(raw, who)
            assert isinstance(offer, Offer)
            root = part_lists.root_of(offer.parts)
            durable = (who, root) in self._stored and self._offered.get((who, round)) == root
            if not durable or not all((who, part.digest) in self._stored for part in offer.parts):
                raise Violation("P3", f"{who[-8:]} tells an offer to round {round} that is not on its disk")
        elif kind == "accept":
            self._check_accept(who, encoding.decode(raw, who))
        elif kind == "record" and message["c"]["round"] > decided:
            raise Violation("P2", f"{who[-8:]} tells a decision that is not in its log")
        elif (
            kind == "promise"
            and round > decided
            and not (vote and vote.round == round and vote.ballot >= message["ballot"])
        ):
            raise Violation("P2", f"{who[-8:]} tells a promise that is not on its disk")
        elif kind == "pledge" and round > decided:
            here = vote is not None and vote.round == round
            said = (message["ballot"], message["digest"])
            if not here or ((vote.ballot, vote.pledged) != said and vote.ballot <= message["ballot"]):
                raise Violation("P2", f"{who[-8:]} tells a pledge that is not on its disk")
        elif kind == "vote" and round > decided:
            accepted = vote.commit.digest if vote and vote.round == round and vote.commit else None
            if accepted != message["digest"] or vote is None or vote.accepted < message["ballot"]:
                raise Violation("P2", f"{who[-8:]} tells a vote that is not on its disk")

    def _check_accept(self, who: str, accept: object) -> None:
        """A commit that enough members accepted is the round's: no node asks for votes for another one later."""
        assert isinstance(accept, Accept)
        for (round, ballot, digest), nodes in self._accepted.items():
            chosen = round == accept.round and ballot < accept.ballot and len(nodes) >= self._needed(round)
            if chosen and digest != accept.commit.digest:
                text = f"{who[-8:]} asks for another commit of round {round} than enough accepted"
                raise Violation("P2", text)

    def _needed(self, round: int) -> float:
        """Votes that decide a round."""
        if round == 0:
            return votes_needed(self.manifest.quorum)
        return votes_needed(len(self.log[round - 1].members)) if round <= len(self.log) else float("inf")

    def _entry(self, who: str, shard: str, round: int) -> Entry:
        return self.entries.setdefault((who, shard), {}).setdefault(round, Entry())

    def appended(self, who: str, record: bytes) -> None:
        """P2, and that what is committed was durable: a record is in the log of `who`."""
        found = encoding.decode_record(record, who)
        commit = found.commit
        self.heads[who] = commit.round
        known = self.log[commit.round] if commit.round < len(self.log) else None
        if known is not None:
            if known != commit:
                raise Violation("P2", f"{who[-8:]} writes another commit for round {commit.round} than somebody before")
            return
        before = self.log[-1] if self.log else None
        parent = before.digest if before else self.manifest.run_id
        if commit.round != len(self.log) or commit.parent != parent:
            raise Violation("P2", f"{who[-8:]} writes a commit of round {commit.round} that does not follow")
        state = self._state or run_state.begin(self.manifest)
        for problem in rules.check(state, commit):
            raise Violation("P2", f"{who[-8:]} writes a commit of round {commit.round} that {problem}")
        reason = part_lists.why_refused(self.manifest, before and before.plan, commit, self.lists(commit))
        if reason is not None:
            raise Violation("P2", f"{who[-8:]} writes a commit of round {commit.round} with a wrong list: {reason}")
        self._count(found.ballot, commit, before)
        self._state = state.apply(commit)
        self.log.append(commit)

    def lists(self, commit: Commit) -> dict[str, tuple[Part, ...]]:
        """The lists of parts of a commit, from the disks."""
        return {share.root: part_lists.unpack(self.payloads[share.root]) for share in commit.shares}

    def names(self, commit: Commit) -> set[str]:
        """The names of all payloads and lists of a commit."""
        return {name for root, parts in self.lists(commit).items() for name in (root, *(part.digest for part in parts))}

    def _count(self, ballot: int, commit: Commit, before: Commit | None) -> None:
        spares = before.plan.spares if before is not None and before.plan is not None else ()
        self.stats["commits"] += 1
        self.stats["contributions"] += len(commit.contributions)
        self.stats["left out"] += len(commit.left_out)
        self.stats["on probation"] += sum(x.probation for x in commit.left_out)
        self.stats["less than its weight"] += sum(c.standing < 1 for c in commit.contributions)
        self.stats["higher ballots"] += ballot > 0
        self.stats["spares' shares"] += sum(s.peer in spares for c in commit.contributions for s in c.shares)

    # --- P1

    def digests(self, round: int) -> dict[str, str]:
        """What every honest peer must attest after `round`, by shard."""
        manifest = self.manifest
        if self._replay is None:
            self._replay = Outer.of(manifest)
            self._replay.theta = {s: init.initial_state(manifest, s) for s in layout.shard_names(manifest.model)}
            self._digests.append({s: self._replay.digest(s) for s in self._replay.theta})
        while len(self._digests) <= round:
            commit = self.log[len(self._digests)]
            if [x.digest for x in commit.aggregates] != self._made:
                text = f"the commit of round {commit.round} names aggregates that its predecessor's updates do not give"
                raise Violation("P1", text)
            self._made = []
            for shard in self._replay.theta:
                items = [(w, self.payloads[p.digest]) for w, p, _ in commit.payloads(shard, self.lists(commit))]
                codec, found = aggregation.applied(manifest, commit, shard, items)
                self._replay.apply(shard, found, codec=codec)
                if aggregation.is_aggregated(manifest, commit):
                    self._made.append(blob_hash.name_of(found[0][1]))
                    self.stats["aggregated shards"] += 1
            self.aggregates.update(self._made)
            self._digests.append({s: self._replay.digest(s) for s in self._replay.theta})
        return self._digests[round]

    def attested(self, who: str, round: int, digests: dict[str, str], excused: set[str]) -> None:
        """A peer says what it holds; `excused`: shards in which its memory failed."""
        right = self.digests(round)
        for shard, digest in digests.items():
            if shard not in excused:
                self.stats["states compared"] += 1
                if digest != right[shard]:
                    raise Violation("P1", f"{who[-8:]}: {shard} after round {round} is not what the log gives")

    # --- P3

    def check_feedback(self, who: str, feedback: dict[str, Arrays]) -> None:
        """At a moment at which every offer of `who` is decided and resolved."""
        for peer, shard in {**self.entries, **self.moves}:
            if peer == who:
                self._check(who, shard, feedback.get(shard), self.owed(who, shard))

    def check_work(self, who: str, done: dict[int, tuple[str, ...]]) -> None:
        """Nothing that was learned in a life that did not end too soon is lost; `done`: rounds and their shards."""
        for round, shards in done.items():
            for shard in shards:
                entry = self.entries.get((who, shard), {}).get(round)
                if entry is None or entry.delta is None:
                    raise Violation("P3", f"{who[-8:]}: what it learned of {shard} in round {round} is lost")

    def owed(self, who: str, shard: str, upto: int | None = None, given_back: bool = False) -> Exact:
        """e, as it must be: what was learned of a shard, less what was sent of it and is, or may yet be, committed.
        `upto`: a round whose offer is not decided yet; `given_back`: it went back into e."""
        shapes, beta = layout.shapes(self.manifest.model, shard), float(self.manifest.outer.beta)
        left, codec = [np.zeros(shape) for shape in shapes], self.manifest.outer.codec
        entries, moves = self.entries.get((who, shard), {}), self.moves.get((who, shard), [])
        for round in sorted({*entries, *(move.round for move in moves)}):
            if upto is not None and round > upto:
                break
            entry = entries.get(round)
            if entry is not None and (entry.part or entry.delta is not None):  # else nothing is left of that round
                for x in left:
                    x *= beta
                part = entry.part
                out = part and (not given_back if round == upto else self._includes(self.log[round], who, part))
                for x, delta in zip(left, entry.delta or [], strict=entry.delta is not None):
                    x += dct.transformed(delta, topk.tiling(delta.shape, 1)) if codec.is_transformed else delta
                if part and entry.delta is None:  # it counts as what was sent
                    self._clear(left, shapes, codec, part.digest)
                    if not out:
                        self._change(left, shapes, codec, part.digest, 1)
                elif part and out:
                    self._change(left, shapes, codec, part.digest, -1)
            for move in moves:
                if move.round == round:
                    moved = handover.codec(self.manifest, move.handover.topk)
                    self._change(left, shapes, moved, move.handover.blob, move.sign)
        return left

    def _change(self, arrays: Exact, shapes: tuple[tuple[int, ...], ...], codec: Codec, name: str, sign: int) -> None:
        for x, sent in zip(arrays, sparse.decode(codec, shapes, self.payloads[name]), strict=True):
            values: NDArray[np.float32] = sent.values
            x.reshape(-1)[sent.index] += sign * values.astype(np.float64)

    def _clear(self, arrays: Exact, shapes: tuple[tuple[int, ...], ...], codec: Codec, name: str) -> None:
        for x, sent in zip(arrays, sparse.decode(codec, shapes, self.payloads[name]), strict=True):
            x.reshape(-1)[sent.index] = 0

    def _check(self, who: str, shard: str, feedback: Arrays | None, owed: Exact) -> None:
        held = feedback or [np.zeros(x.shape, np.float32) for x in owed]
        for x, e in zip(owed, held, strict=True):
            if not np.allclose(x, e.astype(np.float64), rtol=0, atol=TOLERANCE):
                raise Violation("P3", f"{who[-8:]}: on {shard}, applied updates + e differ from the sum of its work")

    def _check_file(self, who: str, round: int, data: bytes) -> None:
        """The feedback after `round` on the disk of `who`."""
        given_back = int(_metadata(data)[storage.GIVEN_BACK]) == round
        tensors = load(data)
        for peer, shard in {**self.entries, **self.moves}:
            if peer == who and f"{shard}/0" in tensors:
                shapes = layout.shapes(self.manifest.model, shard)
                e = [tensors[f"{shard}/{i}"] for i in range(len(shapes))]
                self._check(who, shard, e, self.owed(who, shard, round, given_back))

    def _includes(self, commit: Commit, who: str, part: Part) -> bool:
        """Whether this part of `who`'s was committed."""
        lists = self.lists(commit)
        return any(s.peer == who and part in lists[s.root] for s in commit.shares)


def _metadata(data: bytes) -> dict[str, str]:
    """Of a file of tensors."""
    return dict(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {}))
