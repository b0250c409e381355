"""Where contributions are judged, beside the loop: the questions of the leader's machine are answered on a thread of their own, one after
the other, in steps of numpy between which the interpreter gives way. What is in the payloads was found when they came.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from protocol.round.judging import Case, Known, find_out
from protocol.round.leader_events import Verdict

log = logging.getLogger("potluck.judging")
PAUSE_SECONDS = 1.0
"""Before a payload of the round before, which is still on its way here, is looked for again."""


class Lacking(Exception):
    """Something that a case is about is not here yet."""


def wanted(read: Callable[[str], bytes | None]) -> Callable[[str], bytes]:
    """`read`, but raises Lacking for what is not here."""

    def found(name: str) -> bytes:
        data = read(name)
        if data is None:
            raise Lacking(name)
        return data

    return found


class Bench:
    """`read`: payloads and lists of parts by their names, None for what is not here; `put` takes the answers; `known`: what was found in
    payloads (protocol/round/notes.py); `pause`: seconds before what could not be judged is tried again."""

    def __init__(
        self,
        put: Callable[[Verdict], None],
        read: Callable[[str], bytes | None],
        known: Known = find_out,
        pause: float = PAUSE_SECONDS,
    ) -> None:
        self._put = put
        self._read = wanted(read)
        self._known = known
        self._pause = pause
        self._cases: asyncio.Queue[Case] = asyncio.Queue()

    def ask(self, case: Case) -> None:
        """Nobody waits any more for the answers to the cases before."""
        while not self._cases.empty():
            self._cases.get_nowait()
        self._cases.put_nowait(case)

    async def run(self) -> None:
        """Until it is cancelled; the thread ends after the case that it is at."""
        worker, loop = ThreadPoolExecutor(1, "judge"), asyncio.get_running_loop()
        try:
            while True:
                case = await self._cases.get()
                try:
                    judged = await loop.run_in_executor(worker, case.answer, self._read, self._known)
                except Exception as error:  # whatever was offered ends no node
                    if isinstance(error, Lacking):
                        log.info("round %d cannot be judged yet: %s is not here", case.round, error)
                    else:
                        log.exception("round %d cannot be judged", case.round)
                    await asyncio.sleep(self._pause)
                    if self._cases.empty():
                        self._cases.put_nowait(case)
                else:
                    self._put(Verdict(case, judged))
        finally:
            worker.shutdown(wait=False)
