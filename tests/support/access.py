"""Parts that unit tests of access share with others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from typing import Any

from bootstrap.calls import DecreeHandler
from protocol.errors import RemoteError
from protocol.round.leader import Leader
from protocol.round.leader_events import DecreeSigned
from protocol.run.manifest import Manifest
from protocol.wire import encoding
from protocol.wire.commit import DOMAIN
from protocol.wire.decree import Decree, Enacted, Motion
from protocol.wire.encoding import seal
from tests.support import tiny

ONE = tiny.manifest()


def decree(action: str, subject: str = "", *, number: int = 0, manifest: Manifest = ONE, **more: Any) -> Decree:
    return Decree(**{"run": manifest.run_id, "number": number, "action": action, "subject": subject, **more})


def signed(wish: Decree, *keys: Any) -> Enacted:
    body = DOMAIN + encoding.encode(wish)
    return Enacted(decree=wish, signatures={key.peer_id: key.sign(body) for key in keys})


class Desk:
    """A node's handler of decrees. `taken`: those that its leader got; `told`: lines for its operator."""

    def __init__(self, leader: Leader, alive: Callable[[], Set[str]] = frozenset) -> None:
        self.taken: list[DecreeSigned] = []
        self.told: list[str] = []
        self._leader = leader
        self.handler = DecreeHandler(leader, self._take, lambda motion: None, alive, self.told.append)

    async def _take(self, event: DecreeSigned) -> None:
        self.taken.append(event)
        self._leader.handle(event, 0.0)

    def hear(self, sealed: bytes) -> str | None:
        """Why a sealed decree is refused; None: it is not."""
        try:
            asyncio.run(self.handler.receive(Motion(sealed=sealed)))
        except RemoteError as error:
            return str(error)
        return None

    def refuses(self, wish: Decree, key: Any = tiny.OPERATOR) -> str | None:
        return self.hear(seal(key, wish))
