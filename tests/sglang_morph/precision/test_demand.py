"""What a request may ask of precision, and the level that allows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_morph.precision.demand import DemandError, floor_level, min_precision
from sglang_morph.precision.names import NOMINAL_BITS
from sglang_morph.precision.plan import ModelIdentity, default_plan


@pytest.mark.parametrize("wanted", list(NOMINAL_BITS))
def test_every_variant_can_be_asked_for(wanted: str) -> None:
    assert min_precision({"min_precision": wanted}) == wanted


@pytest.mark.parametrize("demand", [None, {}, {"min_precision": None}])
def test_nothing_may_be_asked(demand: Any) -> None:
    assert min_precision(demand) is None


@pytest.mark.parametrize(
    ("demand", "field", "problem"),
    [
        ("full", "morph", "must be an object"),
        (["full"], "morph", "must be an object"),
        ({"min_precision": "int7"}, "morph.min_precision", "'int7'; give one of full, nested_fp8"),
        ({"min_precision": 16}, "morph.min_precision", "is 16"),
        ({"min_precision": ["full"]}, "morph.min_precision", "give one of"),
        ({"min_precison": "full"}, "morph.min_precison", "is unknown; the field is 'min_prec"),
    ],
)
def test_a_bad_demand_names_its_field(demand: Any, field: str, problem: str) -> None:
    with pytest.raises(DemandError, match=problem) as caught:
        min_precision(demand)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


@pytest.mark.parametrize(
    ("wanted", "level"), [("full", 0), ("int8", 3), ("fp8", 3), ("nested_fp8", 3), ("int4", 4)]
)
def test_the_floor_is_the_highest_level_without_a_layer_below(wanted: str, level: int) -> None:
    config = SimpleNamespace(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=8,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
    )
    plan = default_plan(ModelIdentity.from_hf_config(config), ["int8", "int4"])
    levels = [plan.layer_variants(k) for k in range(plan.max_level + 1)]
    assert floor_level(levels, wanted) == level
