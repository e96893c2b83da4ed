from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_morph.controller.eviction_cost import (
    FEWEST_REQUESTS,
    EvictionCost,
    EvictionParameters,
    PrefixReuse,
)
from sglang_morph.controller.signals import Signals

PREFILL = 2048
FULL_CACHE = Signals(
    now=100.0,
    base_pages=10_000,
    capacity_pages=10_000,
    free_pages=10,
    evictable_pages=1_990,
    running=20,
    waiting=1,
    oldest_wait_s=0.0,
    admission_blocked=False,
    level=0,
    level_pages=(10_000, 11_000, 13_000, 20_000),
    waiting_tokens=500,
)
"""80% in use, the rest cached; the coming step computes 520 tokens with 10 pages free."""


def cost(reused: int, stored: int, **parameters: float) -> EvictionCost:
    """After enough requests that took `reused` tokens from the cache and stored `stored`."""
    made = EvictionCost(EvictionParameters.of(type("Options", (), parameters)()), PREFILL)
    for _ in range(FEWEST_REQUESTS):
        made.reuse.finished(reused, stored)
    return made


def test_with_the_defaults_eviction_wins_unless_reuse_is_high() -> None:
    rare, high = cost(300, 700).weigh(FULL_CACHE, 3), cost(900, 100).weigh(FULL_CACHE, 3)
    assert rare is not None and high is not None
    assert not rare.morph
    assert high.morph
    assert rare.pages == high.pages == 510
    # 520 tokens in the step, half of the average reuse, price 0.4.
    assert rare.recompute_cost == pytest.approx(520 * 0.3 / 2)
    assert high.recompute_cost == pytest.approx(520 * 0.9 / 2)
    assert rare.precision_cost == high.precision_cost == pytest.approx(520 * 0.4)


def test_both_costs_are_said() -> None:
    verdict = cost(900, 100).weigh(FULL_CACHE, 3)
    assert verdict is not None
    assert verdict.reason == (
        "lend rather than evict 510 pages: recomputing evicted prefixes costs 234 tokens "
        "(reuse 0.45), level 1 costs 208"
    )


def test_it_asks_for_the_lowest_level_that_spares_what_the_dwell_stores() -> None:
    busy = cost(9_000, 1_000)
    assert busy.weigh(replace(FULL_CACHE, now=0.0), 3) is not None
    for second in range(1, 31):
        for _ in range(2):
            busy.reuse.finished(9_000, 150)
        busy.weigh(replace(FULL_CACHE, now=float(second)), 3)
    verdict = busy.weigh(replace(FULL_CACHE, now=30.0), 3)
    assert verdict is not None
    # 300 tokens a second over 10 s: level 2 gains 3,000 pages.
    assert verdict.level == 2
    assert verdict.precision_cost == pytest.approx(3_000 * 0.4, rel=0.05)


def test_pages_that_lending_cannot_cover_are_not_counted_as_spared() -> None:
    small = replace(FULL_CACHE, level_pages=(10_000, 10_100))
    verdict = cost(900, 100).weigh(small, 1)
    assert verdict is not None
    assert verdict.recompute_cost == pytest.approx(100 * 0.45)
    assert not verdict.morph


@pytest.mark.parametrize(
    "signals",
    [
        replace(FULL_CACHE, free_pages=520, evictable_pages=1_480),  # nothing is short
        replace(FULL_CACHE, evictable_pages=0),  # nothing to evict: the emergency's part
        replace(FULL_CACHE, evictable_pages=3_000),  # a restore would follow at once
        replace(FULL_CACHE, level=3, capacity_pages=20_000, evictable_pages=9_000),
        replace(FULL_CACHE, level_pages=()),  # nobody knows what lending gains
        replace(FULL_CACHE, admission_blocked=True, free_pages=20, evictable_pages=1_980),
    ],
)
def test_where_there_is_no_question_there_is_no_verdict(signals: Signals) -> None:
    assert cost(900, 100).weigh(signals, 3) is None


def test_a_prefill_counts_only_as_far_as_one_step_goes() -> None:
    verdict = cost(900, 100).weigh(replace(FULL_CACHE, waiting_tokens=50_000), 3)
    assert verdict is not None
    assert verdict.pages == 1_990
    assert verdict.precision_cost == pytest.approx((PREFILL + 20) * 0.4)


@given(
    used=st.integers(0, 7_499),
    free=st.integers(0, 10_000),
    running=st.integers(0, 2_000),
    waiting_tokens=st.integers(0, 100_000),
    reused=st.integers(0, 100_000),
)
def test_nothing_is_lent_at_low_load_whatever_the_reuse(
    used: int, free: int, running: int, waiting_tokens: int, reused: int
) -> None:
    """No false entries: below the least pressure it does not even ask."""
    free = min(free, 10_000 - used)
    signals = replace(
        FULL_CACHE,
        free_pages=free,
        evictable_pages=10_000 - used - free,
        running=running,
        waiting_tokens=waiting_tokens,
    )
    assert cost(reused, 1, eviction_quality_price=0.0).weigh(signals, 3) is None


@given(
    stored=st.integers(1, 10_000),
    share=st.floats(0, 0.79),
    used=st.integers(7_500, 9_980),
    gain=st.integers(1, 20_000),
    running=st.integers(0, 2_000),
    waiting_tokens=st.integers(0, 100_000),
)
def test_below_80_percent_reuse_the_default_price_never_lends(
    stored: int, share: float, used: int, gain: int, running: int, waiting_tokens: int
) -> None:
    reused = int(stored * share / (1 - share))
    signals = replace(
        FULL_CACHE,
        free_pages=10,
        evictable_pages=9_990 - used,
        running=running,
        waiting_tokens=waiting_tokens,
        level_pages=(10_000, 10_000 + gain),
    )
    verdict = cost(reused, stored).weigh(signals, 1)
    assert verdict is None or not verdict.morph


def test_reuse_is_unknown_at_first_and_follows_the_load() -> None:
    reuse = PrefixReuse()
    for _ in range(FEWEST_REQUESTS - 1):
        reuse.finished(900, 100)
    assert reuse.probability == 0.0
    reuse.finished(900, 100)
    assert reuse.probability == pytest.approx(0.9)
    for _ in range(2_000):
        reuse.finished(0, 1_000)
    assert reuse.probability < 0.01
    assert reuse.stored_tokens == FEWEST_REQUESTS * 100 + 2_000_000


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("eviction_quality_price", (-0.1, inf, nan)),
        ("eviction_victim_reuse", (-0.1, 1.1, nan)),
        ("eviction_dwell_s", (0.0, -1.0, inf, nan)),
        ("eviction_min_pressure", (-0.1, inf, nan)),
    ],
)
def test_parameters_out_of_range_name_their_flag(name: str, values: tuple[float, ...]) -> None:
    for value in values:
        flag = "--morph-" + name.replace("_", "-")
        with pytest.raises(ValueError, match=f"{flag} is {value}"):
            replace(EvictionParameters(), **{name: value}).check()
