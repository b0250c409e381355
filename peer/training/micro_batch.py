"""Forward and backward of one micro-batch, whole, or in pieces after memory ran out.

In pieces, the forward keeps nothing. The backward takes some rows at a time and one part of the stage at a time, from
the last to the first: the head with the loss, a block, the embedding. Gradients differ by the order of sums only. From
the first shortage on, the round's micro-batches go in pieces.

*No gradient is added twice.* A whole backward that breaks off has added the gradients of some parameters; their
versions tell which. In pieces, a part's gradients are computed first and added together afterwards.

Shapes: B rows, L positions, D model width, W residual width: values of a token between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from peer.training import device
from peer.training.model import Stage
from peer.training.recorded import Graphs, Recorder, Slot
from protocol.run import layout

Added = set[tuple[str, str]]
"""(shard, parameter) whose gradients of some rows are added already."""
MEMORY_ERRORS = (RuntimeError, MemoryError)
TABLES = ("embed", "anchor")
"""Shards whose rows make x."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a micro-batch, or of some of its rows.

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
    wire: the leaf whose gradient goes to the previous stage; None in the first one.
    slot: where its blocks were replayed (peer/training/recorded.py); None: they were called.
    inward, between: input of the replayed blocks, and of the head behind them.
    """

    inputs: Inputs
    outward: Tensor | None = None
    wire: Tensor | None = None
    slot: Slot | None = None
    inward: Tensor | None = None
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
        wire = _leaf(inputs.wire)
        with self._autocast():
            outward = stage(ids_BL, wire)
            outward = stage.loss(outward, inputs.ids[:, 1:]) if stage.has_head else stage.outward(outward)
        return Forwarded(inputs, outward, wire)

    def _replay(self, inputs: Inputs, slot: Slot) -> Forwarded:
        """A forward with recorded blocks."""
        stage, ids_BL, wire = self._stage, inputs.ids[:, :-1], _leaf(inputs.wire)
        with self._autocast():
            inward = stage.embed(ids_BL, wire)
        slot.x.copy_(inward.detach())
        slot.forward()
        if not stage.has_head:  # y may still be on its way to the next stage when the slot is used again
            return Forwarded(inputs, stage.outward(slot.y).clone(), wire, slot, inward)
        between = slot.y.detach().requires_grad_()
        with self._autocast():
            outward = stage.loss(between, inputs.ids[:, 1:])
        return Forwarded(inputs, outward, wire, slot, inward, between)

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
        """Adds the gradients of one micro-batch. Returns that of its wire [B, L, W], None in the first stage. Raises
        MEMORY_ERRORS where one row is too much.

        gradient: of the output [B, L, W]; None in the last stage.
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
        slot, outward, wire = found.slot, found.outward, found.wire
        assert outward is not None
        if slot is None:
            _backward(outward, gradient, of)
        else:
            if found.between is not None:
                _backward(outward, None, of)
                gradient = found.between.grad
            assert gradient is not None
            assert found.inward is not None
            slot.gradient[..., : gradient.shape[-1]].copy_(gradient)  # the others stay zero
            self._recorder.backward(slot)
            if found.inward.requires_grad:
                torch.autograd.backward(found.inward, slot.inward.clone())
            self._recorder.give(slot)
        if wire is None:
            return None
        return wire.grad if wire.grad is not None else torch.zeros_like(wire)

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
        @contextmanager
        def held(shard: str) -> Iterator[Mapping[str, Parameter]]:
            owners = [name for name in self._stage.shards if name == shard or (shard in TABLES and name in TABLES)]
            if shard == "head" and self._stage.spec.tie_word_embeddings:
                owners.append(TABLES[0])
            named = {name: p for owner in owners for name, p in self._stage.parameters_of(owner).items()}
            yield {name: p for name, p in named.items() if (shard, name) not in added}

        def add(shard: str, found: Mapping[str, Tensor]) -> None:
            torch._foreach_add_([self._stage.get_parameter(name).grad for name in found], list(found.values()))
            added.update((shard, name) for name in found)

        return part_by_part(self._stage, self._autocast, inputs, gradient, of, (held, add))[0]

    def _versions(self) -> dict[str, object]:
        """Of each parameter, a value that changes when its gradient is added to."""
        named = self._stage.named_parameters()
        return {name: None if p.grad is None else (id(p.grad), p.grad._version) for name, p in named}

    def _shrink(self, rows: int) -> None:
        self.rows = rows
        self._recorder.drop()
        device.free()


Held = Callable[[str], AbstractContextManager[Mapping[str, Parameter]]]
"""The parameters of a part, which are there while it is computed, by name. A part is named by its first shard."""
Add = Callable[[str, Mapping[str, Tensor]], None]
"""Takes the gradients of a part."""


def part_by_part(
    stage: Stage,
    autocast: Callable[[], AbstractContextManager[object]],
    inputs: Inputs,
    gradient: Tensor | None,
    of: float,
    parameters: tuple[Held, Add],
) -> tuple[Tensor | None, Tensor | None]:
    """Forward and backward of some rows, for which one part of the stage has to be there at a time: every part twice,
    but for the head. Returns the gradient of the wire and the loss, None each where the stage has none.

    gradient, of: as in `MicroBatches.backward`.
    """
    (held, add), ids_BL, x_of, loss = parameters, inputs.ids[:, :-1], dict[str, Tensor](), None
    parts = [shard for shard in stage.shards if shard not in TABLES]
    with torch.no_grad(), autocast():
        mask = stage.mask(ids_BL)
        with held(TABLES[0]):
            x_BLD = stage.embed(ids_BL, inputs.wire)
        for shard in parts:
            x_of[shard] = x_BLD
            if shard != "head":
                with held(shard):
                    x_BLD = stage.block(layout.block_index(shard), x_BLD, mask)
    del x_BLD
    for shard in reversed([TABLES[0], *parts]):
        leaf = _leaf(inputs.wire if shard in TABLES else x_of.pop(shard))
        with held(shard) as trained:
            with autocast():
                if shard == "head":
                    assert leaf is not None
                    made = stage.loss(leaf, inputs.ids[:, 1:])
                    loss = made.detach()
                elif shard in TABLES:
                    made = stage.embed(ids_BL, leaf)
                else:
                    made = stage.block(layout.block_index(shard), leaf, mask)
            leaves = [*trained.values(), *([] if leaf is None else [leaf])]
            if leaves:
                total = made / of if gradient is None else (made[..., : gradient.shape[-1]].float() * gradient).sum()
                found = list(torch.autograd.grad(total, leaves))
                gradient = None if leaf is None else found.pop()
                del made, total
                if found:
                    add(shard, dict(zip(trained, found, strict=True)))
                del found
    return gradient if inputs.wire is not None else None, loss


def _leaf(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().requires_grad_()


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
