"""The demo's swarm as processes: the same commands that strangers use, on loopback.

The command `potluck` itself comes as an argument: it is above the demo, and starts it.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from peer import events
from peer.demo.recipe import DemoOptions, PeerSpec
from peer.events import Event, Sink, from_json
from protocol.errors import LocalError

SILENCE_SECONDS = 900.0
END_SECONDS = 60.0
"""Where all peers have ended as if the run was over, the node may take so long to say that it is."""
LAST_NEWS_SECONDS = 3.0
"""The node stays so long after the end for a monitor in another terminal, which looks every two seconds."""
PRELOAD = ("peer.node.peer", "peer.net.p2p", "peer.training.device")
"""What every process of the swarm needs besides the command: imported once, then forked."""

Command = Callable[[Sequence[str]], None]
"""The command `potluck`, with what is typed after it. A function of a module, so that another process finds it."""


class _Child:
    """One process of the swarm: a fork of a server that has imported everything once, then the command as it was typed."""

    def __init__(self, command: Command, folder: Path, arguments: list[str]) -> None:
        self.folder = folder
        context = multiprocessing.get_context("forkserver")
        self.output, theirs = context.Pipe(duplex=False)
        errors = str(folder / "stderr.txt")
        self.process = context.Process(target=_be_potluck, args=(command, theirs, errors, arguments))
        self.process.start()
        theirs.close()

    def failure(self) -> str:
        """Why it ended, in a few words."""
        lines = (self.folder / "stderr.txt").read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("potluck: ") if lines else f"exit code {self.process.exitcode}"


def _be_potluck(command: Command, output: Connection, errors: str, arguments: list[str]) -> None:
    """In the child: standard output is the pipe, and the command runs."""
    os.dup2(output.fileno(), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
    output.close()
    command(arguments)


async def run_processes(
    options: DemoOptions, command: Command, peers: list[PeerSpec], corpus: Path, feed: Sink
) -> AsyncGenerator[None, None]:
    """The swarm as processes; yields after every event, ends when the bootstrap node ends or nobody is left. `corpus`: the text's folder,
    which the node has, and nobody else."""
    multiprocessing.set_forkserver_preload([command.__module__, *PRELOAD])
    queue: asyncio.Queue[tuple[str, Event | None]] = asyncio.Queue()
    children: dict[str, _Child] = {}
    readers: list[asyncio.Task[None]] = []

    async def start(name: str, *arguments: str) -> None:
        children[name] = await asyncio.to_thread(_Child, command, options.out / name, [*arguments, "--json"])
        readers.append(asyncio.create_task(read(name, children[name])))

    async def read(name: str, child: _Child) -> None:
        stream = asyncio.StreamReader(limit=1 << 22)
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(os.dup(child.output.fileno()), "rb")
        )
        with open(child.folder / "events.jsonl", "ab") as log:
            while line := await stream.readline():
                log.write(line)
                log.flush()
                event = from_json(line.decode("utf-8", "replace"))
                if event is not None:
                    queue.put_nowait((name, event))
        pipe.close()
        child.output.close()
        await asyncio.to_thread(child.process.join)
        queue.put_nowait((name, None))

    try:
        folder = str(options.out / "bootstrap")
        run_file = str(options.out / "run.toml")
        here = ("--host", "127.0.0.1", "--port", "0", "--corpus", str(corpus))
        await start("bootstrap", "bootstrap", run_file, "--dir", folder, *here)
        left: set[str] = set()
        nobody: LocalError | None = None
        end = math.inf
        while True:
            name, event = await asyncio.wait_for(queue.get(), min(SILENCE_SECONDS, end - time.monotonic()))
            if event is None:
                failure = children[name].failure()
                if name == "bootstrap":
                    raise LocalError(f"bootstrap node: {failure}")
                left.add(name)
                if children[name].process.exitcode:
                    feed(Event(time.time(), name, events.Warning(text=f"{name} ended: {failure}")))
                if len(left) == len(peers):
                    nobody = LocalError(f"every peer ended, the last one ({name}) with: {failure}; see {options.out}")
                    if any(children[peer.name].process.exitcode for peer in peers):
                        raise nobody
                    end = time.monotonic() + END_SECONDS
                continue
            feed(event)
            if isinstance(event.body, events.Listening):
                for peer in peers:
                    await start(peer.name, *_join_arguments(options, peer, event.body.address))
            if isinstance(event.body, events.RunFinished):
                await asyncio.to_thread(_all_ended, [c for n, c in children.items() if n != "bootstrap"])
                await asyncio.sleep(LAST_NEWS_SECONDS)
            yield
    except TimeoutError:
        silence = LocalError(f"the swarm: nothing happened for {SILENCE_SECONDS:g} s; see {options.out}")
        raise nobody or silence from None
    finally:
        for child in children.values():
            child.process.terminate()
        await asyncio.to_thread(_all_ended, list(children.values()))
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


def _join_arguments(options: DemoOptions, peer: PeerSpec, address: str) -> list[str]:
    """What a volunteer with this machine would type."""
    values = {
        "--dir": options.out / peer.name,
        "--host": "127.0.0.1",
        "--port": 0,
        "--device": options.device,
        "--memory": peer.memory_bytes,
        "--up": f"{peer.up_bps}bps",
        "--down": f"{peer.up_bps}bps",
        "--threads": 1,
    }
    return ["join", address, *(str(x) for pair in values.items() for x in pair)]


def _all_ended(children: list[_Child]) -> None:
    """Waits for processes to end; those that do not within a minute are killed."""
    end = time.monotonic() + 60
    for child in children:
        child.process.join(max(0.0, end - time.monotonic()))
        if child.process.is_alive():
            child.process.kill()
            child.process.join()
