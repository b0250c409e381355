"""Measures one stage of a chain as it runs in a daemon, and compares it with its blocks alone.

The stage runs `run_steps` with its links, threads, number formats and frames, and the model's work on the device. Its
neighbours are another process on the same machine, behind TCP streams. They compute nothing: each has one encoded
tensor, sends it for every micro-batch as soon as the stage takes it, and discards the answers. So all waits are the
stage's own. `bare` runs the same blocks, micro-batches and optimizer in a plain loop without boundaries, by turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import ClassVar

import numpy as np
import torch

from peer.chain import quantize
from peer.chain.frames import BACKWARD, BEAT, DONE, ECHO, FORWARD, NORM, PING, TOTAL, Head
from peer.chain.grad_norm import Norms, StageTiming, StepReport
from peer.chain.pipeline import StageSetup, run_steps
from peer.net.base import Stream, Traffic
from peer.net.stream import Flow, FrameStream
from peer.training.trainer import StageTrainer
from protocol.codec import formats
from protocol.errors import RemoteError
from protocol.run import layout
from tests.support.chains import worker

HOST = "127.0.0.1"
DEPTH = 6
"""Micro-batches under way: enough that a gradient is there when its turn comes."""
BEAT_S = 0.5
LIMIT = 1 << 26
"""Bytes of a frame, at most."""
_TOTAL = struct.Struct(">Bdd")


class Bare(StageTrainer):
    """A stage that calls its blocks each time, as a plain loop does."""

    recording: ClassVar = {}


@dataclass(frozen=True, slots=True)
class Feed:
    """What both neighbours send.

    ids: text [micro-batches, rows, L+1].
    checks: the text's checksums, by micro-batch.
    shape: of the tensors.
    wires: number formats, forward and backward.
    bodies: encoded tensors, forward and backward.
    """

    ids: np.ndarray
    checks: list[int]
    shape: tuple[int, int, int]
    wires: tuple[str, str]
    bodies: tuple[bytes, bytes]

    def head(self, kind: int, step: int, micro: int) -> Head:
        """Returns the head of a tensor's frame."""
        code = formats.FORMATS.index(self.wires[kind == BACKWARD])
        check = self.checks[micro] if kind == FORWARD else 0
        return Head(kind, code, DEPTH, step, micro, *self.shape, check, time.perf_counter())


async def _beats(stream: Stream) -> None:
    while True:
        await asyncio.sleep(BEAT_S)
        await stream.send(Head(BEAT).pack())


async def _hears(stream: Stream, kind: int) -> memoryview:
    """Returns the next frame of this kind. Answers pings, and drops all other frames."""
    while True:
        frame = memoryview(await stream.recv(LIMIT))
        head = Head.unpack(frame)
        if head.kind == PING:
            await stream.send(Head(ECHO, stamp=time.perf_counter()).pack())
        if head.kind == kind:
            return frame


async def _previous(stream: Stream, feed: Feed, steps: Sequence[int]) -> None:
    async def feeds(step: int) -> None:
        for micro in range(len(feed.ids)):
            await stream.send(feed.head(FORWARD, step, micro).pack(), feed.bodies[0])

    async with asyncio.TaskGroup() as group:
        beats = group.create_task(_beats(stream))
        for step in steps:
            fed = group.create_task(feeds(step))
            await _hears(stream, NORM)
            await fed
            await stream.send(Head(TOTAL, step=step).pack(), _TOTAL.pack(0, 1.0, 1.0))
        await _hears(stream, DONE)
        beats.cancel()


async def _following(stream: Stream, feed: Feed, steps: Sequence[int], shards: int) -> None:
    timing = StageTiming(1e-3, 1e-3, 0.0, 0.0, 0.0, 0.0, DEPTH, DEPTH, DEPTH)
    beats = asyncio.create_task(_beats(stream))
    for step in steps:
        for micro in range(len(feed.ids)):
            await _hears(stream, FORWARD)
            await stream.send(feed.head(BACKWARD, step, micro).pack(), feed.bodies[1])
        await stream.send(
            Head(NORM, step=step, width=shards).pack(), Norms(False, 1.0, [1.0] * shards, [timing]).pack()
        )
        await _hears(stream, TOTAL)
    await stream.send(Head(DONE).pack())
    beats.cancel()


def _stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> FrameStream:
    return FrameStream("P1", "pipe", reader, writer, writer.transport.abort, Traffic(), Flow())


async def _both(port: int, feed: Feed, steps: Sequence[int], behind: int) -> None:
    streams = [_stream(*await asyncio.open_connection(HOST, port)) for _ in range(2)]
    for place, stream in enumerate(streams):
        await stream.send(bytes([place]))
    await asyncio.gather(_previous(streams[0], feed, steps), _following(streams[1], feed, steps, behind))


def _serve(orders: Connection) -> None:
    """Runs the neighbours' process until it receives None."""
    torch.set_num_threads(1)
    while (order := orders.recv()) is not None:
        with contextlib.suppress(RemoteError, ExceptionGroup):  # where the stage fails, its error is the one to be told
            asyncio.run(_both(*order))


class Neighbours:
    """The process of both neighbours; use as `with`."""

    def __enter__(self) -> Neighbours:
        spawning = multiprocessing.get_context("spawn")
        self.orders, theirs = spawning.Pipe()
        self.process = spawning.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.orders.send(None)
        self.process.join()

    def chained(self, trainer: StageTrainer, feed: Feed, first: int, count: int) -> list[StepReport]:
        """Returns reports of `count` inner steps of the stage between its neighbours."""
        return list(asyncio.run(self._chained(trainer, feed, range(first, first + count))))

    async def _chained(self, trainer: StageTrainer, feed: Feed, steps: Sequence[int]) -> tuple[StepReport, ...]:
        shards = layout.shard_names(trainer.spec)
        came: asyncio.Queue[FrameStream] = asyncio.Queue()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.put_nowait(_stream(reader, writer))

        async def read(step: int) -> np.ndarray:
            return feed.ids.reshape(-1, feed.ids.shape[-1])

        server = await asyncio.start_server(accept, HOST, 0)
        behind = shards.index("head") - shards.index(trainer.own[-1])
        self.orders.send((server.sockets[0].getsockname()[1], feed, steps, behind))
        streams = {}
        for _ in range(2):
            stream = await came.get()
            streams[(await stream.recv())[0]] = stream
        setup = StageSetup(trainer=trainer, worker=worker(1), wires=feed.wires, timeout=600.0, read=read, depth=DEPTH)
        try:
            return await run_steps(
                setup, first_step=steps[0], steps=len(steps), previous=streams[0], following=streams[1]
            )
        finally:
            server.close()


def feed_of(trainer: StageTrainer, ids: np.ndarray, wires: tuple[str, str]) -> Feed:
    """Encodes random values. `ids` [micro-batches, rows, L+1]."""
    shape = ids.shape[1], ids.shape[2] - 1, trainer.width
    values = 0.1 * torch.randn(shape, device=trainer.device)
    first, second = (quantize.encode(values, wire) for wire in wires)
    return Feed(ids, [zlib.crc32(part.astype("<i8").tobytes()) for part in ids], shape, wires, (first, second))


def bare(trainer: Bare, ids: np.ndarray, first: int, count: int, form: torch.dtype) -> list[float]:
    """Returns the seconds of `count` inner steps of a stage whose input is on the device already, in this format."""
    device, took = trainer.device, []
    parts = torch.tensor(ids, device=device)
    x = torch.randn(*ids.shape[1:2], ids.shape[2] - 1, trainer.width, device=device).to(form)
    for step in range(first, first + count):
        trainer.synchronize()
        start = time.perf_counter()
        for micro, part in enumerate(parts):
            trainer.forward(micro, part, x)
            trainer.backward(micro, x)
        trainer.step(step, sum(value for _, value in trainer.grad_sumsq()) ** 0.5)
        trainer.synchronize()
        took.append(time.perf_counter() - start)
    return took


def medians(compressed: StageTrainer, whole: Bare, feed: Feed, rounds: int, steps: int) -> dict[str, float]:
    """Returns median seconds of a step of the stage in its chain, of its device jobs and waits, and of the bare stage.

    Both run for some steps first, to compile and record, and then for `rounds` rounds of `steps` steps by turns. The
    first step of each round fills the pipeline, as in a daemon.
    """
    reports: list[StepReport] = []
    alone: list[float] = []
    form = compressed.stage.form
    with Neighbours() as neighbours:
        neighbours.chained(compressed, feed, 1, 3)
        bare(whole, feed.ids, 1, 3, form)
        for turn in range(rounds):
            first = 4 + turn * steps
            reports += neighbours.chained(compressed, feed, first, steps)
            alone += bare(whole, feed.ids, first, steps, form)
    return {
        "step, s": statistics.median(report.seconds for report in reports),
        "of it jobs, s": statistics.median(report.busy_s for report in reports),
        "of it waiting, s": statistics.median(r.wait_forward_s + r.wait_backward_s for r in reports),
        "blocks alone, s": statistics.median(alone),
    }
