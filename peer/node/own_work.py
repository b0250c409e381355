"""What a round's training taught goes into the error feedback, and from there into payloads: on the device that trains, where it can,
else by the host. The bytes are the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from peer.state.outer_optimizer import Accumulate, Outer

AT_A_TIME = 4
"""Shards that are worked on with a device: while it works for one, the host packs another. Each needs some MB."""


class Trained(Protocol):
    """Who knows what was learned; the methods are those of peer/node/training.py."""

    def displacement(self, shard: str) -> list[tuple[NDArray[np.float32], NDArray[np.float32] | None]]: ...

    def on_device(self, shard: str) -> Accumulate | None: ...


class OwnWork:
    """Belongs to the thread that changes the feedback of `outer`."""

    def __init__(self, outer: Outer, trained: Trained) -> None:
        self._outer = outer
        self._trained = trained

    def keep(self, shards: Sequence[str]) -> None:
        """Adds to the feedback what was learned of these shards. Raises LocalError if a value is not finite."""
        for shard in shards:
            device = self._trained.on_device(shard)
            if device is not None:
                self._outer.accumulate_on(device, shard)
            else:
                self._outer.accumulate(shard, self._trained.displacement(shard))

    def encode(self, shards: Sequence[str]) -> Iterator[tuple[bytes, float]]:
        """The same, and for each shard the payload to offer and the L2 norm of what it sends. Raises PayloadError, too."""
        devices = [self._trained.on_device(shard) for shard in shards]
        if shards and all(device is not None for device in devices):
            with ThreadPoolExecutor(AT_A_TIME, "shard") as pool:
                yield from pool.map(self._outer.update, devices, shards)
        else:
            for shard in shards:
                self.keep([shard])
                yield self._outer.encode(shard)
