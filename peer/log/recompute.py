"""Computes the state of a shard from the log and the payloads, as `potluck log verify` does, for a bootstrap node: the
states that its archive keeps, and which of several attested states is true.

The latter is done only if it is cheap. States are kept in memory, so that each of the next rounds costs one step.
"""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from peer.net.blobs import BlobStore
from peer.net.lru import LruDict
from peer.state import tensor_file
from peer.state.outer_optimizer import Outer
from protocol.codec.sparse import PayloadError
from protocol.codec.topk import in_memory
from protocol.ledger import aggregation
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
Read = Callable[[str], bytes | None]
"""Gives payloads and lists of parts by name, None for those that are not here."""


def store_state(
    manifest: Manifest,
    commits: Sequence[Commit],
    blobs: BlobStore,
    shard: str,
    after: int,
    round: int,
    is_over: Callable[[], bool] = lambda: False,
) -> bool | None:
    """Computes a shard's state after `round` from the one after `after`, and stores it if its digest is that of the
    next commit. Returns whether it is; None if a payload is not here, or if `is_over`.

    Raises UsageError.
    """
    empty = functools.partial(blobs.disk.arrays, blobs.folder.parent)
    small = manifest.state_bytes(shard) <= MOST_BYTES
    replay = Outer.of(manifest, empty=in_memory if small else empty)
    name = _name_of(manifest, commits, shard, after)
    if name is None:
        replay.theta[shard] = init.initial_state(manifest, shard, empty=replay.empty)
    else:
        replay.theta[shard] = replay.empty(manifest.state_shapes(shard))
        blob = blobs.find(name)
        try:
            if blob is None:
                return None
            with blob.disk.open(blob.path) as file:
                tensor_file.fill(file, replay.theta[shard])
        except (OSError, tensor_file.Damaged):
            return None
    try:
        for each in range(after + 1, round + 1):
            if is_over():
                return None
            _step(manifest, replay, shard, commits[each], blobs.get)
    except (KeyError, BadList, PayloadError):
        return None
    is_right = (digest := replay.digest(shard)) == commits[round + 1].digests[shard]
    if is_right:
        blobs.put_of_no_round(layout.shard_pieces(replay.theta[shard]), digest)
    return is_right


class Recomputer:
    """Used from several threads.

    commits: by round
    read: gives states of shards, too
    newest_state: gives the newest round up to another of which `read` has the whole state, or 0
    """

    def __init__(
        self,
        manifest: Manifest,
        commits: Sequence[Commit],
        read: Read,
        most_work: int = MOST_WORK,
        newest_state: Callable[[int], int] = lambda round: 0,
    ) -> None:
        self._manifest = manifest
        self._commits = commits
        self._get = read
        self._most_work = most_work
        self._newest_state = newest_state
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
        manifest = self._manifest
        if round < 0 or shard not in layout.shard_names(manifest.model) or manifest.state_bytes(shard) > MOST_BYTES:
            return None
        replay, (after, state) = Outer.of(manifest), self._kept.pop(shard, (-1, []))
        stored = self._newest_state(round)
        if not stored <= after <= round:
            if (begun := self._begin(shard, stored)) is None:
                return None
            after, state = begun
        replay.theta[shard] = state
        try:
            if not self._is_cheap(shard, after, round):
                return None
            for each in range(after + 1, round + 1):
                _step(self._manifest, replay, shard, self._commits[each], self._get)
                after = each
        except (KeyError, IndexError, BadList, PayloadError):
            return None
        finally:
            self._keep(shard, after, replay.theta[shard])
        return replay.digest(shard)

    def _keep(self, shard: str, round: int, state: list[NDArray[np.float32]]) -> None:
        self._kept[shard] = round, state
        while sum(map(self._manifest.state_bytes, self._kept)) > MOST_BYTES:
            del self._kept[next(iter(self._kept))]

    def _is_cheap(self, shard: str, after: int, round: int) -> bool:
        spec = self._manifest.model
        portion = layout.parameters(spec, shard) / layout.total_parameters(spec)
        left: float = self._most_work - (round - after) * (self._manifest.state_bytes(shard) + ROUND_WORK)
        for each in range(after + 1, round + 1):
            if left < 0:
                break
            left -= PAYLOAD_WORK * portion * self._commits[each].payload_bytes
        return left >= 0

    def _begin(self, shard: str, after: int) -> tuple[int, list[NDArray[np.float32]]] | None:
        """The round of a shard's state that is stored or follows from the seed, `after` or 0, and the state."""
        for round in (after, 0):
            name = _name_of(self._manifest, self._commits, shard, round)
            if name is None:
                return 0, init.initial_state(self._manifest, shard)
            if (raw := self._get(name)) is not None:
                state = in_memory(self._manifest.state_shapes(shard))
                tensor_file.fill(io.BytesIO(raw), state)
                return round, state
        return None


def _name_of(manifest: Manifest, commits: Sequence[Commit], shard: str, round: int) -> str | None:
    """The digest of a shard's state after `round`; None for θ(0) from the seed."""
    return commits[round + 1].digests[shard] if round else manifest.initial_digests.get(shard)


def _step(manifest: Manifest, replay: Outer, shard: str, commit: Commit, get: Read) -> None:
    """Applies a commit to a shard. Raises KeyError if a payload is not here, BadList, PayloadError."""

    def read(name: str) -> bytes:
        data = get(name)
        if data is None:
            raise KeyError(name)
        return data

    items = aggregation.contributions(commit, shard, aggregation.lists_of(commit, read), read)
    codec, found = aggregation.applied(manifest, commit, shard, items)
    replay.apply(shard, found, codec=codec)
