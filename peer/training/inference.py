"""A whole model that is trained no more: the text that it writes, and how well it foretells a given one. In fp32, as it is exported.

Shapes: n windows, L positions, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """The whole model with these values, on the device that is wanted where that has room for it, else on the CPU. Raises UsageError where nothing has room."""
    free = {name: device.memory_budget(name) for name in (*device.choose_devices((wanted,)), "cpu")}
    stage = Stage(spec, 0, spec.n_layers, True, True, device=place(spec, free))
    stage.load(theta)
    return stage


def place(spec: ModelSpec, free: Mapping[str, int]) -> str:
    """The first of these devices, each with its free bytes, that has room for the model. Raises UsageError."""
    needed = memory.COPY * 4 * layout.total_parameters(spec)
    for name, there in free.items():
        if there >= needed:
            return name
    raise UsageError(
        f"memory: the model takes {needed / 1e9:.1f} GB, {max(free.values()) / 1e9:.1f} GB are free here; use a machine with more"
    )


class Dice:
    """Draws the next token. `temperature` 0 takes the likeliest; above, chances are those of logits / temperature. `top_k`: only so many of
    the likeliest are drawn from (Fan et al., 2018, arXiv:1805.04833); 0: all. The same seed gives the same draws."""

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

    The model sees at most `window` ids, at most its context. Once they are full, it goes on from the second half of them: that
    is computed anew then, and once in half a window.
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
    """[V] behind `ids`, which come behind `past`."""
    x_1LD = stage.further(torch.tensor([ids]), past)
    return stage.logits(x_1LD[:, -1:])[0, 0]


@torch.no_grad()
def nats(stage: Stage, windows: NDArray[np.int64]) -> float:
    """The sum of -log p over all n x L predictions of windows [n, L + 1], each id from those before it in its window."""
    ids = torch.from_numpy(windows)
    mean = stage.loss(stage(ids[:, :-1]), ids[:, 1:])
    return mean.item() * ids[:, 1:].numel()


class Measured:
    """A copy of the whole model with these values, to be measured. Raises UsageError where there is no memory for it, there and later."""

    def __init__(self, spec: ModelSpec, theta: Theta, wanted: str = "auto") -> None:
        self._context = spec.context
        self._stage = _guarded(lambda: load(spec, theta, wanted))

    def __call__(self, windows: NDArray[np.int64]) -> float:
        """`nats` of windows [n, L + 1]."""
        return _guarded(lambda: nats(self._stage, windows))

    @contextlib.contextmanager
    def moved(self, update: Mapping[str, Sequence[Sparse]], step: float) -> Iterator[None]:
        """Within it the parameters are those with `step` times the update added, and afterwards exactly what they were. `update`: of each
        shard, its tensors in canonical order."""
        held, kept = dict(self._stage.named_parameters()), list[tuple[Tensor, Tensor, Tensor]]()
        try:
            with torch.no_grad():
                for shard, tensors in update.items():
                    for (name, _), sent in zip(layout.tensors(self._stage.spec, shard), tensors, strict=True):
                        flat = held[name].view(-1)
                        index = torch.from_numpy(sent.index).to(flat.device)
                        kept.append((flat, index, flat[index]))
                        flat[index] += step * torch.from_numpy(sent.values).to(flat.device)
            yield
        finally:
            with torch.no_grad():
                for flat, index, values in kept:
                    flat[index] = values

    def goes_on(self, ids: Sequence[int], count: int) -> list[int]:
        """So many ids that continue these, each the likeliest one. Raises LocalError where the model has diverged."""
        likeliest = Dice(0, temperature=0.0)
        return _guarded(lambda: list(islice(continuation(self._stage, ids, self._context, likeliest), count)))


def _guarded(work: Callable[[], T]) -> T:
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not device.is_shortage(error):
            raise
        raise UsageError(f"memory: {shown(error)}; use a machine with more") from None
