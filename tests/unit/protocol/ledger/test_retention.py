"""What a volunteer keeps, writes and fetches at the end of a round."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Collection, Sequence

import pytest

from protocol.codec import sparse
from protocol.ledger import part_lists, retention
from protocol.ledger.part_lists import root_of, share_of
from protocol.planning import memory
from protocol.run import layout, presets
from protocol.run.manifest import Manifest, OuterSpec
from protocol.wire.commit import Commit, Part
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from protocol.wire.session import Offer
from tests.support import tiny

RUN = tiny.manifest(checkpoint_rounds=10, model=dataclasses.replace(tiny.manifest().model, residual_width=2))
PEER = "peer"
LAYERS = RUN.model.n_layers
CHAIN = ReplicaSpec(stages=(StageSpec(peer="first", first=0, last=1), StageSpec(peer="last", first=1, last=LAYERS)))
PLAN = Plan(round=1, replicas=(CHAIN,), spares=("spare",))
SHARDS = layout.shard_names(RUN.model)


def part(shard: str, digest: str, size: int = 1) -> Part:
    return Part(shard=shard, digest=tiny.digest(digest), size=size, norm=1.0)


def digests(*names: str) -> set[str]:
    return {tiny.digest(name) for name in names}


def commit(round: int, *parts: Part) -> Commit:
    made = tiny.contribution(0, shares=(share_of("first", parts),))
    return tiny.commit(RUN, round=round, contributions=(made,))


def held(peer: str, plan: Plan | None = PLAN, *, warm: bool = False, whole: bool = False) -> tuple[str, ...]:
    return retention.held_shards(RUN, plan, peer, warm=warm, whole=whole)


def test_who_trains_what_and_who_holds_what() -> None:
    assert retention.trained_shards(RUN, PLAN, "last") == memory.stage_shards(RUN, 1, LAYERS)
    assert retention.trained_shards(RUN, PLAN, "spare") == retention.trained_shards(RUN, None, "last") == ()
    assert held("last", warm=True) == memory.stage_shards(RUN, 1, LAYERS)
    assert held("first") == ("embed", "block.0", "anchor"), "every stage trains the rows of tokens"
    assert held("last") == (*(f"block.{i}" for i in range(1, LAYERS)), "head", "anchor")
    assert held("spare", warm=True) == SHARDS
    assert held("spare", whole=True) == ()
    assert held("stranger", warm=True) == ()
    assert held("stranger", whole=True) == SHARDS, "the first plan that names it finds it ready"
    assert held("spare", None, warm=True, whole=True) == ()


def test_who_will_train_a_stage_holds_it_and_trains_nothing_yet() -> None:
    forming = dataclasses.replace(PLAN, replicas=(), forming=(CHAIN,), forming_since=(1,))
    assert held("last", forming) == memory.stage_shards(RUN, 1, LAYERS)
    assert retention.trained_shards(RUN, forming, "last") == ()


def test_a_restart_needs_what_was_committed_since_the_checkpoint() -> None:
    def parts(round: int) -> tuple[Part, ...]:
        return part("embed", f"e{round}"), part("head", f"h{round}")

    log = {r: commit(r, *parts(r)) for r in range(1, 6)}
    lists = {root_of(p): p for p in (parts(r) for r in range(1, 6))}

    def needed(round: int, checkpoint: int, shards: Sequence[str]) -> set[str]:
        return retention.payloads_needed(log, lists, round, checkpoint, shards, [])

    four, five = root_of(parts(4)), root_of(parts(5))
    assert needed(5, 3, ["embed"]) == {four, five, *digests("e4", "e5")}
    assert needed(5, 5, SHARDS) == set()
    assert needed(3, 3, SHARDS) == {four, five, *digests("e4", "h4", "e5", "h5")}, "what is known, if not applied"
    assert needed(4, -1, ["head"]) == {four, five, *digests("h4", "h5")}, "without a checkpoint, the last round's"
    assert needed(5, 3, ()) == set(), "who holds nothing needs nothing"
    del lists[five]
    assert needed(5, 3, ["embed"]) == {four, five, *digests("e4")}, (
        "what is in a list that is not here is not here either"
    )


def test_a_peers_own_offers_are_needed_as_long_as_its_feedback_on_disk_does_not_know_of_them() -> None:
    offers = [
        Offer(round=r, replica=0, parts=(part("embed", f"mine{r}"),), tokens=1, steps=1, loss=None) for r in (4, 5)
    ]
    wanted = {*(root_of(o.parts) for o in offers), *digests("mine4", "mine5")}
    assert retention.payloads_needed({}, {}, 5, 5, SHARDS, offers) == wanted


@pytest.mark.parametrize(
    ("round", "checkpoint", "holds", "due"),
    [
        (0, -1, True, False),
        (1, -1, True, True),
        (1, -1, False, False),
        (9, 1, True, False),
        (10, 1, True, True),
        (10, 10, True, False),
        (20, 10, False, False),
    ],
)
def test_a_checkpoint_is_due_every_so_many_rounds(round: int, checkpoint: int, holds: bool, due: bool) -> None:
    assert retention.checkpoint_is_due(RUN, PEER, round, checkpoint, holds, 0) is due


def test_peers_write_checkpoints_in_turns() -> None:
    """Each as often as the manifest says; of 64 peers, the newest is never much older than the mean."""
    run, peers = tiny.manifest(checkpoint_rounds=320), [f"12D3KooW{'a' * i}" for i in range(64)]
    due = {peer: [r for r in range(1, 961) if retention.checkpoint_is_due(run, peer, r, 0, True, 0)] for peer in peers}
    assert all(len(rounds) == 3 and rounds[1] - rounds[0] == 320 for rounds in due.values())
    every = sorted({r for rounds in due.values() for r in rounds})
    assert max(later - r for r, later in itertools.pairwise(every)) <= 5


def test_what_has_to_be_kept_for_a_replay_is_no_longer_than_a_few_checkpoints() -> None:
    """Many replicas send more in 320 rounds than a state has."""
    run = tiny.manifest(checkpoint_rounds=320)
    a_round = layout.total_parameters(run.model)  # bytes: what a hundred replicas send
    for peer in (f"12D3KooW{'a' * i}" for i in range(16)):
        checkpoint = most = 0
        for round in range(1, 961):
            kept = (round - checkpoint) * a_round
            most = max(most, kept)
            if retention.checkpoint_is_due(run, peer, round, checkpoint, True, kept):
                checkpoint = round
        assert most <= (2 * retention.CHECKPOINT_BYTES + 5) * a_round


def test_a_process_that_ends_writes_what_it_has() -> None:
    assert retention.last_checkpoint_is_due(7, 5, holds=True, applying=False)
    assert not retention.last_checkpoint_is_due(7, 7, holds=True, applying=False)
    assert not retention.last_checkpoint_is_due(7, 5, holds=False, applying=False)
    assert not retention.last_checkpoint_is_due(7, 5, holds=True, applying=True), "a half applied commit is no state"
    assert not retention.last_checkpoint_is_due(0, -1, holds=True, applying=False)


def test_feedback_waits_until_the_rounds_end_is_over() -> None:
    assert not retention.feedback_is_due(None, 100.0)
    assert not retention.feedback_is_due(100.0, 100.0 + retention.SAVE_SECONDS - 0.1)
    assert retention.feedback_is_due(100.0, 100.0 + retention.SAVE_SECONDS)


def test_feedback_goes_to_disk_every_so_many_rounds() -> None:
    assert retention.feedback_goes_to_disk(None, 1), "there is none"
    assert not retention.feedback_goes_to_disk(1, retention.SAVED_ROUNDS)
    assert retention.feedback_goes_to_disk(1, 1 + retention.SAVED_ROUNDS)


def test_a_peer_that_is_behind_asks_now_and_then() -> None:
    assert retention.look_is_due(True, float("-inf"), 0.0)
    assert not retention.look_is_due(False, float("-inf"), 0.0)
    assert not retention.look_is_due(True, 10.0, 10.0 + retention.LOOK_SECONDS - 0.1)
    assert retention.look_is_due(True, 10.0, 10.0 + retention.LOOK_SECONDS)


def test_what_is_fetched_before_it_is_committed() -> None:
    largest = sparse.max_payload_size(RUN.outer.codec, layout.shapes(RUN.model, "embed"))

    assert [applied for applied in range(5) if retention.fetches_ahead(applied, SHARDS, 3)] == [1, 2]
    assert not retention.fetches_ahead(2, (), 3), "nothing is held"
    sizes = (-1, 0, 1, largest, largest + 1)
    assert [size for size in sizes if retention.fits(RUN, part("embed", "x", size))] == [1, largest]


# --- the archive of a node

ALL = {shard: tiny.digest(shard) for shard in SHARDS}


def followed(sizes: Sequence[int], run: Manifest = RUN, without: Collection[int] = ()) -> list[retention.StateRounds]:
    """The rule after each of these rounds. sizes: of payloads; without: rounds whose commits lack a shard's digest."""
    states, found = retention.StateRounds(run), list[retention.StateRounds]()
    for round, size in enumerate(sizes):
        digests = dict(list(ALL.items())[1:]) if round in without else ALL
        share = dataclasses.replace(share_of("first", [part("embed", "p")]), size=size)
        made = (tiny.contribution(0, shares=(share,)),) if size else ()
        states.follow(tiny.commit(run, round=round, contributions=made, digests=digests))
        found.append(copy.deepcopy(states))
    return found


def test_a_state_is_archived_once_the_payloads_since_have_eight_times_its_bytes() -> None:
    state = retention.state_bytes(RUN)
    assert state == 4 * layout.total_parameters(RUN.model)
    found = followed([0] + [state // 2] * 40)
    assert found[16].kept == (0,)
    assert found[17].kept == (0, 16), "commit 17 has the digests of the state after round 16"
    assert found[17].begin == 0, "there is nothing to go on from but the seed until there are two"
    assert found[32].kept == (0, 16)
    assert (found[33].kept, found[33].begin) == ((16, 32), 16)
    assert list(found[40].digests) == [0, 16, 32]
    for size in (state, 9 * state):
        assert list(followed([size] * 40)[-1].digests) == [0, 8, 16, 24, 32]


def test_weights_that_the_run_begins_with_are_its_first_archived_state() -> None:
    run = dataclasses.replace(RUN, initial_state=tuple(map(tiny.digest, SHARDS)))
    state = retention.state_bytes(run)
    found = followed([state] * 20, run)
    assert found[0].digests == {0: ALL}
    assert [states.begin for states in found[16:18]] == [0, 8], "then they go, as any state that is older"
    small = dataclasses.replace(run, rounds=4)
    assert retention.archive_bytes(small, 1) - retention.archive_bytes(dataclasses.replace(RUN, rounds=4), 1) == state


def test_a_state_without_all_digests_is_not_archived_and_the_next_one_is() -> None:
    state = retention.state_bytes(RUN)
    found = followed([state] * 20, without=(9, 10, 11))
    assert [list(states.digests) for states in found[8:13]] == [[0], [0], [0], [0], [0, 11]]
    assert followed([state] * 40, without=range(41))[-1].kept == (0,)


def test_a_small_run_keeps_everything() -> None:
    assert followed([retention.state_bytes(RUN) // 100] * 700)[-1].begin == 0


def kept_bytes(run: Manifest, replicas: int, rounds: int) -> tuple[int, int]:
    """The most bytes of a node's archive in a run of full replicas, by the rule, and the bytes of all its payloads. A
    state is stored, and what is before the older one removed, as late as `archive_bytes` allows for."""
    shards = layout.shard_names(run.model)
    sizes = [sparse.max_payload_size(run.outer.codec, layout.shapes(run.model, shard)) for shard in shards]
    listed = len(part_lists.pack(tuple(part(s, "p", size) for s, size in zip(shards, sizes, strict=True))))
    round_bytes, state = replicas * (sum(sizes) + listed), retention.state_bytes(run)
    states, most, begins = retention.StateRounds(run), 0, [0]
    digests = {shard: tiny.digest(shard) for shard in shards}
    for round in range(rounds + 1):
        states.follow_packed(replicas * sum(sizes) if round else 0, lambda: tiny.commit(RUN, digests=digests))
        begins.append(states.begin)
        begin = begins[-1 - retention.LATE_ROUNDS :][0]
        written = sum(each > begin for each in states.digests) + (begin > 0)
        most = max(most, written * state + (round - begin) * round_bytes)
    return most, rounds * round_bytes


def test_a_thousand_rounds_of_a_hundred_replicas_of_half_a_billion_parameters_fit_in_60_gigabytes() -> None:
    model = dataclasses.replace(presets.PRESETS["512m"].model, residual_width=0)
    run = tiny.manifest(model=model, outer=OuterSpec(topk=32), rounds=1000)
    assert 0.5e9 < layout.total_parameters(run.model) < 0.55e9
    most, everything = kept_bytes(run, 100, 1000)
    assert everything > 540e9
    assert 30e9 < most <= 60e9
    assert most <= retention.archive_bytes(run, everything // 1000) <= 60e9
    assert kept_bytes(run, 100, 2000)[0] == most, "it does not grow"
    for replicas in (1, 8, 20, 300):
        most, everything = kept_bytes(run, replicas, 1000)
        assert most <= retention.archive_bytes(run, everything // 1000) <= 80e9
    assert kept_bytes(run, 1, 1000)[1] <= retention.archive_bytes(run, kept_bytes(run, 1, 1000)[1] // 1000) < 6e9
