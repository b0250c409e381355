"""One of several devices that hold a replica together: sharded training as ZeRO's third stage (Rajbhandari and others,
2020, arXiv 1910.02054), by whole tensors.

Each rank has some tensors, with their gradients and moments (protocol/planning/memory.py: owners), whole: so Muon has
its matrices, an update its tensors, and the optimizer is that of one device. An inner step goes in turns of one
micro-batch a rank. In a turn every part of the model (the tables, a block, the head) is on all ranks while it is
computed, and only then:

    forward     broadcast of the part's tensors by their ranks; of activations only the part's input is kept
    backward    from the last part to the first: broadcast again, forward and backward of the part, and the sum of each
                tensor's gradients over all ranks, at its own
    step        each rank clips by the norm of all gradients and steps its own tensors

Gradients differ from one device's by the order of their sums, which follows from the number of ranks and of
micro-batches. All ranks make the same exchanges in the same order.

Shapes: B rows of a micro-batch, L positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from peer.training import device_group as group
from peer.training.micro_batch import Inputs, part_by_part
from peer.training.optimizer import launch_norms
from peer.training.trainer import StageTrainer
from protocol.planning import memory
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec


class RankTrainer(StageTrainer):
    """Has the tensors of one rank. Exchanges raise RuntimeError."""

    def __init__(self, spec: ModelSpec, train: TrainSpec, rank: int, ranks: int, *, device: str = "cpu") -> None:
        super().__init__(spec, train, layout.shard_names(spec), device=device, empty=True)
        self.rank = rank
        self.owners = memory.owners(spec, train, ranks)
        self._parts = memory.sharded_parts(spec)
        self._elsewhere = dict(self.stage.named_parameters())  # without memory
        self._sums: dict[str, Tensor] = {}  # of gradients; as all that stays, allocated once, which leaves no holes
        for name, owner in self.owners.items():
            if owner == rank:
                own = Parameter(torch.empty(self._elsewhere.pop(name).shape, device=self.device))
                self._set(name, own)
                self._sums[name] = torch.empty_like(own, requires_grad=False)
        sizes = {name: _aligned(empty.shape) for name, empty in self._elsewhere.items()}
        largest = max(sum(sizes.get(name, 0) for name in names) for names in self._parts.values())
        self._room = torch.empty(largest, device=self.device)  # for what other ranks have of a part

    def _set(self, name: str, parameter: Parameter) -> None:
        module, _, leaf = name.rpartition(".")
        setattr(self.stage.get_submodule(module), leaf, parameter)

    def names_of(self, rank: int, shard: str) -> list[str]:
        """The tensors of a shard that a rank has."""
        return [name for name, _ in layout.tensors(self.spec, shard) if self.owners[name] == rank]

    # --- a turn

    def turn(self, ids: Tensor, counts: bool = True) -> Tensor:
        """Adds the gradients of one micro-batch of each rank. Returns the loss of this one's.

        ids: [B, L+1].
        counts: the inner step has this micro-batch; else this rank takes part for the others, and adds nothing.
        """
        inputs = Inputs(ids.pin_memory() if self.device.type == "cuda" else ids, None)
        of = float(self.train.micro_batches) if counts else math.inf
        _, loss = part_by_part(self.stage, self._autocast, inputs, None, of, (self._there, self._add))
        assert loss is not None
        return loss

    @contextmanager
    def _there(self, part: str) -> Iterator[Mapping[str, Parameter]]:
        """Makes a part's parameters available."""
        names, at = self._parts[part], 0
        foreign = [name for name in names if name in self._elsewhere]
        for name in foreign:
            shape = self._elsewhere[name].shape
            self._set(name, Parameter(self._room[at : at + math.prod(shape)].view(shape)))
            at += _aligned(shape)
        try:
            found = {name: self.stage.get_parameter(name) for name in names}
            group.broadcast([p.detach() for p in found.values()], [self.owners[name] for name in names])
            yield found
        finally:
            for name in foreign:
                self._set(name, self._elsewhere[name])

    def _add(self, part: str, found: Mapping[str, Tensor]) -> None:
        gradients = {name: gradient.contiguous() for name, gradient in found.items()}
        group.add_up_at([self.owners[name] for name in gradients], gradients.values())
        for name, gradient in gradients.items():
            if self.owners[name] == self.rank:
                parameter, total = self.stage.get_parameter(name), self._sums[name]
                parameter.grad = total.copy_(gradient) if parameter.grad is None else total.add_(gradient)

    def own_norms(self) -> tuple[tuple[str, float], ...]:
        """The norms of this rank's gradients, with their shards."""
        norms = launch_norms(self._gradients())
        values = torch.stack([norm for _, norm in norms]).tolist() if norms else []
        return tuple((shard, value) for (shard, _), value in zip(norms, values, strict=True))

    # --- state that comes and goes

    @torch.no_grad()
    def take(self) -> None:
        """Receives this rank's parameters from the first rank."""
        for shard in self.shards:
            for name in self.names_of(self.rank, shard):
                group.take(self.stage.get_parameter(name).detach(), 0)

    def give(self, names: Sequence[str]) -> None:
        """Sends the first rank these parameters."""
        for name in names:
            group.give(self.stage.get_parameter(name).detach(), 0)

    def take_moments(self, names: Sequence[str], keep: bool) -> None:
        """Receives the moments of these parameters. keep: those that this rank has stay, and win."""
        if not keep:
            self._moments.clear()
        for name in names:
            found = {m: group.take(torch.empty(s, device=self.device), 0) for m, s in self.moment_shapes(name).items()}
            self._moments.setdefault(name, found)

    def give_moments(self, names: Sequence[str]) -> None:
        """Sends the first rank the moments of these parameters."""
        for name in names:
            for moment in self.moment_shapes(name):
                group.give(self._moments[name][moment], 0)

    def moment_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """The shapes of a parameter's moments, in the order in which they are exchanged."""
        return self._moment_shapes(name, self.stage.get_parameter(name))


def _aligned(shape: Sequence[int]) -> int:
    """The elements of a tensor of this shape, rounded up so that the next one begins where kernels like it: at 64
    bytes."""
    return -(-math.prod(shape) // 16) * 16
