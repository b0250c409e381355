"""Parts that unit tests of state share with others."""

from __future__ import annotations

from peer.ui.run_view import RunView
from tests.support.watched import MadeUp

HOSTILE = "<script>alert(1)</script>\x1b[31m‮\n" + "x" * 10_000
EXTREMES = (1e308, -1e308, float("inf"), float("-inf"), float("nan"))


def watched(made: MadeUp, rounds: int) -> RunView:
    out = RunView(made.manifest)
    for event in made.all(rounds):
        out.feed(event)
    return out
