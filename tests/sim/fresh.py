"""Simulations of other trees than this one, each in a process that is forked from one that has imported what is not
ours: a start takes a third of the processor time.

    python tests/sim/fresh.py

A request is a line of JSON: a folder, which has a tree, and what is typed behind `python -m tests.sim.run` there. The
answer is a line of JSON, what it said.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
OTHERS = ("torch", "numpy", "tokenizers", "hivemind", "cryptography", "msgpack", "rich", "pyarrow", "multiaddr")


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, __file__], cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True)
    atexit.register(server.communicate)
    return server


def simulate(folder: Path, words: Sequence[str]) -> str:
    """What the simulation of this tree prints."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([str(folder), list(words)]) + "\n")
    server.stdin.flush()
    return str(json.loads(server.stdout.readline()))


def become(folder: str, words: list[str], out: int) -> None:
    """Makes this forked process `python -m tests.sim.run WORDS` in that folder."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    sys.path[0] = folder
    importlib.invalidate_caches()
    sys.argv[1:] = words
    try:
        runpy.run_module("tests.sim.run", run_name="__main__", alter_sys=True)
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()


def main() -> None:
    gc.disable()  # also while a life is lived (tests/sim/run.py)
    for name in OTHERS:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        folder, words = json.loads(line)
        with tempfile.TemporaryFile() as out:
            child = os.fork()
            if child == 0:
                become(folder, words, out.fileno())
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
            os.waitpid(child, 0)
            out.seek(0)
            print(json.dumps(out.read().decode()), flush=True)


if __name__ == "__main__":
    main()
