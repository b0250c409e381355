"""Everything works on disks without hard links, locks, sockets and synced folders, as exFAT and network drives."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from peer.net.disk import NOT_THERE
from tests.e2e.typed import running, until
from tests.faults.bad_machine import poor_disk
from tests.faults.processes import DEADLINE, Swarm
from tests.support.quorum import KEYS, four_nodes

IS_POOR = """
import fcntl, os, socket, sys
from pathlib import Path
disk = Path(sys.argv[1])
(disk / "file").write_bytes(b"")
file, folder = open(disk / "file", "r+b"), os.open(disk, os.O_RDONLY)
def refused(work, *words):
    try:
        work(*words)
    except OSError:
        return 1
    return 0
print(sum((
    refused(os.link, disk / "file", disk / "other"),
    refused(os.symlink, disk / "file", disk / "other"),
    refused(os.chmod, disk / "file", 0o600),
    refused(os.utime, disk / "file", (1, 1)),
    refused(fcntl.flock, file, fcntl.LOCK_EX),
    refused(os.posix_fallocate, file.fileno(), 0, 8),
    refused(os.fsync, folder),
    refused(socket.socket(socket.AF_UNIX).bind, str(disk / "socket")),
    1 - refused(os.fsync, file.fileno()),
)))
"""
WORKS = """
import sys
from pathlib import Path
from peer.net import keyfile
from peer.net.disk import Disk
from protocol.errors import UsageError
disk, folder = Disk(), Path(sys.argv[1]) / "peer"
first, again = (keyfile.load_or_create(folder / "identity.key") for _ in range(2))
assert first.peer_id == again.peer_id
disk.write(folder / "file", b"one", seconds=7)
disk.write(folder / "file", b"two")
disk.append(folder / "log", b"12")
disk.append(folder / "log", b"34")
disk.sync(folder)
(array,) = disk.arrays(folder, [(1000,)])
array[:] = 1
held = disk.lock(folder, "peer")
try:
    disk.lock(folder, "peer")
except UsageError as error:
    print(error)
held.close()
disk.lock(folder, "peer").close()
print(sorted(path.name for path in folder.iterdir()), disk.read(folder / "file"), disk.read(folder / "log"))
"""


def script(text: str, disk: Path, env: dict[str, str]) -> list[str]:
    command = [sys.executable, "-c", text, str(disk)]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    made = tmp_path / "disk"
    made.mkdir()
    return made


def test_keys_files_and_locks_need_nothing_that_such_a_disk_has_not(disk: Path, tmp_path: Path) -> None:
    env = poor_disk(tmp_path, disk)
    assert script(IS_POOR, disk, env) == ["9"], "the disk is as it should be"
    assert script(WORKS, disk, env) == [
        f"directory {disk / 'peer'}: another peer uses it; stop that one or choose another folder",
        "['file', 'identity.key', 'lock', 'log'] b'two' b'1234'",
    ]


def test_a_node_and_a_peer_train_on_such_a_disk(disk: Path, tmp_path: Path) -> None:
    """Their sockets, too, would be there, where temporary files are."""
    env = {**poor_disk(tmp_path, disk), "TMPDIR": str(disk)}
    manifest = four_nodes(rounds=10**6, start_peers=1)
    manifest = dataclasses.replace(manifest, operators=manifest.operators[:1], quorum=1)
    swarm = Swarm(disk / "run", manifest, KEYS[:1])
    node = ("bootstrap", swarm.file, "--dir", disk / "run" / "node-0", "--corpus", swarm.corpus)
    loopback = ("--host", "127.0.0.1", "--port", 0, "--json")
    with running(*node, *loopback, env=env) as first:
        address = str(until(first, "listening")["address"])
        peer = ("join", address, "--dir", disk / "peer", "--corpus", swarm.corpus, "--up", "1Gbps", "--down", "1Gbps")
        with running(*peer, *loopback, "--device", "cpu", env=env) as second:
            until(first, "commit", round=2)
            until(second, "round", round=2)


def test_only_what_is_missing_is_passed_over() -> None:
    """A disk that is full, read-only or broken is none of these."""
    import errno

    assert not NOT_THERE & {
        errno.EIO,
        errno.ENOSPC,
        errno.EROFS,
        errno.EDQUOT,
        errno.EWOULDBLOCK,
        errno.EAGAIN,
        errno.EINTR,
    }
