"""A helper process: trains on a further device of a peer's machine, as the peer's process orders, and ends with it.

`python -m peer.training.helper FD` is started by peer/training/several_devices.py, with its end of a pair of sockets.
It holds the parameters and the optimizer's state of a full replica, or a part of them, and takes the same steps.

`python -m peer.training.helper FD DEVICE THREADS` is started by `potluck join --rank` on another machine than the
peer's, with its end of a connection to the peer.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from peer.training import device_group as group
from peer.training.device import one_heap
from peer.training.optimizer import Pace
from peer.training.ranks import RankTrainer
from peer.training.trainer import StageTrainer
from protocol.errors import first_line
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec


class HelperTrainer:
    """Each public method is an order; it returns the answer, where there is one, and raises what torch, or Python,
    raises."""

    together = frozenset({"join", "take", "add_up"})
    """Orders in which all members of the group exchange something."""

    def __init__(self, spec: ModelSpec, train: TrainSpec, device: str) -> None:
        self.trainer = StageTrainer(spec, train, layout.shard_names(spec), device=device)
        self._losses: list[torch.Tensor] = []

    def join(self, join: group.Join) -> group.Done:
        """Leaves the former group and joins this one."""
        self.reset()
        group.join_group(join, self.trainer.device)
        return group.Done()

    @torch.no_grad()
    def take(self, pace: Pace, state: Sequence[tuple[str, tuple[int, ...]]] | None) -> None:
        """Receives the first member's parameters, and begins or continues a round at this pace.

        state: names and shapes of the optimizer's arrays that follow; None: the helper's own are the same.
        """
        self._losses.clear()
        group.broadcast(self.trainer.stage.parameters())
        if state is not None:
            found = {name: torch.empty(shape, device=self.trainer.device) for name, shape in state}
            group.broadcast(found.values())
            self.trainer.load_optimizer({name: tensor.cpu().numpy() for name, tensor in found.items()})
        self.trainer.begin_at(pace)

    def compute(self, micro: int, array: NDArray[np.int64]) -> None:
        """Forward and backward of one micro-batch of an inner step, of ids [B, L+1]."""
        ids = torch.from_numpy(array)
        ids = ids.pin_memory() if self.trainer.device.type == "cuda" else ids
        self._losses.append(self.trainer.forward(micro, ids))
        self.trainer.backward(micro)

    def tell(self, turn: int) -> group.Computed:
        """The results of the micro-batches since the last step."""
        losses = tuple(loss.item() for loss in self._losses)
        return group.Computed(turn, losses, self.trainer.piece_rows)

    def add_up(self) -> None:
        """Adds up the gradients of all members of the group."""
        group.add_up(self.trainer.stage.make_gradients())

    def step(self, step: int, norm: float) -> None:
        """Clips by this norm and takes this inner step."""
        self._losses.clear()
        self.trainer.step(step, norm)

    def reset(self) -> None:
        """Forgets the inner step under way."""
        self._losses.clear()
        self.trainer.reset()

    def ask(self, number: int) -> group.Done:
        """All orders before are done."""
        return group.Done(number)


class RankHelper:
    """The same on a device that holds a part of the model."""

    together = frozenset({"join", "take", "take_moments", "turn", "give", "give_moments"})

    def __init__(
        self,
        spec: ModelSpec,
        train: TrainSpec,
        device: str,
        rank: tuple[int, int],
        ends: tuple[str, str] | None,
    ) -> None:
        """ends: as of `group.join_group`."""
        self.trainer, self._ends = RankTrainer(spec, train, *rank, device=device), ends
        self._losses: list[torch.Tensor] = []

    def join(self, join: group.Join) -> group.Done:
        """Joins the group."""
        group.join_group(join, self.trainer.device, self._ends)
        return group.Done()

    def take(self, pace: Pace) -> None:
        """Receives this rank's parameters, and begins a round at this pace."""
        self.reset()
        self.trainer.take()
        self.trainer.begin_at(pace)

    def take_moments(self, names: Sequence[str], keep: bool) -> None:
        """Receives these moments of this rank's parameters. keep: those that it has stay."""
        self.trainer.take_moments(names, keep)

    def turn(self, array: NDArray[np.int64], counts: bool) -> None:
        """This rank's micro-batch of a turn, of ids [B, L+1]. counts: it is one of the inner step's."""
        loss = self.trainer.turn(torch.from_numpy(array), counts)
        if counts:
            self._losses.append(loss)

    def tell(self, turn: int) -> group.Computed:
        """The results of the micro-batches since the last step."""
        losses = tuple(loss.item() for loss in self._losses)
        return group.Computed(turn, losses, norms=self.trainer.own_norms())

    def step(self, step: int, norm: float) -> None:
        """Clips by this norm and takes this inner step."""
        self._losses.clear()
        self.trainer.step(step, norm)

    def give(self, names: Sequence[str]) -> None:
        """Sends the first rank these parameters."""
        self.trainer.give(names)

    def give_moments(self, names: Sequence[str]) -> None:
        """Sends the first rank the moments of these parameters."""
        self.trainer.give_moments(names)

    def reset(self) -> None:
        """Forgets the inner step under way."""
        self._losses.clear()
        self.trainer.reset()

    def ask(self, number: int) -> group.Done:
        """All orders before are done."""
        return group.Done(number)


def main(way: socket.socket, own: Sequence[str]) -> None:
    """Until the peer's process ends. After a failure it ignores all orders until the next group begins.

    own: device and threads that this machine decides.
    """
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sent, signal.SIG_IGN)  # sent to all processes of a peer that leaves, which still needs this one
    one_heap()
    orders: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_listen, args=(way, orders), daemon=True).start()
    spec, train, device, threads, rank = orders.get()
    device, threads = own or (device, threads)
    torch.set_num_threads(int(threads))
    ends = None if way.family == socket.AF_UNIX else (way.getsockname()[0], way.getpeername()[0])
    helper: HelperTrainer | RankHelper
    try:
        helper = HelperTrainer(spec, train, device) if rank is None else RankHelper(spec, train, device, rank, ends)
    except Exception as error:
        group.send(way, group.Failed(first_line(error)))
        return
    group.send(way, group.Done())
    failed = False
    while True:
        order, *arguments = orders.get()
        if failed and order not in ("join", "ask"):
            continue
        try:
            answer = getattr(helper, order)(*arguments)
            failed = failed and order == "ask"
        except Exception as error:
            failed, together = True, order in helper.together
            answer = group.Failed(first_line(error), together)
        if answer is not None:
            group.send(way, answer)


def _listen(way: socket.socket, orders: SimpleQueue[Any]) -> None:
    try:
        while True:
            orders.put(group.receive(way))
    finally:  # most often since the peer's process has ended
        os._exit(0)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
