"""On a GPU: candidates go through the layers in batches, and variants are the GPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_morph.bundle.bundle import Bundle
from sglang_morph.precision.quantizers.gptq import choose_codes
from sglang_morph.precision.quantizers.layer import LayerWeights, variants_for
from sglang_morph.precision.quantizers.registry import create_layer_quantizer
from sglang_morph.precision.quantizers.rtn import RoundToNearest
from sglang_morph.precision.quantizers.statistics import InputStatistics, statistics_of
from sglang_morph.precision.variants.marlin_build import is_built
from sglang_morph.precision.variants.registry import create_variant
from sglang_morph.profiling.model import LayeredModel
from sglang_morph.profiling.profile import Calibration, profile
from sglang_morph.profiling.ranking import Search
from sglang_morph.profiling.text import load_text
from tests.sglang_morph.profiling.conftest import save_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize(
    ("variants", "quantizer"),
    [
        (("nested_fp8", "int4"), "awq"),
        (("nested_fp8", "int4"), "gptq"),
        (("int8",), "rtn"),
    ],
)
@pytest.mark.parametrize("order", ["lis", "kl"])
def test_profile(tmp_path: Path, variants: tuple[str, ...], quantizer: str, order: str) -> None:
    if "int4" in variants and not is_built(torch.bfloat16):
        pytest.skip("Marlin, which packs int4, is not compiled here; that takes minutes")
    folder = save_llama(tmp_path / "model", hidden_size=256, intermediate_size=512)
    model = LayeredModel.load(folder, "cuda")
    assert model.dtype == torch.bfloat16
    done = profile(
        folder,
        model,
        load_text(),
        variants,
        create_layer_quantizer(quantizer),
        Calibration(2, 32),
        Search(order, batch=4),
        tmp_path / "bundle",
    )
    assert done.ranking is not None
    assert all(sorted(layers) == [0, 1, 2, 3] for layers in done.ranking.orders().values())
    bundle = Bundle.open(tmp_path / "bundle")
    bundle.check_files()
    bundle.check_layouts()
    assert bundle.manifest.device == "cuda"


@pytest.mark.parametrize(("quantizer", "most"), [("awq", 1.05), ("gptq", 0.95)])
def test_a_layer_in_int4(tmp_path: Path, quantizer: str, most: float) -> None:
    """Against rounding to nearest, before packing. AWQ has nothing to gain from random inputs."""
    folder = save_llama(tmp_path / "model", hidden_size=256, intermediate_size=512)
    model = LayeredModel.load(folder, "cuda")
    tokens = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0))
    hidden = model.embed(tokens)
    expected, read = model.capture(0, hidden)
    layer = LayerWeights(model.weights(0), model.norms(0), model.biased(0))
    variants = variants_for("int4", "cuda", layer.linears)
    errors = {}
    for name in (quantizer, "rtn"):
        adapted = create_layer_quantizer(name).adapt(layer, variants, statistics_of(read))
        with model.replaced(0, adapted.rounded(variants)):
            errors[name] = float((model.layer(0, hidden) - expected).float().norm())
    assert torch.equal(model.layer(0, hidden), expected)
    assert 0 < errors[quantizer] < most * errors["rtn"]


@pytest.mark.parametrize("columns", [512, 4096])
def test_gptq_beats_rounding_to_nearest(columns: int) -> None:
    generator = torch.Generator("cuda").manual_seed(columns)

    def gaussian(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    x = gaussian(512, columns // 8) @ gaussian(columns // 8, columns) + gaussian(512, columns)
    inputs = InputStatistics.of(x.to(torch.bfloat16))
    weight = (0.02 * gaussian(256, columns)).to(torch.bfloat16)
    variant = create_variant("int4", "cuda", RoundToNearest())
    found = choose_codes(weight, variant, inputs.gram)
    again = choose_codes(weight, variant, inputs.gram)
    assert torch.equal(found.codes, again.codes)
    ours, nearest = (
        inputs.output_error(rounded - weight.float())
        for rounded in (found.dequantize(), variant.reference(weight))
    )
    assert ours < 0.7 * nearest
