"""A whole model that is not trained any more, in fp32, as it is exported: the text that it writes, and its loss on a
given text.

Shapes: n windows, L positions, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.training import device
from peer.training.model import Past, Stage, Theta
from protocol.codec.sparse import Sparse
from protocol.errors import LocalError, UsageError, shown
from protocol.planning import memory
from protocol.run import layout
from protocol.run.layout import ModelSpec

T = TypeVar("T")


def load(spec: ModelSpec, theta: Theta, wanted: str = "auto") -> Stage:
    """The whole model with these values, on the wanted device or, without room there, on the CPU. Raises UsageError."""
    free = {name: device.memory_budget(name) for name in (*device.choose_devices((wanted,)), "cpu")}
    stage = Stage(spec, 0, spec.n_layers, True, True, device=place(spec, free))
    stage.load(theta)
    return stage


def place(spec: ModelSpec, free: Mapping[str, int]) -> str:
    """The first device with room for the model; `free`: bytes of each. Raises UsageError."""
    needed = memory.COPY * 4 * layout.total_parameters(spec)
    for name, there in free.items():
        if there >= needed:
            return name
    raise UsageError(
        f"memory: the model takes {needed / 1e9:.1f} GB, {max(free.values()) / 1e9:.1f} GB are free here;"
        " use a machine with more"
    )


class Dice:
    """Draws the next token, with the same draws for the same seed.

    temperature: chances are those of logits / temperature; 0: the likeliest token.
    top_k: tokens that are drawn from, the likeliest ones (Fan et al., 2018, arXiv:1805.04833); 0: all.
    """

    def __init__(self, seed: int, *, temperature: float, top_k: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._temperature = temperature
        self._top_k = top_k

    def draw(self, logits_V: Tensor) -> int:
        """An id. Raises LocalError where the logits are not finite."""
        logits_V = logits_V.cpu().double()
        if not bool(torch.isfinite(logits_V).all()):
            raise LocalError("model: its logits are not finite; the run has diverged, give an earlier --round")
        if self._temperature == 0:
            return int(logits_V.argmax())
        if 0 < self._top_k < len(logits_V):
            least = logits_V.topk(self._top_k).values[-1]
            logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
        chances_V = torch.softmax((logits_V - logits_V.max()) / self._temperature, dim=-1)
        return int(torch.multinomial(chances_V, 1, generator=self._generator))


def continuation(stage: Stage, prompt: Sequence[int], window: int, dice: Dice) -> Iterator[int]:
    """Ids that continue `prompt` (at least one id), without end. Raises LocalError.

    The model sees at most `window` ids. When they are full, it goes on from their second half.
    """
    fresh, past, seen = list(prompt[-window:]), Past(), list(prompt[-window:])
    while True:
        if past.length + len(fresh) > window:
            past = Past()
            fresh = seen = seen[-max(1, window // 2) :]
        new = dice.draw(_logits(stage, fresh, past))
        yield new
        fresh, seen = [new], [*seen, new]


@torch.no_grad()
def _logits(stage: Stage, ids: Sequence[int], past: Past) -> Tensor:
    """[V] after `ids`, which follow `past`."""
    x_1LD = stage.further(torch.tensor([ids]), past)
    return stage.logits(x_1LD[:, -1:])[0, 0]


@torch.no_grad()
def nats(stage: Stage, windows: NDArray[np.int64]) -> float:
    """The sum of -log p over all n x L predictions of windows [n, L + 1]."""
    ids = torch.from_numpy(windows)
    mean = stage.loss(stage(ids[:, :-1]), ids[:, 1:])
    return mean.item() * ids[:, 1:].numel()


class Measured:
    """A copy of the whole model, to be measured. All methods raise UsageError where there is no memory."""

    def __init__(self, spec: ModelSpec, theta: Theta, wanted: str = "auto") -> None:
        self._context = spec.context
        self._stage = _guarded(lambda: load(spec, theta, wanted))

    def __call__(self, windows: NDArray[np.int64]) -> float:
        return _guarded(lambda: nats(self._stage, windows))

    @contextlib.contextmanager
    def moved(self, update: Iterable[tuple[str, Sequence[Sparse]]], step: float) -> Iterator[None]:
        """Adds `step` times the update to the parameters, and restores exactly what they were. `update`: shards and
        their tensors in canonical order; a shard may be there several times."""
        held, kept = dict(self._stage.named_parameters()), list[tuple[Tensor, Tensor, Tensor]]()
        try:
            with torch.no_grad():
                for shard, tensors in update:
                    for (name, _), sent in zip(layout.tensors(self._stage.spec, shard), tensors, strict=True):
                        flat = held[name].view(-1)
                        index = torch.from_numpy(sent.index).to(flat.device)
                        kept.append((flat, index, flat[index]))
                        flat[index] += step * torch.from_numpy(sent.values).to(flat.device)
            yield
        finally:
            with torch.no_grad():
                for flat, index, values in reversed(kept):
                    flat[index] = values

    def goes_on(self, ids: Sequence[int], count: int) -> list[int]:
        """The `count` likeliest ids after these, one by one. Raises LocalError where the model has diverged."""
        likeliest = Dice(0, temperature=0.0)
        return _guarded(lambda: list(islice(continuation(self._stage, ids, self._context, likeliest), count)))


def _guarded(work: Callable[[], T]) -> T:
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not device.is_shortage(error):
            raise
        raise UsageError(f"memory: {shown(error)}; use a machine with more") from None
