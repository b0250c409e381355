"""What came when, and the rate of the line that follows.

A connection begins slowly: TCP doubles its window once in a round trip until the line is full. So the first half of the bytes says
nothing of the line. The later half is cut into SLICES of equally many bytes, and the rate is the median of theirs: a moment in which the
machine or the line was busy with something else does not count. No more is believed than the mean of the later half, or of one of
its halves: on a machine that is late to read, what waited in its buffers comes faster than any line.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left

SLICES = 7
AGREE = 0.1
"""By this share of the median the rate of the later half, and that of its own later half, may differ from it at most."""
LEAST_SECONDS = 0.3
LEAST_TRIPS = 3.0
"""Of the later half, before it is believed: while the window doubles, half of all bytes come in the last round trip."""
LEAST_ARRIVALS = 2 * SLICES
"""In the later half."""


class Arrivals:
    """Of one direction. `trip`: seconds there and back when the line is idle. All times are of one steady clock."""

    def __init__(self, began: float, trip: float) -> None:
        self.total = 0
        self._trip = trip
        self._times = [began]
        self._totals = [0]

    def add(self, now: float, size: int) -> None:
        """So many bytes have come."""
        self.total += size
        self._times.append(now)
        self._totals.append(self.total)

    def recent(self, seconds: float) -> float:
        """Bytes a second in that time before the last arrival."""
        first = bisect_left(self._times, self._times[-1] - seconds)
        return (self.total - self._totals[first]) / seconds

    @property
    def mean(self) -> float:
        """Bytes a second since the beginning."""
        return self.total / max(self._times[-1] - self._times[0], 1e-9)

    @property
    def rate(self) -> float | None:
        """Bytes a second, or None where too little has come to say."""
        found = self._rates()
        if not found:
            return None
        first, middle, last = self._cuts()
        mean = max(self._between(a, b) for a, b in ((first, middle), (middle, last), (first, last)))
        return min(statistics.median(found), mean)

    @property
    def steady(self) -> bool:
        """Whether more would not change the rate."""
        found, (first, middle, last) = self._rates(), self._cuts()
        if not found or self._times[last] - self._times[first] < max(LEAST_SECONDS, LEAST_TRIPS * self._trip):
            return False
        middling, whole = statistics.median(found), self._between(first, last)
        return all(abs(rate - middling) <= AGREE * middling for rate in (whole, self._between(middle, last)))

    def _cuts(self) -> tuple[int, int, int]:
        """The arrivals with which the later half, and its own later half, begin, and the last one."""
        first = bisect_left(self._totals, self.total / 2)
        return first, bisect_left(self._totals, (self._totals[first] + self.total) / 2), len(self._totals) - 1

    def _between(self, begin: int, end: int) -> float:
        """Bytes a second between two arrivals."""
        return (self._totals[end] - self._totals[begin]) / max(self._times[end] - self._times[begin], 1e-9)

    def _rates(self) -> list[float]:
        """Of the slices of the later half, in their order; none where there are too few arrivals."""
        first, _, last = self._cuts()
        if last - first < LEAST_ARRIVALS:
            return []
        begin, rates = first, list[float]()
        for number in range(1, SLICES + 1):
            upto = self._totals[first] + (self.total - self._totals[first]) * number / SLICES
            end = bisect_left(self._totals, upto)
            if end > begin:
                rates.append(self._between(begin, end))
            begin = end
        return rates
