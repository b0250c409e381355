"""A helper: the process that trains on a further device of a peer's machine. It does what the peer's process says, and ends with it.

    python -m peer.training.helper FD

is started by peer/training/helpers.py, with its end of a pair of sockets. It holds the parameters and the optimizer's state of a full replica,
as the peer's process does, and takes the same steps. It has no network but the group's (peer/training/group.py), no files, and no identity.

A thread of its own reads what comes. It sees the end of the peer's process, however that ended, and ends this one at once, whatever it is doing.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from queue import SimpleQueue

import torch

from peer.training import group
from peer.training import helper_messages as messages
from peer.training.device import one_heap
from peer.training.trainer import StageTrainer
from protocol.run import layout


class Helper:
    """Carries out one order after the other; what fails raises whatever torch, or Python, raises."""

    def __init__(self, begin: messages.Begin) -> None:
        self.trainer = StageTrainer(begin.spec, begin.train, layout.shard_names(begin.spec), device=begin.device)
        self._losses: list[torch.Tensor] = []

    def do(self, order: object) -> messages.Answer | None:
        """The answer, where there is one."""
        match order:
            case messages.Join(seat):
                self._forget()
                group.join(seat, self.trainer.device)
                return messages.Done()
            case messages.Take():
                self._take(order)
            case messages.Compute(_, micro, ids):
                mine = torch.from_numpy(ids)
                self._losses.append(
                    self.trainer.forward(micro, mine.pin_memory() if self.trainer.device.type == "cuda" else mine)
                )
                self.trainer.backward(micro)
            case messages.Tell(turn):
                losses = tuple(loss.item() for loss in self._losses)
                return messages.Computed(turn, losses, self.trainer.pieces)
            case messages.AddUp():
                group.add_up(self.trainer.gradient_sums())
            case messages.Step(step, norm):
                self._losses.clear()
                self.trainer.step(step, norm)
            case messages.Reset():
                self._forget()
            case messages.Ask(number):
                return messages.Done(number)
        return None

    def _forget(self) -> None:
        self._losses.clear()
        self.trainer.reset()

    @torch.no_grad()
    def _take(self, order: messages.Take) -> None:
        self._losses.clear()
        group.give(self.trainer.stage.parameters())
        if order.state is not None:
            found = {name: torch.empty(shape, device=self.trainer.device) for name, shape in order.state}
            group.give(found.values())
            self.trainer.load_optimizer({name: tensor.cpu().numpy() for name, tensor in found.items()})
        self.trainer.begin_at(order.pace)


def main(way: socket.socket) -> None:
    """Until the peer's process ends. What could not be done, for whatever reason, is told, and leaves everything undone until the next group
    begins."""
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            sent, signal.SIG_IGN
        )  # sent to all processes of a peer that is to leave: it needs us until it has
    one_heap()
    orders: SimpleQueue[object] = SimpleQueue()
    threading.Thread(target=_listen, args=(way, orders), daemon=True).start()
    begin = orders.get()
    assert isinstance(begin, messages.Begin)
    torch.set_num_threads(begin.threads)
    try:
        helper = Helper(begin)
    except Exception as error:
        messages.send(way, messages.Failed(_line(error)))
        return
    messages.send(way, messages.Done())
    fails = False
    while True:
        order = orders.get()
        if fails and not isinstance(order, messages.Join | messages.Ask):
            continue
        try:
            answer = helper.do(order)
            fails = fails and isinstance(order, messages.Ask)
        except Exception as error:
            fails, together = True, isinstance(order, messages.Join | messages.Take | messages.AddUp)
            answer = messages.Failed(_line(error), together)
        if answer is not None:
            messages.send(way, answer)


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _listen(way: socket.socket, orders: SimpleQueue[object]) -> None:
    try:
        while True:
            orders.put(messages.receive(way))
    finally:  # most often since the peer's process has ended; whoever does not listen any more must not be left over
        os._exit(0)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
