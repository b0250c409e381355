"""Files that a peer opens while a run goes on: those of its own folder, and none that a run could choose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from peer.cli.init import MANIFEST, NODE
from tests.e2e.typed import running, until
from tests.faults.processes import DEADLINE
from tests.support import potluck

pytestmark = pytest.mark.slow
TEXT = "Strangers cook one meal together. Each brings what there is at home, and nobody leaves hungry.\n"

WATCHED = """
import sys
def told(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        mode, flags = arguments[1], arguments[2]
        writes = any(c in (mode or "") for c in "wax+") or bool((flags or 0) & 3)
        name = arguments[0] if isinstance(arguments[0], str) else arguments[0].decode(errors="replace")
        out.write(("w " if writes else "r ") + name.replace("\\n", " ") + "\\n")
        out.flush()
out = open(sys.argv[1], "a", errors="replace")
sys.addaudithook(told)
from peer.cli.main import main
main(sys.argv[2:])
"""
"""A peer's command that notes which files Python opens."""


def opened(notes: Path) -> Iterator[tuple[bool, Path]]:
    """Whether it was to be written, and what was opened."""
    for line in notes.read_text(errors="replace").splitlines():
        if "__path_hook__" in line:  # how an installation for developers finds its modules; no file has this name
            continue
        yield line.startswith("w "), Path(os.path.normpath(Path.cwd() / line[2:]))


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """One whose name leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(prefix="p-") as name:
        yield Path(name).resolve()


def test_a_peer_writes_into_its_folder_only_and_reads_nothing_that_a_run_names(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"{i} {TEXT}" for i in range(20_000)))
    root = Path(__file__).parents[2]
    potluck.run("init", "ours", "text.txt", "--rounds", 2, check=True)
    run_file = Path("ours", MANIFEST)
    made = run_file.read_text()
    assert made.count("\nround_seconds = 30.0 ") == 1, made
    run_file.write_text(made.replace("\nround_seconds = 30.0 ", "\nround_seconds = 4.0 "))
    home, folder, notes = (tmp_path / name for name in ("home", "peer", "notes.txt"))
    sockets = short_folder
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id_ed25519").write_text("a secret")
    before = set(home.rglob("*"))
    shared = Path("ours").resolve()
    there = ("--dir", shared / NODE, "--corpus", shared / "corpus", "--host", "127.0.0.1", "--port", 0, "--json")
    with running("bootstrap", shared / MANIFEST, *there) as node:
        address = until(node, "listening")["address"]
        own = {"HOME": str(home), "TMPDIR": str(sockets), "XDG_CACHE_HOME": "", "PYTHONPATH": str(root)}
        words = ["--dir", folder, "--host", "127.0.0.1", "--memory", "1GB", "--threads", 1, "--json"]
        command = [sys.executable, "-B", "-c", WATCHED, str(notes), "join", str(address), *map(str, words)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | own) as peer:
            watchdog = threading.Timer(DEADLINE, peer.kill)
            watchdog.start()
            try:
                said = [json.loads(line)["event"] for line in peer.stdout or ()]
            finally:
                watchdog.cancel()
                peer.kill()
    assert "finished" in said, said[-3:]
    assert set(home.rglob("*")) == before, "nothing is left in the home"
    assert not [path for path in sockets.rglob("*") if path.is_file()], "nothing is left where sockets are"
    written = {path for writes, path in opened(notes) if writes}
    assert any(path.is_relative_to(folder) for path in written)
    devices = {Path("/dev/null"), Path("/dev/shm"), Path("/dev/tty")}
    strange = {
        p for p in written if not p.is_relative_to(folder) and not p.is_relative_to(sockets) and p not in devices
    }
    assert not strange
    read = {path for writes, path in opened(notes) if not writes}
    ours = (folder, sockets, root, Path(sys.prefix), Path(sys.base_prefix), Path("/proc"), Path("/sys"), Path("/dev"))
    system = (Path("/etc"), Path("/usr"), Path("/run"), Path("/lib"))
    elsewhere = {path for path in read if not any(path.is_relative_to(place) for place in (*ours, *system))}
    assert not elsewhere, "neither its home nor the run's files, which are on the same machine"
