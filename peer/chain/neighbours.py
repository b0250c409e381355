"""A stage's neighbours: the links to both, and the tensors that cross them.

A tensor is encoded, and decoded, on a thread of its boundary while the model computes; on a GPU, on a stream of its own. It travels with
the checksum of its micro-batch's token ids: every stage knows the ids from the data assignment, so peers with different text notice it at once.
What came in is screened before it is computed with (peer/chain/screening.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.chain import activation_stats, quantize
from peer.chain.activation_stats import Measure, Running, Statistics
from peer.chain.frames import BACKWARD, FORWARD, HEAD_BYTES, Frame, Head, Refused
from peer.chain.link import Link, Liveness
from peer.chain.screening import Sample, Screen, log_rms
from peer.net.base import Stream
from protocol.codec import formats
from protocol.errors import LocalError, UsageError
from protocol.round.accusations import LIES
from protocol.wire.framing import MAX_FRAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """What crosses a chain's boundaries. `shape`: of a micro-batch's values [rows, tokens, width]; `wires`: the number format of each
    kind of frame; `micro_batches`: of an inner step; `most_depth`: how many of them this stage holds at most; `most_bytes`: of the
    other frames' bodies; `form`: the number format in which this stage, on `device`, wants what came in."""

    shape: tuple[int, int, int]
    wires: dict[int, str]
    micro_batches: int
    most_depth: int
    most_bytes: int
    device: torch.device
    form: torch.dtype


class Neighbours:
    """The previous and the following stage, None where there is none. `arrived` is set whenever anything comes, or breaks.

    `depth`: how many micro-batches may be under way. The first stage sets it, the others take it from what they get. `checks`: the
    checksums of this inner step's micro-batches. `screens`: by the kind of frame; nothing is screened where there is none.
    """

    def __init__(self, crossing: Crossing, codec: Executor, statistics: Statistics, depth: int) -> None:
        self.previous: Link | None = None
        self.following: Link | None = None
        self.arrived = asyncio.Event()
        self.depth = depth
        self.checks: Sequence[int] = ()
        self.screens: dict[int, Screen] = {}
        self._ids: Sequence[NDArray[np.int64]] = ()
        self._sizes_sent: dict[int, float] = {}  # of activations, by micro-batch: what comes back is judged by them
        self._crossing, self._codec, self._statistics = crossing, codec, statistics
        self._codes = {kind: formats.FORMATS.index(wire) for kind, wire in crossing.wires.items()}
        self._sizes = {kind: quantize.size(crossing.shape, wire) for kind, wire in crossing.wires.items()}
        self._decoded = dict.fromkeys(crossing.wires, 0)
        self._beside = torch.cuda.Stream(crossing.device, priority=-1) if crossing.device.type == "cuda" else None

    @property
    def links(self) -> list[Link]:
        """Those that there are."""
        return [link for link in (self.previous, self.following) if link is not None]

    def connect(self, stream: Stream, group: asyncio.TaskGroup, timeout: float, liveness: Liveness) -> Link:
        """A link that takes what this stage may be sent. Raises UsageError if a micro-batch is too large for a frame."""
        if (frame := HEAD_BYTES + max(self._sizes.values())) > MAX_FRAME:
            raise UsageError(
                f"micro-batch: a frame has {frame} bytes, at most {MAX_FRAME}; the manifest needs fewer rows"
            )
        limit = max(*self._sizes.values(), self._crossing.most_bytes)
        queue = min(self._crossing.micro_batches, self._crossing.most_depth) + 1
        return Link(
            stream, group, self.arrived, self._decode, queue=queue, limit=limit, timeout=timeout, liveness=liveness
        )

    def begin_step(self, checks: Sequence[int], ids: Sequence[NDArray[np.int64]]) -> None:
        """The token ids [B, L+1] of the step's micro-batches and their checksums are known."""
        self.checks, self._ids = checks, ids

    def end_step(self, rate: float) -> None:
        """The step was taken with this learning rate."""
        for screen in self.screens.values():
            screen.follow(rate)

    # --- waiting

    def check(self) -> None:
        """Raises what broke a link. Nothing that came before it is of use to a stage that has to wait."""
        for link in self.links:
            if link.failed is not None:
                raise link.failed

    async def wait(self, owing: Link | None) -> None:
        """Waits for anything to come. If nothing does, raises NeighbourLost in the name of the neighbour who owes it."""
        assert owing is not None
        self.check()
        try:
            async with asyncio.timeout(min(link.timeout for link in self.links)):
                await self.arrived.wait()
        except TimeoutError:
            owing.silent()

    async def receive(self, link: Link, expected: Head, body_bytes: int | None) -> Frame:
        """The one frame of `link` that may come now. `body_bytes`: its length, None for any. Raises NeighbourLost, also where the other
        link broke."""
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
            found: tuple[Tensor, Measure, Sample | None] | quantize.BadTensor = await frame.value
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
        most = self._crossing.most_depth
        if head.check != self.checks[micro]:
            link.refuse("trains on other text; all peers of a run need the same files")
        if not 1 <= head.depth <= most:
            link.refuse(f"lets {head.depth} micro-batches under way, this stage holds {most}")
        self.depth = head.depth

    def send(self, link: Link | None, kind: int, step: int, micro: int, values: Tensor | None) -> None:
        """Has the tensor encoded, and sends it in its turn; without a link nothing happens."""
        if link is not None:
            body = asyncio.get_running_loop().run_in_executor(self._codec, self._encoded, kind, micro, values)
            link.send(self._head(kind, step, micro), body, self._sizes[kind])

    def running(self, link: Link, kind: int) -> Running:
        """The statistics of what comes from a neighbour."""
        return self._statistics.of(link.stream.remote, kind, self._crossing.shape[-1])

    def _head(self, kind: int, step: int, micro: int) -> Head:
        check = self.checks[micro] if kind == FORWARD else 0
        return Head(kind, self._codes[kind], self.depth, step, micro, *self._crossing.shape, check)

    def _encoded(self, kind: int, micro: int, values: Tensor) -> bytes:
        back = self.screens.get(BACKWARD) if kind == FORWARD else None
        try:
            with self._stream():  # the values are there: a job's end is told when the device has done it
                if back is not None:
                    self._sizes_sent[micro] = log_rms(back.sample(values))
                return quantize.encode(values, self._crossing.wires[kind])
        except quantize.BadTensor as error:
            for screen in self.screens.values():  # lies may make anything
                if screen.doubt is not None:
                    raise Refused(screen.neighbour, f"{LIES}{screen.doubt}, {error}") from error
            raise LocalError(f"training: {error}; the run's learning rate may be too high") from error

    def _decode(
        self, kind: int, body: memoryview
    ) -> Awaitable[tuple[Tensor, Measure, Sample | None] | quantize.BadTensor]:
        """Begins to decode."""
        crossing, screen = self._crossing, self.screens.get(kind)
        what = crossing.shape, crossing.wires[kind], crossing.device, crossing.form
        nth, self._decoded[kind] = self._decoded[kind], self._decoded[kind] + 1

        def decode() -> tuple[Tensor, Measure, Sample | None] | quantize.BadTensor:
            try:
                with self._stream():
                    x, largest = quantize.decode_measured(body, *what)
                    sample = screen.sample(x) if screen is not None else None
                    measured = activation_stats.measure(x, largest, nth)
            except quantize.BadTensor as error:
                return error
            if self._beside is not None:
                # else its memory would be given away while the model still reads it
                x.record_stream(torch.cuda.default_stream(crossing.device))
            return x, measured, sample

        return asyncio.get_running_loop().run_in_executor(self._codec, decode)

    def _stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._beside is None else torch.cuda.stream(self._beside)
