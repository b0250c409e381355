"""A helper process as the peer's process sees it: started, given orders, and ended. Calls return within their limits."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from typing import TypeVar

from peer.training import device_group as group

END_SECONDS = 5.0
"""For a process to end by itself."""
A = TypeVar("A", group.Done, group.Computed)


class HelperLost(Exception):
    """`helper` is of no use any more; the text says what it did, behind its name."""

    def __init__(self, helper: Helper, why: str) -> None:
        super().__init__(why)
        self.helper = helper


class ExchangeFailed(Exception):
    """An exchange between members of the group failed; any of them may be the cause."""


class Helper:
    """One process, on the device that `begin` names. `stuck`: seconds after which it is lost if it does not even
    read."""

    def __init__(self, begin: group.Begin, stuck: float) -> None:
        self.device = begin.device
        self._stuck = stuck
        self._lost: str | None = None
        self._asked = 0
        self._way, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "peer.training.helper", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.say(begin)

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, order: group.Order) -> None:
        """Sends an order. A failure shows in `hear`."""
        if self._lost is None:
            self._way.settimeout(self._stuck)
            try:
                group.send(self._way, order)
            except TimeoutError:
                self._lost = f"did not read for {self._stuck:g} s"
            except OSError:
                self._lost = self._ended()

    def hear(self, kind: type[A], number: int, seconds: float) -> A:
        """Its next answer of this kind to the Ask of this number, or of this turn; skips older ones. Raises HelperLost,
        ExchangeFailed."""
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
        self.say(group.Ask(self._asked))
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
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS if self._lost is None else 0.0)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the system does not let go of it
            self._process.wait(END_SECONDS)

    def _next(self, seconds: float) -> object:
        """Raises HelperLost."""
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
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(END_SECONDS)
            return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return "closed its connection"
