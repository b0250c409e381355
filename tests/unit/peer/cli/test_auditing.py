"""An auditor that cannot be started or followed: its node goes on, tells why, and starts another."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from peer import events
from peer.cli import auditing

LONG = f"print('x' * {2 * auditing.LINE_BYTES}, flush=True); import sys; sys.stdin.read()"
DEAF = f"import sys\nwhile True: sys.stdout.write('x' * {auditing.LINE_BYTES})"
"""It goes on writing to a reader that has stopped reading, and does not notice that it is alone."""


def program(source: str) -> Callable[[Path], list[str]]:
    """A program that has `source` for a body, whatever it is called with."""
    return lambda folder: [sys.executable, "-c", source]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda folder: [str(folder / "missing")], "could not be followed"),
        (program("raise SystemExit(3)"), "ended with exit code 3"),
        (program(LONG), "could not be followed"),
        (program(DEAF), "could not be followed"),
    ],
    ids=["missing", "fails", "long", "deaf"],
)
async def test_who_cannot_be_followed_is_started_again(
    tmp_path: Path, made: Callable[[Path], list[str]], said: str
) -> None:
    told: asyncio.Queue[events.Body] = asyncio.Queue()
    beside = asyncio.create_task(
        auditing.audit_beside(tmp_path, "run", ["address"], told.put_nowait, made(tmp_path), again=0.1)
    )
    for _ in range(2):
        warning = await told.get()
        assert isinstance(warning, events.Warning)
        assert said in warning.text
    beside.cancel()
    await asyncio.gather(beside, return_exceptions=True)
