"""What error lines show of digests that differ."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import apart

RUN = hashlib.sha256(b"run").hexdigest()
SHORT = 12


def test_digests_that_differ_at_once_are_short() -> None:
    assert apart("a" * 64, "b" * 64) == ("a" * SHORT + "…", "b" * SHORT + "…")


def test_a_wrong_last_digit_is_seen() -> None:
    wrong = RUN[:-1] + ("0" if RUN[-1] != "0" else "1")
    assert apart(wrong, RUN) == (f"{RUN[:SHORT]}…{wrong[-5:]}", f"{RUN[:SHORT]}…{RUN[-5:]}")


@given(st.text("ab", max_size=64), st.text("ab", max_size=64))
def test_what_differs_is_shown_so_that_it_differs(one: str, other: str) -> None:
    shown = apart(one, other)
    assert (shown[0] == shown[1]) == (one == other)
    assert max(map(len, shown)) <= SHORT + 11
