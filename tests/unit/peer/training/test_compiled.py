"""What runs compiled on a GPU runs on several threads, and one of them may be compiling meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from peer.training import compiled

CUDA = torch.device("cuda")
"""Its name is enough: the compiler is not asked where the call is not compiled."""
DEADLINE_S = 60.0


def _doubled(x: Tensor) -> Tensor:
    return 2 * x


class _Traced(nn.Module):
    """Is being traced for as long as `until` is not set, as a block of the model is while it is compiled."""

    def __init__(self, begun: threading.Event, until: threading.Event) -> None:
        super().__init__()
        self.begun, self.until = begun, until

    def forward(self, x: Tensor) -> Tensor:
        self.begun.set()
        assert self.until.wait(DEADLINE_S)
        return x


def test_a_thread_may_call_while_another_compiles() -> None:
    begun, until = threading.Event(), threading.Event()
    call = compiled.where_it_pays(_doubled, CUDA)
    with ThreadPoolExecutor(2) as threads:
        traced = threads.submit(torch.fx.symbolic_trace, _Traced(begun, until))
        assert begun.wait(DEADLINE_S)
        before = compiled.uncompiled_calls()
        try:  # on another thread than made it, and than traces
            assert torch.equal(threads.submit(call, torch.ones(3)).result(DEADLINE_S), torch.full((3,), 2.0))
            assert compiled.uncompiled_calls() == before + 1
        finally:
            until.set()
        traced.result(DEADLINE_S)


def test_nothing_is_compiled_for_the_processor() -> None:
    assert compiled.where_it_pays(_doubled, torch.device("cpu")) is _doubled
