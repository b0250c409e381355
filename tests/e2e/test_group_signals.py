"""A signal to all processes of a group (`timeout`, Ctrl-C): the network daemon lives until all is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from peer.cli.init import MANIFEST, NODE
from peer.demo.recipe import demo_corpus
from peer.events import from_json
from tests.faults.processes import DEADLINE
from tests.support import potluck


def started(*words: object) -> subprocess.Popen[str]:
    """`potluck …`, in a process group of its own."""
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return potluck.Popen(*words, "--host", "127.0.0.1", "--port", 0, "--json", start_new_session=True, **out)


def until(process: subprocess.Popen[str], kind: str) -> dict[str, object]:
    assert process.stdout is not None
    for line in process.stdout:
        event = from_json(line)
        if event is not None and event.kind == kind:
            return event.fields
    raise AssertionError(f"it ended without {kind}")


def rest(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What else it says, and its errors, until it ends."""
    assert process.stdout is not None
    assert process.stderr is not None
    watchdog = threading.Timer(DEADLINE, process.kill)
    watchdog.start()
    try:
        said = process.stdout.read(), process.stderr.read()
        process.wait()
    finally:
        watchdog.cancel()
    return said


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    potluck.run("init", "ours", "--corpus", demo_corpus().folder, cwd=tmp_path, check=True, timeout=DEADLINE)
    return tmp_path / "ours"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_ends_a_peer_and_a_node_before_their_daemons(number: int, ours: Path, tmp_path: Path) -> None:
    """Neither says that its daemon has ended before, and the node hears of the peer's end at once."""
    node = started("bootstrap", ours / MANIFEST, "--dir", ours / NODE, "--corpus", demo_corpus().folder)
    running = [node]
    try:
        peer = started("join", until(node, "listening")["address"], "--dir", tmp_path / "peer", "--device", "cpu")
        running.append(peer)
        until(peer, "step")
        os.killpg(peer.pid, number)
        assert rest(peer)[1] == ""
        until(node, "gone")
        os.killpg(node.pid, number)
        assert rest(node)[1] == ""
        assert (peer.returncode, node.returncode) == (0, 0)
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux: only there a process can have its children end with it")
def test_the_daemon_of_a_process_that_was_killed_ends_with_it(ours: Path) -> None:
    node = started("bootstrap", ours / MANIFEST, "--dir", ours / NODE, "--corpus", demo_corpus().folder)
    try:
        until(node, "listening")
        children = psutil.Process(node.pid).children(recursive=True)
        assert any("p2pd" in child.name() for child in children)
        assert all(os.getpgid(child.pid) != os.getpgid(node.pid) for child in children if "p2pd" in child.name())
    finally:
        node.kill()
        node.wait()
    _, alive = psutil.wait_procs(children, timeout=DEADLINE)
    assert not alive
