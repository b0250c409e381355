"""Which text a peer reads: the slots that plans give to its replica, and those of an inner step of a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from peer import events
from peer.chain.reading import Ids, Read
from peer.corpus.text import Text
from protocol.errors import PotluckError, UsageError
from protocol.run import corpus
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit
from protocol.wire.plan import Plan, Work


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
        self._expect([corpus.slots(w.slot, 0, w.steps * w.micro_batches * rows) for w in works if w is not None])


def reader(manifest: Manifest, text: Text, work: Work, first_step: int, warn: Callable[[events.Body], None]) -> Read:
    """Reads the inner steps of a round, `first_step` and those after, whose text is `work`'s. All members of a chain read the same."""
    rows = work.micro_batches * manifest.train.rows

    async def read(step: int) -> Ids:
        try:
            return _checked(await text.sequences(corpus.slots(work.slot, step - first_step, rows)), manifest)
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
