"""The processes that tests fork (tests/support/potluck.py) are like a user's, and end with their session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.support import potluck

DEADLINE = 120.0
SESSION = """
import os, signal, subprocess
from tests.support import potluck
told = potluck.Popen("bootstrap", "--help", stdout=subprocess.PIPE)
stopped = potluck.Popen("bootstrap", "none.toml")
stopped.send_signal(signal.SIGSTOP)
print(stopped.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("words", [["--help"], ["join", "nothing"], ["bootstrap", "--port", "x", "y"]])
def test_a_fork_says_what_the_command_says_and_ends_as_it_does(words: list[str]) -> None:
    forked = potluck.run(*words)
    typed = subprocess.run([sys.executable, "-m", "peer.cli", *words], capture_output=True, timeout=DEADLINE)
    assert (forked.returncode, forked.stdout, forked.stderr) == (typed.returncode, typed.stdout, typed.stderr)


def test_a_fork_is_a_process_of_its_own() -> None:
    process = potluck.Popen("bootstrap", "none.toml", start_new_session=True, stderr=subprocess.DEVNULL)
    assert os.getsid(process.pid) == process.pid
    process.kill()
    assert process.wait(DEADLINE) == process.poll() == -signal.SIGKILL
    assert not psutil.pid_exists(process.pid)


def test_an_environment_that_is_read_when_python_starts_has_a_python_of_its_own() -> None:
    assert potluck.run("--help", env=os.environ | {"PYTHONVERBOSE": "1"}).stderr.startswith(b"import _frozen_importlib")


def test_nothing_is_left_when_the_session_is_killed() -> None:
    done = subprocess.run([sys.executable, "-c", SESSION], cwd=potluck.ROOT, stdout=subprocess.PIPE, timeout=DEADLINE)
    assert done.returncode == -signal.SIGKILL
    left = int(done.stdout)
    _, alive = psutil.wait_procs([psutil.Process(left)] if psutil.pid_exists(left) else [], DEADLINE)
    assert not alive
