"""Data parallelism within one machine: a full replica on several devices, each with its share of the micro-batches.

This process has the first device, and everything else: the state, the text, the update. Each further device has a
helper process (peer/training/helper.py). An inner step:

    micro-batches   helpers get theirs first, and compute while this process computes its own, the last ones
    one sum         of all gradients, over all devices, after the last micro-batch (peer/training/device_group.py)
    one step        by every device, with the same norm: parameters and optimizer state stay the same on all

Gradients differ from one device's by the order of their sums, which follows from the number of devices and of
micro-batches. When a helper ends, fails, or takes too long, the others repeat the micro-batches of the inner step under
way. A lost device is tried again when the next round begins, and left out after GIVE_UP losses.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from peer.training import device_group as group
from peer.training.model import Theta
from peer.training.optimizer import Pace
from peer.training.trainer import StageTrainer
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec

# --- helpers

END_SECONDS = 5.0
A = TypeVar("A", group.Done, group.Computed)


class HelperLost(Exception):
    """`helper` is of no use any more; the text says what it did, behind its name."""

    def __init__(self, helper: Helper, why: str) -> None:
        super().__init__(why)
        self.helper = helper


class ExchangeFailed(Exception):
    """An exchange between members of the group failed; any of them may be the cause."""


class Helper:
    """One process on `device`, at the other end of `way`.

    stuck: seconds after which it is lost if it does not even read.
    process: None: it is on another machine.
    """

    def __init__(
        self, device: str, way: socket.socket, stuck: float, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.device = device
        self._stuck = stuck
        self._lost: str | None = None
        self._asked = 0
        self._way, self._process = way, process

    @classmethod
    def start(cls, device: str, stuck: float) -> Helper:
        """One on this machine. Raises OSError."""
        way, theirs = socket.socketpair()
        with theirs:
            return cls(device, way, stuck, begin(theirs))

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def say(self, *order: object) -> None:
        """Sends an order: a method's name (peer/training/helper.py) and its arguments. A failure shows in `hear`."""
        if self._lost is None:
            self._way.settimeout(self._stuck)
            try:
                group.send(self._way, order)
            except TimeoutError:
                self._lost = f"did not read for {self._stuck:g} s"
            except OSError:
                self._lost = self._ended()

    def hear(self, kind: type[A], number: int, seconds: float) -> A:
        """Its next answer of this kind to the `ask` of this number, or of this turn; skips older ones.

        Raises HelperLost, ExchangeFailed."""
        while True:
            answer = self._next(seconds)
            if isinstance(answer, group.Failed):
                if answer.together:
                    raise ExchangeFailed(answer.why)
                self._lost = f"failed: {answer.why}"
                raise HelperLost(self, self._lost)
            if isinstance(answer, kind):
                found = answer.turn if isinstance(answer, group.Computed) else answer.number
                if found == number:
                    return answer

    def ask(self, seconds: float) -> None:
        """Waits until it has done all orders. Raises as `hear` does."""
        self._asked += 1
        self.say("ask", self._asked)
        self.hear(group.Done, self._asked, seconds)

    def await_idle(self, seconds: float) -> None:
        """Waits until it has done, or failed to do, all orders. Raises HelperLost."""
        while True:
            try:
                return self.ask(seconds)
            except ExchangeFailed:
                pass

    def end(self) -> None:
        self._way.close()
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS if self._lost is None else 0.0)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the system does not let go of it
            self._process.wait(END_SECONDS)

    def _next(self, seconds: float) -> object:
        if self._lost is None:
            self._way.settimeout(seconds)
            try:
                return group.receive(self._way)
            except TimeoutError:
                self._lost = f"did nothing for {seconds:g} s"
            except (EOFError, OSError):
                self._lost = self._ended()
        raise HelperLost(self, self._lost)

    def _ended(self) -> str:
        if self._process is None:
            return "closed its connection"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(END_SECONDS)
            return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return "closed its connection"


def begin(way: socket.socket, *own: object) -> subprocess.Popen[bytes]:
    """Starts the process of a helper, at this end. own: its device and threads, where its machine decides them."""
    return subprocess.Popen(
        [sys.executable, "-m", "peer.training.helper", str(way.fileno()), *map(str, own)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(way.fileno(),),
        start_new_session=True,
    )


def form_group(
    helpers: Sequence[Helper], device: torch.device, folder: Path, seconds: float, host: str | None = None
) -> None:
    """Makes a group of this process, its first member, and these. Raises HelperLost, RuntimeError, ExchangeFailed.

    folder: for the file through which they find each other.
    seconds: for one exchange.
    host: an address of this machine at which those on other machines find it; None: all are on this one.
    """
    size = 1 + len(helpers)
    shown = group.new_secrets(size)
    listening, port = group.listen(host)
    with tempfile.TemporaryDirectory(prefix="devices-", dir=folder, ignore_cleanup_errors=True) as name:
        joins = [group.Join(name, rank, size, shown, seconds, port) for rank in range(size)]
        for helper, join in zip(helpers, joins[1:], strict=True):
            helper.say("join", join)
        group.join_group(joins[0], device, None if host is None else (host, host), listening)
        for helper in helpers:
            helper.hear(group.Done, 0, seconds)


# --- several devices

GIVE_UP = 3
EXCHANGE_TRIES = 2
"""Consecutive exchanges that fail, with all helpers alive, before all are left out."""
SLOWER = 4.0
"""The most seconds for a helper's share, in units of this process's seconds for its own."""
FAILURES = (RuntimeError, OSError, ExchangeFailed)
"""Raised by an exchange with the others."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds after which a helper counts as stuck.

    start: while it starts and computes for the first time.
    stuck: later, in any one exchange.
    """

    start: float = 180.0
    stuck: float = 60.0


def shares(micro_batches: int, members: int) -> list[range]:
    """The micro-batches of each member of a group, by rank: equal numbers or one more. The first member has the last
    ones."""
    sizes = [micro_batches // members + (rank < micro_batches % members) for rank in range(members)]
    ends = [sum(sizes[1 : rank + 1]) for rank in range(1, members)]
    return [range(micro_batches - sizes[0], micro_batches)] + [
        range(end - size, end) for end, size in zip(ends, sizes[1:], strict=True)
    ]


class SeveralDevicesTrainer(StageTrainer):
    """Trains the whole model on several devices.

    devices: at least two of one kind; the first is this process's own.
    threads: of each helper.
    folder: for the file through which members of a group find each other.
    tell: takes a line on each change of the devices in use.
    """

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
        self._warm: set[Helper] = set()  # they have computed before
        self._said_idle = False
        self._turn, self._began, self._own_seconds = 0, 0.0, 0.0
        self._failures = 0
        self._shares: dict[Helper, range] = {}
        self._ids: list[Tensor] = []  # of the inner step under way, by micro-batch
        self._losses: dict[int, Tensor] = {}  # of helpers, not known yet
        self._helper_rows = 0
        self._start_missing()

    @property
    def processes(self) -> tuple[int, ...]:
        return tuple(helper.pid for helper in self._helpers.values() if helper.pid is not None)

    def begin_round(self, theta: Theta, pace: Pace | None = None) -> None:
        """As on one device; waits for helpers that are starting."""
        super().begin_round(theta, pace)
        self._helper_rows = 0
        if not self._start_missing() and self._same_state:
            try:
                for helper in self._helpers.values():
                    helper.ask(self._limit(helper))
                self._give(whole=False)
            except (HelperLost, *FAILURES):
                self._same_state = False
        if not self._same_state:
            self._assemble()
        idle = len(self._devices) - self.train.micro_batches
        if idle > 0 and not self._said_idle:
            self._said_idle = True
            self._tell(
                f"devices: an inner step has {self.train.micro_batches} micro-batches here, so {idle} of"
                f" {len(self._devices)} devices have nothing to do; name fewer with --devices"
            )

    def close(self) -> None:
        for helper in self._helpers.values():
            helper.end()
        self._helpers.clear()
        group.leave_group()

    @property
    def piece_rows(self) -> int:
        """As on one device: of the device with the least room."""
        return min((rows for rows in (self._micro_batches.rows, self._helper_rows) if rows), default=0)

    # --- an inner step

    def forward(self, micro: int, ids: Tensor, wire: Tensor | None = None, *, recompute: bool = False) -> Tensor:
        """As on one device. The loss of a helper's micro-batch gets its value in the last `backward`."""
        if not self._helpers:
            return super().forward(micro, ids, wire, recompute=recompute)
        if micro == 0:
            self._forget()
            self._begin_step()
        self._ids.append(ids)
        if self._send_to_helper(micro, ids):
            self._losses[micro] = torch.zeros((), device=self.device)
            return self._losses[micro]
        return super().forward(micro, ids, wire, recompute=recompute)

    def backward(self, micro: int, wire: Tensor | None = None) -> Tensor | None:
        """As on one device. That of the last micro-batch adds up the gradients of all devices."""
        if micro in self._forwarded:
            super().backward(micro, wire)
        if self._ids and micro + 1 == self.train.micro_batches:
            self._gather()
        return None

    def step(self, step: int, total_norm: float) -> None:
        """As on one device; helpers do the same meanwhile."""
        for helper in self._helpers.values():
            helper.say("step", step, total_norm)
        self._forget()
        super().step(step, total_norm)

    def reset(self) -> None:
        if self._ids:
            for helper in self._helpers.values():
                helper.say("reset")
        self._forget()
        super().reset()

    def load_optimizer(self, state: Mapping[str, np.ndarray]) -> None:
        """As on one device; helpers get it when the next round begins."""
        self._same_state = False
        super().load_optimizer(state)

    def add_moments(self, state: Mapping[str, np.ndarray]) -> None:
        """As on one device; helpers get it when the next round begins."""
        self._same_state = False
        super().add_moments(state)

    def _forget(self) -> None:
        self._ids.clear()
        self._losses.clear()

    def _begin_step(self) -> None:
        self._turn, self._began = self._turn + 1, time.perf_counter()
        members = list(self._helpers.values())
        self._shares = dict(zip(members, shares(self.train.micro_batches, 1 + len(members))[1:], strict=True))

    def _send_to_helper(self, micro: int, ids: Tensor) -> bool:
        """Returns whether the micro-batch is a helper's, which gets it."""
        for helper, share in self._shares.items():
            if micro in share:
                helper.say("compute", micro, ids.numpy())
                return True
        return False

    def _gather(self) -> None:
        """Gives every parameter the step's whole gradient and every loss its value, whatever helper is lost."""
        while self._helpers:
            self.synchronize()
            self._own_seconds = time.perf_counter() - self._began
            gradients = self.stage.make_gradients()
            try:
                for helper in self._shares:
                    helper.say("tell", self._turn)
                heard = [h.hear(group.Computed, self._turn, self._limit(h)) for h in self._shares]
                for helper in self._shares:
                    helper.say("add_up")
                group.add_up(gradients)
            except HelperLost as lost:
                self._lose(lost.helper, str(lost))
            except FAILURES as error:
                self._failed(error)
            else:
                self._warm.update(self._shares)
                self._failures = 0
                self._note_results(heard)
                return
            self._assemble()
            self._repeat()

    def _note_results(self, heard: Sequence[group.Computed]) -> None:
        """Notes the helpers' results."""
        for share, computed in zip(self._shares.values(), heard, strict=True):
            rows = (self._helper_rows, computed.piece_rows)
            self._helper_rows = min((r for r in rows if r), default=0)
            for micro, loss in zip(share, computed.losses, strict=True):
                if micro in self._losses:
                    self._losses[micro].fill_(loss)

    def _limit(self, helper: Helper) -> float:
        """Seconds for one answer of a helper."""
        first = 0.0 if helper in self._warm else self._patience.start
        return max(self._patience.stuck, SLOWER * self._own_seconds, first)

    def _repeat(self) -> None:
        """Repeats the inner step's micro-batches on the devices that are left."""
        super().reset()
        self._begin_step()
        for micro, ids in enumerate(self._ids):
            if not self._send_to_helper(micro, ids):
                loss = super().forward(micro, ids)
                if micro in self._losses:
                    self._losses[micro].copy_(loss)
                super().backward(micro)

    # --- the helpers in use

    def _start_missing(self) -> bool:
        """Starts the missing helpers, except those that were lost too often. Whether one was missing."""
        missing = [
            place
            for place in range(1, len(self._devices))
            if place not in self._helpers and self._lost[place] < GIVE_UP
        ]
        for place in missing:
            made = self.spec, self.train, self._devices[place], self._threads
            try:
                self._helpers[place] = Helper.start(self._devices[place], self._patience.stuck)
                self._helpers[place].say(*made, None)
            except OSError as error:
                self._left_out(place, f"could not be started: {error.strerror}")
        return bool(missing)

    def _assemble(self) -> None:
        """Makes one group of this process and all helpers, with this process's state; a helper that fails is lost."""
        self._same_state = False
        group.leave_group()
        while self._helpers and not self._same_state:
            try:
                for helper in self._helpers.values():
                    helper.await_idle(self._limit(helper))
                form_group(list(self._helpers.values()), self.device, self._folder, self._patience.stuck)
                self._give(whole=True)
            except HelperLost as lost:
                group.leave_group()
                self._lose(lost.helper, str(lost))
            except FAILURES as error:
                group.leave_group()
                self._failed(error)

    def _give(self, *, whole: bool) -> None:
        """Sends the helpers the parameters, and where `whole` the optimizer's state. Raises RuntimeError."""
        state = self.optimizer_state(copy=False) if whole else None
        shapes = None if state is None else tuple((name, array.shape) for name, array in state.items())
        for helper in self._helpers.values():
            helper.say("take", self.pace, shapes)
        group.broadcast([parameter.detach() for parameter in self.stage.parameters()])
        if state is not None:
            group.broadcast([torch.from_numpy(array).to(self.device) for array in state.values()])
        self._same_state = True

    def _failed(self, error: Exception) -> None:
        """Notes a failed exchange. The next `_assemble` asks each helper and finds the culprit; after EXCHANGE_TRIES
        all are lost."""
        self._failures += 1
        if self._failures >= EXCHANGE_TRIES:
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
            f"devices: {self._devices[place]}, number {place + 1} of {total}, {why}; {left} of {total} go on and"
            f" nothing of the round is lost; {after}"
        )
