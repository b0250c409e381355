"""`--log FILE`: what a command prints is kept in a file, too, whose size has a bound: FILE, and KEPT older ones, FILE.1 the newest.

A line begins with its date; one of JSON is as it was printed. What cannot be written, because the disk is full, is missing in the file
and ends nothing.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import traceback
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

from peer.net.disk import disk_error

MAX_BYTES = 10_000_000
"""Of a file, before the next one is begun."""
KEPT = 3


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
    """What is printed while the block lasts, and what breaks it off, is in the file `path` afterwards. Raises UsageError."""
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
