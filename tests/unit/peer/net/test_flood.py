"""A sender that writes as fast as it can to a stage that takes nothing: two processes, each with its own daemon."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from peer.chain.connect import PipelineStreams
from peer.chain.frames import FORWARD, Head, NeighbourLost
from peer.net.base import Timeout, Transport
from peer.net.stream import STRIPES
from peer.training.trainer import make_worker
from protocol.wire import endpoints
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec
from tests.support import networks
from tests.support.chains import SPEC, TRAIN, make_chain, steps_of
from tests.support.net import SOON, sockets, start, swarm

pytestmark = pytest.mark.slow

sockets = sockets
WIDE = dataclasses.replace(TRAIN, rows=400, micro_batches=4)
FRAME = 4 * WIDE.rows * WIDE.sequence * SPEC.d_model
"""1.2 MB."""
FLOOD = 200
WAITING = WIDE.micro_batches + 1
"""Frames that may wait in a stage; one more may wait for a place there, and one may be arriving."""
IN_LANE = 384 * 1024
"""What asyncio reads from one stream before it stops, at most: twice 64 KB, and one reading of 256 KB."""
IN_DAEMON = 48 << 20
"""What both daemons and the sockets hold of a pipe, at most; also how much a daemon may grow."""


async def _pipes(transport: Transport) -> PipelineStreams:
    """A peer's pipes; it knows its neighbours from the DHT's connections."""
    pipes = PipelineStreams(networks.network(transport))
    await transport.serve(endpoints.PIPE, lambda stream: pipes.serve(stream, 0))
    return pipes


def _stage(folder: Path, bootstrap: str, up: Connection) -> None:
    """Another process: the last of two stages, whose text does not come until we hear something."""
    free, begun = threading.Event(), threading.Event()

    async def read(step: int) -> np.ndarray:
        begun.set()
        await asyncio.to_thread(free.wait)
        return np.zeros((WIDE.step_rows, WIDE.sequence + 1), np.int64)

    async def live() -> None:
        peer = await start(folder / "stage", bootstrap=[bootstrap])

        async def take() -> None:
            previous, _ = await pipes.neighbours(plan, 0, 0, 1)
            try:
                await steps_of(make_chain((3,), 0, WIDE)[1], make_worker(), timeout=SOON, read=read, previous=previous)
            except NeighbourLost as error:
                up.send(error.peer)

        pipes = await _pipes(peer)
        up.send((peer.peer_id, os.getpid(), peer.daemon.pid))
        plan = await asyncio.to_thread(up.recv)
        taking = asyncio.create_task(take())
        await asyncio.to_thread(begun.wait)
        up.send("busy")
        await asyncio.to_thread(up.recv)
        free.set()
        await taking
        await peer.aclose()

    asyncio.run(live())


async def test_a_flooded_stage_holds_its_sender_back_and_stays_small(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    async with swarm("p2p", tmp_path, 1) as (a,):
        args: Any = (tmp_path, a.addresses[0], there)
        process = context.Process(target=_stage, args=args, daemon=True)
        process.start()
        there.close()
        try:
            peer, *pids = await asyncio.to_thread(here.recv)
            stage, daemon = map(psutil.Process, pids)
            stages = tuple(StageSpec(peer=p, first=i, last=i + 1) for i, p in enumerate((a.peer_id, peer)))
            plan = Plan(round=1, replicas=(ReplicaSpec(stages=stages),))
            here.send(plan)
            _, stream = await (await _pipes(a)).neighbours(plan, 0, 0, 0)
            assert stream is not None
            assert await asyncio.to_thread(here.recv) == "busy"
            before, sent = [p.memory_info().rss for p in (stage, daemon)], 0

            async def flood() -> None:
                nonlocal sent
                while sent < FLOOD:
                    await stream.send(Head(FORWARD).pack(), bytes(FRAME), timeout=3.0)
                    sent += 1

            with pytest.raises(Timeout, match="read nothing"):
                await flood()
            grown, more = (p.memory_info().rss - b for p, b in zip((stage, daemon), before, strict=True))
            assert WAITING <= sent <= WAITING + 2 + IN_DAEMON // FRAME
            assert grown < (WAITING + 5) * 2 * FRAME + STRIPES * IN_LANE, (
                f"{grown} bytes: frames as bytes and as tensors"
            )
            assert more < IN_DAEMON, f"{more} bytes"
            here.send("go on")
            assert await asyncio.to_thread(here.recv) == a.peer_id, "the sender is blamed for what it sent"
            await asyncio.to_thread(process.join, SOON)
            assert process.exitcode == 0
        finally:
            process.kill()
            process.join()
            here.close()
