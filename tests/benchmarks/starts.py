"""What starts cost: seconds of processor, of the process and its network daemon, until `potluck --help` has ended and until `potluck join`
dials for the first time.

The run that is joined is a TCP port that accepts and says nothing: the processor's time is read when the first connection comes in.

    python -m tests.benchmarks.starts
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile

import psutil

from tests.support import tiny

TIMES = 5
WITHIN_SECONDS = 120.0
COMMAND = (sys.executable, "-m", "peer.cli")


def help_seconds() -> float:
    """Of `potluck --help`."""
    process = subprocess.Popen([*COMMAND, "--help"], stdout=subprocess.DEVNULL)
    _, code, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(code)
    assert process.returncode == 0
    return used.ru_utime + used.ru_stime


def dial_seconds() -> float:
    """Of `potluck join` until it dials."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as port:
        port.settimeout(WITHIN_SECONDS)
        address = f"/ip4/127.0.0.1/tcp/{port.getsockname()[1]}/p2p/{tiny.OPERATOR.peer_id}#{'0' * 64}"
        command = [*COMMAND, "join", address, "--dir", folder, "--host", "127.0.0.1"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port.accept()
            peer = psutil.Process(process.pid)
            times = [one.cpu_times() for one in (peer, *peer.children(recursive=True))]
            return sum(one.user + one.system for one in times)
        finally:
            process.kill()
            process.wait()


def main() -> None:
    for name, measure in (("--help", help_seconds), ("join, to its first packet", dial_seconds)):
        measure()  # warms the files
        found = [measure() for _ in range(TIMES)]
        print(
            f"{name}: {statistics.median(found):.2f} s of processor, median of {TIMES} ({min(found):.2f} to {max(found):.2f})"
        )


if __name__ == "__main__":
    main()
