"""A line that leads to no work says so: of another run, of a run that bans or does not admit this peer, with an
invitation that has expired, or of a run that is over. One message each, its exit code, and less than twenty seconds."""

from __future__ import annotations

import time
from pathlib import Path

from protocol.errors import BannedError, ClosedError
from protocol.ledger import access
from tests.faults.processes import DEADLINE, Swarm
from tests.support import potluck, tiny
from tests.support.roles import make_manifest

NODE, KEY = "node-0", tiny.OPERATORS[0]
OFFER = ("--host", "127.0.0.1", "--device", "cpu", "--threads", 1, "--up", "20Mbps", "--down", "100Mbps")
SECONDS = 20.0


def test_each_line_that_leads_to_no_work_is_told_why(tmp_path: Path) -> None:
    manifest = make_manifest(start_peers=1)
    with Swarm(tmp_path / "run", manifest, (KEY,), module="tests.faults.paced") as swarm:
        swarm.start_all("member")
        line = str(swarm.wait(NODE, lambda e: e.kind == "listening", "its line").fields["line"])
        swarm.committed(NODE, 1)

        def join(folder: str, address: str = line) -> tuple[int, list[str]]:
            """The exit code of `potluck join`, and the lines that end it."""
            began = time.monotonic()
            done = potluck.run("join", address, "--dir", tmp_path / folder, *OFFER, text=True, timeout=DEADLINE)
            seconds = time.monotonic() - began
            print(f"{folder}: exit code {done.returncode} after {seconds:.1f} s")
            assert seconds < SECONDS, done
            said = [text.partition(" ✓ ")[2] for text in done.stdout.splitlines() if "is over" in text]
            return done.returncode, [*done.stderr.splitlines(), *said]

        def decree(*words: object) -> None:
            action, *more = words
            at = ("run", action, swarm.addresses[0], *more, "--dir", swarm.folder / NODE)
            assert "decided" in potluck.run(*at, text=True, timeout=DEADLINE, check=True).stdout

        name, _, code = line.rpartition("#")
        ended, (said,) = join("wrong", f"{name}#{code[:-1]}{'2' if code[-1] == '3' else '3'}")
        assert (ended, "is not what is at 127.0.0.1 now" in said) == (2, True), said

        stranger = potluck.run("key", "--dir", tmp_path / "banned", text=True, check=True).stdout.strip()
        decree("ban", stranger)
        ended, (said,) = join("banned")
        assert (ended, f"peer {stranger}: it is banned" in said) == (BannedError.exit_code, True), said

        decree("admit", swarm.started("member"))
        decree("close")
        ended, (said,) = join("stranger")
        assert (ended, "the run is closed, and it is not admitted" in said) == (ClosedError.exit_code, True), said
        late = access.issue(KEY, bytes(32), manifest.run_id, expires=int(time.time()) - 1, count=1, reason="")
        ended, (said,) = join("late", f"{swarm.addresses[0]}#{late.text()}")
        assert (ended, "its invitation has expired" in said) == (ClosedError.exit_code, True), said

        decree("open")
        decree("set", "--rounds", max(e.fields["round"] for e in swarm.events(NODE) if e.kind == "commit") + 3)
        assert swarm.ended("member") == 0
        ended, (said,) = join("after")
        assert (ended, said.startswith("the run is over after round ")) == (0, True), said
