"""Settings for all tests. The hub of data sets is not asked. Libraries without a chosen number of threads have one, in
this process and in its children: more threads than free cores wait for each other. A closed terminal ends what tests
start, also under nohup.

An async test has an event loop of its own; marked `virtual`, one in which time costs nothing. An async context that a
fixture gives is entered in that loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import random
import signal
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import pytest

from tests.sim.loop import VirtualLoop

SECONDS = 300.0
"""Limit of an async test; far above what any takes, for busy machines."""

gc.disable()  # while tests are collected: what is imported stays, and to look through it is a quarter of the time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and children would inherit that


def pytest_configure(config: pytest.Config) -> None:
    """What hypothesis warns of when it is imported late, since it cannot see what is frozen."""
    config.addinivalue_line("filterwarnings", "ignore:It looks like `register_random`")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    given: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    is_virtual = pyfuncitem.get_closest_marker("virtual") is not None

    async def work() -> None:
        async with asyncio.timeout(None if is_virtual else SECONDS), contextlib.AsyncExitStack() as stack:
            for name, value in given.items():
                if isinstance(value, contextlib.AbstractAsyncContextManager):
                    given[name] = await stack.enter_async_context(value)
            await test(**given)

    with asyncio.Runner(loop_factory=(lambda: VirtualLoop(random.Random(0))) if is_virtual else None) as runner:
        runner.run(work())
    return True
