"""`potluck join` on a terminal: a screen of its own, and what is left on the terminal when it ends."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.identity import Identity
from tests.support import potluck

DEADLINE = 60.0
SCREEN, BACK = "\x1b[?1049h", "\x1b[?1049l"


def said_on_a_terminal(folder: Path, *more: str) -> tuple[str, int]:
    """What `potluck join` writes where nobody is at the address, and its exit code."""
    address = f"/ip4/127.0.0.1/tcp/{potluck.free_port()}/p2p/{Identity(bytes(32)).peer_id}#{'0' * 64}"
    ours, its = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "peer.cli", "join", address, "--host", "127.0.0.1", "--dir", str(folder), *more],
            stdin=its, stdout=its, stderr=its, start_new_session=True,
        )  # fmt: skip
        os.close(its)
        said = b""
        try:
            while piece := os.read(ours, 65536):
                said += piece
        except OSError:  # the terminal's other end is closed
            pass
        return said.decode(), process.wait(timeout=DEADLINE)
    finally:
        os.close(ours)


def test_the_screen_goes_and_the_reason_stays(tmp_path: Path) -> None:
    said, code = said_on_a_terminal(tmp_path / "peer")
    assert code == 2
    before, _, rest = said.partition(SCREEN)
    shown, _, after = rest.partition(BACK)
    assert before == ""
    assert "looks for the run" in shown
    assert "potluck: address /ip4/127.0.0.1/" in after, "one line says why"


@pytest.mark.parametrize("option", [("--plain",), ("--log", "log"), ("--json",), ("--dry-run",)])
def test_lines_instead_where_they_are_wanted(tmp_path: Path, option: tuple[str, ...]) -> None:
    more = [str(tmp_path / word) if word == "log" else word for word in option]
    said, code = said_on_a_terminal(tmp_path / "peer", *more)
    assert (SCREEN in said, code) == (False, 2)
