"""The lists of parts that are here (protocol/ledger/part_lists.py): one owner of what the store has, and of what was read of late."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from peer.net.blobs import BlobStore
from protocol.ledger import part_lists
from protocol.ledger.part_lists import Parts

MOST_PARTS = 1 << 17
"""Parts in memory, about 30 MB of them; the lists that were not used for longest are read again when they are wanted."""


class PartLists(Mapping[str, Parts]):
    """Root -> parts. Only what the store has: a list that was evicted there, or is damaged, is not here either. Safe to use from several
    threads."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._recent: OrderedDict[str, Parts] = OrderedDict()
        self._parts = 0

    def __getitem__(self, root: str) -> Parts:
        with self._lock:
            if not self._store.has(root):
                raise KeyError(root)
            if root in self._recent:
                self._recent.move_to_end(root)
                return self._recent[root]
            raw = self._store.get(root)
            try:
                found = part_lists.unpack(raw) if raw is not None else None
            except part_lists.BadList:
                found = None
            if found is None:
                raise KeyError(root)
            self._recent[root] = found
            self._parts += len(found)
            while self._parts > MOST_PARTS and len(self._recent) > 1:
                _, old = self._recent.popitem(last=False)
                self._parts -= len(old)
            return found

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._recent))

    def __len__(self) -> int:
        return len(self._recent)
