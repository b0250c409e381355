"""The cores of an operation are a number of each thread; a thread that did not ask in time takes the process's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from peer.training.trainer import make_worker, set_thread_cores

CORES = 3
DEADLINE_S = 60.0


def test_a_worker_keeps_its_cores_whatever_threads_begin_beside_it() -> None:
    with make_worker(CORES) as worker, ThreadPoolExecutor(1, initializer=set_thread_cores, initargs=(1,)) as other:
        worker.submit(bool).result(DEADLINE_S)  # it has begun, and computed nothing
        assert other.submit(torch.get_num_threads).result(DEADLINE_S) == 1
        assert worker.submit(torch.get_num_threads).result(DEADLINE_S) == CORES
        assert other.submit(torch.get_num_threads).result(DEADLINE_S) == 1
