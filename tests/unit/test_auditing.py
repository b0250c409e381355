"""An auditor that cannot be started or followed: its node goes on, tells why, and starts another."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from peer import events
from peer.cli import auditing

DEADLINE = 60.0

LONG = f"print('x' * {2 * auditing.LINE_BYTES}, flush=True); import sys; sys.stdin.read()"
DEAF = f"import sys\nwhile True: sys.stdout.write('x' * {auditing.LINE_BYTES})"
"""It goes on writing to whoever has stopped reading, and does not notice that it is alone."""


def program(folder: Path, source: str) -> str:
    """A program that has `source` for a body, whatever it is called with."""
    path = folder / "auditor"
    path.write_text(f"#!{sys.executable}\n{source}\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda folder: str(folder / "missing"), "could not be followed"),
        (lambda folder: program(folder, "raise SystemExit(3)"), "ended with exit code 3"),
        (lambda folder: program(folder, LONG), "could not be followed"),
        (lambda folder: program(folder, DEAF), "could not be followed"),
    ],
    ids=["missing", "fails", "long", "deaf"],
)
def test_who_cannot_be_followed_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[Path], str], said: str
) -> None:
    monkeypatch.setattr(auditing.sys, "executable", made(tmp_path))
    monkeypatch.setattr(auditing, "AGAIN_SECONDS", 0.1)

    async def work() -> None:
        told: asyncio.Queue[events.Body] = asyncio.Queue()
        beside = asyncio.create_task(auditing.audit_beside(tmp_path, "run", ["/ip4/127.0.0.1/tcp/1"], told.put_nowait))
        for _ in range(2):
            warning = await told.get()
            assert isinstance(warning, events.Warning)
            assert said in warning.text
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)

    asyncio.run(asyncio.wait_for(work(), DEADLINE))
