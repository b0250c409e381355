"""The way into any state, between whole peers: newcomers, those who come back, wrong bits, damaged disks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer.log import replay
from peer.log.reader import Folder
from peer.net.base import Handler, Stream
from peer.net.blobs import Blob, BlobServer
from peer.state.handover import TAKEN
from peer.state.storage import KEPT, Storage
from protocol.codec.blob_hash import RANGE_BYTES
from protocol.ledger import part_lists
from protocol.planning import memory
from protocol.run import layout
from protocol.run.manifest import ChainSpec, OuterSpec
from protocol.wire.framing import FrameError, unpack_message
from tests.support.family import FAMILY
from tests.support.recovery import SHARDS, Rounds, is_right, planned, to
from tests.support.volunteers import MODEL, Swarm, Volunteer, manifest

pytestmark = pytest.mark.slow

CHECKPOINT = sum(layout.shard_bytes(MODEL, shard) for shard in SHARDS)


class Bent:
    """The transport of a volunteer, whose streams come to those who serve through `bend`."""

    def __init__(self, volunteer: Volunteer, bend: Callable[[Stream], Any]) -> None:
        self.volunteer, self.bend = volunteer, bend

    async def serve(self, name: str, handler: Handler) -> None:
        await self.volunteer.transport.serve(name, lambda stream: handler(self.bend(stream)))


async def serve_through(volunteer: Volunteer, bend: Callable[[Stream], Any]) -> None:
    """The volunteer serves its blobs and checkpoints through `bend` from now on."""
    server = BlobServer(volunteer.storage.blobs, others=volunteer.storage.find)
    await server.serve(Bent(volunteer, bend))  # type: ignore[arg-type]


class BentStream:
    """A holder's stream; `asked` is the blob that it was asked for last."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.asked = stream, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    async def recv(self, *arguments: Any, **options: Any) -> bytes:
        frame = await self.stream.recv(*arguments, **options)
        with contextlib.suppress(FrameError):
            match unpack_message(frame):
                case {"blob": str(name)}:
                    self.asked = name
        return frame


class WrongStream(BentStream):
    """Each frame of a blob that `find` knows has a wrong bit."""

    def __init__(self, stream: Stream, find: Callable[[str], Blob | None]) -> None:
        super().__init__(stream)
        self.find = find

    async def send(self, data: bytes, **options: Any) -> None:
        answer: object = None
        with contextlib.suppress(FrameError):
            answer = unpack_message(data)
        if self.find(self.asked) is not None and not isinstance(answer, dict):
            data = data[:-1] + bytes([data[-1] ^ 1])
        await self.stream.send(data, **options)


class HeldStream(BentStream):
    """Nothing of one blob is answered until `let` is set."""

    def __init__(self, stream: Stream, held: str, let: asyncio.Event) -> None:
        super().__init__(stream)
        self.held, self.let = held, let

    async def send(self, *parts: bytes, **options: Any) -> None:
        if self.asked == self.held:
            await self.let.wait()
        await self.stream.send(*parts, **options)


@contextlib.asynccontextmanager
async def begun(
    folder: Path, upto: int, *more: str, **changes: Any
) -> AsyncIterator[tuple[Swarm, Rounds, list[Volunteer]]]:
    """A run of a, b and `more` peers at this round; full checkpoints are far larger than a round's offers."""
    run = manifest(**{"rounds": 100, "checkpoint_rounds": 10, "outer": OuterSpec(topk=2048), **changes})
    async with Swarm(folder, run) as swarm:
        rounds = Rounds(swarm)
        peers = [swarm.start(name) for name in ("a", "b", *more)]
        await to(swarm, rounds, upto)
        yield swarm, rounds, peers


def payloads(swarm: Swarm, round: int) -> set[str]:
    """The names of the payloads that a round committed, and of their lists."""
    lists = {
        s.root: part_lists.unpack(swarm.archive.blobs.get(s.root) or b"") for s in swarm.archive.commits[round].shares
    }
    return {name for root, parts in lists.items() for name in (root, *(part.digest for part in parts))}


async def joined(swarm: Swarm, rounds: Rounds) -> Volunteer:
    """A newcomer, when it has its place and its state."""
    newcomer = swarm.start("newcomer")
    await planned(swarm, rounds, newcomer)
    await is_right(swarm, newcomer)
    return newcomer


async def heard(swarm: Swarm, peer: Volunteer, up_bps: int) -> None:
    """Waits until the leading machine knows that this is the peer's uplink."""
    ready = swarm.leader.ready
    await swarm.until(lambda: peer.id in ready and ready[peer.id].up_bps == up_bps)


async def test_a_newcomer_takes_the_newest_checkpoint_and_replays_the_rest(tmp_path: Path) -> None:
    """The newest is 20 rounds old: at most 1.5 checkpoints. And who missed 5 rounds fetches at most 12 % of one."""
    async with begun(tmp_path, 69, checkpoint_rounds=50, outer=OuterSpec(topk=176)) as (swarm, rounds, _):
        newcomer = await joined(swarm, rounds)
        assert swarm.head == 70
        assert newcomer.bases == dict.fromkeys(SHARDS, 50)
        assert set(newcomer.storage.blobs) <= {d for r in range(51, 71) for d in payloads(swarm, r)}
        assert CHECKPOINT < newcomer.received <= 1.5 * CHECKPOINT, newcomer.received / CHECKPOINT
        await to(swarm, rounds, 71)
        await swarm.stop("newcomer")
        await to(swarm, rounds, 76)
        back = await joined(swarm, rounds)
        assert [e.fields["round"] for e in back.events if e.kind == "restored"] == [71]
        assert set(back.storage.blobs) <= {d for r in range(51, swarm.head + 1) for d in payloads(swarm, r)}
        missed = [swarm.archive.blobs.get(d) or b"" for r in range(72, 77) for d in payloads(swarm, r)]
        assert 0.05 < sum(map(len, missed)) / CHECKPOINT <= 0.12


async def test_a_newcomers_state_has_the_momentum_of_the_outer_optimizer(tmp_path: Path) -> None:
    """From a checkpoint of others, and after a restart; the log leads to the same state."""
    async with begun(tmp_path, 13, outer=OuterSpec(**FAMILY["diloco in int8"])) as (swarm, rounds, _):
        newcomer = await joined(swarm, rounds)
        assert newcomer.bases == dict.fromkeys(SHARDS, 10)
        state = newcomer.rounds.outer.theta["head"]
        assert tuple(array.shape for array in state) == 2 * layout.shapes(MODEL, "head")
        assert all(array.any() for array in state)
        await swarm.stop("b")
        await to(swarm, rounds, 18)
        back = swarm.start("b")
        await planned(swarm, rounds, back)
        await is_right(swarm, back)
        source = Folder(swarm.archive.folder)
        done = await replay.verify(swarm.manifest, source.records(), source.payload, lambda problem: None)
        assert done.problems == []
        assert done.agreed == done.attested > 0


async def test_a_newcomer_is_ready_before_a_plan_names_it_and_the_first_one_that_does_has_work_for_it(
    tmp_path: Path,
) -> None:
    async with begun(tmp_path, 11) as (swarm, rounds, _):
        newcomer, machine = swarm.start("newcomer"), swarm.leader
        await swarm.until(lambda: set(machine.attestations.of(11).get(newcomer.id, {})) == set(SHARDS))
        assert not machine.plan.names(newcomer.id)
        await is_right(swarm, newcomer)
        await swarm.until(lambda: [e.fields["round"] for e in newcomer.events if e.kind == "waiting"] == [13])
        await swarm.until(lambda: newcomer.id in machine.ready)
        rounds.go(12)
        await swarm.until(lambda: swarm.head == 12)
        plan = swarm.archive.commits[12].plan
        assert plan.replica_of(newcomer.id) is not None
        assert plan.forming == ()


async def test_after_a_kill_the_payloads_on_disk_are_not_fetched_again(tmp_path: Path) -> None:
    async with begun(tmp_path, 17, "victim") as (swarm, rounds, (*_, victim)):
        await swarm.stop("victim")
        shutil.rmtree(victim.folder / "checkpoint-00000017")  # a killed process writes none at its end
        back = swarm.start("victim", limit=1)
        await swarm.until(lambda: back.rounds is not None and back.rounds.member.applied == 17)
        assert [e.fields["round"] for e in back.events if e.kind == "restored"] == [10]
        assert back.received < 200, "nothing but the tokenizer"
        await to(swarm, rounds, 18)
        await is_right(swarm, back)


async def test_a_newcomer_that_is_restarted_goes_on(tmp_path: Path) -> None:
    """It is stopped after its first shards: what is on disk is not fetched again."""
    async with begun(tmp_path, 11) as (swarm, rounds, holders):
        digests, let = swarm.archive.commits[11].digests, asyncio.Event()
        for one in holders:
            await serve_through(one, lambda stream: HeldStream(stream, digests["block.3"], let))
        newcomer = swarm.start("newcomer")
        machine = swarm.leader
        await swarm.until(lambda: newcomer.id in machine.attestations.of(11) and newcomer.id in machine.ready)
        rounds.go(12)
        before = [digests[shard] for shard in SHARDS[: SHARDS.index("block.3")]]
        await swarm.until(lambda: all(newcomer.storage.blobs.has(digest) for digest in before))
        taken = newcomer.received
        await swarm.stop("newcomer")
        let.set()
        # as if some of the next shard had come
        part = newcomer.storage.blobs.part(digests["block.3"], layout.shard_bytes(MODEL, "block.3"))
        blob = holders[0].storage.find(digests["block.3"])
        assert part.learn(blob.leaves())
        for index in range(3):
            assert part.write(index, blob.read(index))
        again = swarm.start("newcomer")
        await swarm.until(lambda: bool(machine.attestations.of(12).get(again.id)))
        await is_right(swarm, again)
        assert set(again.bases.values()) == {10}
        log = swarm.archive.commits
        size = sum(s.size + s.listed for r in (11, 12) for s in log[r].shares)
        assert taken + again.received < 1.02 * (CHECKPOINT + size) - 3 * RANGE_BYTES
        assert list((again.storage.blobs.folder / "parts").iterdir()) == []


async def test_a_stage_fetches_its_own_shards_only(tmp_path: Path) -> None:
    async with begun(tmp_path, 11) as (swarm, rounds, _):
        run = swarm.manifest
        half = max(memory.stage_memory(run, 0, 2), memory.stage_memory(run, 2, 4))
        chain = [swarm.start(name, memory=half) for name in ("c", "d")]
        await planned(swarm, rounds, *chain)
        (forming,) = swarm.archive.commits[12].plan.forming
        stages = forming.stages
        for stage in stages:
            peer = next(p for p in chain if p.id == stage.peer)
            held = memory.stage_shards(run, stage.first, stage.last)
            await is_right(swarm, peer, held)
            assert peer.bases == dict.fromkeys(held, 10)
            size = sum(layout.shard_bytes(MODEL, shard) for shard in held)
            assert peer.received < 1.35 * size, "a state, and 2 rounds of 2/18 each"


async def test_a_corrupt_holder_of_a_state_is_named_and_the_join_ends(tmp_path: Path) -> None:
    large = dataclasses.replace(MODEL, vocab_size=8192)  # three holders at once are asked for two megabytes
    async with begun(tmp_path, 11, "c", model=large) as (swarm, rounds, (bad, *_)):
        await serve_through(bad, lambda stream: WrongStream(stream, bad.storage.find))
        newcomer = await joined(swarm, rounds)
        assert set(newcomer.bases.values()) == {10}
        named = [t for t in newcomer.texts() if bad.id[-8:] in t and "not asked again" in t]
        assert 1 <= len(named) <= 4, newcomer.texts()


async def test_holders_that_vanish_on_the_way_are_replaced_by_a_replay(tmp_path: Path) -> None:
    """They say that they have a state and then do not serve it."""
    async with begun(tmp_path, 21) as (swarm, rounds, holders):
        for holder in holders:
            await BlobServer(holder.storage.blobs).serve(holder.transport)
        newcomer = await joined(swarm, rounds)
        assert set(newcomer.bases.values()) == {0}
        assert any("does not have it" in t for t in newcomer.texts())


async def test_holders_that_have_a_newer_state_meanwhile_are_asked_for_that(tmp_path: Path) -> None:
    """They keep two, and the fetching peer is slow: what they offered is gone when it is asked for."""
    gone = set[str]()
    async with begun(tmp_path, 21, checkpoint_rounds=5) as (swarm, rounds, holders):
        for holder in holders:
            assert set(holder.storage.states()) == {15, 20}
            forgets(holder.storage, 15, gone)
            await BlobServer(holder.storage.blobs, others=holder.storage.find).serve(holder.transport)
        newcomer = await joined(swarm, rounds)
        assert gone
        assert set(newcomer.bases.values()) == {20}


def forgets(storage: Storage, round: int, gone: set[str]) -> None:
    """Says that it has the state of this round alone, and forgets it when asked: `gone`: the digests asked for."""
    states, find = storage.states, storage.find
    names = set(states()[round].values())

    def found(name: str) -> Blob | None:
        if name in names:
            gone.add(name)
            return None
        return find(name)

    def told() -> dict[int, dict[str, str]]:
        now = states()
        return {r: shards for r, shards in now.items() if (r == round) != bool(gone)}

    storage.states, storage.find = told, found  # type: ignore[method-assign]


async def test_a_checkpoint_that_keeps_a_wrong_bit_is_not_believed(tmp_path: Path) -> None:
    """The wrong state was written to disk with its own digest; the log's decides."""
    async with begun(tmp_path, 9, "wrong", start_peers=3, checkpoint_rounds=5) as (swarm, rounds, (*_, wrong)):
        array = wrong.rounds.outer.theta["head"][1].copy()
        array.view(np.uint32)[0, 7] ^= 8
        wrong.rounds.outer.theta["head"] = [wrong.rounds.outer.theta["head"][0], array]
        await to(swarm, rounds, 12)
        assert [e.fields["shards"] for e in wrong.events if e.kind == "shard_rebuilt"] == [["head"]]
        assert wrong.bases == {"head": 5}, "not 10, whose bits are wrong"
        await is_right(swarm, wrong)


@pytest.mark.parametrize("damage", ["bit", "truncated", "gone"])
async def test_a_damaged_shard_of_a_checkpoint_is_told_and_built_again(tmp_path: Path, damage: str) -> None:
    async with begun(tmp_path, 12, "c", start_peers=3, checkpoint_rounds=5) as (swarm, rounds, (*_, peer)):
        await swarm.stop("c")
        path = peer.folder / "checkpoint-00000012" / "block.1.safetensors"
        raw = bytearray(path.read_bytes())
        raw[-100] ^= 16
        path.write_bytes(raw if damage == "bit" else raw[:-1])
        if damage == "gone":
            path.unlink()
        back = swarm.start("c")
        await swarm.until(lambda: back.rounds is not None and back.rounds.member.head == 12)
        await swarm.until(lambda: any(e.kind == "recovered" for e in back.events))
        if damage != "gone":
            assert [str(path) in t and "damaged" in t for t in back.texts()] == [True]
        assert back.bases == {"block.1": 10}
        await to(swarm, rounds, 13)
        await is_right(swarm, back)
        assert len(list(peer.folder.glob("checkpoint-*"))) == KEPT


async def test_error_feedback_goes_to_who_trains_its_shard(tmp_path: Path) -> None:
    """A member of a chain is restarted twice, each time with another uplink, and so comes to the chain's other end: the
    feedback of the shards that it does not train any more goes to one who does."""
    run = manifest(start_peers=3, rounds=100, checkpoint_rounds=2, chains=ChainSpec(forward="int4"))  # both ways alike
    half = max(memory.stage_memory(run, 0, 2), memory.stage_memory(run, 2, 4))
    async with Swarm(tmp_path, run) as swarm:
        rounds, log = Rounds(swarm), swarm.archive.commits
        swarm.start("full"), swarm.start("y", memory=half)
        peer = swarm.start("x", memory=half, up_bps=2 * 10**8)
        await to(swarm, rounds, 2)
        for up_bps in (10**7, 2 * 10**8):
            await swarm.stop("x")
            await to(swarm, rounds, swarm.head + 1)  # as soon as x is gone
            peer = swarm.start("x", memory=half, up_bps=up_bps)
            await heard(swarm, peer, up_bps)
            await planned(swarm, rounds, peer)
            await to(swarm, rounds, swarm.head + 3)  # one in which it fetches its other shards, two that it trains
        assert [c.round for c in log if c.left_out] == [3, 8]
        firsts = {}
        for number in range(1, len(log)):
            if any(share.peer == peer.id for c in log[number].contributions for share in c.shares):
                stage = next(r.stage_of(peer.id) for r in log[number - 1].plan.replicas if peer.id in r.peers)
                firsts[number] = stage.first
        assert list(firsts) == [1, 2, 6, 7, 11, 12]
        assert firsts[1] == firsts[2] != firsts[6] == firsts[7] != firsts[11] == firsts[12], "it changed its end twice"
        trained = set(memory.stage_shards(run, stage.first, stage.last))
        heirs = [swarm.peers[name] for name in ("full", "y")]

        def given() -> bool:
            notes = [json.loads(heir.storage.notes.get(TAKEN, "{}")) for heir in heirs]
            return all(any(f"{peer.id}/{shard}" in note for note in notes) for shard in set(SHARDS) - trained)

        await swarm.until(given)
