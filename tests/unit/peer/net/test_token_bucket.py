"""Token buckets and cooldowns."""

from __future__ import annotations

import pytest

from peer.net.rate_limits import Cooldown, Rate, TokenBucket, TokenBuckets


def test_a_bucket_says_how_long_until_it_is_paid() -> None:
    bucket = TokenBucket(10.0, 100.0)
    assert bucket.spend(0.0, 100.0) == 0.0
    assert bucket.spend(0.0, 50.0) == pytest.approx(5.0)
    assert bucket.wait(5.0) == pytest.approx(0.0)
    assert bucket.spend(1000.0, 100.0) == 0.0, "it fills up again, and no more"
    assert bucket.spend(1000.0, 1.0) > 0


def test_a_bucket_without_debt_gives_what_there_is() -> None:
    bucket = TokenBucket(1.0, 2.0)
    assert [bucket.take(0.0) for _ in range(3)] == [True, True, False]
    assert bucket.wait(0.5, 1.0) == pytest.approx(0.5)
    assert bucket.take(1.0)


def test_buckets_that_were_not_used_lately_are_forgotten() -> None:
    buckets = TokenBuckets(Rate(1.0, 1.0), 2)
    assert all(buckets.of(key).take(0.0) for key in "aba"[:2])
    assert not buckets.of("a").take(0.0)
    buckets.of("c")
    assert len(buckets) == 2
    assert buckets.of("b").take(0.0), "it was forgotten, and is full"


def test_a_rest_is_longer_each_time_until_it_ends_well() -> None:
    cooldown = Cooldown(10.0, 30.0)
    assert [cooldown.begin("a", 0.0) for _ in range(3)] == [10.0, 20.0, 30.0]
    assert [cooldown.is_resting("a", now) for now in (29.9, 30.0)] == [True, False]
    assert cooldown.times("a") == 3
    cooldown.end("a")
    assert cooldown.begin("a", 0.0) == 10.0
    assert cooldown.begin("b", 0.0, 600.0) == 600.0
    assert not cooldown.is_resting("c", 0.0)


def test_rests_are_forgiven_with_time_and_the_oldest_forgotten() -> None:
    cooldown = Cooldown(10.0, 1000.0, most=2, forgiven=100.0)
    for _ in range(3):
        cooldown.begin("a", 0.0)
    assert cooldown.begin("a", 240.0) == 20.0, "two times less count"
    cooldown.begin("b", 240.0)
    cooldown.begin("c", 240.0)
    assert (len(cooldown), cooldown.is_resting("a", 240.0)) == (2, False)
