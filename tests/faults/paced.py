"""`potluck`, but a micro-batch takes as many seconds through the whole model as a file `pace` in its --dir says, or
SECONDS.

A stage's forward and backward then last as long as its share of the blocks says, a third and two thirds, and a third
more where activations are computed anew, however little there is to compute: many peers can live on one machine
without measuring that machine. The file may be rewritten at any time.

A file `room`, if there is one, says for how many blocks there is memory: with more the system refuses what is asked of
it.

A file `line`, if there is one, says how many bits a second of states and payloads come in. It may be rewritten, or
removed, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from peer.cli import main as cli
from peer.net.base import Stream, Transport
from peer.node.inner_loop import StageInnerLoop
from peer.node.peer import Factories
from peer.training.trainer import StageTrainer
from protocol.wire import endpoints

SECONDS = 0.2
"""Where there is no such file: so long that a peer leaves the machine to others most of the time."""
FORWARD = 1 / 3
TOO_MUCH = 1 << 55
"""Bytes that no machine has."""


def paced(folder: Path) -> type[StageInnerLoop]:
    """The inner loop of a peer whose files are in `folder`."""

    class Trainer(StageTrainer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.again: set[int] = set()  # micro-batches whose forward is computed once more

        def forward(self, micro: int, *arguments: Any, recompute: bool = False, **options: Any) -> Any:
            began = time.perf_counter()
            if recompute:
                self.again.add(micro)
            if (folder / "room").exists() and self.blocks > int((folder / "room").read_text()):
                torch.empty(TOO_MUCH, dtype=torch.uint8)
            result = super().forward(micro, *arguments, recompute=recompute, **options)
            self.pause(began, FORWARD)
            return result

        def backward(self, micro: int, *arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = super().backward(micro, *arguments, **options)
            self.pause(began, 1 - FORWARD + (FORWARD if micro in self.again else 0.0))
            self.again.discard(micro)
            return result

        @property
        def blocks(self) -> int:
            return sum(shard.startswith("block.") for shard in self.shards)

        def pause(self, began: float, part: float) -> None:
            seconds = part * pace(folder) * self.blocks / self.spec.n_layers
            time.sleep(max(0.0, began + seconds - time.perf_counter()))

    class InnerLoop(StageInnerLoop):
        trainer_class = Trainer

    return InnerLoop


class Line:
    """A transport over which blobs come no faster than the file `line` in `folder` says, a piece of each stream in
    turn, as on a line that many connections share."""

    LEAST, SECONDS = 256, 0.02
    """Bytes of a piece, and how long it takes, at least."""

    def __init__(self, transport: Transport, folder: Path) -> None:
        self._transport, self._folder = transport, folder
        self._turn = asyncio.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def open(self, peer: str, name: str, *, timeout: float) -> Any:
        stream = await self._transport.open(peer, name, timeout=timeout)
        return Incoming(stream, self) if name == endpoints.BLOB else stream

    async def carry(self, size: int) -> None:
        """Returns when this number of bytes has come through."""
        while size > 0:
            async with self._turn:
                bps = self._bps()
                if bps is None:
                    return
                piece = min(size, max(self.LEAST, int(bps / 8 * self.SECONDS)))
                await asyncio.sleep(8 * piece / bps)
            size -= piece

    def _bps(self) -> float | None:
        with contextlib.suppress(FileNotFoundError):
            return float((self._folder / "line").read_text())
        return None


class Incoming:
    """A stream through a `Line`."""

    def __init__(self, stream: Stream, line: Line) -> None:
        self._stream, self._line = stream, line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def recv(self, *arguments: Any, **options: Any) -> bytes:
        data = await self._stream.recv(*arguments, **options)
        await self._line.carry(len(data))
        return data


def pace(folder: Path) -> float:
    """As it is now; a bootstrap node has none."""
    with contextlib.suppress(FileNotFoundError):
        return float((folder / "pace").read_text())
    return SECONDS


def set_pace(folder: Path, seconds: float) -> None:
    """From the next micro-batch on."""
    _say(folder, "pace", seconds)


def set_line(folder: Path, bps: float | None) -> None:
    """From the next piece on. None: as fast as it can."""
    if bps is None:
        (folder / "line").unlink()
    else:
        _say(folder, "line", bps)


def _say(folder: Path, name: str, value: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.new").write_text(repr(value))
    (folder / f"{name}.new").rename(folder / name)


def main(arguments: Sequence[str] | None = None) -> None:
    """`arguments`: as `potluck` takes them (default: the process's own)."""
    typed = sys.argv if arguments is None else arguments
    folder = Path(typed[typed.index("--dir") + 1])
    line: Any = Line
    cli.main(arguments, Factories(inner_loop=paced(folder), line=lambda transport: line(transport, folder)))


if __name__ == "__main__":
    main()
