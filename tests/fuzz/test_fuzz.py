"""A minute of the fuzzing campaign (`make fuzz` is the long one), and that it finds what is planted."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.errors import LocalError
from tests.fuzz import campaign, mutate
from tests.fuzz.targets import TARGETS, Target

SECONDS = 60.0


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_decoder_takes_or_refuses_whatever_comes(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "FOUND", tmp_path)
    monkeypatch.setattr(campaign, "BOMB_EVERY", 500)
    end = time.monotonic() + SECONDS / len(TARGETS)
    (state,) = campaign.run([target], 1, lambda count: time.monotonic() < end or count < 100)
    assert state.failures == {}
    assert state.inputs >= 100
    assert state.accepted >= len(target.seeds) / 2, "the seeds are no longer what the decoder takes"


def _slow() -> None:
    end = time.process_time() + 0.06
    while time.process_time() < end:
        pass


@pytest.mark.parametrize(
    ("planted", "named"),
    [
        (lambda: {}[0], "KeyError"),
        (_slow, "of CPU time for"),
        (lambda: len(bytes(5 << 20)), "took 5 MiB"),
        (lambda: time.sleep(30), "Hang"),
    ],
)
def test_what_is_planted_is_found(
    planted: Callable[[], object],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {
        "FOUND": tmp_path, "MEMORY_EVERY": 2, "MEMORY_BYTES": 4 << 20, "SECONDS": 0.05, "HANG_SECONDS": 0.5,
    }.items():  # fmt: skip
        monkeypatch.setattr(campaign, name, value)
    bad = Target("bad", lambda raw: raw == b"seed" or planted(), (), [b"seed"], mutate.change_bytes, 1)
    (state,) = campaign.run([bad], 0, lambda count: count < 5)
    assert state.failures
    assert named in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == len(state.failures)


def test_an_error_of_several_lines_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "FOUND", tmp_path)

    def refuse(raw: bytes) -> None:
        if raw != b"seed":
            raise LocalError("two\nlines; reconfig them")

    (state,) = campaign.run(
        [Target("bad", refuse, (LocalError,), [b"seed"], mutate.change_bytes, 1)], 0, lambda n: n < 5
    )
    assert next(iter(state.failures)).startswith("Bad")
