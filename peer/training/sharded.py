"""A full replica on several devices that hold it together (peer/training/ranks.py), as one trainer.

This process is rank 0 and has everything else: theta, the text, the update. Each further device has a helper process
(peer/training/helper.py), on this machine or another of its site (peer/training/site.py). Parameters go to their ranks
tensor by tensor when a round begins, and come back so for the update; theta and error feedback stay with this process.

When a helper ends, fails, or takes too long, its tensors and moments are lost: the round's work ends, with one line.
A new trainer begins the next round.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.net.disk import Disk
from peer.state.outer_optimizer import Accumulate
from peer.training import device_group as group
from peer.training import moments as packed_moments
from peer.training.model import Theta
from peer.training.optimizer import OfShards, Pace
from peer.training.ranks import RankTrainer
from peer.training.several_devices import FAILURES, Helper, HelperLost, Patience, form_group
from peer.training.site import Gathering, Member
from protocol.codec.topk import Array, Kept, Map, in_memory
from protocol.errors import LocalError, first_line
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec

PATIENCE = Patience(stuck=180.0)
"""An exchange waits for the slowest rank, which may be compiling."""


class RankLost(LocalError):
    """A rank is lost, and with it the trainer: it can only be closed."""


class ShardedTrainer(RankTrainer):
    """Trains the whole model on several devices, each of which has a part of it.

    devices: at least two of one kind; the first is this process's own.
    threads: of each helper.
    folder: for the file through which ranks find each other, and for moments on their way to a checkpoint.
    site: where the other ranks are; None: on this machine.
    """

    def __init__(
        self,
        spec: ModelSpec,
        train: TrainSpec,
        devices: Sequence[str],
        threads: int,
        folder: Path,
        patience: Patience = PATIENCE,
        site: Gathering | None = None,
    ) -> None:
        ranks = len(devices)
        super().__init__(spec, train, 0, ranks, device=devices[0])
        self._devices, self._patience, self._site = tuple(devices), patience, site
        self._empty = functools.partial(Disk().arrays, folder) if self.device.type == "cpu" else in_memory
        self._exchanging = threading.RLock()  # shards of an update are asked for by several threads
        self._lost: RankLost | None = None
        self._known: set[str] = set()  # parameters that have moments, wherever
        self._ids: list[Tensor] = []  # of the inner step under way, by micro-batch
        self._losses: list[Tensor] = []
        self._turn, self._theirs = 0, list[tuple[str, float]]()
        self._helpers: list[Helper] = []
        with self._together():
            for device, member in zip(devices[1:], self._members(), strict=True):
                self._helpers.append(
                    Helper.start(device, patience.stuck)
                    if member is None
                    else Helper(f"{device} at {member.host}", member.way, patience.stuck)
                )
            for rank, helper in enumerate(self._helpers, start=1):
                helper.say(spec, train, helper.device, threads, (rank, ranks))
            for helper in self._helpers:
                helper.hear(group.Done, 0, patience.start)
            form_group(self._helpers, self.device, folder, patience.stuck, None if site is None else site.site.host)

    def _members(self) -> Sequence[Member | None]:
        """The other machines; None for each rank on this one."""
        if self._site is None:
            return [None] * (len(self._devices) - 1)
        return self._site.take(self._patience.start)

    @property
    def processes(self) -> tuple[int, ...]:
        """The process ids of the helpers."""
        return tuple(helper.pid for helper in self._helpers if helper.pid is not None)

    def close(self) -> None:
        group.leave_group()
        for helper in self._helpers:
            helper.end()
        self._helpers.clear()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """For what other ranks take part in. Raises RankLost, also where one was lost before."""
        with self._exchanging:
            if self._lost is not None:
                raise self._lost
            try:
                yield
            except (HelperLost, *FAILURES, MemoryError) as error:
                self._lost = RankLost(self._why(error))
                self.close()
                raise self._lost from error

    def _why(self, error: BaseException) -> str:
        """The line about a failure. Asks every helper, since any may be the cause of a failed exchange."""
        group.leave_group()  # whoever waits for this process fails at once
        lost = error if isinstance(error, HelperLost) else None
        for helper in self._helpers if lost is None else ():
            try:
                helper.await_idle(self._patience.stuck)
            except HelperLost as found:
                lost = found
                break
        total, remedy = len(self._devices), "the round's work is lost, and the next round begins with all of them again"
        if lost is None:
            return f"devices: {total} hold the model together, and an exchange failed: {first_line(error)}; {remedy}"
        rank = self._helpers.index(lost.helper) + 1
        last = "leave it out of --devices" if self._site is None else f"start it there again with --rank {rank}/{total}"
        return (
            f"devices: {lost.helper.device}, number {rank + 1} of {total} that hold the model together, {lost};"
            f" {remedy}; if it lasts, see what it lacks, or {last}"
        )

    # --- rounds

    def begin_round(self, theta: Theta, pace: Pace | None = None) -> None:
        """As on one device; every rank gets its tensors."""
        pace = pace or self.pace
        with self._together():
            for helper in self._helpers:
                helper.say("take", pace)
            for shard in self.shards:
                for (name, _), array in zip(layout.tensors(self.spec, shard), theta[shard], strict=True):
                    self._place(name, array)
        self._theta = theta
        self.begin_at(pace)

    @torch.no_grad()
    def _place(self, name: str, array: NDArray[np.float32]) -> None:
        found = torch.from_numpy(array if array.flags.writeable else array.copy())
        if self.owners[name] == self.rank:
            self.stage.get_parameter(name).copy_(found)
        else:
            group.give(found.to(self.device), self.owners[name])

    # --- an inner step

    def forward(self, micro: int, ids: Tensor, wire: Tensor | None = None, *, recompute: bool = False) -> Tensor:
        """As on one device. The loss gets its value in the last `backward`."""
        if micro == 0:
            self._forget()
        self._ids.append(ids)
        self._losses.append(torch.zeros((), device=self.device))
        return self._losses[-1]

    def backward(self, micro: int, wire: Tensor | None = None) -> Tensor | None:
        """As on one device. The micro-batches of a turn are computed in that of its last one."""
        ranks, last = len(self._devices), micro + 1 == self.train.micro_batches
        if (micro + 1) % ranks and not last:
            return None
        with self._together():
            first = micro - micro % ranks
            for rank, helper in enumerate(self._helpers, start=1):
                helper.say("turn", self._ids[min(first + rank, micro)].numpy(), first + rank <= micro)
            self._losses[first].copy_(self.turn(self._ids[first]))
            if last:
                self._hear()
        return None

    def _hear(self) -> None:
        """Gives losses their values, and gets the norms of the others' gradients."""
        self._turn, self._theirs = self._turn + 1, []
        for helper in self._helpers:
            helper.say("tell", self._turn)
        for rank, helper in enumerate(self._helpers, start=1):
            told = helper.hear(group.Computed, self._turn, self._patience.stuck)
            for loss, value in zip(self._losses[rank :: len(self._devices)], told.losses, strict=True):
                loss.fill_(value)
            self._theirs += told.norms

    def _all_norms(self) -> OfShards:
        theirs = torch.tensor([norm for _, norm in self._theirs], dtype=torch.float64, device=self.device)
        return [*super()._all_norms(), *zip((shard for shard, _ in self._theirs), theirs, strict=True)]

    def step(self, step: int, total_norm: float) -> None:
        """As on one device; every rank steps its own tensors."""
        with self._together():
            for helper in self._helpers:
                helper.say("step", step, total_norm)
            super().step(step, total_norm)
        self._known = set(self.owners)

    def reset(self) -> None:
        for helper in self._helpers if self._ids else ():
            helper.say("reset")
        self._forget()
        super().reset()

    def _forget(self) -> None:
        self._ids.clear()
        self._losses = []  # the pipeline reads the former ones yet
        self._theirs.clear()

    # --- the round's update

    def displacement(self, shard: str) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """As on one device: theta - local as pairs; those of other ranks stay until the next call. Raises RankLost."""
        return [(a, b.cpu().numpy()) for a, b in self._moved(shard, self._room)]

    def on_device(self, shard: str) -> Accumulate | None:
        """As on one device, where the others' tensors come. Raises RankLost when it is called."""
        update = self._update
        if update is None:
            return None

        def accumulate(feedback: Sequence[Array], beta: np.float32, k: int, run: Map) -> Sequence[Kept]:
            return update.accumulate(self._moved(shard), feedback, beta, k, run)

        return accumulate

    def _moved(self, shard: str, room: Tensor | None = None) -> list[tuple[Array, Tensor]]:
        """Pairs of theta and local. room: for the tensors of other ranks; None: it is allocated."""
        tensors, local, at = layout.tensors(self.spec, shard), dict[str, Tensor](), 0
        with self._together():
            for rank, helper in enumerate([None, *self._helpers]):
                names = self.names_of(rank, shard)
                if helper is None:
                    local |= {name: self.stage.get_parameter(name).detach() for name in names}
                    continue
                helper.say("give", names)
                for name in names:
                    shape = self._elsewhere[name].shape
                    size = math.prod(shape)
                    flat = torch.empty(size, device=self.device) if room is None else room[at : at + size]
                    local[name], at = group.take(flat.view(shape), rank), at + size
        return [(theta, local[name]) for (name, _), theta in zip(tensors, self._loaded()[shard], strict=True)]

    # --- the optimizer's state

    def optimizer_state(self, copy: bool = True) -> dict[str, np.ndarray]:
        """As on one device: always copies, in files of the folder where devices are processors."""
        shards = [shard for shard in self.shards if self.has_moments(shard)]
        return {key: array for shard in shards for key, array in self._moments_of(shard).items()}

    def moments(self, shard: str) -> bytes | None:
        if shard not in self.shards or not self.has_moments(shard):
            return None
        return packed_moments.pack(self.spec, self.train, shard, self._moments_of(shard))

    def has_moments(self, shard: str) -> bool:
        return not self._known.isdisjoint(name for name, _ in layout.tensors(self.spec, shard))

    def load_optimizer(self, state: Mapping[str, np.ndarray]) -> None:
        self._known.clear()
        self._give_moments(state, keep=False)

    def add_moments(self, state: Mapping[str, np.ndarray]) -> None:
        self._give_moments(state, keep=True)

    def _give_moments(self, state: Mapping[str, np.ndarray], keep: bool) -> None:
        """Every rank gets those of its parameters. Raises LocalError for a wrong shape."""
        found = {name for name in self.owners if all(f"{name}/{m}" in state for m in self.moment_shapes(name))}
        for name in found:
            if any(state[f"{name}/{m}"].shape != shape for m, shape in self.moment_shapes(name).items()):
                raise LocalError(f"optimizer state of {name}: has another shape; delete the saved optimizer state")
        with self._together():
            for rank, helper in enumerate(self._helpers, start=1):
                names = [name for name, owner in self.owners.items() if owner == rank and name in found]
                helper.say("take_moments", names, keep)
                for name in names:
                    for moment in self.moment_shapes(name):
                        array = np.asarray(state[f"{name}/{moment}"], np.float32)
                        group.give(torch.tensor(array, device=self.device), rank)
            own = {key: array for key, array in state.items() if self.owners.get(key.rpartition("/")[0]) == self.rank}
            if not keep:
                self._moments.clear()
            super().add_moments(own)
        self._known |= found

    def _moments_of(self, shard: str) -> dict[str, np.ndarray]:
        """The moments of a shard by `<parameter>/<moment>`, new arrays on the host."""
        found: dict[str, np.ndarray] = {}
        with self._together():
            for rank, helper in enumerate([None, *self._helpers]):
                names = [name for name in self.names_of(rank, shard) if name in self._known]
                shapes = {(name, m): shape for name in names for m, shape in self.moment_shapes(name).items()}
                if helper is not None:
                    helper.say("give_moments", names)
                for (key, shape), array in zip(shapes.items(), self._empty(list(shapes.values())), strict=True):
                    name, moment = key
                    if helper is None:
                        held = self._moments[name][moment]
                    else:
                        held = group.take(self._room[: math.prod(shape)].view(shape), rank)
                    array[...] = held.cpu().numpy()
                    found[f"{name}/{moment}"] = array
        return found
