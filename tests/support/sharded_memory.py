"""The memory of two ranks that hold a replica together.

`python -m tests.support.sharded_memory FOLDER` prints the process ids of both ranks and waits for a line; then it
trains two inner steps, takes the update and the moments, begins another round, and prints `done`.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import torch

from peer.net.disk import Disk
from peer.training import device
from peer.training.sharded import ShardedTrainer
from protocol.run import init, layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec
from tests.support import tiny
from tests.support.chains import random_theta
from tests.support.devices import alone, inner_step

RUN = tiny.manifest(
    model=ModelSpec(vocab_size=8192, d_model=512, n_layers=8, n_heads=8, d_ff=1408, context=64),
    train=TrainSpec(inner_steps=2, micro_batches=4, rows=1, sequence=64, lr=1e-3, warmup_steps=0, total_steps=9),
)
"""One whose ranks need some hundred MB, most of them for parameters."""


def main(folder: Path) -> None:
    device.one_heap()
    torch.set_num_threads(1)
    small = alone()
    small.begin_round(random_theta())
    inner_step(small, 1)
    spec, empty = RUN.model, functools.partial(Disk().arrays, folder)
    theta = {shard: init.initial_shard(spec, b"memory", shard, empty=empty) for shard in layout.shard_names(spec)}
    sharded = ShardedTrainer(spec, RUN.train, ["cpu", "cpu"], 1, folder)
    device.return_memory()
    print(os.getpid(), *sharded.processes, flush=True)
    sys.stdin.readline()
    sharded.begin_round(theta)
    for number in (1, 2):
        inner_step(sharded, number)
    sharded.end_round()
    device.return_memory()  # as peer/node/inner_loop.py
    for shard in sharded.shards:
        sharded.displacement(shard)
    sharded.optimizer_state()
    sharded.begin_round(theta)
    inner_step(sharded, 3)
    print("done", flush=True)
    sharded.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
