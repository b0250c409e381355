"""A recorded trace is what trace viewers open, and says what the report says."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from peer.chain.trace import TraceFile
from protocol.errors import UsageError
from tests.support.chains import make_chain, run_chain


def test_a_trace_has_every_job_and_wait_of_the_steps(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    trace = TraceFile(file, "P0")
    chain = make_chain((3,), 8)
    reports = asyncio.run(run_chain(chain, steps=2, trace=trace))
    assert isinstance(json.loads(file.read_text()), list), "whole before anything was recorded"
    trace.flush()
    trace("late", 1.0, 2.0)
    trace.close()
    events = json.loads(file.read_text())
    names = [event["name"] for event in events]
    assert names.count("forward") == 2 * 3
    assert names.count("backward") == 2 * 3
    assert names.count("inner step") == 2
    assert names[-1] == "late"
    for event in events:
        assert {"name", "ph", "pid"} <= set(event)
        if event["ph"] == "X":
            assert event["dur"] >= 0 < event["ts"]
    steps = [event for event in events if event["name"] == "inner step"]
    for step, report in zip(steps, reports[0], strict=True):
        assert step["dur"] / 1e6 == pytest.approx(report.seconds, abs=1e-5)
        assert step["args"] == {"step": report.step, "depth": report.depth, "queued": report.queued}
    for kind, waited in (("forward", "wait_forward_s"), ("backward", "wait_backward_s")):
        total = sum(event["dur"] / 1e6 for event in events if event["name"] == f"wait for {kind}")
        assert total <= sum(getattr(report, waited) for report in reports[0]) + 1e-5


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--trace"):
        TraceFile(tmp_path / "missing" / "trace.json", "P0")
