"""Trackers of a run, for people who plot with other tools: a CSV file, TensorBoard, Weights & Biases.

A tracker gets each decided round once, in the order of the log, with the figures of peer/ui/metrics.py. It goes on
behind the last round that it has, so a monitor can be ended and started again at any time. Nothing here needs torch.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from peer import events
from peer.events import Event, Sink
from peer.net.disk import try_lock
from peer.ui import metrics
from peer.ui.run_view import RoundView, RunView
from peer.ui.text import clean
from protocol.errors import UsageError, first_line, os_errors
from protocol.run.manifest import Manifest
from protocol.run.short_line import short_name
from protocol.wire.schema import plain

RUN_DIGITS = 12
"""Of the run's id, as in the label of metrics."""


class Tracker(Protocol):
    """Keeps rounds."""

    last: int
    """The last round that it has; 0 before the first."""

    def write(self, decided: RoundView, figures: Mapping[str, float]) -> None:
        """Adds a round, whole or not at all. figures: by column. Raises UsageError if the disk refuses."""

    def close(self) -> None:
        """Writes what is left to write."""


def with_rounds(sink: Sink, view: RunView, trackers: Sequence[Tracker]) -> Sink:
    """A sink that passes events on to `sink`, which feeds `view`, and then new rounds to the trackers."""

    def take(event: Event) -> None:
        before = view.recent[-1].round if view.recent else 0
        sink(event)
        if not isinstance(event.body, events.Commit) or view.recent[-1].round <= before:
            return
        decided, told = view.recent[-1], event.body.evaluations
        figures = metrics.of_round(decided, view.held_out.found.get(told[0].round) if told else None)
        for tracker in trackers:
            if decided.round > tracker.last:
                tracker.write(decided, figures)

    return take


def require(package: str) -> None:
    """Raises UsageError unless the package of the option `--<package>` is installed."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:  # a folder of that name is no package
        raise UsageError(
            f"--{package}: the package {package} is not installed here; type pip install {package}, or leave"
            f" --{package} out"
        )


def _is_free(file: BinaryIO) -> bool:
    """Locks a file. Returns False if another process has it."""
    try:
        return try_lock(file)
    except OSError:  # a file system without locks
        return True


class Csv:
    """A row for each round. Raises UsageError if the file is something else, or the disk refuses."""

    COLUMNS = ("run", "round", "time", *metrics.COLUMNS)
    """run: the first digits of its id; time: when the round was decided, Unix seconds."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._run, self._what = manifest.run_id[:RUN_DIGITS], f"--csv {path}"
        header = (",".join(self.COLUMNS) + "\n").encode()
        with self._errors():
            self._file = open(path, "a+b")  # noqa: SIM115
            if not _is_free(self._file):
                raise UsageError(f"{self._what}: another process writes it; end that one, or give another file")
            self._file.seek(0)
            found = self._file.read()
            whole = found[: found.rfind(b"\n") + 1]
            if not (whole.startswith(header) or header.startswith(found)):
                raise UsageError(f"{self._what}: has other columns than this version's; give another file")
            rows = whole.removeprefix(header).splitlines() or [f"{self._run},0,".encode()]
            run, last, *_ = f"{rows[-1].decode(errors='replace')},,".split(",")
            if run != self._run or not last.isdecimal():
                raise UsageError(f"{self._what}: does not end with a round of this run; give another file")
            self._file.truncate(len(whole))  # a kill may tear a row
            if not whole:
                self._append(header)
        self.last = int(last)

    def write(self, decided: RoundView, figures: Mapping[str, float]) -> None:
        row = {"run": self._run, "round": decided.round, "time": decided.time, **figures}
        with self._errors():
            self._append((",".join(str(row.get(column, "")) for column in self.COLUMNS) + "\n").encode())

    def close(self) -> None:
        with self._errors():
            self._file.close()

    def _append(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()

    def _errors(self) -> AbstractContextManager[None]:
        return os_errors(self._what, "give a file that can be written, and free space")


class TensorBoard:
    """Event files in a folder of the run in `folder`: a record with all scalars for each round, whose number is the
    step and whose decision is the wall time. As TensorBoard has scalars, they are rounded to 32 bits."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._what = f"--tensorboard {folder}"
        self._folder = folder / f"{short_name(manifest.name)}-{manifest.run_id[:RUN_DIGITS]}"
        self._writer: Any = None  # a file is begun with the first new round
        self.last = self._last_step()

    def _last_step(self) -> int:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        for file in sorted(self._folder.glob("events.out.tfevents.*"), reverse=True):
            steps = [event.step for event in LegacyEventFileLoader(str(file)).Load() if event.HasField("summary")]
            if steps:
                return int(steps[-1])
        return 0

    def write(self, decided: RoundView, figures: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=column, simple_value=figure) for column, figure in figures.items()]
        if self._writer is None:
            self._begin()
        self._append(wall_time=decided.time, step=decided.round, summary=Summary(value=values))

    def close(self) -> None:
        if self._writer is not None:
            with self._errors():
                self._writer.close()

    def _begin(self) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{int(time.time()):010}.{self.last + 1:09}.{os.getpid()}"  # read in this order
        with self._errors():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = RecordWriter(open(self._folder / name, "xb"))  # noqa: SIM115
        self._append(wall_time=time.time(), file_version="brain.Event:2")

    def _append(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record

        with self._errors():
            self._writer.write(Record(**fields).SerializeToString())
            self._writer.flush()

    def _errors(self) -> AbstractContextManager[None]:
        return os_errors(self._what, "give a folder that can be written, and free space")


class Wandb:
    """A run of a project of Weights & Biases: the round is the step, the decision the time, the manifest the config.

    Online it goes on behind what the server has. Offline, where W&B cannot go on with what it wrote, each start makes
    another folder with the whole run, and the newest is to be synced. Raises UsageError if W&B refuses.
    """

    def __init__(self, project: str, manifest: Manifest) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=project,
                id=manifest.run_id[:RUN_DIGITS],
                name=clean(manifest.name),
                config=plain(manifest),
                resume="allow",
                settings=wandb.Settings(console="off"),  # it would upload the screen
            )
        except wandb.Error as error:
            why = clean(first_line(error)).rstrip(".")
            raise UsageError(f"--wandb {clean(project, 60)}: {why}; WANDB_MODE=offline needs no account") from None
        self.last = self._run.step - 1

    def write(self, decided: RoundView, figures: Mapping[str, float]) -> None:
        self._run.log({**figures, "_timestamp": decided.time}, step=decided.round, commit=True)

    def close(self) -> None:
        self._run.finish()
