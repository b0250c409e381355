"""torch.compile where it pays: on CUDA. What cannot be compiled runs as it is.

While a thread compiles, compiled code of other threads runs uncompiled. The settings for that are kept by thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def where_it_pays(work: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """`work` compiled for `device`, or `work` itself."""
    return _compiled(work) if device.type == "cuda" else work


class _Settings(threading.local):
    made = False

    def make(self) -> None:
        """Once in each thread."""
        if not self.made:
            import torch._dynamo

            torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs uncompiled
            torch._dynamo.config.error_on_nested_fx_trace = False
            self.made = True


_settings = _Settings()
_uncompiled_calls = 0


def uncompiled_calls() -> int:
    """The number of calls, at least, that ran uncompiled because a thread compiled."""
    return _uncompiled_calls


@functools.cache
def _compiled(work: Callable[P, R]) -> Callable[P, R]:
    compiled: Callable[P, R] = torch.compile(work, dynamic=False)

    @functools.wraps(work)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        global _uncompiled_calls
        _settings.make()
        if torch.fx._symbolic_trace.is_fx_symbolic_tracing():
            _uncompiled_calls += 1
        return compiled(*args, **kwargs)

    return call
