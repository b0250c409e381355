"""`--log`: what a command prints is in a file of bounded size, whatever ends it."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from peer.cli import running
from protocol.errors import LocalError, UsageError


def test_all_that_is_printed_is_kept_with_its_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        print("12:00:01", "✓ round 1", flush=True)
        print('{"event": "round"}')
        raise LocalError("disk: is away; plug it in")

    path = tmp_path / "peer" / "a.log"
    with pytest.raises(SystemExit) as ended:
        running.run(work(), log=path)
    assert ended.value.code == 1
    first, second, third = path.read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d 12:00:01 ✓ round 1", first)
    assert second == '{"event": "round"}'
    assert third.endswith(" potluck: disk: is away; plug it in")
    said = capsys.readouterr()
    assert said.out == '12:00:01 ✓ round 1\n{"event": "round"}\n'
    assert said.err == "potluck: disk: is away; plug it in\n"


def test_a_bug_is_kept_too_and_nothing_of_what_was_there_is_lost(tmp_path: Path) -> None:
    async def work() -> None:
        raise RuntimeError("a bug")

    path, out = tmp_path / "a.log", sys.stdout
    path.write_text("before\n")
    with pytest.raises(RuntimeError):
        running.run(work(), log=path)
    assert path.read_text().startswith("before\n")
    assert "RuntimeError: a bug" in path.read_text()
    assert sys.stdout is out


def test_the_files_together_have_a_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "x" * 100_000
    lines = 2 * (running.OLDER_LOG_FILES + 1) * running.LOG_FILE_BYTES // len(line)
    with running.keeping(tmp_path / "a.log"):
        for number in range(lines):
            print(number, line)
    capsys.readouterr()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"a.log", *(f"a.log.{i + 1}" for i in range(running.OLDER_LOG_FILES))}
    assert all(path.stat().st_size <= running.LOG_FILE_BYTES for path in tmp_path.iterdir())
    newest = (tmp_path / "a.log").read_text().splitlines()[-1]
    assert newest.split()[1] == str(lines - 1)


def test_where_nothing_can_be_written_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        running.run(asyncio.sleep(0), log=tmp_path / "file" / "a.log")
    assert ended.value.code == UsageError.exit_code
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk here")
def test_a_full_disk_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.log"
    path.symlink_to("/dev/full")
    with running.keeping(path):
        print("printed all the same")
    assert capsys.readouterr().out == "printed all the same\n"
