"""The commands that the documents show, as a user types them, and a shell in which they work on one machine."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support import potluck

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
GIVEN = re.compile(r" (ADDRESS|LINE|PEER|FOLDER|corpus|[\w-]+[./][\w./*-]+|my-\w+)( |$)")
"""What a command within a line is given, where it is more than the command's name."""
DEADLINE = 300.0
"""Seconds for a command to do what it is to do."""


def shown(document: Path) -> Iterator[str]:
    """The commands of ours that a document shows with arguments, in its order; not those that it only names."""
    text = document.read_text(encoding="utf-8")
    found: list[tuple[int, str]] = []
    for block in FENCE.finditer(text):
        found += [(block.start() + m.start(), m[0]) for m in re.finditer(r"^potluck .*$", block[0], re.MULTILINE)]
    found += [(m.start(), m[1]) for m in re.finditer(r"^ {4}(potluck .*)$", text, re.MULTILINE)]
    outside = FENCE.sub(lambda block: " " * len(block[0]), text)
    found += [(m.start(), m[1]) for m in re.finditer(r"`(potluck [^`\n]+)`", outside) if GIVEN.search(m[1])]
    for _, line in sorted(found):
        command = line.split("  #")[0].strip()
        if command != "potluck join would work here":  # what doctor says
            yield command


@dataclass(frozen=True)
class Ended:
    """A command that has ended, or was ended by Ctrl-C as soon as it had said what it was to say."""

    code: int
    said: str


class Terminal:
    """A window in which one command runs. `text`: its input; `keys`: its terminal, None where it has none."""

    def __init__(self, process: subprocess.Popen[str], text: str | None, keys: int | None = None) -> None:
        self._process = process
        self._keys = keys
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._over = False
        self._watchdog = threading.Timer(DEADLINE, process.kill)
        self._watchdog.start()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        if text is not None:
            process.stdin.write(text)
            process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self._lines.append(line)
                self._news.notify_all()
        with self._news:
            self._over = True
            self._news.notify_all()

    @property
    def said(self) -> str:
        """All of it until now."""
        with self._news:
            return "".join(self._lines)

    def until(self, sign: str) -> re.Match[str]:
        """Where it says `sign`, a regular expression, first. Fails where it ends without."""
        with self._news:
            while (found := re.search(sign, "".join(self._lines))) is None:
                assert not self._over, (sign, self._process.args, "".join(self._lines)[-2000:])
                self._news.wait()
        return found

    def interrupt(self) -> None:
        """Ctrl-C, which goes to all that the command has started on its terminal."""
        if self._keys is None:
            self._process.send_signal(signal.SIGINT)
        else:
            os.write(self._keys, b"\x03")

    def ended(self) -> Ended:
        """Waits for its end."""
        code = self._process.wait()
        self.close()
        return Ended(code, self.said)

    def close(self) -> None:
        """Ends it, if it runs."""
        self._watchdog.cancel()
        self._process.kill()
        self._process.wait()
        self._reader.join()
        if self._keys is not None:
            os.close(self._keys)
            self._keys = None


@dataclass(frozen=True)
class Shell:
    """Of a user whose `potluck` is this checkout's, before the system's programs. `home`: the user's home folder."""

    home: Path
    programs: Path

    @staticmethod
    def of(folder: Path, programs: Mapping[str, str]) -> Shell:
        """`programs`: the texts of scripts, by their names."""
        (folder / "home").mkdir(parents=True)
        (folder / "bin").mkdir()
        ours = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m peer.cli "$@"\n'
        for name, script in {"potluck": ours, **programs}.items():
            (folder / "bin" / name).write_text(script)
            (folder / "bin" / name).chmod(0o755)
        return Shell(folder / "home", folder / "bin")

    def open(self, command: str, at: Path, text: str | None = None) -> Terminal:
        """Starts it in the folder `at`. `text`: what is typed into it."""
        env = os.environ | {
            "HOME": str(self.home),
            "XDG_CONFIG_HOME": str(self.home / "settings"),
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        start: Callable[..., subprocess.Popen[str]] = functools.partial(
            subprocess.Popen, ["sh", "-c", f"exec {command}"]
        )
        if command.startswith("potluck "):
            start = functools.partial(potluck.Popen, *self._words(command, at))
        out = {"cwd": at, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        if text is not None:
            return Terminal(start(stdin=subprocess.PIPE, **out), text)
        keys, inner = pty.openpty()
        with contextlib.closing(os.fdopen(inner, "rb", buffering=0)) as its:
            own = (
                None if command.startswith("potluck ") else functools.partial(fcntl.ioctl, inner, termios.TIOCSCTTY, 0)
            )
            return Terminal(start(stdin=its, start_new_session=True, preexec_fn=own, **out), None, keys)

    @staticmethod
    def _words(command: str, at: Path) -> list[str]:
        """What the shell gives the program of a command that is typed in the folder `at`."""
        script = f"potluck() {{ printf '%s\\0' \"$@\"; }}\n{command}"
        return subprocess.run(["sh", "-c", script], cwd=at, capture_output=True, text=True, check=True).stdout.split(
            "\0"
        )[:-1]

    def type(self, command: str, at: Path, sign: str | None = None, text: str | None = None) -> Ended:
        """Runs it in the folder `at`. `sign`: a regular expression of what it says before Ctrl-C; `text`: its input."""
        terminal = self.open(command, at, text)
        try:
            if sign is not None:
                terminal.until(sign)
                terminal.interrupt()
            return terminal.ended()
        finally:
            terminal.close()
