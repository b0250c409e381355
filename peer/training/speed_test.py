"""Measures the training speed of this machine in seconds: a process of its own trains micro-batches of a run's model.

    python -m peer.training.speed_test MANIFEST DEVICE THREADS MEMORY

prints 0 when it begins to train, then each better estimate of the speed, in operations a second
(protocol/planning/partition.py), until it is stopped.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from peer.net import processes
from protocol.planning import memory
from protocol.planning.budget import Budget, holds_whole
from protocol.planning.partition import Speedometer
from protocol.run import layout
from protocol.run import manifest as manifests
from protocol.run.manifest import Manifest

WARM_UP = 1


def part_of(manifest: Manifest, memory_bytes: int, device: str) -> tuple[int, int]:
    """The blocks that are trained: all, or one in the middle if memory is too small."""
    layers = manifest.model.n_layers
    if holds_whole(manifest, Budget(memory_bytes, device)):
        return 0, layers
    return (1, 2) if layers > 2 else (0, 1)


def run(manifest: Manifest, device: str, threads: int, memory_bytes: int) -> None:
    """See the module's docstring. Never returns."""
    import torch

    from peer.training.trainer import StageTrainer

    torch.set_num_threads(threads)
    first, last = part_of(manifest, memory_bytes, device)
    # a block of a model with tied embeddings, which there is in no chain, is a block like any other
    spec, train = replace(manifest.model, tie_word_embeddings=False), manifest.train
    trainer = StageTrainer(spec, train, memory.stage_shards(manifest, first, last), device=device)
    draw = np.random.default_rng(0)
    shapes = {shard: layout.shapes(spec, shard) for shard in trainer.shards}
    trainer.begin_round({s: [draw.standard_normal(x, np.float32) * 0.02 for x in of] for s, of in shapes.items()})
    shape = (train.rows, train.sequence)
    wire = torch.randn(*shape, spec.d_model)
    speed, said, done = Speedometer(manifest), 0, 0
    print(said, flush=True)
    while True:
        ids = torch.randint(spec.vocab_size, (train.rows, train.sequence + 1))
        began = time.perf_counter()
        trainer.forward(done, ids, None if first == 0 else wire.to(device))
        trainer.backward(done, None if last == spec.n_layers else wire.to(device))
        trainer.synchronize()
        done += 1
        if done > WARM_UP:
            found = speed.add(first, last, time.perf_counter() - began)
            if found != said:
                said = found
                print(said, flush=True)
        trainer.reset()


async def measured(
    manifest: Manifest, folder: Path, device: str, threads: int, memory_bytes: int, seconds: float, within: float
) -> int | None:
    """The speed in operations a second after `seconds` of training, or soon after; None where it is unknown `within`
    seconds in all, or the machine cannot train. `folder`: for a temporary file.
    """
    clock = asyncio.get_running_loop().time
    enough = until = clock() + within
    path = folder / f"speed-test-{secrets.token_hex(4)}.toml"
    path.write_text(manifests.to_toml(manifest), encoding="utf-8")
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "peer.training.speed_test", str(path), device, str(threads), str(memory_bytes)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    found: int | None = None
    try:
        assert child.stdout is not None
        async with asyncio.timeout_at(until) as limit:
            async for line in child.stdout:
                found = int(line) or None
                if found is None:  # torch is imported, and the model made
                    enough = min(until, clock() + seconds)
                elif clock() >= enough:
                    break
                else:
                    limit.reschedule(enough)
    except TimeoutError:
        pass
    finally:
        processes.send_signal(child)
        await child.wait()
        path.unlink(missing_ok=True)
    return found


async def together(
    manifest: Manifest,
    folder: Path,
    devices: Sequence[str],
    threads: int,
    memory_bytes: int,
    seconds: float,
    within: float,
) -> int | None:
    """The speed of several devices that train at the same time with equal shares: that of the slowest, times their
    number. It leaves out the adding up of gradients."""
    speeds = await asyncio.gather(
        *(measured(manifest, folder, device, threads, memory_bytes, seconds, within) for device in devices)
    )
    known = [speed for speed in speeds if speed is not None]
    return min(known) * len(devices) if len(known) == len(devices) else None


if __name__ == "__main__":
    _, path, device, threads, memory_bytes = sys.argv
    run(manifests.from_toml(Path(path).read_bytes(), path), device, int(threads), int(memory_bytes))
