"""What a monitor of 500 peers keeps in memory, and how much processor time it takes, with its screen, its page and its
network daemon: live, and from a recording.

What happens is the same each time, and is counted in rounds and announcements that the page has shown, not in seconds.
A monitor that has looked at the announcements LOOKS times has polled the log a number of times that follows from its
code, once a second at most. So its processor time for that is a share of a core that another program's work does not
change. Cores are not equally fast, and a process that shares one is slowed down: what counts is the share of a core
that does `reference` in REFERENCE_SECONDS, and this process does it meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peer.ui.monitor import PEERS_A_POLL, POLL_SECONDS
from protocol.run import manifest as manifests
from tests.support import crowd
from tests.support.watched import MadeUp
from tests.support.watching import DEADLINE, Taken, Watching, watching

PEERS, FEW, ROUNDS, MORE_ROUNDS = 500, 200, 20, 6
LOOKS = 2
"""At the announcements of all, with a decided round between: a real run has no round every twenty seconds."""
SHARE = 0.03
"""Of a core."""
REFERENCE_SECONDS = 0.045
"""Of processor time, for `reference` on the machine of docs/results/monitor.md when it does nothing else."""
BROWSER_SECONDS = 2.0
"""How often a page asks."""
MOST = 150_000_000
"""Bytes of memory of the monitor's process and its daemon together, shared files included, at most."""


def until(watched: Watching, wanted: Callable[[dict[str, Any]], bool], every: float = 0.2) -> dict[str, Any]:
    """The first state of the page that is `wanted`; it is asked for `every` seconds, for a page has no other sign."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        found = dict(json.loads(watched.get("state.json")))
        if wanted(found):
            return found
        time.sleep(every)
    raise AssertionError(f"not shown: round {found['round']}, {found['peers_here']} peers")


def reference() -> float:
    """Processor seconds of this thread for work of the kind that a monitor does."""
    began, announced = time.thread_time(), [{"peer": f"peer {i}", "step": i, "speed": i / 7} for i in range(500)]
    for _ in range(30):
        json.loads(json.dumps(announced))
        sorted(announced, key=lambda found: str(found["speed"]))
    return time.thread_time() - began


def within_bounds(taken: Taken) -> None:
    assert taken.own_bytes > 20_000_000, taken
    assert taken.own_bytes + taken.daemon_bytes < MOST, taken


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("peers", [FEW, pytest.param(PEERS, marks=pytest.mark.campaign)])
def test_a_live_run(peers: int, tmp_path: Path) -> None:
    """One of fewer peers keeps the same bounds, but for that of the processor, of which polls have a fixed part."""
    asyncio.run(live(peers, tmp_path))


async def live(peers: int, tmp_path: Path) -> None:
    made = crowd.Signing(peers)
    async with crowd.node(made, tmp_path / "node") as node:
        node.decide(ROUNDS)
        node.hear(1)

        def watch() -> None:
            with watching(node.line, measured=True) as watched:
                until(watched, lambda s: s["round"] == ROUNDS and s["peers_here"] == peers)
                within_bounds(watched.taken())
                for round in range(ROUNDS + 1, ROUNDS + MORE_ROUNDS + 1):
                    loop.call_soon_threadsafe(more)
                    found = until(watched, lambda s, round=round: s["round"] == round)
                    within_bounds(watched.taken())
                until(watched, lambda s: all(p["step"] == 4 for p in s["peers"] if p["role"] in ("full", "stage")))
                within_bounds(watched.taken())
                assert found["peers_total"] == peers
                assert watched.taken().daemon_bytes > 0
                assert "numpy" not in Path(f"/proc/{watched.process.pid}/maps").read_text(encoding="utf-8")  # 11 MB
                least = min(share_taken(watched), share_taken(watched))
                assert 0.001 < least <= (SHARE if peers == PEERS else 1.5 * SHARE)
                assert watched.process.poll() is None

        def share_taken(watched: Watching) -> float:
            """Of a core, from one look at the announcements to the last of LOOKS more, as the page shows them."""
            references: list[float] = []

            def shows(step: int) -> None:
                until(
                    watched,
                    lambda s: all(p["step"] == step for p in s["peers"] if p["role"] in ("full", "stage")),
                    BROWSER_SECONDS,
                )
                references.append(reference())

            before = watched.taken().seconds
            for step in range(1, LOOKS + 1):
                loop.call_soon_threadsafe(more, step)
                shows(step)
            seconds = (watched.taken().seconds - before) * REFERENCE_SECONDS / statistics.mean(references)
            return seconds / (LOOKS * (peers // PEERS_A_POLL) * POLL_SECONDS)

        def more(step: int = 4) -> None:
            if step in (1, 4):
                node.decide()
            node.hear(step)

        loop = asyncio.get_running_loop()
        await asyncio.to_thread(watch)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_recording(tmp_path: Path) -> None:
    made = MadeUp(PEERS)
    run, recording = tmp_path / "run.toml", tmp_path / "events.jsonl"
    run.write_text(manifests.to_toml(made.manifest))
    with open(recording, "w", encoding="utf-8") as out:
        for event in made.all(ROUNDS):
            out.write(event.to_json() + "\n")
    with watching(run, "--replay", recording, measured=True) as watched:
        found = until(watched, lambda s: s["round"] == ROUNDS + 1 and any(p["step"] == 3 for p in s["peers"]))
        assert found["peers_here"] == PEERS
        assert found["contributors_total"] > PEERS * 0.9
        within_bounds(watched.taken())
