"""A checkpoint holds the state that was attested, whatever the peer holds by the time it is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer.net.disk import Piece
from peer.state.storage import Storage
from protocol.run import layout
from tests.support.volunteers import QuickDisk, Swarm, manifest

LAST_FILE = "meta.json"


class Interrupted(QuickDisk):
    """Calls `meanwhile` before each file of a checkpoint, and counts whole ones."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)
    written = 0

    def write(self, path: Path, *pieces: Piece, sync: bool = True, **options: Any) -> None:
        if path.suffix == ".safetensors" and "checkpoint-" in path.parent.name:
            self.meanwhile()
        super().write(path, *pieces, sync=sync, **options)
        self.written += path.name == LAST_FILE


async def test_shards_that_go_and_come_while_a_checkpoint_is_written_end_nobody(tmp_path: Path) -> None:
    """A peer whose role changes does so during the writing."""
    async with Swarm(tmp_path, manifest(rounds=100, checkpoint_rounds=1, start_peers=1)) as swarm:
        swarm.disk = disk = Interrupted()
        peer = swarm.start("a")

        def moved() -> None:
            held = peer.rounds.outer.theta
            held["head"] = held.pop("head")

        disk.meanwhile = moved
        await swarm.until(lambda: disk.written >= 3)
        disk.meanwhile = lambda: None
        await swarm.stop("a")
        stored = Storage(peer.folder, None, QuickDisk())
        warned: list[str] = []
        checkpoint = stored.load_checkpoint(warned.append)
        assert warned == []
        assert set(checkpoint.theta) == set(layout.shard_names(swarm.manifest.model))
        stored.close()
