"""What systemd and launchd are told of a peer means what was typed."""

from __future__ import annotations

import contextlib
import os
import plistlib
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.cli import service
from protocol.errors import FINAL, UsageError
from tests.support import systemd

NASTY = '/home/Ann Ö/100% $HOME/it\'s "so"\\;/%h'
KNOWN_LATER = ("RestartSteps", "RestartMaxDelaySec")
"""Of systemd 254; older ones pass over them."""


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs", "Cc"])), max_size=5))
def test_systemd_reads_each_word_as_it_was_typed(words: list[str]) -> None:
    command = ["/usr/bin/python", *words, NASTY, "a\nb\tc", "", ";", "$$", "%%", "-x"]
    unit = service.systemd(command, Path("/tmp"), Path("/tmp/p"))
    assert systemd.command(systemd.settings(unit)["ExecStart"]) == command


def test_folders_with_spaces_and_percent_signs_are_the_same_for_systemd() -> None:
    found = systemd.settings(service.systemd([NASTY], Path(NASTY), Path("/a b/50%")))
    assert systemd.value(found["WorkingDirectory"]) == NASTY
    assert systemd.value(found["Description"]).endswith("/a b/50%")
    assert systemd.command(found["ExecStart"]) == [NASTY]


@pytest.mark.parametrize("folder", ["/a\nExecStart=/bin/false", "/a ", "/a\\", "/a\x1b[2J"])
def test_a_folder_that_no_unit_can_name_is_refused(folder: str) -> None:
    with pytest.raises(UsageError, match="choose a folder with another name"):
        service.systemd(["/bin/true"], Path(folder), Path("/tmp"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_itself_finds_nothing_wrong(tmp_path: Path) -> None:
    there = tmp_path / "a b 100%d $HOME"
    there.mkdir()
    program = there / "py thon"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "potluck-x.service"
    unit.write_text(service.systemd([str(program), NASTY, "%n"], there, there))
    said = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(unit)],
        capture_output=True,
        text=True,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    ).stderr
    assert not [
        line for line in said.splitlines() if unit.name in line and not any(word in line for word in KNOWN_LATER)
    ]


def test_names_tell_folders_apart_and_are_plain(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "one")
    names = {service.name_of(tmp_path / name) for name in ("one", "two", "x/one", "o%n e", "potluck-peer", "…")}
    assert len(names) == 6
    assert all(name.replace("-", "").isalnum() and name.isascii() for name in names)
    assert service.name_of(tmp_path / "link") == service.name_of(tmp_path / "one")


def started_by_launchd(tmp_path: Path, script: str) -> tuple[int, list[int]]:
    """What the agent's program gives where the peer does `script`, and its pauses."""
    calls = systemd.programs(tmp_path / "bin", "sleep")
    command = ["/bin/sh", "-c", script, "peer", NASTY]
    agent = plistlib.loads(service.launchd("potluck-x", command, tmp_path))
    done = subprocess.run(
        agent["ProgramArguments"],
        cwd=agent["WorkingDirectory"],
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"},
        timeout=120,
    )
    said = calls.read_text().splitlines() if calls.exists() else []
    return done.returncode, [int(line.split()[1]) for line in said]


def test_after_crashes_launchd_waits_longer_and_longer(tmp_path: Path) -> None:
    seven = 'echo "$1" >> starts; [ $(wc -l < starts) -gt 7 ] || kill -9 $$'
    assert started_by_launchd(tmp_path, seven) == (0, [10, 20, 40, 80, 160, 320, 320])
    assert (tmp_path / "starts").read_text().splitlines() == [NASTY] * 8


@pytest.mark.parametrize("code", [0, *FINAL])
def test_launchd_does_not_start_what_ended_well_or_was_typed_wrong(tmp_path: Path, code: int) -> None:
    assert started_by_launchd(tmp_path, f"exit {code}") == (0, [])


SLOW_AT = ("", " child=$!", " tell\n")
"""What the shell is slow to do after the start of a peer: nothing, to know its number, or to see the stop."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("slow_at", SLOW_AT, ids=["nowhere", "before it knows", "after it knows"])
def test_launchd_stops_the_peer_politely_and_waits_for_it(tmp_path: Path, slow_at: str) -> None:
    # a signal ends `wait` at once, and is not lost where it comes just before
    asked = "trap 'echo >> asked; read line < go; touch done; exit 0' TERM"
    polite = f"{asked}; echo here; while :; do sleep 1 & wait $!; done"
    subprocess.run(["mkfifo", str(tmp_path / "go")], check=True)
    agent = plistlib.loads(service.launchd("potluck-x", ["/bin/sh", "-c", polite], tmp_path))
    program = [
        word.replace(slow_at, f" sleep 2;{slow_at}", 1) if slow_at else word for word in agent["ProgramArguments"]
    ]
    assert (program != agent["ProgramArguments"]) == bool(slow_at)
    with subprocess.Popen(program, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout.readline() == "here\n"
            process.terminate()
            with open(tmp_path / "go", "w") as go:  # waits until the peer, which was asked to end, reads
                assert (tmp_path / "asked").read_text() == "\n", "once"
                go.write("on\n")
            assert process.wait() == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert (tmp_path / "done").exists()
