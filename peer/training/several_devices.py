"""A full replica on several devices of one machine: each computes its share of an inner step's micro-batches (data parallel).

This process has the first device, and all that one device has: the state, the text, the update. Each further device has a helper
(peer/training/helper.py). An inner step:

    micro-batches   helpers get theirs first, so that they compute while this process computes its own, the last ones
    one sum         of all gradients, over all devices, when the last micro-batch is computed (peer/training/group.py)
    one step        every device takes it, with the same norm: all have the same parameters and the same optimizer's state

The loss is the mean over the step's tokens, as on one device: each micro-batch counts 1 / micro_batches on whatever device it is. Gradients
differ by the order in which they are added. That order follows from the number of devices and of micro-batches alone, so two runs have the same bits.

At the begin of a round the helpers get the parameters from this process. Who joins a group gets the optimizer's state, too.

*A device is lost* when its helper ends, fails (its memory ran out, most often), or does nothing for too long. The inner step under way is repeated from its
micro-batches by those that are left, which may be this process alone. Nothing of it was taken before: the steps so far, and the round, are kept.
A lost device is tried again when the next round begins, and is left out when it was lost GIVE_UP times.

Calls belong on one worker thread, as those of StageTrainer.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from peer.training import group
from peer.training import helper_messages as messages
from peer.training.helpers import ExchangeFailed, Helper, HelperLost
from peer.training.model import Theta
from peer.training.schedule import Pace
from peer.training.trainer import StageTrainer
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec

GIVE_UP = 3
TRIES = 2
"""Exchanges that fail one after the other, with all helpers alive, before they are left out."""
SLOWER = 4.0
"""A helper may take so many times as long for its share as this process for its own."""
_FAILURES = (RuntimeError, OSError, ExchangeFailed)
"""Of an exchange with the others."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds after which a helper counts as stuck: while it starts, and computes for the first time; and later, in any one exchange."""

    start: float = 180.0
    stuck: float = 60.0


def shares(micro_batches: int, members: int) -> list[range]:
    """Which micro-batches each member of a group computes, by rank. The first member has the last ones; whoever has more than another has one more."""
    sizes = [micro_batches // members + (rank < micro_batches % members) for rank in range(members)]
    ends = [sum(sizes[1 : rank + 1]) for rank in range(1, members)]
    return [range(micro_batches - sizes[0], micro_batches)] + [
        range(end - size, end) for end, size in zip(ends, sizes[1:], strict=True)
    ]


class SeveralDevicesTrainer(StageTrainer):
    """Trains the whole model on `devices`, at least two of one kind, of which the first is this process's own. `threads`: of each helper;
    `folder`: for what is there while a group comes together; `tell` hears, in a line, what becomes of devices."""

    def __init__(
        self,
        spec: ModelSpec,
        train: TrainSpec,
        devices: Sequence[str],
        threads: int,
        folder: Path,
        tell: Callable[[str], None],
        patience: Patience | None = None,
    ) -> None:
        super().__init__(spec, train, layout.shard_names(spec), device=devices[0])
        self._devices, self._threads, self._folder, self._tell = tuple(devices), threads, folder, tell
        self._patience = patience or Patience()
        self._lost = [0] * len(devices)  # how often
        self._helpers: dict[int, Helper] = {}  # by the place of its device
        self._same_state = False  # whether helpers have this optimizer's state
        self._warm: set[Helper] = set()  # that have computed something
        self._said_idle = False
        self._turn, self._began, self._own_seconds = 0, 0.0, 0.0
        self._failures = 0
        self._shares: dict[Helper, range] = {}
        self._ids: list[Tensor] = []  # of the inner step under way, by micro-batch
        self._losses: dict[int, Tensor] = {}  # that helpers are to tell
        self._helper_pieces = 0
        self._start_missing()

    @property
    def processes(self) -> tuple[int, ...]:
        """The process ids of the helpers that are there."""
        return tuple(helper.pid for helper in self._helpers.values())

    def begin_round(self, theta: Theta, pace: Pace | None = None) -> None:
        """As on one device. Helpers that are starting are waited for."""
        super().begin_round(theta, pace)
        self._helper_pieces = 0
        if not self._start_missing() and self._same_state:
            try:
                for helper in self._helpers.values():
                    helper.ask(self._limit(helper))
                self._give(whole=False)
            except (HelperLost, *_FAILURES):
                self._same_state = False
        if not self._same_state:
            self._assemble()
        idle = len(self._devices) - self.train.micro_batches
        if idle > 0 and not self._said_idle:
            self._said_idle = True
            self._tell(
                f"devices: an inner step has {self.train.micro_batches} micro-batches here, so {idle} of {len(self._devices)}"
                " devices have nothing to do; name fewer with --devices"
            )

    def close(self) -> None:
        """Ends the helpers."""
        for helper in self._helpers.values():
            helper.end()
        self._helpers.clear()
        group.leave()

    @property
    def pieces(self) -> int:
        """As on one device, of the device that has least room."""
        return min((rows for rows in (self._pieces.rows, self._helper_pieces) if rows), default=0)

    # --- an inner step

    def forward(self, micro: int, ids: Tensor, wire: Tensor | None = None, *, recompute: bool = False) -> Tensor:
        """As on one device. The loss of a micro-batch that a helper computes has its value when the last `backward` is done."""
        if not self._helpers:
            return super().forward(micro, ids, wire, recompute=recompute)
        if micro == 0:
            self._forget()
            self._begin_step()
        self._ids.append(ids)
        if self._is_given(micro, ids):
            self._losses[micro] = torch.zeros((), device=self.device)
            return self._losses[micro]
        return super().forward(micro, ids, wire, recompute=recompute)

    def backward(self, micro: int, wire: Tensor | None = None) -> Tensor | None:
        """As on one device. That of the last micro-batch waits for the helpers, and adds up."""
        if micro in self._kept:
            super().backward(micro, wire)
        if self._ids and micro + 1 == self.train.micro_batches:
            self._gather()
        return None

    def step(self, step: int, total_norm: float) -> None:
        """As on one device; helpers do the same meanwhile."""
        for helper in self._helpers.values():
            helper.say(messages.Step(step, total_norm))
        self._forget()
        super().step(step, total_norm)

    def reset(self) -> None:
        """As on one device."""
        if self._ids:
            for helper in self._helpers.values():
                helper.say(messages.Reset())
        self._forget()
        super().reset()

    def load_optimizer(self, state: Mapping[str, np.ndarray]) -> None:
        """As on one device; helpers have it when the next round begins."""
        self._same_state = False
        super().load_optimizer(state)

    def add_moments(self, state: Mapping[str, np.ndarray]) -> None:
        """As on one device; helpers have it when the next round begins."""
        self._same_state = False
        super().add_moments(state)

    def _forget(self) -> None:
        self._ids.clear()
        self._losses.clear()

    def _begin_step(self) -> None:
        self._turn, self._began = self._turn + 1, time.perf_counter()
        members = list(self._helpers.values())
        self._shares = dict(zip(members, shares(self.train.micro_batches, 1 + len(members))[1:], strict=True))

    def _is_given(self, micro: int, ids: Tensor) -> bool:
        """Whether a helper computes this one; it is told so."""
        for helper, share in self._shares.items():
            if micro in share:
                helper.say(messages.Compute(self._turn, micro, ids.numpy()))
                return True
        return False

    def _gather(self) -> None:
        """Every parameter has the step's whole gradient, and every loss its value, whoever is lost."""
        while self._helpers:
            self.synchronize()
            self._own_seconds = time.perf_counter() - self._began
            gradients = self.gradient_sums()
            try:
                for helper in self._shares:
                    helper.say(messages.Tell(self._turn))
                heard = [h.hear(messages.Computed, self._turn, self._limit(h)) for h in self._shares]
                for helper in self._shares:
                    helper.say(messages.AddUp())
                group.add_up(gradients)
            except HelperLost as lost:
                self._lose(lost.helper, str(lost))
            except _FAILURES as error:
                self._failed(error)
            else:
                self._warm.update(self._shares)
                self._failures = 0
                self._take_down(heard)
                return
            self._assemble()
            self._repeat()

    def _take_down(self, heard: Sequence[messages.Computed]) -> None:
        """What helpers tell of their shares."""
        for share, computed in zip(self._shares.values(), heard, strict=True):
            rows = (self._helper_pieces, computed.pieces)
            self._helper_pieces = min((r for r in rows if r), default=0)
            for micro, loss in zip(share, computed.losses, strict=True):
                if micro in self._losses:
                    self._losses[micro].fill_(loss)

    def _limit(self, helper: Helper) -> float:
        """Seconds that whatever is asked of it may take."""
        first = 0.0 if helper in self._warm else self._patience.start
        return max(self._patience.stuck, SLOWER * self._own_seconds, first)

    def _repeat(self) -> None:
        """The inner step's micro-batches once more, with the devices that are left."""
        super().reset()
        self._begin_step()
        for micro, ids in enumerate(self._ids):
            if not self._is_given(micro, ids):
                loss = super().forward(micro, ids)
                if micro in self._losses:
                    self._losses[micro].copy_(loss)
                super().backward(micro)

    # --- who takes part

    def _start_missing(self) -> bool:
        """Starts the helpers that are not there, but those that were lost too often. Whether there were such."""
        missing = [
            place
            for place in range(1, len(self._devices))
            if place not in self._helpers and self._lost[place] < GIVE_UP
        ]
        for place in missing:
            begin = messages.Begin(self.spec, self.train, self._devices[place], self._threads)
            try:
                self._helpers[place] = Helper(begin, self._patience.stuck)
            except OSError as error:
                self._left_out(place, f"could not be started: {error.strerror}")
        return bool(missing)

    def _assemble(self) -> None:
        """Makes one group of this process and all helpers, who then have the state of this process. Who fails is lost."""
        self._same_state = False
        group.leave()
        while self._helpers and not self._same_state:
            try:
                for helper in self._helpers.values():
                    helper.await_idle(self._limit(helper))
                self._join()
                self._give(whole=True)
            except HelperLost as lost:
                group.leave()
                self._lose(lost.helper, str(lost))
            except _FAILURES as error:
                group.leave()
                self._failed(error)

    def _join(self) -> None:
        """Raises HelperLost and _FAILURES."""
        members = list(self._helpers.values())
        size, seconds = 1 + len(members), self._patience.stuck
        shown = group.new_secrets(size)
        with tempfile.TemporaryDirectory(prefix="devices-", dir=self._folder, ignore_cleanup_errors=True) as folder:
            seats = [messages.Seat(folder, rank, size, shown, seconds) for rank in range(size)]
            for helper, seat in zip(members, seats[1:], strict=True):
                helper.say(messages.Join(seat))
            group.join(seats[0], self.device)
            for helper in members:
                helper.hear(messages.Done, 0, seconds)

    def _give(self, *, whole: bool) -> None:
        """Gives the helpers the parameters, and where `whole` the optimizer's state. Raises RuntimeError."""
        state = self.optimizer_state(copy=False) if whole else None
        shapes = None if state is None else tuple((name, array.shape) for name, array in state.items())
        for helper in self._helpers.values():
            helper.say(messages.Take(self.pace, shapes))
        group.give([parameter.detach() for parameter in self.stage.parameters()])
        if state is not None:
            group.give([torch.from_numpy(array).to(self.device) for array in state.values()])
        self._same_state = True

    def _failed(self, error: Exception) -> None:
        """After an exchange that failed. Whoever is the cause is found when all are asked; where that does not help, all are left out."""
        self._failures += 1
        if self._failures >= TRIES:
            for helper in list(self._helpers.values()):
                self._lose(helper, f"could not exchange gradients: {error}")
            self._failures = 0

    def _lose(self, helper: Helper, why: str) -> None:
        place = next(place for place, known in self._helpers.items() if known is helper)
        del self._helpers[place]
        self._warm.discard(helper)
        helper.end()
        self._left_out(place, why)

    def _left_out(self, place: int, why: str) -> None:
        self._lost[place] += 1
        total, left = len(self._devices), 1 + len(self._helpers)
        after = "it is started again for the next round"
        if self._lost[place] >= GIVE_UP:
            after = "it is left out from now on: see what it lacks, or leave it out of --devices"
        self._tell(
            f"devices: {self._devices[place]}, number {place + 1} of {total}, {why}; {left} of {total} go on and nothing of the round is"
            f" lost; {after}"
        )
