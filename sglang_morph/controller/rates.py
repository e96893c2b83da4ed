"""Rates and percentiles over a moving window, in fixed memory and constant time. Plain Python."""

from __future__ import annotations

from collections import deque
from itertools import accumulate
from math import ceil, exp, log

DEFAULT_RATE_WINDOW_S = 3.0


class RateWindow:
    """Increase per second of a counter over the last `window_s`, kept as one point per bucket."""

    def __init__(self, window_s: float = DEFAULT_RATE_WINDOW_S, buckets: int = 30) -> None:
        self._window_s = window_s
        self._width = window_s / buckets
        self._points: deque[tuple[float, float]] = deque(maxlen=buckets + 2)
        self._latest = (0.0, 0.0)

    @property
    def per_s(self) -> float:
        """0 before two readings, and for a counter that fell (a restart)."""
        if not self._points:
            return 0.0
        begin, first = self._points[0]
        now, total = self._latest
        # A burst right after a gap would look endless if divided by the short time seen so far.
        return max(0.0, total - first) / max(now - begin, self._window_s / 2)

    def add(self, now: float, total: float) -> None:
        """The counter stands at `total` at `now` (monotonic seconds)."""
        self._latest = (now, total)
        points = self._points
        if points and now < points[-1][0]:
            points.clear()  # the clock stepped back
        if not points or now - points[-1][0] >= self._width:
            points.append(self._latest)
        # The last point before the window stays: it is where the window begins.
        while len(points) > 1 and points[1][0] <= now - self._window_s:
            points.popleft()


class LatencyWindow:
    """Percentile of durations over the last `window_s`: a histogram per time slice, added up.

    Bins grow by `GROWTH` from `LOWEST_S` on, so a percentile is right within 5%. Durations outside
    count as the nearest bin.
    """

    LOWEST_S = 1e-3
    GROWTH = 1.1
    BINS = 146
    """Up to about 1,000 s."""

    def __init__(self, window_s: float = 30.0, slices: int = 6) -> None:
        if window_s <= 0 or slices < 1:
            raise ValueError(f"a window needs time and slices, got {window_s} s and {slices}")
        self._width = window_s / slices
        self._slices = slices
        self._counts = [[0] * self.BINS for _ in range(slices)]
        self._sums = [0] * self.BINS
        self._slice: int | None = None
        self._total = 0
        self._cached: tuple[float, float] | None = None

    @property
    def count(self) -> int:
        """Durations in the window."""
        return self._total

    def advance(self, now: float) -> None:
        """Forget what is older than the window. Call at every tick, before `add`."""
        current = int(now // self._width)
        if self._slice is None:
            self._slice = current
        for offset in range(1, min(current - self._slice, self._slices) + 1):
            self._drop((self._slice + offset) % self._slices)
        self._slice = max(self._slice, current)

    def add(self, seconds: float) -> None:
        """Count one duration in the slice of the last `advance`."""
        place = log(max(seconds, self.LOWEST_S) / self.LOWEST_S) / log(self.GROWTH)
        index = min(int(place), self.BINS - 1)
        self._counts[(self._slice or 0) % self._slices][index] += 1
        self._sums[index] += 1
        self._total += 1
        self._cached = None

    def percentile(self, percent: float) -> float:
        """Seconds at or below which `percent` of the durations are; 0 with none in the window."""
        if not self._total:
            return 0.0
        if self._cached is None or self._cached[0] != percent:
            self._cached = (percent, self._search(percent))
        return self._cached[1]

    def _search(self, percent: float) -> float:
        rank = max(1, ceil(self._total * percent / 100))
        index = next(i for i, seen in enumerate(accumulate(self._sums)) if seen >= rank)
        return self.LOWEST_S * exp((index + 0.5) * log(self.GROWTH))

    def _drop(self, slot: int) -> None:
        counts = self._counts[slot]
        if not any(counts):
            return
        self._sums = [total - count for total, count in zip(self._sums, counts, strict=True)]
        self._total -= sum(counts)
        self._counts[slot] = [0] * self.BINS
        self._cached = None
