"""One micro-batch forward and backward; and in pieces where memory runs out, without losing what was computed before.

In pieces, a micro-batch goes forward without what a backward needs. Its backward takes some rows at a time and one part of the stage at a time, from
the last part to the first: the head with the loss, a block, the embedding. Of those rows only what goes into each part is kept. So the peak is
that of one block for a piece's rows, and gradients are the undisturbed ones but for the order of sums.

*Nothing is added twice.* Where a backward breaks off, some parameters have got its gradient and others have not. Each parameter gets one micro-batch's
gradient in one addition, so it either has it or not; its version says which. What is computed again leaves out those that have it (`Has`).

From the first shortage on, all micro-batches of the round go in pieces of so many rows; the next round begins with whole ones.

Shapes: B rows, L positions, D model width, W values per token at the boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from peer.training import device
from peer.training.model import Stage
from peer.training.recorded import Recorder, Recording, Slot
from protocol.run import layout

Has = dict[str, set[str]]
"""By shard: the names of the parameters that have the gradient already."""
_EMBED = "model.embed_tokens."


@dataclass(frozen=True, slots=True)
class Work:
    """What a micro-batch, or some rows of it, is computed from: ids [B, L+1], and what came from the previous stage [B, L, W]."""

    ids: Tensor
    wire: Tensor | None

    def rows(self, first: int, last: int) -> Work:
        """Some of its rows."""
        return Work(self.ids[first:last], None if self.wire is None else self.wire[first:last])


@dataclass(frozen=True, slots=True)
class Kept:
    """One micro-batch between its forward and its backward. `inward`: what its gradient is wanted of, by what came in or by the embedding; `slot`: where its blocks
    were replayed (peer/training/recorded.py), and then `between`: what the head begins with, or None."""

    work: Work
    inward: Tensor | None
    outward: Tensor
    slot: Slot | None = None
    between: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Deferred:
    """One micro-batch whose forward is computed anew before its backward."""

    work: Work


class Pieces:
    """Computes the micro-batches of a stage. `rows`: of a piece; 0: whole micro-batches. `records`: makes what records its blocks."""

    def __init__(
        self,
        stage: Stage,
        autocast: Callable[[], AbstractContextManager[object]],
        records: Callable[[torch.device], Recording] | None,
    ) -> None:
        self.rows = 0
        self._stage = stage
        self._autocast = autocast
        self._recorder = Recorder(stage, autocast, records)
        self._stepped = False

    def begin(self) -> None:
        """A round begins, with whole micro-batches."""
        self.rows, self._recorder.on = 0, self._stepped

    def rest(self) -> None:
        """The round's last step was taken: what was recorded has memory that others need now."""
        self._recorder.drop()

    def stepped(self) -> None:
        """An inner step was taken."""
        self._stepped = True
        self._recorder.on = not self.rows

    def reset(self) -> None:
        """Nothing is between its forward and its backward."""
        self._recorder.reset()

    def forget(self, kept: Kept) -> None:
        """There will be no backward of this."""
        if kept.slot is not None:
            self._recorder.give(kept.slot)

    def through(self, work: Work) -> Kept:
        """One forward; the outward of the last stage is the mean loss []."""
        ids_BL = work.ids[:, :-1]
        with self._autocast():
            slot = self._recorder.take(ids_BL)
        if slot is not None:
            return self._replayed(work, slot)
        inward = self._inward(work)
        with self._autocast():
            outward = self._stage(ids_BL, self._stage.embed(ids_BL) if inward is None else inward)
            if self._stage.has_head:
                outward = self._stage.loss(outward, work.ids[:, 1:])
        return Kept(work, inward, outward)

    def _replayed(self, work: Work, slot: Slot) -> Kept:
        """The same where the blocks were recorded."""
        stage, ids_BL, inward = self._stage, work.ids[:, :-1], None
        if work.wire is None:
            with self._autocast():
                inward = stage.embed(ids_BL)
            slot.x.copy_(inward.detach())
        elif stage.boundary is not None:
            stage.boundary.expand(work.wire, ids_BL, slot.x)
        else:
            slot.x.copy_(work.wire)
        slot.ahead()
        if not stage.has_head:  # whoever sends it as it is may be doing so when the next micro-batch comes
            return Kept(work, inward, slot.y if stage.boundary is not None else slot.y.clone(), slot)
        between = slot.y.detach().requires_grad_()
        with self._autocast():
            outward = stage.loss(between, work.ids[:, 1:])
        return Kept(work, inward, outward, slot, between)

    def _inward(self, work: Work) -> Tensor | None:
        boundary = self._stage.boundary
        if work.wire is None:
            return None
        x_BLD = boundary.expand(work.wire, work.ids[:, :-1]) if boundary is not None else work.wire
        return x_BLD.detach().requires_grad_()

    def forward(self, work: Work, once: Callable[[], tuple[Kept | Deferred, Tensor]]) -> tuple[Kept | Deferred, Tensor]:
        """What `once` makes of it, or the same in pieces. Raises what torch raises where one row is too much."""
        if not self.rows:
            try:
                return once()
            except (RuntimeError, MemoryError) as error:
                _unless_short(error)
            self._smaller(len(work.ids))
        while True:
            try:
                return Deferred(work), self._forward(work)
            except (RuntimeError, MemoryError) as error:
                _unless_short(error, self.rows)
            self._smaller(self.rows // 2)

    def _smaller(self, rows: int) -> None:
        self.rows = rows
        self._recorder.drop()
        device.free()

    @torch.no_grad()
    def _forward(self, work: Work) -> Tensor:
        parts = [self.through(work.rows(at, at + self.rows)) for at in range(0, len(work.ids), self.rows)]
        if not self._stage.has_head:
            return torch.cat([part.outward for part in parts])
        shares = [len(part.work.ids) / len(work.ids) for part in parts]
        return torch.stack([part.outward * share for part, share in zip(parts, shares, strict=True)]).sum()

    def backward(self, found: Kept | Deferred, gradient: Tensor | None, of: int) -> Tensor | None:
        """Adds the gradients of a micro-batch, one `of` so many. `gradient` [B, L, D] of what it made; None for the last stage. Returns that of what came in [B, L, D], None for the first stage. Raises what torch raises where one row is too much."""
        work, has, before = found.work, Has(), self._versions("")
        if not self.rows:
            try:
                return self._at_once(self.through(work) if isinstance(found, Deferred) else found, gradient, of)
            except (RuntimeError, MemoryError) as error:
                _unless_short(error)
            added = {name for name, version in self._versions("").items() if version != before[name]}
            has = {shard: added & self._versions(shard).keys() for shard in self._stage.shards}
            del found
            self._smaller(len(work.ids))
        inward: list[Tensor | None] = []
        at = 0
        while at < len(work.ids):
            size = self.rows
            inward += self._piece(work, at, min(at + size, len(work.ids)), gradient, of, dict(has))
            at += size
        parts = [part for part in inward if part is not None]
        return torch.cat(parts) if parts else None

    def _at_once(self, kept: Kept, gradient: Tensor | None, of: int) -> Tensor | None:
        """A micro-batch's backward, wherever its blocks are."""
        slot = kept.slot
        if slot is None:
            return _whole(kept, gradient, of)
        if kept.between is not None:
            (kept.outward / of).backward()  # type: ignore[no-untyped-call]
            gradient = kept.between.grad
        assert gradient is not None
        if gradient is not slot.gradient:
            slot.gradient.copy_(gradient)
        self._recorder.back(slot)
        if kept.inward is not None:
            torch.autograd.backward(kept.inward, slot.inward)
        self.forget(kept)
        if kept.work.wire is None:
            return None
        return slot.inward if self._stage.boundary is not None else slot.inward.clone()

    def _piece(
        self, work: Work, first: int, last: int, gradient: Tensor | None, of: int, has: Has
    ) -> list[Tensor | None]:
        """Some rows forward and backward, in halves where memory runs out; `has` grows. What `backward` returns, of these rows in order."""
        rows, some = last - first, None if gradient is None else gradient[first:last]
        try:
            return [self._part_by_part(work.rows(first, last), some, of, rows / len(work.ids), has)]
        except (RuntimeError, MemoryError) as error:
            _unless_short(error, rows)
        self._smaller(max(1, min(self.rows, rows) // 2))
        middle = first + rows // 2
        return [
            part
            for a, b in ((first, middle), (middle, last))
            for part in self._piece(work, a, b, gradient, of, dict(has))
        ]

    def _part_by_part(self, work: Work, gradient: Tensor | None, of: int, share: float, has: Has) -> Tensor | None:
        """The same at once. `share`: of the micro-batch, these rows."""
        stage, ids_BL, inputs = self._stage, work.ids[:, :-1], dict[str, Tensor]()
        with torch.no_grad(), self._autocast():
            x_BLD, mask = self._inward(work), stage.mask(ids_BL)
            if x_BLD is None:
                x_BLD = stage.embed(ids_BL)
            for shard in stage.shards:
                inputs[shard] = x_BLD
                if shard.startswith("block."):
                    x_BLD = stage.block(layout.block_index(shard), x_BLD, mask)
        for shard in reversed(stage.shards):
            leaf_BLD = inputs.pop(shard).detach().requires_grad_()
            with self._without(shard, has):
                with self._autocast():
                    if shard == "head":
                        made = stage.loss(leaf_BLD, work.ids[:, 1:])
                    elif shard == "embed":
                        made = stage.embed(ids_BL)
                    else:
                        made = stage.block(layout.block_index(shard), leaf_BLD, mask)
                if made.requires_grad:
                    (made * share / of if gradient is None else (made.float() * gradient).sum()).backward()  # type: ignore[no-untyped-call]
            gradient = leaf_BLD.grad
        return gradient if work.wire is not None else None

    @contextmanager
    def _without(self, shard: str, has: Has) -> Iterator[None]:
        """The parameters of this part that have the gradient get none within. Afterwards those that got it have it, too."""
        before = self._versions(shard)
        frozen = [p for name, p in self._stage.named_parameters() if name in has.get(shard, ())]
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
            has[shard] = set(before)
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)
            got = {name for name, version in self._versions(shard).items() if version != before[name]}
            has[shard] = has.get(shard, set()) | got

    def _versions(self, shard: str) -> dict[str, object]:
        """Something that changes when a gradient is added, by the name of each parameter that this part uses; all for ""."""
        named = self._stage.named_parameters()
        prefixes = {"": ("",), "embed": (_EMBED,), "head": ("model.norm.", "lm_head.")}.get(shard)
        if prefixes is None:
            prefixes = (f"model.layers.{layout.block_index(shard)}.",)
        if shard == "head" and self._stage.spec.tie_word_embeddings:
            prefixes = (*prefixes, _EMBED)
        return {
            name: None if p.grad is None else (id(p.grad), p.grad._version)
            for name, p in named
            if name.startswith(prefixes)
        }


def _whole(kept: Kept, gradient: Tensor | None, of: int) -> Tensor | None:
    """A micro-batch's backward at once, one `of` so many."""
    if gradient is None:
        (kept.outward / of).backward()  # type: ignore[no-untyped-call]
    elif gradient.is_cuda:
        torch.autograd.backward(kept.outward, gradient.to(kept.outward.dtype))
    else:
        # the same, bit by bit; given a gradient, torch would import its symbolic shapes (seconds), which what is compiled needs anyway
        (kept.outward.float() * gradient).sum().backward()  # type: ignore[no-untyped-call]
    if kept.inward is None:
        return None
    return kept.inward.grad if kept.inward.grad is not None else torch.zeros_like(kept.inward)


def _unless_short(error: BaseException, rows: int = 2) -> None:
    """Raises it again unless memory ran out, and there are rows to divide."""
    if rows < 2 or not device.is_shortage(error):
        raise error
