"""A peer that follows the log for an operator, and trains nothing (`potluck bootstrap --audit`).

It announces no memory, so no plan gives it work, and holds the whole state, from the seed or its own checkpoint on. It
reads only the held-out text and evaluates every state that is due (peer/node/evaluating.py). Its operator's node
believes its attestations before all others (protocol/round/attestations.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from peer.corpus.fetched import TextAccess, open_text
from peer.corpus.text import Text
from peer.node.config import JoinConfig
from protocol.run.corpus import CorpusIndex
from protocol.run.manifest import Manifest


class HeldOutText:
    """The held-out part of a run's text, fetched when it is needed; there is no other text."""

    def __init__(self, manifest: Manifest, access: TextAccess) -> None:
        self._manifest = manifest
        self._access = access
        self._index: CorpusIndex | None = None

    @property
    def index(self) -> CorpusIndex:
        """Known once the held-out part was read."""
        assert self._index is not None, "what was not read has no index; this is a bug"
        return self._index

    async def sequences(self, slots: range) -> NDArray[np.int64]:
        """Never called."""
        raise AssertionError("an auditor reads no training text; this is a bug")

    def expect(self, slots: Sequence[range]) -> None:
        """Fetches nothing."""

    async def held_out(self, limit: int) -> NDArray[np.int64]:
        """At most `limit` held-out sequences [n, L + 1]. Raises RemoteError, UsageError."""
        text = await open_text(self._manifest, self._access)
        try:
            self._index = text.index
            return await text.held_out(limit)
        finally:
            await text.aclose()

    async def aclose(self) -> None:
        """Nothing to end."""


async def held_out_text(manifest: Manifest, config: JoinConfig, access: TextAccess) -> Text:
    """As Factories.text, for an auditor."""
    return HeldOutText(manifest, access)
