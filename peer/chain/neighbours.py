"""A stage's neighbours: the links to both, the tensors that cross them, and statistics of what comes.

A tensor is encoded, and decoded, on a thread of its boundary while the model computes; on a GPU, on a stream of its
own. It travels with the checksum of its micro-batch's token ids, and is screened before the model uses it
(peer/chain/screening.py). Over the values x of the n-th accepted frame of a neighbour, direction and width:

    largest = max |x|           of every frame
    rms = sqrt(mean of x²)      of every RMS_EVERY-th frame
    m += (value - m) / min(n, MEAN_FRAMES)
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.chain import quantize
from peer.chain.frames import BACKWARD, FORWARD, HEAD_BYTES, Frame, Head, Refused
from peer.chain.link import Link, Liveness
from peer.chain.screening import Sample, Screen, log_rms
from peer.net.base import Stream
from protocol.codec import formats
from protocol.errors import LocalError, UsageError
from protocol.round.accusations import LIES
from protocol.wire.framing import MAX_FRAME

RMS_EVERY = 8
MEAN_FRAMES = 64
MOST_BOUNDARIES = 16


class Measure(NamedTuple):
    """Of one frame's values; `rms` is None where it was not computed."""

    largest: float
    rms: float | None


def measure(x: Tensor, largest: float, nth: int) -> Measure:
    """Of the `nth` frame, from 0; `x` is not empty, and `largest` its largest magnitude (quantize.decode_measured)."""
    if nth % RMS_EVERY:
        return Measure(largest, None)
    flat = x.flatten().float()
    return Measure(largest, math.sqrt(torch.dot(flat, flat).item() / flat.numel()))


@dataclass(slots=True)
class Running:
    """Means of `rms` over `sampled` frames, and of `largest` over `frames`, all that were accepted; and `refused`
    frames."""

    rms: float = 0.0
    largest: float = 0.0
    sampled: int = 0
    frames: int = 0
    refused: int = 0

    def add(self, seen: Measure) -> None:
        """Adds an accepted frame."""
        self.frames += 1
        self.largest += (seen.largest - self.largest) / min(self.frames, MEAN_FRAMES)
        if seen.rms is not None:
            self.sampled += 1
            self.rms += (seen.rms - self.rms) / min(self.sampled, MEAN_FRAMES)


class Statistics:
    """Of all boundaries of a peer."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, int, int], Running] = {}

    def of(self, neighbour: str, kind: int, width: int) -> Running:
        key = (neighbour, kind, width)
        if key not in self._running and len(self._running) >= MOST_BOUNDARIES:
            del self._running[next(iter(self._running))]
        return self._running.setdefault(key, Running())


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundarySpec:
    """The frames that cross a chain's boundaries.

    shape: of a micro-batch's values [rows, tokens, width].
    wires: the number format of each kind of frame.
    micro_batches: of an inner step.
    most_depth: micro-batches that this stage holds at most.
    most_bytes: of the bodies of other frames.
    device, form: of the decoded values.
    """

    shape: tuple[int, int, int]
    wires: dict[int, str]
    micro_batches: int
    most_depth: int
    most_bytes: int
    device: torch.device
    form: torch.dtype


Decoded = tuple[Tensor, Measure, Sample | None] | quantize.BadTensor


class Neighbours:
    """The previous and the following stage, None where there is none.

    arrived: set whenever a frame comes, or a link breaks.
    depth: micro-batches under way; the first stage sets it, the others take it from activations.
    checks: the checksums of this step's micro-batches.
    screens: by the kind of frame; frames of other kinds are not screened.
    """

    def __init__(self, spec: BoundarySpec, codec: Executor, statistics: Statistics, depth: int) -> None:
        self.previous: Link | None = None
        self.following: Link | None = None
        self.arrived = asyncio.Event()
        self.depth = depth
        self.checks: Sequence[int] = ()
        self.screens: dict[int, Screen] = {}
        self._ids: Sequence[NDArray[np.int64]] = ()
        self._sizes_sent: dict[int, float] = {}  # of activations, by micro-batch: gradients are judged by them
        self._spec, self._codec, self._statistics = spec, codec, statistics
        self._codes = {kind: formats.FORMATS.index(wire) for kind, wire in spec.wires.items()}
        self._sizes = {kind: quantize.size(spec.shape, wire) for kind, wire in spec.wires.items()}
        self._decoded = dict.fromkeys(spec.wires, 0)
        self._gpu_stream = torch.cuda.Stream(spec.device, priority=-1) if spec.device.type == "cuda" else None

    @property
    def links(self) -> list[Link]:
        """The existing links."""
        return [link for link in (self.previous, self.following) if link is not None]

    def connect(self, stream: Stream, group: asyncio.TaskGroup, timeout: float, liveness: Liveness) -> Link:
        """A link for this stage's frames. Raises UsageError if a micro-batch is too large for a frame."""
        if (frame := HEAD_BYTES + max(self._sizes.values())) > MAX_FRAME:
            raise UsageError(
                f"micro-batch: a frame has {frame} bytes, at most {MAX_FRAME}; the manifest needs fewer rows"
            )
        limit = max(*self._sizes.values(), self._spec.most_bytes)
        queue = min(self._spec.micro_batches, self._spec.most_depth) + 1
        return Link(
            stream, group, self.arrived, self._decode, queue=queue, limit=limit, timeout=timeout, liveness=liveness
        )

    def begin_step(self, checks: Sequence[int], ids: Sequence[NDArray[np.int64]]) -> None:
        """Sets the token ids [B, L+1] of the step's micro-batches, and their checksums."""
        self.checks, self._ids = checks, ids

    def end_step(self, rate: float) -> None:
        """The step was taken with this learning rate."""
        for screen in self.screens.values():
            screen.follow(rate)

    # --- waiting

    def check(self) -> None:
        """Raises what broke a link: a stage that has to wait cannot use the frames before it."""
        for link in self.links:
            if link.failed is not None:
                raise link.failed

    async def wait(self, owing: Link | None) -> None:
        """Waits for a frame. After the timeout raises NeighbourLost in the name of the owing neighbour."""
        assert owing is not None
        self.check()
        try:
            async with asyncio.timeout(min(link.timeout for link in self.links)):
                await self.arrived.wait()
        except TimeoutError:
            owing.silent()

    async def receive(self, link: Link, expected: Head, body_bytes: int | None) -> Frame:
        """The expected frame of `link`, whose body has `body_bytes` bytes (None: any). Raises NeighbourLost, also for
        the other link."""
        try:
            async with asyncio.timeout(link.timeout):
                while not link.ready:
                    self.arrived.clear()
                    self.check()
                    await self.arrived.wait()
        except TimeoutError:
            link.silent()
        return link.take(expected, body_bytes)

    # --- tensors

    async def take(self, link: Link, kind: int, step: int, micro: int) -> Tensor:
        """A micro-batch's tensor from a neighbour, checked. Raises NeighbourLost."""
        running = self.running(link, kind)
        try:
            frame = await self.receive(link, self._head(kind, step, micro), self._sizes[kind])
            if kind == FORWARD:
                self._take_depth(link, frame.head, micro)
            assert frame.value is not None
            found: Decoded = await frame.value
            if isinstance(found, quantize.BadTensor):
                link.refuse(f"sent bad {'activations' if kind == FORWARD else 'gradients'}: {found}")
            value, seen, sample = found
            own = self._sizes_sent.get(micro, 0.0) if kind == BACKWARD else 0.0
            why = self.screens[kind].judge(sample, self._ids[micro], own) if sample is not None else None
            if why is not None:
                link.refuse(LIES + why)
        except Refused:
            running.refused += 1
            raise
        running.add(seen)
        return value

    def _take_depth(self, link: Link, head: Head, micro: int) -> None:
        most = self._spec.most_depth
        if head.check != self.checks[micro]:
            link.refuse("trains on other text; all peers of a run need the same files")
        if not 1 <= head.depth <= most:
            link.refuse(f"lets {head.depth} micro-batches under way, this stage holds {most}")
        self.depth = head.depth

    def send(self, link: Link | None, kind: int, step: int, micro: int, values: Tensor | None) -> None:
        """Queues the tensor for encoding and sending; without a link does nothing."""
        if link is not None:
            body = asyncio.get_running_loop().run_in_executor(self._codec, self._encoded, kind, micro, values)
            link.send(self._head(kind, step, micro), body, self._sizes[kind])

    def running(self, link: Link, kind: int) -> Running:
        """The statistics of a neighbour's frames."""
        return self._statistics.of(link.stream.remote, kind, self._spec.shape[-1])

    def _head(self, kind: int, step: int, micro: int) -> Head:
        check = self.checks[micro] if kind == FORWARD else 0
        return Head(kind, self._codes[kind], self.depth, step, micro, *self._spec.shape, check)

    def _encoded(self, kind: int, micro: int, values: Tensor) -> bytes:
        back = self.screens.get(BACKWARD) if kind == FORWARD else None
        try:
            with self._stream():  # the values are there: the device has ended the job
                if back is not None:
                    self._sizes_sent[micro] = log_rms(back.sample(values))
                return quantize.encode(values, self._spec.wires[kind])
        except quantize.BadTensor as error:
            for screen in self.screens.values():  # a lie may have made it
                if screen.doubt is not None:
                    raise Refused(screen.neighbour, f"{LIES}{screen.doubt}, {error}") from error
            raise LocalError(f"training: {error}; the run's learning rate may be too high") from error

    def _decode(self, kind: int, body: memoryview) -> Awaitable[Decoded]:
        spec, screen = self._spec, self.screens.get(kind)
        what = spec.shape, spec.wires[kind], spec.device, spec.form
        nth, self._decoded[kind] = self._decoded[kind], self._decoded[kind] + 1

        def decode() -> Decoded:
            try:
                with self._stream():
                    x, largest = quantize.decode_measured(body, *what)
                    sample = screen.sample(x) if screen is not None else None
                    measured = measure(x, largest, nth)
            except quantize.BadTensor as error:
                return error
            if self._gpu_stream is not None:
                # else its memory would be reused while the model reads it
                x.record_stream(torch.cuda.default_stream(spec.device))
            return x, measured, sample

        return asyncio.get_running_loop().run_in_executor(self._codec, decode)

    def _stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._gpu_stream is None else torch.cuda.stream(self._gpu_stream)
