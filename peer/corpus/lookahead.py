"""How far text is fetched ahead of reading.

A plan gives a replica more slots than it is expected to read: HEADROOM times and one step (protocol/planning/allotment.py), and all of its
steps while its pace is not known. To fetch all of that at once would cost more than a fifth by itself. So what is fetched at once is
what was read in the last rounds, and from there on a little more than was read already:

    max(usual, read + MARGIN max(usual, read)),        usual = min(most, MOST_ABOVE_MEAN mean) of the last ROUNDS rounds

all in slots. The trainer asks for a step's text while it computes the one before (peer/chain/reading.py), so little more is enough. In the
first round nothing is known: a quarter of what is given.
"""

from __future__ import annotations

import math
from collections import deque

ROUNDS = 4
MOST_ABOVE_MEAN = 1.1
MARGIN = 0.08
FIRST = 4


class Lookahead:
    """What it takes to say so. `least`: slots that are fetched together anyway."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._rounds: deque[int] = deque(maxlen=ROUNDS)

    def end(self, read: int) -> None:
        """A round in which so many slots were read is over."""
        if read:
            self._rounds.append(read)

    def usual(self, given: int) -> int:
        """Slots of so many given ones that are likely to be read."""
        if not self._rounds:
            return min(given, max(self._least, given // FIRST))
        mean = sum(self._rounds) / len(self._rounds)
        return min(given, max(self._rounds), math.ceil(MOST_ABOVE_MEAN * mean))

    def target(self, given: int, read: int) -> int:
        """Slots of the given ones, from the first on, that should be here when so many were read."""
        usual = self.usual(given)
        margin = max(self._least, math.ceil(MARGIN * max(usual, read)))
        return min(given, max(usual, read + margin if read else 0))
