"""The inner loop's arithmetic for one stage. A full replica is a stage that has everything: one code path.

Inner optimizer of SparseLoCo: AdamW with weight decay on all parameters, or Muon (peer/training/muon.py) for the matrices inside
blocks and AdamW for the others; clip by the whole replica's global norm, linear warm-up, cosine to a tenth of the peak.
The loss of a step is the mean over its tokens: micro-batches are equal, so each one's gradient counts 1 / micro_batches, and they
are added in micro-batch order. bf16 autocast on CUDA only; parameters, loss and sums stay fp32. Nothing waits for the device but what
reads a result: `mean_loss`, `grad_sumsq`.

Not thread-safe: every call belongs on one worker thread (`make_worker`).

Shapes: B rows per micro-batch, L positions, D model width, K subspace width (W: K, or D when k = 0).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from peer.state.outer_optimizer import Accumulate, difference
from peer.training import moments as small_moments
from peer.training import muon, norms
from peer.training.device import Mark
from peer.training.model import Stage, Theta
from peer.training.pieces import Deferred, Kept, Pieces, Work
from peer.training.recorded import Graphs, Recording
from peer.training.schedule import Pace
from peer.training.update import DeviceUpdate
from protocol.errors import LocalError
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec

COORDINATES = "model.embed_tokens.coordinates"
_EVALUATION_ROWS = 16
_ADAMW = ("step", "exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter: how often it was updated, running means of the gradient and of its square."""


def cores(count: int) -> None:
    """For the beginning of a thread: its operations take so many cores. torch has such a number for the process, too, the last that any thread said;
    a thread that has not asked for its own before its first operation takes that."""
    torch.set_num_threads(count)
    torch.get_num_threads()


def make_worker(threads: int = 1) -> ThreadPoolExecutor:
    """The one thread for all tensor work, with `threads` cores for each operation."""
    return ThreadPoolExecutor(1, "tensor", initializer=cores, initargs=(threads,))


def mean_loss(losses: Sequence[Tensor]) -> float:
    """Of what the last stage's `forward` returned. Raises LocalError if it is not finite."""
    values = torch.stack(tuple(losses)).tolist()
    mean = sum(values) / len(values)
    if not math.isfinite(mean):
        raise LocalError("training: the loss is not finite; the run's learning rate may be too high")
    return mean


class StageTrainer:
    """Trains the contiguous `shards` of one replica.

    `rank`: values per token at this chain's boundaries, 0 for whole activations and for a full replica; `basis`
    [D, >= rank] (protocol/codec/subspace.py) is needed when `rank` > 0. `steps`: inner steps done since `begin_round`.
    """

    update_devices = frozenset({"cuda"})
    """Types of devices that work out a round's update (peer/training/update.py); of the others the host does it. torch says "cuda" of
    ROCm, too."""
    recording: Mapping[str, Callable[[torch.device], Recording]] = {"cuda": Graphs}
    """What records blocks (peer/training/recorded.py), by type of device; on the others they are called each time."""
    forms: Mapping[str, torch.dtype] = {"cuda": torch.bfloat16}
    """The number format of activations between the blocks of a compressed chain's stage, by type of device; fp32 on the others."""

    def __init__(
        self,
        spec: ModelSpec,
        train: TrainSpec,
        shards: Sequence[str],
        *,
        rank: int = 0,
        basis: np.ndarray | None = None,
        device: str = "cpu",
    ) -> None:
        names = layout.shard_names(spec)
        if not shards or tuple(shards) not in {names[i : i + len(shards)] for i in range(len(names))}:
            raise LocalError(f"stage {list(shards)}: not a contiguous range of shards; this is a bug")
        if rank and (basis is None or basis.shape[0] != spec.d_model or not rank <= basis.shape[1]):
            raise LocalError(f"stage of a chain with rank {rank}: no basis of that width; this is a bug")
        if spec.tie_word_embeddings and (rank or tuple(shards) != names):
            raise LocalError("stage of a model with tied embeddings: must be the whole model; this is a bug")
        self.spec, self.train, self.rank, self._rows = spec, train, rank, train.rows
        self.shards = tuple(shards)
        self.device = torch.device(device)
        if self.device.type == "cuda":
            # what autocast leaves in fp32 are projections: 11 bits are enough
            torch.backends.cuda.matmul.allow_tf32 = True
            if self.device.index is not None:  # else what pins memory takes some of the first GPU's
                torch.cuda.set_device(self.device)
        blocks = [layout.block_index(name) for name in shards if name.startswith("block.")]
        u_DK = torch.tensor(np.ascontiguousarray(basis[:, :rank])) if rank and basis is not None else None
        first, last = (blocks[0], blocks[-1] + 1) if blocks else (0, 0)
        form = self.forms.get(self.device.type, torch.float32) if rank else torch.float32
        self.stage = Stage(
            spec, first, last, "embed" in shards, "head" in shards, u_DK=u_DK, device=self.device, form=form
        )
        self._update = DeviceUpdate(self.device) if self.device.type in self.update_devices else None
        self._moments: dict[str, dict[str, Tensor]] = {}  # by parameter, and by what it is
        self._muon = muon.trained(spec, train, shards)
        self.steps = 0
        self.pace = Pace(0, train.inner_steps, train.micro_batches)
        self._theta: Theta | None = None
        self._kept: dict[int, Kept | Deferred] = {}
        self._norms: list[tuple[str, Tensor]] = []
        self._pieces = Pieces(self.stage, self._autocast, self.recording.get(self.device.type))

    @property
    def width(self) -> int:
        """W: values per token and direction at this chain's boundaries."""
        return self.rank or self.spec.d_model

    def begin_round(self, theta: Theta, pace: Pace | None = None) -> None:
        """Starts from `theta`: the held shards, and `embed` too when `rank` > 0. The optimizer's state stays. `pace` stays as it
        was where None is given.

        The arrays are read again by `delta`: they must not change before that.
        """
        self.stage.load(theta, self._update.load if self._update is not None else None)
        self._theta = theta
        self.begin_at(pace or self.pace)

    def begin_at(self, pace: Pace) -> None:
        """Starts from the parameters that there are."""
        if pace.micro_batches % pace.joined or (pace.joined > 1 and self.shards != layout.shard_names(self.spec)):
            raise LocalError(f"{pace.joined} of {pace.micro_batches} micro-batches at once; this is a bug")
        self.train = replace(self.train, rows=pace.joined * self._rows, micro_batches=pace.micro_batches // pace.joined)
        self._pieces.begin()
        self.pace, self.steps = pace, 0
        self.reset()

    def rest(self) -> None:
        """Forgets what only inner steps need, after the round's last one."""
        self._pieces.rest()

    def close(self) -> None:
        """Ends what else it has begun to run, which is nothing on one device."""

    def reset(self) -> None:
        """Forgets what an interrupted inner step left behind."""
        self._kept.clear()
        self._norms = []
        self._pieces.reset()
        for parameter in self.stage.parameters():
            parameter.grad = None

    def synchronize(self) -> None:
        """Waits until the device has computed what it was given: seconds that are measured mean something then."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def mark(self) -> Mark | None:
        """A place in the device's work, behind what it was given so far; None where that is done when the call which gives it returns."""
        if self.device.type != "cuda":
            return None
        mark = torch.cuda.Event(enable_timing=True, blocking=True)
        mark.record(torch.cuda.current_stream(self.device))
        return mark

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    @property
    def pieces(self) -> int:
        """Rows of a micro-batch that are computed at once since memory ran out in this round; 0: all (peer/training/pieces.py)."""
        return self._pieces.rows

    def forward(self, micro: int, ids: Tensor, wire: Tensor | None = None, *, recompute: bool = False) -> Tensor:
        """One micro-batch through this stage; ids [B, L+1], best in (pinned) host memory. `wire` [B, L, W] came from the previous stage.

        Returns what goes to the next stage [B, L, W], or the mean loss [] (nats per token) if this is the last.
        `recompute`: keep only what came in; `backward` computes the rest anew, to the same bits. Where memory runs out, it is computed in
        pieces; raises what torch raises where not even those fit.
        """
        work = Work(ids, wire)

        def once() -> tuple[Kept | Deferred, Tensor]:
            # on CUDA what is compiled without gradients is other code than with them: it may give other bits
            with torch.set_grad_enabled(not recompute or self.device.type == "cuda"):
                kept = self._pieces.through(work)
            if recompute:
                self._pieces.forget(kept)
            return Deferred(work) if recompute else kept, kept.outward.detach()

        self._kept[micro], outward = self._pieces.forward(work, once)
        if self.stage.has_head:
            return outward
        boundary = self.stage.boundary
        return boundary.compress(outward) if boundary is not None else outward

    def expect(self, ids: Tensor) -> None:
        """Says which micro-batch comes next, so that what it needs of the host is on its way before; ids [B, L+1]."""
        if self.stage.boundary is not None:
            self.stage.boundary.expect(ids[:, :-1])

    def backward(self, micro: int, wire: Tensor | None = None) -> Tensor | None:
        """Adds the micro-batch's gradients. `wire` [B, L, W] came from the next stage; None for the last.

        Returns what goes to the previous stage [B, L, W], or None if this is the first. Memory that runs out: as in `forward`.
        """
        boundary = self.stage.boundary
        kept, gradient = self._kept.pop(micro), wire
        if boundary is not None and wire is not None:
            slot = kept.slot if isinstance(kept, Kept) else None
            gradient = boundary.expand_grad(wire, None if slot is None else slot.gradient)
        inward = self._pieces.backward(kept, gradient, self.train.micro_batches)
        if inward is None:
            return None
        return boundary.compress_grad(inward) if boundary is not None else inward

    def gradient_sums(self) -> list[Tensor]:
        """The sums so far, of all parameters in their order."""
        for parameter in self.stage.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [p.grad for p in self.stage.parameters() if p.grad is not None]

    def expect_sumsq(self) -> None:
        """Says that the step has all its gradients, so that a GPU computes what `grad_sumsq` asks for before the host does."""
        if self.device.type == "cuda":
            self._norms = norms.launch(self._gradients())

    def grad_sumsq(self) -> list[tuple[str, float]]:
        """Sum of the squared gradients of each held shard, canonical order. Raises LocalError if not finite."""
        return norms.squares(self._norms or norms.launch(self._gradients()), self.shards)

    def _gradients(self) -> list[tuple[str, Tensor]]:
        """Those that there are, each with its shard, canonical order."""
        gradients = {name: p.grad for name, p in self.stage.named_parameters()}
        held: list[tuple[str, Tensor]] = []
        for shard in self.shards:
            compressed = shard == "embed" and self.rank
            names = [COORDINATES] if compressed else [name for name, _ in layout.tensors(self.spec, shard)]
            held += [(shard, found) for name in names if (found := gradients.get(name)) is not None]
        return held

    @torch.no_grad()
    def step(self, step: int, total_norm: float) -> None:
        """Clips by the replica's gradient norm and lets the optimizer take inner step `step`; the round's first one is `pace.before` + 1. All memory is taken
        first: where there is none, parameters and moments are as they were, and nothing that was half done goes into an update."""
        scale = min(1.0, self.train.clip / (total_norm + 1e-6))
        parameters = {name: p for name, p in self.stage.named_parameters() if p.grad is not None}
        for name, parameter in parameters.items():
            if name not in self._moments:
                shapes = self._state_shapes(name, parameter)
                self._moments[name] = {key: torch.zeros(shape, device=self.device) for key, shape in shapes.items()}
        matrices = {name: parameters.pop(name) for name in list(parameters) if name in self._muon}
        space = muon.Space(list(matrices.values())) if matrices else None
        if scale < 1.0:
            torch._foreach_mul_(
                [p.grad for p in (*matrices.values(), *parameters.values()) if p.grad is not None], scale
            )
        rate = self.pace.rate(self.train, step)
        if space is not None:
            momenta = [self._moments[name][small_moments.MOMENTUM] for name in matrices]
            muon.step(list(matrices.values()), momenta, self.train, rate, space)
        if self.train.scale_embedding_lr and COORDINATES in parameters:
            self._adamw({COORDINATES: parameters.pop(COORDINATES)}, rate, math.sqrt(self.spec.d_model / self.rank))
        self._adamw(parameters, rate)
        self.reset()
        self._pieces.stepped()
        self.steps += 1

    def _adamw(self, parameters: Mapping[str, Parameter], rate: float, scale: float = 1.0) -> None:
        """One call for all of these parameters; they move by `scale` times as much as the rate says, and decay as it says."""
        moments = [self._moments[name] for name in parameters]
        adamw(  # the function, not the class: that imports the compiler (seconds, and 100 MB)
            list(parameters.values()),
            [p.grad for p in parameters.values() if p.grad is not None],
            [m["exp_avg"] for m in moments],
            [m["exp_avg_sq"] for m in moments],
            [],
            [m["step"] for m in moments],
            fused=True,
            amsgrad=False,
            beta1=self.train.beta1,
            beta2=self.train.beta2,
            lr=rate * scale,
            weight_decay=self.train.weight_decay / scale,
            eps=1e-8,
            maximize=False,
        )

    def displacement(self, shard: str) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """theta - local for one held shard as pairs (peer/training/model.py), canonical order (positive sign convention)."""
        return self.stage.displacement(shard, self._loaded())

    def on_device(self, shard: str) -> Accumulate | None:
        """What adds theta - local of one held shard to the error feedback on the device, and selects there; None where that is the
        host's work, by `displacement`."""
        if self._update is None:
            return None
        return functools.partial(self._update.accumulate, self.stage.moved(shard, self._loaded()))

    def _loaded(self) -> Theta:
        if self._theta is None:
            raise LocalError("displacement before begin_round; this is a bug")
        return self._theta

    def delta(self, shard: str) -> list[np.ndarray]:
        """theta - local for one held shard, fp32, in canonical order."""
        return difference(self.displacement(shard))

    def release(self) -> None:
        """Forgets the arrays that `begin_round` got: they may change."""
        self._theta = self.stage.boundary = None

    def optimizer_state(self, copy: bool = True) -> dict[str, np.ndarray]:
        """The optimizer's moments as `<parameter>/<moment>`: fp32 arrays. Without `copy` the next step may change them."""
        found: dict[str, np.ndarray] = {}
        for name, moments in self._moments.items():
            for moment, tensor in moments.items():
                value = tensor.cpu().numpy()
                found[f"{name}/{moment}"] = value.copy() if copy else value
        return found

    def _state_shapes(self, name: str, parameter: Parameter) -> dict[str, tuple[int, ...]]:
        """The shapes of the moments of a parameter."""
        if name in self._muon:
            return {small_moments.MOMENTUM: tuple(parameter.shape)}
        return {key: () if key == "step" else tuple(parameter.shape) for key in _ADAMW}

    def moments(self, shard: str) -> bytes | None:
        """The optimizer's moments of a held shard, made small (peer/training/moments.py); None before the first step."""
        names = {name for name, _ in layout.tensors(self.spec, shard)} if shard in self.shards else set()
        state = {
            f"{name}/{moment}": tensor.cpu().numpy()
            for name, moments in self._moments.items()
            if name in names
            for moment, tensor in moments.items()
        }
        return small_moments.pack(self.spec, self.train, shard, state) if state else None

    def has_moments(self, shard: str) -> bool:
        """Whether the optimizer has moments of this shard."""
        return any(name in self._moments for name, _ in layout.tensors(self.spec, shard))

    def load_optimizer(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes the moments of the parameters held here; the others start afresh. What is not held is ignored.

        A chain's embedding coordinates of another rank start afresh too. Raises LocalError if a shape does not fit.
        """
        self._moments.clear()
        self.add_moments(state)

    def add_moments(self, state: Mapping[str, np.ndarray]) -> None:
        """The same, for the parameters that have none."""
        for name, parameter in self.stage.named_parameters():
            if name in self._moments:
                continue
            shapes = self._state_shapes(name, parameter)
            found = {moment: state[key] for moment in shapes if (key := f"{name}/{moment}") in state}
            if len(found) < len(shapes):
                continue
            if {moment: array.shape for moment, array in found.items()} != shapes:
                if name == COORDINATES:
                    continue
                raise LocalError(f"optimizer state of {name}: has another shape; delete the saved optimizer state")
            self._moments[name] = {
                moment: torch.tensor(array, dtype=torch.float32, device=self.device) for moment, array in found.items()
            }

    def _whole(self) -> None:
        if self.shards != layout.shard_names(self.spec):
            raise LocalError("this peer holds only a part of the model; ask a full peer")

    @torch.no_grad()
    def evaluate(self, windows: np.ndarray) -> float:
        """Mean nats per token over integer windows [N, L+1]; needs the whole model."""
        self._whole()
        total = 0.0
        for start in range(0, len(windows), _EVALUATION_ROWS):
            ids = torch.tensor(windows[start : start + _EVALUATION_ROWS].astype(np.int64), device=self.device)
            with self._autocast():
                total += self.stage.loss(self.stage(ids[:, :-1]), ids[:, 1:]).item() * len(ids)
        return total / len(windows)
