from __future__ import annotations

import pytest

from sglang_morph.bench.outcome import Outcome
from sglang_morph.bench.prefill_pace import FEWEST, prefill_pace_s


def outcome(prompt: int, prefill_s: float, queue_s: float | None = 0.5, **told: object) -> Outcome:
    """First token `prefill_s` after it left the queue."""
    first = 3.0 + (queue_s or 0.0) + prefill_s
    return Outcome(
        0, 3.0, prompt, 1, arrivals_s=[first], prompt_tokens=prompt, queue_s=queue_s, **told
    )


def alike(count: int = FEWEST, **told: object) -> list[Outcome]:
    return [outcome(1000, 0.1, **told) for _ in range(count)]


def test_time_in_the_queue_and_slower_prefills_do_not_count() -> None:
    slower = [outcome(1000, 0.4, queue_s=7.0) for _ in range(30)]
    assert prefill_pace_s(alike() + slower, 0) == pytest.approx(1e-4)


def test_only_long_prompts_computed_once_and_whole_at_the_level() -> None:
    fast = 0.001
    left_out = [
        outcome(249, fast),
        outcome(1000, fast, queue_s=None),
        outcome(1000, fast, retractions=1),
        outcome(1000, fast, cached_tokens=51),
        outcome(1000, fast, prefilled_by_level=[400, 600]),
        outcome(1000, fast, prefilled_by_level=[0, 1000]),
        Outcome(0, 3.0, 1000, 1, prompt_tokens=1000, queue_s=0.0),
    ]
    assert prefill_pace_s(alike() + left_out * 5, 0) == pytest.approx(1e-4)
    taken = [outcome(250, 0.0125, cached_tokens=12, prefilled_by_level=[238])] * FEWEST
    assert prefill_pace_s(alike() + taken, 0) == pytest.approx(5e-5)


def test_an_arm_that_rests_lower_is_measured_there() -> None:
    both = alike(prefilled_by_level=[0, 1000]) + [
        outcome(1000, 0.3, prefilled_by_level=[1000]) for _ in range(FEWEST)
    ]
    assert prefill_pace_s(both, 1) == pytest.approx(1e-4)
    assert prefill_pace_s(both, 0) == pytest.approx(3e-4)
    assert prefill_pace_s(both, 2) is None


def test_too_few_say_nothing() -> None:
    assert prefill_pace_s(alike(FEWEST - 1), 0) is None
    assert prefill_pace_s([], 0) is None
