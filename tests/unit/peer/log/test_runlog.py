"""A log over the in-memory transport: any bootstrap node will do, and none needs to be believed."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from peer.cli.log import lines, round_lines
from peer.log import reader, replay
from peer.net import compression
from peer.net.base import serve_calls
from peer.net.blobs import BlobServer, BlobStore
from peer.net.memory import MemoryNetwork
from protocol.errors import LocalError, RemoteError
from protocol.identity import Identity
from protocol.wire import encoding, endpoints, framing
from protocol.wire.commit import Commit, Contribution
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from protocol.wire.session import LogRequest
from tests.support import tiny

MANIFEST = tiny.manifest(rounds=2)
AWAY, OTHER, WATCHER = (Identity(bytes([i] * 32)).peer_id for i in (1, 2, 9))


def commits(count: int) -> list[Commit]:
    out: list[Commit] = []
    for round in range(count):
        plan = Plan(round=round + 1, replicas=()) if round < MANIFEST.rounds else None
        parent, run = out[-1].digest if out else MANIFEST.run_id, MANIFEST.run_id
        made = tiny.commit(run=run, round=round, parent=parent, plan=plan, idle=round)
        out.append(dataclasses.replace(made, leader=tiny.OPERATOR.peer_id, members=MANIFEST.operators))
    return out


UNPACKED = framing.pack_message(["a page"])
"""A page that is not packed."""


@contextlib.asynccontextmanager
async def remote(answer: Callable[[int], bytes]) -> AsyncIterator[reader.Remote]:
    """The log of two nodes, of which the first is away."""
    network = MemoryNetwork()
    node, watcher = network.transport(OTHER), network.transport(WATCHER)

    async def log(remote: str, request: bytes) -> bytes:
        page = answer(encoding.expect(LogRequest, encoding.decode(request, remote), remote).after)
        return page if page == UNPACKED else compression.pack(page, compression.PLAIN)

    await serve_calls(node, endpoints.LOG, log)
    with tempfile.TemporaryDirectory() as name:
        yield reader.Remote(watcher, [AWAY, OTHER], BlobStore(Path(name)))
    await watcher.aclose()
    await node.aclose()


def pages(log: list[bytes], length: int = 1) -> Callable[[int], bytes]:
    return lambda after: framing.pack_message(log[after + 1 : after + 1 + length])


def records(found: list[Commit]) -> list[bytes]:
    return [encoding.encode_record(tiny.record(commit)) for commit in found]


async def test_the_log_comes_page_by_page_from_the_node_that_answers() -> None:
    async with remote(pages(records(commits(3)))) as log:
        shown = [line async for line in lines(MANIFEST, log)]
        assert [line.split("  ")[0] for line in shown if line.startswith("round")] == ["round 0", "round 1", "round 2"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda after: b"\xc1", "log of .*not valid|log of .*extension"),
        (lambda after: UNPACKED, "log of .*no such form of compression"),
        (lambda after: framing.pack_message({"a": 1}), "not a list of commits"),
        (lambda after: framing.pack_message([1]), "not a list of commits"),
    ],
)
async def test_a_node_that_answers_nonsense_is_named(answer: Callable[[int], bytes], reason: str) -> None:
    async with remote(answer) as log:
        with pytest.raises(RemoteError, match=reason) as error:
            [record async for record in reader.checked(MANIFEST, log)]
        assert error.value.peer == OTHER


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ([b"junk"], "round 0: the commit cannot be believed: record from the log"),
        (
            [encoding.seal(tiny.OPERATOR, LogRequest(after=1))],
            "round 0: the commit cannot be believed: record from the log",
        ),
        (records(commits(1)) * 50, "round 1: the commit is not the one of round 1"),
    ],
)
async def test_a_node_that_repeats_itself_or_lies_is_not_followed_for_ever(log: list[bytes], reason: str) -> None:
    async with remote(lambda after: framing.pack_message(log)) as source:
        with pytest.raises(LocalError, match=reason):
            [record async for record in reader.checked(MANIFEST, source)]
        found = await replay.verify(MANIFEST, source.records(), source.payload, lambda problem: None)
        assert len(found.problems) == 1


async def test_payloads_come_by_digest_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    network = MemoryNetwork()
    node, watcher = network.transport(OTHER), network.transport(WATCHER)
    store = BlobStore(tmp_path / "node")
    await BlobServer(store).serve(node)
    log = reader.Remote(watcher, [AWAY, OTHER], BlobStore(tmp_path / "ours"))
    digest = store.put(b"payload")
    assert await log.payload(digest, 7) == b"payload"
    with pytest.raises(RemoteError, match="does not have it"):
        await log.payload(digest, 3)
    with pytest.raises(RemoteError, match="does not have it"):
        await log.payload("0" * 64, 7)
    await log.aclose()
    await watcher.aclose()
    await node.aclose()


def test_a_contribution_without_weight_is_no_commit() -> None:
    """Its sum of tokens would be zero, and everybody divides by it."""
    from protocol.wire.schema import plain

    made = Contribution(replica=0, tokens=1, steps=4, loss=None, shares=())
    body = {**plain(commits(1)[0]), "contributions": [{**plain(made), "tokens": 0}]}
    with pytest.raises(encoding.MessageError, match="tokens must be at least 1"):
        encoding.decode_record(framing.pack_message({"c": body, "n": 0, "v": {}}), OTHER)


def test_blocks_that_moved_are_shown() -> None:
    def plan(cut: int) -> Plan:
        stages = (StageSpec(peer="a" * 12, first=0, last=cut), StageSpec(peer="b" * 12, first=cut, last=4))
        return Plan(round=2, replicas=(ReplicaSpec(stages=stages),))

    made = tiny.record(dataclasses.replace(commits(2)[1], plan=plan(3)))
    assert round_lines(made, plan(2), 9)[-1] == "  0 moved       blocks 2 > 2 become 3 > 1  aaaaaaaa > bbbbbbbb"
    assert "moved" not in "".join(round_lines(made, plan(3), 9))
