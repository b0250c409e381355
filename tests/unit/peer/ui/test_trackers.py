"""Trackers keep every round of a run once, as the log has it, however often the monitor begins again."""

from __future__ import annotations

import csv
import dataclasses
import io
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from peer import events
from peer.events import Event
from peer.ui import metrics, trackers
from peer.ui.run_view import RunView
from peer.ui.state import state
from peer.ui.trackers import Csv, TensorBoard, Tracker, with_rounds
from protocol.errors import UsageError
from protocol.wire.claims import Evaluation
from tests.support import tiny
from tests.support.watched import BEGAN, MadeUp

MADE = MadeUp(5)
MEASURED = Evaluation(peer="a", round=10, sequences=8, loss=4.125, bits_per_byte=1.5, signature=b"")


def story(rounds: int = 12) -> Iterator[Event]:
    """A run in which the ninth round leaves a replica out and the eleventh brings a held-out loss."""
    for event in MADE.all(rounds):
        if isinstance(event.body, events.Commit) and event.body.round == 11:
            event = dataclasses.replace(event, body=dataclasses.replace(event.body, evaluations=(MEASURED,)))
        yield event


def watch(told: Iterable[Event], *kept: Tracker) -> RunView:
    """A monitor from the log's beginning."""
    view = RunView(MADE.manifest)
    sink = with_rounds(view.feed, view, kept)
    for event in told:
        sink(event)
    for tracker in kept:
        tracker.close()
    return view


def rows(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(file.read_text())))


# --- a CSV file


def test_a_row_has_the_figures_of_its_round(tmp_path: Path) -> None:
    file = tmp_path / "rounds.csv"
    watch(story(), Csv(file, MADE.manifest))
    found = rows(file)
    assert [row["round"] for row in found] == [str(n) for n in range(1, 13)]
    assert {row["run"] for row in found} == {MADE.manifest.run_id[:12]}
    ninth, eleventh = found[8], found[10]
    assert ninth == {
        "run": MADE.manifest.run_id[:12], "round": "9", "time": str(BEGAN + 9 * 60.0), "loss": repr(MADE.loss(9)),
        "held_out_loss": "", "held_out_bits_per_byte": "", "held_out_round": "", "tokens_total": str(17 * 2048),
        "round_tokens": "2048", "round_seconds": "60.0", "round_tokens_per_second": repr(2048 / 60),
        "round_replicas": "1", "round_payload_bytes": ninth["round_payload_bytes"], "round_left_out": "1",
    }  # fmt: skip
    assert int(ninth["round_payload_bytes"]) > 0
    told = [eleventh[f"held_out_{name}"] for name in ("loss", "bits_per_byte", "round")]
    assert told == ["4.125", "1.5", "10"]
    assert found[11]["held_out_loss"] == "", "in the row of the commit that brought it alone"


def test_it_is_what_prometheus_reads_of_the_newest_round(tmp_path: Path) -> None:
    file = tmp_path / "rounds.csv"
    view = watch(story(11), Csv(file, MADE.manifest))
    text = metrics.exposition(state(view, BEGAN))
    lines = (line for line in text.splitlines() if not line.startswith("#") and "," not in line)
    served = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}
    newest = {f"potluck_{name}": float(figure) for name, figure in rows(file)[-1].items() if name in metrics.COLUMNS}
    assert len(newest) == 11
    assert {name: served[name] for name in newest} == pytest.approx(newest, rel=1e-12)


def test_a_kill_at_any_byte_loses_no_row_and_doubles_none(tmp_path: Path) -> None:
    file = tmp_path / "rounds.csv"
    watch(story(3), Csv(file, MADE.manifest))
    whole = file.read_bytes()
    for cut in range(len(whole) + 1):
        file.write_bytes(whole[:cut])
        watch(story(3), Csv(file, MADE.manifest))
        assert file.read_bytes() == whole, cut


def test_it_goes_on_behind_the_last_row(tmp_path: Path) -> None:
    file, apart = tmp_path / "rounds.csv", tmp_path / "apart.csv"
    for rounds in (4, 4, 9, 12):
        watch(story(rounds), Csv(file, MADE.manifest))
    watch(story(12), Csv(apart, MADE.manifest))
    assert file.read_bytes() == apart.read_bytes()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"a,b\n1,2\n", "has other columns"),
        (b"my notes, without a line's end", "has other columns"),
        (",".join(Csv.COLUMNS).encode() + b"\nffffffffffff,7,1.0\n", "does not end with a round of this run"),
        (",".join(Csv.COLUMNS).encode() + b"\nno row\n", "does not end with a round of this run"),
    ],
)
def test_a_file_that_is_something_else_stays_as_it_is(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "rounds.csv"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=f"{why}.*; give another file"):
        Csv(file, MADE.manifest)
    assert file.read_bytes() == content


def test_two_monitors_do_not_share_a_file(tmp_path: Path) -> None:
    first = Csv(tmp_path / "rounds.csv", MADE.manifest)
    with pytest.raises(UsageError, match="another process writes it"):
        Csv(tmp_path / "rounds.csv", MADE.manifest)
    first.close()
    Csv(tmp_path / "rounds.csv", MADE.manifest).close()


def test_a_disk_that_refuses_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--csv .*: Is a directory; give a file"):
        Csv(tmp_path, MADE.manifest)


# --- TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[float, int, float]]]:
    """(wall time, step, figure) by tag, as TensorBoard's own reader has them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = folder.iterdir()
    assert run.name == f"tiny-{MADE.manifest.run_id[:12]}"
    read = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.wall_time, e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_tensorboard_has_the_figures_of_the_csv_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    watch(story(), Csv(tmp_path / "rounds.csv", MADE.manifest), TensorBoard(tmp_path / "tb", MADE.manifest))
    found = scalars(tmp_path / "tb")
    assert set(found) == set(metrics.COLUMNS)
    for tag, seen in found.items():
        known = [row for row in rows(tmp_path / "rounds.csv") if row[tag]]
        assert [(time, step) for time, step, _ in seen] == [(float(r["time"]), int(r["round"])) for r in known]
        assert [figure for *_, figure in seen] == pytest.approx([float(row[tag]) for row in known], rel=2**-24)


def test_tensorboard_goes_on_behind_the_last_whole_record(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for rounds in (4, 4, 9):
        watch(story(rounds), TensorBoard(tmp_path, MADE.manifest))
    files = sorted(tmp_path.glob("*/*"))
    assert len(files) == 2, "none where there was nothing new"
    files[-1].write_bytes(files[-1].read_bytes()[:-30])  # in the midst of the ninth round
    watch(story(12), TensorBoard(tmp_path, MADE.manifest))
    assert [step for _, step, _ in scalars(tmp_path)["loss"]] == list(range(1, 13))


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"^--tensorboard .*: Not a directory; give a folder"):
        watch(story(1), TensorBoard(tmp_path / "file", MADE.manifest))


# --- packages that are not there


def test_a_package_that_is_absent_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackers.require("csv")
    (tmp_path / "no_such_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("no_such_tracker", "nor_this_one"):  # a folder in the working directory, and nothing
        with pytest.raises(UsageError, match=f"^--{name}: the package {name} is not installed here; type pip install"):
            trackers.require(name)


WITHOUT = "import sys; sys.modules[sys.argv[1]] = None; from peer.cli.main import main; main(sys.argv[2:])"
"""The command where the package of the first argument is not installed."""


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_without_the_package_the_command_ends_before_it_asks_anybody(package: str) -> None:
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{tiny.OPERATOR.peer_id}#{'0' * 64}"
    words = [sys.executable, "-c", WITHOUT, package, "monitor", address, f"--{package}", "somewhere"]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"potluck: --{package}: the package {package} is not installed here; type pip install {package}, or leave"
        f" --{package} out\n"
    )
