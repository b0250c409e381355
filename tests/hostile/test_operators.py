"""Dishonest operators: real nodes of a run, of which one lies."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bootstrap.archive import Archive
from bootstrap.node import BootstrapNode
from bootstrap.service import serve_bootstrap
from peer import events
from peer.events import Emitter, Event
from peer.log.replay import replay
from peer.node.open_run import KEY
from protocol.identity import Identity
from protocol.ledger import rules, run_state
from protocol.run.manifest import TimingSpec
from protocol.wire import encoding
from protocol.wire.commit import voted_twice
from tests import tiny, volunteers
from tests.hostile.ground import SOON, Ground, manifest, run
from tests.lying_nodes import DoubleVoter, LyingNode
from tests.support import potluck

pytestmark = pytest.mark.slow
PATIENT = TimingSpec(round_deadline=30.0, round_seconds=1.0, heartbeat=2.0, gone_after=10.0)
"""Nobody applies either of two commits as long as honest nodes hear each other within two heartbeats (protocol/ledger/confirming.py), and here all
nodes and peers are one process."""
Make = Callable[..., BootstrapNode]


class Operators(Ground):
    """Use as `async with`: one node of each operator; the one with the number `liar` is made by `make`. What the first honest one holds
    and tells is the archive and the events of the ground."""

    def __init__(self, folder: Path, quorum: int, liar: int, make: Make, **changes: Any) -> None:
        names = tuple(o.peer_id for o in tiny.OPERATORS[:quorum])
        super().__init__(folder, manifest(operators=names, quorum=quorum, **changes))
        self.liar, self._make = tiny.OPERATORS[liar].peer_id, make
        self.archives: dict[str, Archive] = {}
        self.machines: dict[str, BootstrapNode] = {}
        self.told: dict[str, list[Event]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Operators:
        self._sockets.mkdir()
        everybody = tiny.OPERATORS[: self.manifest.quorum]
        await asyncio.gather(*(self.listen(who) for who in everybody))
        addresses = [a for transport in self.daemons.started.values() for a in transport.addresses]
        for who in everybody:
            self._begin(who, addresses)
        first = next(who.peer_id for who in everybody if who.peer_id != self.liar)
        self.archive, self.machine, self.events = self.archives[first], self.machines[first], self.told[first]
        self.boot = self.daemons.started[first]
        self.node = self.tasks[[who.peer_id for who in everybody].index(first)]
        return self

    def _begin(self, who: Identity, addresses: list[str]) -> None:
        name, transport = who.peer_id, self.daemons.started[who.peer_id]
        archive = self.archives[name] = Archive(self.folder / f"node-{name}", self.manifest, self.disk)
        archive.save_tokenizer(volunteers.TOKENIZER)
        self.told[name] = []
        emit = Emitter("bootstrap", self._hear(self.told[name]))
        make: Any = self._make if name == self.liar else BootstrapNode
        machine = self.machines[name] = make(self.manifest, who, transport, archive, emit, addresses)
        self.tasks.append(asyncio.create_task(serve_bootstrap(machine, transport, emit, 0)))

    async def __aexit__(self, *error: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await super().__aexit__(*error)
        for archive in self.archives.values():
            if archive is not self.archive:
                archive.close()

    @property
    def honest(self) -> list[str]:
        return [name for name in self.archives if name != self.liar]

    async def happens(self, wanted: Callable[[], bool]) -> None:
        """Waits for something to be told; who has ended may have."""
        while not wanted():
            self._happened.clear()
            await self._happened.wait()

    async def same_bits(self, peers: list[volunteers.Volunteer]) -> None:
        """All hold what the log gives, after a round that all have applied."""
        attested: dict[str, dict[int, dict[str, str]]] = {peer.id: {} for peer in peers}
        last = self.head
        await self.until(lambda: all(peer.rounds.member.applied > last for peer in peers))
        commits, blobs = self.archive.commits[: last + 2], self.archive.blobs
        states = {state.round: state.digests for state in replay(self.manifest, commits, blobs.get)}
        for event in (e for told in self.told.values() for e in told if isinstance(e.body, events.Attest)):
            if event.body.peer in attested and event.body.round in states:
                attested[event.body.peer][event.body.round] = dict(event.body.digests)
        for peer in peers:
            assert max(attested[peer.id]) >= last
            for round, digests in attested[peer.id].items():
                assert digests == {shard: states[round][shard] for shard in digests}

    async def restart(self, name: str) -> None:
        """Starts an operator's node again, with the code that honest ones have, in its folder; it is told that it is out, and ends."""
        everybody = [who.peer_id for who in tiny.OPERATORS[: self.manifest.quorum]]
        index = everybody.index(name)
        self.tasks[index].cancel()
        await asyncio.gather(self.tasks[index], return_exceptions=True)
        self.archives[name].close()
        self._make = BootstrapNode
        self._begin(tiny.OPERATORS[index], [a for t in self.daemons.started.values() for a in t.addresses])
        ended = self.tasks.pop()
        self.tasks[index] = ended
        await asyncio.wait({ended})
        assert "took this one out" in repr(ended.exception())

    def of_kind(self, kind: type) -> list[Any]:
        """What honest nodes told of this kind."""
        return [e.body for name in self.honest for e in self.told[name] if isinstance(e.body, kind)]


@pytest.mark.parametrize("liar", [0, 3])
def test_one_lying_node_of_four_can_neither_fork_nor_have_an_unfair_commit_decided_nor_stop_the_run(
    liar: int, tmp_path: Path
) -> None:
    async def work() -> None:
        def make(*parts: Any) -> LyingNode:
            return LyingNode(*parts, rng=random.Random(liar))

        async with Operators(tmp_path, 4, liar, make) as ground:
            await ground.join("a", "b")
            await ground.goes_on(12)
            logs = [ground.archives[name].commits for name in ground.honest]
            longest = max(logs, key=len)
            for log in logs:
                assert [c.digest for c in log] == [c.digest for c in longest[: len(log)]]
            state = run_state.begin(ground.manifest)
            for commit in longest:
                assert list(rules.check(state, commit)) == []
                state = state.apply(commit)
            machine = ground.machines[ground.liar]
            assert isinstance(machine, LyingNode)
            assert machine.told.total() > 0
            accused = ground.of_kind(events.Unfair)
            assert {e.peer for e in accused} <= {ground.liar}
            assert ground.of_kind(events.Forked) == []
            for name in ground.honest:
                lease = ground.manifest.timing.gone_after
                decided = [e.time for e in ground.told[name] if isinstance(e.body, events.Commit)]
                gaps = [after - before for before, after in itertools.pairwise(decided)]
                assert max(gaps) < 2 * lease + 10 * statistics.median(gaps), "no round waits for more than two leases"
                waits = [e.body.text for e in ground.told[name] if isinstance(e.body, events.Warning)]
                skipped = Counter(re.findall(r"round \d+", text)[0] for text in waits if "does not decide" in text)
                assert all(count <= 2 for count in skipped.values()), "each costs a lease"

    run(work())


async def oust(ground: Operators, who: Identity) -> tuple[int, str, str]:
    """`potluck run oust`, as this operator types it on the machine of the own node; the exit code and what is read."""
    transport, folder = ground.daemons.started[who.peer_id], ground.folder / f"node-{who.peer_id}"
    keyfile = folder / KEY
    keyfile.write_bytes(who.libp2p_bytes())
    keyfile.chmod(0o600)
    address = f"{transport.addresses[0]}#{ground.manifest.run_id}"
    typed = ["run", "oust", address, ground.liar[-8:], "--reason", "voted twice", "--dir", str(folder)]
    done = await asyncio.to_thread(potluck.run, *typed, text=True, timeout=SOON)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("later", [False, True], ids=["one ballot", "two ballots"])
def test_one_of_three_that_votes_twice_is_named_and_taken_out_and_the_run_goes_on(later: bool, tmp_path: Path) -> None:
    """As docs/guides/operator.md says it, with every command as it is typed there."""

    async def work() -> None:
        def make(*parts: Any) -> DoubleVoter:
            return DoubleVoter(*parts, since=2, later=later)

        async with Operators(tmp_path, 3, 0, make, timing=PATIENT) as ground:
            peers = await ground.join("a", "b")
            everybody = [told for name, told in ground.told.items() if name != ground.liar] + [p.events for p in peers]

            def named() -> bool:
                return all(any(isinstance(e.body, events.Forked) for e in told) for told in everybody)

            await ground.until(named)
            for told in everybody:
                (forked,) = [e.body for e in told if isinstance(e.body, events.Forked)]
                assert forked.liars == (ground.liar,)
            round = forked.round
            one, other = (encoding.decode_record(ground.archives[name].records[-1], name) for name in ground.honest)
            assert (one.commit.round, other.commit.round) == (round, round)
            assert [proof.peer for proof in voted_twice(one, other)] == [ground.liar]
            assert replace(one.commit, time=0.0) == replace(other.commit, time=0.0)
            assert [peer.rounds.member.applied for peer in peers] == [round - 1] * 2, "nobody has applied either"
            assert ground.of_kind(events.Unfair) == [], "nobody honest is accused"

            honest = [who for who in tiny.OPERATORS[:3] if who.peer_id != ground.liar]
            for code, out, errors in await asyncio.gather(*(oust(ground, who) for who in honest)):
                assert code == 0, errors
                assert out.endswith("decided; it is in the log, and holds from the next round on\n")
                denied = ", and denied it when it promised another ballot" if later else ""
                assert (
                    f"of round {round}{denied}, both signatures are right; the others go on from round {round - 1}"
                    in out
                )
            await ground.goes_on(5)
            assert [peer.task.done() for peer in peers] == [False, False]
            await ground.same_bits(peers)
            logs = [ground.archives[name].commits for name in ground.honest]
            shared = min(map(len, logs))
            assert [c.digest for c in logs[0][:shared]] == [c.digest for c in logs[1][:shared]]
            assert logs[0][round].out == (ground.liar,)
            assert logs[0][round].members == tuple(ground.honest)
            assert logs[0][round].digest not in (one.commit.digest, other.commit.digest)
            for name in ground.honest:
                aside = ground.archives[name].folder / f"log.undone-{round:08d}"
                assert aside.read_bytes().endswith(encoding.encode_record(one if name == ground.honest[0] else other))
            assert all(sum(e.kind == "started" for e in peer.events) == 1 for peer in peers)
            await ground.restart(ground.liar)
            await ground.goes_on(2)

    run(work())
