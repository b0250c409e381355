"""`potluck`, but a file `fate` in its --dir says when its own life is to be disturbed: {"phase", "step", "micro", "kind"}.

As soon as the model has gone "forward" or "backward" with that micro-batch, after so many inner steps of a round, the file becomes
`struck` (with the time) and the process kills or stops itself; of kind "cut" it waits until its link is cut and goes on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer.cli import main as cli
from peer.training import trainer


def disturbed(folder: Path, phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
    fate = folder / "fate"

    def do(self: trainer.StageTrainer, micro: int, *arguments: Any, **options: Any) -> Any:
        result = work(self, micro, *arguments, **options)
        if fate.exists():
            told = json.loads(fate.read_text())
            if (told["phase"], told["step"], told["micro"]) == (phase, self.steps, micro):
                strike(folder, told)
        return result

    return do


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
    else:
        os.kill(os.getpid(), signal.SIGKILL if told["kind"] == "kill" else signal.SIGSTOP)


def main() -> None:
    if "--dir" in sys.argv:
        folder = Path(sys.argv[sys.argv.index("--dir") + 1])
        made = trainer.StageTrainer
        made.forward = disturbed(folder, "forward", made.forward)  # type: ignore[method-assign]
        made.backward = disturbed(folder, "backward", made.backward)  # type: ignore[method-assign]
    cli.main()


if __name__ == "__main__":
    main()
