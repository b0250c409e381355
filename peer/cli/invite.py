"""`potluck invite`: a line that lets friends into a closed run."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from peer.cli import running
from peer.cli.decrees import FOLDER, OwnRun, own_key
from peer.net import node_calls
from peer.node.open_run import Door, here, manifest_of, node_folder, parse_run, start_transport
from peer.node.open_run import Run as Found
from peer.ui.text import clean, typed
from protocol.errors import UsageError
from protocol.ledger import access
from protocol.run.manifest import Manifest
from protocol.wire.decree import LONGEST_NOTE, MOST_GUESTS

SECONDS = {"m": 60, "h": 3600, "d": 86400}
LONGEST_DAYS = 366


def invite(
    run: OwnRun = None,
    expires: Annotated[str, typer.Option(help="How long it holds, such as 30m, 12h or 7d.")] = "7d",
    count: Annotated[int, typer.Option(help=f"How many peers may come in by it, at most {MOST_GUESTS}.")] = 5,
    reason: Annotated[str, typer.Option(help="For whom or what it is, for everybody to read in the log.")] = "",
    dir: Annotated[Path, typer.Option("--dir", help="Your bootstrap node's folder.", show_default=True)] = FOLDER,
) -> None:
    """Print a line with which friends join a run that is closed: as an operator, with the key of your bootstrap node."""
    running.run(_invite(run, expires, count, reason, dir), interrupted=1)


async def _invite(named: str | None, span: str, count: int, reason: str, folder: Path) -> None:
    text = here(folder) if named is None else named
    folder = node_folder(text, folder)
    operator, run, seconds = own_key(folder), parse_run(text), seconds_in(span)
    if not 1 <= count <= MOST_GUESTS:
        raise UsageError(f"--count {count}: must be from 1 to {MOST_GUESTS}")
    if len(reason) > LONGEST_NOTE or not reason.isprintable():
        raise UsageError(f"--reason: may have {LONGEST_NOTE} printable characters")
    manifest, operators = await _operators(run, operator.peer_id)
    if operator.peer_id not in operators:
        raise UsageError(f"--dir {folder}: {operator.peer_id} is no operator of {clean(manifest.name)}")
    expires = int(time.time()) + seconds
    ticket = access.issue(operator, os.urandom(32), run.run_id, expires=expires, count=count, reason=reason)
    place, key = f"{run.bootstrap[0]}#{run.run_id}", ticket.invitation.key
    print(f"{place}#{ticket.text()}", flush=True)
    end = typed("potluck", "run", "ban", place, key, *(() if folder == FOLDER else ("--dir", folder)))
    until = datetime.fromtimestamp(expires, UTC).strftime("%Y-%m-%d %H:%M")
    print(
        f"for {count} peer{'s' if count > 1 else ''} until {until} UTC; to end it: {end}",
        file=sys.stderr,
        flush=True,
    )


async def _operators(run: Found, peer: str) -> tuple[Manifest, tuple[str, ...]]:
    """The run's manifest and its operators; nobody is asked where the manifest is here and names this one."""
    if run.manifest is not None and peer in run.manifest.operators:
        return run.manifest, run.manifest.operators
    with tempfile.TemporaryDirectory(prefix="potluck-invite-") as name:
        transport = await start_transport(Path(name), Door(host="127.0.0.1"), run.run_id)
        try:
            manifest = await manifest_of(run, transport)
            now = await node_calls.ask_operators(transport, run.dialled[0])
            return manifest, now.board.names
        finally:
            await transport.aclose()


def seconds_in(text: str) -> int:
    """The seconds in `30m`, `12h` or `7d`. Raises UsageError."""
    found = re.fullmatch(r"([0-9]{1,6})([mhd])", text)
    seconds = int(found[1]) * SECONDS[found[2]] if found else 0
    if not 0 < seconds <= LONGEST_DAYS * SECONDS["d"]:
        raise UsageError(f"--expires {clean(text, 20)}: give such as 30m, 12h or 7d, at most {LONGEST_DAYS}d")
    return seconds
