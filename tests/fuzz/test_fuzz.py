"""A slice of the fuzzing campaign (`make fuzz` is the long one), and that it finds what is planted."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.errors import LocalError
from tests.fuzz import campaign, channels, mutate
from tests.fuzz.campaign import Limits
from tests.fuzz.targets import TARGETS, Target

INPUTS = 2000
"""Of each decoder."""


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_decoder_takes_or_refuses_whatever_comes(target: Target, tmp_path: Path) -> None:
    limits = Limits(found=tmp_path, bomb_every=500)
    (state,) = campaign.run([target], 1, lambda count: count < INPUTS, limits=limits)
    assert state.failures == {}
    assert state.inputs >= INPUTS
    assert state.accepted >= len(target.seeds) / 2, "the seeds are no longer what the decoder takes"


@pytest.fixture(scope="module")
def unit() -> float:
    return channels.turn()


@pytest.mark.parametrize("channel", channels.CHANNELS, ids=lambda channel: channel.name)
def test_a_channel_takes_or_refuses_whatever_comes_at_a_price_by_its_size(
    channel: channels.Channel, unit: float, tmp_path: Path
) -> None:
    limits = Limits(found=tmp_path, bomb_every=500)
    (state,) = campaign.run([channels.target(channel, unit)], 1, lambda count: count < INPUTS // 4, limits=limits)
    assert state.failures == {}
    assert state.accepted, "nothing has a place there"


def test_a_message_that_costs_more_than_its_size_allows_is_found(tmp_path: Path) -> None:
    dear = Target(
        "dear", lambda raw: raw == b"seed" or _slow(), (), [b"seed"], mutate.change_bytes, 1, lambda size: 0.01
    )
    (state,) = campaign.run([dear], 0, lambda count: count < 5, limits=Limits(found=tmp_path))
    assert next(iter(state.failures)).startswith("Bad")


def test_a_campaign_that_is_kept_goes_on_after_what_was_done(tmp_path: Path) -> None:
    quick = Target("quick", lambda raw: None, (), [b"seed"], mutate.change_bytes, 1)
    keep = tmp_path / "done.jsonl"
    assert not campaign.in_chunks([quick], 10, 0, keep)
    before = keep.read_text()
    assert not campaign.in_chunks([quick], 10, 0, keep)
    assert keep.read_text() == before
    assert not campaign.in_chunks([quick], 20, 0, keep)
    assert keep.read_text().startswith(before)
    assert len(keep.read_text().splitlines()) == 2


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
    capsys: pytest.CaptureFixture[str],
) -> None:
    hang = 0.5 if named == "Hang" else 120.0  # which a busy machine does not take for the others
    limits = Limits(found=tmp_path, memory_every=2, memory_bytes=4 << 20, seconds=0.05, hang_seconds=hang)
    bad = Target("bad", lambda raw: raw == b"seed" or planted(), (), [b"seed"], mutate.change_bytes, 1)
    (state,) = campaign.run([bad], 0, lambda count: count < 5, limits=limits)
    assert state.failures
    assert named in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == len(state.failures)


def test_an_error_of_several_lines_is_found(tmp_path: Path) -> None:
    def refuse(raw: bytes) -> None:
        if raw != b"seed":
            raise LocalError("two\nlines; mend them")

    bad = Target("bad", refuse, (LocalError,), [b"seed"], mutate.change_bytes, 1)
    (state,) = campaign.run([bad], 0, lambda count: count < 5, limits=Limits(found=tmp_path))
    assert next(iter(state.failures)).startswith("Bad")
