"""The command `potluck` of an installation: `potluck/__main__.py` of the wheel, with our packages beside it.

The wheel has one name at the top, `potluck`, and below it the source tree's packages, which import each other as they
do there (docs/adr/0071-one-name-in-the-wheel.md).
"""

from __future__ import annotations

import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))


def main() -> None:
    """Runs the program in a process that imports our packages before others of their names. Each Python that it starts
    does the same, and imports nothing from its working folder."""
    ignoring = sys.flags.ignore_environment
    others = "" if ignoring else os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (FOLDER, others)))
    os.environ["PYTHONSAFEPATH"] = "1"
    if ignoring:  # pipx starts commands by `python -E`, and multiprocessing passes that on
        os.execv(sys.executable, [sys.executable, "-m", "potluck", *sys.argv[1:]])
    sys.path.insert(0, FOLDER)
    from peer.cli.main import main as potluck

    potluck()


if __name__ == "__main__":
    main()
