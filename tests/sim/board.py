"""The operators of a simulated run change by decree, as docs/guides/operator.md says: some are appointed, more or fewer
decide, and one is dismissed. Each operator types at its own node, when it is there, until the log has it.

The promises hold while at most f of 3f + 1 members lie. Any operator may be a member, so at most f operators may lie; a
smaller f comes after dismissals.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from protocol.errors import RemoteError
from protocol.identity import Identity
from protocol.run.manifest import QUORUMS
from protocol.wire import encoding
from protocol.wire.commit import liars_borne
from protocol.wire.decree import APPOINT, DISMISS, QUORUM, Board, Decree, Motion, Motions, Operator
from protocol.wire.encoding import seal
from tests.sim.world import Process, Violation

if TYPE_CHECKING:
    from tests.sim.swarm import Swarm

PATIENCE = 5.0
"""Seconds that a command waits for its node; that may have died."""


def newcomers(seed: int) -> tuple[Identity, ...]:
    """The peers that become operators in the run of a seed: in most seeds there are some."""
    rng = random.Random(f"newcomers {seed}")
    count = rng.choice((0, 1, 3))
    return tuple(Identity(rng.randbytes(32)) for _ in range(count))


class BoardChanges:
    """Of one run. `lying`: the dishonest operators, as many as the first quorum bears."""

    def __init__(self, swarm: Swarm, rng: random.Random, fresh: Sequence[Identity], lying: Collection[str]) -> None:
        self._swarm = swarm
        self._rng = rng
        self._fresh = tuple(fresh)
        self._lying = frozenset(lying)

    def left(self, process: Process) -> None:
        """A node has ended by itself: it was dismissed."""
        self._swarm.world.stats["dismissed"] += 1
        if process.name in self._board.names:
            raise Violation("P4", f"{process.name[-8:]} ends, and operates the run")

    @property
    def _board(self) -> Board:
        log, manifest = self._swarm.ledger.log, self._swarm.manifest
        first = Board(operators=tuple(Operator(peer=peer) for peer in manifest.operators), quorum=manifest.quorum)
        return log[-1].board or first if log else first

    @property
    def _members(self) -> tuple[str, ...]:
        log = self._swarm.ledger.log
        return log[-1].members if log else self._swarm.manifest.first_members

    async def run(self) -> None:
        """Until all is changed."""
        rng = self._rng
        if not self._fresh:
            return
        await asyncio.sleep(rng.uniform(1.0, 30.0))
        named = tuple(Operator(peer=who.peer_id, places=("/memory",)) for who in self._fresh)
        await self.decree(APPOINT, operators=named)
        await asyncio.sleep(rng.uniform(0.0, 10.0))
        left = len(self._board.operators)
        sizes = [n for n in QUORUMS if n <= left and n != self._board.quorum and (n > 1 or not self._lying)]
        if sizes and rng.random() < 0.8:
            await self._resize(rng.choice(sizes))
        await asyncio.sleep(rng.uniform(0.0, 10.0))
        if len(self._board.operators) > self._board.quorum and rng.random() < 0.8:
            await self.decree(DISMISS, subject=rng.choice(self._board.names))

    async def _resize(self, quorum: int) -> None:
        """Changes how many decide. Before, dismisses dishonest operators until no more are left than the new size
        bears."""
        lying = [name for name in self._board.names if name in self._lying]
        for name in lying[liars_borne(quorum) :]:
            await self.decree(DISMISS, subject=name)
        await self.decree(QUORUM, quorum=quorum)

    async def decree(
        self, action: str, subject: str = "", operators: tuple[Operator, ...] = (), quorum: int | None = None
    ) -> None:
        """Has it signed by the operators, until the log has it."""
        world = self._swarm.world

        def is_done() -> bool:
            now = self._board
            return {
                APPOINT: {o.peer for o in operators} <= set(now.names),
                DISMISS: subject not in now.names,
                QUORUM: now.quorum == quorum,
            }[action]

        while not is_done() and not self._swarm.world.over.done():
            for name in self._members:
                process = world.processes[name]
                now = await self._ask(process, Motion())
                if now is not None and not is_done():
                    decree = Decree(
                        run=self._swarm.manifest.run_id,
                        number=now.number,
                        action=action,
                        subject=subject,
                        operators=operators,
                        quorum=quorum,
                    )
                    await self._ask(process, Motion(sealed=seal(process.identity, decree)))
            await asyncio.sleep(1.0)
        world.trace("world", f"{action} is in the log")
        world.stats[f"decreed: {action}"] += 1

    async def _ask(self, process: Process, motion: Motion) -> Motions | None:
        """The answer of an operator's own node; None where it is not there, or refuses."""
        if not process.alive or process.running is None:
            return None
        try:
            async with asyncio.timeout(PATIENCE):
                raw = await process.running.decrees.answer(process.name, encoding.encode(motion))
        except RemoteError as error:
            self._swarm.world.stats["decrees refused"] += 1
            self._swarm.world.trace(process.name, f"refuses: {error}")
            return None
        except TimeoutError:
            return None
        return encoding.expect(Motions, encoding.decode(raw, process.name), process.name)
