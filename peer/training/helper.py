"""A helper process: trains on a further device of a peer's machine, as the peer's process orders, and ends with it.

`python -m peer.training.helper FD` is started by peer/training/several_devices.py, with its end of a pair of sockets.
It holds the parameters and the optimizer's state of a full replica and takes the same steps.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from queue import SimpleQueue

import torch

from peer.training import device_group as group
from peer.training.device import one_heap
from peer.training.trainer import StageTrainer
from protocol.errors import first_line
from protocol.run import layout


class HelperTrainer:
    """Carries out one order after the other; raises what torch, or Python, raises."""

    def __init__(self, begin: group.Begin) -> None:
        self.trainer = StageTrainer(begin.spec, begin.train, layout.shard_names(begin.spec), device=begin.device)
        self._losses: list[torch.Tensor] = []

    def do(self, order: object) -> group.Answer | None:
        """The answer, where there is one."""
        match order:
            case group.Join():
                self._reset()
                group.join_group(order, self.trainer.device)
                return group.Done()
            case group.Take():
                self._take(order)
            case group.Compute(_, micro, array):
                ids = torch.from_numpy(array)
                ids = ids.pin_memory() if self.trainer.device.type == "cuda" else ids
                self._losses.append(self.trainer.forward(micro, ids))
                self.trainer.backward(micro)
            case group.Tell(turn):
                losses = tuple(loss.item() for loss in self._losses)
                return group.Computed(turn, losses, self.trainer.piece_rows)
            case group.AddUp():
                group.add_up(self.trainer.stage.make_gradients())
            case group.Step(step, norm):
                self._losses.clear()
                self.trainer.step(step, norm)
            case group.Reset():
                self._reset()
            case group.Ask(number):
                return group.Done(number)
        return None

    def _reset(self) -> None:
        self._losses.clear()
        self.trainer.reset()

    @torch.no_grad()
    def _take(self, order: group.Take) -> None:
        self._losses.clear()
        group.broadcast(self.trainer.stage.parameters())
        if order.state is not None:
            found = {name: torch.empty(shape, device=self.trainer.device) for name, shape in order.state}
            group.broadcast(found.values())
            self.trainer.load_optimizer({name: tensor.cpu().numpy() for name, tensor in found.items()})
        self.trainer.begin_at(order.pace)


def main(way: socket.socket) -> None:
    """Until the peer's process ends. After a failure it ignores all orders until the next group begins."""
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sent, signal.SIG_IGN)  # sent to all processes of a peer that leaves, which still needs this one
    one_heap()
    orders: SimpleQueue[object] = SimpleQueue()
    threading.Thread(target=_listen, args=(way, orders), daemon=True).start()
    begin = orders.get()
    assert isinstance(begin, group.Begin)
    torch.set_num_threads(begin.threads)
    try:
        helper = HelperTrainer(begin)
    except Exception as error:
        group.send(way, group.Failed(first_line(error)))
        return
    group.send(way, group.Done())
    failed = False
    while True:
        order = orders.get()
        if failed and not isinstance(order, group.Join | group.Ask):
            continue
        try:
            answer = helper.do(order)
            failed = failed and isinstance(order, group.Ask)
        except Exception as error:
            failed, together = True, isinstance(order, group.Join | group.Take | group.AddUp)
            answer = group.Failed(first_line(error), together)
        if answer is not None:
            group.send(way, answer)


def _listen(way: socket.socket, orders: SimpleQueue[object]) -> None:
    try:
        while True:
            orders.put(group.receive(way))
    finally:  # most often since the peer's process has ended
        os._exit(0)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
