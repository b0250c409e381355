"""Presence of peers, as a bootstrap node sees it."""

from __future__ import annotations

from protocol.round import presence
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


def test_presence_is_the_share_of_rounds_in_which_a_peer_stayed() -> None:
    stays = presence.PresenceRecord()
    for round in range(200):
        stays.begin({"stays", "comes and goes"})
        if round % 2:
            stays.lost("comes and goes")
            stays.lost("comes and goes")  # it is told again with every tick
        stays.lost("was not there")
    stays.begin(())
    assert stays.of("stays") == 1.0
    assert 0.5 < stays.of("comes and goes") < 0.6, "half of its rounds, and the rounds that a stranger is trusted with"
    assert stays.of("was not there") == 1.0


def test_who_is_away_every_night_is_there_all_day() -> None:
    stays = presence.PresenceRecord()
    for round in range(1000):
        by_day = round % 100 < 60
        stays.begin({"worker", *({"student"} if by_day else ())})
        if round % 100 == 59:
            stays.lost("student")
    assert stays.of("student") > 0.95


def test_what_is_remembered_is_bounded_and_forgets() -> None:
    stays = presence.PresenceRecord()
    for _ in range(50):
        stays.begin({"was bad"})
        stays.lost("was bad")
    low = stays.of("was bad")
    for _ in range(1000):
        stays.begin({"was bad"})
    assert low < 0.35 < 0.9 < stays.of("was bad")
    for index in range(presence.REMEMBERED_PEERS + 1):
        stays.begin({f"stranger {index}"})
    stays.begin(())
    assert stays.of("was bad") == 1.0, "nobody can make a node remember more than so many"
