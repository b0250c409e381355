"""`potluck`, but a file `pace` in its --dir says how fast its machine is: seconds that a micro-batch takes through the whole model.

A stage's forward and backward then last as long as its share of the blocks says, a third and two thirds, however little there is to
compute: so many peers can live on one machine without measuring that machine. The file may be written anew at any time.

A file `room`, if there is one, says for how many blocks there is memory: with more the system refuses what is asked of it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from peer.cli import main as cli
from peer.node.inner_loop import StageInnerLoop
from peer.node.peer import Factories
from peer.training.trainer import StageTrainer

FORWARD = 1 / 3
TOO_MUCH = 1 << 55
"""Bytes that no machine has."""


def paced(folder: Path) -> type[StageInnerLoop]:
    """The inner loop of a peer whose files are in `folder`."""

    class Trainer(StageTrainer):
        def forward(self, micro: int, *arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            if (folder / "room").exists() and self.blocks > int((folder / "room").read_text()):
                torch.empty(TOO_MUCH, dtype=torch.uint8)
            result = super().forward(micro, *arguments, **options)
            self.rest(began, FORWARD)
            return result

        def backward(self, micro: int, *arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = super().backward(micro, *arguments, **options)
            self.rest(began, 1 - FORWARD)
            return result

        @property
        def blocks(self) -> int:
            return sum(shard.startswith("block.") for shard in self.shards)

        def rest(self, began: float, part: float) -> None:
            seconds = part * pace(folder) * self.blocks / self.spec.n_layers
            time.sleep(max(0.0, began + seconds - time.perf_counter()))

    class InnerLoop(StageInnerLoop):
        trainer_class = Trainer

    return InnerLoop


def pace(folder: Path) -> float:
    """As it is now; a bootstrap node has none."""
    return float((folder / "pace").read_text())


def set_pace(folder: Path, seconds: float) -> None:
    """From the next micro-batch on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pace.new").write_text(repr(seconds))
    (folder / "pace.new").rename(folder / "pace")


def main() -> None:
    folder = Path(sys.argv[sys.argv.index("--dir") + 1])
    cli.main(factories=Factories(inner_loop=paced(folder)))


if __name__ == "__main__":
    main()
