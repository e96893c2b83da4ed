"""When a request is late, and when nobody is any more."""

from __future__ import annotations

from collections.abc import Callable

from sglang_morph.controller.lateness import Lateness
from sglang_morph.controller.signals import Signals

MakeSignals = Callable[..., Signals]


def test_a_request_is_late_from_the_given_wait_on_and_nobody_below_half_of_it(
    signals: MakeSignals,
) -> None:
    late = Lateness(0.4)
    waits = {wait: signals(0.0, waiting=1, oldest_wait_s=wait) for wait in (0.0, 0.2, 0.3, 0.4)}
    assert [late.holds(reading) for reading in waits.values()] == [False, False, False, True]
    assert [late.is_over(reading) for reading in waits.values()] == [True, True, False, False]
    assert late.reason(waits[0.4]) == "late, oldest wait 0.40 s >= 0.40 s"


def test_without_a_wait_nobody_is_late(signals: MakeSignals) -> None:
    reading = signals(0.0, waiting=1, oldest_wait_s=1e6)
    assert not Lateness(None).holds(reading) and Lateness(None).is_over(reading)
