"""The manual policy follows the operator, within the allowed range."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sglang_morph.controller.manual import ManualPolicy
from sglang_morph.controller.policy import Decision
from sglang_morph.controller.policy_options import PolicyOptions
from sglang_morph.controller.signals import Signals

MakeSignals = Callable[..., Signals]


def test_wants_full_precision_until_told_otherwise(signals: MakeSignals) -> None:
    policy = ManualPolicy(PolicyOptions(), top_level=3)
    assert policy.observe(signals(0.0, used=1000)) is None
    assert policy.observe(signals(1.0, level=2)) == Decision(0, "operator asked for level 0")


def test_wants_the_level_until_it_is_reached(signals: MakeSignals) -> None:
    policy = ManualPolicy(PolicyOptions(), top_level=3)
    policy.set_level(2)
    for now in (0.0, 0.1):
        assert policy.observe(signals(now)) == Decision(2, "operator asked for level 2")
    policy.moved(0.1, 2)
    assert policy.observe(signals(0.2, level=2)) is None


@pytest.mark.parametrize("level", [-1, 4, 1.0, True, "2", None])
def test_refuses_what_is_no_level_and_keeps_the_last(level: object) -> None:
    policy = ManualPolicy(PolicyOptions(), top_level=3)
    policy.set_level(1)
    with pytest.raises(ValueError, match="give 0 to 3"):
        policy.set_level(level)  # type: ignore[arg-type]
    assert policy.wanted == 1


def test_max_level_narrows_the_range() -> None:
    policy = ManualPolicy(PolicyOptions(max_level=2), top_level=3)
    policy.set_level(2)
    with pytest.raises(ValueError, match="give 0 to 2"):
        policy.set_level(3)
    assert policy.describe() == {"name": "manual", "max_level": 2, "wanted": 2}
