"""Dishonest operators: real nodes of a run, of which one lies."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bootstrap.archive import Archive
from bootstrap.node import BootstrapNode
from peer import events
from peer.events import Emitter, Event
from protocol.identity import Identity
from protocol.ledger import rules, run_state
from tests.hostile.ground import Ground, manifest
from tests.support import tiny, volunteers
from tests.support.lying_nodes import LyingNode

pytestmark = pytest.mark.slow
Make = Callable[..., BootstrapNode]


class Operators(Ground):
    """Use as `async with`: one node of each operator; the one with the number `liar` is made by `make`. What the first
    honest one holds and tells is the archive and the events of the ground."""

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
        machine = self.machines[name] = make(who, transport, archive, emit, addresses)
        self.tasks.append(asyncio.create_task(machine.serve()))

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

    def of_kind(self, kind: type) -> list[Any]:
        """What honest nodes told of this kind."""
        return [e.body for name in self.honest for e in self.told[name] if isinstance(e.body, kind)]


@pytest.mark.parametrize("liar", [0, 3])
async def test_one_lying_node_of_four_can_neither_fork_nor_have_an_unfair_commit_decided_nor_stop_the_run(
    liar: int, tmp_path: Path
) -> None:
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
        for name in ground.honest:
            lease = ground.manifest.timing.gone_after
            decided = [e.time for e in ground.told[name] if isinstance(e.body, events.Commit)]
            gaps = [after - before for before, after in itertools.pairwise(decided)]
            assert max(gaps) < 2 * lease + 10 * statistics.median(gaps), "no round waits for more than two leases"
            waits = [e.body.text for e in ground.told[name] if isinstance(e.body, events.Warning)]
            skipped = Counter(re.findall(r"round \d+", text)[0] for text in waits if "does not decide" in text)
            assert all(count <= 2 for count in skipped.values()), "each costs a lease"
