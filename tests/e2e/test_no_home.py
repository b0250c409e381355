"""A user that no file lists, and without HOME, as a container runs programs for: nothing ends in a traceback."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from peer import config
from protocol.errors import UsageError
from tests.faults.processes import DEADLINE

USER = "54321"
LOOK = """
import getpass, os
from peer.config import cache_folder, home, make_home
make_home()
print(getpass.getuser(), os.path.expanduser("~"), cache_folder(), home())
"""


def nobody(at: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command as such a user, in the folder `at`, in which temporary files are, too."""
    without = ("HOME", "USER", "LOGNAME", "USERNAME", "LNAME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    env = {name: text for name, text in os.environ.items() if name not in without}
    env |= {"TMPDIR": str(at), "PYTHONPATH": str(Path(config.__file__).parent.parent)}
    become = ["unshare", "--user", f"--map-user={USER}", f"--map-group={USER}"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*become, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("user namespaces: a user whom no file lists is made with them")
    done = [*become, sys.executable, *command]
    return subprocess.run(done, cwd=at, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False)


def test_such_a_user_has_a_name_and_a_folder_for_caches(tmp_path: Path) -> None:
    done = nobody(tmp_path, "-c", LOOK)
    home = tmp_path / f"potluck-home-{USER}"
    assert done.stdout.split() == [USER, str(home), str(home / ".cache" / "potluck"), "None"], done
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


@pytest.mark.parametrize("words", [("service", "install", "x"), ("service", "status")])
def test_a_service_needs_a_home(words: tuple[str, ...], tmp_path: Path) -> None:
    done = nobody(tmp_path, "-m", "peer.cli", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"potluck: service: user {USER} has no home folder")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_demo_needs_none(tmp_path: Path) -> None:
    small = ("--rounds", "1", "--inner-steps", "1", "--full", "1", "--chains", "0")
    done = nobody(tmp_path, "-m", "peer.cli", "demo", "--in-memory", *small, "--no-screen", "--out", "out")
    assert done.returncode == 0, done
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("kind", ["none", "missing", "file"])
def test_a_home_that_is_not_there_is_none(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / kind))
    assert config.home() is None


def test_a_folder_that_others_may_write_to_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may have put it there."""
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    taken = tmp_path / f"potluck-home-{os.getuid()}"
    taken.mkdir()
    taken.chmod(0o777)
    config.make_home(tmp_path)
    found = Path(os.environ["HOME"])
    assert found != taken
    assert (found.parent, stat.S_IMODE(found.stat().st_mode)) == (tmp_path, 0o700)
    taken.rmdir()
    config.make_home(tmp_path)
    assert Path(os.environ["HOME"]) == taken


def test_no_home_and_no_folder_for_temporary_files_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    with pytest.raises(UsageError, match="set HOME or TMPDIR to a folder"):
        config.make_home(tmp_path / "missing, too")
