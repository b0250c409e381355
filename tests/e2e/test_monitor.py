"""`potluck monitor` of a real run: page, JSON, metrics and one picture, also when all nodes but one die."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peer.ui import web
from tests.faults.processes import DEADLINE, Swarm
from tests.support import potluck
from tests.support.quorum import KEYS, four_nodes


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=DEADLINE) as reply:
        return bytes(reply.read())


def wait(url: str, wanted: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    """The first state of the page that is `wanted`."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        found = dict(json.loads(get(url + "state.json")))
        if wanted(found):
            return found
        time.sleep(0.2)  # a page has no other sign of news
    raise AssertionError(f"{what} did not happen")


@pytest.mark.timeout(900)
def test_the_page_of_a_run_goes_on_though_nodes_die(tmp_path: Path) -> None:
    manifest = four_nodes(rounds=10**4, start_peers=2)
    with Swarm(tmp_path / "run", manifest, KEYS, module="tests.faults.paced") as swarm:
        swarm.start_all("peer-0", "peer-1")
        swarm.committed(swarm.nodes[0], 2)
        errors = tmp_path / "stderr.txt"
        with open(errors, "wb") as told, open(os.devnull) as nothing:
            words = ("monitor", swarm.addresses[0], "--web", 0, "--metrics", 0)
            monitor = potluck.Popen(*words, stdin=nothing, stdout=subprocess.DEVNULL, stderr=told)
        swarm.running["monitor"] = monitor
        url = address(errors, monitor)
        assert get(url) == web.PAGE.read_bytes()
        found = wait(url, lambda s: s["round"] >= 3 and s["peers_here"] == 2, "a state with both peers")
        assert found["run"] == manifest.run_id
        assert found["loss"] > 0
        assert found["tokens"] == sum(c["tokens"] for c in found["contributors"])
        assert [o["voted"] for o in found["health"]["operators"]].count(True) >= 2
        assert {r["chain"] for r in found["replicas"]} == {False}
        assert re.search(rb'^potluck_round\{run="\w{12}"\} [1-9]', get(url + "metrics"), re.MULTILINE)
        once(swarm.addresses[0], manifest.run_id)
        swarm.kill(swarm.nodes[0])  # by whose address the monitor came
        seen = found["round"]
        later = wait(url, lambda s: s["round"] >= seen + 3, "three more rounds by the nodes that are left")
        swarm.kill(swarm.nodes[1])
        wait(url, lambda s: s["time"] > later["time"] + 3, "an answer after the second death")
        assert monitor.poll() is None
        monitor.terminate()
        assert swarm.ended("monitor") == 0
        assert "Traceback" not in errors.read_text()


def address(errors: Path, monitor: subprocess.Popen[bytes]) -> str:
    """Where the page is, as the monitor says."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end and monitor.poll() is None:
        said = re.search(r"the page: (http://127\.0\.0\.1:\d+/)", errors.read_text())
        if said is not None:
            return said[1]
        time.sleep(0.1)  # the file has no other sign of news
    raise AssertionError(errors.read_text())


def once(address: str, run: str) -> None:
    """One picture, one state, and the first line of the stream, each by a process of its own."""
    size = os.environ | {"COLUMNS": "100", "LINES": "30"}
    picture = potluck.run("monitor", address, "--once", text=True, timeout=DEADLINE, check=True, env=size).stdout
    assert f"run {run[:8]}" in picture
    assert "2 full, 0 chain" in picture
    assert max(map(len, picture.splitlines())) <= 100
    state = potluck.run("monitor", address, "--once", "--json", text=True, timeout=DEADLINE, check=True).stdout
    assert json.loads(state)["run"] == run
    with potluck.Popen("monitor", address, "--json", stdout=subprocess.PIPE, text=True) as stream:
        first, second = (json.loads(stream.stdout.readline()) for _ in range(2))
        stream.terminate()
    assert first["run"] == run
    assert second["time"] > first["time"]
