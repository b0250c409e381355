"""`potluck bootstrap --audit`: a process of its own follows the log beside the node (peer/node/audit.py).

The child is `python -m peer.cli.auditing LINE FOLDER`. It tells its events as JSON lines, and ends when its standard input does: so it
outlives nobody. If it dies, it is started again, and goes on from its last checkpoint.
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
from peer.node.open_run import KEY, Door, manifest_of, parse_run, start_transport
from protocol.errors import PotluckError
from protocol.identity import short_peer

FOLDER = "audit"
"""Of the auditor, in the node's."""
AGAIN_SECONDS = 5.0
LINE_BYTES = 1 << 20
RATE = 10**9
"""Bits a second: it is beside its node, and measures nothing."""


def auditor(folder: Path) -> str:
    """The peer id of the auditor of the node in `folder`. Raises UsageError."""
    return keyfile.load_or_create(folder / FOLDER / KEY).peer_id


async def audit(line: str, folder: Path) -> None:
    """Follows the log of the run behind `line`, until it is over or whoever started us is gone. Raises PotluckError."""
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
        config = JoinConfig(run=run, folder=folder, up_bps=RATE, down_bps=RATE, audit=True)
        machine = Machine(config, Hardware(("cpu",), 0))
        made = Factories(text=held_out_text, inner_loop=InnerLoop)
        emit = Emitter(key.peer_id, json_sink())
        peer = Peer(manifest, key, transport, storage, machine, emit, made)
        following, alone = asyncio.create_task(peer.run()), asyncio.create_task(_until_alone())
        try:
            await asyncio.wait({following, alone}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            for task in (following, alone):
                task.cancel()
            await asyncio.gather(following, alone, return_exceptions=True)
    finally:
        await transport.aclose()
        storage.close()


async def _until_alone() -> None:
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
    again: float = AGAIN_SECONDS,
) -> None:
    """Runs the auditor of the node in `folder`, which listens at `addresses`, until the run is over. Whatever becomes of it, the node goes
    on. `program`: the command before its arguments; `again`: seconds until it is started again, and that it has to end."""
    address = next((a for a in addresses if is_loopback(host_of(a))), next(iter(addresses), ""))
    command = [*program, f"{address}#{run}", str(folder / FOLDER)]
    while True:
        try:
            code = await _follow(command, emit, again)
            if code == 0:
                return
            ended = f"ended with exit code {code}"
        except (OSError, ValueError) as error:  # it could not be started, or says what no auditor says
            ended = f"could not be followed ({error})"
        emit(events.Warning(text=f"audit: its process {ended}; it is started again"))
        await asyncio.sleep(again)


async def _follow(command: Sequence[str], emit: events.Emit, patience: float) -> int:
    """Runs an auditor to its end, and tells what it warns of; its exit code. Raises OSError, and ValueError for a line over LINE_BYTES."""
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
    """Lets it write its state, if it has not ended."""
    if child.returncode is None and child.stdin is not None:
        child.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_rest(child), patience)
    if child.returncode is None:
        processes.send_signal(child)
        await _rest(child)


async def _rest(child: asyncio.subprocess.Process) -> None:
    """Waits for its end. What it still writes is read and dropped: it is not known to have ended before its pipe has."""
    assert child.stdout is not None
    while await child.stdout.read(LINE_BYTES):
        pass
    await child.wait()


if __name__ == "__main__":
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # those of a process group are for the node, which ends us
        signal.signal(number, signal.SIG_IGN)
    try:
        asyncio.run(audit(sys.argv[1], Path(sys.argv[2])))
    except PotluckError as error:
        sys.exit(f"error: {error}")
