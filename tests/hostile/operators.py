"""A run of several operators, one of whose nodes is dishonest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bootstrap.archive import Archive
from bootstrap.node import BootstrapNode
from peer.events import Emitter, Event
from protocol.identity import Identity
from tests.hostile.ground import Ground, manifest
from tests.support import tiny, volunteers

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
