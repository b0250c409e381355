"""The Dockerfiles and their health checks, run as an engine would run them, but for the folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.faults.processes import DEADLINE

FOLDER = Path(__file__).parents[2] / "docker"
KINDS = ("bootstrap", "peer")


@dataclass(frozen=True)
class Image:
    """That of `docker/KIND.Dockerfile`: its instructions, each with what follows the word."""

    kind: str
    lines: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, kind: str) -> Image:
        text = (FOLDER / f"{kind}.Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
        found = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
        return cls(kind, tuple((word, rest) for word, _, rest in found))

    def all(self, word: str) -> list[str]:
        """What follows each of these instructions, in their order."""
        return [rest for found, rest in self.lines if found == word]

    def one(self, word: str) -> str:
        """What follows the only one."""
        (found,) = self.all(word)
        return found

    @property
    def entry(self) -> list[str]:
        """The words that are put before what a container is given."""
        return list(json.loads(self.one("ENTRYPOINT")))

    @property
    def folder(self) -> str:
        """Of the process in the container."""
        return self.entry[self.entry.index("--dir") + 1]

    @property
    def check(self) -> str:
        """The command of the health check, for sh."""
        found = re.search(r"(?:^| )CMD (.*)$", self.one("HEALTHCHECK"))
        return found[1]

    def is_healthy(self, folder: Path) -> bool:
        """What the health check says of a process that has `folder`."""
        assert self.folder in self.check, "it looks at another folder than the process has"
        words = ["sh", "-c", self.check.replace(self.folder, '"$FOLDER"')]
        return subprocess.run(words, env=os.environ | {"FOLDER": str(folder)}, timeout=DEADLINE).returncode == 0

    def age(self, folder: Path) -> None:
        """All that a process may have left there becomes old, as it would in a while."""
        for path in folder.iterdir():
            if path.is_file():
                os.utime(path, (0, 0))

    def becomes_healthy(self, folder: Path) -> None:
        """Waits until the process shows again that it lives."""
        end = time.monotonic() + DEADLINE
        while not self.is_healthy(folder):
            assert time.monotonic() < end, f"{folder}: the health check of {self.kind} still fails"
            time.sleep(0.05)  # there is no other sign


def make_a_run(folder: Path, programs: Mapping[str, str]) -> None:
    """What compose does at first, in `folder`, where `run/` and `join/` are what /data/run and /join are in the
    container. `programs`: the commands that are not the system's, by their names."""
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
    service = compose["services"]["run"]
    (script,) = (text.replace("$$", "$").replace("/join/", "join/") for text in service["command"])
    functions = "".join(f'{name}() {{ {command} "$@"; }}\n' for name, command in programs.items())
    (folder / "join").mkdir()
    subprocess.run([*service["entrypoint"], functions + script], cwd=folder, check=True, timeout=DEADLINE)


IMAGES = {kind: Image.of(kind) for kind in KINDS}
