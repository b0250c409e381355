"""A slice of the campaign against the handlers (`make fuzz` is the long one), and that it finds what is planted."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from peer.net.base import Stream
from peer.net.memory import MemoryNetwork
from tests.fuzz.handlers import MEMORY_MIB, Raised, State, campaign

MESSAGES = 4000


def test_nobody_ends_and_no_handler_is_surprised(tmp_path: Path) -> None:
    state = asyncio.run(campaign(tmp_path, 0, lambda state: state.messages < MESSAGES))
    assert dict(state.raised) == {}
    assert state.messages >= MESSAGES
    assert len(state.by_name) >= 12, "every name that is served is spoken to"
    assert state.grown_mib < MEMORY_MIB


def test_a_handler_that_is_surprised_is_heard_of() -> None:
    raised, log = Raised(), logging.getLogger("potluck")

    async def work() -> None:
        network = MemoryNetwork()
        victim, enemy = network.transport("victim"), network.transport("enemy")

        async def surprised(stream: Stream) -> None:
            raise KeyError("planted")

        await victim.serve("name", surprised)
        stream = await enemy.open("victim", "name", timeout=5)
        await stream.close()
        while not raised.found:
            await asyncio.sleep(0)
        for transport in (victim, enemy):
            await transport.aclose()

    log.addHandler(raised)
    try:
        asyncio.run(asyncio.wait_for(work(), 60))
    finally:
        log.removeHandler(raised)
    assert "planted" in next(iter(raised.found))
    assert State().messages == 0
