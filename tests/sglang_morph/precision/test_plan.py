from __future__ import annotations

import dataclasses
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_backends import base
from sglang_morph.precision import names
from sglang_morph.precision.plan import (
    ModelIdentity,
    PlanError,
    PlanStep,
    PrecisionPlan,
    default_plan,
)

STEADY = settings(deadline=None, derandomize=True)
SMOLLM2 = ModelIdentity("LlamaForCausalLM", 30, 576, 1536, 9, 3, 49152)


def identity(layers: int) -> ModelIdentity:
    return dataclasses.replace(SMOLLM2, num_layers=layers)


@st.composite
def plans(draw: st.DrawFn) -> PrecisionPlan:
    """Any valid plan: steps of several layers interleaved, any rising levels."""
    layers = draw(st.integers(1, 8))
    paths = st.sampled_from([(), ("int8",), ("int4",), ("int8", "int4")])
    queues = [list(draw(paths)) for _ in range(layers)]
    steps = []
    while open_layers := [i for i, queue in enumerate(queues) if queue]:
        layer = draw(st.sampled_from(open_layers))
        steps.append(PlanStep(layer, queues[layer].pop(0)))
    inner = draw(st.sets(st.integers(1, len(steps) - 1))) if len(steps) > 1 else set()
    levels = tuple(sorted(inner | {0, len(steps)}))
    return PrecisionPlan(identity(layers), tuple(steps), levels, draw(st.text(max_size=20)))


@STEADY
@given(plans())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, plan: PrecisionPlan) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    loaded = PrecisionPlan.load(path)
    assert loaded == plan
    assert loaded.digest == plan.digest


@STEADY
@given(plans())
def test_levels_only_shrink_layers(plan: PrecisionPlan) -> None:
    states = [plan.layer_variants(level) for level in range(plan.max_level + 1)]
    assert set(states[0]) == {"full"}
    for before, after in pairwise(states):
        assert before != after
        for old, new in zip(before, after, strict=True):
            assert names.NOMINAL_BITS[new] <= names.NOMINAL_BITS[old]


@STEADY
@given(
    layers=st.integers(1, 100),
    variants=st.sampled_from([(), ("int8",), ("int4",), ("int8", "int4")]),
    order=st.sampled_from(["front", "back"]),
)
def test_default_plan_ends_with_every_layer_at_the_last_variant(
    layers: int, variants: tuple[str, ...], order: str
) -> None:
    plan = default_plan(identity(layers), variants, order)
    last = variants[-1] if variants else "full"
    assert plan.layer_variants(plan.max_level) == (last,) * layers
    assert plan.variants == variants


def test_default_plan_of_smollm2() -> None:
    plan = default_plan(SMOLLM2, ("int8", "int4"))
    assert plan.levels == (0, 8, 15, 30, 60)
    assert plan.steps[0] == PlanStep(0, "int8")
    assert plan.steps[59] == PlanStep(29, "int4")
    back = default_plan(SMOLLM2, ("int8", "int4"), "back")
    assert back.steps[0] == PlanStep(29, "int8")
    assert back.levels == plan.levels
    assert back.digest != plan.digest


def test_default_plans_that_make_no_sense() -> None:
    with pytest.raises(PlanError, match=r"'middle'.*front or back"):
        default_plan(SMOLLM2, ("int8",), "middle")
    with pytest.raises(PlanError, match=r"step 30 .*no larger"):
        default_plan(SMOLLM2, ("int4", "int8"))


def test_digests_are_stable() -> None:
    """They are kept in logs and compared later, so their form must not drift."""
    assert SMOLLM2.digest == ("a7d27eab50e0b42fc3800e2639cf296e6bdc9d030429ccad0567bdad060da4e7")


def test_identity_from_config() -> None:
    config = SimpleNamespace(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
    )
    assert ModelIdentity.from_hf_config(config) == SMOLLM2
    del config.num_key_value_heads
    assert ModelIdentity.from_hf_config(config).num_kv_heads == 9
    del config.intermediate_size
    with pytest.raises(PlanError, match="intermediate_size"):
        ModelIdentity.from_hf_config(config)
    config.architectures = None
    with pytest.raises(PlanError, match="architectures"):
        ModelIdentity.from_hf_config(config)


def test_another_model_is_refused() -> None:
    plan = default_plan(SMOLLM2, ("int8",))
    plan.check_model(SMOLLM2)
    other = dataclasses.replace(SMOLLM2, hidden_size=960, vocab_size=1000)
    with pytest.raises(PlanError) as caught:
        plan.check_model(other)
    message = str(caught.value)
    assert "hidden_size is 576 in the plan and 960 in the model" in message
    assert "vocab_size" in message
    assert "num_layers" not in message
    assert "\n" not in message


DOCUMENT = orjson.loads(orjson.dumps(default_plan(identity(2), ("int8", "int4"))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema version 2"),
        ({"levels": []}, "must start with 0"),
        ({"levels": [1, 4]}, "must start with 0"),
        ({"levels": [0, 3]}, "must apply all 4 steps"),
        ({"levels": [0, 2, 2, 4]}, "rise strictly"),
        ({"levels": "all"}, r"\$\.levels"),
        ({"model": {}}, "architecture"),
        ({"steps": [{"layer": 2, "variant": "int8"}], "levels": [0, 1]}, "layers 0 to 1"),
        ({"steps": [{"layer": -1, "variant": "int8"}], "levels": [0, 1]}, "layers 0 to 1"),
        ({"steps": [{"layer": 0, "variant": "fp3"}], "levels": [0, 1]}, "'fp3'.*int4, int8"),
        ({"steps": [{"layer": 0, "variant": "full"}], "levels": [0, 1]}, "unknown variant"),
        ({"steps": [{"layer": 0, "variant": "int8"}] * 2, "levels": [0, 2]}, "no larger"),
        (
            {
                "steps": [{"layer": 0, "variant": "int4"}, {"layer": 0, "variant": "int8"}],
                "levels": [0, 2],
            },
            "step 1 .*no larger",
        ),
    ],
)
def test_invalid_plans_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(orjson.dumps(DOCUMENT | change))
    with pytest.raises(PlanError, match=message) as caught:
        PrecisionPlan.load(path)
    assert "plan.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_plans_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="can't be read"):
        PrecisionPlan.load(tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(PlanError, match="not JSON"):
        PrecisionPlan.load(broken)
    broken.write_text("[]")
    with pytest.raises(PlanError, match=r"broken\.json"):
        PrecisionPlan.load(broken)


def test_the_name_of_full_is_the_backends() -> None:
    assert names.FULL == base.FULL


def test_plans_load_before_torch_and_sglang() -> None:
    program = (
        "import sys, sglang_morph.precision.plan, sglang_morph.precision.variants.registry; "
        "sys.exit(bool({'torch', 'sglang'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
