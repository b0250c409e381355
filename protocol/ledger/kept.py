"""The commits of a run of many rounds, in little memory: the newest as they are, older ones packed, or on disk.

A commit of two replicas takes some 10 KiB as objects, and a tenth of that packed. A run of rounds of a minute has 43,000 of them in a month.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, overload

from protocol.wire import framing
from protocol.wire.commit import Commit
from protocol.wire.schema import build, packed

NEWEST = 256
"""Items that are kept as they are: whatever looks at each round again and again looks at these."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Packed:
    """A commit as bytes."""

    round: int
    """Its round."""
    parent: str
    """The digest of the commit before it."""
    body: bytes
    """What `unpacked` makes the commit of."""
    payload_bytes: int
    """Of all payloads that it names."""


class Kept(Sequence[T]):
    """Items of which the newest are in memory; `older(index)` gives one that is not, whenever it is asked for. `most`: of those in memory."""

    def __init__(self, older: Callable[[int], T], most: int = NEWEST) -> None:
        self._older = older
        self._most = most
        self._newest: dict[int, T] = {}
        self._count = 0

    def append(self, item: T) -> None:
        """The next one."""
        self._newest[self._count] = item
        self._newest.pop(self._count - self._most, None)
        self._count += 1

    def append_older(self) -> None:
        """The next one, which `older` gives."""
        self._newest.pop(self._count - self._most, None)
        self._count += 1

    @property
    def old(self) -> int:
        """How many, from the first on, are not in memory."""
        return self._count - len(self._newest)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._at(each) for each in range(*index.indices(self._count))]
        found = index + self._count if index < 0 else index
        if not 0 <= found < self._count:
            raise IndexError(index)
        return self._at(found)

    def _at(self, index: int) -> T:
        found = self._newest.get(index)
        return self._older(index) if found is None else found


class Commits(Mapping[int, Commit]):
    """A peer's, by round, from round 0 on without a gap; `most`: that are kept as they are. Not safe to use from several threads."""

    def __init__(self, most: int = NEWEST) -> None:
        self._packed: list[bytes] = []
        self._bytes = [0]
        self._unpacked = functools.lru_cache(most)(lambda round: unpacked(self._packed[round]))
        self._kept = Kept(self._unpacked, most)

    def bytes_of(self, after: int, round: int) -> int:
        """Of all payloads that the commits after `after` name, as far as `round`."""
        return self._bytes[round + 1] - self._bytes[after + 1]

    def __setitem__(self, round: int, commit: Commit) -> None:
        """The next one. Raises KeyError for any other."""
        if round != len(self):
            raise KeyError(round)
        self._kept.append(commit)
        self._packed.append(framing.pack_message(packed(commit)))
        self._bytes.append(self._bytes[-1] + sum(share.size for share in commit.shares))

    def append(self, commit: Packed) -> None:
        """The next one, which is unpacked when somebody looks at it. Raises KeyError for any other."""
        if commit.round != len(self):
            raise KeyError(commit.round)
        self._kept.append_older()
        self._packed.append(commit.body)
        self._bytes.append(self._bytes[-1] + commit.payload_bytes)

    def __getitem__(self, round: int) -> Commit:
        if not 0 <= round < len(self):
            raise KeyError(round)
        return self._kept[round]

    def __contains__(self, round: object) -> bool:
        return isinstance(round, int) and 0 <= round < len(self)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __reversed__(self) -> Iterator[int]:
        return reversed(range(len(self)))

    def __len__(self) -> int:
        return len(self._packed)


def unpacked(raw: bytes) -> Commit:
    """A commit that was packed here."""
    return build(Commit, framing.unpack_message(raw))
