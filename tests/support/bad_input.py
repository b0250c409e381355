"""Parts that whole-run tests of bad input share with others."""

from __future__ import annotations

from protocol.wire.commit import Record
from tests.support import tiny

RUN = tiny.manifest()


def log_of(rounds: int) -> list[Record]:
    """Commits 0 to rounds - 1 of RUN."""
    found: list[Record] = []
    for _ in range(rounds):
        before = found[-1].commit if found else None
        found.append(tiny.record(tiny.commit(RUN, before, time=1.0)))
    return found
