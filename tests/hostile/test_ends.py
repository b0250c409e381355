"""Nothing that a stranger sends ends a node or a peer; the stream that it came on ends, at most."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import msgpack
import pytest

from bootstrap.background_jobs import LatestJob
from peer.net.base import Closed, RemoteError, Stream, call, serve_calls
from peer.net.memory import MemoryNetwork
from protocol.round.leader_events import Planned
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire import bounds, encoding, endpoints, framing
from protocol.wire.announcement import Announcement
from protocol.wire.schema import packed
from protocol.wire.session import Announced
from tests.hostile.ground import Ground, identity, manifest

pytestmark = pytest.mark.slow

JUNK: tuple[Any, ...] = (
    7,
    None,
    "text",
    [7],
    [[7]],
    [[1, 2]],
    [[1, ["x" * 5000]]],
    [[-1, []]],
    {"held": 1},
    [[2**64 - 1, ["head"]]],
)
"""Answers to the question who has which state."""


def heavy() -> Manifest:
    """A run whose payloads are large for its model: a newcomer asks for states after a few rounds."""
    made = manifest()
    return dataclasses.replace(made, outer=dataclasses.replace(made.outer, topk=2048))


def replay_bytes(ground: Ground) -> int:
    """What a newcomer would have to fetch if no state were served."""
    return sum(share.size for commit in ground.archive.commits[1:] for share in commit.shares)


async def test_answers_about_states_that_make_no_sense_end_no_newcomer(tmp_path: Path) -> None:
    async with Ground(tmp_path, heavy()) as ground:
        asked: set[int] = set()
        spec = ground.manifest.model
        state_bytes = sum(layout.shard_bytes(spec, shard) for shard in layout.shard_names(spec))

        async def deceive(number: int) -> asyncio.Task[None]:
            async def lie(remote: str, request: bytes) -> bytes:
                asked.add(number)
                return framing.pack_message(JUNK[number])

            enemy = await ground.enemy(f"enemy {number}")
            await serve_calls(enemy.transport, endpoints.STATES, lie)
            return asyncio.create_task(enemy.lives(await enemy.session()))

        await ground.join("a", "b")
        enemies = [await deceive(number) for number in range(3)]
        await ground.until(lambda: replay_bytes(ground) > state_bytes)
        await ground.join("newcomer")
        await ground.goes_on(2)
        assert asked == set(range(len(enemies))), "the newcomer asked all of them"
        for living in enemies:
            living.cancel()
        await asyncio.gather(*enemies, return_exceptions=True)


def overflowing() -> list[dict[str, Any]]:
    """Messages of a session, as maps: of the form that the decoder knows, and impossible."""
    most, digest = 2**64 - 1, bytes(32)
    made_up = {f"s{i}": digest for i in range(46_600)}
    part = ["embed", digest, 8, 1.0]
    offer = {"t": "offer", "round": 1, "replica": 0, "parts": [part], "tokens": 1, "steps": 1, "loss": 1.0}
    reconfig = {
        "t": "chainreconfig",
        "round": 1,
        "replica": 0,
        "generation": 1,
        "peers": ["x"],
        "steps": 0,
        "reason": "",
    }
    failure = {"t": "chainfailure", "round": 1, "replica": 0, "generation": 0, "peer": "x", "reason": ""}
    return [
        {"t": "attest", "round": 0, "digests": made_up},
        {"t": "attest", "round": 0, "digests": {"no shard": digest}},
        {"t": "attest", "round": most, "digests": {"embed": digest}},
        {**offer, "parts": [["embed", digest, 8, 1e200]]},
        {**offer, "parts": [["embed", digest, most, -1.0]]},
        {**offer, "tokens": most, "steps": most},
        *({**offer, "loss": loss} for loss in (1e308, -1e308, float("inf"), float("nan"), -1.0)),
        {**offer, "parts": [part] * 60_000},
        {**reconfig, "generation": most},
        {**reconfig, "reason": "r" * 1_000_000},
        {**reconfig, "peers": ["p" * 1000] * 60},
        {**failure, "reason": "r" * 1_000_000},
        {**failure, "generation": most, "replica": most},
        {"t": "withdraw", "round": 1, "reason": "r" * 1_000_000},
        {"t": "heartbeat", "phase": "p" * 100_000, "round": most, "step": most, "loss": 1e308},
        {"t": "logrequest", "after": most},
        {"t": "announced", "sealed": bytes(100_000)},
        {"t": "hello", "run": "r" * 10_000, "version": most},
        {"t": "commit"},
        {"t": 7},
    ]


REFUSED_AFTER = 8
"""Messages that make no sense; a peer that has sent this number is let in no more."""


def encoded(message: dict[str, Any]) -> bytes:
    """As bytes, though no honest encoder makes them."""
    return bytes(msgpack.packb(message, use_bin_type=True))


async def test_messages_that_cannot_be_end_their_session_and_nothing_else(tmp_path: Path) -> None:
    async with Ground(tmp_path) as ground:
        await ground.join("a", "b")
        told, enemies = len(ground.events), list[str]()
        for number, message in enumerate(overflowing()):
            if number % REFUSED_AFTER == 0:
                enemy = await ground.enemy(f"enemy {number}")
                enemies.append(enemy.id)
            session = await enemy.session()
            with contextlib.suppress(RemoteError):
                await session.send(encoded(message))
                while True:  # what the node says meanwhile, and the end
                    await session.recv(timeout=5.0)
        attested = [e for e in ground.events[told:] if e.kind == "attest" and e.fields["peer"] in enemies]
        assert attested == [], "what is no shard of the model is not even told"
        await ground.goes_on()
        assert max(len(raw) for raw in ground.archive.records) < 20_000, "nothing of it is in the log"


@pytest.mark.parametrize(
    "said",
    [
        {"memory_bytes": 2**64 - 1},
        {"memory_bytes": -1, "up_bps": -5, "down_bps": -5},
        {"up_bps": 2**64 - 1, "speed_flops": 2**64 - 1},
        {"coordinates": [1e308, -1e308, 1e308]},
        {"apart": ["x" * 64] * 17},
        {"loss": 1e308, "round": 2**64 - 1, "step": 2**64 - 1},
        {"device": "d" * 2000, "phase": "p" * 1000},
        {"serial": 2**64 - 1},
        {"chain": [2.0**32] * 6 + [2**64 - 1] * 4 + [[1e308] * 5]},
        {"addresses": ["/ip4/1.2.3.4/tcp/1/p2p/" + "x" * 600]},
    ],
)
def test_announcements_that_cannot_be_are_not_believed(said: dict[str, Any]) -> None:
    """Neither the node nor readers of the DHT and monitors read them with one decoder."""
    me = identity("enemy")
    good = packed(Announcement(run="r" * 64, peer=me.peer_id, serial=1))
    for change, believed in (({}, True), (said, False)):
        body = encoded({"t": "announcement", **good, **change})
        raw = framing.pack_message({"p": me.peer_id, "b": body, "s": me.sign(encoding.DOMAIN + body)})
        assert (encoding.unseal_announcement(raw, me.peer_id, "r" * 64) is not None) == believed


async def test_whoever_announces_the_most_that_there_is_can_be_planned_with(tmp_path: Path) -> None:
    """At the bounds of every field no plan fails."""

    async with Ground(tmp_path) as ground:
        await ground.join("a")
        enemy = await ground.enemy()
        largest = {"memory_bytes": 2**50, "up_bps": 10**13, "down_bps": 10**13, "speed_flops": 10**18}
        smallest = {"memory_bytes": 0, "up_bps": 0, "down_bps": 0, "speed_flops": 0}
        session = await enemy.session(**largest)
        await ground.until(lambda: enemy.id in ground.leader.ready)
        await enemy.say(session, Announced(sealed=enemy.sealed(**smallest, serial=2**53, coordinates=(1e4,) * 3)))
        await ground.until(lambda: not ground.leader.ready[enemy.id].memory_bytes)
        await ground.goes_on()


ANYTHING = [
    KeyError("x"),
    ValueError("x"),
    RecursionError(),
    MemoryError(),
    OverflowError(),
    AssertionError(),
    StopAsyncIteration(),
    ExceptionGroup("several", [KeyError("x"), TypeError()]),
    OSError(24, "too many open files"),
    RemoteError("p", "x"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"),
]


@pytest.mark.parametrize("error", ANYTHING, ids=lambda error: type(error).__name__)
async def test_whatever_a_handler_raises_ends_its_stream_and_nothing_else(error: Exception) -> None:
    network = MemoryNetwork()
    victim, enemy, other = (network.transport(name) for name in ("victim", "enemy", "other"))

    async def raises(stream: Stream) -> None:
        await stream.recv()
        raise error

    async def answers(remote: str, request: bytes) -> bytes:
        if request:
            raise error
        return b"well"

    await victim.serve("stream", raises)
    await serve_calls(victim, "call", answers)
    open_stream = await other.open("victim", "stream", timeout=5)
    for _ in range(3):
        stream = await enemy.open("victim", "stream", timeout=5)
        await stream.send(b"x")
        with pytest.raises(Closed):
            await stream.recv()
        with pytest.raises(RemoteError):
            await call(enemy, "victim", "call", b"x", timeout=5)
    assert await call(other, "victim", "call", b"", timeout=5) == b"well"
    assert await call(enemy, "victim", "call", b"", timeout=5) == b"well", "seldom is no offence"
    await open_stream.close()
    for transport in (victim, enemy, other):
        await transport.aclose()


async def test_whoever_goes_on_provoking_a_handler_is_refused() -> None:
    network = MemoryNetwork()
    victim, enemy, other = (network.transport(name) for name in ("victim", "enemy", "other"))
    told: list[Any] = []
    victim.guests.follow(told.append)

    async def answers(remote: str, request: bytes) -> bytes:
        return bytes(10 // len(request))

    await serve_calls(victim, "call", answers)
    for _ in range(100):
        with contextlib.suppress(RemoteError):
            await call(enemy, "victim", "call", b"", timeout=5)
    assert [(one.peer, "cannot bear" in one.reason) for one in told] == [("enemy", True)]
    with pytest.raises(RemoteError):
        await call(enemy, "victim", "call", b"xx", timeout=5)
    assert await call(other, "victim", "call", b"xx", timeout=5) == bytes(5)
    for transport in (victim, enemy, other):
        await transport.aclose()


async def test_a_planner_that_cannot_bear_what_is_announced_ends_no_node() -> None:
    answered: asyncio.Queue[Planned] = asyncio.Queue()

    def fails(question: Any) -> Planned:
        raise ZeroDivisionError

    planning = LatestJob[Any, Planned](
        "planner", fails, answered.put_nowait, retry_seconds=0.0, failed=lambda question: Planned(question, None)
    )
    running = asyncio.create_task(planning.run())
    question: Any = object()
    planning.ask(question)
    planned = await answered.get()
    assert (planned.question, planned.plan) == (question, None)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_what_may_be_told_of_a_loss_is_always_a_loss() -> None:
    for loss in (float("nan"), float("inf"), float("-inf"), 1e308, -1e308, -1.0, 0.0, 3.5, None):
        told = bounds.reportable_loss(loss)
        assert told is None or 0.0 <= told <= bounds.MAX_LOSS
    assert layout.MAX_LAYERS + 3 == bounds.MAX_SHARDS, "embed, head and anchor"
