"""A trace of a stage's work: a JSON array of trace events in Unix microseconds, for ui.perfetto.dev."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Protocol

from protocol.errors import os_errors

SHORTEST_WAIT_SECONDS = 1e-4
_ROWS = ("inner step", "compute", "wait")


class Trace(Protocol):
    """Takes spans of a stage's work (time.perf_counter)."""

    def __call__(self, name: str, start: float, end: float, /, **facts: int | float) -> None: ...


class TraceFile:
    """Takes spans from any thread; `flush` and `close` belong to one. Raises UsageError if the file cannot be
    written."""

    def __init__(self, path: Path, name: str) -> None:
        self._offset = time.time() - time.perf_counter()
        head = {"ph": "M", "pid": os.getpid()}
        rows = [head | {"name": "thread_name", "tid": i, "args": {"name": row}} for i, row in enumerate(_ROWS)]
        self._spans: list[dict[str, object]] = [head | {"name": "process_name", "args": {"name": name}}, *rows]
        with os_errors(f"--trace {path}", "name a file that can be written"):
            self._file = path.open("w", encoding="utf-8")
        self._end = 0
        self.flush()

    def __call__(self, name: str, start: float, end: float, /, **facts: int | float) -> None:
        row = "wait" if name.startswith("wait") else name if name in _ROWS else "compute"
        span = {
            "name": name, "ph": "X", "ts": round((start + self._offset) * 1e6, 1), "dur": round((end - start) * 1e6, 1),
            "pid": os.getpid(), "tid": _ROWS.index(row), "args": facts,
        }  # fmt: skip
        self._spans.append(span)

    def flush(self) -> None:
        """Writes all spans."""
        spans, self._spans = self._spans, []
        if spans:
            self._file.seek(self._end)
            self._file.write(("[\n" if self._end == 0 else ",\n") + ",\n".join(map(json.dumps, spans)))
            self._file.flush()
            self._end = self._file.tell()
            self._file.write("\n]\n")
            self._file.flush()

    def close(self) -> None:
        """Writes all spans and closes the file."""
        self.flush()
        self._file.close()
