"""Two machines with IPv6 only: one joins by the line that the other prints; needs root and Linux (iproute2)."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from peer.cli.init import MANIFEST, NODE
from peer.demo.recipe import demo_corpus
from tests.e2e.typed import running, until
from tests.faults.processes import DEADLINE
from tests.support import potluck


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


@contextlib.contextmanager
def two_machines() -> Iterator[list[str]]:
    """Two network namespaces on one cable, without IPv4; skips the test where they cannot be made."""
    names = [f"potluck{os.getpid()}-{end}" for end in ("one", "two")]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "addr", "del", "127.0.0.1/8", "dev", "lo")
            _ip("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
            for number, name in enumerate(names):
                _ip("-n", name, "addr", "add", f"fd77::{number + 1}/64", "dev", "eth0", "nodad")
                _ip("-n", name, "link", "set", "eth0", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            pytest.skip(f"network namespaces with IPv6: {' '.join(said.split())[:120]}; they need root and iproute2")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def test_a_run_of_machines_with_ipv6_only(tmp_path: Path) -> None:
    corpus = demo_corpus().folder
    done = potluck.run("init", "ours", "--corpus", corpus, cwd=tmp_path, timeout=DEADLINE)
    assert done.returncode == 0, done
    ours = tmp_path / "ours"
    with two_machines() as (here, there):
        at = [["ip", "netns", "exec", name] for name in (here, there)]
        node = ("bootstrap", ours / MANIFEST, "--dir", ours / NODE, "--corpus", corpus, "--json")
        with running(*node, before=at[0]) as first:
            address = str(until(first, "listening")["address"])
            assert address.startswith("/ip6/fd77::1/tcp/31337/")
            for place, words in ((at[0], [str(ours)]), (at[1], [address])):
                watched = ("monitor", *words, "--once", "--json")
                told = potluck.run(*watched, before=place, text=True, timeout=DEADLINE)
                assert told.returncode == 0, told
            with running(
                "join", address, "--dir", tmp_path / "peer", "--memory", "1GB", "--json", before=at[1]
            ) as peer:
                assert until(peer, "reachable")["how"] == "direct"
                until(first, "ready", memory_bytes=10**9)
