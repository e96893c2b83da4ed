"""Policies by name."""

from __future__ import annotations

import pytest

from sglang_morph.controller import registry
from sglang_morph.controller.manual import ManualPolicy
from sglang_morph.controller.registry import create_policy, register_policy
from sglang_morph.controller.slo import SloPolicy
from sglang_morph.controller.threshold import ThresholdPolicy
from sglang_morph.controller.two_mode import TwoModePolicy
from sglang_morph.options import MorphOptions


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("threshold", ThresholdPolicy),
        ("manual", ManualPolicy),
        ("two_mode", TwoModePolicy),
        ("slo", SloPolicy),
    ],
)
def test_creates_by_name(name: str, kind: type) -> None:
    policy = create_policy(MorphOptions(policy=name), top_level=2)
    assert type(policy) is kind
    assert policy.describe()["name"] == name
    assert policy.describe()["max_level"] == 2


def test_the_default_policy_and_its_default_options_are_valid() -> None:
    assert create_policy(MorphOptions(), top_level=4).name == "threshold"


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(
        ValueError, match="unknown policy 'oracle': give one of manual, slo, threshold, two_mode"
    ):
        create_policy(MorphOptions(policy="oracle"), top_level=2)


def test_a_third_party_registers_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "POLICIES", dict(registry.POLICIES))
    register_policy("cautious", ManualPolicy)
    assert type(create_policy(MorphOptions(policy="cautious"), 1)) is ManualPolicy
    with pytest.raises(ValueError, match="registered already"):
        register_policy("cautious", ManualPolicy)
