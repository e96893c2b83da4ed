"""What policies and operators need of the `Signals` stream, kept in fixed memory.

A tick costs a constant: sums and counts are carried along, and a window is never added up anew.
Plain Python: no torch, no SGLang.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import asdict
from math import fsum
from typing import Any, Literal, get_args

from sglang_morph.controller.rates import LatencyWindow, RateWindow
from sglang_morph.controller.signals import Signals

TransitionResult = Literal["completed", "started", "deferred", "rolled_back"]
"""How a transition went. `started`: a restore has taken its pages back and is bringing weights back
(`completed` follows). `deferred`: it was wanted but could not start; nothing has changed."""

DEFAULT_WINDOW_S = 5.0
DEFAULT_BUCKETS = 50
DEFAULT_LATENCY_WINDOW_S = 30.0


def signal_values(signals: Signals) -> dict[str, Any]:
    """The reading as plain JSON values: its fields, and `used_pages` and `pressure`."""
    return {
        **asdict(signals),
        "level_pages": list(signals.level_pages),
        "used_pages": signals.used_pages,
        "pressure": signals.pressure,
    }


def check_percentile(percentile: float) -> None:
    """Raises ValueError, naming the flag, for one out of range."""
    if not 0 < percentile <= 100:
        raise ValueError(
            f"--morph-slo-percentile is {percentile}: give more than 0 and at most 100"
        )


def latency_percentiles(window: LatencyWindow) -> dict[str, float]:
    """Seconds at the percentiles operators look at, and how many durations they are of."""
    return {
        "p50": window.percentile(50),
        "p95": window.percentile(95),
        "p99": window.percentile(99),
        "count": window.count,
    }


class TimeWindow:
    """Time-weighted mean and maximum of a value that holds from one reading to the next.

    The window is a ring of buckets: the one being filled and the `buckets` before it, so it covers
    `window_s` seconds and up to one bucket more. Weighting by time keeps the mean right when ticks
    come at uneven intervals.
    """

    def __init__(self, window_s: float = DEFAULT_WINDOW_S, buckets: int = DEFAULT_BUCKETS) -> None:
        if window_s <= 0 or buckets < 1:
            raise ValueError(f"a window needs time and buckets, got {window_s} s and {buckets}")
        self.window_s = window_s
        self._width = window_s / buckets
        self._slots = buckets + 1
        self._areas = [0.0] * self._slots
        self._seconds = [0.0] * self._slots
        self._total_area = 0.0
        self._total_seconds = 0.0
        self._peaks: deque[tuple[int, float]] = deque()
        """(bucket, maximum), values strictly falling, at most one per bucket; the first is the
        window's maximum."""
        self._bucket: int | None = None
        self._last = 0.0
        self._value = 0.0

    @property
    def mean(self) -> float:
        """Mean over the window, up to the latest reading; 0 before the first one."""
        return self._total_area / self._total_seconds if self._total_seconds > 0 else self._value

    @property
    def maximum(self) -> float:
        """Highest value in effect within the window; 0 before the first reading."""
        return self._peaks[0][1] if self._peaks else 0.0

    def add(self, now: float, value: float) -> None:
        """`value` holds from `now` (monotonic seconds) until the next call."""
        bucket = int(now // self._width)
        if self._bucket is None:
            self._bucket, self._last = bucket, now
        else:
            self._advance(now, bucket)
        self._value = value
        self._note_peak(value)

    def _advance(self, now: float, bucket: int) -> None:
        assert self._bucket is not None
        if bucket - self._bucket > self._slots:
            self._skip_to(bucket - self._slots)
        while self._bucket < bucket:
            self._hold_until((self._bucket + 1) * self._width)
            self._open(self._bucket + 1)
        self._hold_until(now)

    def _skip_to(self, bucket: int) -> None:
        """Forget all sums: the gap is longer than the window. (Peaks expire as buckets open.)"""
        self._areas = [0.0] * self._slots
        self._seconds = [0.0] * self._slots
        self._total_area = self._total_seconds = 0.0
        self._bucket, self._last = bucket, bucket * self._width

    def _hold_until(self, moment: float) -> None:
        seconds = moment - self._last
        if seconds <= 0:
            return
        assert self._bucket is not None
        slot = self._bucket % self._slots
        self._areas[slot] += self._value * seconds
        self._seconds[slot] += seconds
        self._total_area += self._value * seconds
        self._total_seconds += seconds
        self._last = moment

    def _open(self, bucket: int) -> None:
        slot = bucket % self._slots
        self._total_area -= self._areas[slot]
        self._total_seconds -= self._seconds[slot]
        self._areas[slot] = self._seconds[slot] = 0.0
        if slot == 0:
            # Once a revolution, so that rounding cannot pile up over months of running sums.
            self._total_area, self._total_seconds = fsum(self._areas), fsum(self._seconds)
        self._bucket = bucket
        self._note_peak(self._value)

    def _note_peak(self, value: float) -> None:
        assert self._bucket is not None
        while self._peaks and self._peaks[-1][1] <= value:
            self._peaks.pop()
        if not self._peaks or self._peaks[-1][0] != self._bucket:
            self._peaks.append((self._bucket, value))
        while self._peaks[0][0] <= self._bucket - self._slots:
            self._peaks.popleft()


class Monitor:
    """Running account of the scheduler and of what the controller did. Not thread-safe."""

    def __init__(
        self,
        window_s: float = DEFAULT_WINDOW_S,
        buckets: int = DEFAULT_BUCKETS,
        percentile: float = 95.0,
        latency_window_s: float = DEFAULT_LATENCY_WINDOW_S,
    ) -> None:
        """`percentile` (above 0, at most 100) is the one `ttft_s` and `tpot_s` are taken at."""
        check_percentile(percentile)
        self.percentile = percentile
        self.arrived = RateWindow(window_s, buckets)
        self.served = RateWindow(window_s, buckets)
        self.ttft = LatencyWindow(latency_window_s)
        self.tpot = LatencyWindow(latency_window_s)
        self.finished = 0
        self.latest: Signals | None = None
        self.pressure = TimeWindow(window_s, buckets)
        self.ticks = 0
        self.emergencies = 0
        """Morphs made at the last moment so that SGLang retracted no request."""
        self.peak_capacity_pages = 0
        self.lowest_capacity_pages = 0
        self.transitions: dict[TransitionResult, int] = dict.fromkeys(get_args(TransitionResult), 0)
        self._seconds_at_level: defaultdict[int, float] = defaultdict(float)

    def observe(self, signals: Signals) -> None:
        """Take in one tick's reading. Call in order of time."""
        previous, capacity = self.latest, signals.capacity_pages
        if previous is None:
            self.peak_capacity_pages = self.lowest_capacity_pages = capacity
        else:
            self._seconds_at_level[previous.level] += max(0.0, signals.now - previous.now)
            self.peak_capacity_pages = max(self.peak_capacity_pages, capacity)
            self.lowest_capacity_pages = min(self.lowest_capacity_pages, capacity)
        self.pressure.add(signals.now, signals.pressure)
        self.arrived.add(signals.now, signals.arrived_tokens_total)
        self.served.add(signals.now, signals.served_tokens_total)
        self.ttft.advance(signals.now)
        self.tpot.advance(signals.now)
        self.ticks += 1
        self.latest = signals

    @property
    def ttft_s(self) -> float:
        """For `Signals.ttft_s`: at `percentile`, over the latency window; 0 with none known."""
        return self.ttft.percentile(self.percentile)

    @property
    def tpot_s(self) -> float:
        """For `Signals.tpot_s`."""
        return self.tpot.percentile(self.percentile)

    def request_finished(self, ttft_s: float, tpot_s: float | None) -> None:
        """Count a request's latencies; `tpot_s` is None for one with a single output token."""
        self.finished += 1
        self.ttft.add(ttft_s)
        if tpot_s is not None:
            self.tpot.add(tpot_s)

    def transition(self, result: TransitionResult) -> None:
        """Count a transition that went as `result` says."""
        self.transitions[result] += 1

    def emergency(self) -> None:
        """Count a morph that spared a running request its retraction."""
        self.emergencies += 1

    def seconds_at_level(self, level: int) -> float:
        """Seconds spent at `level` up to the latest reading."""
        return self._seconds_at_level.get(level, 0.0)

    def summary(self) -> dict[str, Any]:
        """Everything above as plain JSON values; seconds, pages, and pressures over base pages."""
        return {
            "ticks": self.ticks,
            "latest": None if self.latest is None else signal_values(self.latest),
            "pressure_window_s": self.pressure.window_s,
            "arrived_tokens_per_s": self.arrived.per_s,
            "served_tokens_per_s": self.served.per_s,
            "ttft_s": latency_percentiles(self.ttft),
            "tpot_s": latency_percentiles(self.tpot),
            "requests_finished": self.finished,
            "retractions": 0 if self.latest is None else self.latest.retractions_total,
            "retractions_avoided": self.emergencies,
            "pressure_mean": self.pressure.mean,
            "pressure_max": self.pressure.maximum,
            "seconds_at_level": {
                str(level): seconds for level, seconds in sorted(self._seconds_at_level.items())
            },
            "peak_capacity_pages": self.peak_capacity_pages,
            "lowest_capacity_pages": self.lowest_capacity_pages,
            "transitions": dict(self.transitions),
        }
