"""Commands that go on, as somebody types them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator

from tests.faults.processes import DEADLINE


@contextlib.contextmanager
def running(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """`potluck …` as it is typed."""
    command = [sys.executable, "-m", "peer.cli", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        watchdog = threading.Timer(DEADLINE, process.kill)
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.terminate()


def until(process: subprocess.Popen[str], kind: str, **fields: object) -> dict[str, object]:
    """The next event of this kind, with these fields, that it tells."""
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == kind and fields.items() <= event.items():
            return dict(event)
    raise AssertionError(f"{process.args} ended without {kind}")
