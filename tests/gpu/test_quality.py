"""The quality report's measurements with a model on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_morph.precision.quantizers.layer import AsTheyAre
from sglang_morph.profiling.model import LayeredModel
from sglang_morph.profiling.variants import make_variants
from sglang_morph.quality.generation import continue_greedily
from sglang_morph.quality.lowered import LoweredModel
from sglang_morph.quality.on_text import TextMeter
from sglang_morph.quality.variant_set import VariantSet
from tests.sglang_morph.quality.tiny_llama import save_tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_fp8_is_close_to_full_precision_but_not_equal(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    model = LayeredModel.load(tmp_path, "cuda")
    tokens = torch.randint(2, 320, (2, 32), generator=torch.Generator().manual_seed(0))
    variants = VariantSet(model, make_variants(model, ["fp8"], AsTheyAre(), tokens))
    lowered = LoweredModel(model, variants.weights)
    meter = TextMeter(lowered, tokens.tolist())
    assert meter.measure(lowered.full).kl.max() == 0
    low = ["fp8"] * 4
    assert 0 < meter.measure(low).kl.mean() < 1
    found = continue_greedily(lowered, [[5, 6, 7], [8]], [4, 4], low, low)
    assert [len(one) for one in found] == [4, 4]
