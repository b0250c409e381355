"""A new user in an empty home: the tutorial, each command typed as it is written and in its order, in one run with
three peers.

All are stopped in between, and started again by the same commands. What is added to a command keeps it on this machine
and at one port. In the manifest that `potluck init` has made, rounds are shorter, and there are more of them than
anybody waits for: in the end the operator ends the run by the README's `potluck run set`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import typed
from tests.docs.typed import Ended, Terminal
from tests.support import potluck, systemd

TUTORIAL, README = typed.ROOT / "docs" / "tutorial.md", typed.ROOT / "README.md"
FIVE_MINUTES = 300.0
ROUNDS = {"rounds = 9": "rounds = 100000", "round_seconds = 30.0": "round_seconds = 5.0"}
"""In the tutorial's manifest, and here."""
THIRD = "potluck join ADDRESS"
"""The README's: in the folder that a peer has unless it is told another one."""
STAYS_HERE = {
    "bootstrap": " --host 127.0.0.1 --port {port}",
    "join": " --host 127.0.0.1",
    "doctor": " --host 127.0.0.1 --within 200",
}


class User:
    """A user with a working folder, who has terminals open. `address`: what to put in for ADDRESS."""

    def __init__(self, folder: Path, port: int) -> None:
        self._shell = typed.Shell.of(folder / "user", {"systemctl": systemd.PROGRAM.format(calls=folder / "calls")})
        self._at, self._port = folder / "work", port
        self._at.mkdir()
        self._terminals = contextlib.ExitStack()
        self.address = ""

    @property
    def home(self) -> Path:
        return self._shell.home

    @property
    def folder(self) -> Path:
        return self._at

    def _filled_in(self, command: str) -> str:
        more = STAYS_HERE.get(command.split()[1], "").format(port=self._port)
        return command.replace("ADDRESS", f"'{self.address}'") + more

    def open(self, command: str) -> Terminal:
        """In a terminal of its own."""
        terminal = self._shell.open(self._filled_in(command), self._at)
        self._terminals.callback(terminal.close)
        return terminal

    def run(self, command: str, sign: str | None = None) -> Ended:
        """To its end, or until Ctrl-C ends it when it has said `sign`."""
        return self._shell.type(self._filled_in(command), self._at, sign)

    def type(self, command: str, sign: str | None = None, code: int = 0) -> Ended:
        """It does what it is to do; `sign`: what it says before Ctrl-C ends it; `code`: with which it ends."""
        ended = self.run(command, sign)
        assert ended.code == code, (command, ended)
        assert "Traceback" not in ended.said, (command, ended)
        return ended

    def close(self) -> None:
        self._terminals.close()


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    found = User(tmp_path, potluck.free_port())
    yield found
    found.close()


def stopped(*terminals: Terminal) -> None:
    """Ctrl-C in each, until it has ended."""
    for terminal in terminals:
        terminal.interrupt()
    for terminal in terminals:
        ended = terminal.ended()
        assert (ended.code, "Traceback" in ended.said) == (0, False), ended
        assert "ended unexpectedly" not in ended.said, "its network daemon is there until it has left"


@pytest.mark.slow
def test_the_tutorial_is_typed_from_its_first_line_to_its_last(user: User) -> None:
    commands = typed.shown(TUTORIAL)
    assert THIRD in typed.shown(README)

    def step(begins: str) -> str:
        """The tutorial's next command."""
        command = next(commands)
        assert command.startswith(f"potluck {begins} "), command
        return command

    assert not list(user.home.iterdir()), "an empty home"
    began = time.monotonic()
    made = user.type(step("init"))
    quicken(user.folder / "my-run" / "run.toml")
    start = step("bootstrap")
    assert made.said.splitlines()[-1].strip() == start, "it ends with the next command"
    node = user.open(start)
    user.address = node.until(r"to join: potluck join (\S+)")[1]
    assert re.search(r"✓ role: it would be a full replica: [\d,]+ tokens per second", user.type(step("doctor")).said)
    joins = step("join"), step("join"), THIRD
    peers = [user.open(command) for command in joins]
    peers[0].until(r"round 1 is applied")
    assert time.monotonic() - began < FIVE_MINUTES
    peers[0].until(r"is applied: [\d,]+ of [\d,]+ tokens were yours")  # a peer that comes later is in a later plan
    (twice,) = user.type(joins[0], code=2).said.splitlines()
    assert "another potluck process uses it" in twice, "one folder is one peer's"
    user.type(step("monitor"), sign=r"round \d+")
    me = user.type(step("me")).said
    assert re.search(r"; Ada·\w{4} is you\nyou trained [\d,]+ tokens, [\d.]+% of the run: rank \d of \d", me), me
    credits = user.type("potluck log credits ADDRESS").said
    assert re.search(r"  Ada·\w{4}", credits), credits
    rows = [json.loads(line) for line in user.type("potluck log credits my-run/node --json").said.splitlines()]
    assert rows
    assert not any("Ada" in str(row.get("name")) for row in rows), "a folder has no names"

    stopped(*peers)
    stopped(node)
    decided = max(map(int, re.findall(r"round (\d+): ", node.said)))
    node = user.open(start)
    assert node.until(r"to join: potluck join (\S+)")[1] == user.address, "the line with which everybody joins stays"
    peers = [user.open(command) for command in joins]
    end(user, decided)
    ends = [peer.ended() for peer in peers]
    assert [ended.code for ended in ends] == [0, 0, 0], ends
    assert all("the run is over after round" in ended.said for ended in ends), ends

    checked = re.search(
        r"(\d+) of (\d+) digests that peers attested are those of the replay", user.type(step("log verify")).said
    )
    assert checked[1] == checked[2] != "0"
    assert "We the people" in user.type(step("sample")).said
    user.type(step("export"))
    assert not list(commands), "all of the tutorial was typed"
    loads(user.folder)
    stopped(node)


def quicken(run_file: Path) -> None:
    """The rounds of the manifest become those of this test."""
    text = run_file.read_text(encoding="utf-8")
    for line, instead in ROUNDS.items():
        assert text.count(f"\n{line}") == 1, text
        text = text.replace(f"\n{line}", f"\n{instead}")
    run_file.write_text(text, encoding="utf-8")


def end(user: User, decided: int) -> None:
    """The run is to end with the round after the open one, or later where more is decided meanwhile."""
    for rounds in itertools.count(decided + 2):
        terminal = user.open(f"potluck run set ADDRESS --rounds {rounds} --dir my-run/node")
        if terminal.until(r"signed by 1 of 1|cannot be")[0] != "cannot be":
            assert terminal.ended().code == 0, terminal.said
            return


def loads(at: Path) -> None:
    """transformers takes the folder `model` there, by the tutorial's own lines."""
    (lines,) = re.findall(r"^```python\n(.*?)^```", TUTORIAL.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", lines], cwd=at, env=offline, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("We the people"), ended
    assert len(ended.stdout.strip()) > len("We the people"), ended


def test_make_demo_is_the_demo() -> None:
    """The README's first command; what `potluck demo` does is in test_demo.py."""
    readme = README.read_text(encoding="utf-8")
    assert re.search(r"^    make demo$", readme, re.MULTILINE)
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    printed = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo"],
        cwd=typed.ROOT,
        env=alone,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.splitlines()[-1].endswith("potluck demo --out demo-run --json demo-run.json")
