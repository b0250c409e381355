"""Computes the state of a shard from the log and the payloads, as `potluck log verify` does, for a bootstrap node to
see which of several attested states is true.

That is done only if it is cheap. States are kept in memory, so that each of the next rounds costs one step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from peer.net.lru import LruDict
from peer.state.outer_optimizer import Outer
from protocol.codec.sparse import PayloadError
from protocol.ledger import part_lists
from protocol.ledger.part_lists import BadList
from protocol.run import init, layout
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit

MOST_BYTES = 256 << 20
"""Of the shards that are kept."""
MOST_WORK = 8 << 30
"""Bytes, about as many as a core copies in some seconds. A round takes the shard's own, as each round copies it;
PAYLOAD_WORK for each byte of payloads; and ROUND_WORK for whatever it takes besides."""
PAYLOAD_WORK, ROUND_WORK = 32, 1 << 20
KNOWN = 16


class Recomputer:
    """Used from several threads.

    commits: by round
    read: gives payloads and lists of parts by name, None for those that are not here
    """

    def __init__(
        self,
        manifest: Manifest,
        commits: Sequence[Commit],
        read: Callable[[str], bytes | None],
        most_work: int = MOST_WORK,
    ) -> None:
        self._manifest = manifest
        self._commits = commits
        self._get = read
        self._most_work = most_work
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[int, list[NDArray[np.float32]]]] = {}
        self._known = LruDict[tuple[str, int], str](KNOWN)

    def digest(self, shard: str, round: int) -> str | None:
        """The digest of `shard` after `round`; None if that is not cheap, or a payload is not here."""
        with self._lock:
            if (shard, round) not in self._known and (found := self._compute(shard, round)) is not None:
                self._known[shard, round] = found
            return self._known.get((shard, round))

    def _compute(self, shard: str, round: int) -> str | None:
        spec, outer = self._manifest.model, self._manifest.outer
        if round < 0 or shard not in layout.shard_names(spec) or layout.shard_bytes(spec, shard) > MOST_BYTES:
            return None
        replay, (after, state) = Outer(spec, outer.codec, outer.beta, outer.eta), self._kept.pop(shard, (-1, []))
        if not 0 <= after <= round:
            after, state = 0, init.initial_shard(spec, self._manifest.seed_bytes, shard)
        replay.theta[shard] = state
        try:
            if not self._is_cheap(shard, after, round):
                return None
            for each in range(after + 1, round + 1):
                replay.apply(shard, self._payloads(self._commits[each], shard))
                after = each
        except (KeyError, IndexError, BadList, PayloadError):
            return None
        finally:
            self._keep(shard, after, replay.theta[shard])
        return replay.digest(shard)

    def _keep(self, shard: str, round: int, state: list[NDArray[np.float32]]) -> None:
        self._kept[shard] = round, state
        while sum(layout.shard_bytes(self._manifest.model, each) for each in self._kept) > MOST_BYTES:
            del self._kept[next(iter(self._kept))]

    def _is_cheap(self, shard: str, after: int, round: int) -> bool:
        spec = self._manifest.model
        portion = layout.parameters(spec, shard) / layout.total_parameters(spec)
        left: float = self._most_work - (round - after) * (layout.shard_bytes(spec, shard) + ROUND_WORK)
        for each in range(after + 1, round + 1):
            if left < 0:
                break
            left -= PAYLOAD_WORK * portion * sum(share.size for share in self._commits[each].shares)
        return left >= 0

    def _payloads(self, commit: Commit, shard: str) -> list[tuple[float, bytes]]:
        """Raises KeyError if one is not here, BadList."""
        lists = {share.root: part_lists.unpack(self._read(share.root)) for share in commit.shares}
        return [(weight, self._read(part.digest)) for weight, part, _ in commit.payloads(shard, lists)]

    def _read(self, name: str) -> bytes:
        data = self._get(name)
        if data is None:
            raise KeyError(name)
        return data
