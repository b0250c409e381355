"""The demo's swarm as tasks of one process over the in-memory transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bootstrap.archive import Archive
from bootstrap.node import BootstrapNode
from peer import events
from peer.corpus.text import open_corpus
from peer.demo.recipe import DemoOptions, PeerSpec, identity_of
from peer.demo.text import TOKENIZER
from peer.events import Emitter, Event, Sink
from peer.net import directory
from peer.net.disk import Disk
from peer.node import open_run
from protocol.run.manifest import Manifest

if TYPE_CHECKING:
    from peer.node.peer import Factories


async def run_in_memory(
    options: DemoOptions,
    manifest: Manifest,
    peers: list[PeerSpec],
    corpus: Path,
    feed: Sink,
    factories: Mapping[str, Factories],
) -> AsyncGenerator[None, None]:
    """The swarm as tasks of this process over the in-memory transport; yields after every event. `corpus`: the text's folder, which the
    node has, and nobody else. `factories`: what a peer makes its parts with, by the peer's name, where it is not the usual."""
    from peer.net.memory import MemoryNetwork
    from peer.node.config import JoinConfig, Machine
    from peer.node.peer import Peer
    from peer.state.storage import Storage
    from peer.training.device import Hardware

    queue: asyncio.Queue[Event] = asyncio.Queue()
    network = MemoryNetwork()
    key = identity_of(options.seed, "bootstrap")
    archive = Archive(options.out / "bootstrap", manifest)
    archive.serve_corpus(corpus, open_corpus(corpus, Disk(), manifest).raw)
    archive.save_tokenizer((open_run.ASSETS / TOKENIZER).read_bytes())
    node_transport = network.transport(key.peer_id, directory.valid_record(manifest.run_id))
    emit = Emitter("bootstrap", queue.put_nowait)
    serving = BootstrapNode(key, node_transport, archive, emit)
    node = asyncio.create_task(serving.serve())
    tasks: set[asyncio.Task[Any]] = {node}
    storages = []
    for peer in peers:
        storage = Storage(options.out / peer.name)
        storages.append(storage)
        run = open_run.Run(None, manifest.run_id, node_transport.addresses)
        config = JoinConfig(run=run, folder=options.out / peer.name, up_bps=peer.up_bps, down_bps=peer.up_bps)
        machine = Machine(config, Hardware.find((options.device,), peer.memory_bytes))
        emit = Emitter(peer.identity.peer_id, queue.put_nowait)
        transport = network.transport(peer.identity.peer_id, directory.valid_record(manifest.run_id))
        made = factories.get(peer.name)
        member = Peer(manifest, peer.identity, transport, storage, machine, emit, made)
        tasks.add(asyncio.create_task(member.run()))
    try:
        while True:
            getter = asyncio.create_task(queue.get())
            done: set[asyncio.Task[Any]]
            done, _ = await asyncio.wait({getter, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {getter}:
                task.result()
                tasks.remove(task)
            if getter not in done:
                getter.cancel()
                continue
            event = getter.result()
            feed(event)
            if isinstance(event.body, events.RunFinished):
                await asyncio.gather(*(tasks - {node}))
            yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        archive.close()
        for storage in storages:
            storage.close()
