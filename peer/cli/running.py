"""How a command runs: its work to the end, a signal that ends it cleanly, and one line for whatever goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from peer.cli import log_file
from protocol.errors import PotluckError

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T], interrupted: int = 0, log: Path | None = None) -> T:
    """What a command's work gives; SIGTERM and Ctrl-C end it cleanly, with exit code `interrupted`. `log`: a file that keeps what it
    prints."""

    signalled = False

    async def guarded() -> T:
        task = asyncio.ensure_future(work)

        def stop() -> None:
            nonlocal signalled
            signalled = True
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        return await task

    with _kept(log, work), reporting():
        try:
            return asyncio.run(guarded())
        except asyncio.CancelledError:
            if not signalled:
                raise
            raise SystemExit(interrupted) from None


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
