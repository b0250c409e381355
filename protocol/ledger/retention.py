"""What is kept, written and fetched at the end of a round, by peers and by operators' nodes. Pure.

A restart goes on from the newest checkpoint with the payloads of every later round. Never evicted are:

    payloads committed after the newest checkpoint, of the shards that are held, and their lists
    payloads and lists of the peer's own offers since the feedback on disk
    payloads of rounds that are not in the log yet

A peer that is more than NEWEST rounds behind may lose later payloads, and fetches them again.

A node's archive keeps the two newest states of `StateRounds`, and all payloads since the older one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from protocol.ledger import part_lists
from protocol.ledger.history import NEWEST
from protocol.ledger.part_lists import Lists, root_of
from protocol.planning import memory
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit, Part
from protocol.wire.plan import Plan
from protocol.wire.session import Offer

SAVE_SECONDS = 5.0
"""So long the error feedback waits before it is written: the round's end, for which everybody waits, goes first."""
SAVED_ROUNDS = 320
"""So many rounds apart the whole error feedback is written to disk: 4 bytes a parameter."""
TURNS = 64
"""Peers write their checkpoints in so many turns within `checkpoint_rounds`, so that newcomers find a recent one."""
CHECKPOINT_BYTES = 12
"""Bytes a parameter of a checkpoint: the state and two moments."""
LOOK_SECONDS = 60.0
AHEAD = 2
"""Payloads are fetched for so many rounds after the one that is applied."""
STATE_COST = 8
"""Bytes of payloads from one archived state to the next, in multiples of a state's: more than a peer replays from its
own checkpoint."""
STATE_ROUNDS = 8
"""The fewest rounds from one archived state to the next."""
PRUNED_ROUNDS = 8
"""Rounds whose payloads a node removes at most when one is decided."""
LATE_ROUNDS = 8
"""Rounds after which a node that keeps up has computed a state and removed what is not needed any more."""


def trained_shards(manifest: Manifest, plan: Plan | None, peer: str) -> tuple[str, ...]:
    """The shards that `plan` has `peer` train."""
    stage = plan.stage_of(peer) if plan is not None else None
    return () if stage is None else memory.stage_shards(manifest, stage.first, stage.last)


def held_shards(manifest: Manifest, plan: Plan | None, peer: str, *, warm: bool, whole: bool) -> tuple[str, ...]:
    """Shards that `peer` holds for `plan`, in canonical order: what it trains, and will train in a forming replica.

    warm: spares hold all; whole: so does an unplanned peer that can be a full replica
    """
    if plan is None:
        return ()
    names, stages = layout.shard_names(manifest.model), plan.held_by(peer)
    if stages:
        wanted = {shard for stage in stages for shard in memory.stage_shards(manifest, stage.first, stage.last)}
        return tuple(name for name in names if name in wanted)
    return (
        names if (warm if peer in plan.spares else whole) else ()
    )  # whom no stage names is a spare, or not in the plan


def payloads_needed(
    log: Mapping[int, Commit],
    lists: Lists,
    round: int,
    checkpoint: int,
    shards: Collection[str],
    offers: Collection[Offer],
) -> set[str]:
    """Names of the payloads and lists that a restart after `round` would need, as far as they are known.

    checkpoint: round of the newest, negative for none; offers: the peer's own since the feedback on disk
    """
    base = round - 1 if checkpoint < 0 else checkpoint
    needed = {name for o in offers for name in (root_of(o.parts), *(part.digest for part in o.parts))}
    for commit in (log[r] for r in range(base + 1, round + NEWEST) if r in log):
        needed |= {share.root for share in commit.shares} if shards else set()
        needed |= {part.digest for part, _ in part_lists.named(commit, lists, shards)}
        needed |= {each.digest for each in commit.aggregates if each.shard in shards and commit.round > base + 1}
    return needed


def checkpoint_is_due(
    manifest: Manifest, peer: str, round: int, checkpoint: int, holds: bool, replayed_bytes: int
) -> bool:
    """Whether `peer` writes a checkpoint after `round`: in its turn, if it has none, or if replaying takes longer.

    checkpoint: round of the newest; holds: whether there is a state; replayed_bytes: payloads since then
    """
    every, place = manifest.checkpoint_rounds, sum(peer.encode()) % TURNS
    wanted = (round + place * (every // TURNS)) % every == 0 or checkpoint < 0
    if replayed_bytes > CHECKPOINT_BYTES * layout.total_parameters(manifest.model) * (1 + place / TURNS):
        wanted = wanted or round % checkpoint_grain(manifest) == 0
    return wanted and round > 0 and holds and round != checkpoint


def checkpoint_grain(manifest: Manifest) -> int:
    """Whoever's turn it is: a checkpoint is of a round that this divides, but for a peer's first and last."""
    return manifest.checkpoint_rounds // TURNS or manifest.checkpoint_rounds


def last_checkpoint_is_due(round: int, checkpoint: int, holds: bool, applying: bool) -> bool:
    """Returns whether a process that ends writes a checkpoint; not while a commit is half applied (`applying`)."""
    return round >= 1 and round != checkpoint and holds and not applying


def feedback_is_due(since: float | None, now: float) -> bool:
    """Returns whether the error feedback is written now; `since`: when it changed (seconds, None: it did not)."""
    return since is not None and now - since >= SAVE_SECONDS


def feedback_goes_to_disk(on_disk: int | None, round: int) -> bool:
    """Returns whether the feedback of `round` goes to disk. on_disk: the round there, None: none, or to be replaced."""
    return on_disk is None or round - on_disk >= SAVED_ROUNDS


def look_is_due(replay_is_long: bool, looked_at: float, now: float) -> bool:
    """Whether a peer that is behind asks if others have a later state, which may cost less than replaying the log."""
    return replay_is_long and now - looked_at >= LOOK_SECONDS


def fetches_ahead(applied: int, shards: Collection[str], round: int) -> bool:
    """Returns whether an offer to `round` is fetched before its commit: the round is near, and shards are held."""
    return applied < round <= applied + AHEAD and bool(shards)


def seconds_left(manifest: Manifest, commit: Commit, wall: float) -> float:
    """Training seconds left in the round after `commit`, at `wall` by this machine's clock."""
    seconds = manifest.timing.training_seconds
    return min(max(commit.time + seconds - wall, 0.0), seconds)


def fits(manifest: Manifest, part: Part) -> bool:
    """Returns whether a part of a shard that is held is no larger than a payload of that shard can be."""
    return 0 < part.size <= part_lists.largest_payload(manifest, part.shard)


class StateRounds:
    """The rounds whose states are archived, by the log alone. Round r is one if since the one before there were
    STATE_ROUNDS rounds and payloads of STATE_COST times a state's bytes, and commit r + 1 has digests of all shards.

    digests: of each of them, by shard; 0 is the first, which has none if θ(0) follows from the seed
    """

    def __init__(self, manifest: Manifest) -> None:
        self.digests: dict[int, Mapping[str, str]] = {0: manifest.initial_digests}
        self._shards = frozenset(layout.shard_names(manifest.model))
        self._due_bytes = STATE_COST * state_bytes(manifest)
        self._bytes = 0
        self._head = -1

    @property
    def kept(self) -> tuple[int, ...]:
        """The rounds of the states that are kept, the older one first."""
        return tuple(self.digests)[-2:]

    @property
    def begin(self) -> int:
        """The round of the older state that is kept. Payloads up to this round may be gone; all later ones are kept."""
        return self.kept[0]

    def follow(self, commit: Commit) -> None:
        """Takes the next commit."""
        self.follow_packed(commit.payload_bytes, lambda: commit)

    def follow_packed(self, payload_bytes: int, commit: Callable[[], Commit]) -> None:
        """Takes the next commit, of whose payloads the bytes are known; `commit` gives it, and is seldom called."""
        is_due = self._head - self.kept[-1] >= STATE_ROUNDS and self._bytes >= self._due_bytes
        if is_due and self._shards <= (digests := commit().digests).keys():
            self.digests[self._head] = digests
            self._bytes = 0
        self._bytes += payload_bytes
        self._head += 1


def state_bytes(manifest: Manifest) -> int:
    """Bytes of a whole state."""
    return sum(map(manifest.state_bytes, layout.shard_names(manifest.model)))


def archive_bytes(manifest: Manifest, round_bytes: int) -> int:
    """The most bytes of states and payloads in a node's archive: three states, one of which is being written, and the
    payloads of two intervals between states. Less in a run that is over before.

    round_bytes: of a round's payloads and lists
    """
    state, round_bytes = state_bytes(manifest), max(1, round_bytes)
    interval = max(STATE_ROUNDS, -(-STATE_COST * state // round_bytes))
    states = min(3, manifest.rounds // interval + bool(manifest.initial_state))
    return states * state + min(manifest.rounds, 2 * interval + LATE_ROUNDS) * round_bytes
