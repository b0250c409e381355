"""The text of a stage's inner steps: that of the next step is asked for, and made ready, while a step is computed.

No step begins whose text is not there. A stage waits for the text of the next step before it says what its gradient's norm is, and
wishes that the round ends if the round's time is over before the text has come, or if it cannot be had. So all stages end together
(peer/chain/grad_norm.py), and what was done is kept. Only the first step has nothing to keep: then the wait fails.
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
from protocol.errors import LocalError, PotluckError, UsageError
from protocol.run import data_order
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit
from protocol.wire.plan import Plan, Work


class StopSign(Protocol):
    """An asyncio.Event, a threading.Event, or the end of a round (peer/node/training.py)."""

    def is_set(self) -> bool:
        """Whether the inner step under way is the last one."""
        ...


class TextAhead:
    """Has the text of a plan fetched as soon as the plan is known: while the commit that brought it is applied."""

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
        """What we will read by `plan`, in its round and in the one after as far as that is known."""
        number = plan.replica_of(self._peer) if plan is not None else None
        works: list[Work | None] = []
        if plan is not None and number is not None:
            replica = plan.replica(number)
            works = [replica.work, replica.following]
        rows = self._manifest.train.rows
        self._expect([data_order.slots(w.slot, 0, w.steps * w.micro_batches * rows) for w in works if w is not None])


def reader(manifest: Manifest, text: Text, work: Work, first_step: int, warn: Callable[[events.Body], None]) -> Read:
    """Reads the inner steps of a round, `first_step` and those after, whose text is `work`'s. All members of a chain read the same."""
    rows = work.micro_batches * manifest.train.rows

    async def read(step: int) -> Ids:
        try:
            return _checked(await text.sequences(data_order.slots(work.slot, step - first_step, rows)), manifest)
        except PotluckError as error:
            if step > first_step:  # what was done is kept, and this is no reason to sit out (peer/chain/reading.py)
                warn(events.Warning(text=f"{error}; the round ends early"))
            raise

    return read


def _checked(ids: Ids, manifest: Manifest) -> Ids:
    """Raises UsageError for an id that the model has not: its operator may have built anything."""
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < manifest.model.vocab_size:
        raise UsageError(
            f"corpus {manifest.data.corpus[:12]}…: has an id outside the vocabulary of {manifest.model.vocab_size}; the operator must"
            " build it again"
        )
    return ids


T = TypeVar("T")
Ids = NDArray[np.int64]
Read = Callable[[int], Coroutine[Any, Any, Ids]]
"""The token ids [micro_batches * rows, L + 1] of an inner step. Raises PotluckError."""
LOOK_SECONDS = 0.1
"""While text is waited for, this often the sign is looked at."""
_NOTED_SECONDS = 1e-3


class Reading(Generic[T]):
    """Of the inner steps up to `last`, as `read` makes it ready; `stop` ends every wait. `waited`: seconds that this stage has waited for text."""

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
        """The text of this step will be needed, if there is such a step."""
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
        """Waits for what was asked for; False if it cannot be had, or not in time. True where nothing was asked for."""
        if self._task is None:
            return True
        if not await self._is_there():
            return False
        error = self._task.exception()
        if error is not None and not isinstance(error, PotluckError):
            raise error
        return error is None

    async def aclose(self) -> None:
        """What was asked for is not needed any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _is_there(self) -> bool:
        """Waits until the text is there, or cannot be had; False if the sign is set before."""
        assert self._task is not None
        began = time.perf_counter()
        while not self._task.done():
            await asyncio.wait({self._task}, timeout=LOOK_SECONDS)
            if self._stop is not None and self._stop.is_set():
                break
        end = time.perf_counter()
        self.waited += end - began
        if self._trace is not None and end - began > _NOTED_SECONDS:
            self._trace("wait for text", began, end)
        return self._task.done()
