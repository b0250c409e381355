"""The newest job is done outside the loop, and what cannot be done yet is tried again."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from bootstrap.background_jobs import LatestJob, Missing, ProposalChecker, require
from peer.net.base import Clock
from protocol.codec.sparse import PayloadError
from protocol.errors import UsageError
from protocol.ledger import run_state
from protocol.round.fairness import NodeView
from protocol.wire.commit import Aggregate, Commit
from tests.support import tiny


@pytest.mark.parametrize(("late", "fails"), [(0, 0), (2, 0), (0, 2)])
async def test_a_job_is_done_as_soon_as_it_can_be(late: int, fails: int) -> None:
    asked: list[str] = []

    def read(name: str) -> bytes | None:
        asked.append(name)
        if fails >= len(asked):
            raise ValueError("a bug")
        return b"here" if len(asked) > late else None

    answers: asyncio.Queue[bytes] = asyncio.Queue()
    made = LatestJob("judge", require(read), answers.put_nowait, retry_seconds=0.0)
    made.ask("x")
    running = asyncio.create_task(made.run())
    assert await asyncio.wait_for(answers.get(), 30.0) == b"here"
    assert asked == ["x"] * (late + fails + 1)
    assert not running.done()
    running.cancel()


@pytest.mark.parametrize("error", [Missing("no payload"), UsageError("no space"), PayloadError("no payload")])
def test_aggregates_that_cannot_be_made_are_a_doubt_and_end_no_node(error: Exception) -> None:
    def fails(commit: Commit) -> Any:
        raise error

    unused: Any = None
    checker = ProposalChecker(unused, unused, Clock(), unused, unused, unused, unused, fails)
    before, named = tiny.commit(), (Aggregate(shard="embed", digest="0" * 64, size=9),)
    sight = NodeView(state=run_state.fold(tiny.manifest(), [before]), chains=None, wall=0.0, settled=True)
    commit = tiny.commit(before=before, aggregates=named)
    doubt = checker.wrong_aggregates(sight, commit)
    assert doubt is not None
    assert not doubt.lie
    assert checker.wrong_aggregates(dataclasses.replace(sight, settled=False), commit) is None
