"""On a GPU: candidates go through the layers in batches, and variants are the GPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_morph.bundle.bundle import Bundle
from sglang_morph.precision.quantizers.layer import AsTheyAre
from sglang_morph.profiling.model import LayeredModel
from sglang_morph.profiling.profile import Calibration, profile
from sglang_morph.profiling.ranking import Search
from sglang_morph.profiling.text import load_text
from tests.sglang_morph.profiling.conftest import save_llama

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("variants", [("nested_fp8", "int4"), ("int8",)])
@pytest.mark.parametrize("order", ["lis", "kl"])
def test_profile(tmp_path: Path, variants: tuple[str, ...], order: str) -> None:
    folder = save_llama(tmp_path / "model", hidden_size=256, intermediate_size=512)
    model = LayeredModel.load(folder, "cuda")
    assert model.dtype == torch.bfloat16
    done = profile(
        folder,
        model,
        load_text(),
        variants,
        AsTheyAre(),
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
