"""How a command runs: signals end it cleanly, an error is one line, a log file, a file that shows that it is alive."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import math
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from peer.net.disk import disk_errors
from protocol.errors import PotluckError

if TYPE_CHECKING:
    from peer.net.base import Transport
    from peer.node.open_run import Run
    from peer.node.peer import Factories
    from protocol.run.manifest import Manifest

T = TypeVar("T")
TOGETHER_SECONDS = 1.0
"""Signals within this time are one: `timeout`, systemd and shells send them to a process and to its group."""
LOG_FILE_BYTES = 10_000_000
OLDER_LOG_FILES = 3
"""FILE.1 is the newest."""
ALIVE = "alive"
"""Liveness file in the folder of a peer or a node. Health checks read its age (docker/*.Dockerfile)."""
TOUCH_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Program:
    """The program `potluck`; the `context.obj` of its commands."""

    main: Callable[[Sequence[str]], None]
    """Runs the program with other arguments, for other processes."""
    factories: Factories | None
    """Make the parts of the peer of `potluck join`; None: the defaults."""


def run(work: Coroutine[Any, Any, T], interrupted: int = 0, log: Path | None = None) -> T:
    """Runs the work of a command and returns its result.

    SIGTERM, Ctrl-C and a closed terminal cancel it; a second SIGTERM or Ctrl-C cancels its cleanup.

    interrupted: exit code after a signal.
    log: file that keeps what is printed.
    """

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

    try:
        with reporting(), keeping(log), reporting():
            return asyncio.run(guarded())
    except asyncio.CancelledError:
        if math.isinf(signalled):
            raise
        raise SystemExit(interrupted) from None
    finally:
        work.close()  # it has not begun where there is no log file


def _forget_terminals(descriptors: Sequence[int]) -> None:
    """Redirects output to nowhere: every write to a closed terminal fails, and there is cleanup to do."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nothing, descriptor)
    os.close(nothing)


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Ends the command with one line for an error within."""
    try:
        yield
    except BrokenPipeError:  # as with `potluck log show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except (Exception, BaseExceptionGroup) as raised:
        error: BaseException = raised
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if not isinstance(error, PotluckError):
            raise
        print(f"potluck: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


# --- the log file


class _File(RotatingFileHandler):
    def keep(self, text: str) -> None:
        self.handle(logging.makeLogRecord({"msg": text}))

    def handleError(self, record: logging.LogRecord) -> None:
        """Closes the file, without a report, which would be printed into it. The next line opens it again."""
        stream, self.stream = self.stream, None  # type: ignore[assignment]
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()


class _Kept(io.TextIOBase):
    """Standard output or error; copies every complete line to `file`."""

    def __init__(self, out: TextIO, file: _File) -> None:
        self._out, self._file, self._begun = out, file, ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._out.encoding

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._file.keep(line)
        return self._out.write(text)

    def flush(self) -> None:
        self._out.flush()

    def fileno(self) -> int:
        return self._out.fileno()

    def isatty(self) -> bool:
        return self._out.isatty()


@contextlib.contextmanager
def keeping(path: Path | None) -> Iterator[None]:
    """Copies what is printed in the block, and the traceback of an exception, to the file `path`.

    A line begins with its date, unless it is JSON. On a full disk lines are missing. Raises UsageError.
    """
    if path is None:
        yield
        return
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _File(path, maxBytes=LOG_FILE_BYTES, backupCount=OLDER_LOG_FILES, encoding="utf-8")
    file.setFormatter(_Dated())
    out, errors = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Kept(out, file), _Kept(errors, file)
    try:
        yield
    except Exception:
        file.keep(traceback.format_exc())
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
    """Touches the liveness file in `folder` while this event loop runs; removes it at the end."""
    file = folder / ALIVE

    async def touch() -> None:
        while True:
            with contextlib.suppress(OSError):
                file.touch()
            await asyncio.sleep(TOUCH_SECONDS)

    touching = asyncio.create_task(touch())
    try:
        yield
    finally:
        touching.cancel()
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


# --- a connection for commands that only read


@contextlib.asynccontextmanager
async def visiting(run: Run, *, sparing: bool = False) -> AsyncIterator[tuple[Manifest, Transport, Path]]:
    """The run's manifest, a connection to it under a temporary identity, and a temporary folder.

    sparing: as in peer/net/p2p.py. Raises UsageError, RemoteError.
    """
    from peer.node.open_run import Door, manifest_of, start_transport

    with tempfile.TemporaryDirectory(prefix="potluck-") as name:
        transport = await start_transport(Path(name), Door(host="127.0.0.1"), run.run_id, sparing=sparing)
        try:
            yield await manifest_of(run, transport), transport, Path(name)
        finally:
            await transport.aclose()
