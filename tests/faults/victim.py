"""`potluck`, but a file `fate` in its --dir says when its own life is to be disturbed: {"phase", "step", "micro",
"kind"}.

As soon as the model has gone "forward" or "backward" with that micro-batch, after that number of inner steps of a
round, the file becomes `struck` (with the time) and the process kills or stops itself; of kind "cut" it waits until its
link is cut and goes on. Of kind "noise" or "flipped" it lies from then on: that is what it sends to its neighbours
instead of the activations or gradients of this phase.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from peer.cli import main as cli
from peer.node.inner_loop import StageInnerLoop
from peer.node.peer import Factories
from peer.training.trainer import StageTrainer

LIES = ("noise", "flipped")


def disturbed(folder: Path) -> type[StageInnerLoop]:
    """The inner loop of a peer whose files are in `folder`."""

    lies: dict[str, str] = {}

    class Trainer(StageTrainer):
        def forward(self, micro: int, *arguments: Any, **options: Any) -> Any:
            result = super().forward(micro, *arguments, **options)
            self.look("forward", micro)
            return lie(lies.get("forward"), result)

        def backward(self, micro: int, *arguments: Any, **options: Any) -> Any:
            result = super().backward(micro, *arguments, **options)
            self.look("backward", micro)
            return lie(lies.get("backward"), result)

        def look(self, phase: str, micro: int) -> None:
            if (folder / "fate").exists():
                told = json.loads((folder / "fate").read_text())
                if (told["phase"], told["step"], told["micro"]) == (phase, self.steps, micro):
                    if told["kind"] in LIES:
                        lies[phase] = told["kind"]
                    strike(folder, told)

    class InnerLoop(StageInnerLoop):
        trainer_class = Trainer

    return InnerLoop


def lie(kind: str | None, values: Any) -> Any:
    """What is sent for these values; nothing is sent by a stage at the chain's end."""
    if kind is None or values is None or not values.dim():
        return values
    return -values if kind == "flipped" else torch.randn_like(values) * values.square().mean().sqrt()


def strike(folder: Path, told: dict[str, Any]) -> None:
    fate = folder / "fate"
    written = folder / "struck.new"
    written.write_text(json.dumps({**told, "time": time.time()}))
    fate.unlink()
    written.rename(folder / "struck")
    if told["kind"] == "cut":
        while not (folder / "cut").exists():
            time.sleep(0.005)
        (folder / "cut").unlink()
    elif told["kind"] not in LIES:
        os.kill(os.getpid(), signal.SIGKILL if told["kind"] == "kill" else signal.SIGSTOP)


def main() -> None:
    folder = Path(sys.argv[sys.argv.index("--dir") + 1])
    cli.main(factories=Factories(inner_loop=disturbed(folder)))


if __name__ == "__main__":
    main()
