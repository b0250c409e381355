"""Forward and backward of one micro-batch, whole, or in pieces after memory ran out.

In pieces, the forward keeps nothing. The backward takes some rows at a time and one part of the stage at a time, from
the last to the first: the head with the loss, a block, the embedding. Gradients differ by the order of sums only. From
the first shortage on, the round's micro-batches go in pieces.

*No gradient is added twice.* A whole backward that breaks off has added the gradients of some parameters; their
versions tell which. In pieces, a part's gradients are computed first and added together afterwards.

Shapes: B rows, L positions, D model width, W values per token at the boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from peer.training import device
from peer.training.model import Stage
from peer.training.recorded import Graphs, Recorder, Slot
from protocol.run import layout

Added = set[tuple[str, str]]
"""(shard, parameter) whose gradients of some rows are added already."""
MEMORY_ERRORS = (RuntimeError, MemoryError)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a micro-batch, or some of its rows, is computed from.

    ids: token ids [B, L+1].
    wire: values from the previous stage [B, L, W]; None in the first stage.
    """

    ids: Tensor
    wire: Tensor | None

    def rows(self, first: int, last: int) -> Inputs:
        """Rows `first` up to, not including, `last`."""
        return Inputs(self.ids[first:last], None if self.wire is None else self.wire[first:last])


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
    """Computes the micro-batches of a stage.

    rows: of a piece; 0: micro-batches are computed whole.
    """

    def __init__(
        self,
        stage: Stage,
        autocast: Callable[[], AbstractContextManager[object]],
        records: Callable[[torch.device], Graphs] | None,
    ) -> None:
        self.rows = 0
        self._stage = stage
        self._autocast = autocast
        self._recorder = Recorder(stage, autocast, records)
        self._stepped = False

    def begin_round(self) -> None:
        """Whole micro-batches again."""
        self.rows, self._recorder.on = 0, self._stepped

    def end_round(self) -> None:
        """Frees the memory of recordings."""
        self._recorder.drop()

    def stepped(self) -> None:
        """An inner step was taken: everything is compiled, and blocks may be recorded."""
        self._stepped = True
        self._recorder.on = not self.rows

    def reset(self) -> None:
        """Drops all micro-batches between their forward and their backward."""
        self._recorder.reset()

    # --- forward

    def forward(self, inputs: Inputs, *, recompute: bool) -> tuple[Forwarded, Tensor]:
        """The forward, and its output: the mean loss [] in the last stage. Raises MEMORY_ERRORS where one row is too
        much.

        recompute: keep the inputs only.
        """
        if not self.rows:
            try:
                # on CUDA what is compiled without gradients is other code than with them: it may give other bits
                with torch.set_grad_enabled(not recompute or self._stage.device.type == "cuda"):
                    found = self._whole_forward(inputs)
                assert found.outward is not None
                if recompute and found.slot is not None:
                    self._recorder.give(found.slot)
                return Forwarded(inputs) if recompute else found, found.outward.detach()
            except MEMORY_ERRORS as error:
                _raise_unless_short(error)
            self._shrink(len(inputs.ids))
        while True:
            try:
                return Forwarded(inputs), self._forward_pieces(inputs)
            except MEMORY_ERRORS as error:
                _raise_unless_short(error, self.rows)
            self._shrink(self.rows // 2)

    def _whole_forward(self, inputs: Inputs) -> Forwarded:
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

    @torch.no_grad()
    def _forward_pieces(self, inputs: Inputs) -> Tensor:
        count = len(inputs.ids)
        parts = [self._whole_forward(inputs.rows(at, at + self.rows)) for at in range(0, count, self.rows)]
        made = [part.outward for part in parts if part.outward is not None]
        if not self._stage.has_head:
            return torch.cat(made)
        return torch.stack([x * (len(part.inputs.ids) / count) for part, x in zip(parts, made, strict=True)]).sum()

    # --- backward

    def backward(self, found: Forwarded, gradient: Tensor | None, of: int) -> Tensor | None:
        """Adds the gradients of one micro-batch. Returns that of its inputs [B, L, D], None in the first stage. Raises
        MEMORY_ERRORS where one row is too much.

        gradient: of the output [B, L, D]; None in the last stage.
        of: micro-batches of the step, over which the loss is the mean.
        """
        inputs, added = found.inputs, Added()
        if not self.rows:
            before = self._versions()
            try:
                return self._whole_backward(
                    self._whole_forward(inputs) if found.outward is None else found, gradient, of
                )
            except MEMORY_ERRORS as error:
                _raise_unless_short(error)
            has = {name for name, version in self._versions().items() if version != before[name]}
            added = {(shard, name) for shard in self._stage.shards for name in has}
            del found
            self._shrink(len(inputs.ids))
        self._stage.make_gradients()
        at, inward = 0, list[Tensor | None]()
        while at < len(inputs.ids):
            end = min(at + self.rows, len(inputs.ids))
            inward.append(self._backward_rows(inputs, at, end, gradient, of, set(added)))
            at = end
        return _joined(inward)

    def _whole_backward(self, found: Forwarded, gradient: Tensor | None, of: int) -> Tensor | None:
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

    def _backward_rows(
        self, inputs: Inputs, first: int, last: int, gradient: Tensor | None, of: int, added: Added
    ) -> Tensor | None:
        """The backward of some rows, in halves where memory runs out. Extends `added`."""
        rows, own = last - first, None if gradient is None else gradient[first:last]
        try:
            return self._part_by_part(inputs.rows(first, last), own, of * len(inputs.ids) / rows, added)
        except MEMORY_ERRORS as error:
            _raise_unless_short(error, rows)
        self._shrink(max(1, min(self.rows, rows) // 2))
        middle = first + rows // 2
        halves = ((first, middle), (middle, last))
        return _joined([self._backward_rows(inputs, a, b, gradient, of, set(added)) for a, b in halves])

    def _part_by_part(self, inputs: Inputs, gradient: Tensor | None, of: float, added: Added) -> Tensor | None:
        stage, ids_BL, x_of = self._stage, inputs.ids[:, :-1], dict[str, Tensor]()
        with torch.no_grad(), self._autocast():
            x_BLD, mask = self._expanded(inputs), stage.mask(ids_BL)
            if x_BLD is None:
                x_BLD = stage.embed(ids_BL)
            for shard in stage.shards:
                x_of[shard] = x_BLD
                if shard.startswith("block."):
                    x_BLD = stage.block(layout.block_index(shard), x_BLD, mask)
        for shard in reversed(stage.shards):
            leaf_BLD = x_of.pop(shard).detach().requires_grad_()
            with self._autocast():
                if shard == "head":
                    made = stage.loss(leaf_BLD, inputs.ids[:, 1:])
                elif shard == "embed":
                    made = stage.embed(ids_BL)
                else:
                    made = stage.block(layout.block_index(shard), leaf_BLD, mask)
            held = stage.parameters_of(shard)
            if shard == "head" and stage.spec.tie_word_embeddings:
                held |= stage.parameters_of("embed")
            trained = {name: p for name, p in held.items() if (shard, name) not in added}
            leaves = [*trained.values(), *([] if shard == "embed" else [leaf_BLD])]
            if leaves:
                total = made / of if gradient is None else (made.float() * gradient).sum()
                found = list(torch.autograd.grad(total, leaves))
                gradient = None if shard == "embed" else found.pop()
                if found:
                    torch._foreach_add_([p.grad for p in trained.values()], found)
                added |= {(shard, name) for name in trained}
        return gradient if inputs.wire is not None else None

    def _versions(self) -> dict[str, object]:
        """Of each parameter, a value that changes when its gradient is added to."""
        named = self._stage.named_parameters()
        return {name: None if p.grad is None else (id(p.grad), p.grad._version) for name, p in named}

    def _shrink(self, rows: int) -> None:
        self.rows = rows
        self._recorder.drop()
        device.free()


def _backward(made: Tensor, gradient: Tensor | None, of: int) -> None:
    if gradient is None:
        (made / of).backward()  # type: ignore[no-untyped-call]
    elif gradient.is_cuda:
        torch.autograd.backward(made, gradient.to(made.dtype))
    else:
        # the same, bit by bit; given a gradient, torch would import its symbolic shapes (seconds), which only compiling
        # needs
        (made.float() * gradient).sum().backward()  # type: ignore[no-untyped-call]


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    """The rows of all parts; None where they are those of the first stage."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def _raise_unless_short(error: BaseException, rows: int = 2) -> None:
    """Raises `error` unless memory ran out and there are rows to divide."""
    if rows < 2 or not device.is_shortage(error):
        raise error
