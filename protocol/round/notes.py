"""What a node has found in the payloads of the open round, and of the round before: so that each is decoded when it comes, and not while
a round waits for a verdict. An auditor of a log notes the same. Pure.

In memory, about two bytes for each entry (an update of 178 M parameters with 32 of 4,096 kept: 2.8 MB), and LIMIT bytes in all. Nobody
takes another's place: of each peer at most two payloads of a shard are noted, the newest one and that of the round before, or the two
newest; and where there is no room, nothing that is noted goes. What is not noted is decoded anew by whoever needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from protocol.wire.commit import Part

if TYPE_CHECKING:
    from protocol.round.comparing import Examined

LIMIT = 256 << 20
"""Bytes; two rounds of 47 replicas with 178 M parameters."""
OF_ONE = 2
"""Payloads of one peer and shard."""


class Notes:
    """`limit`: bytes. `lock`: is held whenever something changes, where several threads use it."""

    def __init__(self, limit: int = LIMIT, lock: AbstractContextManager[object] | None = None) -> None:
        self.used = 0
        """Bytes."""
        self._limit = limit
        self._found: dict[tuple[str, str], Examined] = {}  # by shard and digest
        self._sent: dict[tuple[str, str], list[str]] = {}  # sender and shard -> digests, the newest last
        self._committed: Set[str] = frozenset()
        self._lock = lock or nullcontext()

    def known(self, sender: str, part: Part, find: Callable[[], Examined]) -> Examined:
        """What is in a part: as it is noted, or else as `find` finds it. Raises what that raises."""
        noted = self._found.get((part.shard, part.digest))
        if noted is not None:
            return noted
        found = find()
        self.keep(sender, part, found)
        return found

    def keep(self, sender: str, part: Part, found: Examined) -> None:
        """Notes what was found, if there is room."""
        key = part.shard, part.digest
        with self._lock:
            if key in self._found:
                return
            sent = self._sent.setdefault((sender, part.shard), [])
            if len(sent) == OF_ONE:
                old = next((digest for digest in sent if digest not in self._committed), sent[0])
                sent.remove(old)
                self.used -= self._found.pop((part.shard, old)).bytes
            if self.used + found.bytes <= self._limit:
                self._found[key] = found
                self.used += found.bytes
                sent.append(part.digest)

    def settle(self, committed: Set[str]) -> None:
        """A round is decided: of what is noted only what it names is needed."""
        with self._lock:
            self._committed = committed
            self._found = {key: found for key, found in self._found.items() if key[1] in committed}
            self._sent = {
                who: left for who, sent in self._sent.items() if (left := [name for name in sent if name in committed])
            }
            self.used = sum(found.bytes for found in self._found.values())
