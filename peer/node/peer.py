"""A volunteer's daemon: wires presence, rounds, storage and the computing inner_loop together, and owns their tasks."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
from collections.abc import Sequence

from peer import events
from peer.config import JoinConfig
from peer.events import Emitter
from peer.net.base import Transport
from peer.net.blobs import fetch_named
from peer.net.directory import Directory
from peer.net.uplink import Uplink
from peer.node.inner_loop import InnerLoop
from peer.node.rounds import Rounds
from peer.node.sessions import Sessions
from peer.state.payloads import Exchange
from peer.state.storage import Storage
from peer.training import data, device
from protocol.errors import LocalError, RemoteError, UsageError
from protocol.identity import Identity
from protocol.planning import memory
from protocol.rounds import member
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire import endpoints
from protocol.wire.announcement import Announcement
from protocol.wire.commit import Record
from protocol.wire.encoding import Message
from protocol.wire.session import ChainReconfig, Finished, Offered


async def join(
    manifest: Manifest,
    identity: Identity,
    transport: Transport,
    storage: Storage,
    config: JoinConfig,
    bootstrap: Sequence[str],
    emit: Emitter,
) -> None:
    """Takes part in a run until it is over. Raises PotluckError."""
    smallest = memory.smallest_stage(manifest)
    if config.memory_bytes < smallest:
        raise UsageError(
            f"memory: {config.memory_bytes / 1e6:.0f} MB offered, one block of this model needs {smallest / 1e6:.0f} MB;"
            " offer more with --memory, or join a run with a smaller model"
        )
    tokenizer = await fetch_tokenizer(manifest, transport, storage)
    corpus = await asyncio.to_thread(
        data.prepare,
        manifest.data,
        data.load_tokenizer(tokenizer, manifest.tokenizer.digest),
        manifest.train.sequence,
        data.cache_folder(),
        manifest.model.vocab_size,
    )
    announcement = Announcement(
        run=manifest.run_id,
        peer=identity.peer_id,
        addresses=transport.addresses,
        memory_bytes=config.memory_bytes,
        up_bps=config.up_bps,
        down_bps=config.down_bps,
        device=config.device,
    )
    directory = Directory(manifest, identity, transport, bootstrap, announcement)
    sessions = Sessions(directory, transport, emit)

    def follow(body: events.Body) -> None:
        """Everything that is emitted, and the part of it that the announcement repeats."""
        if isinstance(body, events.Round):
            body = dataclasses.replace(body, peak_rss_bytes=device.peak_rss())
        emit(body)
        match body:
            case events.Chain():
                directory.update(chain=events.chain_report(body))
            case events.Role(role="full"):
                directory.update(chain=None)
            case events.Step(round=round, step=step, loss=loss):
                directory.update(phase="training", round=round, step=step, loss=loss)
            case events.Offered(round=round):
                directory.update(phase="offered", round=round)
            case events.Withdrew(round=round):
                directory.update(phase="withdrew", round=round)
            case events.Round(round=round, bytes_sent=sent, bytes_received=received):
                directory.update(phase="waiting", round=round, bytes_sent=sent, bytes_received=received)

    restored = await asyncio.to_thread(storage.load_checkpoint, lambda text: emit(events.Warning(text=text)))
    if restored is not None:
        emit(events.Restored(round=restored.round))
    uplink = Uplink(config.up_limit_bps)
    inner_loop = InnerLoop(
        manifest,
        identity.peer_id,
        transport,
        corpus,
        config,
        directory,
        uplink,
        dict(restored.optimizer) if restored else {},
        follow,
    )
    exchange = Exchange(
        manifest,
        transport,
        storage.blobs,
        emit,
        reach=directory.reach,
        peers=directory.peers,
        find=storage.find,
        states=storage.states,
        uplink=uplink,
    )
    rounds = Rounds(
        manifest,
        identity.peer_id,
        transport,
        storage,
        inner_loop,
        follow,
        exchange=exchange,
        tell=sessions.tell,
        restored=restored,
        threads=config.threads,
        warm=memory.keeps_warm(manifest, config.memory_bytes),
    )
    del restored  # it would keep this θ in memory as long as the run lasts

    async def on_message(message: Message | Record) -> None:
        if isinstance(message, Record):
            rounds.put(member.Committed(message))
        elif isinstance(message, Offered):
            rounds.prefetch(message)
        elif isinstance(message, ChainReconfig):
            rounds.put(member.Reconfigured(message))
        elif isinstance(message, Finished):
            rounds.put(member.RunOver())

    async def on_open() -> None:
        rounds.put(member.Connected())

    await exchange.serve()
    await transport.serve(endpoints.PIPE, lambda stream: inner_loop.pipes.serve(stream, rounds.member.applied))
    started = events.Started(
        peer=identity.peer_id,
        pid=os.getpid(),
        device=config.device,
        memory_bytes=config.memory_bytes,
        rss_bytes=device.peak_rss(),
    )
    emit(started)
    directory.update(phase="waiting")
    background = [
        asyncio.create_task(directory.announce()),
        asyncio.create_task(sessions.run(on_message, on_open)),
    ]
    work = asyncio.create_task(rounds.run())
    try:
        done, _ = await asyncio.wait({work, *background}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    except member.ForkError as error:
        raise LocalError(f"history of the run: {error}; stopped without applying either, tell the operator") from None
    finally:
        for task in (work, *background):
            task.cancel()
        await asyncio.gather(work, *background, return_exceptions=True)
        await exchange.aclose()
        await asyncio.to_thread(inner_loop.close)
    digests = {s: rounds.outer.digest(s) for s in layout.shard_names(manifest.model) if s in rounds.outer.theta}
    emit(events.Finished(round=rounds.member.applied, digests=digests))


async def fetch_tokenizer(manifest: Manifest, transport: Transport, storage: Storage) -> bytes:
    """The run's tokenizer: from our disk, or by its name from a bootstrap node. Raises RemoteError."""
    found = storage.load_tokenizer(manifest.tokenizer.digest)
    if found is None:
        node = manifest.operators[0]
        found = await fetch_named(transport, node, endpoints.TOKENIZER_NAME, limit=endpoints.MAX_TOKENIZER)
        if hashlib.sha256(found).hexdigest() != manifest.tokenizer.digest:
            raise RemoteError(node, f"tokenizer from {node[-8:]}: not the run's; tell the operator")
        await asyncio.to_thread(storage.save_tokenizer, found)
    return found
