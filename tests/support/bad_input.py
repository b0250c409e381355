"""Parts that whole-run tests of bad input share with others."""

from __future__ import annotations

from protocol.wire.commit import Commit, Record
from tests.support import tiny

RUN = tiny.manifest()


def log_of(rounds: int) -> list[Record]:
    """Commits 0 to rounds - 1 of RUN."""
    found: list[Record] = []
    for round in range(rounds):
        parent = found[-1].commit.digest if found else RUN.run_id
        commit = Commit(
            run=RUN.run_id, round=round, parent=parent, time=1.0, contributions=(), left_out=(), diverged=(), digests={},
            plan=None, leader=tiny.OPERATOR.peer_id, members=RUN.operators,
        )  # fmt: skip
        found.append(tiny.record(commit))
    return found
