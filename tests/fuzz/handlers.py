"""Messages of valid form and hostile content through the real handlers of a node and a peer: `python -m
tests.fuzz.handlers --messages 10000000`.

A bootstrap node and two peers run rounds all the time, in one process, over a network in memory; enemies open streams
under every name that is served, and say what tests/fuzz/messages.py makes, with what is true of the run mixed in, so
that it gets past the first checks. No process may end, no handler may raise what is not expected of it, rounds go on,
and memory stays within its bound.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import resource
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from peer.net import directory
from peer.net.base import Stream
from peer.net.memory import MemoryTransport
from protocol.codec import blob_hash
from protocol.errors import RemoteError
from protocol.identity import Identity
from protocol.run import layout
from protocol.wire import bounds, encoding, endpoints
from protocol.wire.announcement import REACHABLE, VERSION, Announcement, DialMe, Lookup, RosterRequest
from protocol.wire.calls import Handover, MomentsRequest, PipeHello
from protocol.wire.commit import DOMAIN, Record
from protocol.wire.decree import Joined
from protocol.wire.schema import Digest, SchemaError, build
from protocol.wire.session import Hello, LogRequest
from tests.fuzz.messages import Maker
from tests.support import tiny, volunteers

ANSWER_SECONDS = 0.005
"""That an enemy waits for an answer, of which it needs none."""
OF_AN_ENEMY = 200
"""Messages, before another one comes in its place: who is refused could say nothing more."""
LAST, ALIKE = 64, 0.8
"""Messages of each type that are remembered, and how many of all are made from one of them."""
OF_A_SWARM = 100_000
"""Messages until a long campaign begins another swarm: with a long log each message takes longer."""
MEMORY_MIB = 300
"""By which all may grow."""
QUORUM = Identity(b"quorum enemy".ljust(32))
"""An operator who has no vote, and an enemy."""


class Raised(logging.Handler):
    """Hears of handlers that raised unexpected errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        at = error.__traceback__ if error is not None else None
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        where = f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}" if at is not None else ""
        self.found[f"{record.getMessage()[:60]}: {error!r:.200} {where}"] += 1


@dataclass
class State:
    """What was done."""

    messages: int = 0
    rounds: int = 0
    by_name: Counter[str] = field(default_factory=Counter)
    raised: Counter[str] = field(default_factory=Counter)
    grown_mib: float = 0.0


class Enemies:
    """Some of those of one swarm, one after the other. `first`: their numbers follow it."""

    def __init__(self, swarm: volunteers.Swarm, seed: int, first: int, state: State) -> None:
        self.swarm = swarm
        self.rng = random.Random(seed)
        self.state = state
        self.manifest = swarm.manifest
        self._number = first
        run_id = self.manifest.run_id
        known = {
            bounds.PeerId: lambda rng: rng.choice(self._peers()),
            bounds.RunId: lambda rng: rng.choice((run_id, rng.randbytes(32).hex(), self._blob(rng))),
            bounds.Shard: lambda rng: rng.choice(layout.shard_names(self.manifest.model)),
            bounds.Round: lambda rng: max(0, self.swarm.head + rng.randrange(-1, 3)),
            bounds.Since: lambda rng: rng.randrange(-1, self.swarm.head + 2),
            bounds.Count: lambda rng: rng.choice((0, 1, 2, 8, VERSION, rng.randrange(100))),
            bounds.Block: lambda rng: rng.randrange(self.manifest.model.n_layers + 1),
            bounds.Word: lambda rng: rng.choice(REACHABLE),
            bounds.Address: lambda rng: f"/memory/p2p/{rng.choice(self._peers())}",
            Digest: lambda rng: bytes.fromhex(self._blob(rng)),
        }
        self._last: dict[type, deque[dict[str, Any]]] = {}
        self.maker = Maker(self.rng, known)
        self.honest = Maker(self.rng, known, odd=0.02)

    def _peers(self) -> list[str]:
        return [*self.manifest.operators, *(v.id for v in self.swarm.peers.values()), QUORUM.peer_id, "somebody"]

    def _blob(self, rng: random.Random) -> str:
        held = list(self.swarm.archive.blobs)
        return rng.choice(held) if held and rng.random() < 0.5 else blob_hash.name_of(rng.randbytes(4))

    def map(self, cls: type) -> dict[str, Any]:
        """A message's fields, as plain data; most are valid, and like those of one of the last messages."""
        last = self._last.setdefault(cls, deque(maxlen=LAST))
        for _ in range(8):
            maker = self.honest if self.rng.random() < 0.7 else self.maker
            like = self.rng.choice(last) if len(last) == LAST and self.rng.random() < ALIKE else None
            made: dict[str, Any] = maker.make(cls) if like is None else maker.another(cls, like)
            with contextlib.suppress(SchemaError):
                build(cls, made, ignore_unknown=True)
                last.append(made)
                break
        return dict(made)

    def message(self, cls: type) -> bytes:
        return _packed({"t": cls.__name__.lower(), **self.map(cls)})

    def announced(self, who: Identity) -> bytes:
        body = _packed(
            {"t": "announcement", **self.map(Announcement), "peer": who.peer_id, "run": self.manifest.run_id}
        )
        envelope = {"p": who.peer_id, "b": body, "s": who.sign(DOMAIN + body)}
        return _packed({"t": "announced", "sealed": _packed(envelope)})

    def record(self) -> bytes:
        made = self.map(Record)
        return _packed({"c": made["commit"], "n": made["ballot"], "v": made["votes"]})

    # --- what is said under each name

    def said(self, name: str, who: Identity) -> list[bytes]:
        """What an enemy says on one stream, the first of it in order where all else depends on it."""
        rng, types_ = self.rng, list(encoding.TYPES.values())
        several = range(rng.randrange(1, 12))
        match name:
            case endpoints.SESSION:
                joining = build(Joined, self.map(Joined)) if rng.random() < 0.3 else None
                hello = encoding.encode(Hello(run=self.manifest.run_id, version=VERSION, joining=joining))
                begun = [hello, self.announced(who)]
                return begun + [
                    self.announced(who) if rng.random() < 0.1 else self.message(rng.choice(types_)) for _ in several
                ]
            case endpoints.QUORUM:
                return [self.record() if rng.random() < 0.2 else self.message(rng.choice(types_)) for _ in several]
            case endpoints.LOG:
                return [self.message(LogRequest)]
            case endpoints.ROSTER:
                return [self.message(rng.choice((Lookup, RosterRequest)))]
            case endpoints.DIAL_BACK:
                return [self.message(DialMe)]
            case endpoints.MOMENTS:
                return [_packed(self.map(MomentsRequest))]
            case endpoints.HANDOVER:
                return [_packed(self.map(Handover))]
            case endpoints.PIPE:
                return [_packed(self.map(PipeHello)), *(rng.randbytes(rng.randrange(200)) for _ in several)]
            case endpoints.BLOB:
                return [self._blob_request() for _ in several]
            case endpoints.BANDWIDTH:
                return [rng.randrange(2**17).to_bytes(4, "big") + bytes(rng.randrange(2000)) for _ in several]
            case endpoints.RELAY:
                return [_packed({"to": rng.choice(self._peers())}), *(rng.randbytes(50) for _ in several)]
        return [rng.randbytes(rng.randrange(40)) for _ in several]

    def _blob_request(self) -> bytes:
        rng, name = self.rng, self._blob(self.rng)
        known = self.swarm.archive.blobs.find(name)
        size: Any = (
            known.size if known is not None and rng.random() < 0.8 else rng.choice((0, -1, 7, 2**40, 2**63, "x"))
        )
        asked: dict[str, Any] = {"blob": name, "size": size, "named_by": rng.choice(("", "x", 7, [], {}))}
        asked |= {flag: rng.choice((True, False, 1, None)) for flag in ("leaves", "whole", "insist")}
        if rng.random() < 0.2:
            places = ([], [name, 7, 0], [name, 2**40, -1], [name, 2**63, 0], [name, 7, "x"], ["x", 7, 0], None, 7)
            asked["in"] = rng.choice(places)
        if rng.random() < 0.1:
            asked = {"named": rng.choice(("manifest", "tokenizer", "corpus", "x" * 500, 7, None))}
        if rng.random() < 0.3:
            asked = {"range": rng.choice((0, 1, -1, 2**63, "x", None))}
        return _packed(asked)

    async def go_on(self, goes_on: Callable[[], bool]) -> None:
        """One enemy after the other, while `goes_on()`."""
        while goes_on():
            self._number += 1
            operator = self._number % 5 == 0 and QUORUM.peer_id not in self._there()
            who = QUORUM if operator else Identity(self._number.to_bytes(32, "big"))
            transport = self.swarm.network.transport(who.peer_id, directory.valid_record(self.manifest.run_id))
            assert isinstance(transport, MemoryTransport)
            await self._one(transport, who, self.state.messages + OF_AN_ENEMY, goes_on)
            await transport.aclose()

    def _there(self) -> dict[str, Any]:
        return vars(self.swarm.network).get("peers", {})

    async def _one(self, transport: MemoryTransport, who: Identity, until: int, goes_on: Callable[[], bool]) -> None:
        served = [name for name in vars(endpoints).values() if isinstance(name, str) and name.startswith("potluck/")]
        while self.state.messages < until and goes_on():
            target = self.rng.choice((self.swarm.boot.peer_id, *(v.id for v in self.swarm.peers.values())))
            name = self.rng.choice((*served, endpoints.SESSION, endpoints.SESSION, endpoints.BLOB))
            if who is QUORUM:
                target, name = self.swarm.boot.peer_id, endpoints.QUORUM
            with contextlib.suppress(RemoteError):
                stream = await transport.open(target, name, timeout=5)
                await self._say(stream, self.said(name, who))

    async def _say(self, stream: Stream, said: list[bytes]) -> None:
        try:
            for raw in said:
                self.state.messages += 1
                self.state.by_name[stream.name] += 1
                await stream.send(raw, timeout=5)
                if self.rng.random() < 0.3:
                    with contextlib.suppress(RemoteError):
                        await stream.recv(timeout=ANSWER_SECONDS)
            if self.rng.random() < 0.05:  # then it is closed slowly
                await stream.finish()
        finally:
            await stream.close()


def _packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value, use_bin_type=True))


async def campaign(folder: Path, seed: int, goes_on: Callable[[State], bool], enemies: int = 4) -> State:
    """Has several enemies at once say things while `goes_on(state)`; then sees that all is well."""
    made = volunteers.manifest(
        rounds=1_000_000, start_peers=2, operators=(tiny.OPERATOR.peer_id, QUORUM.peer_id), quorum=1
    )
    raised, log = Raised(), logging.getLogger("potluck")
    log.addHandler(raised)
    try:
        async with volunteers.Swarm(folder, made) as swarm:
            swarm.relay_bps = 10**8

            async def hold(peer: str, round: int) -> None:
                await asyncio.sleep(0.2)  # what training takes

            swarm.hold = hold
            for name in ("a", "b"):
                swarm.start(name)
            await swarm.until(lambda: swarm.head >= 2)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            state, head = State(), swarm.head
            all_of_them = [Enemies(swarm, 1000 * seed + i, 10_000_000 * (i + 1), state) for i in range(enemies)]
            await asyncio.gather(*(one.go_on(lambda: goes_on(state)) for one in all_of_them))
            for task in (swarm.node, *(v.task for v in swarm.peers.values())):
                assert not task.done(), f"somebody ended: {task!r}"
            state.rounds = swarm.head - head
            await swarm.until(lambda: swarm.head > head + state.rounds + 1)
            state.grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            state.raised = raised.found
            return state
    finally:
        log.removeHandler(raised)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    logging.getLogger("potluck").propagate = False
    began, total, most = time.monotonic(), State(), 0.0
    while total.messages < chosen.messages and not total.raised:
        count, seed = min(OF_A_SWARM, chosen.messages - total.messages), chosen.seed + total.messages
        with tempfile.TemporaryDirectory() as folder:
            state = asyncio.run(campaign(Path(folder), seed, lambda state, count=count: state.messages < count))
        total.messages += state.messages
        total.rounds += state.rounds
        total.by_name += state.by_name
        total.raised += state.raised
        most = max(most, state.grown_mib)
        print(f"{total.messages:,} messages, {time.monotonic() - began:.0f} s, {state.grown_mib:.0f} MiB", flush=True)
    result = {
        "messages": total.messages,
        "seconds": round(time.monotonic() - began),
        "rounds": total.rounds,
        "by_name": dict(total.by_name),
        "raised": dict(total.raised),
        "grown_mib": round(most, 1),
    }
    print(json.dumps(result, indent=1))
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(1 if total.raised or most > MEMORY_MIB else 0)


if __name__ == "__main__":
    main()
