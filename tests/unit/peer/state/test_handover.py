"""Error feedback moves to its heirs: refusals, and nothing is lost or counted twice wherever one dies."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from peer.net.base import Clock
from peer.net.disk import Disk, Piece
from peer.state.handover import MOST_OF_A_GIVER, SILENT_SECONDS, Giving, Taking
from peer.state.outer_optimizer import Outer
from peer.state.storage import FeedbackWriter, Shards, Storage
from protocol.codec import sparse
from protocol.round import handover as rules
from protocol.run import layout
from protocol.run.manifest import OuterSpec
from protocol.wire import framing
from protocol.wire.calls import Handover, HandoverAnswer, Step
from protocol.wire.commit import Commit, LeftOut
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from protocol.wire.schema import build, plain
from tests.support import tiny
from tests.support.family import FAMILY

MANIFEST = tiny.manifest(outer=OuterSpec(topk=64, beta=1.0))
LAYERS = MANIFEST.model.n_layers
SHARDS = layout.shard_names(MANIFEST.model)
SHARD = "block.1"
DEADLINE = 60.0


def plan(round: int, *chains: tuple[str, ...], forming: tuple[str, ...] = ()) -> Plan:
    """Replicas whose members have equal parts."""

    def spec(number: int, chain: tuple[str, ...]) -> ReplicaSpec:
        ends = [i * LAYERS // len(chain) for i in range(len(chain) + 1)]
        stages = (StageSpec(peer=p, first=a, last=b) for p, (a, b) in zip(chain, itertools.pairwise(ends), strict=True))
        return ReplicaSpec(number=number, stages=tuple(stages))

    return Plan(
        round=round,
        replicas=tuple(spec(i, chain) for i, chain in enumerate(chains)),
        forming=(spec(9, forming),) if forming else (),
        forming_since=(round,) if forming else (),
    )


def log(*plans: Plan) -> dict[int, Commit]:
    """Commits with these plans, of the rounds before theirs."""
    return {plan.round - 1: tiny.commit(round=plan.round - 1, plan=plan) for plan in plans}


# --- who gets it, and what is refused


def test_who_newly_trains_a_shard_gets_the_feedback_of_who_stopped() -> None:
    before, after = plan(4, ("a",), ("b", "c")), plan(5, ("a",), ("d", "c"))
    assert rules.heir(MANIFEST, before, after, "b", "block.0") == "d"
    assert rules.heir(MANIFEST, before, plan(5, ("a",), forming=("e", "f")), "b", "block.0") == "e"


def test_where_nobody_is_new_one_who_trains_it_gets_it_and_where_nobody_trains_it_nobody() -> None:
    after = plan(5, ("a",))
    assert rules.heir(MANIFEST, plan(4, ("a",), ("b",)), after, "b", SHARD) == "a"
    assert rules.heir(MANIFEST, None, after, "b", SHARD) == "a"
    assert rules.heir(MANIFEST, None, after, "a", SHARD) is None
    assert rules.heir(MANIFEST, None, plan(5, ("a",), forming=("b",)), "a", SHARD) is None, (
        "who leaves waits for nobody"
    )


def test_the_rows_of_tokens_go_from_stage_to_stage_and_to_full_replicas() -> None:
    """Every stage trains `anchor`: who gets another stage keeps it, and a chain that ends has as many heirs as there
    are trainers."""
    narrow = tiny.manifest(model=dataclasses.replace(MANIFEST.model, residual_width=2))
    before, after = plan(4, ("a",), ("b", "c")), plan(5, ("a",), ("d", "b"))
    assert rules.trainers(narrow, before.replicas, "anchor") == ("a", "b", "c")
    assert rules.trainers(narrow, before.replicas, SHARD) == ("a", "b")
    assert rules.kept_shards(narrow, before, "b") == ("embed", "block.0", "block.1", "anchor")
    assert rules.kept_shards(narrow, after, "b") == ("block.2", "block.3", "head", "anchor")
    assert rules.heir(narrow, before, after, "c", "anchor") == "d"
    assert rules.heir(narrow, before, plan(5, ("a",)), "b", "anchor") == "a"
    gift = offered(heir="d", shard="anchor", size=rules.largest(narrow, offered(shard="anchor")))
    assert rules.why_refused(narrow, log(before, after), after, "d", "c", gift) is None
    assert rules.why_refused(MANIFEST, log(before, after), after, "d", "c", gift) == "there is no such shard"


def offered(**changes: object) -> Handover:
    values = {"serial": 1, "heir": "a", "shard": SHARD, "topk": 1024, "blob": "0" * 64, "size": 100}
    return build(Handover, {**values, **changes})


@pytest.mark.parametrize(
    ("giver", "changes", "reason"),
    [
        ("b", {}, None),
        ("b", {"heir": "c"}, "somebody else"),
        ("b", {"shard": "block.9"}, "no such shard"),
        ("b", {"size": 10**9}, "size"),
        ("b", {"topk": 4096}, "size"),
        ("b", {"shard": "block.3"}, "does not train"),
        ("b", {"shard": "block.3", "given": True}, "its giver has not trained"),
        ("x", {}, "its giver has not trained"),
    ],
)
def test_only_who_trained_a_shard_hands_it_over_and_only_to_who_trains_it(
    giver: str, changes: dict[str, object], reason: str | None
) -> None:
    before, after = plan(4, ("b", "c")), plan(5, ("a", "c"))
    found = rules.why_refused(MANIFEST, log(before, after), after, "a", giver, offered(**changes))
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_a_giver_of_long_ago_is_not_known_any_more() -> None:
    plans = [plan(1, ("b",)), *(plan(r, ("a",)) for r in range(2, rules.MEMORY_ROUNDS + 2))]
    assert rules.why_refused(MANIFEST, log(*plans[:-1]), plans[-2], "a", "b", offered()) is None
    assert rules.why_refused(MANIFEST, log(*plans), plans[-1], "a", "b", offered()) is not None


def test_nothing_is_taken_from_whose_newest_work_was_left_out_for_its_fault() -> None:
    after, reason = plan(5, ("a", "c")), "it disagrees with the others"
    known = log(plan(4, ("b", "c")), after)
    for faults, found in (("10", f"its giver's newest work was left out: {reason}"), ("01", None), ("", None)):
        left = LeftOut(replica=0, reason=reason, judged="name", peers=("b", "c"), faults=faults)
        known[4] = dataclasses.replace(known[4], left_out=(left,))
        assert rules.why_refused(MANIFEST, known, after, "a", "b", offered()) == found
        assert rules.why_refused(MANIFEST, known, after, "a", "b", offered(given=True)) == found
    known[4] = dataclasses.replace(
        known[4], left_out=(LeftOut(replica=0, reason=reason, judged="name", peers=("b",), faults="1"),)
    )
    counted = tiny.commit(round=5, plan=after, contributions=(tiny.contribution(0, "b"),))
    assert rules.why_refused(MANIFEST, known | {5: counted}, after, "a", "b", offered()) is None


def test_a_norm_is_compared_with_the_own_one() -> None:
    assert not rules.is_too_large(rules.MOST_NORM, 1.0)
    assert rules.is_too_large(1.01 * rules.MOST_NORM, 1.0)
    assert rules.is_too_large(float("nan"), 1.0)


def test_a_slow_line_takes_less() -> None:
    sizes = [
        sum(sparse.max_payload_size(rules.codec(MANIFEST, k), layout.shapes(MANIFEST.model, s)) for s in SHARDS)
        for k in rules.TOPK
    ]
    for k, size in zip(rules.TOPK[:-1], sizes, strict=False):
        assert rules.leaving_topk(MANIFEST, SHARDS, -(-8 * size // 5), 10.0) == k
    assert rules.leaving_topk(MANIFEST, SHARDS, 0, 10.0) == rules.TOPK[-1]


@pytest.mark.parametrize("method", FAMILY)
def test_the_feedback_of_every_method_moves_as_a_sparse_payload(method: str) -> None:
    run = tiny.manifest(outer=OuterSpec(**FAMILY[method]))
    for k in rules.TOPK:
        codec = rules.codec(run, k)
        assert (codec.is_dense, codec.sample, codec.transform) == (False, 1.0, run.outer.transform)
        assert k <= codec.topk <= 1024, "less than a dense payload has"


# --- two peers with disks, which may die at any operation


class Died(Exception):
    """A process ended here."""


class MortalDisk(Disk):
    """Raises Died before its write or removal number `dies_at`, or after it where that is a half; and ever after."""

    def __init__(self, dies_at: float) -> None:
        self.count, self.dies_at = 0.0, dies_at

    def live(self) -> None:
        self.count += 0.5
        self.check()

    def check(self) -> None:
        if self.count >= self.dies_at:
            raise Died

    def write(self, path: Path, *pieces: Piece, sync: bool = True, **options: object) -> None:
        self.live()
        super().write(path, *pieces, sync=False, **options)  # type: ignore[arg-type]
        self.live()

    def remove(self, path: Path) -> None:
        self.live()
        super().remove(path)
        self.live()

    def sync(self, path: Path) -> None: ...


class Side:
    """One life of a peer: its disk, its feedback, and both its sides of hand-overs."""

    def __init__(self, name: str, folder: Path, world: World, dies_at: float = float("inf")) -> None:
        self.name, self.disk = name, MortalDisk(float("inf"))
        self.storage = Storage(folder / name, None, self.disk)
        self.outer = Outer(MANIFEST.model, MANIFEST.outer.codec, 1.0, 1.0)
        found = self.storage.load_feedback()
        self.outer.feedback = found.feedback
        self.writer = FeedbackWriter(self.storage, self.outer.feedback, Clock(), found.round, on_disk=found.round)
        self.own_norm: float | None = 100.0
        self.giving = Giving(MANIFEST, name, self.storage, self.outer, self.writer, self.work, world.ask)
        self.taking = Taking(
            MANIFEST, self.storage, self.outer, self.writer, why_refused=self.refused, own_norm=self.norm,
            fetch=self.fetch, work=self.work, wake=lambda: None,
        )  # fmt: skip
        self.world = world
        self.disk.dies_at = dies_at

    async def work(self, do: Callable[..., object], *arguments: object) -> object:
        return do(*arguments)

    async def fetch(self, blob: str, size: int, holder: str) -> None:
        found = self.storage.blobs.find(blob) or self.world.sides[holder].storage.find(blob)
        self.storage.blobs.put(b"".join(found.read(i) for i in range(-(-size // 32768))))

    def refused(self, giver: str, handover: Handover) -> str | None:
        return rules.why_refused(MANIFEST, self.world.log, self.world.plan, self.name, giver, handover)

    def norm(self, shard: str) -> float | None:
        return self.own_norm

    def close(self) -> None:
        self.storage.close()


class World:
    """A giver `b`, whose replica `a` has now. `turn` lets everybody do what is to be done once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before, self.plan = plan(4, ("b",)), plan(5, ("a",))
        self.log = log(self.before, self.plan)
        self.sides: dict[str, Side] = {}

    async def ask(self, peer: str, name: str, request: bytes, limit: int) -> bytes:
        giver = next(n for n in self.sides if n != peer)
        return await self.sides[peer].taking.answer(giver, request)

    async def turn(self) -> None:
        for side in self.sides.values():
            await side.giving.call_heirs()
            await side.giving.step(self.log, self.plan)
        for side in self.sides.values():
            await asyncio.gather(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))
            await side.taking.step()
            side.disk.check()  # it may have died in a task

    def start(self, name: str, dies_at: float = float("inf")) -> Side:
        if name in self.sides:
            self.sides[name].close()
        self.sides[name] = Side(name, self.folder, self, dies_at)
        return self.sides[name]

    def on_disk(self) -> dict[str, Shards]:
        """The feedback of both as a new life would find it."""
        return {name: self.start(name).outer.feedback for name in list(self.sides)}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    rng = np.random.default_rng(7)
    for name in ("a", "b"):
        side = made.start(name)
        side.outer.feedback[SHARD] = [
            rng.integers(-9, 10, shape).astype(np.float32) for shape in layout.shapes(MANIFEST.model, SHARD)
        ]
        side.storage.save_feedback(4, side.outer.feedback)
        made.start(name)
    yield made
    for side in made.sides.values():
        side.close()


def total(*held: Shards) -> list[np.ndarray]:
    return [np.sum(arrays, axis=0) for arrays in zip(*(h[SHARD] for h in held), strict=True)]


async def until(world: World, done: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not done():
            await world.turn()


def same(found: list[np.ndarray], wanted: list[np.ndarray]) -> bool:
    return all(np.allclose(x, y, rtol=0, atol=1e-6) for x, y in zip(found, wanted, strict=True))


def test_what_a_giver_loses_its_heir_gets(world: World) -> None:
    a, b = world.sides["a"], world.sides["b"]
    first, before = total(a.outer.feedback, b.outer.feedback), b.outer.held(SHARD)
    asyncio.run(until(world, lambda: a.storage.notes != {} and not b.giving.open))
    assert same(total(a.outer.feedback, b.outer.feedback), first)
    assert b.outer.held(SHARD) < before
    assert same(total(*world.on_disk().values()), first), "and so it is on disk"


@pytest.mark.parametrize("victim", ["a", "b"])
def test_wherever_one_of_them_dies_nothing_is_lost_or_counted_twice(world: World, victim: str) -> None:
    first = total(*(side.outer.feedback for side in world.sides.values()))
    deaths = 0

    def finished() -> bool:
        return world.sides["a"].storage.notes != {} and not world.sides["b"].giving.open

    for at in range(1, 60):
        for name in world.sides:
            world.start(name, at / 2 if name == victim else float("inf"))
        try:
            asyncio.run(until(world, finished))
            break
        except Died:
            deaths += 1
        held = world.on_disk()
        a, b = world.sides["a"], world.sides["b"]
        taken = a.storage.notes.get("taken_from", "")
        under_way = [
            b.storage.read_handover(h) for h in b.giving.open.values() if f'"b/{SHARD}": {h.serial}' not in taken
        ]
        found = total(*held.values())
        for payload in under_way:
            codec = rules.codec(MANIFEST, rules.TOPK[0])
            sent = sparse.decode(codec, layout.shapes(MANIFEST.model, SHARD), payload)
            for x, part in zip(found, sent, strict=True):
                x.reshape(-1)[part.index] += part.values
        assert same(found, first), f"death {at} of {victim}: what both have and what is under way is not what there was"
    assert deaths > 5
    asyncio.run(until(world, lambda: not world.sides["b"].giving.open))
    assert same(total(*world.on_disk().values()), first)


def test_what_is_not_given_comes_back_to_who_trains_the_shard_again(world: World) -> None:
    a, b = world.sides["a"], world.sides["b"]
    first = [x.copy() for x in b.outer.feedback[SHARD]]
    a.own_norm = None  # it has not offered anything yet, so it is not ready
    asyncio.run(world.turn())
    assert b.giving.open
    world.log |= log(plan(6, ("b",)))
    world.plan = plan(6, ("b",))
    asyncio.run(until(world, lambda: not b.giving.open))
    assert same(b.outer.feedback[SHARD], first)
    world.on_disk()
    assert same(world.sides["b"].outer.feedback[SHARD], first)
    assert not world.sides["b"].giving.open


def test_a_part_that_is_too_large_is_refused_and_its_giver_keeps_it(world: World) -> None:
    a, b = world.sides["a"], world.sides["b"]
    first, own = [x.copy() for x in b.outer.feedback[SHARD]], [x.copy() for x in a.outer.feedback[SHARD]]
    a.own_norm = b.outer.held(SHARD) / rules.MOST_NORM / 2
    asyncio.run(until(world, lambda: bool(b.storage.notes) and not b.giving.open))
    assert same(b.outer.feedback[SHARD], first)
    assert same(a.outer.feedback[SHARD], own)


async def test_a_liar_does_not_get_a_part_added_before_it_is_looked_at_or_twice(world: World) -> None:
    a, b = world.sides["a"], world.sides["b"]
    payload, _ = b.outer.encode(SHARD, rules.codec(MANIFEST, 1024))
    a.own_norm = 1e-3
    blob = a.storage.blobs.put(payload)
    own = [x.copy() for x in a.outer.feedback[SHARD]]
    handover = offered(blob=blob, size=len(payload), given=True)

    async def say(handover: Handover) -> Step:
        raw = await a.taking.answer("b", framing.pack_message(plain(handover)))
        await asyncio.gather(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))
        await a.taking.step()
        return Step(build(HandoverAnswer, framing.unpack_message(raw)).step)

    assert await say(handover) is Step.WAIT
    assert await say(handover) is Step.REFUSED
    assert same(a.outer.feedback[SHARD], own)
    a.own_norm = 1e3
    assert [await say(handover) for _ in range(3)] == [Step.WAIT, Step.TAKEN, Step.TAKEN]
    once = [x.copy() for x in a.outer.feedback[SHARD]]
    assert not same(once, own)
    assert await say(dataclasses.replace(handover, given=False)) is Step.TAKEN
    assert same(a.outer.feedback[SHARD], once)


@pytest.mark.virtual
async def test_givers_who_fall_silent_keep_no_places(tmp_path: Path) -> None:
    """Each giver has some of the places for hand-overs; one that is silent about its own has none."""
    made = World(tmp_path)
    heir = made.start("a")
    fetched: list[str] = []

    async def never(blob: str, size: int, holder: str) -> None:
        fetched.append(holder)
        await asyncio.Event().wait()

    taking = Taking(
        MANIFEST, heir.storage, heir.outer, heir.writer, why_refused=lambda giver, handover: None, own_norm=heir.norm,
        fetch=never, work=heir.work, wake=lambda: None,
    )  # fmt: skip

    async def give(giver: str, number: int) -> None:
        handover = Handover(
            serial=1, heir="a", shard=f"block.{number}", topk=rules.TOPK[0], blob=f"{number:064x}", size=8
        )
        await taking.answer(giver, framing.pack_message(plain(handover)))

    for giver in ("x", "y", "z", "u", "v"):
        for number in range(2 * MOST_OF_A_GIVER):
            await give(giver, number)
    await asyncio.sleep(0)
    assert [fetched.count(giver) for giver in "xyzuv"] == [MOST_OF_A_GIVER] * 4 + [0], "all places are taken"
    await asyncio.sleep(SILENT_SECONDS + 1)
    await give("v", 0)
    await asyncio.sleep(0)
    assert fetched[-1] == "v"
    await taking.aclose()
    for side in made.sides.values():
        side.close()
