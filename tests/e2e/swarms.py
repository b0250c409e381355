"""Whole swarms for tests: the demo with a model so small that the machine's speed hardly matters, and what it wrote."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer.cli.main import main
from peer.demo import swarm
from peer.demo.recipe import DemoOptions, demo_corpus, make_manifest
from peer.events import Event
from protocol.run.layout import ModelSpec
from protocol.run.manifest import DataSpec, Manifest
from tests.faults.processes import Tail

DEADLINE = 600.0
"""Seconds for anything to happen; far more than it takes, since test machines are shared."""
MODEL = ModelSpec(vocab_size=4096, d_model=32, n_layers=4, n_heads=2, d_ff=48, context=128)


def options(out: Path, **changes: Any) -> DemoOptions:
    """Three full replicas, three rounds of one step, in memory, unless changed."""
    values: dict[str, Any] = {
        "rounds": 3,
        "full": 3,
        "chains": 0,
        "stages": 2,
        "spares": 0,
        "residual_width": 0,
        "inner_steps": 1,
        "seed": 0,
        "device": "cpu",
        "out": out,
        "json": result_file(out),
        "screen": False,
        "in_memory": True,
    }
    return DemoOptions(**{**values, **changes})


def result_file(out: Path) -> Path:
    return out.with_name(out.name + ".json")


def manifest(chosen: DemoOptions, **tables: dict[str, Any]) -> Manifest:
    """The demo's recipe with MODEL; `tables` replace fields: `manifest(chosen, outer={"overlap": 1})`."""
    made = make_manifest(chosen, demo_corpus().digest, MODEL)
    return dataclasses.replace(made, **{t: dataclasses.replace(getattr(made, t), **f) for t, f in tables.items()})


def text(sequence: int) -> DataSpec:
    """The demo's text for a run with this `train.sequence`."""
    return DataSpec(corpus=demo_corpus(sequence).digest)


def run(chosen: DemoOptions, of: Manifest | None = None) -> dict[str, Any]:
    """The result of a demo of the run `of` (default: `manifest(chosen)`) that must end well."""
    asyncio.run(asyncio.wait_for(swarm.run(chosen, main, of or manifest(chosen)), DEADLINE))
    return read_result(chosen.out)


def read_result(out: Path) -> dict[str, Any]:
    return dict(json.loads(result_file(out).read_text()))


class Background:
    """A demo that runs while the test disturbs its processes, for `deadline` seconds at most; a context manager.
    `command`: the program of its processes."""

    def __init__(
        self, chosen: DemoOptions, of: Manifest | None = None, deadline: float = DEADLINE, command: swarm.Command = main
    ) -> None:
        self.out = chosen.out
        self._result: dict[str, Any] | None = None
        self._error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        running = swarm.run(chosen, command, of or manifest(chosen))
        self._task = self._loop.create_task(asyncio.wait_for(running, deadline))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
            self._result = read_result(self.out)
        except BaseException as error:
            self._error = error
        finally:
            self._loop.close()

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(RuntimeError):  # it ended by itself
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(DEADLINE)

    def result(self) -> dict[str, Any]:
        """What the demo says in the end; it must end well."""
        self._thread.join(DEADLINE)
        if self._error is not None:
            raise self._error
        assert self._result is not None, "the demo did not end"
        return self._result

    def goes_on(self, seconds: float) -> bool:
        """Whether it still runs after so long; at once when it has ended."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def event(self, name: str, wanted: Callable[[Event], bool], what: str) -> Event:
        """The first event of process `name` that is `wanted`, as soon as it is in its file."""
        looks = Tail(self.out / name / "events.jsonl").look(wanted)
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end and (self._thread.is_alive() or self._result is not None):
            if (event := next(looks)) is not None:
                return event
            if self._result is not None:
                break
            self._thread.join(0.05)
        raise AssertionError(f"{name}: {what} did not happen: {self._error}")
