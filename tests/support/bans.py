"""Parts that hostile tests of bans share with others."""

from __future__ import annotations

import subprocess

from tests.faults.processes import DEADLINE, Swarm
from tests.support import potluck


def command(swarm: Swarm, node: str, action: str, *more: str) -> list[str]:
    """`potluck run`, as this node's operator types it."""
    return ["run", action, swarm.addresses[0], *more, "--dir", str(swarm.folder / node)]


def together(swarm: Swarm, *arguments: str) -> list[str]:
    """What three operators type, each after the one before has begun to wait for others; what they read."""
    told, waiting = [], []
    try:
        for number, node in enumerate(("node-0", "node-1"), 1):
            process = potluck.Popen(
                *command(swarm, node, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            waiting.append(process)
            told.append(process.stdout.readline())
            assert f"signed by {number} of 3; the other operators have to type the same command" in told[-1]
        third = potluck.run(*command(swarm, "node-2", *arguments), text=True, timeout=DEADLINE, check=True)
        for at, process in enumerate(waiting):
            rest, errors = process.communicate(timeout=DEADLINE)
            assert process.returncode == 0, errors
            told[at] += rest
    finally:
        for process in waiting:
            process.kill()
    return [*told, third.stdout]
