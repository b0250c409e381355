"""torch.compile where it pays: on CUDA, which has the compiler beside it. What cannot be compiled runs as it is.

The compiled code is cached by torch on disk, so that the next start takes seconds.

A stage computes on its worker thread and encodes on others. While one of them compiles, torch says of the others' compiled code that it
is called from within a trace, since it keeps that in one place for the whole process: such a call runs as it is, too. torch keeps the settings
that say so for each thread.
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
    """Of the thread that asks."""

    made = False

    def make(self) -> None:
        """Once in each thread."""
        if not self.made:
            import torch._dynamo

            torch._dynamo.config.suppress_errors = True  # what the compiler cannot do is done without it
            torch._dynamo.config.error_on_nested_fx_trace = False
            self.made = True


_settings = _Settings()
_as_they_are = 0


def as_they_are() -> int:
    """How many calls ran as they are so far since a thread was compiling, at least: who compares two counts knows of what lies between."""
    return _as_they_are


@functools.cache
def _compiled(work: Callable[P, R]) -> Callable[P, R]:
    compiled: Callable[P, R] = torch.compile(work, dynamic=False)

    @functools.wraps(work)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        global _as_they_are
        _settings.make()
        if torch.fx._symbolic_trace.is_fx_symbolic_tracing():
            _as_they_are += 1
        return compiled(*args, **kwargs)

    return call
