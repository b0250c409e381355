"""One blob on its way: which ranges are here, which were asked for, and by whom."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from peer.net.base import Stream
from peer.net.blobs.holders import Speed
from peer.net.blobs.store import Part, Place
from protocol.codec import blob_hash

OVERDUE_SECONDS = 2.0
"""After so long, and four times what it would take itself, an idle holder is given another's range too; and another holder is asked beside
one that has not begun to send."""
WAIT_SECONDS = 30.0
"""For so long a holder may let us wait for a blob that is on its way to it; then it counts as silent."""


@dataclass(slots=True)
class Asked:
    """A holder that was asked for a blob `since` then, and for the ranges `mine`. `answered`: it has said something; `gives`: that it has
    the blob, so that the blob is on its way to us."""

    peer: str
    since: float
    mine: deque[int] = field(default_factory=deque)
    answered: bool = False
    gives: bool = False

    def is_late(self, now: float) -> bool:
        """Whether another is asked beside it."""
        return not self.gives and now >= self.since + OVERDUE_SECONDS

    def is_silent(self, now: float) -> bool:
        """Whether nothing can be expected of it: who was busy is asked again, and has to give."""
        return not self.gives and now >= self._silent_at

    def changes_in(self, now: float) -> float:
        """Seconds until it is late or silent, if it goes on as it does; infinite if it is both, or neither will be."""
        at = [] if self.gives else [self.since + OVERDUE_SECONDS, self._silent_at]
        return min((time - now for time in at if time > now), default=math.inf)

    @property
    def _silent_at(self) -> float:
        return self.since + (WAIT_SECONDS if self.answered else OVERDUE_SECONDS)


@dataclass(slots=True)
class Job:
    """One blob on its way.

    `place`: where a small blob lies in a larger one. `part`: what is here of a large blob; `data`: a small blob, once it is here. `todo`: ranges that nobody was asked for (of a small blob
    the one piece that it comes in); `asked`: when the others were asked for. `asking`: the holders that were asked and have not
    ended; `served`: one of them has the blob; `named_by`: peers that somebody sure named, and who. `known` is set when the digests of
    all ranges are known, of a small blob never; `all_asked` when every range was asked for once; `streams`: those on which it is given, and how much had come
    before on each, `read`: what came on others; `done` when nothing is missing, `changed` now
    and then.
    """

    name: str
    size: int
    part: Part | None
    todo: deque[int]
    place: Place | None = None
    asked: dict[int, float] = field(default_factory=dict)
    data: bytes | None = None
    asking: set[str] = field(default_factory=set)
    served: bool = False
    named_by: dict[str, str] = field(default_factory=dict)
    known: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    all_asked: asyncio.Event = field(default_factory=asyncio.Event)
    streams: dict[Stream, int] = field(default_factory=dict)
    read: int = 0

    @property
    def received(self) -> int:
        """Bytes that holders have given; a promise is none."""
        return self.read + sum(stream.received - before for stream, before in self.streams.items())

    def over(self, stream: Stream | None) -> None:
        """Nothing more comes of the blob on this one."""
        if stream in self.streams:
            self.read += stream.received - self.streams.pop(stream)

    @property
    def came(self) -> int:
        """Bytes that are here of a large blob, the last range taken to be whole."""
        return max(0, self.size - blob_hash.RANGE_BYTES * len(self.part.missing)) if self.part is not None else 0

    def is_missing(self, index: int) -> bool:
        """Whether a range is not here yet."""
        return self.data is None if self.part is None else index in self.part.missing

    def give_back(self, indices: Sequence[int]) -> None:
        """A holder that was asked for these does not send them."""
        for index in indices:
            if self.asked.pop(index, None) is not None and self.is_missing(index):
                self.todo.appendleft(index)
        self.wake()

    def wake(self) -> None:
        """Lets those who wait for `changed` look again."""
        self.changed.set()
        self.changed = asyncio.Event()

    def next(self, mine: deque[int], speed: Speed) -> int | None:
        """A range to ask a holder for, who was asked for `mine`: one that nobody was asked for, or one that is late."""
        while self.todo:
            index = self.todo.popleft()
            if self.is_missing(index):
                return index
        self.all_asked.set()
        if mine or not self.asked:
            return None
        index, since = min(self.asked.items(), key=lambda item: item[1])
        late = asyncio.get_running_loop().time() - since - 4 * speed.expected(blob_hash.RANGE_BYTES)
        return index if late > OVERDUE_SECONDS else None

    def ask(self, mine: deque[int], index: int) -> None:
        """A holder is asked for this range."""
        self.asked[index] = asyncio.get_running_loop().time()
        with contextlib.suppress(ValueError):
            self.todo.remove(index)
        mine.append(index)

    async def keep(self, index: int, data: bytes) -> bool:
        """Stores a range; whether it is right. Raises UsageError where the disk refuses."""
        if not self.is_missing(index):
            return True  # it came from another meanwhile
        if self.part is not None:
            return await asyncio.to_thread(self.part.write, index, data)
        if self.place is not None and self.place.index < 0:
            is_right = blob_hash.root(self.place.size, data) == self.place.name
        else:
            is_right = blob_hash.name_of(data) == self.name
        self.data = data if is_right else None
        return is_right
