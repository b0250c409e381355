"""How a command runs: its work to the end, a signal that ends it cleanly, and one line for whatever goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from peer.cli import log_file
from protocol.errors import PotluckError

T = TypeVar("T")
TOGETHER_SECONDS = 1.0
"""In which several signals are one: `timeout`, systemd and shells send them to a process and to its group."""


def run(work: Coroutine[Any, Any, T], interrupted: int = 0, log: Path | None = None) -> T:
    """What a command's work gives; SIGTERM, Ctrl-C and a terminal that is closed end it cleanly, with exit code `interrupted`. A second SIGTERM or Ctrl-C
    breaks off what it does in the end. `log`: a file that keeps what it prints."""

    signalled = -math.inf

    async def guarded() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

        def stop(number: int) -> None:
            nonlocal signalled
            if number == signal.SIGHUP:
                _forget_terminals(terminals)
            once = math.isinf(signalled)
            if once or (number != signal.SIGHUP and loop.time() - signalled > TOGETHER_SECONDS):
                signalled = loop.time()
                task.cancel()

        ends = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # else it was started by nohup
            ends.append(signal.SIGHUP)
        terminals = [number for number in (1, 2) if os.isatty(number)]
        for number in ends:
            loop.add_signal_handler(number, stop, number)
        return await task

    with _kept(log, work), reporting():
        try:
            return asyncio.run(guarded())
        except asyncio.CancelledError:
            if math.isinf(signalled):
                raise
            raise SystemExit(interrupted) from None


def _forget_terminals(descriptors: Sequence[int]) -> None:
    """Prints nothing more there: a terminal that is gone fails every write, and there is work to be done yet."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nothing, descriptor)
    os.close(nothing)


@contextlib.contextmanager
def _kept(log: Path | None, work: Coroutine[Any, Any, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        with reporting():
            try:
                stack.enter_context(log_file.keeping(log))
            except PotluckError:
                work.close()
                raise
        yield


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Ends the command with one line for whatever goes wrong within."""
    try:
        yield
    except BrokenPipeError:  # whoever read our output has seen enough, as with `potluck log show … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except BaseExceptionGroup as group:
        _fail(_first(group))
    except Exception as error:
        _fail(error)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _fail(error: BaseException) -> NoReturn:
    if not isinstance(error, PotluckError):
        raise error
    print(f"potluck: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code) from None
