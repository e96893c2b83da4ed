from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_morph.precision.names import FULL, MORPHABLE_LINEARS
from sglang_morph.precision.plan import ModelIdentity, plan_in_order
from sglang_morph.profiling.model import FUSED, LayeredModel
from sglang_morph.quality.lowered import LoweredModel
from sglang_morph.quality.variant_set import VariantSet


def served(model: LayeredModel, layer: int, path: str) -> torch.Tensor:
    """The weight that the model computes with now."""
    parts = [
        model.hf.model.layers[layer].get_submodule(name).weight.data
        for name in FUSED.get(path, (path,))
    ]
    return torch.cat(parts)


def assert_at(lowered: LoweredModel, set_: VariantSet, wanted: Sequence[str]) -> None:
    for layer, variant in enumerate(wanted):
        expected = lowered.model.weights(layer) if variant == FULL else set_.weights(layer, variant)
        for path in MORPHABLE_LINEARS:
            found = served(lowered.model, layer, path)
            assert torch.equal(found, expected[path].float()), (layer, variant, path)


def test_every_level_of_a_plan_has_the_weights_of_its_variants(
    lowered: LoweredModel, variants: VariantSet
) -> None:
    identity = ModelIdentity.from_hf_config(lowered.model.config)
    plan = plan_in_order(identity, {"int8": [2, 0, 3, 1], "int4": [1, 3, 0, 2]}, "test")
    for level in (1, 3, 0, 2, len(plan.levels) - 1, 0):
        lowered.lower(plan.layer_variants(level))
        assert_at(lowered, variants, plan.layer_variants(level))
    assert lowered.variants == lowered.full


def test_freed_bytes_add_up_over_layers(variants: VariantSet, model: LayeredModel) -> None:
    one = variants.freed_bytes(["fp8", FULL, FULL, FULL])
    # A byte a weight less, and 4 bytes a row for scales.
    weights = list(model.weights(0).values())
    assert one == sum(w.numel() - 4 * w.shape[0] for w in weights)
    assert variants.freed_bytes(["fp8"] * 4) == 4 * one
    assert variants.freed_bytes(["int4", FULL, FULL, FULL]) > one
    assert variants.freed_bytes([FULL] * 4) == 0


def test_inputs_of_fp8_layers_are_rounded_and_of_others_not(lowered: LoweredModel) -> None:
    model = lowered.model
    hidden = model.embed(torch.arange(2, 18).unsqueeze(0))
    lowered.lower(["fp8", "nested_fp8", "int8", FULL])
    for layer, rounded in enumerate((True, True, False, False)):
        _, inputs = model.capture(layer, hidden)
        for path, x in inputs.items():
            # Codes of E4M3 are few: with a scale of their own, a token has up to 2 * 127 values.
            grid = x / x.abs().amax(dim=-1, keepdim=True) * 448
            nearest = grid.to(torch.float8_e4m3fn).float()
            assert torch.allclose(grid, nearest, rtol=1e-5) is rounded, (layer, path)
    lowered.lower(lowered.full)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.hf.modules())
