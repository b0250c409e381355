"""How a command runs: its work to the end, a signal that ends it cleanly, one line for whatever goes wrong, a log file, and a sign of life."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import math
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

from peer.net.disk import disk_error
from protocol.errors import PotluckError

if TYPE_CHECKING:
    from peer.node.peer import Factories

T = TypeVar("T")
TOGETHER_SECONDS = 1.0
"""In which several signals are one: `timeout`, systemd and shells send them to a process and to its group."""
MAX_BYTES = 10_000_000
"""Of a log file, before the next one is begun."""
KEPT = 3
"""Older log files: FILE.1 is the newest."""
ALIVE = "alive"
"""A file in the folder of a peer or a node. Health checks look at its age (docker/*.Dockerfile): it grows old when the process hangs, too."""
TOUCH_SECONDS = 10.0
"""Far less than the minute after which a health check takes the process for dead."""


@dataclass(frozen=True, slots=True)
class Program:
    """The command `potluck` as a whole, which a command finds in `context.obj`."""

    main: Callable[[Sequence[str]], None]
    """Runs it with other arguments, in another process."""
    factories: Factories | None
    """They make the parts of the peer of `potluck join`; None: the usual ones."""


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
                stack.enter_context(keeping(log))
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


# --- the log file


class _File(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Whoever would be told prints into this file, too. The next line tries it with a file opened anew."""
        stream, self.stream = self.stream, None  # type: ignore[assignment]
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()


class _Kept(io.TextIOBase):
    """Standard output or error, every whole line of which goes to `file`, too."""

    def __init__(self, out: TextIO, file: _File) -> None:
        self._out, self._file, self._begun = out, file, ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._out.encoding

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            _keep(self._file, line)
        return self._out.write(text)

    def flush(self) -> None:
        self._out.flush()

    def fileno(self) -> int:
        return self._out.fileno()

    def isatty(self) -> bool:
        return self._out.isatty()


def _keep(file: _File, text: str) -> None:
    file.handle(logging.makeLogRecord({"msg": text}))


@contextlib.contextmanager
def keeping(path: Path | None) -> Iterator[None]:
    """Keeps what is printed while the block lasts, and what breaks it off, in the file `path`. A line begins with its date; one of JSON is as it was
    printed. What cannot be written, because the disk is full, is missing in the file and ends nothing. Raises UsageError."""
    if path is None:
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _File(path, maxBytes=MAX_BYTES, backupCount=KEPT, encoding="utf-8")
    except OSError as error:
        raise disk_error(path.parent, error) from None
    file.setFormatter(_Dated())
    out, errors = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Kept(out, file), _Kept(errors, file)
    try:
        yield
    except Exception:
        _keep(file, traceback.format_exc())
        raise
    finally:
        sys.stdout, sys.stderr = out, errors
        with contextlib.suppress(OSError):
            file.close()


class _Dated(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        return text if text.startswith("{") else f"{self.formatTime(record, '%Y-%m-%d')} {text}"


# --- the sign of life


@contextlib.asynccontextmanager
async def shown_alive(folder: Path) -> AsyncIterator[None]:
    """Within, the file in `folder` is young, as long as this event loop turns. A disk that refuses lets it grow old."""
    file = folder / ALIVE
    touching = asyncio.create_task(_touch(file))
    try:
        yield
    finally:
        touching.cancel()
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


async def _touch(file: Path) -> None:
    while True:
        with contextlib.suppress(OSError):
            file.touch()
        await asyncio.sleep(TOUCH_SECONDS)
