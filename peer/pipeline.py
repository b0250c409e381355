"""One stage's part in its replica's inner steps: micro-batches through the chain, one global norm, one optimizer step.

Streams are bidirectional, one per boundary. An inner step, per stage:

    micro-batches   FORWARD  ids, Z  to the next stage        BACKWARD  G U  to the previous one
    gather          NORM     sums of squared gradients, shard by shard, grow from the first to the last stage
                    TOTAL    global norm and mean loss go back; then every stage steps

Both directions are first in, first out, so gradients add up in micro-batch order whatever arrives when: the bits do not
depend on timing. Only the first stage limits how many micro-batches are under way; streams push back by themselves.
NORM and TOTAL carry the wish to stop, so that all stages end after the same inner step. A full replica runs the same
code without neighbours. Tensor work runs on the caller's one worker thread, so a job that outlives a cancelled run
ends before any later one begins.

Frame: header (kind, wire format, step, micro-batch, rows, length, width; big-endian) and body. Every field is known to
the receiver beforehand: whatever differs breaks the chain.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np

from peer import tensors
from peer.net.base import Stream
from peer.trainer import StageTrainer
from protocol import layout
from protocol.errors import LocalError, PotluckError, RemoteError, UsageError
from protocol.framing import MAX_FRAME

T = TypeVar("T")
FORWARD, BACKWARD, NORM, TOTAL, ABORT = range(1, 6)
_HEAD = struct.Struct(">BBIIIII")
_TOTAL = struct.Struct(">Bdd")
_NAME_BYTES = 128
_GOODBYE_S = 1.0


class ChainBroken(RemoteError):
    """A member left, fell silent or sent what cannot be; `peer` is the member to blame, `reason` what it did."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(peer, f"chain member {peer}: {reason}; this round's chain needs a spare in its place")
        self.reason = reason


class StopSign(Protocol):
    """An asyncio.Event or a threading.Event: set to end after the inner step under way."""

    def is_set(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One complete inner step. `loss`: nats per token; `norm`: of the whole replica's gradient, before the clip.

    `tokens`: trained by the whole replica; `busy_s`: seconds of `seconds` in which this stage computed;
    `forward_bytes`, `backward_bytes`: sent to the next and the previous stage, headers included.
    """

    step: int
    loss: float
    norm: float
    tokens: int
    seconds: float
    busy_s: float
    forward_bytes: int
    backward_bytes: int


class _Head(NamedTuple):
    kind: int
    wire: int
    step: int
    micro: int = 0
    rows: int = 0
    length: int = 0
    width: int = 0


class _Link:
    """One neighbour: one frame is sent behind the computation's back; waiting has a limit; bytes are counted."""

    def __init__(self, stream: Stream, group: asyncio.TaskGroup, timeout: float) -> None:
        self.stream, self.sent_bytes = stream, 0
        self._group, self._timeout = group, timeout
        self._sending: asyncio.Task[None] | None = None

    async def send(self, head: _Head, *parts: bytes | memoryview) -> None:
        """Waits for the frame before this one, then returns at once."""
        await self.flush()
        frame = (_HEAD.pack(*head), *parts)
        self.sent_bytes += sum(len(part) for part in frame)
        self._sending = self._group.create_task(self._send(frame))

    async def flush(self) -> None:
        """Waits until all is handed to the transport."""
        if self._sending is not None:
            await self._sending

    async def _send(self, frame: tuple[bytes | memoryview, ...]) -> None:
        try:
            await self.stream.send(*frame, timeout=self._timeout)
        except RemoteError as error:
            self.blame(str(error))

    async def receive(self, expected: _Head, body_bytes: int) -> memoryview:
        """The body of the one frame that may come now. Raises ChainBroken."""
        limit = _HEAD.size + max(body_bytes, _NAME_BYTES)
        try:
            frame = memoryview(await self.stream.recv(limit, timeout=self._timeout))
        except RemoteError as error:
            self.blame(str(error))
        if len(frame) < _HEAD.size:
            self.blame(f"sent a frame of {len(frame)} bytes")
        head, body = _Head(*_HEAD.unpack_from(frame)), frame[_HEAD.size :]
        if head.kind == ABORT:
            name = bytes(body[:_NAME_BYTES]).decode("ascii", "replace")
            if name and name.isalnum():
                raise ChainBroken(name, f"left the chain, says {self.stream.remote}")
            self.blame("left the chain")
        if head != expected or len(body) != body_bytes:
            self.blame(f"sent {head} with {len(body)} bytes, not {expected} with {body_bytes}")
        return body

    def blame(self, reason: str) -> NoReturn:
        raise ChainBroken(self.stream.remote, reason)


class _Run:
    """The state of one call of `run_steps`."""

    def __init__(
        self,
        trainer: StageTrainer,
        worker: Executor,
        wire: str,
        previous: _Link | None,
        following: _Link | None,
        windows: Callable[[int], np.ndarray] | None,
        window: int,
        stop: StopSign | None,
    ) -> None:
        self.trainer, self.worker, self.wire = trainer, worker, wire
        self.previous, self.following = previous, following
        self.windows, self.stop = windows, stop
        self.train, self.vocab = trainer.train, trainer.spec.vocab_size
        self._slots = asyncio.Semaphore(window)
        self._code = list(tensors.WIRES).index(wire)
        self._wire_shape = (self.train.rows, self.train.sequence, trainer.width)
        self._ids_shape = (self.train.rows, self.train.sequence + 1)
        self._wire_bytes = tensors.size(self._wire_shape, wire)
        self._ids_bytes = math.prod(self._ids_shape) * tensors.id_bytes(self.vocab)
        if (following or previous) and (frame := _HEAD.size + self._ids_bytes + self._wire_bytes) > MAX_FRAME:
            raise UsageError(
                f"micro-batch: a frame has {frame} bytes, at most {MAX_FRAME}; the manifest needs fewer rows"
            )
        self._busy_s = 0.0
        self._losses: list[float] = []

    async def job(self, work: Callable[..., T], *args: object) -> T:
        """Runs `work` on the worker thread. What torch raises (no memory left, most often) becomes a LocalError."""

        def timed() -> T:
            start = time.perf_counter()
            try:
                return work(*args)
            except (RuntimeError, MemoryError) as error:
                reason = (str(error).splitlines() or ["out of memory"])[0]
                raise LocalError(f"training: {reason}; lower the resources you offer, or restart") from error
            except tensors.BadTensor as error:
                raise LocalError(f"training: {error}; the run's learning rate may be too high") from error
            finally:
                self._busy_s += time.perf_counter() - start

        return await asyncio.get_running_loop().run_in_executor(self.worker, timed)

    async def step(self, step: int) -> tuple[StepReport, bool]:
        """One inner step, and whether somebody wishes to stop after it."""
        start, sent = time.perf_counter(), self._sent()
        self._busy_s, self._losses = 0.0, []
        async with asyncio.TaskGroup() as group:
            group.create_task(self._forwards(step))
            if self.following is not None:
                group.create_task(self._backwards(step))
        norm, loss, stop = await self._gather(step)
        await self.job(self.trainer.step, step, norm)
        after = self._sent()
        report = StepReport(
            step=step,
            loss=loss,
            norm=norm,
            tokens=self.train.step_tokens,
            seconds=time.perf_counter() - start,
            busy_s=self._busy_s,
            forward_bytes=after[0] - sent[0],
            backward_bytes=after[1] - sent[1],
        )
        return report, stop

    def _sent(self) -> tuple[int, int]:
        following, previous = self.following, self.previous
        return following.sent_bytes if following else 0, previous.sent_bytes if previous else 0

    def _head(self, kind: int, step: int, micro: int) -> _Head:
        return _Head(kind, self._code, step, micro, *self._wire_shape)

    async def _forwards(self, step: int) -> None:
        ids = await self.job(self._first_ids, step) if self.windows is not None else None
        for micro in range(self.train.micro_batches):
            if self.previous is None:
                if self.following is not None:
                    await self._slots.acquire()
                assert ids is not None
                parts = await self.job(self._forward, micro, ids[micro], None)
            else:
                body_bytes = self._ids_bytes + self._wire_bytes
                body = await self.previous.receive(self._head(FORWARD, step, micro), body_bytes)
                raw_ids, raw = body[: self._ids_bytes], body[self._ids_bytes :]
                parts = await self.job(self._forward, micro, raw_ids, raw)
            if self.following is not None:
                await self.following.send(self._head(FORWARD, step, micro), *parts)
            elif self.previous is not None:
                await self.previous.send(self._head(BACKWARD, step, micro), *parts)

    async def _backwards(self, step: int) -> None:
        assert self.following is not None
        for micro in range(self.train.micro_batches):
            raw = await self.following.receive(self._head(BACKWARD, step, micro), self._wire_bytes)
            parts = await self.job(self._backward, micro, raw)
            if self.previous is not None:
                await self.previous.send(self._head(BACKWARD, step, micro), *parts)
            else:
                self._slots.release()

    def _first_ids(self, step: int) -> list[bytes]:
        assert self.windows is not None
        shape = (self.train.step_rows, self.train.sequence + 1)
        ids = tensors.ids_from(self.windows(step), shape, self.vocab, self.trainer.device)
        parts = ids.reshape(self.train.micro_batches, *self._ids_shape)
        return [tensors.encode_ids(part, self.vocab) for part in parts]

    def _forward(
        self, micro: int, raw_ids: bytes | memoryview, raw: memoryview | None
    ) -> tuple[bytes | memoryview, ...]:
        """On the worker: one forward; in the last stage its backward too. Returns the parts of the frame to send."""
        device = self.trainer.device
        try:
            ids = tensors.decode_ids(raw_ids, self._ids_shape, self.vocab, device)
            inward = None if raw is None else tensors.decode(raw, self._wire_shape, self.wire, device)
        except tensors.BadTensor as error:
            assert self.previous is not None
            self.previous.blame(f"sent bad activations: {error}")
        outward = self.trainer.forward(micro, ids, inward)
        if not isinstance(outward, float):
            return raw_ids, tensors.encode(outward, self.wire)
        self._losses.append(outward)
        gradient = self.trainer.backward(micro)
        return () if gradient is None else (tensors.encode(gradient, self.wire),)

    def _backward(self, micro: int, raw: memoryview) -> tuple[bytes, ...]:
        """On the worker: one backward. Returns the parts of the frame to send."""
        try:
            outward = tensors.decode(raw, self._wire_shape, self.wire, self.trainer.device)
        except tensors.BadTensor as error:
            assert self.following is not None
            self.following.blame(f"sent bad gradients: {error}")
        gradient = self.trainer.backward(micro, outward)
        return () if gradient is None else (tensors.encode(gradient, self.wire),)

    async def _gather(self, step: int) -> tuple[float, float, bool]:
        """The replica's gradient norm, its mean loss and the wish to stop, the same on every stage.

        Squares are added shard by shard in canonical order, so the norm does not depend on where the cuts are.
        """
        own = [value for _, value in await self.job(self.trainer.grad_sumsq)]
        stop = self.stop is not None and self.stop.is_set()
        if self.previous is not None:
            before = layout.shard_names(self.trainer.spec).index(self.trainer.shards[0])
            body = await self.previous.receive(self._norm_head(step, before), 1 + 8 * before)
            wish, *values = struct.unpack(f">B{before}d", body)
            if wish > 1 or not all(math.isfinite(v) and v >= 0 for v in values):
                self.previous.blame("sent impossible gradient norms")
            stop, own = stop or wish == 1, values + own
        if self.following is None:
            norm, loss = math.sqrt(sum(own)), sum(self._losses) / len(self._losses)
        else:
            await self.following.send(self._norm_head(step, len(own)), struct.pack(f">B{len(own)}d", stop, *own))
            body = await self.following.receive(_Head(TOTAL, self._code, step), _TOTAL.size)
            wish, norm, loss = _TOTAL.unpack(body)
            if wish > 1 or not (math.isfinite(norm) and math.isfinite(loss) and norm >= 0 and loss >= 0):
                self.following.blame("sent an impossible total")
            stop = wish == 1
        if self.previous is not None:
            await self.previous.send(_Head(TOTAL, self._code, step), _TOTAL.pack(stop, norm, loss))
        return norm, loss, stop

    def _norm_head(self, step: int, count: int) -> _Head:
        return _Head(NORM, self._code, step, width=count)


async def run_steps(
    trainer: StageTrainer,
    worker: Executor,
    *,
    first_step: int,
    steps: int,
    wire: str,
    timeout: float,
    previous: Stream | None = None,
    following: Stream | None = None,
    windows: Callable[[int], np.ndarray] | None = None,
    window: int = 8,
    stop: StopSign | None = None,
    on_step: Callable[[StepReport], None] | None = None,
) -> tuple[StepReport, ...]:
    """Runs inner steps `first_step` .. `first_step + steps - 1` (counted from 1 over the run) of this stage.

    `windows(step)` gives the first stage its integer tokens [micro_batches * rows, L+1]; it is called on the worker
    thread. `window`: most micro-batches under way, used by the first stage. `timeout`: seconds to wait for one frame of a
    neighbour. Returns the complete steps: fewer if `stop` was set on any stage. Streams stay open on success; on any
    failure and on cancellation the neighbours are told and the streams closed. `trainer.steps` counts what was applied
    even then. Raises ChainBroken (names the member) or LocalError.
    """
    if ("embed" in trainer.shards) != (previous is None) or ("head" in trainer.shards) != (following is None):
        raise LocalError(f"stage {trainer.shards[0]}..{trainer.shards[-1]}: wrong neighbours; this is a bug")
    if (windows is None) != (previous is not None) or window < 1:
        raise LocalError("the first stage, and only it, needs token windows and a window of at least 1; this is a bug")
    streams = [stream for stream in (previous, following) if stream is not None]
    reports: list[StepReport] = []
    try:
        async with asyncio.TaskGroup() as group:
            links = [None if s is None else _Link(s, group, timeout) for s in (previous, following)]
            run = _Run(trainer, worker, wire, links[0], links[1], windows, window, stop)
            await run.job(trainer.reset)
            for step in range(first_step, first_step + steps):
                report, stopping = await run.step(step)
                reports.append(report)
                if on_step is not None:
                    on_step(report)
                if stopping:
                    break
            for link in links:
                if link is not None:
                    await link.flush()
    except BaseExceptionGroup as failures:
        error = _worst(failures)
        await _leave(streams, error.peer if isinstance(error, ChainBroken) else "")
        raise error from None
    except BaseException:
        await _leave(streams, "")
        raise
    return tuple(reports)


def _worst(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error to report: bugs and our own failures before a neighbour's, which they may have caused."""
    leaves: list[BaseException] = []
    todo: list[BaseException] = [failures]
    while todo:
        item = todo.pop(0)
        if isinstance(item, BaseExceptionGroup):
            todo.extend(item.exceptions)
        else:
            leaves.append(item)
    return min(leaves, key=lambda error: isinstance(error, ChainBroken))


async def _leave(streams: list[Stream], blamed: str) -> None:
    """Tells the neighbours who is to blame (nobody: this member), then closes; neither may hold us up."""

    async def leave(stream: Stream) -> None:
        with contextlib.suppress(PotluckError, TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                if stream.remote != blamed:
                    name = blamed.encode("ascii", "replace")[:_NAME_BYTES]
                    await stream.send(_HEAD.pack(*_Head(ABORT, 0, 0)), name)
                    await stream.finish()
                    await stream.close()  # after finish: waits until the goodbye was read
        await stream.close()

    await asyncio.gather(*(leave(stream) for stream in streams), return_exceptions=True)
