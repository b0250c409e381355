"""A stage's blocks as CUDA graphs: what takes Python milliseconds to launch is launched with one call.

A GPU is done with some blocks in 15 ms, and Python takes as long to launch them, longer where other threads want its lock, too. So a
micro-batch's way through the blocks is recorded once, forward and backward, and replayed for all others of that shape. A recording reads and
writes the same memory each time, so each micro-batch between its forward and its backward has one of its own: a slot.

*Memory.* A slot keeps, all the time, what a micro-batch keeps for its backward, and what a forward needs besides. What a backward needs
besides all slots have in common, since they are replayed one after the other. Blocks go backward one at a time, so that the gradients of one
block at most exist beside their sums.

*When.* After an inner step without it: by then everything is compiled. Where memory runs out nothing is recorded before the next round.

The embedding, what goes to neighbours and comes from them, the head and its loss are not recorded.

Shapes: B rows, L positions, D model width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from peer.training import compiled
from peer.training.model import Stage
from protocol.run import layout

Recorded = tuple[Tensor, Callable[[], object]]
"""The result of some work, and what replays the work, which makes the result anew in the same place."""


class Recording(Protocol):
    """A device that can record. Both methods raise RuntimeError."""

    def rehearse(self, ahead: Callable[[], Tensor], back: Callable[[], Tensor], /) -> None:
        """Does all of it once, in the place where it will be recorded: what is first used may do what cannot be."""

    def record(
        self, ahead: Callable[[], Tensor], back: Callable[[], Tensor], several: bool, /
    ) -> tuple[Recorded, Recorded]:
        """Both; `back` goes on from `ahead`. `several`: there may be more of them at once."""


_one_at_a_time = threading.Lock()
"""What one thread waits for, on all of a device, would break another's recording off."""


class Graphs:
    """A device with CUDA's graphs."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._common = torch.cuda.graph_pool_handle()

    def rehearse(self, ahead: Callable[[], Tensor], back: Callable[[], Tensor]) -> None:
        """See Recording."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            ahead()
            back()

    def record(
        self, ahead: Callable[[], Tensor], back: Callable[[], Tensor], several: bool
    ) -> tuple[Recorded, Recorded]:
        """See Recording."""
        with _one_at_a_time:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # a recording has memory of its own
            own = torch.cuda.graph_pool_handle()
            try:
                return self._captured(ahead, own), self._captured(back, self._common if several else own)
            except BaseException:
                # torch takes it for one that goes on, and would refuse whoever draws random numbers, as the compiler does
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
    """`x` [B, L, D] goes into the blocks, `y` comes out of them; `mask`: which tokens see each other, where a model asks that. `gradient` [B, L, D] is that
    of y, in one place for all slots, and `inward` that of x; all in the stage's number format. `ahead` makes y of x, `back` makes inward of gradient and adds those of the parameters to
    their sums."""

    x: Tensor
    mask: Tensor | None
    y: Tensor
    gradient: Tensor
    inward: Tensor
    ahead: Callable[[], object]
    back: Callable[[], object]
    sums: list[tuple[Parameter, Tensor]]


class Recorder:
    """The slots of a stage. Belongs to the thread that computes. `records`: None where nothing is recorded, as of a whole model, which computes
    for so long that launching it takes less time."""

    def __init__(
        self,
        stage: Stage,
        autocast: Callable[[], AbstractContextManager[object]],
        records: Callable[[torch.device], Recording] | None,
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
        """Frees what nobody has taken, and records nothing from now on."""
        self.on = False
        self._forget()

    def reset(self) -> None:
        """All slots are free."""
        self._free = list(self._slots)

    def take(self, ids_BL: Tensor) -> Slot | None:
        """One for a micro-batch of these ids, until `give`, with its mask; None where there is none."""
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
        """Its micro-batch needs it no more."""
        if slot in self._slots:
            self._free.append(slot)

    def back(self, slot: Slot) -> None:
        """The slot's backward, wherever the parameters' gradients were before."""
        none_yet = []
        for parameter, total in slot.sums:
            if parameter.grad is None:
                none_yet.append(total)
            elif parameter.grad is not total:
                total.copy_(parameter.grad)
            parameter.grad = total
        if none_yet:
            torch._foreach_zero_(none_yet)
        slot.back()
        torch.autograd.graph.increment_version([total for _, total in slot.sums])

    def _add(self, device: Recording, shape: tuple[int, ...], mask: Tensor | None) -> bool:
        """Whether there is one slot more. There is none where a block was not called as it is compiled, since some thread was compiling: later there may be."""
        before = compiled.as_they_are()
        try:
            slot = self._recorded(device, shape, mask)
        except (RuntimeError, MemoryError):
            self.drop()
            return False
        if compiled.as_they_are() != before:
            return False
        self._shape = shape
        self._slots.append(slot)
        self._free.append(slot)
        return True

    def _recorded(self, device: Recording, shape: tuple[int, ...], mask_like: Tensor | None) -> Slot:
        if self._slots:
            sums, gradient_BLD = self._slots[0].sums, self._slots[0].gradient
        else:
            sums = [(p, torch.zeros_like(p)) for block in self._blocks for p in self._parameters(block)]
            gradient_BLD = torch.zeros(shape, dtype=self._stage.form, device=sums[0][1].device)
        total_of, x_BLD = dict(sums), torch.zeros_like(gradient_BLD)
        mask = None if mask_like is None else torch.zeros_like(mask_like)
        passed: list[tuple[int, Tensor, Tensor]] = []

        def ahead() -> Tensor:
            passed.clear()
            with torch.enable_grad(), self._autocast():
                out_BLD = x_BLD
                for block in self._blocks:
                    in_BLD = out_BLD.detach().requires_grad_()
                    out_BLD = self._stage.block(block, in_BLD, mask)
                    passed.append((block, in_BLD, out_BLD))
            return out_BLD.detach()

        def back() -> Tensor:
            towards_BLD = gradient_BLD
            while passed:
                block, in_BLD, out_BLD = passed.pop()
                held = self._parameters(block)
                towards_BLD, *found = torch.autograd.grad(out_BLD, (in_BLD, *held), towards_BLD)
                torch._foreach_add_([total_of[parameter] for parameter in held], found)
            return towards_BLD

        if not self._slots:
            device.rehearse(ahead, back)
        (y_BLD, forward), (inward_BLD, backward) = device.record(ahead, back, not self._stage.has_head)
        return Slot(x_BLD, mask, y_BLD, gradient_BLD, inward_BLD, forward, backward, sums)

    def _parameters(self, block: int) -> list[Parameter]:
        return list(self._stage.model.layers[str(block)].parameters())  # type: ignore[index, union-attr]
