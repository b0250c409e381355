"""An async test has an event loop of its own, marked `virtual` one in which time costs nothing. What a fixture gives as
an async context is entered in that loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
from typing import Any

import pytest

from tests.sim.loop import VirtualLoop

SECONDS = 300.0
"""Far above what anything here takes, for machines that are busy."""


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
