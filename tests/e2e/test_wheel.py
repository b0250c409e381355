"""The wheel: it brings one top-level name, and its command takes part in a run. The source tree is out of sight there,
and whatever else is called `peer`, `protocol` or `bootstrap`, in the working folder and in the environment, fails when
it is imported."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.docs.typed import ROOT, Ended, Terminal

PACKAGES = ("protocol", "peer", "bootstrap")
TEXT = "Strangers cook one meal together. Each brings what there is at home, and nobody leaves hungry.\n"
QUICK = ("--rounds", 1, "--inner-steps", 1, "--full", 1, "--chains", 0, "--no-screen")
PIPX = ("-E",)
"""How Python is started for commands that pipx installs."""
TORCH = os.environ.get("TORCH")
"""What `make wheel` installs as torch, as pip reads it, such as `torch==2.13.0`."""


def built(folder: Path) -> Path:
    """The wheel of this checkout, in a new folder."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("wheel"))


class Installation:
    """A virtual environment, and a user who types in a folder."""

    def __init__(self, folder: Path) -> None:
        self._environment, self.at, home = folder / "environment", folder / "work", folder / "home"
        home.mkdir()
        ours = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "XDG_"))}
        self._env = ours | {"HOME": str(home)}
        venv.create(self._environment)
        (self._site_packages,) = self._environment.glob("lib/python*/site-packages")
        for misleading in (where / name for where in (self.at, self._site_packages) for name in PACKAGES):
            misleading.mkdir(parents=True)
            (misleading / "__init__.py").write_text("raise AssertionError('this is another package')\n")

    def pip(self, *words: object) -> None:
        python = self._environment / "bin" / "python"
        command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *words]
        subprocess.run([*map(str, command)], check=True)

    def sees(self, site_packages: str) -> None:
        """The distributions of another environment, without those that a path file of it names."""
        (self._site_packages / "dependencies.pth").write_text(site_packages + "\n")

    def open(self, *words: object, flags: Sequence[str] = ()) -> Terminal:
        """Starts `potluck` with these words; Python with these flags."""
        programs = self._environment / "bin"
        command = [programs / "python", *flags, programs / "potluck", *map(str, words)]
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return Terminal(subprocess.Popen(command, cwd=self.at, env=self._env, **out), None)

    def type(self, *words: object, flags: Sequence[str] = ()) -> Ended:
        """Runs it to its end, which is a success."""
        with contextlib.closing(self.open(*words, flags=flags)) as terminal:
            ended = terminal.ended()
        assert ended.code == 0, (words, ended)
        return ended

    def takes_part(self) -> None:
        """Everything that a new user types, up to a contribution that counts."""
        assert re.fullmatch(r"potluck \d+\.\d+\.\d+\n", self.type("--version").said)
        near = self.type("demo", "--in-memory", *QUICK, "--out", "near")
        far = self.type("demo", *QUICK, "--out", "far", flags=PIPX)
        for demo in (near, far):
            assert "same bits on every peer after every round: yes" in demo.said
        (self.at / "text.txt").write_text("".join(f"{i} {TEXT}" for i in range(20_000)))
        self.type("init", "my-run", "text.txt")
        run_file = self.at / "my-run" / "run.toml"
        run_file.write_text(run_file.read_text().replace("\nround_seconds = 30.0", "\nround_seconds = 5.0"))
        here = "--host", "127.0.0.1"
        with contextlib.ExitStack() as terminals:
            node = self.open("bootstrap", run_file, "--dir", "my-run/node", "--corpus", "my-run/corpus", *here)
            terminals.callback(node.close)
            address = node.until(r"to join: potluck join (\S+)")[1]
            peer = self.open("join", address, *here)
            terminals.callback(peer.close)
            peer.until(r"is applied: [1-9][\d,]* of [\d,]+ tokens were yours")
            assert "round" in self.type("monitor", address, "--once").said
            for terminal in (peer, node):
                terminal.interrupt()
                assert terminal.ended().code == 0, terminal.said


def test_it_has_one_name_at_the_top_and_all_files_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        files = {Path(name) for name in opened.namelist()}
    assert {file.parts[0] for file in files} == {"potluck", "-".join(wheel.name.split("-")[:2]) + ".dist-info"}
    sources = {
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    entry = Path("peer/cli/installed.py")
    placed = {Path("potluck") / source for source in sources - {entry}} | {Path("potluck/__main__.py")}
    assert {file for file in files if file.parts[0] == "potluck"} == placed


@pytest.mark.slow
def test_its_command_takes_part_in_a_run(wheel: Path, tmp_path: Path) -> None:
    """With the dependencies of this environment."""
    installation = Installation(tmp_path)
    installation.pip("--no-deps", "--no-index", wheel)
    installation.sees(sysconfig.get_path("purelib"))
    installation.takes_part()


@pytest.mark.campaign
@pytest.mark.skipif(TORCH is None, reason="downloads PyTorch; `make wheel` runs it")
def test_it_needs_nothing_but_what_it_names(wheel: Path, tmp_path: Path) -> None:
    """In an empty environment, with the newest dependencies that it allows."""
    installation = Installation(tmp_path)
    installation.pip(wheel, TORCH)
    installation.takes_part()
