"""The commands that the documents show, as somebody types them: which there are, and a shell in which they work on one machine."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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
    """The commands of ours that a document shows with what they are to be given, in its order; not those that it only names."""
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


@dataclass(frozen=True)
class Shell:
    """Of somebody whose `potluck` is this checkout's, with programs of his own before the system's. `home`: where he is at home."""

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

    def type(self, command: str, at: Path, sign: str | None = None, text: str | None = None) -> Ended:
        """Runs it in the folder `at`. `sign`: what it says, as a regular expression, before Ctrl-C ends it; `text`: what is typed into it."""
        env = os.environ | {
            "HOME": str(self.home),
            "XDG_CONFIG_HOME": str(self.home / "settings"),
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        process = subprocess.Popen(
            ["sh", "-c", f"exec {command}"],
            cwd=at,
            env=env,
            stdin=subprocess.PIPE if text is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        watchdog = threading.Timer(DEADLINE, process.kill)
        watchdog.start()
        assert process.stdout is not None
        said = []
        try:
            if text is not None:
                assert process.stdin is not None
                process.stdin.write(text)
                process.stdin.close()
            for line in process.stdout:
                said.append(line)
                if sign is not None and re.search(sign, line):
                    process.send_signal(signal.SIGINT)
                    sign = None
            return Ended(process.wait(), "".join(said))
        finally:
            watchdog.cancel()
            process.kill()
