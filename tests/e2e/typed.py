"""Commands that go on, as a user types them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.faults.processes import DEADLINE
from tests.support import potluck


@contextlib.contextmanager
def running(
    *arguments: object, env: Mapping[str, str] | None = None, before: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """`potluck …` as it is typed. `env`: more of its environment; `before`: what the command begins with."""
    whole = {**os.environ, **(env or {})}
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with potluck.Popen(*arguments, before=before, env=whole, **out) as process:
        watchdog = threading.Timer(DEADLINE, process.kill)
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.terminate()


@contextlib.contextmanager
def hanging(run_file: Path) -> Iterator[str]:
    """The line of a node whose process is stopped while its daemon lives; its key is in `boot`."""
    with running(
        "bootstrap", run_file, "--dir", run_file.parent / "boot", "--host", "127.0.0.1", "--port", 0, "--json"
    ) as node:
        line = str(until(node, "listening")["address"])
        node.send_signal(signal.SIGSTOP)
        try:
            yield line
        finally:
            node.send_signal(signal.SIGCONT)


def until(process: subprocess.Popen[str], kind: str, **fields: object) -> dict[str, object]:
    """The next event of this kind, with these fields, that it tells."""
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == kind and fields.items() <= event.items():
            return dict(event)
    raise AssertionError(f"{process.args} ended without {kind}")
