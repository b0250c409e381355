"""The inner loop's arithmetic for one stage. A full replica is a stage that holds everything: one code path.

AdamW with weight decay on all parameters, or Muon for the matrices inside blocks (peer/training/optimizer.py);
gradients clipped by the whole replica's norm, linear warm-up, cosine to a tenth of the peak. Each micro-batch's
gradient counts 1 / micro_batches, and they are added in micro-batch order. bf16 autocast on CUDA only; parameters, loss
and sums stay fp32.

Not thread-safe: every call belongs on one worker thread (`make_worker`).

Shapes: B rows per micro-batch, L positions, D model width, W residual width.
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
from peer.training import moments as packed_moments
from peer.training.micro_batch import Forwarded, Inputs, MicroBatches
from peer.training.model import Stage, Theta
from peer.training.optimizer import OfShards, Pace, launch_norms, muon_parameters, muon_step, sum_squares
from peer.training.recorded import Graphs
from peer.training.update import DeviceUpdate
from protocol.errors import LocalError
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec

_EVALUATION_ROWS = 16
_ADAMW = ("step", "exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter: number of updates, running means of the gradient and of its square."""


def set_thread_cores(count: int) -> None:
    """For the beginning of a thread: its operations take `count` cores. torch has such a number for the process, too,
    the last that any thread set; a thread that has not asked for its own before its first operation takes that."""
    torch.set_num_threads(count)
    torch.get_num_threads()


def make_worker(threads: int = 1) -> ThreadPoolExecutor:
    """The one thread for all tensor work, with `threads` cores for each operation."""
    return ThreadPoolExecutor(1, "tensor", initializer=set_thread_cores, initargs=(threads,))


def mean_loss(losses: Sequence[Tensor]) -> float:
    """The mean of the last stage's outputs. Raises LocalError if it is not finite."""
    values = torch.stack(tuple(losses)).tolist()
    mean = sum(values) / len(values)
    if not math.isfinite(mean):
        raise LocalError("training: the loss is not finite; the run's learning rate may be too high")
    return mean


class StageTrainer:
    """Trains the `shards` of one stage (protocol/planning/memory.py: stage_shards).

    own: the shards that no other stage of the chain has: without `anchor`.
    empty: as of Stage.
    steps: inner steps done since `begin_round`.
    """

    update_devices = frozenset({"cuda"})
    """Device types that compute a round's update (peer/training/update.py), ROCm's too; for the others the host
    does."""
    recording: Mapping[str, Callable[[torch.device], Graphs]] = {"cuda": Graphs}
    """What records blocks (peer/training/recorded.py), by device type."""
    forms: Mapping[str, torch.dtype] = {"cuda": torch.bfloat16}
    """The number format between the blocks of a chain's stage, by device type; fp32 on the others."""

    def __init__(
        self,
        spec: ModelSpec,
        train: TrainSpec,
        shards: Sequence[str],
        *,
        device: str = "cpu",
        empty: bool = False,
    ) -> None:
        names, own = layout.shard_names(spec), tuple(shard for shard in shards if shard != "anchor")
        anchor = names[spec.n_layers + 2 :]
        if not own or (*own, *anchor) not in {(*names[i : i + len(own)], *anchor) for i in range(len(names))}:
            raise LocalError(f"stage {list(shards)}: not a contiguous range of shards; this is a bug")
        if tuple(shards) != (*own, *anchor):
            raise LocalError(f"stage {list(shards)}: without anchor, or with one that its model lacks; this is a bug")
        if spec.tie_word_embeddings and tuple(shards) != names:
            raise LocalError("stage of a model with tied embeddings: must be the whole model; this is a bug")
        self.spec, self.train, self._rows = spec, train, train.rows
        self.shards, self.own = tuple(shards), own
        self.device = torch.device(device)
        if self.device.type == "cuda":
            # what autocast leaves in fp32 are projections: 11 bits are enough
            torch.backends.cuda.matmul.allow_tf32 = True
            if self.device.index is not None:  # else what pins memory takes some of the first GPU's
                torch.cuda.set_device(self.device)
        blocks = [layout.block_index(name) for name in shards if name.startswith("block.")]
        first, last = (blocks[0], blocks[-1] + 1) if blocks else (0, 0)
        form = self.forms.get(self.device.type, torch.float32) if self.shards != names else torch.float32
        ends = "embed" in shards, "head" in shards
        self.stage = Stage(spec, first, last, *ends, device=self.device, form=form, empty=empty)
        self._update = DeviceUpdate(self.device) if self.device.type in self.update_devices else None
        self._moments: dict[str, dict[str, Tensor]] = {}  # by parameter and name of the moment
        self._muon = muon_parameters(spec, train, shards)
        self.steps = 0
        self.pace = Pace(0, train.inner_steps, train.micro_batches)
        self._theta: Theta | None = None
        self._forwarded: dict[int, Forwarded] = {}
        self._norms: Sequence[tuple[str, Tensor]] = []
        self._micro_batches = MicroBatches(self.stage, self._autocast, self.recording.get(self.device.type))

    @property
    def width(self) -> int:
        """W: values per token and direction between stages."""
        return self.spec.written

    @property
    def piece_rows(self) -> int:
        """Rows of a micro-batch that are computed at once since memory ran out in this round; 0: all."""
        return self._micro_batches.rows

    # --- rounds

    def begin_round(self, theta: Theta, pace: Pace | None = None) -> None:
        """Starts a round; the optimizer's state stays.

        theta: the held shards. `delta` reads the arrays again: they must not change before.
        pace: None: as before.
        """
        self.stage.load(theta, self._update.load if self._update is not None else None)
        self._theta = theta
        self.begin_at(pace or self.pace)

    def begin_at(self, pace: Pace) -> None:
        """Starts a round from the present parameters."""
        if pace.micro_batches % pace.joined or (pace.joined > 1 and self.shards != layout.shard_names(self.spec)):
            raise LocalError(f"{pace.joined} of {pace.micro_batches} micro-batches at once; this is a bug")
        self.train = replace(self.train, rows=pace.joined * self._rows, micro_batches=pace.micro_batches // pace.joined)
        self._micro_batches.begin_round()
        self.pace, self.steps = pace, 0
        self.reset()

    def end_round(self) -> None:
        """Frees what only inner steps need."""
        self._micro_batches.end_round()

    def release(self) -> None:
        """Forgets the arrays of `begin_round`: they may change."""
        self._theta = None

    def close(self) -> None:
        """Ends other processes and threads, of which one device has none."""

    # --- an inner step

    def reset(self) -> None:
        """Forgets an interrupted inner step."""
        self._forwarded.clear()
        self._norms = []
        self._micro_batches.reset()
        for parameter in self.stage.parameters():
            parameter.grad = None

    def synchronize(self) -> None:
        """Waits until the device has computed all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def mark(self) -> torch.cuda.Event | None:
        """A place in the device's queue of work; None where a call returns when its work is done."""
        if self.device.type != "cuda":
            return None
        mark = torch.cuda.Event(enable_timing=True, blocking=True)
        mark.record(torch.cuda.current_stream(self.device))
        return mark

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def forward(self, micro: int, ids: Tensor, wire: Tensor | None = None, *, recompute: bool = False) -> Tensor:
        """One micro-batch through this stage: the values for the next stage [B, L, W], or the mean loss [] (nats per
        token) in the last one. Where memory runs out, computed in pieces; raises torch's error where not even those
        fit.

        ids: [B, L+1], best in (pinned) host memory.
        wire: [B, L, W] from the previous stage.
        recompute: keep the inputs only; `backward` computes the forward again, to the same bits.
        """
        self._forwarded[micro], outward = self._micro_batches.forward(Inputs(ids, wire), recompute=recompute)
        return outward

    def backward(self, micro: int, wire: Tensor | None = None) -> Tensor | None:
        """Adds the micro-batch's gradients. Returns the values for the previous stage [B, L, W], None in the first one.

        wire: [B, L, W] from the next stage; None in the last one.
        """
        return self._micro_batches.backward(self._forwarded.pop(micro), wire, self.train.micro_batches)

    def launch_norms(self) -> None:
        """All gradients of the step are there: a GPU computes their norms before `grad_sumsq` asks for them."""
        if self.device.type == "cuda":
            self._norms = self._all_norms()

    def grad_sumsq(self) -> list[tuple[str, float]]:
        """Sum of the squared gradients of each held shard, canonical order; that of `anchor` is part of the first
        one's, for each stage has its own. Raises LocalError if not finite."""
        norms = self._norms or self._all_norms()
        return sum_squares([(self.own[0] if s == "anchor" else s, norm) for s, norm in norms], self.own)

    def _all_norms(self) -> OfShards:
        return launch_norms(self._gradients())

    def _gradients(self) -> list[tuple[str, Tensor]]:
        held = ((shard, p) for shard in self.shards for p in self.stage.parameters_of(shard).values())
        return [(shard, p.grad) for shard, p in held if p.grad is not None]

    @torch.no_grad()
    def step(self, step: int, total_norm: float) -> None:
        """Clips by the replica's gradient norm and takes inner step `step`; the round's first one is `pace.before` + 1.
        Takes all memory first: where there is none, parameters and moments are unchanged."""
        scale = min(1.0, self.train.clip / (total_norm + 1e-6))
        parameters = {name: p for name, p in self.stage.named_parameters() if p.grad is not None}
        for name, parameter in parameters.items():
            if name not in self._moments:
                shapes = self._moment_shapes(name, parameter)
                self._moments[name] = {key: torch.zeros(shape, device=self.device) for key, shape in shapes.items()}
        if scale < 1.0 and parameters:
            torch._foreach_mul_([p.grad for p in parameters.values() if p.grad is not None], scale)
        rate = self.pace.rate(self.train, step)
        if matrices := {name: parameters.pop(name) for name in list(parameters) if name in self._muon}:
            momenta = [self._moments[name][packed_moments.MOMENTUM] for name in matrices]
            muon_step(list(matrices.values()), momenta, self.train, rate)
        self._adamw(parameters, rate)
        self.reset()
        self._micro_batches.stepped()
        self.steps += 1

    def _adamw(self, parameters: Mapping[str, Parameter], rate: float) -> None:
        """One call for all of these parameters."""
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
            lr=rate,
            weight_decay=self.train.weight_decay,
            eps=1e-8,
            maximize=False,
        )

    # --- the round's update

    def displacement(self, shard: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """theta - local of a held shard as pairs (`Stage.displacement`), canonical order."""
        return self.stage.displacement(shard, self._loaded())

    def on_device(self, shard: str) -> Accumulate | None:
        """Adds theta - local of a held shard to the error feedback and selects, on the device; None where the host
        does, by `displacement`."""
        if self._update is None:
            return None
        return functools.partial(self._update.accumulate, self.stage.moved(shard, self._loaded()))

    def _loaded(self) -> Theta:
        if self._theta is None:
            raise LocalError("displacement before begin_round; this is a bug")
        return self._theta

    def delta(self, shard: str) -> list[np.ndarray]:
        """theta - local of a held shard, fp32, in canonical order."""
        return difference(self.displacement(shard))

    # --- the optimizer's state

    def _moment_shapes(self, name: str, parameter: Parameter) -> dict[str, tuple[int, ...]]:
        if name in self._muon:
            return {packed_moments.MOMENTUM: tuple(parameter.shape)}
        return {key: () if key == "step" else tuple(parameter.shape) for key in _ADAMW}

    def optimizer_state(self, copy: bool = True) -> dict[str, np.ndarray]:
        """The moments as `<parameter>/<moment>`: fp32 arrays. Without `copy` the next step may change them."""
        found = {f"{n}/{key}": x.cpu().numpy() for n, moments in self._moments.items() for key, x in moments.items()}
        return {key: array.copy() for key, array in found.items()} if copy else found

    def moments(self, shard: str) -> bytes | None:
        """The packed moments of a held shard (peer/training/moments.py); None before the first step."""
        if shard not in self.shards or not self.has_moments(shard):
            return None
        names = [name for name, _ in layout.tensors(self.spec, shard)]
        moments = {name: self._moments[name] for name in names if name in self._moments}
        state = {f"{name}/{key}": x.cpu().numpy() for name, found in moments.items() for key, x in found.items()}
        return packed_moments.pack(self.spec, self.train, shard, state)

    def has_moments(self, shard: str) -> bool:
        """Returns whether the optimizer has moments of this shard."""
        return any(name in self._moments for name, _ in layout.tensors(self.spec, shard))

    def load_optimizer(self, state: Mapping[str, np.ndarray]) -> None:
        """Replaces the moments; ignores those of parameters that are not held. Raises LocalError for a wrong shape."""
        self._moments.clear()
        self.add_moments(state)

    def add_moments(self, state: Mapping[str, np.ndarray]) -> None:
        """As `load_optimizer`, for the parameters that have none."""
        for name, parameter in self.stage.named_parameters():
            if name in self._moments:
                continue
            shapes = self._moment_shapes(name, parameter)
            found = {moment: state[key] for moment in shapes if (key := f"{name}/{moment}") in state}
            if len(found) < len(shapes):
                continue
            if {moment: array.shape for moment, array in found.items()} != shapes:
                raise LocalError(f"optimizer state of {name}: has another shape; delete the saved optimizer state")
            self._moments[name] = {
                moment: torch.tensor(array, dtype=torch.float32, device=self.device) for moment, array in found.items()
            }

    @torch.no_grad()
    def evaluate(self, windows: np.ndarray) -> float:
        """Mean nats per token over integer windows [N, L+1]; needs the whole model."""
        if self.shards != layout.shard_names(self.spec):
            raise LocalError("this peer holds only a part of the model; ask a full peer")
        total = 0.0
        for start in range(0, len(windows), _EVALUATION_ROWS):
            ids = torch.tensor(windows[start : start + _EVALUATION_ROWS].astype(np.int64), device=self.device)
            with self._autocast():
                total += self.stage.loss(self.stage(ids[:, :-1]), ids[:, 1:]).item() * len(ids)
        return total / len(windows)
