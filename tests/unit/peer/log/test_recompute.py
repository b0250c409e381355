"""States of shards computed from the log, where that is cheap (peer/log/recompute.py)."""

from __future__ import annotations

from pathlib import Path

from peer.log import recompute
from peer.log.recompute import Recomputer
from protocol.run import layout
from tests.support.false_states import digests_of
from tests.support.volunteers import Swarm, manifest


async def test_a_state_is_what_the_peers_have(tmp_path: Path) -> None:
    async with Swarm(tmp_path, manifest(start_peers=2, rounds=100)) as swarm:
        swarm.start("a")
        swarm.start("b")
        await swarm.until(lambda: swarm.head >= 6)
        read = list[str]()

        def get(name: str) -> bytes | None:
            read.append(name)
            return swarm.archive.blobs.get(name)

        right, made = digests_of(swarm), Recomputer(swarm.manifest, swarm.archive.commits, get)
        for shard in layout.shard_names(swarm.manifest.model):
            assert made.digest(shard, 0) == right[0][shard]
            assert made.digest(shard, 5) == right[5][shard]
        read.clear()
        assert made.digest(shard, 5) == right[5][shard]
        assert read == [], "it is known"
        assert made.digest(shard, 6) == right[6][shard]
        assert len(read) == 2 * len(swarm.archive.commits[6].shares), "one round, from the state that is kept"
        lost = swarm.archive.commits[3].shares[0].root
        gone = Recomputer(
            swarm.manifest, swarm.archive.commits, lambda name: None if name == lost else swarm.archive.blobs.get(name)
        )
        assert gone.digest(shard, 5) is None
        assert gone.digest(shard, 2) == right[2][shard]
        assert Recomputer(swarm.manifest, swarm.archive.commits, get, 5 * recompute.ROUND_WORK).digest(shard, 5) is None
        assert made.digest("another", 5) is None
