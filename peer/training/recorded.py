"""A stage's blocks as CUDA graphs: one call launches what takes Python milliseconds to launch.

A micro-batch's forward and backward through the blocks are recorded once and replayed for all others of that shape. A
replay reads and writes the same memory each time, so each micro-batch between its forward and its backward needs a
recording of its own: a slot, which permanently holds a micro-batch's activations, and a forward's scratch. All slots
share the backward's scratch. Recording begins after an inner step without it, when everything is compiled; where memory
runs out, not before the next round.

Shapes: B rows, L positions, D model width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from peer.training import compiled
from peer.training.model import Stage
from protocol.run import layout

Recorded = tuple[Tensor, Callable[[], object]]
"""The result of some work, and a call that replays the work into the same memory."""


_one_at_a_time = threading.Lock()
"""A thread that waits for the whole device would break off another's recording."""


class Graphs:
    """Records work on a CUDA device as graphs. Methods raise RuntimeError."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._common = torch.cuda.graph_pool_handle()

    def rehearse(self, forward: Callable[[], Tensor], backward: Callable[[], Tensor]) -> None:
        """Runs both once on the recording stream: a first run may do what cannot be recorded."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            forward()
            backward()

    def record(
        self, forward: Callable[[], Tensor], backward: Callable[[], Tensor], several: bool
    ) -> tuple[Recorded, Recorded]:
        """Records both; `backward` uses the activations of `forward`. `several`: more recordings may exist at once."""
        with _one_at_a_time:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # a recording has memory of its own
            own = torch.cuda.graph_pool_handle()
            try:
                return self._captured(forward, own), self._captured(backward, self._common if several else own)
            except BaseException:
                # torch believes that it goes on, and would refuse random numbers, which the compiler draws
                numbers = torch.cuda.default_generators[torch.cuda.current_device()]
                numbers.graphsafe_set_state(numbers.clone_state())
                raise

    def _captured(self, work: Callable[[], Tensor], pool: object) -> Recorded:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # other threads go on with what they do on the device
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        return result, graph.replay


@dataclass(slots=True, eq=False)
class Slot:
    """A recording, in the stage's number format.

    x, y: input and output of the blocks [B, L, D].
    mask: of attention, where the model has document ends.
    gradient, inward: of y, the same memory for all slots, and of x.
    forward: makes y from x.
    backward: makes inward from gradient, and adds the parameters' gradients to their sums.
    """

    x: Tensor
    mask: Tensor | None
    y: Tensor
    gradient: Tensor
    inward: Tensor
    forward: Callable[[], object]
    backward: Callable[[], object]
    sums: list[tuple[Parameter, Tensor]]


class Recorder:
    """The slots of a stage; belongs to the thread that computes.

    on: whether micro-batches get slots.
    records: makes what records; None: nothing does. A whole model computes so long that its launch does not count.
    """

    def __init__(
        self,
        stage: Stage,
        autocast: Callable[[], AbstractContextManager[object]],
        records: Callable[[torch.device], Graphs] | None,
    ) -> None:
        self._stage, self._autocast = stage, autocast
        self._blocks = [layout.block_index(shard) for shard in stage.shards if shard.startswith("block.")]
        is_recorded = self._blocks and not (stage.has_embed and stage.has_head)
        self._device = records(next(stage.parameters()).device) if records is not None and is_recorded else None
        self.on = False
        self._forget()

    def _forget(self) -> None:
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._shape: tuple[int, ...] | None = None

    def drop(self) -> None:
        """Frees all slots that are not in use, and records no more."""
        self.on = False
        self._forget()

    def reset(self) -> None:
        self._free = list(self._slots)

    def take(self, ids_BL: Tensor) -> Slot | None:
        """A slot for a micro-batch of these ids, with its mask, until `give`; None: call the blocks."""
        if not self.on or self._device is None:
            return None
        shape, mask = (*ids_BL.shape, self._stage.spec.d_model), self._stage.mask(ids_BL)
        if (mask is None) != (self._stage.spec.document_end_id < 0) or shape != (self._shape or shape):
            return None
        if not self._free and not self._add(self._device, shape, mask):
            return None
        slot = self._free.pop()
        if slot.mask is not None and mask is not None:
            slot.mask.copy_(mask)
        return slot

    def give(self, slot: Slot) -> None:
        """Frees the slot for other micro-batches."""
        if slot in self._slots:
            self._free.append(slot)

    def backward(self, slot: Slot) -> None:
        """The slot's backward; moves the parameters' gradients into its sums."""
        none_yet = []
        for parameter, total in slot.sums:
            if parameter.grad is None:
                none_yet.append(total)
            elif parameter.grad is not total:
                total.copy_(parameter.grad)
            parameter.grad = total
        if none_yet:
            torch._foreach_zero_(none_yet)
        slot.backward()
        torch.autograd.graph.increment_version([total for _, total in slot.sums])

    def _add(self, device: Graphs, shape: tuple[int, ...], mask: Tensor | None) -> bool:
        """Returns whether a slot was added. Not while another thread compiles, when blocks run uncompiled."""
        before = compiled.uncompiled_calls()
        try:
            slot = self._recorded(device, shape, mask)
        except (RuntimeError, MemoryError):
            self.drop()
            return False
        if compiled.uncompiled_calls() != before:
            return False
        self._shape = shape
        self._slots.append(slot)
        self._free.append(slot)
        return True

    def _recorded(self, device: Graphs, shape: tuple[int, ...], mask_like: Tensor | None) -> Slot:
        if self._slots:
            sums, gradient_BLD = self._slots[0].sums, self._slots[0].gradient
        else:
            sums = [(p, torch.zeros_like(p)) for block in self._blocks for p in self._held(block)]
            gradient_BLD = torch.zeros(shape, dtype=self._stage.form, device=sums[0][1].device)
        total_of, x_BLD = dict(sums), torch.zeros_like(gradient_BLD)
        mask = None if mask_like is None else torch.zeros_like(mask_like)
        passed: list[tuple[int, Tensor, Tensor]] = []

        def forward() -> Tensor:
            passed.clear()
            with torch.enable_grad(), self._autocast():
                out_BLD = x_BLD
                for block in self._blocks:
                    in_BLD = out_BLD.detach().requires_grad_()
                    out_BLD = self._stage.block(block, in_BLD, mask)
                    passed.append((block, in_BLD, out_BLD))
            return out_BLD.detach()

        def backward() -> Tensor:
            towards_BLD = gradient_BLD
            while passed:
                block, in_BLD, out_BLD = passed.pop()
                held = self._held(block)
                towards_BLD, *found = torch.autograd.grad(out_BLD, (in_BLD, *held), towards_BLD)
                torch._foreach_add_([total_of[parameter] for parameter in held], found)
            return towards_BLD

        if not self._slots:
            device.rehearse(forward, backward)
        (y_BLD, replay), (inward_BLD, replay_backward) = device.record(forward, backward, not self._stage.has_head)
        return Slot(x_BLD, mask, y_BLD, gradient_BLD, inward_BLD, replay, replay_backward, sums)

    def _held(self, block: int) -> list[Parameter]:
        return list(self._stage.parameters_of(f"block.{block}").values())
