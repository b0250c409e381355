"""From whom a peer gets text: the run's bootstrap nodes, peers that these name, mirrors; and who is not asked for a while."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from peer.net.base import now
from peer.net.blobs.holders import Absent, Corrupt, Holders
from peer.net.cooldown import Cooldown
from protocol.errors import RemoteError

REST_SECONDS = (2.0, 30.0)
"""How long whoever failed is not asked: at first, and at most; twice as long each time."""


class Busy(RemoteError):
    """It asks to be left alone for so many `seconds`."""

    def __init__(self, peer: str, message: str, seconds: float) -> None:
        super().__init__(peer, message)
        self.seconds = seconds


class Origins(Holders):
    """Everybody who is asked for text. `nodes()`, the run's nodes now, are asked for a chunk in an order that is the same for all peers, so
    that these hear of each other; then the mirrors. `warn` hears once of each of these that fails, and of everybody who lies."""

    def __init__(self, nodes: Callable[[], Iterable[str]], mirrors: Sequence[str], warn: Callable[[str], None]) -> None:
        super().__init__(lambda line: warn(f"text: {line}"))
        self._nodes = nodes
        self._mirrors = tuple(mirrors)
        self._rests = Cooldown(*REST_SECONDS)

    def of(self, chunk: str) -> list[str]:
        """Whom to ask for a chunk, one after the other: those that do not rest."""
        nodes = sorted(self._nodes(), key=lambda node: hashlib.sha256(f"{chunk} {node}".encode()).digest())
        return [origin for origin in (*nodes, *self._mirrors) if not self.is_avoided(origin)]

    def order(self, holders: Sequence[str], size: int) -> deque[str]:
        """As they are given, those that did not answer lately behind the others."""
        return deque(sorted(dict.fromkeys(holders), key=self.is_last))

    def is_avoided(self, peer: str) -> bool:
        return super().is_avoided(peer) or self._rests.is_resting(peer, now())

    def gave(self, peer: str) -> None:
        super().gave(peer)
        self._rests.end(peer)

    def failed(self, peer: str, error: RemoteError) -> None:
        """What was asked of it at the same time fails, too: that counts once."""
        super().failed(peer, error)
        is_known = peer in self._mirrors or peer in self._nodes()
        if isinstance(error, Absent) and not is_known:
            return
        if is_known and not self._rests.times(peer) and not isinstance(error, Absent | Corrupt):
            self._warn(f"{error}; others are asked")
        if not self._rests.is_resting(peer, now()) or isinstance(error, Busy):
            self._rests.begin(peer, now(), error.seconds if isinstance(error, Busy) else 0.0)
