"""Forward and backward of one micro-batch.

Shapes: B rows, L positions, D model width, W values per token at the boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from peer.training.model import Stage
from peer.training.recorded import Graphs, Recorder, Slot


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a micro-batch is computed from.

    ids: token ids [B, L+1].
    wire: values from the previous stage [B, L, W]; None in the first stage.
    """

    ids: Tensor
    wire: Tensor | None


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A micro-batch between its forward and its backward.

    outward: what the stage made; None: the backward computes the forward again.
    inward: the leaf whose gradient goes to the previous stage, or into the embedding.
    slot: where its blocks were replayed (peer/training/recorded.py); None: they were called.
    between: input of the head behind a replay.
    """

    inputs: Inputs
    outward: Tensor | None = None
    inward: Tensor | None = None
    slot: Slot | None = None
    between: Tensor | None = None


class MicroBatches:
    """Computes the micro-batches of a stage."""

    def __init__(
        self,
        stage: Stage,
        autocast: Callable[[], AbstractContextManager[object]],
        records: Callable[[torch.device], Graphs] | None,
    ) -> None:
        self._stage = stage
        self._autocast = autocast
        self._recorder = Recorder(stage, autocast, records)
        self._stepped = False

    def begin_round(self) -> None:
        self._recorder.on = self._stepped

    def end_round(self) -> None:
        """Frees the memory of recordings."""
        self._recorder.drop()

    def stepped(self) -> None:
        """An inner step was taken: everything is compiled, and blocks may be recorded."""
        self._stepped = self._recorder.on = True

    def reset(self) -> None:
        """Drops all micro-batches between their forward and their backward."""
        self._recorder.reset()

    # --- forward

    def forward(self, inputs: Inputs, *, recompute: bool) -> tuple[Forwarded, Tensor]:
        """The forward, and its output: the mean loss [] in the last stage.

        recompute: keep the inputs only.
        """
        # on CUDA what is compiled without gradients is other code than with them: it may give other bits
        with torch.set_grad_enabled(not recompute or self._stage.device.type == "cuda"):
            found = self._forward(inputs)
        assert found.outward is not None
        if recompute and found.slot is not None:
            self._recorder.give(found.slot)
        return Forwarded(inputs) if recompute else found, found.outward.detach()

    def _forward(self, inputs: Inputs) -> Forwarded:
        stage, ids_BL = self._stage, inputs.ids[:, :-1]
        with self._autocast():
            slot = self._recorder.take(ids_BL)
        if slot is not None:
            return self._replay(inputs, slot)
        inward = self._expanded(inputs)
        with self._autocast():
            outward = stage(ids_BL, stage.embed(ids_BL) if inward is None else inward)
            if stage.has_head:
                outward = stage.loss(outward, inputs.ids[:, 1:])
        return Forwarded(inputs, outward, inward)

    def _replay(self, inputs: Inputs, slot: Slot) -> Forwarded:
        """A forward with recorded blocks."""
        stage, ids_BL, inward = self._stage, inputs.ids[:, :-1], None
        if inputs.wire is None:
            with self._autocast():
                inward = stage.embed(ids_BL)
            slot.x.copy_(inward.detach())
        elif stage.boundary is not None:
            stage.boundary.expand(inputs.wire, ids_BL, slot.x)
        else:
            slot.x.copy_(inputs.wire)
        slot.forward()
        if not stage.has_head:  # y may still be on its way to the next stage when the slot is used again
            return Forwarded(inputs, slot.y if stage.boundary is not None else slot.y.clone(), inward, slot)
        between = slot.y.detach().requires_grad_()
        with self._autocast():
            outward = stage.loss(between, inputs.ids[:, 1:])
        return Forwarded(inputs, outward, inward, slot, between)

    def _expanded(self, inputs: Inputs) -> Tensor | None:
        boundary = self._stage.boundary
        if inputs.wire is None:
            return None
        x_BLD = boundary.expand(inputs.wire, inputs.ids[:, :-1]) if boundary is not None else inputs.wire
        return x_BLD.detach().requires_grad_()

    # --- backward

    def backward(self, found: Forwarded, gradient: Tensor | None, of: int) -> Tensor | None:
        """Adds the gradients of one micro-batch. Returns that of its inputs [B, L, D], None in the first stage.

        gradient: of the output [B, L, D]; None in the last stage.
        of: micro-batches of the step, over which the loss is the mean.
        """
        found = self._forward(found.inputs) if found.outward is None else found
        slot, outward, inward, first = found.slot, found.outward, found.inward, found.inputs.wire is None
        assert outward is not None
        if slot is None:
            _backward(outward, gradient, of)
            if inward is None:
                return None
            return inward.grad if inward.grad is not None else torch.zeros_like(inward)
        if found.between is not None:
            _backward(outward, None, of)
            gradient = found.between.grad
        assert gradient is not None
        if gradient is not slot.gradient:
            slot.gradient.copy_(gradient)
        self._recorder.backward(slot)
        if inward is not None:
            torch.autograd.backward(inward, slot.inward)
        self._recorder.give(slot)
        if first:
            return None
        return slot.inward if self._stage.boundary is not None else slot.inward.clone()


def _backward(made: Tensor, gradient: Tensor | None, of: int) -> None:
    if gradient is None:
        (made / of).backward()  # type: ignore[no-untyped-call]
    elif gradient.is_cuda:
        torch.autograd.backward(made, gradient.to(made.dtype))
    else:
        # the same, bit by bit; given a gradient, torch would import its symbolic shapes (seconds), which only compiling
        # needs
        (made.float() * gradient).sum().backward()  # type: ignore[no-untyped-call]
