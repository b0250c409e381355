"""The training text of a stage: fetched ahead by the plan, and read one inner step ahead.

A stage waits for the text of the next step before it reports its gradient norm, and asks for the round's end if the
round's time is over before. So all stages end together and keep their steps (peer/chain/grad_norm.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from peer import events
from peer.chain.trace import Trace
from peer.corpus.text import Text
from peer.net.base import cancel
from protocol.errors import LocalError, PotluckError, UsageError
from protocol.run import corpus
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit
from protocol.wire.plan import Plan, Work

T = TypeVar("T")
Ids = NDArray[np.int64]
Read = Callable[[int], Coroutine[Any, Any, Ids]]
"""The token ids [micro_batches * rows, L + 1] of an inner step. Raises PotluckError."""
STOP_LOOK_SECONDS = 0.1
"""Between two looks at the stop sign while text is awaited."""
SHORTEST_TRACED_SECONDS = 1e-3


class StopSign(Protocol):
    """An asyncio.Event, a threading.Event, or the end of a round (peer/node/training.py)."""

    def is_set(self) -> bool:
        """Returns whether the inner step under way is the last one."""
        ...


class TextAhead:
    """Requests the text of a plan as soon as the plan is known; `expect` gets the slots."""

    def __init__(self, manifest: Manifest, peer: str, expect: Callable[[Sequence[range]], None]) -> None:
        self._manifest = manifest
        self._peer = peer
        self._expect = expect
        self._round = -1

    def follow(self, commit: Commit | None) -> None:
        """`commit` is the newest that is known."""
        if commit is not None and commit.round != self._round:
            self._round = commit.round
            self.expect(commit.plan)

    def expect(self, plan: Plan | None) -> None:
        """Requests our text in the round of `plan`, and in the one after as far as that is known."""
        number = plan.replica_of(self._peer) if plan is not None else None
        works: list[Work | None] = []
        if plan is not None and number is not None:
            replica = plan.replica(number)
            works = [replica.work, replica.following]
        rows = self._manifest.train.rows
        self._expect([corpus.slots(w.slot, 0, w.steps * w.micro_batches * rows) for w in works if w is not None])


def reader(manifest: Manifest, text: Text, work: Work, first_step: int, warn: Callable[[events.Body], None]) -> Read:
    """Reads the inner steps from `first_step` on of a round with this work. All members of a chain read the same."""
    rows, vocabulary = work.micro_batches * manifest.train.rows, manifest.model.vocab_size

    async def read(step: int) -> Ids:
        try:
            ids = await text.sequences(corpus.slots(work.slot, step - first_step, rows))
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:  # a corpus is its operator's word
                raise UsageError(
                    f"corpus {manifest.data.corpus[:12]}…: has an id outside the vocabulary of {vocabulary};"
                    " the operator must build it again"
                )
            return ids
        except PotluckError as error:
            if step > first_step:  # the steps before are kept
                warn(events.Warning(text=f"{error}; the round ends early"))
            raise

    return read


class Reading(Generic[T]):
    """The text of the inner steps up to `last`, as `read` prepares it; `stop` ends every wait.

    waited: seconds of waiting for text.
    """

    def __init__(
        self, read: Callable[[int], Coroutine[Any, Any, T]], last: int, stop: StopSign | None, trace: Trace | None
    ) -> None:
        self._read = read
        self._trace = trace
        self._last = last
        self._stop = stop
        self._step = 0
        self._task: asyncio.Task[T] | None = None
        self.waited = 0.0

    def ask(self, step: int) -> None:
        """Begins to read the text of this step, if there is such a step."""
        if step <= self._last:
            self._step, self._task = step, asyncio.create_task(self._read(step))

    async def take(self, step: int) -> T:
        """The text of this step. Raises PotluckError if it cannot be had, or not in time."""
        if self._task is None or self._step != step:
            await self.aclose()
            self.ask(step)
        if not await self._is_there():
            raise LocalError("the round was over before its text was there")
        task, self._task = self._task, None
        assert task is not None
        return task.result()

    async def has_next(self) -> bool:
        """Waits for the text under way. False if it cannot be had, or not in time; True where no step follows."""
        if self._task is None:
            return True
        if not await self._is_there():
            return False
        error = self._task.exception()
        if error is not None and not isinstance(error, PotluckError):
            raise error
        return error is None

    async def aclose(self) -> None:
        """Ends the reading under way."""
        await cancel(self._task)
        self._task = None

    async def _is_there(self) -> bool:
        """Waits for the end of the reading; False if the stop sign is set before."""
        assert self._task is not None
        began = time.perf_counter()
        while not self._task.done():
            await asyncio.wait({self._task}, timeout=STOP_LOOK_SECONDS)
            if self._stop is not None and self._stop.is_set():
                break
        end = time.perf_counter()
        self.waited += end - began
        if self._trace is not None and end - began > SHORTEST_TRACED_SECONDS:
            self._trace("wait for text", began, end)
        return self._task.done()
