"""Who is there, as a bootstrap node sees it."""

from __future__ import annotations

from protocol.rounds import presence
from protocol.run.manifest import TimingSpec

TIMING = TimingSpec(round_deadline=60.0, heartbeat=3.0, gone_after=12.0)
PEERS = ("a", "b")


def test_absent_is_who_has_no_session_for_two_heartbeats() -> None:
    heard = {"a": 100.0, "b": 100.0}
    assert presence.absent(PEERS, {"b"}, heard, TIMING, 106.0) == frozenset()
    assert presence.absent(PEERS, {"b"}, heard, TIMING, 106.1) == {"a"}
    assert presence.absent(PEERS, {"a", "b"}, heard, TIMING, 200.0) == frozenset(), "silent, but connected"
    assert presence.absent((), set(), heard, TIMING, 200.0) == frozenset(), "who is not ready cannot be absent"


def test_gone_is_who_was_silent_for_a_lease() -> None:
    heard = {"a": 100.0, "b": 105.0}
    assert presence.gone(PEERS, heard, TIMING, 112.0) == []
    assert presence.gone(PEERS, heard, TIMING, 112.1) == ["a"]
    assert presence.gone(PEERS, heard, TIMING, 117.1) == ["a", "b"]
    assert presence.gone(PEERS, {}, TIMING, 1e9) == [], "a node that has just begun has heard of nobody yet"


def test_the_end_waits_for_who_is_there_and_not_long_for_who_is_gone() -> None:
    assert presence.awaited({"a"}, set(), TIMING, 11.9), "it may be back"
    assert not presence.awaited({"a"}, {"b"}, TIMING, 12.0)
    assert presence.awaited({"a"}, {"a"}, TIMING, 59.9), "it still applies the last round"
    assert not presence.awaited({"a"}, {"a"}, TIMING, 60.0)
    assert not presence.awaited(set(), {"a"}, TIMING, 0.0)
