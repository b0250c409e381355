"""Identities of one liar, who serve and attest a state that the log does not give."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np

from peer.log import replay
from peer.net import directory
from peer.net.base import Transport
from peer.net.blobs import BlobServer
from peer.state.storage import Checkpoint, Storage
from protocol.identity import Identity
from protocol.run import layout
from protocol.run.manifest import OuterSpec
from protocol.wire.commit import Commit
from tests.support.liars import Liar
from tests.support.volunteers import MODEL, Swarm, Volunteer

MADE_UP = [Identity(hashlib.sha256(b"made up %d" % number).digest()) for number in range(30)]
Digests = dict[str, str]
"""By shard."""
LARGE = OuterSpec(topk=2048)
"""Payloads of ten rounds are more bytes than a state: so newcomers take one."""
FALSE = {
    shard: [np.full(shape, 7.0, np.float32) for shape in layout.shapes(MODEL, shard)]
    for shard in layout.shard_names(MODEL)
}
DIGESTS = {shard: layout.shard_digest(arrays) for shard, arrays in FALSE.items()}


@contextlib.asynccontextmanager
async def made_up(swarm: Swarm, folder: Path, many: int = len(MADE_UP)) -> AsyncIterator[list[Liar]]:
    """One liar of each of the first of MADE_UP, until the block ends, when they must still run."""
    storage = Storage(folder / "false", None, swarm.disk)
    storage.save_checkpoint(Checkpoint(max(10, swarm.head), FALSE, {}), DIGESTS)
    liars = []
    for number, identity in enumerate(MADE_UP[:many]):
        transport = swarm.network.transport(identity.peer_id, directory.valid_record(swarm.manifest.run_id))
        liars.append(Liar(swarm.manifest, identity, transport, swarm.boot.addresses, DIGESTS, random.Random(number)))

    async def serve(transport: Transport) -> None:
        """What they say that they have is really there."""
        await BlobServer(storage.blobs, others=storage.find).serve(transport)

    tasks = [asyncio.create_task(liar.run(serve)) for liar in liars]
    try:
        yield liars
        assert not any(task.done() for task in tasks), "a test of liars that are not there shows nothing"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for liar in liars:
            await liar.transport.aclose()
        storage.close()


def digests_of(swarm: Swarm) -> list[Digests]:
    """Of the state after each round, as the log gives it: that is computed anew."""
    states = replay.replay(swarm.manifest, swarm.archive.commits, swarm.archive.blobs.get)
    return [dict(state.digests) for state in states]


def believes_the_log(commits: Sequence[Commit], right: Sequence[Digests]) -> None:
    """What commits say of states is what the log gives: `right` (`digests_of`)."""
    for commit in commits[1:]:
        assert commit.digests.items() <= right[commit.round - 1].items()


def never_doubted(peer: Volunteer) -> None:
    assert not [e for e in peer.events if e.kind == "shard_rebuilt"]
    assert not [text for text in peer.texts() if "other bits" in text]
