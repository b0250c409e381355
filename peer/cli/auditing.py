"""`potluck bootstrap --audit`: a process that audits the log beside the node (peer/node/audit.py).

The child prints its events as JSON lines, and ends when its standard input does. If it dies, it is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from peer import events
from peer.events import Emitter, json_sink
from peer.net import keyfile, processes
from peer.net.address import host_of, is_loopback
from peer.net.base import until
from peer.node.open_run import KEY, Door, manifest_of, parse_run, start_transport
from protocol.errors import PotluckError
from protocol.identity import short_peer

FOLDER = "audit"
RESTART_SECONDS = 5.0
LINE_BYTES = 1 << 20
LOCAL_BPS = 10**9
"""Bandwidth to the node on the same machine."""


def auditor(folder: Path) -> str:
    """Peer id of the auditor of the node in `folder`. Raises UsageError."""
    return keyfile.load_or_create(folder / FOLDER / KEY).peer_id


async def audit(line: str, folder: Path) -> None:
    """Audits the run at `line` until it is over or the parent process is gone. Raises PotluckError."""
    from peer.node.audit import held_out_text
    from peer.node.config import JoinConfig, Machine
    from peer.node.peer import Factories, Peer
    from peer.node.training import InnerLoop
    from peer.state.storage import Storage
    from peer.training.device import Hardware

    run, key = parse_run(line), keyfile.load_or_create(folder / KEY)
    storage, transport = Storage(folder), await start_transport(folder, Door(host="127.0.0.1", port=0), run.run_id)
    try:
        await transport.connect(run.bootstrap, timeout=10.0)
        manifest = await manifest_of(run, transport)
        config = JoinConfig(run=run, folder=folder, up_bps=LOCAL_BPS, down_bps=LOCAL_BPS, audit=True)
        machine = Machine(config, Hardware(("cpu",), 0))
        made = Factories(text=held_out_text, inner_loop=InnerLoop)
        emit = Emitter(key.peer_id, json_sink())
        peer = Peer(manifest, key, transport, storage, machine, emit, made)
        if (followed := await until(_parent_gone(), peer.run())) is not None:
            followed.result()
    finally:
        await transport.aclose()
        storage.close()


async def _parent_gone() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


PROGRAM = (sys.executable, "-m", "peer.cli.auditing")


async def audit_beside(
    folder: Path,
    run: str,
    addresses: Sequence[str],
    emit: events.Emit,
    program: Sequence[str] = PROGRAM,
    again: float = RESTART_SECONDS,
) -> None:
    """Runs the auditor of the node in `folder` until the run is over; restarts it after failures.

    addresses: of the node.
    program: the command without its arguments.
    again: seconds before a restart, and for its end.
    """
    address = next((a for a in addresses if is_loopback(host_of(a))), next(iter(addresses), ""))
    command = [*program, f"{address}#{run}", str(folder / FOLDER)]
    while True:
        try:
            code = await _follow(command, emit, again)
            if code == 0:
                return
            ended = f"ended with exit code {code}"
        except (OSError, ValueError) as error:  # it could not be started, or its output is not an auditor's
            ended = f"could not be followed ({error})"
        emit(events.Warning(text=f"audit: its process {ended}; it is started again"))
        await asyncio.sleep(again)


async def _follow(command: Sequence[str], emit: events.Emit, patience: float) -> int:
    """Runs an auditor to its end, passes on its warnings, and returns its exit code.

    Raises OSError, and ValueError for a line over LINE_BYTES.
    """
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=LINE_BYTES
    )
    try:
        assert child.stdout is not None
        async for line in child.stdout:
            found = events.from_json(line.decode(errors="replace"))
            if found is not None and isinstance(found.body, events.Warning):
                emit(events.Warning(text=f"audit: {found.body.text}"))
            elif found is not None and isinstance(found.body, events.Started):
                emit(events.Warning(text=f"audit: peer {short_peer(found.source)} follows the log beside this node"))
        return await child.wait()
    finally:
        await _end(child, patience)


async def _end(child: asyncio.subprocess.Process, patience: float) -> None:
    """Lets the child write its state, then kills it."""
    if child.returncode is None and child.stdin is not None:
        child.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_rest(child), patience)
    if child.returncode is None:
        processes.send_signal(child)
        await _rest(child)


async def _rest(child: asyncio.subprocess.Process) -> None:
    """Waits for the child's end. Drains its pipe, without which the end is not reported."""
    assert child.stdout is not None
    while await child.stdout.read(LINE_BYTES):
        pass
    await child.wait()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to the group; the node ends this process
        signal.signal(number, signal.SIG_IGN)
    try:
        asyncio.run(audit(sys.argv[1], Path(sys.argv[2])))
    except PotluckError as error:
        sys.exit(f"error: {error}")
